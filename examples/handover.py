"""Hand the KV of 1,000 tokens from one process to another: `python examples/handover.py [shm|tcp]`."""

import queue
import subprocess
import sys

import torch

from segue.conn.config import KVConfig
from segue.conn.manager import KVManager
from segue.core.types import KVPoll, Role, Span, TransferId, new_incarnation, new_room
from segue.handoff.messages import Metadata
from segue.layout.spec import KVShape, PoolSpec
from segue.transport.memory import allocate

TOKENS, PAGES = 1000, range(125)
SHAPE = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="float16", item_bytes=2)
SPEC = PoolSpec(shape=SHAPE, page_tokens=8, pages=len(PAGES), layer_count=30, head_count=3)
COMPUTED = (torch.arange(SPEC.nbytes // 2) % 2039).half()  # what a model would have computed
changes: queue.Queue = queue.Queue()


def start(role, me, transport):
    memory = allocate(SPEC.nbytes)
    config = KVConfig(role=role, model="demo", spec=SPEC, transports=[transport], incarnation=me)
    manager = KVManager(config, memory, on_change=changes.put)
    return manager, manager.start()[1], torch.frombuffer(memory.buffer, dtype=torch.float16)


def wait(handle, phase):
    while handle.poll() is not phase:
        assert handle.poll() is not KVPoll.FAILED, handle.error
        changes.get(timeout=10)


if len(sys.argv) > 2:  # the child process is prefill
    transfer = TransferId(int(sys.argv[2]), 0, *sys.argv[3:])
    manager, port, pool = start(Role.PREFILL, transfer.prefill, sys.argv[1])
    pool.copy_(COMPUTED)
    sender = manager.sender(transfer)
    sender.init(TOKENS, budget_s=10)
    print(port, flush=True)
    wait(sender, KVPoll.WAITING_FOR_INPUT)  # decode has said where to write
    sender.send(Span(0, TOKENS), PAGES, Metadata(transfer=transfer, prompt_tokens=TOKENS, first_token=42))
    wait(sender, KVPoll.SUCCESS)
else:  # this one is decode
    transport = sys.argv[1] if len(sys.argv) > 1 else "shm"
    transfer = TransferId(new_room(), 0, new_incarnation(), new_incarnation())
    manager, _, pool = start(Role.DECODE, transfer.decode, transport)
    command = [sys.executable, __file__, transport, str(transfer.room), transfer.prefill, transfer.decode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        manager.add_peer(transfer.prefill, "127.0.0.1", int(child.stdout.readline()))
        receiver = manager.receiver(transfer)
        receiver.init(TOKENS, budget_s=10)
        wait(receiver, KVPoll.WAITING_FOR_INPUT)
        receiver.send_metadata(PAGES)
        wait(receiver, KVPoll.SUCCESS)
    same = torch.equal(pool, COMPUTED)  # K and V of all layers, heads and tokens
    print(f"first token {receiver.metadata.first_token}, KV {'equal' if same else 'DIFFERENT'}")
manager.close()
