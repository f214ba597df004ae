"""Agreement of symmetric ranks: each rank runs the same scheduler and polls its own half of each hand-off.

For engines whose ranks are equals. segue's own engine needs none of it: there one leader decides, by
`kv/protocol/tally.py`. A hand-off is known by its room, never by its position in a list. Each poll first
compares how many rooms every rank polls, and a digest of them. Only if these are equal are the phases
reduced, in order of the rooms. If not, the lists are exchanged, and every rank raises RANK_DIVERGENCE
with the same text.

The folds here are pure: a generator asks for an exchange (`Gather`, `Least`) and is sent its outcome. All
ranks ask for the same exchanges, of the same sizes, whatever they hold: a collective of unequal sizes aborts
a process. `TorchGroup` (`kv/torch_group.py`) carries the exchanges out.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from array import array
from collections.abc import Generator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from segue.kv.errors import ErrorInfo, Internal, OutOfCapacity, RankDivergence
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import KVPoll

#: Rooms of one poll. More raise OUT_OF_CAPACITY on every rank.
MAX_ROOMS: Final = 65_536
#: Bytes for the reasons of one rank's failed hand-offs in one poll; longer texts are cut.
MAX_REASON_BYTES: Final = 2**20
#: Rooms that the text of a divergence names, of all ranks together.
_NAMED = 48


class Gather(NamedTuple):
    """Wanted: the rows of all ranks, in their order. All ranks give rows of one length."""

    row: Sequence[int]


class Least(NamedTuple):
    """Wanted: one row, the least of all ranks' rows at each place. All ranks give rows of one length."""

    row: Sequence[int]


ResultT = TypeVar("ResultT")
Fold = Generator[Gather | Least, list[list[int]], ResultT]


class CallKind(enum.IntEnum):
    """The question that a rank asks the others."""

    POLL = 0
    RELEASED = 1


class Agreed(NamedTuple):
    """One room on all ranks: the phase of the slowest, and of FAILED the reason that the first rank gives."""

    phase: KVPoll
    error: ErrorInfo | None = None


_AGREED: Final = {phase.value: Agreed(phase) for phase in KVPoll}


def gated(handle: KVSender | KVReceiver) -> KVPoll:
    """The phase of this rank's half. A receiver whose bytes have landed and whose metadata has not come is
    TRANSFERRING: no rank acts on KV without metadata."""
    phase = handle.poll()
    if phase is KVPoll.SUCCESS and isinstance(handle, KVReceiver) and handle.metadata is None:
        return KVPoll.TRANSFERRING
    return phase


def poll_fold(number: int, handles: Mapping[int, KVSender | KVReceiver]) -> Fold[dict[int, Agreed]]:
    """The phases of `handles`, by room, on the slowest rank. `number` counts the calls of this rank."""
    mine = {room: gated(handle) for room, handle in handles.items()}
    least = yield from least_fold(number, CallKind.POLL, mine)
    agreed = {room: _AGREED[value] for room, value in least.items()}
    if any(found.phase is KVPoll.FAILED for found in agreed.values()):  # the same on every rank
        errors = yield from _reasons(
            {
                room: handles[room].error or Internal("failed without a reason", room=room).info
                for room, phase in mine.items()
                if phase is KVPoll.FAILED
            }
        )
        agreed |= {room: Agreed(KVPoll.FAILED, error) for room, error in errors.items()}
    return agreed


def least_fold(number: int, call: CallKind, values: Mapping[int, int]) -> Fold[dict[int, int]]:
    """The least value of each room over all ranks. Raises RankDivergence or OutOfCapacity, on every rank."""
    rooms = sorted(values)
    signed = array("q", array("Q", rooms).tobytes())
    digest = array("q", hashlib.blake2b(signed.tobytes(), digest_size=16).digest())
    heads = yield Gather([number, call, len(rooms), *digest])
    if len({(number, call) for number, call, *_ in heads}) > 1:
        at = ", ".join(
            f"rank {rank} at its call {number} ({CallKind(call).name.lower()})"
            for rank, (number, call, *_) in enumerate(heads)
        )
        raise RankDivergence(f"the ranks are not at the same call: {at}; every rank must make every call")
    counts = [count for _, _, count, *_ in heads]
    if max(counts) > MAX_ROOMS:
        rank = counts.index(max(counts))
        raise OutOfCapacity(
            f"rank {rank} polls {counts[rank]} rooms at once, at most {MAX_ROOMS} can be agreed on"
        )
    if any(head != heads[0] for head in heads):
        rows = yield Gather([*signed, *[0] * (max(counts) - len(rooms))])
        raise divergence([set(_unsigned(row[:n])) for row, n in zip(rows, counts, strict=True)])
    if not rooms:
        return {}
    (least,) = yield Least([values[room] for room in rooms])
    return dict(zip(rooms, least, strict=True))


def divergence(held: Sequence[set[int]]) -> RankDivergence:
    """The error of ranks that poll different rooms: of each rank, what it has and not all others have."""
    common = set.intersection(*held)
    named = max(1, _NAMED // len(held))
    lists = []
    for rank, rooms in enumerate(held):
        others = sorted(rooms - common)
        text = ", ".join(map(str, others[:named])) or "none"
        more = f" and {len(others) - named} more" if len(others) > named else ""
        lists.append(f"rank {rank} {text}{more} (of {len(rooms)})")
    return RankDivergence(
        f"the ranks poll different rooms; {len(common)} are common, beside them: {'; '.join(lists)}"
    )


def _reasons(mine: Mapping[int, ErrorInfo]) -> Fold[dict[int, ErrorInfo]]:
    """Why rooms have failed, from the ranks on which they have: of several reasons the first rank's."""
    longest = MAX_REASON_BYTES // (4 * max(1, len(mine)))
    cut = {room: msgspec.structs.replace(info, text=info.text[:longest]) for room, info in mine.items()}
    data = msgspec.msgpack.encode(cut)
    sizes = yield Gather([len(data)])
    width = -(-max(size for (size,) in sizes) // 8) * 8
    rows = yield Gather(array("q", data.ljust(width, b"\0")).tolist())
    found: dict[int, ErrorInfo] = {}
    for (size,), row in zip(sizes, rows, strict=True):
        theirs = msgspec.msgpack.decode(array("q", row).tobytes()[:size], type=dict[int, ErrorInfo])
        found = theirs | found
    return found


def _unsigned(row: Sequence[int]) -> array[int]:
    return array("Q", array("q", row).tobytes())


class RankGroup(Protocol):
    """The ranks that agree. An exchange that fails raises a SegueError, and so does every later one."""

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """See `Gather`; 64-bit integers."""
        ...

    def least(self, row: Sequence[int]) -> list[int]:
        """See `Least`; 64-bit integers."""
        ...


class Agreement:
    """The phase of each hand-off on the slowest rank of `group` (see `TorchGroup`). All ranks make the same
    calls in the same order, from one thread each, also while they have no room: a rank that leaves a call out
    is seen at the next one.

    Each call raises RankDivergence where the ranks differ, with the same text on every rank; the group stays
    usable if they were at the same call. It raises OutOfCapacity above MAX_ROOMS. It raises PeerLost when a
    rank is gone or does not answer, after the group's timeout for each exchange: three at most, two without a
    failed hand-off.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._calls = itertools.count(1)

    def poll(self, handles: Mapping[int, KVSender | KVReceiver]) -> dict[int, Agreed]:
        """The phase of each room on the slowest rank; `handles` are this rank's halves, by room.

        A hand-off that failed on any rank is FAILED on all, with that rank's reason. Each rank then aborts
        its own half, and asks `released` before it drops the handle."""
        return self._run(poll_fold(next(self._calls), handles))

    def released(self, handles: Mapping[int, KVSender | KVReceiver]) -> set[int]:
        """The rooms whose pages belong to the engine again on every rank. Until then no rank gives them to
        another request: where each rank allocates for itself, all allocate the same."""
        here = {room: handle.released for room, handle in handles.items()}
        everywhere = self._run(least_fold(next(self._calls), CallKind.RELEASED, here))
        return {room for room, released in everywhere.items() if released}

    def _run(self, fold: Fold[ResultT]) -> ResultT:
        try:
            ask = next(fold)
            while True:
                row = ask.row
                ask = fold.send(
                    self._group.gather(row) if isinstance(ask, Gather) else [self._group.least(row)]
                )
        except StopIteration as done:
            result: ResultT = done.value
            return result
