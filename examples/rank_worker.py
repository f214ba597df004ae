"""A prefill engine of two ranks, the second in a process of its own: `python examples/rank_worker.py`.

Each rank holds half of the KV heads in its own memory. The leader's process sends for both; decode has all
heads in one rank, here in the leader's process, for brevity.
"""

import queue
import sys
import threading
from subprocess import PIPE, Popen

import numpy as np

from segue import kv

TOKENS, PAGES, SIZE, HEADS = 64, range(8), 8, 2
SHAPE = kv.KVShape(layers=4, kv_heads=2 * HEADS, k_dim=64, v_dim=64, dtype="float16", item_bytes=2)


def computed(rank):
    """The KV that the model would have computed on this rank: `[layer, K or V, page, token, head, item]`."""
    shape = (SHAPE.layers, 2, len(PAGES), SIZE, HEADS, SHAPE.k_dim)
    return np.random.default_rng(rank).random(shape).astype(np.float16)


def prefill_rank(me, rank):
    """The config of prefill as this rank has it, and its memory."""
    layers = [(layer[0], layer[1]) for layer in computed(rank)]
    spec, memory = kv.pool_of(SHAPE, layers, coord=kv.RankCoord(tp=rank), head_start=rank * HEADS)
    return kv.KVConfig(role=kv.Role.PREFILL, model="demo", spec=spec, me=me, transports=["tcp"]), memory


def worker(me, invitation):
    """The process of rank 1. Its engine would compute on this thread."""
    config, memory = prefill_rank(me, rank=1)
    rank = kv.local_rank(config, memory, kv.HOST, index=1)
    link = kv.RankLink(kv.connect_rank(invitation, rank=1, within_s=60), "the leader", limits=config.limits)
    gone = threading.Event()
    serving = kv.RankWorker(rank, link, leader_gone=lambda _: gone.set())
    serving.start()
    gone.wait()
    serving.close()


def leader():
    me, listener = kv.LeaderId(kv.new_incarnation()), kv.RankListener()
    with Popen([sys.executable, __file__, me.incarnation], stdin=PIPE, text=True) as child:
        print(listener.invitation.hex(), file=child.stdin, flush=True)  # as the engine's own group would
        config, memory = prefill_rank(me, rank=0)
        sock = listener.accept([1], within_s=60)[1]
        listener.close()
        link = kv.RankLink(sock, "rank 1", limits=config.limits)
        ranks = [kv.local_rank(config, memory, kv.HOST), kv.WorkerRank(1, link)]
        sent, received = queue.SimpleQueue(), queue.SimpleQueue()
        prefill = kv.KVManager(config, ranks, on_change=sent.put)
        address = prefill.start()

        pool = np.zeros((SHAPE.layers, 2, len(PAGES), SIZE, 2 * HEADS, SHAPE.k_dim), np.float16)
        spec, own = kv.pool_of(SHAPE, [(layer[0], layer[1]) for layer in pool])
        config = kv.KVConfig(role=kv.Role.DECODE, model="demo", spec=spec, transports=["tcp"])
        decode = kv.KVManager(config, own, on_change=received.put)
        decode.start()
        decode.add_peer(me, *address)

        room = kv.RoomKey(kv.new_room())
        sender = prefill.expect(room, TOKENS, budget_s=60)
        sender.send(kv.Span(0, TOKENS), PAGES, metadata=b"")  # every rank sends its heads
        receiver = decode.receive(room, me, TOKENS, budget_s=60)
        wait(receiver, received, kv.KVPoll.WAITING_FOR_INPUT)
        receiver.publish(PAGES)
        wait(receiver, received, kv.KVPoll.SUCCESS)
        wait(sender, sent, kv.KVPoll.SUCCESS)
        equal = np.array_equal(pool, np.concatenate([computed(0), computed(1)], axis=4))
        print(f"KV of both ranks {'equal' if equal else 'DIFFERENT'}")
        for manager in (decode, prefill):
            manager.close()


def wait(handle, changes, phase):
    while handle.poll() is not phase:
        assert handle.poll() is not kv.KVPoll.FAILED, handle.error
        changes.get(timeout=60)


if len(sys.argv) > 1:
    worker(kv.LeaderId(kv.Incarnation(sys.argv[1])), bytes.fromhex(sys.stdin.readline()))
else:
    leader()
