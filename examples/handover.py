"""Hand the KV of 1,000 tokens from one process to another: `python examples/handover.py [shm|tcp]`."""

import queue
import sys
from subprocess import PIPE, Popen

import torch

from segue.kv import (
    Incarnation,
    KVConfig,
    KVManager,
    KVPoll,
    KVShape,
    LeaderId,
    Metadata,
    PoolSpec,
    Role,
    Span,
    TransferId,
    allocate,
    new_incarnation,
    new_room,
)

TOKENS, PAGES = 1000, range(125)
SHAPE = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="float16", item_bytes=2)
SPEC = PoolSpec(shape=SHAPE, page_tokens=8, pages=len(PAGES), layer_count=30, head_count=3)
COMPUTED = (torch.arange(SPEC.nbytes // 2) % 2039).half()  # what a model would have computed

transport, *told = sys.argv[1:] or ["shm"]
room, *names = told or (str(new_room()), new_incarnation(), new_incarnation())
prefill, decode = (LeaderId(Incarnation(name)) for name in names)
transfer = TransferId(int(room), 0, prefill, decode)
role, me = (Role.PREFILL, prefill) if told else (Role.DECODE, decode)
memory, changes = allocate(SPEC.nbytes), queue.Queue()
pool = torch.frombuffer(memory.buffer, dtype=torch.float16)
config = KVConfig(role=role, model="demo", spec=SPEC, transports=[transport], me=me)
manager = KVManager(config, memory, on_change=changes.put)
_host, port = manager.start()
handle = manager.sender(transfer) if role is Role.PREFILL else manager.receiver(transfer)
handle.init(TOKENS, budget_s=60)


def wait(handle, phase):
    while handle.poll() is not phase:
        assert handle.poll() is not KVPoll.FAILED, handle.error
        changes.get(timeout=60)


if role is Role.PREFILL:  # the child: decode starts this file again
    pool.copy_(COMPUTED)
    print(port, flush=True)
    wait(handle, KVPoll.WAITING_FOR_INPUT)  # decode has said where to write
    handle.send(Span(0, TOKENS), PAGES, Metadata(transfer=transfer, prompt_tokens=TOKENS, first_token=42))
    wait(handle, KVPoll.SUCCESS)
    handle.clear()
    manager.close()
else:
    with Popen([sys.executable, __file__, transport, room, *names], stdout=PIPE, text=True) as child:
        manager.add_peer(prefill, "127.0.0.1", int(child.stdout.readline()))
        wait(handle, KVPoll.WAITING_FOR_INPUT)
        handle.send_metadata(PAGES)
        wait(handle, KVPoll.SUCCESS)
        kv = "equal" if torch.equal(pool, COMPUTED) else "DIFFERENT"
        print(f"first token {handle.metadata.first_token}, KV {kv}")
        handle.clear()
        manager.close()
