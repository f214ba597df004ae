"""Chooses the replicas of a request, and the step after its failure. Decisions only: no clock, no I/O.

`Router` reads the table of replicas that `Membership` keeps, and remembers what requests have shown: pairs
that refused one another, pairs that have served, replicas that failed lately, and how many retries the fleet
may still make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.engine.request import RankHints
from segue.kv import (
    BootstrapUnreachable,
    DpRankOutOfRange,
    Draining,
    ErrorCode,
    ErrorInfo,
    Incarnation,
    LeaderId,
    Role,
    SegueError,
)
from segue.kv.errors import Starting, status_of
from segue.kv.model_match import model_difference
from segue.kv.protocol.room_ranks import FOLLOW_BOOTSTRAP_ROOM
from segue.server.balance.attempts import INCOMPATIBLE, LOSSES, UNREACHED, Attempts, Next
from segue.server.balance.policies import POLICY_NAMES, PrefixAware, make_policy
from segue.server.balance.policy import PlacementRequest, Policy, RandBelow
from segue.server.balance.prefix_index import PrefixIndex
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.fleet.replica import Replica, Route

#: Not a worker's fault, so nobody is avoided for it (lesson 11).
_NOBODYS_FAULT = INCOMPATIBLE | {ErrorCode.DRAINING, ErrorCode.DEADLINE_EXCEEDED}

#: One worker's end fails all that ran there at once; it says nothing about the others, so what follows it
#: is bounded by each request's attempts and not by the fleet's budget. A pair that cannot be joined is
#: remembered, so that it costs one retry in its life.
_UNBUDGETED = LOSSES | INCOMPATIBLE | UNREACHED | {ErrorCode.DRAINING}

FIRST_COOL_S = 0.5
LONGEST_COOL_S = 30.0


@dataclass(slots=True)
class Cooling:
    """A replica that failed `failures` times in a row: passed over until `until` if there is a choice."""

    failures: int = 0
    until: float = 0.0


class Router:
    """The decisions of one fleet. `now` is always the caller's clock, in seconds. `index` is what is known of
    the replicas' prefix caches."""

    def __init__(
        self,
        replicas: Mapping[LeaderId, Replica],
        settings: FleetSettings,
        randbelow: RandBelow,
        index: PrefixIndex | None = None,
    ) -> None:
        self._index = index
        self._replicas = replicas
        self._settings = settings
        #: Nothing new is placed; what was begun may still be continued.
        self.draining = False
        #: Roles of which lost instances are being started again; None where nobody says so.
        self.awaited: frozenset[Role] | None = None
        #: The longest sequence everybody who serves now can take; None while nobody does.
        self.context_tokens: int | None = None
        #: Somebody could serve at some time: who is missing now was lost, and not awaited since the start.
        self._started = False
        self._proven: set[tuple[LeaderId, LeaderId]] = set()
        #: Pairs that refused one another: incarnations that are alive, so never more than there are pairs.
        self._refused: set[tuple[LeaderId, LeaderId]] = set()
        self._cooling: dict[LeaderId, Cooling] = {}
        self._retries_left = settings.retry_budget
        # One policy object for each half: they are chosen independently, never in lock-step.
        self._prefill_policy: Policy = make_policy(settings.policy, randbelow, index)
        self._decode_policy: Policy = make_policy(settings.policy, randbelow, index)
        #: that of each prefill instance that spreads requests over its DP ranks by another one
        self._rank_policies: dict[Incarnation, Policy] = {}
        self._randbelow = randbelow

    # ---- who could serve ------------------------------------------------------------------------

    def membership_changed(self) -> None:
        """Replicas came, went or changed: forget what concerned those that are gone."""
        known = self._replicas
        self._proven = {pair for pair in self._proven if pair[0] in known and pair[1] in known}
        self._refused = {pair for pair in self._refused if pair[0] in known and pair[1] in known}
        self._cooling = {leader: cooling for leader, cooling in self._cooling.items() if leader in known}
        alive = {leader.incarnation for leader in known}
        self._rank_policies = {who: policy for who, policy in self._rank_policies.items() if who in alive}
        sizes = [r.record.context_tokens for r in self._serving()]
        self._started = self._started or bool(sizes)
        self.context_tokens = min(sizes, default=None)

    @property
    def can_serve(self) -> bool:
        """Somebody is there to whom a request could be given."""
        return not self.draining and bool(self._serving())

    @property
    def proven(self) -> bool:
        """A request has succeeded on a pair of which both are still usable."""
        usable = {r.leader for r in self._replicas.values() if r.usable}
        return any(p in usable and d in usable for p, d in self._proven)

    def usable(self, role: Role) -> list[Replica]:
        """Replicas of `role` that may be given a request."""
        return [r for r in self._replicas.values() if r.role is role and r.usable]

    def lacking(self) -> SegueError:
        """Why nobody can serve: who is there, and who is waited for."""
        if self.draining and (self.awaited is None or self._serving()):
            return Draining("this frontend is draining; ask another")
        where = {"phase": "placement", "origin": "frontend"}
        halves = {role: self.usable(role) for role in (Role.PREFILL, Role.DECODE)}
        counts = {role: len(usable) for role, usable in halves.items()}
        there = f"{counts[Role.PREFILL]} prefill, {counts[Role.DECODE]} decode and no unified"
        away = [r for r in self._replicas.values() if r.session is None]
        if away:
            there += f", and {len(away)} that are registered and not connected"
        needed = "a request needs one of each with the same model and dtype, or a unified one"
        if all(counts.values()) and not self._serving():
            found, mend = model_difference(*(usable[0].record.model for usable in halves.values()))
            needed += f": {found}; {mend}"
        if self._started:
            text = f"nobody can serve: usable replicas are {there}; {needed}"
            if self.draining:
                text += "; this frontend is leaving and waits for nobody"
            elif self.awaited:
                text += f"; being started again: {', '.join(sorted(self.awaited))}"
            return BootstrapUnreachable(text).at(**where)
        missing = [str(role) for role, count in counts.items() if not count] or ["a matching pair"]
        return Starting(
            f"segue is starting, nobody can serve yet: the tokenizer is loaded, usable replicas are {there}; "
            f"waiting for {' and '.join(missing)} to load the model and to register ({needed})"
        ).at(**where)

    def _serving(self) -> list[Replica]:
        """Usable replicas that a request may be given to: a prefill replica, or a decode replica that does
        not compute prompts, only if the other half of its pair is there with the same model and dtype, for
        no other one could read its KV."""
        prefill, decode = self.usable(Role.PREFILL), self.usable(Role.DECODE)
        models = {p.record.model for p in prefill} & {d.record.model for d in decode}
        pairs = [r for r in prefill + decode if r.alone or r.record.model in models]
        return self.usable(Role.UNIFIED) + pairs

    def _partners(self, decode: Replica, prefill: list[Replica]) -> list[Replica]:
        """The replicas out of `prefill` that can hand KV to `decode`, as far as we know."""
        alike = self._alike(decode, prefill)
        return [p for p in alike if (p.leader, decode.leader) not in self._refused]

    def _alike(self, decode: Replica, prefill: list[Replica]) -> list[Replica]:
        """The replicas out of `prefill` with the model of `decode`."""
        return [p for p in prefill if p.record.model == decode.record.model]

    # ---- who gets it ----------------------------------------------------------------------------

    def choose(
        self, attempts: Attempts, request: PlacementRequest, now: float, *, patient: bool
    ) -> Route | None:
        """The replicas of the next attempt; None if it cannot run now. While `patient`, a replica that its
        peer reports as gone is not used, even if it is the only one."""
        serving = self._serving()
        # A unified replica stands beside the decode replicas: whoever decodes is chosen first.
        pinned = request.ranks.disagg_prefill_dp_rank
        halves = _on_rank([r for r in serving if r.role is Role.PREFILL], pinned)
        decode = [r for r in serving if r.role is not Role.PREFILL]
        asked = pinned is not None or request.ranks.force_query_prefill_dp_rank
        able = [
            r
            for r in decode
            if r.role is Role.UNIFIED or (r.alone and not asked) or self._partners(r, halves)
        ]
        decode = able or decode
        decode = _on_rank(decode, request.ranks.routed_dp_rank)
        d = self._pick(self._decode_policy, decode, attempts, request, now, patient)
        if d is None:
            return None
        here = f"{self._settings.policy} of {len(decode)} that decode"
        if d.role is Role.UNIFIED:
            return Route(request.room, d, d, here, "unified")
        alone = d.alone and not asked
        if alone and (text := self._short(d, attempts, request)):
            return Route(request.room, d, d, f"{here}; {text}", "short")
        prefill = self._partners(d, halves)
        if alone:
            prefill = [r for r in prefill if r.leader not in attempts.avoid]
        p = self._prefill(
            prefill or ([] if alone else self._alike(d, halves)), attempts, request, now, patient
        )
        room = request.room
        if p is None:
            text = f"{here}; no prefill can take it"
            return Route(room, d, d, text, "no_prefill") if alone else None
        if pinned is None and _follows(p):
            # The rank that the room names is gone, or not asked again: the room is to name the one that is.
            room = (room - room % p.record.dp_size + p.where.dp_rank) or p.record.dp_size
        reason = "asked" if asked else "long" if alone else "never"
        return Route(room, p, d, self._why(p, prefill, decode, attempts, request), reason)

    def refuser(self, request: PlacementRequest) -> Route | None:
        """In direct mode, where all replicas are leaders of our own instance: one that takes nothing new. Its
        refusal reaches the instance that has the other half of the request."""
        there = [r for r in self._replicas.values() if r.session is not None and not r.usable]
        there = _on_rank(there, request.ranks.routed_dp_rank)
        return Route(request.room, there[0], there[0], "it refuses", "unified") if there else None

    def _short(self, d: Replica, attempts: Attempts, request: PlacementRequest) -> str:
        """The reason why `d` computes the prompt itself, as far as its length decides it; empty if it does
        not. Only `prefix_aware` knows the tokens that `d` has cached."""
        limit = d.load.local_tokens if d.load is not None else None
        known = self._decode_policy.known_tokens if isinstance(self._decode_policy, PrefixAware) else 0
        tokens = len(request.prompt) + len(attempts.output) - known
        return f"short: {tokens} tokens uncached, at most {limit}" if tokens <= (limit or 0) else ""

    def _why(
        self,
        chosen: Replica,
        prefill: list[Replica],
        decode: list[Replica],
        attempts: Attempts,
        request: PlacementRequest,
    ) -> str:
        """The reason of the choice, for `segue explain`."""
        ranks, avoided = request.ranks, len(attempts.avoid)
        rule = "it has the KV" if attempts.kv_holder == chosen.leader else self._settings.policy
        if ranks.disagg_prefill_dp_rank is not None:
            rule = f"the client named dp{ranks.disagg_prefill_dp_rank}"
        text = f"prefill: {rule}, of {len(prefill)}; decode: {self._settings.policy} of {len(decode)}"
        return f"{text}; {avoided} avoided that failed before" if avoided else text

    def _prefill(
        self,
        replicas: list[Replica],
        attempts: Attempts,
        request: PlacementRequest,
        now: float,
        patient: bool,
    ) -> Replica | None:
        """The instance by our policy, and of its DP ranks the one that the instance's own rule says
        (`--load-balance`), if the client has not asked for one."""
        pinned = request.ranks.disagg_prefill_dp_rank
        if pinned is None:
            # Another rank than the room names is as good: the room is fitted to it.
            named = [
                r
                for r in replicas
                if r.leader not in attempts.avoid
                and (not _follows(r) or r.where.dp_rank == request.room % r.record.dp_size)
            ]
            replicas = named or replicas
        p = self._pick(self._prefill_policy, replicas, attempts, request, now, patient, half=Role.PREFILL)
        rule = p.record.load_balance if p is not None else ""
        if p is None or pinned is not None or rule in (self._settings.policy, FOLLOW_BOOTSTRAP_ROOM):
            return p
        ranks = [r for r in replicas if r.leader.incarnation == p.leader.incarnation]
        if len(ranks) == 1 or rule not in POLICY_NAMES:
            return p
        made = make_policy(rule, self._randbelow, self._index)
        policy = self._rank_policies.setdefault(p.leader.incarnation, made)
        return self._pick(policy, ranks, attempts, request, now, patient, half=Role.PREFILL)

    def check_ranks(self, asked: RankHints) -> None:
        """Raises DpRankOutOfRange for a rank that no instance has. Without instances nobody knows."""
        named = {
            "routed_dp_rank": (asked.routed_dp_rank, (Role.DECODE, Role.UNIFIED)),
            "disagg_prefill_dp_rank": (asked.disagg_prefill_dp_rank, (Role.PREFILL,)),
        }
        for name, (rank, roles) in named.items():
            sizes = [r.record.dp_size for r in self._replicas.values() if r.role in roles]
            if rank is not None and sizes and not 0 <= rank < max(sizes):
                raise DpRankOutOfRange(
                    f"{name} {rank}: the {roles[0]} instances have ranks 0 to {max(sizes) - 1}",
                    phase="placement",
                    origin="frontend",
                )

    def _pick(
        self,
        policy: Policy,
        replicas: list[Replica],
        attempts: Attempts,
        request: PlacementRequest,
        now: float,
        patient: bool,
        half: Role = Role.DECODE,
    ) -> Replica | None:
        """Choose by policy among the good replicas; if there are none, among the least bad."""
        by_leader = {r.leader: r for r in replicas}
        others = attempts.candidates([r.candidate() for r in replicas], patient=patient)
        calm = [c for c in others if self.cooling(c.leader).until <= now] or others
        if not calm:
            return None
        return by_leader[attempts.choose(policy, calm, request, prefill=half is Role.PREFILL).leader]

    def cooling(self, leader: LeaderId) -> Cooling:
        """How a replica has failed since its last success."""
        return self._cooling.get(leader) or Cooling()

    # ---- what came of it ------------------------------------------------------------------------

    def record_success(self, route: Route) -> None:
        """A request ended well on `route`."""
        s = self._settings
        self._retries_left = min(s.retry_budget, self._retries_left + s.retry_refill)
        for leader in route.pair:
            self._cooling.pop(leader, None)
        self._proven.add(route.pair)

    def record_failure(self, replica: Replica, info: ErrorInfo, now: float) -> None:
        """A request failed on `replica`. Only what is a worker's fault counts against it."""
        if status_of(info.code) < 500 or info.code in _NOBODYS_FAULT:
            return
        cooling = self._cooling.setdefault(replica.leader, Cooling())
        cooling.failures += 1
        cooling.until = now + min(FIRST_COOL_S * 2 ** (cooling.failures - 1), LONGEST_COOL_S)
        # Not proven any more: `/ready` waits for the next success (lesson 09).
        self._proven = {pair for pair in self._proven if replica.leader not in pair}

    def after_failure(
        self, attempts: Attempts, route: Route, reporter: Replica, info: ErrorInfo, now: float
    ) -> Next:
        """The attempt on `route` has ended with `info`, which `reporter`'s half said: what follows."""
        at = attempts.failed_replica(info, reporter.leader)
        failed = next((r for r in route.replicas if r.leader == at), reporter)
        self.record_failure(failed, info, now)
        follows = attempts.failed(info, reporter.leader)
        self._lost_together(attempts, failed, info)
        # A full worker is not asked again at once; a lost one may have a successor soon.
        hopeless = info.code is ErrorCode.OUT_OF_CAPACITY and self._alone(failed)
        if info.code in INCOMPATIBLE:
            hopeless = not self._refuse(route)
        if follows is Next.END or hopeless or not self.may_retry(info.code, follows):
            return Next.END
        return follows

    def kept_failed(self, attempts: Attempts, route: Route, info: ErrorInfo, now: float) -> None:
        """Between two attempts, prefill's half has ended. If others needed its pages, nobody is at fault."""
        if info.code in INCOMPATIBLE:
            self._refuse(route)
        elif info.code is not ErrorCode.OUT_OF_CAPACITY:
            self.record_failure(route.prefill, info, now)
            attempts.kept_failed(info, route.prefill.leader)
            self._lost_together(attempts, route.prefill, info)

    def _lost_together(self, attempts: Attempts, lost: Replica, info: ErrorInfo) -> None:
        if info.code in LOSSES and lost.record.shared_experts:
            same = lost.leader.incarnation
            attempts.lost_together([r for r in self._replicas if r.incarnation == same])

    def may_retry(self, code: ErrorCode, follows: Next) -> bool:
        """Take one retry out of the fleet's budget, which keeps a failing fleet from doubling its load.

        A frontend that drains starts nothing new, but what it began may still be continued.
        """
        if self.draining and follows is not Next.CONTINUE:
            return False
        if code not in _UNBUDGETED:
            if self._retries_left < 1:
                return False
            self._retries_left -= 1
        return True

    def _refuse(self, route: Route) -> bool:
        """The two halves of `route` cannot be joined (no common transport, say): they are not paired again
        while there is a choice. Returns whether there is one."""
        self._refused.add(route.pair)
        serving = self._serving()
        prefill = [r for r in serving if r.role is Role.PREFILL]
        return any(r.alone or self._partners(r, prefill) for r in serving if r not in prefill)

    def _alone(self, replica: Replica) -> bool:
        """Nobody else could take what `replica` failed at."""
        serving = self._serving()
        alike = [r for r in serving if r.role is replica.role and r.record.model == replica.record.model]
        others = {Role.DECODE: Role.UNIFIED, Role.PREFILL: Role.DECODE}.get(replica.role)
        return len(alike) <= 1 and not any(r.alone for r in serving if r.role is others)


def _on_rank(replicas: list[Replica], dp_rank: int | None) -> list[Replica]:
    """The replicas of this DP rank; all of them if none is named."""
    return [r for r in replicas if dp_rank in (None, r.where.dp_rank)]


def _follows(replica: Replica) -> bool:
    """Its instance goes by the room alone."""
    return replica.record.dp_size > 1 and replica.record.load_balance == FOLLOW_BOOTSTRAP_ROOM
