"""Staging with memory of a device whose copies run late, fail, or cannot be waited for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from areas import whole
from double_device import LateDevice
from ranks import rank
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, TransportEvent, WriteFailed, Written
from segue.kv.transport.memory.pool_memory import Memory, host_region
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.staged.staged_transport import StagedTcpTransport

PATIENCE_S = 60.0
WRITER, READER = rank("aaaa"), rank("bbbb")
NBYTES = 4096
#: One copy each, in one piece.
BLOCKS = [CopyBlock(at, at, 1, 64) for at in range(0, NBYTES, 512)]


class Half:
    """One side, whose memory is a device's or a host's."""

    def __init__(self, me: object, device: LateDevice | None) -> None:
        self.events: queue.Queue[TransportEvent] = queue.Queue()
        self.array = np.zeros(NBYTES, np.uint8)
        memory = Memory([host_region(self.array)])
        if device is not None:
            memory, self.array = device.memory(NBYTES)
        self.transport = StagedTcpTransport(self.events.put, TransportOptions(me=me, staging_bytes=2**20))  # type: ignore[arg-type]
        self.endpoint = self.transport.register(memory)

    def next(self) -> TransportEvent:
        return self.events.get(timeout=PATIENCE_S)

    def drain(self) -> list[TransportEvent]:
        """What its loop has told until now."""
        turned = threading.Event()
        self.transport._loop.post(turned.set)
        assert turned.wait(PATIENCE_S)
        return [self.events.get() for _ in range(self.events.qsize())]


@contextmanager
def halves(writer: LateDevice | None, reader: LateDevice | None) -> Iterator[tuple[Half, Half]]:
    """A connected pair; the writer's memory is full of fives, and may write epoch 7."""
    made = Half(WRITER, writer), Half(READER, reader)
    made[0].array[:] = 5
    made[0].transport.connect(READER, made[1].endpoint, PATIENCE_S)
    made[1].transport.grant(WRITER, 7, whole(NBYTES))
    try:
        yield made
    finally:
        for half in made:
            half.transport.close()


def test_a_write_has_landed_when_the_device_has_run_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice().patch(monkeypatch)
    with halves(device, device) as (writer, reader):
        writer.transport.write(READER, 7, 1, BLOCKS)
        assert isinstance(writer.next(), Written)
        assert device.copies == 2 * len(BLOCKS)
        for block in BLOCKS:
            assert (reader.array[block.dst_offset :][: block.nbytes] == 5).all()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("side", ["writer", "reader"])
def test_no_copy_runs_after_the_fence_of_a_write_of_which_one_copy_failed(
    side: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies before it were queued; of the one that failed nobody knows whether it was."""
    device = LateDevice(fails_at={5}, begun=begun).patch(monkeypatch)
    with halves(device if side == "writer" else None, device if side == "reader" else None) as (
        writer,
        reader,
    ):
        writer.transport.write(READER, 7, 1, BLOCKS)
        assert isinstance(writer.next(), WriteFailed)
        reader.transport.fence(WRITER, 7)
        while not isinstance(fenced := reader.next(), Fenced):
            pass
        assert fenced == Fenced(WRITER, 7, True)
        assert device.queue == []
        reader.array[:] = 9  # its pages are another request's
        device.go_on()
        assert (reader.array == 9).all()


@pytest.mark.parametrize("fails_at", [set(), {5}])
@pytest.mark.parametrize("side", ["writer", "reader"])
def test_what_cannot_be_waited_for_keeps_its_pages_and_its_slot(
    side: str, fails_at: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = LateDevice(fails_at=fails_at, dead=True).patch(monkeypatch)
    with halves(device if side == "writer" else None, device if side == "reader" else None) as (
        writer,
        reader,
    ):
        writer.transport.write(READER, 7, 1, BLOCKS)
        assert isinstance(writer.next(), WriteFailed), "the request fails at once"
        half, peer = (writer, READER) if side == "writer" else (reader, WRITER)
        for epoch in (7, 8):
            half.transport.fence(peer, epoch)
        fences = [event for event in half.drain() if isinstance(event, Fenced)]
        assert fences == [Fenced(peer, 8, True)], "the copy may still run; another epoch has none"
        slots = half.transport.out_slots if side == "writer" else half.transport.in_slots
        assert slots.held == 1
        half.transport.close()
        assert "its memory must stay" in caplog.text
