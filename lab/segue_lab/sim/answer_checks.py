"""Checks of the answers to clients, by the numbers of `docs/protocol.md`: tokens, usage, errors, attempts,
one end each."""

from __future__ import annotations

from segue.engine.request import Request, Usage
from segue.kv.errors import ErrorCode, ErrorInfo
from segue.kv.ids import LeaderId, Role
from segue_lab.sim.causes import Causes
from segue_lab.sim.clients import Asked
from segue_lab.sim.node_spec import VOCAB
from segue_lab.sim.node_views import FrontView, KVView
from segue_lab.sim.sim_engine import answer, logprob_of, reference
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Violation

#: Placements of one request, whatever happens to it (stated here anew, not taken from production).
MAX_ATTEMPTS = 4

_AT_THE_DOOR = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.UNAUTHORIZED,
        ErrorCode.DRAINING,
        ErrorCode.OUT_OF_CAPACITY,
        ErrorCode.DEADLINE_EXCEEDED,
    }
)
#: CHECKSUM_MISMATCH: of a copy in host memory, which a cause in the ledger must have flipped.
_AFTER_COMMIT = frozenset(
    {
        ErrorCode.INTERNAL,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.CHECKSUM_MISMATCH,
        ErrorCode.RANK_DIVERGENCE,
    }
)


class AnswerChecks:
    """Checks of frontends."""

    def __init__(self, state: SimState, causes: Causes) -> None:
        self._state = state
        self._causes = causes

    def tokens(self, asked: Asked) -> None:
        """24, as soon as it can be seen; 23 with the first token."""
        wanted = asked.wanted
        if asked.attempts and (asked.room, asked.attempts[-1].ticket.attempt) in self._state.spoiled:
            raise Violation("7", f"{wanted.name} got {asked.tokens} from spoiled metadata", (asked.room,))
        if asked.room in self._causes.conflicts:
            raise Violation("conflict", f"{wanted.name} is served in spite of its DP rank", (asked.room,))
        expected = reference(wanted.prompt, wanted.sampling, VOCAB, len(asked.tokens))
        if asked.tokens != expected:
            raise Violation("24", f"{wanted.name} got {asked.tokens}, not {expected}", tuple(asked.rooms))
        self.usage(asked, asked.usage)

    def usage(self, asked: Asked, usage: Usage | None) -> None:
        """23, of what a client is told and of what each attempt's worker says."""
        wanted = asked.wanted
        if usage is not None and (
            usage.prompt_tokens != usage.decode_cached + usage.prefill_cached + usage.computed
            or usage.prompt_tokens != len(wanted.prompt)
            or min(usage.decode_cached, usage.prefill_cached, usage.computed) < 0
        ):
            raise Violation("23", f"{wanted.name}: {usage}", tuple(asked.rooms))

    def placed(self, asked: Asked, request: Request, kept: LeaderId | None = None) -> None:
        """24 for what is asked of an attempt. And a pair is a transaction: nothing of the attempt before is
        left running that nobody has told to end, but prefill's half at `kept`, which goes on."""
        wanted, rooms = asked.wanted, tuple(asked.rooms)
        if len(rooms) - asked.gone >= MAX_ATTEMPTS:
            raise Violation("24", f"{wanted.name} is placed for the {len(rooms) + 1}th time", rooms)
        if (request.prompt, request.output) != (wanted.prompt, asked.tokens):
            raise Violation("24", f"{wanted.name} goes on after {request.output}, not {asked.tokens}", rooms)
        if kept is not None and asked.attempts[-1].live.pop(kept, None) is None:
            raise Violation("pair", f"{wanted.name} goes on at {kept}, which has ended its half", rooms)
        self._halves(asked)

    def _halves(self, asked: Asked) -> None:
        if asked.attempts and asked.attempts[-1].live:
            left = ", ".join(f"{role} {leader}" for leader, role in asked.attempts[-1].live.items())
            raise Violation("pair", f"{asked.wanted.name} still runs at {left}", tuple(asked.rooms))

    def refused(self, front: FrontView, asked: Asked, error: ErrorInfo) -> None:
        """25, of a client's one error: it is that of its last attempt, or its frontend's own and true."""
        rooms, now = tuple(asked.rooms), self._state.world.now
        own = error.origin == "frontend"
        if own and error.code is ErrorCode.DEADLINE_EXCEEDED:
            wrong = "before its deadline" if now < asked.deadline - 1e-6 else ""
        elif own and error.code in (ErrorCode.STARTING, ErrorCode.BOOTSTRAP_UNREACHABLE):
            wrong = "though somebody could serve" if front.pairs(asked.wanted) else ""
        elif own and error.code is ErrorCode.DP_RANK_OUT_OF_RANGE:  # its instance has changed its role
            known = front.fleet.membership.replicas.values()
            sizes = [r.record.dp_size for r in known if r.role is Role.PREFILL]
            wrong = (
                "though there is one" if max(sizes, default=1) > (asked.wanted.prefill_dp_rank or 0) else ""
            )
        else:
            wrong = "" if asked.failure and asked.failure.code is error.code else f"not {asked.failure}"
        if wrong:
            raise Violation("25", f"{asked.wanted.name} is told {error}, {wrong}", rooms)

    def ended_at(self, front: FrontView, asked: Asked) -> None:
        """15, of a request: its frontend ends it when its deadline passes, whatever the workers do. And when
        it has ended, nothing of it is left running."""
        now = self._state.world.now
        if now > asked.deadline + 0.001 and not front.was_paused:
            raise Violation("15", f"{asked.wanted.name} outlived its deadline", tuple(asked.rooms))
        self._halves(asked)

    def waiting(self, front: FrontView) -> None:
        """17, of requests: none waits while somebody could serve it who is not said to be gone. Something may
        be about to place it, so it must have been so at the last look too."""
        for asked in front.asked.values():
            pairs = front.pairs(asked.wanted)
            idle = not asked.attempts or Role.DECODE not in asked.attempts[-1].live.values()
            worse = asked.dead | asked.suspect
            if not idle or not any(p.leader not in worse and d.leader not in worse for p, d in pairs):
                asked.idle_at = -1
            elif asked.idle_at == len(asked.attempts):
                raise Violation("17", f"{asked.wanted.name} waits for nothing", tuple(asked.rooms))
            else:
                asked.idle_at = len(asked.attempts)

    def error(self, asked: Asked, error: ErrorInfo, role: Role) -> None:
        """An error that came from a leader; 19: nothing between the leaders fails what decode has."""
        rooms = tuple(asked.rooms)
        if not error.origin or (not error.phase and error.code not in _AT_THE_DOOR):
            raise Violation("25", f"{asked.wanted.name}: no origin or phase in {error}", rooms)
        if asked.wanted.bad:
            return
        self._causes.require(error, (asked.room,))
        if (
            role is Role.DECODE
            and asked.begun
            and error.code not in _AFTER_COMMIT
            and not self._lost_rank(asked)
        ):
            raise Violation("19", f"{asked.wanted.name} failed after its first token: {error}", rooms)

    def _lost_rank(self, asked: Asked) -> bool:
        """Whether the instance that decodes it cannot compute any more."""
        node = self._state.by_leader[asked.attempts[-1].pair[1]]
        return isinstance(node, KVView) and node.lost_rank

    def left(self, asked: Asked, error: ErrorInfo) -> None:
        """A session ended under a request."""
        self._causes.require(error, (asked.room,))

    def ended(self, asked: Asked) -> None:
        """A request has its one end."""
        self._state.counts[asked.outcome] += 1
        if asked.error is not None and asked.error.code is ErrorCode.DP_RANK_CONFLICT:
            self._state.counts["ended by a conflict of ranks"] += 1
        if asked.outcome == "done":
            wanted = asked.wanted
            count = len(asked.tokens)
            # A generation may also end where the context or the pool of its instance does.
            ends = {min(512, n.pages * n.page_tokens) for n in self._state.scenario.nodes}
            due = len(answer(wanted.prompt, wanted.sampling, VOCAB, self._state.eos))
            if count != due and (count > due or len(wanted.prompt) + count not in ends):
                raise Violation(
                    "24", f"{wanted.name} ended after {count} tokens, not {due}", tuple(asked.rooms)
                )
            prompted = wanted.sampling.prompt_logprobs is not None
            expected = [logprob_of(wanted.prompt, at) for at in range(len(wanted.prompt))] if prompted else []
            if asked.prompt_logprobs != expected:
                raise Violation(
                    "24", f"{wanted.name}: wrong log-probabilities of its prompt", tuple(asked.rooms)
                )
