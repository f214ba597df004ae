"""How fast a path is, and which of several is taken. `segue doctor` measures with it, and every pair that may
choose does when it joins.

A pair writes from scratch to scratch: `SCRATCH_BYTES` behind each pool that no request ever uses, so that
what lands late lands there. Rows are as long as those of the pair's real pages, and never neighbours.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import msgspec
import numpy as np

from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.spec import Plane, PoolSpec
from segue.kv.path_figures import PathCandidate, PathFigures

#: Bytes behind the pool of each rank for probes (`KVConfig.scratch_bytes`).
SCRATCH_BYTES = 4 * 2**20
#: A transport displaces one that is preferred to it if it is so much faster; less is noise.
_CLEARLY = 1.5
#: Speeds are compared for a write of so many pages.
_TYPICAL_PAGES = 64
#: A path is reported as slow if it has less than one part in so many of the host's own memory speed.
FAR_UNDER = 20
_HOST_BYTES = 32 * 2**20
_HOST_TURNS = 3
_MEASURING = threading.Lock()

#: Gives each write to make, is sent the seconds that it took, and returns what was found.
_Steps = Generator[Sequence[CopyBlock], float, PathFigures]


class Scratch(msgspec.Struct, frozen=True):
    """Unused memory of a rank, for measurements."""

    offset: int
    nbytes: int

    @property
    def area(self) -> Content:
        """For a grant."""
        return Content((Plane(self.offset, 1, 1, 1, 1, 1),), ((0, self.nbytes),))


class PageShape(msgspec.Struct, frozen=True):
    """A page as it crosses between two ranks."""

    rows: int
    row_bytes: int


def page_shape(source: PoolSpec, target: PoolSpec) -> PageShape:
    """About what of a page two ranks share: the rows of one, each as long as the shorter one's."""
    shapes = [(spec.layer_count * spec.kinds, spec.page_bytes) for spec in (source, target)]
    return PageShape(min(rows for rows, _ in shapes), max(1, min(size // rows for rows, size in shapes)))


def page_writes(source: Scratch, target: Scratch, shape: PageShape) -> Callable[[int], list[CopyBlock]]:
    """The blocks that write so many pages."""
    size = min(source.nbytes, target.nbytes)
    row = min(shape.row_bytes, size // 2)
    fit = size // (2 * row)

    def writes(pages: int) -> list[CopyBlock]:
        rows = shape.rows * pages
        return [
            CopyBlock(source.offset, target.offset, min(fit, rows - done), row, 2 * row, 2 * row)
            for done in range(0, rows, fit)
        ]

    return writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is written at most: so many times a page, so often many pages, and no further one of either
    once they have taken `enough_s`."""

    pages: int = 10
    bulks: int = 3
    bulk_pages: int = 32
    bulk_bytes: int = 16 * 2**20
    enough_s: float = 0.02


class Measurement:
    """Measures with what `writes` so many pages: `write` is to be written next, until there are `figures`. On
    a slow path it makes few writes, and small ones. Pure."""

    def __init__(
        self,
        writes: Callable[[int], Sequence[CopyBlock]],
        effort: Effort = Effort(),
    ) -> None:
        self._steps = _steps(writes, effort)
        self.write = next(self._steps)
        self.figures: PathFigures | None = None

    def took(self, seconds: float) -> None:
        """`write` has landed."""
        try:
            self.write = self._steps.send(seconds)
        except StopIteration as end:
            self.figures = end.value


def _steps(writes: Callable[[int], Sequence[CopyBlock]], effort: Effort) -> _Steps:
    page_bytes = sum(block.nbytes for block in writes(1))
    yield writes(1)  # the first one is slower: what it needs is mapped, or sent for, now
    pages: list[float] = []
    while len(pages) < effort.pages and sum(pages) < effort.enough_s:
        pages.append(max(1e-9, (yield writes(1))))
    # Take the best of both: other load on the host says nothing about the path.
    page_s = min(pages)
    most = min(effort.bulk_pages, max(1, effort.bulk_bytes // page_bytes))
    many = max(1, int(min(most, effort.enough_s / page_s)))
    bulks: list[float] = []
    while len(bulks) < effort.bulks and sum(bulks) < effort.enough_s:
        bulks.append(max(1e-9, (yield writes(many))))
    return PathFigures(page_s=page_s, bytes_per_s=many * page_bytes / min(bulks))


def decide(candidates: Sequence[PathCandidate], shape: PageShape) -> str:
    """The transport to use; `candidates` are in the order of preference. An unmeasured transport is used only
    if none was measured: then the first that has not failed."""
    typical_bytes = _TYPICAL_PAGES * shape.rows * shape.row_bytes

    def seconds(figures: PathFigures) -> float:
        return figures.page_s + typical_bytes / figures.bytes_per_s

    best: tuple[str, float] | None = None
    for one in candidates:
        if one.figures is None:
            continue
        needed_s = seconds(one.figures)
        if best is None or needed_s * _CLEARLY < best[1]:
            best = (one.transport, needed_s)
    if best is not None:
        return best[0]
    return next((one for one in candidates if one.late), candidates[0]).transport


class HostSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of this host without a transport: a copy in memory, and a socket between two threads."""

    memory_bytes_per_s: float
    socket_bytes_per_s: float


def slow(figures: PathFigures, host: HostSpeed, *, in_memory: bool) -> str:
    """Why a path is too slow for this host, or "". `in_memory`: it is a copy within the host."""
    limit = host.memory_bytes_per_s if in_memory else host.socket_bytes_per_s
    if figures.bytes_per_s * FAR_UNDER >= limit:
        return ""
    what = "a copy in memory" if in_memory else "a plain socket"
    return f"far under what this host can do: {what} has {limit / 1e9:.2f} GB/s; see segue doctor"


def host_speed() -> HostSpeed:
    """Measured once for each process; takes some tens of milliseconds. A second caller waits meanwhile: two
    measurements at once would each see half of the host's speed."""
    with _MEASURING:
        return _host_speed()


@cache
def _host_speed() -> HostSpeed:
    """The best of several turns of both: it runs while a deployment starts, on a busy host."""
    return HostSpeed(
        memory_bytes_per_s=memory_speed(),
        socket_bytes_per_s=max(socket_speed() for _ in range(_HOST_TURNS)),
    )


def memory_speed() -> float:
    """Bytes per second of a copy by numpy."""
    source, target = np.ones(_HOST_BYTES, np.uint8), np.zeros(_HOST_BYTES, np.uint8)
    return _HOST_BYTES / min(_seconds(lambda: np.copyto(target, source)) for _ in range(_HOST_TURNS))


def socket_speed() -> float:
    """Bytes per second through a pair of sockets."""
    data, target = bytes(2**20), bytearray(2**20)
    times = _HOST_BYTES // len(data)
    ours, theirs = socket.socketpair()

    def send() -> None:
        for _ in range(times):
            ours.sendall(data)

    def receive() -> None:
        left = _HOST_BYTES
        while left > 0:
            left -= theirs.recv_into(target)

    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(5.0)
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        taken = _seconds(receive)
        sender.join()
    return _HOST_BYTES / taken


def _seconds(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin
