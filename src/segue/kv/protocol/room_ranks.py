"""The DP rank of a prefill instance that owns a room: the instance's declaration, and the rule that follows.
Both sides call the same function, so prefill knows what decode can infer: only the rest is registered. No
side guesses."""

from __future__ import annotations

import msgspec

from segue.kv.errors import DpRankConflict, DpRankOutOfRange, InvalidRequest

#: Value of `DpRanks.load_balance` when prefill places by `room % size`.
FOLLOW_BOOTSTRAP_ROOM = "follow_bootstrap_room"
#: The values of `DpRanks.on_conflict`.
REDIRECT_ON_CONFLICT, FAIL_ON_CONFLICT = "redirect", "fail"


class DpRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The DP ranks of an instance: their number `size`, and the name `load_balance` of the rule that places
    requests on them.

    `force_query` (`--force-query-prefill-dp-rank`) makes decode ask the registry where it could infer the
    rank, and prefill register it. `on_conflict` is what prefill does with a request on another rank than the
    one that decode infers: `redirect` sends decode to the true one, `fail` ends the request on both sides.
    """

    size: int = 1
    load_balance: str = "total_requests"
    force_query: bool = False
    on_conflict: str = REDIRECT_ON_CONFLICT

    def inferred(self, room: int, hint: int | None = None, *, force_query: bool = False) -> int | None:
        """The rank of prefill that owns `room`; None if only the registry knows it.

        In this order: the request's `hint` (`disagg_prefill_dp_rank`); the only rank there is; `room % size`
        if prefill follows the room, unless the instance or the request says `force_query`. Raises
        DpRankOutOfRange for a hint that names no rank.
        """
        if self.size < 1:
            raise InvalidRequest(f"prefill declares {self.size} DP ranks")
        if hint is not None:
            if not 0 <= hint < self.size:
                raise DpRankOutOfRange(
                    f"disagg_prefill_dp_rank names DP rank {hint}, prefill has ranks 0 to {self.size - 1}",
                    room=room,
                )
            return hint
        if self.size == 1:
            return 0
        return None if self.force_query or force_query else self.follows(room)

    def follows(self, room: int) -> int | None:
        """The rank that `room` itself names; None if this instance does not go by it."""
        if self.size == 1 or self.load_balance != FOLLOW_BOOTSTRAP_ROOM:
            return None
        return room % self.size


class PrefillInstance(msgspec.Struct, frozen=True):
    """A prefill instance as the registry has it: `dp`, its number of DP ranks and placement rule, and
    `ranks`, the DP ranks that are registered."""

    dp: DpRanks
    ranks: frozenset[int]


def dp_rank_conflict(room: int, true: int, other: int) -> DpRankConflict:
    """The error of a request whose `room` is on DP rank `true`, while decode looks for it, or the room itself
    names it, on rank `other`."""
    return DpRankConflict(
        f"the request is on DP rank {true} of prefill, but its room or its hint (disagg_prefill_dp_rank) "
        f"names DP rank {other}; leave routed_dp_rank and the hint out, or start prefill with "
        f"--dp-rank-conflict {REDIRECT_ON_CONFLICT}, which allows both",
        room=room,
    )
