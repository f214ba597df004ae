"""The ledger of causes: what happened, to whom, and until when it can explain an error.

Faults, and whatever else can make an attempt fail, are entered where they happen. The first failure of an
attempt must be explained by an entry that touches its route (frontend, prefill and decode instance) and can
give its code; what the other half or the frontend makes of it is a chain from there. A failure that nothing
explains is a bug, even where a retry heals it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from segue.engine.request import RankHints
from segue.kv.errors import ErrorCode, ErrorInfo
from segue.kv.ids import LeaderId
from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT
from segue.server.messages.ticket import Ticket
from segue_lab.sim.clients import Asked
from segue_lab.sim.node_spec import NodeSpec
from segue_lab.sim.node_views import NodeView
from segue_lab.sim.registry_wire import SETTLED_S
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Process, Violation

_UNREACHED = {ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.BOOTSTRAP_TIMEOUT}
_LATE = {ErrorCode.DEADLINE_EXCEEDED, ErrorCode.BOOTSTRAP_TIMEOUT}
#: Errors of a room that must be registered, or asked for, while the registry is in trouble.
_UNASKED = {*_UNREACHED, ErrorCode.REQUEST_TIMEOUT, ErrorCode.DEADLINE_EXCEEDED}
#: A session or a process is gone, or as good as gone.
_LOST = {
    ErrorCode.PEER_LOST,
    ErrorCode.PEER_RESTARTED,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.DEADLINE_EXCEEDED,
    *_UNREACHED,
}
#: Errors of a half whose peer has told it something wrong.
_MISHEARD = {
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.LAYOUT_MISMATCH,
    ErrorCode.METADATA_MISMATCH,
    ErrorCode.DP_RANK_CONFLICT,
}

#: Errors that each kind of entry can cause.
CODES: dict[str, frozenset[ErrorCode]] = {
    "started": frozenset(_UNREACHED | _LATE),
    "killed": frozenset(_LOST),
    "paused": frozenset(_LOST),
    "broken": frozenset(_LOST),
    "blocked": frozenset(_LOST),
    "drained": frozenset({*_LOST, ErrorCode.DRAINING}),
    # A damaged proof of the secret cannot be told from one of another secret.
    "session flip": frozenset(
        {*_LOST, ErrorCode.PEER_REFUSED, ErrorCode.CHECKSUM_MISMATCH, ErrorCode.UNAUTHORIZED}
    ),
    "path cut": frozenset({ErrorCode.TRANSFER_FAILED, ErrorCode.PEER_LOST}),
    "write fails": frozenset({ErrorCode.TRANSFER_FAILED}),
    "half open": frozenset(_LOST),
    "data stall": frozenset(_LOST),
    "deaf port": frozenset(_LOST),
    "no data descriptors": frozenset(_LOST),
    "head flip": frozenset({*_LOST, ErrorCode.PEER_REFUSED}),
    "write astray": frozenset(_LOST),
    "thread death": frozenset({*_LOST, ErrorCode.INTERNAL}),
    "connect raises": frozenset({*_LOST, ErrorCode.INTERNAL}),
    "full queues": frozenset({ErrorCode.TRANSFER_FAILED, ErrorCode.OUT_OF_CAPACITY}),
    "slow link": frozenset(_LATE),
    "copy flip": frozenset({ErrorCode.CHECKSUM_MISMATCH}),
    "engine refuses": frozenset({ErrorCode.INVALID_REQUEST}),
    "no descriptors": frozenset(_LOST),
    "clock jump": frozenset(_LOST),
    "session backlog": frozenset(_LOST),
    "digest slow": frozenset(_LATE),
    "slow step": frozenset(_LATE),
    "rank lost": frozenset({*_LOST, ErrorCode.INTERNAL}),
    "rank late": frozenset(_LOST),
    "rank diverges": frozenset({*_LOST, ErrorCode.RANK_DIVERGENCE}),
    "no memory": frozenset({*_LOST, ErrorCode.OUT_OF_CAPACITY}),
    "no memory for shm": frozenset(_LOST),
}
#: An exception that the simulator throws, into some part of an instance.
_THROWN = (
    "handler exception",
    "effect exception",
    "event exception",
    "dial exception",
    "step exception",
    "sequence error",
    "role exception",
    "engine exception",
    "plan exception",
    "digest fails",
)
CODES |= dict.fromkeys(_THROWN, frozenset({ErrorCode.INTERNAL}))
#: These take effect on the next matching event, at any time.
_ARMED = frozenset(
    {
        "session flip",
        "copy flip",
        "clock jump",
        "session backlog",
        "engine refuses",
        "digest slow",
        "half open",
        "data stall",
        "head flip",
        "write astray",
        "thread death",
        "connect raises",
        "full queues",
        "rank lost",
        "rank diverges",
        "slow step",
        "no memory",
        "no memory for shm",
        *_THROWN,
    }
)
#: Within which a clock of an instance may run ahead of the world's.
_FASTEST = 1.1
#: A time in which nobody can promise to be done.
SHORT_S = 0.5


@dataclass(frozen=True, slots=True)
class Cause:
    """Between `since` and `until` (seconds) an attempt that has all of `who` in its route may fail."""

    kind: str
    who: frozenset[LeaderId]
    since: float
    until: float


@dataclass(slots=True)
class AttemptCause:
    """The leaders that serve an attempt, and the earliest of their deadlines."""

    asked: Asked
    who: set[LeaderId]
    placed_at: float
    deadline: float
    #: its first failure was explained, or its frontend has given it up: the rest follows from that
    chained: bool = False


class Causes:
    """The ledger of one deployment."""

    def __init__(self, state: SimState) -> None:
        self._state = state
        self._world = state.world
        self._found: list[Cause] = []
        self._routes: dict[int, AttemptCause] = {}
        #: rooms that decode looks for on another DP rank first
        self._misplaced: set[int] = set()
        #: misplaced rooms that their instance lets fail
        self.conflicts: set[int] = set()
        #: rooms of which decode finds the DP rank of prefill by what the registry lists
        self.open_rooms: set[int] = set()
        #: errors that a room without a placement may end with without a fault
        self.of_rooms: dict[int, set[ErrorCode]] = {}
        #: until when requests waited on an instance
        self._short: dict[LeaderId, float] = {}

    # ---- what is entered -------------------------------------------------------------------------

    def record(self, kind: str, *who: Process, seconds: float = 0.0) -> None:
        """Record a fault `kind` for attempts with all of `who` in their route (none: for all): for `seconds`
        and a while."""
        now = self._world.now
        for_ever = kind in _ARMED or kind in ("killed", "drained")
        until = inf if for_ever else now + seconds + self._state.timing.bound_s
        self._found.append(Cause(kind, frozenset(p.me for p in who), now, until))  # type: ignore[attr-defined]

    def placed(self, room: int, asked: Asked, who: set[LeaderId]) -> None:
        """An attempt begins."""
        route = self._routes.get(room)
        if route is None:
            self._routes[room] = AttemptCause(asked, who, self._world.now, asked.deadline)
        else:  # a repeated ticket
            route.who |= who

    def misplaced(self, room: int, rank: LeaderId, *, fails: bool) -> None:
        """Decode looks for it on `rank` first, which sends it on; or its instance lets it fail."""
        self._misplaced.add(room)
        if fails:
            self.conflicts.add(room)
        if rank in self._state.by_leader and (route := self._routes.get(room)) is not None:
            route.who.add(rank)

    def submitted(self, room: int, budget_s: float) -> None:
        """One of its halves was given this long."""
        route = self._routes.get(room)
        if route is not None:
            route.deadline = min(route.deadline, self._world.now + budget_s)

    def given_up(self, room: int) -> None:
        """Its frontend has cancelled it: whoever serves it may say what it likes of that."""
        if room in self._routes:
            self._routes[room].chained = True

    def short(self, node: NodeView, waits: bool) -> None:
        """Whether requests wait at `node`, from its last turn to its next, for what others there have. That
        something moves there is 17."""
        if waits:
            self._short[node.me] = inf
        elif self._short.get(node.me) == inf:
            self._short[node.me] = self._world.now

    def break_session(self, a: Process, b: Process) -> None:
        """The connections between two processes end."""
        self.record("broken", a, b)
        for connection in self._state.network.between(a, b):
            connection.snap()

    def is_open(self, ticket: Ticket) -> bool:
        """Whether the DP rank of prefill is left open: a third of what goes to an instance of several."""
        return self._spec(ticket.prefill).dp.size > 1 and ticket.room % 3 == 0

    def expect_conflict(self, ticket: Ticket, hints: RankHints | None) -> None:
        """Expect decode to look for the room of an open ticket on the rank that these hints of its client or
        the room name, unless it must ask the registry. With None the instance's own rule may name another."""
        dp, room, true = self._spec(ticket.prefill).dp, ticket.room, ticket.prefill
        if hints is not None:
            self.open_rooms.add(room)
        rank = dp.follows(room)
        if hints is not None and hints.disagg_prefill_dp_rank is not None:
            rank = hints.disagg_prefill_dp_rank
        elif hints is not None and (dp.force_query or hints.force_query_prefill_dp_rank):
            self._state.counts["forced queries"] += 1
            return
        fails = dp.on_conflict == FAIL_ON_CONFLICT
        if rank not in (None, true.dp_rank) and (hints is not None or fails):
            self.misplaced(room, LeaderId(true.incarnation, rank), fails=fails)

    def _spec(self, leader: LeaderId) -> NodeSpec:
        node = self._state.by_leader[leader]
        assert isinstance(node, NodeView)
        return node.spec

    # ---- what is asked ---------------------------------------------------------------------------

    def require(self, error: ErrorInfo, rooms: tuple[int, ...]) -> None:
        """12: no attempt fails without a cause that touches it."""
        if error.code is ErrorCode.DP_RANK_CONFLICT and rooms and rooms[-1] in self._misplaced:
            return  # it goes on where the room is, or ends so
        if wrong := self.unexplained(error, rooms):
            raise Violation("12", f"{error.code} without a cause: {wrong}: {error}", rooms)

    def unexplained(self, error: ErrorInfo, rooms: tuple[int, ...]) -> str:
        """Why nothing in the ledger explains `error` of the attempt `rooms[-1]`; empty if something does."""
        injected = any(text in error.text for text in ("injected", "Injected", "this sequence failed"))
        route = self._routes.get(rooms[-1]) if rooms else None
        if error.code is ErrorCode.INTERNAL and not injected:
            return "an internal error that nobody injected"
        if route is None:
            return "nobody has placed it"
        if error.code in self.of_rooms.get(rooms[-1], ()):
            return ""
        wrong = "" if route.asked.wanted.bad else self._why(error, rooms[-1], route)
        route.chained = route.chained or not wrong
        return wrong

    def _why(self, error: ErrorInfo, room: int, route: AttemptCause) -> str:
        code, state, now = error.code, self._state, self._world.now
        jumped = any(cause.kind == "clock jump" and cause.who <= route.who for cause in self._found)
        if code is ErrorCode.DEADLINE_EXCEEDED and not route.chained and not jumped:
            left_s = route.deadline - now
            if left_s > (route.deadline - route.placed_at) * (1 - 1 / _FASTEST) + 1e-6:
                return f"{left_s:.3f} s before the nearest deadline"
            if route.deadline - route.placed_at < SHORT_S:
                return ""
        if route.chained or any(self._touches(cause, code, route) for cause in self._found):
            return ""
        match code:
            case ErrorCode.METADATA_MISMATCH if any(spoiled == room for spoiled, _ in state.spoiled):
                return ""
            case _ if room in state.misheard and code in _MISHEARD:
                return ""
            case ErrorCode.CHECKSUM_MISMATCH if any(t.room == room for t in state.flipped):
                return ""
            case _ if code in _UNASKED and self._looked_up(room) and self._unlisted(now):
                return ""
            case ErrorCode.PEER_REFUSED | ErrorCode.LAYOUT_MISMATCH if self._mismatched(route):
                return ""
            case ErrorCode.PEER_LOST if self._looked_up(room) and self._unlisted(now):
                return ""
            case ErrorCode.PEER_REFUSED if self._changed_role(route):
                return ""
            case ErrorCode.BOOTSTRAP_TIMEOUT | ErrorCode.DEADLINE_EXCEEDED if self._mismatched(
                route
            ) or self._waited(route):
                return ""
            case ErrorCode.INVALID_REQUEST if self._too_long(route):
                return ""
            case ErrorCode.OUT_OF_CAPACITY if self._full(error, route):
                return ""
            case _:
                return "nothing that touches it can cause it"

    def _touches(self, cause: Cause, code: ErrorCode, route: AttemptCause) -> bool:
        return (
            code in CODES[cause.kind]
            and cause.who <= route.who
            and cause.since <= self._world.now
            and cause.until >= route.placed_at
            and cause.until >= self._world.now - 1e-9
        )

    def _specs(self, route: AttemptCause) -> list[NodeSpec]:
        processes = (self._state.by_leader[me] for me in route.who)
        return [spec for spec in (getattr(p, "spec", None) for p in processes) if spec is not None]

    def _mismatched(self, route: AttemptCause) -> bool:
        return len({(spec.model, spec.layers) for spec in self._specs(route)}) > 1

    def _looked_up(self, room: int) -> bool:
        """Whether decode finds prefill by what the registry lists; else a frontend has chosen both."""
        return room in self.open_rooms or room in self.of_rooms

    def _unlisted(self, now: float) -> bool:
        """Whether the registry may have forgotten a living leader, or was unreachable."""
        return now < self._state.registry_trouble_at + SETTLED_S

    def _changed_role(self, route: AttemptCause) -> bool:
        """Whether somebody of another role comes where one of them was."""
        specs = self._state.specs
        return any(
            spec.name in specs and specs[spec.name].role is not spec.role for spec in self._specs(route)
        )

    def _waited(self, route: AttemptCause) -> bool:
        return any(self._short.get(me, -inf) > self._world.now - 1.0 for me in route.who)

    def _too_long(self, route: AttemptCause) -> bool:
        room_tokens = min(spec.pages * spec.page_tokens for spec in self._specs(route))
        return len(route.asked.wanted.prompt) + 1 > room_tokens

    def _full(self, error: ErrorInfo, route: AttemptCause) -> bool:
        scenario = self._state.scenario
        if "already holds" in error.text:
            return f"holds {scenario.max_queue} " in error.text
        return "to continue" in error.text or scenario.max_early < 1024


__all__ = ["CODES", "Causes"]
