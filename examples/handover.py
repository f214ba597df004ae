"""Hand the KV of 1,000 tokens from one process to another: `python examples/handover.py [shm|tcp]`."""

import queue
import sys
from subprocess import PIPE, Popen

import numpy as np

from segue import kv

TOKENS, PAGES = 1000, range(125)
SHAPE = kv.KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="float16", item_bytes=2)
SPEC = kv.PoolSpec(shape=SHAPE, page_tokens=8, pages=len(PAGES), layer_count=30, head_count=3)
COMPUTED = (np.arange(SPEC.nbytes // 2) % 2039).astype(np.float16)  # what a model would have computed

transport, *told = sys.argv[1:] or ["shm"]
room, *names = told or (str(kv.new_room()), kv.new_incarnation(), kv.new_incarnation())
prefill, decode = (kv.LeaderId(kv.Incarnation(name)) for name in names)
transfer = kv.TransferId(int(room), 0, prefill, decode)
role, me = (kv.Role.PREFILL, prefill) if told else (kv.Role.DECODE, decode)
memory, changes = kv.allocate(SPEC.nbytes), queue.Queue()
pool = np.frombuffer(memory.buffer, dtype=np.float16)
config = kv.KVConfig(role=role, model="demo", spec=SPEC, transports=[transport], me=me)
manager = kv.KVManager(config, memory, on_change=changes.put)
_host, port = manager.start()
handle = manager.sender(transfer) if role is kv.Role.PREFILL else manager.receiver(transfer)
handle.init(TOKENS, budget_s=60)


def wait(handle, phase):
    while handle.poll() is not phase:
        assert handle.poll() is not kv.KVPoll.FAILED, handle.error
        changes.get(timeout=60)


if role is kv.Role.PREFILL:  # the child: decode starts this file again
    pool[:] = COMPUTED
    print(port, flush=True)
    wait(handle, kv.KVPoll.WAITING_FOR_INPUT)  # decode has said where to write
    handle.send(
        kv.Span(0, TOKENS), PAGES, kv.Metadata(transfer=transfer, prompt_tokens=TOKENS, first_token=42)
    )
    wait(handle, kv.KVPoll.SUCCESS)
    handle.clear()
    sys.stdin.read()  # decode ends first, so that it does not dial a peer that has left
    manager.close()
else:
    command = [sys.executable, __file__, transport, room, *names]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        manager.add_peer(prefill, "127.0.0.1", int(child.stdout.readline()))
        wait(handle, kv.KVPoll.WAITING_FOR_INPUT)
        handle.send_metadata(PAGES)
        wait(handle, kv.KVPoll.SUCCESS)
        found = "equal" if np.array_equal(pool, COMPUTED) else "DIFFERENT"
        print(f"first token {handle.metadata.first_token}, KV {found}")
        handle.clear()
        manager.close()
