"""The phases of a hand-off as SGLang's queues may see them, the names of rooms, and DP ranks. Pure.

| queue | legal phases |
|---|---|
| prefill: bootstrap | Failed, Bootstrapping, WaitingForInput |
| prefill: in flight | Failed, WaitingForInput, Transferring, Success |
| decode: preallocation | Failed, Bootstrapping, WaitingForInput |
| decode: transfer | all |

Another phase raises in SGLang's scheduler and ends the server. SGLang reduces the phases of all ranks by MIN:
a rank that fails makes all ranks fail, also one whose own half has succeeded.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Iterable

from segue.kv import DpRankConflict, DpRanks, KVPoll, RoomKey

#: Rooms whose uses are remembered.
MAX_ROOMS = 65_536
#: The remedy of a conflict of DP ranks.
MIXED_ROUTING = (
    "leave out the hint and routed_dp_rank, or set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 on "
    "both sides"
)


class SglPoll(enum.IntEnum):
    """The numbers of SGLang's `KVPoll`."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


def sender_phase(phase: KVPoll, *, inited: bool, released: bool) -> SglPoll:
    """The phase of a sender. `inited`: SGLang has called `init`, and the request leaves the bootstrap queue.

    An end is told once the pages are `released`, because SGLang uses them again at once.
    """
    if phase is KVPoll.FAILED and released:
        return SglPoll.FAILED
    if not inited:
        early = phase in (KVPoll.BOOTSTRAPPING, KVPoll.FAILED)
        return SglPoll.BOOTSTRAPPING if early else SglPoll.WAITING_FOR_INPUT
    if phase is KVPoll.SUCCESS and released:
        return SglPoll.SUCCESS
    if phase in (KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT):
        return SglPoll.WAITING_FOR_INPUT
    return SglPoll.TRANSFERRING


def receiver_phase(phase: KVPoll) -> SglPoll:
    """The phase of a receiver whose pages SGLang has named. A failure is told at once: SGLang asks before it
    uses the pages again."""
    match phase:
        case KVPoll.FAILED:
            return SglPoll.FAILED
        case KVPoll.SUCCESS:
            return SglPoll.SUCCESS
        case KVPoll.TRANSFERRING:
            return SglPoll.TRANSFERRING
        case _:
            return SglPoll.WAITING_FOR_INPUT


def digest_of(tokens: Iterable[int]) -> bytes:
    """A digest of the tokens of a request."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8).digest()


class RoomUses:
    """Names the uses of each `bootstrap_room` on one side. The samples of a request with `n` above 1 share a
    room and their tokens: both sides count them from 0. A request whose KV is recomputed uses its room again,
    with the tokens so far, and prefill gets such requests in any order: those tokens are its generation."""

    def __init__(self, limit: int = MAX_ROOMS) -> None:
        self._limit = limit
        # The least recently used first: the tokens of the first use of each room, and the uses of each room
        # and generation.
        self._first: dict[int, bytes] = {}
        self._uses: dict[tuple[int, int], int] = {}

    def next(self, room: int, tokens: bytes = b"") -> RoomKey:
        """The key of one more use, with a digest of its `tokens`. Raises ValueError for a room that is no
        room, or after 65,536 uses."""
        first = self._first.get(room, tokens)
        generation = 0 if tokens == first else 1 + int.from_bytes(tokens) % 65_535
        key = RoomKey(room, generation, self._uses.get((room, generation), 0))
        self._first.pop(room, None)
        self._first[room] = first
        self._uses.pop((room, generation), None)
        self._uses[room, generation] = key.ordinal + 1
        if len(self._first) > self._limit:
            del self._first[next(iter(self._first))]
        if len(self._uses) > self._limit:
            del self._uses[next(iter(self._uses))]
        return key

    def __len__(self) -> int:
        return len(self._uses)


def must_register(dp: DpRanks, own: int, room: int, hint: int | None) -> bool:
    """Whether prefill's DP rank `own` has to tell the bootstrap server that it has `room`; `hint` is the
    request's `disagg_prefill_dp_rank`.

    Raises DpRankConflict if decode looks for the room on another rank.
    """
    if dp.size == 1:
        return False
    inferred = hint if hint is not None else dp.inferred(room)
    if inferred is None:
        return True
    if inferred != own:
        source = "its disagg_prefill_dp_rank" if hint is not None else f"follow_bootstrap_room (room {room})"
        raise DpRankConflict(
            f"the request is on DP rank {own} of prefill, {source} names DP rank {inferred}: {MIXED_ROUTING}",
            room=room,
        )
    return False
