"""A model of the frontend: places, submits to both legs, cancels the other on an error, ends at the
deadline. What follows a failure is production's (`balance.attempts`). And of its clients, who may leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from segue.balance.attempts import Attempts, Next
from segue.balance.base import Candidate, PlacementRequest
from segue.balance.policies import make_policy
from segue.bootstrap.records import InstanceRecord, ReplicaRecord
from segue.core.control import Cancel, ControlMessage, Load, Outputs, Submit
from segue.core.errors import (
    AbortedByClient,
    BootstrapUnreachable,
    DeadlineExceeded,
    ErrorCode,
    ErrorInfo,
    Internal,
    PeerLost,
    SegueError,
)
from segue.core.request import Output, Request, SamplingParams, Ticket, TokenLogprob, Usage
from segue.core.types import LeaderId, Role
from segue.handoff.ticket import sign
from segue.session.api import PeerInfo, Session
from segue.sim.loop import SimLoop
from segue.sim.node import VOCAB
from segue.sim.runtime import SimSessionNode
from segue.sim.world import Process, SkewedClock, Violation, new_leader

if TYPE_CHECKING:
    from segue.sim.deployment import Deployment

#: How long a request waits for another replica than the one that is said to be gone.
PATIENCE_S = 1.0


@dataclass(slots=True)
class Wanted:
    """One request of a client; part of a scenario."""

    name: str
    at: float
    prompt: list[int]
    sampling: SamplingParams
    budget_s: float
    front: int = 0
    abort_after_s: float | None = None
    leg_delay_s: tuple[float, float] = (0.0, 0.0)
    unified: bool = False
    #: of decode and of prefill: the time that this half alone is given, if it is another
    leg_budget_s: tuple[float | None, float | None] = (None, None)
    #: empty, or what is wrong with it
    bad: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way, and what came of it."""

    wanted: Wanted
    deadline: float
    attempts: Attempts
    #: what was submitted last, and whether decode has answered it with a token
    request: Request
    begun: bool = False
    patient_until: float = 0.0
    #: replicas whose session ended while this request ran there
    dead: set[LeaderId] = field(default_factory=set)
    room: int = 0
    ticket: Ticket | None = None
    legs: dict[LeaderId, Role] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    outcome: str = ""
    error: ErrorInfo | None = None
    rooms: list[int] = field(default_factory=list)


class FrontNode(Process):
    """One frontend in one life."""

    def __init__(self, deployment: Deployment, index: int, life: int) -> None:
        super().__init__(deployment.world, f"front{index}" + (f"#{life}" if life else ""))
        self.deployment = deployment
        self.index = index
        self.rng = deployment.world.rng(self.name)
        self.me = new_leader(self.rng)
        self.view: dict[LeaderId, InstanceRecord] = {}
        self.ends: dict[LeaderId, Session] = {}
        self.loads: dict[LeaderId, Load] = {}
        self.calls: dict[str, Call] = {}
        self.in_flight: dict[LeaderId, int] = {}
        self.placed: list[Ticket] = []
        policy = deployment.policy
        self.policies = [make_policy(policy, self.rng.randrange) for _ in range(2)]
        self._dialling: set[LeaderId] = set()
        clock = SkewedClock(deployment.world, 0.0, 1.0)
        host = f"127.0.2.{index + 1}"
        self.loop = SimLoop(self, clock, deployment.network, host)  # type: ignore[abstract]
        self._node = SimSessionNode(
            loop=self.loop,
            me=self.me,
            role=Role.FRONTEND,
            secret=deployment.secret,
            handlers=dict.fromkeys(Role, self),
            message_type=ControlMessage,
            limits=deployment.front_limits,
        )

    # ---- the topology --------------------------------------------------------------------------

    def instances_changed(self, found: dict[LeaderId, InstanceRecord]) -> None:
        """What the registry says."""
        self.view = found
        for leader in found:
            if leader not in self.ends:
                self.dial(leader)

    def dial(self, leader: LeaderId) -> None:
        """Keep a session to this leader."""
        record = self.view.get(leader)
        if record is None or leader in self.ends or leader in self._dialling:
            return
        self._dialling.add(leader)
        self.loop.enter(self.loop.create_task, self._dial(leader, dict(record.leaders())[leader]))

    async def _dial(self, leader: LeaderId, where: ReplicaRecord) -> None:
        timeout_s = 3 * self.deployment.timing.connect_s
        try:
            await self._node.connect(where.host, where.port, expect=leader, timeout_s=timeout_s)
        except SegueError:
            self.after(self.deployment.timing.retry_s, self.dial, leader)
        finally:
            self._dialling.discard(leader)

    # ---- sessions (`SessionHandler`) -------------------------------------------------------------

    def hello(self) -> bytes:
        """A frontend has nothing to say of itself."""
        return b""

    def accept(self, peer: PeerInfo) -> None:
        """Whoever the registry names."""

    def opened(self, session: Session) -> None:
        """A leader is there."""
        self.ends[session.peer.leader] = session

    def received(self, session: Session, message: object) -> None:
        """Outputs or the load of a leader. What is wrong with them ends the run."""
        self._checked(self._received, session.peer.leader, message)

    def _checked(self, check: Callable[..., None], *args: object) -> None:
        try:
            check(*args)
        except Violation as violation:
            self.world.fail(violation)
            raise

    def closed(self, session: Session, error: SegueError) -> None:
        """A leader is gone: its legs have failed."""
        me = session.peer.leader
        if self.ends.get(me) is not session:
            return
        del self.ends[me]
        lost = PeerLost(f"the session to {me} ended", origin=self.name, phase="session").info
        for call in [c for c in self.calls.values() if me in c.legs]:
            if not (call.begun and call.legs[me] is Role.PREFILL):
                call.dead.add(me)
            self._checked(self.deployment.checks.left, call, lost)
            self._leg_failed(call, me, lost)
        self.after(self.deployment.timing.retry_s, self.dial, me)

    # ---- a request -----------------------------------------------------------------------------

    def request(self, wanted: Wanted) -> None:
        """A client asks."""
        request = Request(request_id=wanted.name, prompt=wanted.prompt, sampling=wanted.sampling)
        call = Call(wanted, self.world.now + wanted.budget_s, Attempts(request), request)
        self.deployment.calls[wanted.name] = call
        self.calls[wanted.name] = call
        self.after(wanted.budget_s, self._deadline, call)
        if wanted.abort_after_s is not None:
            self.after(wanted.abort_after_s, self._client_left, call)
        self._place(call)

    def _candidates(self) -> dict[Role, list[Candidate]]:
        found: dict[Role, list[Candidate]] = {Role.PREFILL: [], Role.DECODE: [], Role.UNIFIED: []}
        for i, r in sorted(self.view.items()):
            if i in self.ends and not r.draining and r.ready:
                found[r.role].append(Candidate(i, load=self.loads.get(i), in_flight=self.in_flight.get(i, 0)))
        return found

    def _place(self, call: Call) -> None:
        if call.outcome:
            return
        if not self.ends:
            self.after(0.05, self._place, call)  # as below
            return
        wanted, attempts = call.wanted, call.attempts
        room = self.rng.getrandbits(63) | 1
        ask = PlacementRequest(room, wanted.prompt)
        patient = self.world.now < call.patient_until
        there = self._candidates()
        may = {role: attempts.candidates(found, patient=patient) for role, found in there.items()}
        if wanted.unified and may[Role.UNIFIED]:
            prefill = decode = attempts.choose(self.policies[0], may[Role.UNIFIED], ask).leader
        elif may[Role.PREFILL] and may[Role.DECODE]:
            prefill = attempts.choose(self.policies[0], may[Role.PREFILL], ask, prefill=True).leader
            decode = attempts.choose(self.policies[1], may[Role.DECODE], ask).leader
        else:
            self.after(0.05, self._place, call)  # nobody to serve yet: within the deadline
            return
        call.request, call.begun = attempts.begin(prefill, decode), False
        ticket = self._ticket(call, room, prefill, decode)
        self.deployment.checks.placed(call, (prefill, decode), there)
        call.ticket, call.room = ticket, ticket.room
        call.rooms.append(ticket.room)
        call.legs = {decode: Role.DECODE, prefill: Role.PREFILL}
        if prefill == decode:
            call.legs = {decode: Role.DECODE}
        self.deployment.rooms[ticket.room] = call
        route = {self.me, prefill, decode}
        self.deployment.causes.placed(ticket.room, call, route)
        # One that somebody repeats before it was used would rob an innocent request, and nobody could know.
        late_s = max(wanted.leg_delay_s) if attempts.number == 0 else 0.0
        self.after(late_s, self.placed.append, ticket)
        for leader, role in call.legs.items():
            self.in_flight[leader] = self.in_flight.get(leader, 0) + 1
            delay_s = wanted.leg_delay_s[role is Role.PREFILL] if attempts.number == 0 else 0.0
            if delay_s:
                self.after(delay_s, self._submit, call, attempts.number, leader, ticket)
            else:
                self._submit(call, attempts.number, leader, ticket)

    def _ticket(self, call: Call, room: int, prefill: LeaderId, decode: LeaderId) -> Ticket:
        bad, budget_s, attempt = call.wanted.bad, call.deadline - self.world.now, call.attempts.number
        if bad == "room 0":
            room = 0
        elif bad == "negative room":
            room = -5
        elif bad == "negative attempt":
            attempt = -1
        elif bad == "nan budget":
            budget_s = float("nan")
        elif bad == "infinite budget":
            budget_s = float("inf")
        elif bad == "wrong replica":
            prefill, decode = LeaderId(prefill.incarnation, 7), LeaderId(decode.incarnation, 7)
        elif bad == "repeated ticket" and self.placed:
            return self.placed[self.rng.randrange(len(self.placed))]
        ticket = Ticket(room=room, attempt=attempt, prefill=prefill, decode=decode, budget_s=budget_s)
        return (
            sign(ticket, self.deployment.secret or b"", self.me.incarnation) if 0 <= room < 2**64 else ticket
        )

    def _submit(self, call: Call, attempt: int, leader: LeaderId, ticket: Ticket) -> None:
        if call.outcome or call.attempts.number != attempt or leader not in call.legs:
            return
        wanted, request = call.wanted, call.request
        prompt = wanted.prompt
        if wanted.bad == "mixed legs" and call.legs[leader] is Role.PREFILL:
            prompt = [(prompt[0] + 1) % VOCAB, *prompt[1:]]  # a router has mixed up two requests
            request = replace(request, prompt=prompt)
        end = self.ends.get(leader)
        if end is None:
            gone = PeerLost("the session ended", origin=self.name, phase="submit").info
            self._leg_failed(call, leader, gone)
            return
        nearer = wanted.leg_budget_s[call.legs[leader] is Role.PREFILL]
        if nearer is not None and ticket.prefill != ticket.decode and not wanted.bad:
            ticket = replace(ticket, budget_s=min(ticket.budget_s, nearer), signature=b"")
            ticket = sign(ticket, self.deployment.secret or b"", self.me.incarnation)
        self.deployment.causes.submitted(ticket.room, ticket.budget_s)
        self.world.note(self.name, f"submit room={ticket.room:x} {request.request_id} to {leader}")
        end.send(Submit(request, ticket))
        if wanted.bad == "repeated id":
            end.send(Submit(request, ticket))

    # ---- what comes back -----------------------------------------------------------------------

    def _received(self, leader: LeaderId, message: object) -> None:
        if isinstance(message, Load):
            self.loads[leader] = message
        elif isinstance(message, Outputs):
            for output in message.outputs:
                self._output(leader, output)

    def _output(self, leader: LeaderId, output: Output) -> None:
        name = output.request_id.partition("~")[0]
        call = self.calls.get(name)
        if call is None or call.outcome or leader not in call.legs:
            return
        if output.request_id != call.request.request_id:
            return
        if output.error is not None:
            self.deployment.checks.error(call, output.error, call.legs[leader])
            self._leg_failed(call, leader, output.error)
            return
        if output.position != len(call.tokens):
            raise Violation(
                "24", f"{name}: token {output.position} where {len(call.tokens)} was due", tuple(call.rooms)
            )
        self.deployment.checks.usage(call, output.usage)
        try:
            output = call.attempts.arrived(output)
        except Internal as exc:
            raise Violation("24", f"{name}: {exc}", tuple(call.rooms)) from exc
        call.begun = call.begun or bool(output.token_ids)
        call.tokens += output.token_ids
        call.usage = output.usage or call.usage
        call.prompt_logprobs += output.prompt_logprobs or []
        self.deployment.checks.tokens(call)
        if output.finish is not None:
            self._end(call, "done")

    def _leg_failed(self, call: Call, leader: LeaderId, error: ErrorInfo) -> None:
        role = call.legs.pop(leader)
        self._left(leader)
        if role is Role.PREFILL and call.begun:
            return  # decode has everything: prefill's end no longer matters
        self._cancel(call, error)
        left_s = call.deadline - self.world.now
        follows = call.attempts.failed(error, leader)
        if follows is Next.END or left_s < 0.05:
            self._end(call, "failed", call.attempts.root_cause(error))
            return
        self.deployment.counts["continued" if follows is Next.CONTINUE else "retries"] += 1
        call.patient_until = self.world.now + PATIENCE_S * call.attempts.reported_by_peer
        self.after(0.01, self._place, call)

    def _left(self, leader: LeaderId) -> None:
        self.in_flight[leader] -= 1
        if not self.in_flight[leader]:
            del self.in_flight[leader]

    def _cancel(self, call: Call, error: ErrorInfo) -> None:
        self.deployment.causes.given_up(call.room)
        for leader in call.legs:
            self._left(leader)
            end = self.ends.get(leader)
            if end is not None:
                end.send(Cancel(call.request.request_id, error))
        call.legs = {}

    def _deadline(self, call: Call) -> None:
        if not call.outcome:
            late = BootstrapUnreachable if not call.rooms else DeadlineExceeded
            error = late("not finished in time", origin=self.name, phase="frontend", room=call.room).info
            if self.deployment.scenario.forgetful:
                for leader in call.legs:
                    self._left(leader)
                call.legs = {}
            self._cancel(call, error)
            self._end(call, "late", error)

    def _client_left(self, call: Call) -> None:
        if not call.outcome:
            error = AbortedByClient("the client left", origin=self.name, phase="frontend").info
            self._cancel(call, error)
            self._end(call, "aborted", error)

    def _end(self, call: Call, outcome: str, error: ErrorInfo | None = None) -> None:
        call.outcome, call.error = outcome, error
        del self.calls[call.wanted.name]
        if outcome == "done":
            for leader in list(call.legs):
                self._left(leader)
                if call.legs[leader] is Role.PREFILL and error is None:
                    continue
            call.legs = {}
        self.world.note(
            self.name, f"{outcome} {call.wanted.name} rooms={[f'{r:x}' for r in call.rooms]} {error or ''}"
        )
        self.deployment.checks.ended(call)

    def died(self) -> None:
        """The process was killed: its clients see their connections end."""
        for call in self.calls.values():
            call.outcome = "frontend died"
            call.error = ErrorInfo(code=ErrorCode.PEER_LOST, text="the frontend died", origin=self.name)
        self.calls.clear()
