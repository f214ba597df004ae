"""How fast each transport moves bytes between two processes of this host.

`measure` starts this module twice for a transport: a writer, and under it a reader. A library that hangs or
ends its process so costs `segue doctor` one line of its table.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from queue import Empty, SimpleQueue

import msgspec

from segue.kv.errors import SegueError, TransferFailed
from segue.kv.ids import Incarnation, LeaderId, RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.spec import Plane
from segue.kv.transport.base import Endpoint, TransportEvent, WriteFailed, Written
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, Region, allocate
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.probe import Effort, Measurement, memory_speed

PAGE_BYTES = 64 * 2**10
SCRATCH_BYTES = 32 * 2**20
#: A slow transport is one that `LIMIT_S` is enough for: fewer writes, and smaller ones.
EFFORT = Effort(pages=50, bulks=8, bulk_pages=2**16, bulk_bytes=SCRATCH_BYTES, enough_s=1.0)
_EPOCH = 1
_STEP_S = 10.0
LIMIT_S = 30.0

_WRITER = RankId(LeaderId(Incarnation("d0" * 16), 0), 0)
_READER = RankId(LeaderId(Incarnation("d1" * 16), 0), 0)


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of one transport on this host. `page_us`: the shortest time from posting one page of 64 KiB
    to its confirmation. `gb_per_s`: the best rate of 32 MiB in one write, or of a size that takes about a
    second. `memory_gb_per_s`: 32 MiB, copied within one process by numpy."""

    transport: str
    page_us: float
    gb_per_s: float
    memory_gb_per_s: float


def measure(name: str) -> Speed | str:
    """Measure the transport `name`; or why that did not work."""
    command = [sys.executable, "-m", "segue.lab.bench.transport_probe", "writer", name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the reader with it
            return f"it did not end within {LIMIT_S:g} s"
    if process.returncode != 0:
        said = errors.decode("utf-8", "replace").strip().splitlines()
        return said[-1] if said else f"its process ended with status {process.returncode}"
    try:
        return msgspec.json.decode(out.splitlines()[-1], type=Speed)
    except (msgspec.DecodeError, IndexError):
        return "its process said nothing that can be read"


def _scratch(kinds: frozenset[MemoryKind]) -> Memory:
    if kinds != {MemoryKind.DEVICE}:
        return allocate(SCRATCH_BYTES, "segue-doctor")
    import torch

    tensor = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device="cuda:0")
    return Memory([Region(tensor.data_ptr(), tensor.nbytes, str(tensor.device), owner=tensor)])


def _read(name: str) -> None:
    """The side that is written to, until standard input ends."""
    memory = _scratch(KINDS.kind(name).memory_kinds)
    with closing(memory), closing(KINDS.create(name, lambda _e: None, TransportOptions(me=_READER))) as end:
        endpoint = end.register(memory)
        end.grant(_WRITER, _EPOCH, Content((Plane(0, 1, 1, 1, 1, 1),), ((0, memory.nbytes),)))
        sys.stdout.buffer.write(msgspec.json.encode(endpoint) + b"\n")
        sys.stdout.buffer.flush()
        sys.stdin.buffer.read()


def _write(name: str) -> Speed:
    """The side that writes, with the other one in a process below it."""
    events: SimpleQueue[TransportEvent] = SimpleQueue()
    memory = _scratch(KINDS.kind(name).memory_kinds)
    command = [sys.executable, "-m", "segue.lab.bench.transport_probe", "reader", name]
    with (
        closing(memory),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader,
        closing(KINDS.create(name, events.put, TransportOptions(me=_WRITER))) as end,
    ):
        assert reader.stdin is not None
        assert reader.stdout is not None
        end.register(memory)
        line = reader.stdout.readline()
        if not line:
            raise TransferFailed("the reading process ended")
        end.connect(_READER, msgspec.json.decode(line, type=Endpoint), _STEP_S)

        def seconds(tag: int, blocks: Sequence[CopyBlock]) -> float:
            end.write(_READER, _EPOCH, tag, blocks)
            try:
                event = events.get(timeout=_STEP_S)
            except Empty:
                raise TransferFailed(f"a write did not land within {_STEP_S:g} s") from None
            if isinstance(event, WriteFailed):
                raise event.error
            if not isinstance(event, Written):
                raise TransferFailed(f"{type(event).__name__} came in place of Written")
            return event.seconds

        measured = Measurement(lambda pages: [CopyBlock(0, 0, 1, pages * PAGE_BYTES)], EFFORT)
        tags = count(1)
        while (figures := measured.figures) is None:
            measured.took(seconds(next(tags), measured.write))
        reader.stdin.close()
    return Speed(
        transport=name,
        page_us=figures.page_s * 1e6,
        gb_per_s=figures.bytes_per_s / 1e9,
        memory_gb_per_s=memory_speed() / 1e9,
    )


def _main(side: str, name: str) -> int:
    try:
        if side == "reader":
            _read(name)
        else:
            print(msgspec.json.encode(_write(name)).decode())
    except (SegueError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:3]))
