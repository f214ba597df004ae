"""A frontend and its leaders talk to one another: checked by the numbers of `docs/protocol.md`, and spoiled.

Between production's `Membership` and its sessions stands `FleetWire`. It keeps a ledger of its own of
what was submitted where and what has ended, from the messages alone. And it is here that a request goes wrong
on its way: a router that mixes up tickets, a half that is submitted late, a frontend that forgets to cancel.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from segue.engine.request import Output, RankHints
from segue.kv.errors import ErrorCode, ErrorInfo, SegueError
from segue.kv.ids import OPEN_RANK, LeaderId, Role
from segue.kv.session.api import PeerInfo, Session, SessionHandler
from segue.server.fleet.replica import Replica
from segue.server.messages.control import Cancel, Load, Outputs, Replace, Submit
from segue.server.messages.ticket import Ticket, sign_ticket
from segue_lab.sim.answer_checks import AnswerChecks
from segue_lab.sim.causes import Causes
from segue_lab.sim.clients import Asked, SentAttempt, Wanted
from segue_lab.sim.node_spec import VOCAB
from segue_lab.sim.node_views import FrontView
from segue_lab.sim.world import Violation

#: The other side of a pair is gone; the two halves of a pair cannot be joined (stated here anew).
LOSSES = (ErrorCode.PEER_LOST, ErrorCode.PEER_RESTARTED)
INCOMPATIBLE = (ErrorCode.PEER_REFUSED, ErrorCode.LAYOUT_MISMATCH)


class WireSession:
    """One session, as the frontend has it."""

    def __init__(self, wire: FleetWire, session: Session) -> None:
        self._wire = wire
        self.session = session

    @property
    def peer(self) -> PeerInfo:
        """As production."""
        return self.session.peer

    @property
    def closing(self) -> bool:
        """As production."""
        return self.session.closing

    async def ended(self) -> None:
        """As production."""
        await self.session.ended()

    @property
    def leader(self) -> LeaderId:
        """The peer."""
        return self.peer.leader

    def send(self, message: msgspec.Struct) -> None:
        """As in production, after checks."""
        if isinstance(message, Submit):
            self._wire.checked(self._wire.submits, self, message)
        elif isinstance(message, Replace):
            self._wire.checked(self._wire.replaces, self, message)
        elif isinstance(message, Cancel):
            self._wire.cancels(self, message)
        else:
            self.session.send(message)

    def close(self, error: SegueError | None = None) -> None:
        """As production."""
        self.session.close(error)


class FleetWire:
    """All sessions of one frontend."""

    def __init__(
        self, front: FrontView, causes: Causes, answers: AnswerChecks, handler: SessionHandler
    ) -> None:
        self._front = front
        self._state = front.state
        self._causes = causes
        self._answers = answers
        self._handler = handler
        self.open: dict[LeaderId, WireSession] = {}
        #: tickets that were used, for whoever repeats one
        self._used: list[Ticket] = []
        #: leaders that have said that they drain
        self._draining: set[LeaderId] = set()
        #: pairs that refused one another
        self._refused: set[tuple[Replica, Replica]] = set()

    def checked(self, check: Callable[..., None], *args: object) -> None:
        """Look at something; what is wrong ends the run, whatever production makes of the exception."""
        try:
            check(*args)
        except Violation as violation:
            self._front.world.fail(violation)
            raise

    # ---- `SessionHandler` ------------------------------------------------------------------------

    def hello(self) -> bytes:
        """As production."""
        return self._handler.hello()

    def accept(self, peer: PeerInfo) -> None:
        """As production."""
        self._handler.accept(peer)

    def opened(self, session: Session) -> None:
        """A leader is there."""
        seen = WireSession(self, session)
        self.open[seen.leader] = seen
        self._handler.opened(seen)

    def received(self, session: Session, message: object) -> None:
        """Outputs or the load of a leader. A fault in them ends the run."""
        seen = self._seen(session)
        if isinstance(message, Outputs):
            for output in message.outputs:
                self.checked(self._output, seen.leader, output)
        elif isinstance(message, Load) and message.draining:
            self._draining.add(seen.leader)
        elif isinstance(message, Load):
            self._draining.discard(seen.leader)
        self._handler.received(seen, message)

    def closed(self, session: Session, error: SegueError) -> None:
        """A leader is gone: what ran there has failed."""
        seen = self._seen(session)
        if self.open.get(seen.leader) is seen:
            del self.open[seen.leader]
        self._draining.discard(seen.leader)
        for asked in self._front.asked.values():
            if asked.attempts and seen.leader in asked.attempts[-1].live:
                del asked.attempts[-1].live[seen.leader]
                asked.failure = error.info
                if error.info.code in LOSSES:
                    asked.dead.add(seen.leader)
                self.checked(self._answers.left, asked, error.info)
        self._handler.closed(seen, error)

    def _seen(self, session: Session) -> WireSession:
        seen = self.open.get(session.peer.leader)
        return seen if seen is not None and seen.session is session else WireSession(self, session)

    # ---- what is said --------------------------------------------------------------------------

    def submits(self, to: WireSession, message: Submit) -> None:
        """One half of an attempt is submitted, or it should be."""
        asked = self._front.asked[_name(message.request.request_id)]
        attempt = asked.attempts[-1] if asked.attempts else None
        if attempt is None or attempt.request_id != message.request.request_id:
            attempt = self._begins(asked, message)
        role = attempt.live[to.leader]
        delay_s = asked.wanted.leg_delay_s[role is Role.PREFILL] if len(asked.attempts) == 1 else 0.0
        if delay_s:
            # A request that has waited for somebody to serve it may have less time left than that.
            delay_s = min(delay_s, message.ticket.budget_s / 2)
            self._front.after(delay_s, self._front.loop.enter, self._late, to, asked, attempt, message)
        else:
            self._submit(to, asked, attempt, message)

    def _begins(self, asked: Asked, message: Submit) -> SentAttempt:
        front, state = self._front, self._state
        last = asked.attempts[-1] if asked.attempts else None
        kept = last if last is not None and last.made.room == message.ticket.room else None
        ticket = self._named(message, kept)
        pair = (ticket.prefill, ticket.decode)
        self._answers.placed(asked, message.request, pair[0] if kept is not None else None)
        self._choice(asked, pair)
        sent = self._spoiled(asked.wanted.bad, ticket)
        live = {ticket.decode: Role.DECODE} | (
            {ticket.prefill: Role.PREFILL} if ticket.prefill != ticket.decode else {}
        )
        prefill_id = message.request.request_id if kept is None else kept.prefill_id
        attempt = SentAttempt(message.request.request_id, prefill_id, pair, ticket, sent, live)
        state.counts["placed again in the same room"] += kept is not None
        if asked.attempts:
            state.counts["continued" if message.request.output else "retries"] += 1
        asked.attempts.append(attempt)
        state.rooms[sent.room] = asked
        route = {front.me, ticket.prefill, ticket.decode}
        self._causes.placed(sent.room, asked, route)
        # A ticket that is repeated before its use would rob an innocent request, and nobody could know.
        late_s = max(asked.wanted.leg_delay_s) if len(asked.attempts) == 1 else 0.0
        front.after(late_s, self._used.append, sent)
        return attempt

    def _named(self, message: Submit, kept: SentAttempt | None) -> Ticket:
        """The ticket with the DP rank of prefill that its frontend has chosen, if it left that open."""
        ticket = message.ticket
        if not ticket.prefill.is_open:
            return ticket
        if kept is not None:
            return replace(ticket, prefill=kept.pair[0])
        chosen = [
            leader
            for leader, replica in self._front.fleet.membership.replicas.items()
            if leader.incarnation == ticket.prefill.incarnation
            and message.request.request_id in replica.running
        ]
        return replace(ticket, prefill=chosen[0])

    def _spoiled(self, bad: str, ticket: Ticket) -> Ticket:
        match bad:
            case "room 0":
                ticket = replace(ticket, room=0)
            case "negative room":
                return replace(ticket, room=-5)
            case "negative attempt":
                ticket = replace(ticket, attempt=-1)
            case "nan budget":
                ticket = replace(ticket, budget_s=float("nan"))
            case "infinite budget":
                ticket = replace(ticket, budget_s=float("inf"))
            case "wrong replica":
                # Leaders of the same incarnations, and not those that are asked.
                prefill, decode = (
                    LeaderId(at.incarnation, self._front.rng.choice((at.dp_rank + 1, 7)))
                    for at in (ticket.prefill, ticket.decode)
                )
                ticket = replace(ticket, prefill=prefill, decode=decode)
            case "repeated ticket" if self._used:
                return self._used[self._front.rng.randrange(len(self._used))]
            case _:
                return ticket
        return self._signed(ticket)

    def _signed(self, ticket: Ticket) -> Ticket:
        return sign_ticket(
            replace(ticket, signature=b""), self._state.secret or b"", self._front.me.incarnation
        )

    def _late(self, to: WireSession, asked: Asked, attempt: SentAttempt, message: Submit) -> None:
        if not asked.outcome and attempt is asked.attempts[-1] and to.leader in attempt.live:
            self._submit(to, asked, attempt, message)

    def _submit(self, to: WireSession, asked: Asked, attempt: SentAttempt, message: Submit) -> None:
        front, wanted, role = self._front, asked.wanted, attempt.live[to.leader]
        request, ticket = message.request, attempt.ticket
        if wanted.bad == "mixed legs" and role is Role.PREFILL:
            # A router has mixed up two requests.
            request = replace(request, prompt=[(request.prompt[0] + 1) % VOCAB, *request.prompt[1:]])
        nearer = wanted.leg_budget_s[role is Role.PREFILL]
        if nearer is not None and len(attempt.live) == 2 and not wanted.bad:
            ticket = self._signed(replace(ticket, budget_s=min(ticket.budget_s, nearer)))
        self._causes.submitted(ticket.room, ticket.budget_s)
        front.world.note(front.name, f"submit room={ticket.room:x} {request.request_id} to {to.leader}")
        opened = message.ticket.prefill.is_open
        if not wanted.bad and ticket.prefill != ticket.decode:
            if not opened and self._causes.is_open(ticket):
                # The frontend does not say which DP rank of prefill has it, and hides that its client has.
                request, opened = replace(request, ranks=RankHints()), True
            self._causes.expect_conflict(attempt.ticket, request.ranks if opened else None)
        if opened:
            prefill = LeaderId(ticket.prefill.incarnation, OPEN_RANK)
            ticket = self._signed(replace(ticket, prefill=prefill))
            self._state.counts["open ranks"] += 1
        to.session.send(Submit(request, ticket))
        if wanted.bad == "repeated id":
            to.session.send(Submit(request, ticket))

    def replaces(self, to: WireSession, message: Replace) -> None:
        """Prefill is told where decode's half is now: it follows that half's submission, in the same room."""
        asked = self._front.asked[_name(message.request_id)]
        attempt = asked.attempts[-1]
        mine = (attempt.prefill_id, attempt.pair[0], attempt.made.attempt, attempt.made.room)
        ticket = message.ticket
        if mine != (message.request_id, to.leader, ticket.attempt, ticket.room):
            raise Violation("pair", f"{message} for {attempt}", (attempt.made.room,))
        to.session.send(Replace(message.request_id, attempt.ticket))

    def cancels(self, to: WireSession, message: Cancel) -> None:
        """One half is told to end."""
        asked = self._front.asked.get(_name(message.request_id))
        if asked is not None and asked.attempts and asked.attempts[-1].id_at(to.leader) == message.request_id:
            asked.attempts[-1].live.pop(to.leader, None)
            self._causes.given_up(asked.room)
        late = message.reason.code is ErrorCode.DEADLINE_EXCEEDED
        if not (late and self._state.scenario.forgetful):
            to.session.send(message)

    # ---- what is heard -------------------------------------------------------------------------

    def _output(self, leader: LeaderId, output: Output) -> None:
        asked = self._front.asked.get(_name(output.request_id))
        attempt = asked.attempts[-1] if asked is not None and asked.attempts else None
        if asked is None or attempt is None or output.request_id != attempt.id_at(leader):
            return
        role = attempt.live.get(leader)
        if role is None:
            return
        if output.error is not None:
            del attempt.live[leader]
            asked.failure = output.error
            # Decode may hear from prefill's room before the frontend hears from prefill.
            prefills = role is Role.PREFILL or str(attempt.pair[0]) in output.error.origin
            full = prefills and output.error.code is ErrorCode.OUT_OF_CAPACITY
            asked.gone += full and attempt.prefill_id != attempt.request_id
            if output.error.code in LOSSES:
                asked.suspect |= set(attempt.pair)
            self._answers.error(asked, output.error, role)
            self._incompatible(attempt, output.error)
            return
        self._answers.usage(asked, output.usage)
        if output.token_ids and role is Role.DECODE and not attempt.begun:
            # Prefill has done its part: nobody tells it to end.
            attempt.begun = True
            attempt.live = {leader: role}
        if output.finish is not None:
            attempt.live.clear()

    def _incompatible(self, attempt: SentAttempt, error: ErrorInfo) -> None:
        prefill, decode = (self._front.fleet.membership.replicas.get(leader) for leader in attempt.pair)
        if error.code in INCOMPATIBLE and prefill is not None and decode is not None:
            self._refused.add((prefill, decode))

    # ---- who could have been asked ---------------------------------------------------------------

    def local_tokens(self, replica: Replica) -> int | None:
        """A decode replica's report of the prompts that it computes itself."""
        load = replica.load
        return load.local_tokens if load is not None and replica.role is Role.DECODE else None

    def usable(self) -> list[Replica]:
        """The replicas that may get requests, by the messages here and by the registry."""
        replicas = self._front.fleet.membership.replicas
        found = [replicas[leader] for leader in self.open if leader in replicas]
        return [r for r in found if r.listed and not r.where.draining and r.leader not in self._draining]

    def pairs(self, wanted: Wanted | None = None) -> list[tuple[Replica, Replica]]:
        """The pairs that could serve a request, as far as anybody knows; a unified one is both halves, and so
        is a decode replica that computes prompts, unless the client names the rank of prefill."""
        dp_rank = None if wanted is None else wanted.prefill_dp_rank
        alone = dp_rank is None and (wanted is None or not wanted.force_query)
        usable = [
            r for r in self.usable() if r.role is not Role.PREFILL or dp_rank in (None, r.where.dp_rank)
        ]
        return [
            (p, d)
            for p in usable
            for d in usable
            if (p is d and (p.role is Role.UNIFIED or (alone and self.local_tokens(p) is not None)))
            or (
                (p.role, d.role) == (Role.PREFILL, Role.DECODE)
                and p.record.model == d.record.model
                and (p, d) not in self._refused
            )
        ]

    def _choice(self, asked: Asked, pair: tuple[LeaderId, LeaderId]) -> None:
        """24: a pair that refused one another, and a replica that the request was lost on, are asked again
        only where there is no other."""
        pairs = self.pairs(asked.wanted)
        rooms = tuple(asked.rooms)
        known = {(p.leader, d.leader) for p, d in pairs}
        if pairs and pair not in known:
            raise Violation("24", f"{asked.wanted.name} is asked of {pair}, which cannot serve it", rooms)
        # Others that are said to be gone are no better choice.
        worse = asked.dead | asked.suspect
        better = [d for _, d in pairs if d.leader not in worse]
        if pair[1] in asked.dead and better:
            raise Violation("24", f"{asked.wanted.name} is asked of {pair[1]} again, which it lost", rooms)
        better = [p for p, d in pairs if d.leader == pair[1] and p.leader not in worse]
        if pair[0] in asked.dead and pair[0] != pair[1] and better:
            raise Violation("24", f"{asked.wanted.name} is asked of {pair[0]} again, which it lost", rooms)
        self._at_decode(asked, pair, [p for p in better if p.role is Role.PREFILL])

    def _at_decode(self, asked: Asked, pair: tuple[LeaderId, LeaderId], prefill: list[Replica]) -> None:
        """24: decode computes a long prompt only where the request has failed on all of `prefill`, who could
        do it, and leaves a short one to nobody."""
        decode, wanted = self._front.fleet.membership.replicas[pair[1]], asked.wanted
        limit, tokens = self.local_tokens(decode), len(wanted.prompt) + len(asked.tokens)
        here, named = pair[0] == pair[1], wanted.force_query or wanted.prefill_dp_rank is not None
        if decode.role is not Role.DECODE or limit is None or named:
            return
        self._state.counts["prompts computed at decode"] += here
        tried = {attempt.pair[0] for attempt in asked.attempts}
        if here and tokens > limit and self._state.scenario.policy != "prefix_aware":
            if any(p.leader not in tried for p in prefill):
                raise Violation("24", f"{wanted.name} ({tokens} tokens) is computed at decode", (asked.room,))
            self._state.counts["long prompts computed at decode"] += 1
        if tokens <= limit and not here:
            raise Violation("24", f"{wanted.name} ({tokens} tokens) is not computed at decode", (asked.room,))


def _name(request_id: str) -> str:
    """The request of which `request_id` is an attempt."""
    return request_id.partition("~")[0]
