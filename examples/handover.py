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
key, claim = kv.RoomKey(int(room)), b"a digest of the prompt"
role, me = (kv.Role.PREFILL, prefill) if told else (kv.Role.DECODE, decode)
memory, changes = kv.allocate(SPEC.nbytes), queue.Queue()
pool = np.frombuffer(memory.buffer, dtype=np.float16)
config = kv.KVConfig(role=role, model="demo", spec=SPEC, transports=[transport], me=me)
manager = kv.KVManager(config, memory, on_change=changes.put)
_host, port = manager.start()


def wait(handle, phase):
    while handle.poll() is not phase:
        assert handle.poll() is not kv.KVPoll.FAILED, handle.error
        changes.get(timeout=60)


if role is kv.Role.PREFILL:  # the child: decode starts this file again
    pool[:] = COMPUTED
    print(port, flush=True)
    handle = manager.expect(key, TOKENS, budget_s=60, claim=claim)
    handle.send(kv.Span(0, TOKENS), PAGES, metadata=b"first token 42")  # it leaves once decode says where to
    wait(handle, kv.KVPoll.SUCCESS)
    handle.clear()
    sys.stdin.read()  # decode ends first, so that it does not dial a peer that has left
    manager.close()
else:
    command = [sys.executable, __file__, transport, room, *names]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        manager.add_peer(prefill, "127.0.0.1", int(child.stdout.readline()))
        handle = manager.receive(key, prefill, TOKENS, budget_s=60, claim=claim)
        wait(handle, kv.KVPoll.WAITING_FOR_INPUT)
        handle.publish(PAGES)
        wait(handle, kv.KVPoll.SUCCESS)
        found = "equal" if np.array_equal(pool, COMPUTED) else "DIFFERENT"
        print(f"{handle.metadata.decode()}, KV {found}")
        handle.clear()
        manager.close()
