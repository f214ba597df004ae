"""The policies and their names.

| name | chooses |
|---|---|
| `round_robin` | each replica in turn |
| `follow_bootstrap_room` | `room % n`, so that whoever knows the room knows the rank |
| `total_requests` | the fewest requests |
| `total_tokens` | the fewest tokens |
| `power_of_two` | the better of two drawn at random (Mitzenmacher 2001): almost as even as asking all |
| `prefix_aware` | who holds the longest prefix of this prompt, or was sent it, unless it is far busier |
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import xxhash

from segue.kv import ConfigError, LeaderId
from segue.server.balance.policy import Candidate, PlacementRequest, Policy, RandBelow
from segue.server.balance.prefix_index import PrefixIndex


class RoundRobin:
    """Each replica in turn, whatever came and went between."""

    def __init__(self) -> None:
        self._last: LeaderId | None = None

    def choose(self, candidates: Sequence[Candidate], request: PlacementRequest) -> Candidate:
        # Continue after the last choice in the order of placements: a counter modulo the length would
        # favour some replicas whenever the length changes.
        ordered = sorted(candidates, key=_order)
        chosen = ordered[0]
        if self._last is not None:
            after = (self._last.incarnation, self._last.dp_rank)
            chosen = next((c for c in ordered if _order(c) > after), ordered[0])
        self._last = chosen.leader
        return chosen


class FollowBootstrapRoom:
    """`room % n`. Over one instance's replicas this is its DP rank `room % dp_size`."""

    def choose(self, candidates: Sequence[Candidate], request: PlacementRequest) -> Candidate:
        instances = sorted({c.leader.incarnation for c in candidates})
        instance = instances[(request.room // _dp_size(candidates)) % len(instances)]
        ranks = [c for c in candidates if c.leader.incarnation == instance]
        for candidate in ranks:
            if candidate.leader.dp_rank == request.room % candidate.dp_size:
                return candidate
        # The rank the room names is not among the candidates (it is leaving or lost).
        return ranks[request.room % len(ranks)]


class Fewest:
    """The least of `load`; ties go round."""

    def __init__(self, load: Callable[[Candidate], tuple[int, int]]) -> None:
        self._load = load
        self._ties = RoundRobin()

    def choose(self, candidates: Sequence[Candidate], request: PlacementRequest) -> Candidate:
        best = min(map(self._load, candidates))
        return self._ties.choose([c for c in candidates if self._load(c) == best], request)


def _requests_first(candidate: Candidate) -> tuple[int, int]:
    return candidate.requests, candidate.tokens


def _tokens_first(candidate: Candidate) -> tuple[int, int]:
    return candidate.tokens, candidate.requests


class PowerOfTwo:
    """Two different replicas drawn at random; the one with fewer requests, then tokens."""

    def __init__(self, randbelow: RandBelow) -> None:
        self._randbelow = randbelow

    def choose(self, candidates: Sequence[Candidate], request: PlacementRequest) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        first = self._randbelow(len(candidates))
        second = self._randbelow(len(candidates) - 1)
        second += second >= first
        return min(candidates[first], candidates[second], key=_requests_first)


class PrefixAware:
    """The replica that has the longest prefix of this prompt, while loads stay balanced.

    `index` says which prefixes the replicas have that it knows. For other replicas, and for prompts among the
    last placements (as many as requests are in flight), which may still be computed, the guess is that a
    replica has the prompts that were sent to it. For that, prefixes are remembered per block of
    `block_tokens` tokens as a chained, explicitly seeded hash (never Python's `hash()`, which differs between
    processes), at most `max_blocks` of them, the least recently used forgotten first. A replica with more
    than `slack` requests over twice the least busy one is passed over: a hot prefix must not turn one replica
    into the queue.
    """

    def __init__(
        self,
        block_tokens: int = 64,
        max_blocks: int = 65536,
        slack: int = 4,
        index: PrefixIndex | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._slack = slack
        self._index = index or PrefixIndex()
        #: by block: the leader that got it, and the number of that placement
        self._seen: OrderedDict[int, tuple[LeaderId, int]] = OrderedDict()
        self._placed = 0
        self._fallback = Fewest(_tokens_first)
        #: tokens of the last prompt that its chosen replica holds, or was sent before
        self.known_tokens = 0

    def choose(self, candidates: Sequence[Candidate], request: PlacementRequest) -> Candidate:
        hashes = self._hashes(request.prompt, request.cache_salt)
        least = min(c.requests for c in candidates)
        calm = {c.leader: c for c in candidates if c.requests <= 2 * least + self._slack}
        has = self._index.cached(calm, request.prompt, request.cache_salt)
        underway = self._placed - sum(c.in_flight for c in candidates)
        for count, key in zip(range(len(hashes), 0, -1), reversed(hashes), strict=True):
            leader, placed = self._seen.get(key, (None, 0))
            if leader is not None and leader in calm and (leader not in has or placed > underway):
                has[leader] = max(has.get(leader, 0), count * self._block_tokens)
                break
        most = max(has.values(), default=0)
        best = [calm[leader] for leader, tokens in has.items() if tokens == most] if most else candidates
        chosen = self._fallback.choose(best, request)
        self.known_tokens = has.get(chosen.leader, 0)
        self._placed += 1
        for key in hashes:
            self._seen[key] = chosen.leader, self._placed
            self._seen.move_to_end(key)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)
        return chosen

    def _hashes(self, prompt: Sequence[int], salt: int = 0) -> list[int]:
        """One chained hash per whole block: equal only if the salt and all tokens up to its end are."""
        out: list[int] = []
        chain = xxhash.xxh3_64(seed=salt)
        for start in range(0, len(prompt) - self._block_tokens + 1, self._block_tokens):
            chain.update(array("q", prompt[start : start + self._block_tokens]).tobytes())
            out.append(chain.intdigest())
        return out


def _order(candidate: Candidate) -> tuple[str, int]:
    return (candidate.leader.incarnation, candidate.leader.dp_rank)


def _dp_size(candidates: Sequence[Candidate]) -> int:
    """Instances of one fleet may differ in size; the largest keeps `//` and `%` independent."""
    return max(c.dp_size for c in candidates)


#: The one that looks at the index of prefixes, which is filled only for it.
PREFIX_AWARE = "prefix_aware"

_MAKERS: dict[str, Callable[[RandBelow, PrefixIndex | None], Policy]] = {
    "round_robin": lambda *_: RoundRobin(),
    "follow_bootstrap_room": lambda *_: FollowBootstrapRoom(),
    "total_requests": lambda *_: Fewest(_requests_first),
    "total_tokens": lambda *_: Fewest(_tokens_first),
    "power_of_two": lambda randbelow, _: PowerOfTwo(randbelow),
    PREFIX_AWARE: lambda _, index: PrefixAware(index=index),
}

#: The names `--policy` and `--load-balance` accept.
POLICY_NAMES = tuple(_MAKERS)


def make_policy(name: str, randbelow: RandBelow, index: PrefixIndex | None = None) -> Policy:
    """A fresh policy object; `index` is what is known of prefix caches. Raises ConfigError for an unknown
    name."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"there is no placement policy {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    return maker(randbelow, index)
