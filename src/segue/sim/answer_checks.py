"""What clients get, checked by the numbers of `handoff.md`: tokens, usage, errors, attempts, one end each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.balance.base import Candidate
from segue.core.errors import ErrorCode, ErrorInfo
from segue.core.request import Usage
from segue.core.types import LeaderId, Role
from segue.sim.engine import answer, logprob_of, reference
from segue.sim.node import VOCAB
from segue.sim.world import Violation

if TYPE_CHECKING:
    from segue.sim.deployment import Deployment
    from segue.sim.front import Call

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
_AFTER_COMMIT = frozenset({ErrorCode.INTERNAL, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CHECKSUM_MISMATCH})


class AnswerChecks:
    """The part of `Checks` that looks at frontends."""

    deployment: Deployment
    spoiled: dict[int, str]

    def _explained(self, error: ErrorInfo, rooms: tuple[int, ...]) -> None:
        """12: no attempt fails without a cause that touches it."""
        wrong = self.deployment.causes.unexplained(error, rooms)
        if wrong:
            raise Violation("12", f"{error.code} without a cause: {wrong}: {error}", rooms)

    def tokens(self, call: Call) -> None:
        """24, as soon as it can be seen; 23 with the first token."""
        wanted = call.wanted
        if call.room in self.spoiled:
            raise Violation("7", f"{wanted.name} got {call.tokens} from spoiled metadata", (call.room,))
        expected = reference(wanted.prompt, wanted.sampling, VOCAB, len(call.tokens))
        if call.tokens != expected:
            raise Violation("24", f"{wanted.name} got {call.tokens}, not {expected}", tuple(call.rooms))
        self.usage(call, call.usage)

    def usage(self, call: Call, usage: Usage | None) -> None:
        """23, of what a client is told and of what each attempt's worker says."""
        wanted = call.wanted
        if usage is not None and (
            usage.prompt_tokens != usage.decode_cached + usage.prefill_cached + usage.computed
            or usage.prompt_tokens != len(wanted.prompt)
            or min(usage.decode_cached, usage.prefill_cached, usage.computed) < 0
        ):
            raise Violation("23", f"{wanted.name}: {usage}", tuple(call.rooms))

    def placed(
        self, call: Call, route: tuple[LeaderId, LeaderId], there: dict[Role, list[Candidate]]
    ) -> None:
        """24 for what is asked of an attempt; and that it is asked of somebody who may be there."""
        wanted, asked, rooms = call.wanted, call.request, tuple(call.rooms)
        if len(rooms) >= MAX_ATTEMPTS:
            raise Violation("24", f"{wanted.name} is placed for the {len(rooms) + 1}th time", rooms)
        if (asked.prompt, asked.output) != (wanted.prompt, call.tokens):
            raise Violation("24", f"{wanted.name} goes on after {asked.output}, not {call.tokens}", rooms)
        for leader in set(route) & call.dead:
            role = next(r for r, found in there.items() if any(c.leader == leader for c in found))
            # Others that are said to be gone are no better choice.
            worse = call.dead | call.attempts.lost
            if any(c.leader not in worse for c in there[role]):
                raise Violation("24", f"{wanted.name} is asked of {leader} again, which it lost", rooms)

    def error(self, call: Call, error: ErrorInfo, role: Role) -> None:
        """An error that came from a leader; 19: nothing between the leaders fails what decode has."""
        rooms = tuple(call.rooms)
        if not error.origin or (not error.phase and error.code not in _AT_THE_DOOR):
            raise Violation("25", f"{call.wanted.name}: no origin or phase in {error}", rooms)
        if call.wanted.bad:
            return
        self._explained(error, (call.room,))
        if role is Role.DECODE and call.begun and error.code not in _AFTER_COMMIT:
            raise Violation("19", f"{call.wanted.name} failed after its first token: {error}", rooms)

    def left(self, call: Call, error: ErrorInfo) -> None:
        """A session ended under a request."""
        self._explained(error, (call.room,))

    def ended(self, call: Call) -> None:
        """A request has its one end."""
        self.deployment.counts[call.outcome] += 1
        if call.outcome == "done":
            wanted = call.wanted
            count = len(call.tokens)
            # A generation may also end where the context or the pool of its instance does.
            ends = {min(512, n.pages * n.page_tokens) for n in self.deployment.scenario.nodes}
            due = len(answer(wanted.prompt, wanted.sampling, VOCAB, self.deployment.eos))
            if count != due and (count > due or len(wanted.prompt) + count not in ends):
                raise Violation(
                    "24", f"{wanted.name} ended after {count} tokens, not {due}", tuple(call.rooms)
                )
            asked = wanted.sampling.prompt_logprobs is not None
            expected = [logprob_of(wanted.prompt, at) for at in range(len(wanted.prompt))] if asked else []
            if call.prompt_logprobs != expected:
                raise Violation(
                    "24", f"{wanted.name}: wrong log-probabilities of its prompt", tuple(call.rooms)
                )
