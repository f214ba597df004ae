"""How fast each transport moves bytes between two processes of this host.

`measure` starts this module twice for a transport: a writer, and under it a reader. A library that hangs or
ends its process so costs `segue doctor` one line of its table.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter

import msgspec
import numpy as np

from segue.kv.errors import DECODE_ERRORS, SegueError, TransferFailed
from segue.kv.ids import Incarnation, LeaderId, RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.spec import Plane
from segue.kv.transport.base import Endpoint, TransportEvent, WriteFailed, Written
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.options import TransportOptions

PAGE_BYTES = 64 * 2**10
SCRATCH_BYTES = 32 * 2**20
#: Writes of either size: so many at most, and no further one after `ENOUGH_S`.
_PAGES, _BULKS, _ENOUGH_S = 50, 8, 1.0
_COPIES = 3
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
    command = [sys.executable, "-m", "segue.kv.transport.host_speed", "writer", name]
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
    except (*DECODE_ERRORS, IndexError):
        return "its process said nothing that can be read"


def _read(name: str) -> None:
    """The side that is written to, until standard input ends."""
    memory = allocate(SCRATCH_BYTES, "segue-doctor")
    with closing(memory), closing(KINDS.create(name, lambda _e: None, TransportOptions(me=_READER))) as end:
        endpoint = end.register(memory)
        end.grant(_WRITER, _EPOCH, Content((Plane(0, 1, 1, 1, 1, 1),), ((0, memory.nbytes),)))
        sys.stdout.buffer.write(msgspec.json.encode(endpoint) + b"\n")
        sys.stdout.buffer.flush()
        sys.stdin.buffer.read()


def _write(name: str) -> Speed:
    """The side that writes, with the other one in a process below it."""
    events: SimpleQueue[TransportEvent] = SimpleQueue()
    memory = allocate(SCRATCH_BYTES, "segue-doctor")
    command = [sys.executable, "-m", "segue.kv.transport.host_speed", "reader", name]
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

        def seconds(nbytes: int) -> float:
            end.write(_READER, _EPOCH, next(tags), [CopyBlock(0, 0, 1, nbytes)])
            try:
                event = events.get(timeout=_STEP_S)
            except Empty:
                raise TransferFailed(f"a write did not land within {_STEP_S:g} s") from None
            if isinstance(event, WriteFailed):
                raise event.error
            if not isinstance(event, Written):
                raise TransferFailed(f"{type(event).__name__} came in place of Written")
            return event.seconds

        tags = count(1)
        page_s, bytes_per_s = best_of(seconds)
        reader.stdin.close()
    return Speed(
        transport=name,
        page_us=page_s * 1e6,
        gb_per_s=bytes_per_s / 1e9,
        memory_gb_per_s=memory_speed() / 1e9,
    )


def best_of(seconds: Callable[[int], float]) -> tuple[float, float]:
    """The seconds that one page takes, and the bytes per second of many. `seconds` writes so many bytes and
    returns how long that took. A slow transport makes few writes, and small ones: `LIMIT_S` is enough for it.
    The best of several counts, because other load on the host says nothing about a transport."""
    seconds(PAGE_BYTES)  # the first one is slower: what it needs is mapped, or sent for, now
    page_s = min(_repeated(seconds, PAGE_BYTES, _PAGES))
    nbytes = min(SCRATCH_BYTES, max(1, int(_ENOUGH_S / page_s)) * PAGE_BYTES)
    return page_s, nbytes / min(_repeated(seconds, nbytes, _BULKS))


def _repeated(seconds: Callable[[int], float], nbytes: int, most: int) -> list[float]:
    taken: list[float] = []
    while len(taken) < most and sum(taken) < _ENOUGH_S:
        taken.append(max(1e-9, seconds(nbytes)))
    return taken


def memory_speed() -> float:
    """Bytes per second of a copy by numpy."""
    source, target = np.ones(SCRATCH_BYTES, np.uint8), np.zeros(SCRATCH_BYTES, np.uint8)

    def seconds(_nbytes: int) -> float:
        begin = perf_counter()
        np.copyto(target, source)
        return perf_counter() - begin

    return SCRATCH_BYTES / min(_repeated(seconds, SCRATCH_BYTES, _COPIES))


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
