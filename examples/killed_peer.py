"""Survive the death of a peer: `python examples/killed_peer.py [decode|prefill]`.

This process has the role given. Its peer, a child process, is killed (SIGKILL) in the middle of a hand-off.
The hand-off ends with one typed error; the pages are used again only after `Release`, which proves that the
dead peer cannot write into them any more. A second child then takes the place of the first.
"""

import json
import logging
import queue
import subprocess
import sys
import time

import numpy as np

from segue.kv import (
    Incarnation,
    KVConfig,
    KVManager,
    KVPoll,
    KVShape,
    LeaderId,
    PoolSpec,
    Release,
    Role,
    RoomKey,
    Span,
    allocate,
    new_room,
)

LAYERS, HEADS, DIM, SIZE, COUNT = 4, 4, 64, 16, 25  # COUNT pages of SIZE tokens hold the prompt
TOKENS, HALF = COUNT * SIZE, 10 * SIZE
SHAPE = KVShape(layers=LAYERS, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float16", item_bytes=2)
SPEC = PoolSpec(shape=SHAPE, page_tokens=SIZE, pages=40, layer_count=LAYERS, head_count=HEADS)
COMPUTED = np.random.default_rng(0).random((LAYERS, 2, COUNT, SIZE, HEADS, DIM)).astype(np.float16)

logging.getLogger("segue").setLevel(
    logging.ERROR
)  # the peer's death, a warning, is what this program is about


class Worker:
    def __init__(self, role):
        self.role, self.free = role, set(range(SPEC.pages))
        self.memory, self.changes, self.released = allocate(SPEC.nbytes), queue.Queue(), set()
        self.pool = np.frombuffer(self.memory.buffer, np.float16).reshape(LAYERS, 2, -1, SIZE, HEADS, DIM)
        config = KVConfig(role=role, model="demo", spec=SPEC, transports=["shm", "tcp"])
        self.me = config.me  # a new one for each process
        self.manager = KVManager(config, self.memory, on_change=self.changes.put)
        self.address = self.manager.start()

    def wait(self, done):
        """Read changes until `done()`. Pages come back by `Release` alone, whenever it comes."""
        while not done():
            change = self.changes.get(timeout=60)
            if isinstance(change, Release):
                self.released.add(change.key)

    def hand_off(self, room, peer, halfway):
        """One hand-off with `peer`; `halfway()` is called in the middle. Returns its handle."""
        them = LeaderId(Incarnation(peer[0]))
        pages = [self.free.pop() for _ in range(COUNT)]
        if self.role is Role.PREFILL:
            handle = self.manager.expect(RoomKey(room), TOKENS, budget_s=30, decode=them)
        else:
            self.manager.add_peer(them, *peer[1:])
            handle = self.manager.receive(RoomKey(room), them, TOKENS, budget_s=30)
        self.wait(lambda: handle.poll() not in (KVPoll.BOOTSTRAPPING, KVPoll.TRANSFERRING))
        if self.role is Role.PREFILL:
            self.pool[:, :, pages] = COMPUTED
            handle.send(Span(0, HALF), pages)
            halfway()
            handle.send(Span(HALF, TOKENS), pages, metadata=b"first token 42")
        else:
            handle.publish(pages)
            halfway()
        self.wait(lambda: handle.poll().terminal)
        if self.role is Role.DECODE and handle.poll() is KVPoll.SUCCESS:
            assert np.array_equal(self.pool[:, :, pages], COMPUTED)
        self.wait(lambda: handle.key in self.released)
        self.released.discard(handle.key)
        self.free.update(pages)
        handle.clear()
        self.manager.remove_peer(
            them
        )  # only now: the proof may need a session. Another process is another peer
        return handle


def survive(role):
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    worker = Worker(role)
    for dies in (True, False):
        room = new_room()
        command = [sys.executable, __file__, other, json.dumps([worker.me.incarnation, *worker.address])]
        with subprocess.Popen([*command, str(room), str(dies)], stdout=subprocess.PIPE, text=True) as child:

            def kill(child=child):
                child.stdout.readline()  # it is halfway
                child.kill()

            peer = json.loads(child.stdout.readline())
            handle = worker.hand_off(room, peer, kill if dies else lambda: None)
        if dies:
            # PEER_LOST, or TRANSFER_FAILED where a write met the end first: a new attempt can succeed.
            assert handle.poll() is KVPoll.FAILED
            assert handle.error.retryable
            print(f"the peer was killed: FAILED, {len(worker.free)} pages free")
        else:
            assert (handle.poll(), child.returncode) == (KVPoll.SUCCESS, 0), handle.error
            print(f"a new peer: SUCCESS, {len(worker.free)} pages free")
    worker.manager.close()


def child(role, peer, room, dies):
    worker = Worker(role)
    print(json.dumps([worker.me.incarnation, *worker.address]), flush=True)

    def halfway():
        if dies:
            print("halfway", flush=True)
            time.sleep(60)  # until it is killed

    worker.hand_off(room, peer, halfway)
    worker.manager.close()


if len(sys.argv) > 2:
    child(Role(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True")
else:
    survive(Role((sys.argv[1:] or ["decode"])[0]))
