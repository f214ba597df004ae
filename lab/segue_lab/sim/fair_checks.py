"""Every waiting prompt is started within a bound of work, under any other load
(`server/schedulers/fair_queue.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segue_lab.sim.world import Violation

if TYPE_CHECKING:
    from segue.kv.ids import LeaderId
    from segue.server.schedulers.request_state import RequestState
    from segue_lab.sim.node_views import NodeView

#: Full steps by which the oldest may be passed (stated here anew, not taken from production).
PASSED_STEPS = 8


@dataclass(slots=True)
class Waiting:
    """A waiting request: its phase, how many older ones waited when it came, and the tokens of prompts that
    were started since."""

    phase: str
    older: int
    started: int = 0


class FairChecks:
    """Looks at the queue of prompts after each turn of a leader."""

    def __init__(self) -> None:
        self._waiting: dict[LeaderId, dict[RequestState, Waiting]] = {}
        #: the longest prompt that a leader was given
        self._longest: dict[LeaderId, int] = {}

    def turn(self, node: NodeView) -> None:
        """Fair: nobody waits while more is started than the queue's bound."""
        scheduler: Any = node.scheduler
        queue = getattr(scheduler, "queue", None)
        if queue is None:
            return
        waiting = self._waiting.setdefault(node.me, {})
        gone = [state for state in waiting if state not in queue.waiting]
        # Nothing of the others was begun.
        work = sum(len(state.prompt) for state in gone if state.phase != waiting[state].phase)
        for state in gone:
            del waiting[state]
        limit, longest = PASSED_STEPS * node.spec.chunk_tokens, self._longest.get(node.me, 0)
        for state, seen in waiting.items():
            seen.started += work
            if seen.started > (seen.older + 1) * (limit + longest) + seen.older * longest:
                text = f"{node.name} has started {seen.started} tokens since {state.request.request_id} came"
                raise Violation("fair", f"{text}, and {seen.older} older ones", (state.ticket.room,))
        came = [state for state in queue.waiting if state not in waiting]
        older = len(queue.waiting) - 1  # any request of one turn may be the last
        for state in came:
            waiting[state] = Waiting(state.phase, older)
            self._longest[node.me] = max(self._longest.get(node.me, 0), len(state.prompt))
