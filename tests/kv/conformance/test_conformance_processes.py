"""The same rooms with the other side in another process, which is killed at the worst moment."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from conformance_harness import PeerProcess, Side, until

from areas import whole
from ranks import rank
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import PeerGone, WriteFailed, Written

MiB = 2**20
Peers = Callable[[RankId, int], PeerProcess]
Sides = Callable[[RankId, int], Side]


@pytest.fixture
def side(name: str) -> Iterator[Sides]:
    sides: list[Side] = []

    def make(me: RankId, nbytes: int) -> Side:
        sides.append(Side(name, me, nbytes))
        return sides[-1]

    yield make
    for made in sides:
        made.close()


def join(writer: PeerProcess, reader: Side) -> None:
    endpoint = msgspec.json.encode(reader.endpoint).decode()
    assert writer.ask("connect", peer=reader.me, endpoint=endpoint)["connect"] == "ok"


def test_writes_from_another_process(peer: Peers, side: Sides) -> None:
    reader, writer = side(rank("bbbb"), 8 * MiB), peer(rank("aaaa"), 8 * MiB)
    join(writer, reader)
    writer.ask("fill", byte=5)
    reader.transport.grant(writer.me, 3, whole(reader.memory.nbytes))
    writer.tell("write", peer=reader.me, epoch=3, block=[0, 4096, 60, 100, 200, 300])
    assert writer.wait("event")["event"] == "Written"
    assert np.count_nonzero(reader.array) == 6000
    assert (reader.array[4096 : 4096 + 100] == 5).all()


def test_writes_into_another_process(peer: Peers, side: Sides) -> None:
    writer, reader = side(rank("aaaa"), 8 * MiB), peer(rank("bbbb"), 8 * MiB)
    writer.array[:] = 6
    writer.transport.connect(reader.me, reader.endpoint, 60)
    reader.ask("grant", peer=writer.me, epoch=3)
    writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 17, 1, 5 * MiB)])
    assert isinstance(writer.outcome(3, 1), Written)
    assert reader.ask("count", byte=6)["count"] == 5 * MiB
    writer.transport.write(reader.me, 3, 2, [CopyBlock(0, 8 * MiB - 1, 1, 2)])
    assert isinstance(writer.outcome(3, 2), WriteFailed)
    assert reader.ask("count", byte=6)["count"] == 5 * MiB


@pytest.mark.slow
def test_a_writer_killed_in_mid_write(peer: Peers, side: Sides) -> None:
    """`PeerGone(proven=True)`, and from then on not one byte changes."""
    reader, writer = side(rank("bbbb"), 256 * MiB), peer(rank("aaaa"), 256 * MiB)
    join(writer, reader)
    writer.ask("fill", byte=5)
    reader.transport.grant(writer.me, 3, whole(reader.memory.nbytes))
    writer.tell("write", peer=reader.me, epoch=3, block=[0, 0, 1, 256 * MiB], times=50)
    until(lambda: bool(reader.array[0] == 5), "the first byte never landed")
    writer.kill()
    gone = reader.take(PeerGone, proven=True)
    assert gone.peer == writer.me
    reader.array[:] = 0
    assert reader.fence(writer.me, 3).proven
    assert not reader.array.any()


def memory_of(process: PeerProcess) -> np.ndarray:
    """The memory of another process, mapped here: it can be looked at while that one stands still."""
    folder = Path(f"/proc/{process.process.pid}/fd")
    found = [fd for fd in folder.iterdir() if "memfd:segue-kv" in os.readlink(fd)]
    with found[0].open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


@pytest.mark.slow
def test_lesson_06_a_writer_killed_while_the_reader_stands_still(peer: Peers) -> None:
    """Bytes that were sent may still land, written by the reader's own thread; after the proof not one byte
    does."""
    reader, writer = peer(rank("bbbb"), 256 * MiB), peer(rank("aaaa"), 256 * MiB)
    endpoint = msgspec.json.encode(reader.endpoint).decode()
    assert writer.ask("connect", peer=reader.me, endpoint=endpoint)["connect"] == "ok"
    writer.ask("fill", byte=5)
    reader.ask("grant", peer=writer.me, epoch=3)
    memory = memory_of(reader)
    writer.tell("write", peer=reader.me, epoch=3, block=[0, 0, 1, 256 * MiB], times=50)
    until(lambda: bool(memory[0] == 5), "the first byte never landed")
    os.kill(reader.process.pid, signal.SIGSTOP)
    try:
        writer.kill()
    finally:
        os.kill(reader.process.pid, signal.SIGCONT)
    gone = reader.wait("event")
    assert (gone["event"], gone["proven"]) == ("PeerGone", True)
    memory[:] = 0
    reader.tell("fence", peer=writer.me, epoch=3)
    fenced = reader.wait("event")
    assert (fenced["event"], fenced["proven"]) == ("Fenced", True)
    assert reader.ask("count", byte=5)["count"] == 0
    assert not memory.any()


@pytest.mark.slow
def test_a_reader_killed_in_mid_write(peer: Peers, side: Sides) -> None:
    writer, reader = side(rank("aaaa"), 256 * MiB), peer(rank("bbbb"), 256 * MiB)
    writer.transport.connect(reader.me, reader.endpoint, 60)
    reader.ask("grant", peer=writer.me, epoch=3)
    for tag in range(200):  # more than can land before the kill, however late that comes
        writer.transport.write(reader.me, 3, tag, [CopyBlock(0, 0, 1, 256 * MiB)])
    writer.outcome(3, 0)
    reader.kill()
    writer.take(PeerGone, peer=reader.me)
    ends = [writer.outcome(3, tag) for tag in range(200)]
    assert isinstance(ends[-1], WriteFailed)
    writer.fence(reader.me, 3)


def test_an_idle_peer_that_dies_is_noticed(peer: Peers, side: Sides) -> None:
    reader, writer = side(rank("bbbb"), MiB), peer(rank("aaaa"), MiB)
    join(writer, reader)
    writer.tell("vanish")
    assert reader.take(PeerGone, peer=writer.me).proven
    assert reader.fence(writer.me, 1).proven


@pytest.mark.slow
def test_a_paused_writer_cannot_write_after_the_abort(peer: Peers, side: Sides) -> None:
    """Stopped in mid-write, fenced, continued: its late write fails; memory is quiet once proven. Where our
    own thread may still put into memory what it has sent, the proof costs its path."""
    reader, writer = side(rank("bbbb"), 256 * MiB), peer(rank("aaaa"), 256 * MiB)
    join(writer, reader)
    writer.ask("fill", byte=5)
    reader.transport.grant(writer.me, 3, whole(reader.memory.nbytes))
    writer.tell("write", peer=reader.me, epoch=3, block=[0, 0, 1, 256 * MiB], times=4)
    until(lambda: bool(reader.array[0] == 5), "the first byte never landed")
    os.kill(writer.process.pid, signal.SIGSTOP)
    try:
        proven = reader.fence(writer.me, 3).proven
        if proven:
            reader.array[:] = 0
    finally:
        os.kill(writer.process.pid, signal.SIGCONT)
    writer.tell("fence", peer=reader.me, epoch=3)
    while (line := writer.wait("event"))["event"] != "Fenced":
        assert line["event"] in ("Written", "WriteFailed", "PeerGone")
    # A receiver that has given the path up has its own proof; any other has the writer's word.
    assert proven or line["proven"] is True
    if not proven:  # the writer's word is the proof
        reader.array[:] = 0
    writer.tell("write", peer=reader.me, epoch=3, block=[0, 0, 1, MiB])
    while (line := writer.wait("event"))["event"] == "PeerGone":
        continue  # the path's end, which is told after its fences
    assert line["event"] == "WriteFailed"
    assert not reader.array.any()
    assert writer.process.poll() is None
