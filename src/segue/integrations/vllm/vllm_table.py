"""The scheduler side of the connector, as far as both roles share it: a table without I/O, clock or threads.

vLLM's calls go in as plain values. Orders for the worker come out of `take_orders`; the worker's reports go
into `results`. The connector calls, all on the scheduler's thread:

| vLLM | the table |
|---|---|
| `on_new_request` | `new_request` |
| `get_num_new_matched_tokens` | `matched` |
| `update_state_after_alloc` | `allocated` |
| `build_connector_meta` | `step`, then `take_orders` |
| `update_connector_output` | `results`, whose sets replace those of vLLM's output |
| `request_finished` | `finished` |
| `has_pending_push_work` | `has_work` |

Two rules keep EngineCore alive. A block that an order names is pinned until the worker proves its release, so
that vLLM may free a request's blocks at any time. An id reaches vLLM once, and only while vLLM waits for it.
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from segue.integrations.prompt_claim import ModelFacts
from segue.integrations.vllm.vllm_orders import BlocksReleased, HandoffEnded, Order, Report
from segue.integrations.vllm.vllm_pins import BlockPins, BlockPool
from segue.integrations.vllm.vllm_request import EngineRequest
from segue.integrations.vllm.vllm_settings import ConnectorSettings
from segue.kv import ErrorInfo, Internal

#: Warnings that wait for `take_warnings`, and subjects about which one was given already.
_MAX_WARNINGS = 100


class RequestEnd(enum.StrEnum):
    """How a vLLM request ended: its finish reason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """One request in one step. `computed` tokens have their KV already, `scheduled` more are computed in this
    step. `blocks` are those that it got since its last chunk (all, if it is new or resumed)."""

    request_id: str
    computed: int
    scheduled: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class PassedIds:
    """The request ids that vLLM may hear of; `failed_recving` is a part of those it waits for."""

    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(slots=True)
class HandoffFigures:
    """Outcomes of hand-offs since the last figures: how many ended with each error code (`OK`: success),
    bytes and seconds of each success. At this moment: blocks that are pinned, and those of them whose
    hand-off has failed (in quarantine)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    nbytes: list[int] = field(default_factory=list)
    wire_s: list[float] = field(default_factory=list)
    pinned: int = 0
    quarantined: int = 0


class SchedulerTable(ABC):
    """The hand-offs of one vLLM engine, on its scheduler side.

    `model` is what all prompts' KV depends on, `pool` vLLM's block pool with blocks of `block_size` tokens,
    `secret` signs and verifies `kv_transfer_params`. No method raises for anything that a client or a worker
    says, and none blocks.
    """

    def __init__(
        self,
        model: ModelFacts,
        pool: BlockPool,
        block_size: int,
        settings: ConnectorSettings,
        secret: bytes = b"",
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.settings = settings
        self.secret = secret
        self.pins = BlockPins(pool)
        self._pool = pool
        self._figures = HandoffFigures()
        self._orders: list[Order] = []
        self._numbers = itertools.count(1)
        #: request of each hand-off whose release is not proven
        self._open: dict[int, str] = {}
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        self._warnings: deque[str] = deque(maxlen=_MAX_WARNINGS)
        self._warned: dict[str, None] = {}

    # ---- vLLM's calls ------------------------------------------------------------------------

    @abstractmethod
    def new_request(self, request: EngineRequest) -> None:
        """A request arrived; nothing is allocated."""

    @abstractmethod
    def matched(self, request_id: str, computed: int) -> tuple[int, bool]:
        """The tokens after the first `computed` ones that come from a peer, and whether they come while
        other requests run. Changes nothing."""

    @abstractmethod
    def allocated(self, request_id: str, blocks: Sequence[int], external: int) -> None:
        """vLLM allocated all `blocks` of the request; `external` of its tokens come from a peer."""

    @abstractmethod
    def step(self, scheduled: Iterable[ScheduledChunk], preempted: Iterable[str] = ()) -> None:
        """vLLM scheduled a step; the blocks of `preempted` requests are free already."""

    @abstractmethod
    def finished(
        self, request_id: str, blocks: Sequence[int], computed: int, end: RequestEnd
    ) -> tuple[bool, dict[str, object] | None]:
        """The request ended with `computed` tokens in `blocks`. Returns what vLLM's `request_finished` does:
        whether vLLM must keep the blocks (never: pins do), and the client's `kv_transfer_params`."""

    def results(
        self,
        reports: Iterable[Report],
        finished_recving: Iterable[str] = (),
        failed_recving: Iterable[str] = (),
        *,
        named: Collection[str] | None = None,
    ) -> PassedIds:
        """Takes the worker's reports of one step, and the ids in vLLM's output of that step. Returns the ids
        to leave in the output: vLLM asserts that it waits for each. Ids that the worker has not `named` are
        another connector's (MultiConnector) and stay; without `named` all are the worker's. Ids in vLLM's
        `finished_sending` are always another's: pins keep our blocks."""
        sets = [set(ids) for ids in (finished_recving, failed_recving)]
        others = [set() if named is None else ids - set(named) for ids in sets]
        finished_recving, failed_recving = (ids - kept for ids, kept in zip(sets, others, strict=True))
        for report in reports:
            if report.handoff not in self._open:
                self.warn(f"the worker reports {report} of a hand-off that is not open")
                continue
            if isinstance(report, HandoffEnded):
                self._end(report.handoff, report.error)
                if report.error is None:
                    self._figures.nbytes.append(report.nbytes)
                    self._figures.wire_s.append(report.wire_s)
            elif isinstance(report, BlocksReleased):
                # Without an end before it, the KV cannot be relied on.
                self._end(report.handoff, Internal("the worker released a hand-off that had no end").info)
                del self._open[report.handoff]
                self._ended.remove(report.handoff)
                self._failed.discard(report.handoff)
                self.pins.release(report.handoff)
        passed = self._pass(finished_recving, failed_recving)
        if dropped := finished_recving - passed.finished_recving:
            self.warn(
                f"the worker names {sorted(dropped)[:5]} in finished_recving; vLLM does not wait for them"
            )
        return PassedIds(passed.finished_recving | others[0], passed.failed_recving | others[1])

    def has_work(self) -> bool:
        """True while orders or reports are outstanding: vLLM must go on stepping, because they travel in
        steps."""
        return bool(self._orders or self._open)

    # ---- the connector's calls ---------------------------------------------------------------

    def take_orders(self) -> list[Order]:
        """The orders since the last call, for the worker, in the order in which it carries them out."""
        orders, self._orders = self._orders, []
        return orders

    def take_warnings(self) -> list[str]:
        """Sentences for the log since the last call."""
        warnings = list(self._warnings)
        self._warnings.clear()
        return warnings

    def take_figures(self) -> HandoffFigures:
        """The figures since the last call."""
        figures, self._figures = self._figures, HandoffFigures()
        figures.pinned = self.pins.blocks()
        figures.quarantined = sum(map(self.pins.blocks_of, self._failed))
        return figures

    def sizes(self) -> dict[str, int]:
        """The number of entries of every table, for leak checks: all 0 at rest."""
        return {
            "orders": len(self._orders),
            "open": len(self._open),
            "ended": len(self._ended),
            "pinned": self.pins.blocks(),
        }

    def warn(self, text: str, subject: str = "") -> None:
        """Keep a sentence for the log; for one `subject` only the first one."""
        if subject:
            if subject in self._warned or len(self._warned) >= _MAX_WARNINGS:
                return
            self._warned[subject] = None
        self._warnings.append(text)

    # ---- for the two roles -------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """Queue an order for the next step."""
        self._orders.append(order)

    def open_handoff(self, request_id: str) -> int:
        """The number of a new hand-off of this request."""
        handoff = next(self._numbers)
        self._open[handoff] = request_id
        return handoff

    def is_over(self, handoff: int) -> bool:
        """The hand-off has ended, whether or not its blocks are released."""
        return handoff not in self._open or handoff in self._ended

    def free_blocks(self) -> int:
        """The number of blocks that no request holds."""
        return self._pool.get_num_free_blocks()

    def block_count(self, tokens: int) -> int:
        """The number of blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def _end(self, handoff: int, error: ErrorInfo | None) -> None:
        if handoff in self._ended:
            return
        self._ended.add(handoff)
        self._figures.outcomes["OK" if error is None else error.code.value] += 1
        if error is not None:
            self._failed.add(handoff)
            self.warn(f"hand-off of {self._open[handoff]} failed: {error.code.value}: {error.text}")
        self._on_ended(handoff, self._open[handoff], error)

    @abstractmethod
    def _on_ended(self, handoff: int, request_id: str, error: ErrorInfo | None) -> None: ...

    @abstractmethod
    def _pass(self, finished: Iterable[str], failed: Iterable[str]) -> PassedIds: ...
