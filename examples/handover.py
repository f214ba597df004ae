"""Hand the KV of 1,000 tokens from one process to another: `python examples/handover.py [shm|tcp]`."""

import queue
import subprocess
import sys

import numpy as np

from segue.conn.config import KVConfig
from segue.conn.manager import KVManager
from segue.core.types import KVPoll, Role, Span, TransferId, new_incarnation, new_room
from segue.handoff.messages import Metadata
from segue.layout.spec import KVShape, PoolSpec
from segue.transport.memory import allocate

TOKENS, PAGES = 1000, 63
SHAPE = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="float16", item_bytes=2)
SPEC = PoolSpec(shape=SHAPE, page_tokens=16, pages=PAGES, layer_count=30, head_count=3)
changes: queue.Queue = queue.Queue()


def start(role, me, transport):
    memory = allocate(SPEC.nbytes)
    config = KVConfig(role=role, model="demo", spec=SPEC, transports=[transport], incarnation=me)
    manager = KVManager(config, memory, on_change=changes.put)
    return manager, manager.start(), np.frombuffer(memory.buffer, dtype=np.uint16)


def wait(handle, phase):
    while handle.poll() is not phase:
        assert handle.poll() is not KVPoll.FAILED, handle.error
        changes.get(timeout=10)


def prefill(transfer, transport):
    manager, (_host, port), pool = start(Role.PREFILL, transfer.prefill, transport)
    pool[:] = np.arange(pool.size) % 65521  # what a model would have computed
    sender = manager.sender(transfer)
    sender.init(TOKENS, budget_s=10)
    print(port, flush=True)
    wait(sender, KVPoll.WAITING_FOR_INPUT)  # decode has said where to write
    metadata = Metadata(transfer=transfer, prompt_tokens=TOKENS, first_token=42)
    sender.send(Span(0, TOKENS), range(PAGES), metadata)
    wait(sender, KVPoll.SUCCESS)
    manager.close()


def decode(transfer, transport, port):
    manager, _address, pool = start(Role.DECODE, transfer.decode, transport)
    manager.add_peer(transfer.prefill, "127.0.0.1", port)
    receiver = manager.receiver(transfer)
    receiver.init(TOKENS, budget_s=10)
    wait(receiver, KVPoll.WAITING_FOR_INPUT)
    receiver.send_metadata(pages=range(PAGES))
    wait(receiver, KVPoll.SUCCESS)
    equal = all(pool[at] == at % 65521 for at in range(1000 * 192))  # K of the first layer
    print(f"first token {receiver.metadata.first_token}, KV {'equal' if equal else 'DIFFERENT'}")
    manager.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        prefill(TransferId(int(sys.argv[2]), 0, *sys.argv[3:]), sys.argv[1])
    else:
        transport = sys.argv[1] if len(sys.argv) > 1 else "shm"
        room, me, peer = new_room(), new_incarnation(), new_incarnation()
        command = [sys.executable, __file__, transport, str(room), peer, me]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            decode(TransferId(room, 0, peer, me), transport, int(child.stdout.readline()))
