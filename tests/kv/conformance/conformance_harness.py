"""Parts of the conformance suite: sides, pairs, a peer in another process, a content model."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from conformance_tls import make_by_name, memory_by_name

from areas import whole
from ranks import rank
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.spec import PoolSpec
from segue.kv.transport.base import Endpoint, Fenced, Transport, TransportEvent, WriteFailed, Written
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind

PATIENCE_S = 60.0
E = TypeVar("E", bound=TransportEvent)


class Side:
    """One transport with its memory and the events it told."""

    def __init__(self, name: str, me: RankId, nbytes: int) -> None:
        self.me = me
        self.log: list[TransportEvent] = []
        self._changed = threading.Condition()
        self._seen: set[int] = set()
        self.memory: Memory = memory_by_name(name, nbytes)
        self.transport: Transport = make_by_name(name, self._event, me)
        self.endpoint = self.transport.register(self.memory)

    def _event(self, event: TransportEvent) -> None:
        with self._changed:
            self.log.append(event)
            self._changed.notify_all()

    def take(self, kind: type[E], **fields: object) -> E:
        """The first event of `kind` with these fields that was not taken yet; waits for it."""

        def find() -> E | None:
            for i, event in enumerate(self.log):
                fits = i not in self._seen and isinstance(event, kind)
                if fits and all(getattr(event, k) == v for k, v in fields.items()):
                    self._seen.add(i)
                    return event
            return None

        found: list[E] = []

        def ready() -> bool:
            event = find()
            if event is not None:
                found.append(event)
            return event is not None

        with self._changed:
            if not self._changed.wait_for(ready, PATIENCE_S):
                raise AssertionError(f"{self.me} waits for {kind.__name__} {fields}; it saw {self.log[-5:]}")
        return found[0]

    def outcome(self, epoch: int, tag: int) -> Written | WriteFailed:
        """The end of one write; waits for it."""

        def ends() -> list[Written | WriteFailed]:
            return [
                e
                for e in self.log
                if isinstance(e, Written | WriteFailed) and (e.epoch, e.tag) == (epoch, tag)
            ]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(ends()), PATIENCE_S), (
                f"write {epoch}/{tag} never ended"
            )
            (end,) = ends()
        return end

    def fence(self, peer: RankId, epoch: int) -> Fenced:
        self.transport.fence(peer, epoch)
        return self.take(Fenced, peer=peer, epoch=epoch)

    def close(self) -> None:
        self.transport.close()
        self.memory.close()

    @property
    def array(self) -> np.ndarray:
        """A view for one expression: a kept one would hold the memory open."""
        region = self.memory.only
        if region.kind is MemoryKind.DEVICE:  # a double's
            return np.asarray(region.owner)
        return np.frombuffer(self.memory.buffer, np.uint8)


class Pair:
    """A connected writer and reader in this process."""

    def __init__(self, name: str, nbytes: int, target_bytes: int | None = None) -> None:
        self.writer = Side(name, rank("aaaa"), nbytes)
        self.reader = Side(name, rank("bbbb"), target_bytes or nbytes)
        self.writer.transport.connect(self.reader.me, self.reader.endpoint, PATIENCE_S)

    def grant(self, epoch: int) -> None:
        self.reader.transport.grant(self.writer.me, epoch, whole(self.reader.memory.nbytes))

    def write(self, epoch: int, tag: int, *blocks: CopyBlock) -> None:
        self.writer.transport.write(self.reader.me, epoch, tag, blocks)

    def move(self, epoch: int, tag: int, *blocks: CopyBlock) -> Written | WriteFailed:
        self.write(epoch, tag, *blocks)
        return self.writer.outcome(epoch, tag)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


class PeerProcess:
    """A side in a process of its own (see `peer_process.py`), driven by lines of JSON."""

    def __init__(self, name: str, me: RankId, nbytes: int) -> None:
        script = Path(__file__).with_name("peer_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, msgspec.json.encode(me).decode(), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self.me = me
        hello = self.wait("endpoint")
        self.endpoint = msgspec.json.decode(str(hello["endpoint"]), type=Endpoint)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def wait(self, key: str) -> dict[str, object]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            if key in line:
                return line

    def tell(self, command: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({"do": command, **arguments}).decode() + "\n")
        self.process.stdin.flush()

    def ask(self, command: str, **arguments: object) -> dict[str, object]:
        self.tell(command, **arguments)
        return self.wait(command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed with a command in the pipe
            self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        self.process.stdout.close()


def content(spec: PoolSpec, room: int, key: tuple[int, bool, int, int]) -> np.ndarray:
    """The bytes of one head of one token's K or V in one layer: a function of (room, layer, token, head)."""
    layer, value, token, head = key
    nbytes = (spec.shape.v_dim if value else spec.shape.k_dim) * spec.shape.item_bytes
    seed = np.uint64((room * 1_000_003 + layer * 7919 + token * 104_729 + value * 13) % 2**32)
    index = np.arange(nbytes, dtype=np.uint64) * np.uint64(40_503)
    mixed = (seed + np.uint64(head * 2_654_435_761) + index) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


def each_head(
    spec: PoolSpec, pages: list[int], tokens: int
) -> Iterator[tuple[tuple[int, bool, int, int], slice]]:
    """(layer, value, token, head) of everything that `tokens` tokens have in `pages`, and where it lies."""
    for layer, value in product(range(spec.layer_count), (False, True)):
        plane = spec.plane(layer, value)
        for token in range(tokens):
            slot = pages[token // spec.page_tokens] * spec.page_tokens + token % spec.page_tokens
            for head in range(spec.head_count):
                at = plane.at(slot, spec.page_tokens) + head * plane.head_stride
                yield (layer, value, token, head), slice(at, at + plane.head_bytes)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that tells nobody, such as a byte in memory that a peer writes."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.001)
