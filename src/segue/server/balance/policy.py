"""The face of a placement policy: candidates in, one candidate out.

A caller asks once for the prefill half and once for the decode half of a request, each with its own
policy object, so the two choices are never paired in lock-step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from segue.engine.request import RankHints
from segue.kv import LeaderId
from segue.server.messages.control import Load

#: Draws an integer uniformly from `0 … n - 1`; injected, so that tests and the simulator decide.
RandBelow = Callable[[int], int]


class Candidate(msgspec.Struct, frozen=True):
    """One replica that may take the request.

    `load` is the last report of the replica (None before the first one). `in_flight` and
    `in_flight_tokens` are the chooser's own counts of what it has sent there and not seen end: they
    are current when the report is not. `dp_size` is the number of replicas of its instance.
    """

    leader: LeaderId
    dp_size: int = 1
    load: Load | None = None
    in_flight: int = 0
    in_flight_tokens: int = 0

    @property
    def requests(self) -> int:
        """Requests on the replica: the larger of what it says and what we know we sent."""
        reported = self.load.running + self.load.waiting if self.load else 0
        return max(reported, self.in_flight)

    @property
    def tokens(self) -> int:
        """Tokens on the replica: the larger of what it says and what we know we sent."""
        return max(self.load.tokens if self.load else 0, self.in_flight_tokens)


class PlacementRequest(msgspec.Struct, frozen=True):
    """The properties of a request that a policy may use: its room and its prompt's token ids. The DP ranks
    that its client names take precedence over any policy."""

    room: int
    prompt: Sequence[int] = ()
    ranks: RankHints = RankHints()
    cache_salt: int = 0


class Policy(Protocol):
    """A placement policy; it may keep state (a counter, a table), bounded by itself."""

    def choose(self, candidates: Sequence[Candidate], request: PlacementRequest) -> Candidate:
        """One of `candidates`, which is not empty and in a stable order."""
        ...
