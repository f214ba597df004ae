"""A decode engine of two symmetric ranks takes KV over: `python examples/symmetric_ranks.py`.

Each rank runs the same scheduler, holds its own part of the KV heads, has its own receivers, and acts only on
what all ranks agree on. One hand-off fails on rank 1 alone: both ranks give it up, for the same reason.
The prefill rank that a rank faces lies in the same process here, for brevity.
"""

import queue
import sys
import tempfile
from subprocess import PIPE, Popen

import numpy as np
from torch.distributed import FileStore

from segue.kv import (
    Agreement,
    KVConfig,
    KVManager,
    KVPoll,
    KVShape,
    Role,
    RoomKey,
    Span,
    TorchGroup,
    TransferFailed,
    pool_of,
)

RANKS, LAYERS, SIZE, HEADS, DIM = 2, 4, 16, 4, 64
ROOMS, TOKENS, FAILS = range(1, 7), 64, 5
COUNT = TOKENS // SIZE  # pages of a prompt
SHAPE = KVShape(layers=LAYERS, kv_heads=HEADS // RANKS, k_dim=DIM, v_dim=DIM, dtype="float16", item_bytes=2)


class Half:
    """One rank of one engine: its part of the pool, and its manager."""

    def __init__(self, role, rank, kv):
        spec, memory = pool_of(SHAPE, [(layer[0], layer[1]) for layer in kv])
        self.changes = queue.SimpleQueue()
        # Decode's rank must meet the rank that has the same heads: the name says which they are.
        model = f"demo, heads of rank {rank} of {RANKS}"
        config = KVConfig(role=role, model=model, spec=spec, transports=["tcp"])
        self.me, self.manager = config.me, KVManager(config, memory, on_change=self.changes.put)
        self.address = self.manager.start()


def run(rank, store):
    group = TorchGroup(FileStore(store, RANKS), "decode", rank, RANKS, timeout_s=10)
    agreement = Agreement(group)
    computed = np.random.rand(LAYERS, 2, len(ROOMS) * COUNT, SIZE, HEADS // RANKS, DIM).astype(np.float16)
    received = np.zeros_like(computed)
    prefill, decode = Half(Role.PREFILL, rank, computed), Half(Role.DECODE, rank, received)
    decode.manager.add_peer(prefill.me, *prefill.address)

    # Requests may reach the ranks in any order: nothing below depends on it.
    rooms = list(ROOMS) if rank == 0 else list(reversed(ROOMS))
    senders = {room: prefill.manager.expect(RoomKey(room), TOKENS, budget_s=60) for room in rooms}
    receivers = {
        room: decode.manager.receive(RoomKey(room), prefill.me, TOKENS, budget_s=60) for room in rooms
    }
    pages = {room: range(COUNT * (room - 1), COUNT * room) for room in rooms}

    published, running, failed, free = set(), [], {}, set()
    while len(running) + len(free) < len(ROOMS):
        # One step of the scheduler. Every rank polls in every step, whatever it holds.
        for room, agreed in agreement.poll(receivers).items():
            if agreed.phase is KVPoll.WAITING_FOR_INPUT and room not in published:
                receivers[room].publish(pages[room])
                published.add(room)
            elif agreed.phase is KVPoll.SUCCESS:
                running.append(room)
                receivers.pop(room).clear()
            elif agreed.phase is KVPoll.FAILED:  # here, or on the other rank
                failed[room] = (receivers.pop(room), agreed.error)
                failed[room][0].abort()
        # The pages of a failed one are the engine's again when both ranks have them back.
        for room in agreement.released({r: handle for r, (handle, _) in failed.items() if r not in free}):
            failed[room][0].clear()
            free.add(room)
        # Here the forward of the running batch would be; the other engine sends what it was told to.
        for room, sender in list(senders.items()):
            if sender.poll() is KVPoll.WAITING_FOR_INPUT:
                if (room, rank) == (FAILS, 1):
                    sender.abort(TransferFailed("the cable of rank 1 is broken", room=room).info)
                sender.send(Span(0, TOKENS), pages[room], metadata=b"")
                del senders[room]

    equal = all(np.array_equal(received[:, :, p], computed[:, :, p]) for p in map(pages.get, running))
    print(f"rank {rank}: running {sorted(running)}, KV {'equal' if equal else 'DIFFERENT'};", end=" ")
    print(*(f"room {room} has failed: {error.text}" for room, (_, error) in failed.items()))
    for half in (decode, prefill):
        half.manager.close()
    group.close()


if len(sys.argv) > 1:
    run(int(sys.argv[1]), sys.argv[2])
else:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__]
        ranks = [
            Popen([*command, str(rank), f"{folder}/store"], stdout=PIPE, text=True) for rank in range(RANKS)
        ]
        for rank in ranks:
            print(rank.communicate()[0], end="")
    sys.exit(max(rank.returncode for rank in ranks))
