"""One prefill and one decode role, joined by two real exchanges and an in-memory network.

The transport copies real bytes between the two lineage pools. Nothing happens by itself: `pump` moves
messages, writes and changes until all is quiet, `turn` lets one role take a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from segue.engine.engine_api import run_step
from segue.engine.pages import PagePool
from segue.engine.request import Output, Request, SamplingParams
from segue.kv.clock import VirtualClock
from segue.kv.errors import PeerLost
from segue.kv.handles import Handles
from segue.kv.ids import Incarnation, LeaderId, Role, TransferId
from segue.kv.layout.planner import plan_pair
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.server.messages.control import Submit
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.prefill import PrefillScheduler
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec, reference

FRONT = Incarnation("f" * 32)
VOCAB = 1000


class Node(Handles):
    """One leader: role, engine, exchange, handles."""

    def __init__(
        self,
        kind: Role,
        incarnation: str,
        clock: VirtualClock,
        pages: int,
        page_tokens: int,
        *,
        chunk_tokens: int = 16,
        send_layers: int = 0,
        max_batch: int = 8,
        slots: int = 0,
    ):
        super().__init__(clock)
        self.me = LeaderId(Incarnation(incarnation * 32))
        self.kind = kind
        self.engine = LineageEngine(lineage_spec(pages, page_tokens, slots=slots), vocab_size=VOCAB)
        self.pool = PagePool(pages, page_tokens)
        limits = Limits(max_batch=max_batch, max_queue=64)
        self.exchange = Exchange(kind, self.me, f"{kind.value} {incarnation}", limits)
        make = PrefillScheduler if kind is Role.PREFILL else DecodeScheduler
        config = SchedulerConfig(
            me=self.me, name=kind.value, limits=limits, chunk_tokens=chunk_tokens, send_layers=send_layers
        )
        self.scheduler = make(self.engine, self.pool, config, self)
        self.effects: deque[events.Effect] = deque()
        #: writes that wait until their KV is ready
        self.held: list[events.PostWrite] = []

    def post(self, *batch: events.Event) -> None:
        for event in batch:
            for effect in self.exchange.handle(event, self.clock.now()):
                if isinstance(effect, events.PostWrite) and effect.ready and not effect.ready.over:
                    self.held.append(effect)
                    effect.ready.then(partial(self._ready, effect))
                    continue
                if isinstance(effect, events.Fence):
                    self.held = [write for write in self.held if write.transfer != effect.transfer]
                self.effects.append(effect)

    def _ready(self, write: events.PostWrite) -> None:
        if write in self.held:
            self.held.remove(write)
            self.effects.append(write)

    def changed(self, change: events.Change) -> None:
        self.apply(change)
        self.scheduler.on_change(change, self.clock.now())

    def turn(self) -> bool:
        """One iteration of the leader's loop; True if the engine ran."""
        now = self.clock.now()
        if (deadline := self.exchange.next_deadline()) is not None and deadline <= now:
            self.post(events.Tick())
        self.scheduler.advance(now)
        steps = self.scheduler.plan(now)
        if steps:
            self.scheduler.launched(steps)
            self.scheduler.complete(run_step(self.engine, steps, self.scheduler.on_stored()), now)
        return bool(steps)


class Pair:
    """Both nodes and the way between them. Each test ends with all its pairs at rest (`conftest.py`), unless
    one does not (`rests`)."""

    made: ClassVar[list[Pair]] = []

    def __init__(
        self,
        prefill_pages: int = 64,
        decode_pages: int = 64,
        page_tokens: tuple[int, int] = (4, 4),
        *,
        chunk_tokens: int = 16,
        send_layers: int = 0,
        max_batch: int = 8,
        slots: tuple[int, int] = (0, 0),
        rests: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        self.prefill = Node(
            Role.PREFILL,
            "a",
            self.clock,
            prefill_pages,
            page_tokens[0],
            chunk_tokens=chunk_tokens,
            send_layers=send_layers,
            slots=slots[0],
        )
        self.decode = Node(
            Role.DECODE, "d", self.clock, decode_pages, page_tokens[1], max_batch=max_batch, slots=slots[1]
        )
        self.rests = rests
        Pair.made.append(self)
        self.rooms = 0
        self.outputs: dict[str, list[Output]] = {}
        #: tells what to lose; by default nothing
        self.lose: Callable[[events.Effect], bool] = lambda _effect: False
        self.fences_proven = True
        self.join()

    def join(self) -> None:
        plan = plan_pair([self.prefill.engine.spec], [self.decode.engine.spec])
        self.prefill.post(events.PeerUp(self.decode.me, plan, "fake"))
        self.decode.post(events.PeerUp(self.prefill.me, plan, "fake"))

    def part(self) -> None:
        """The session breaks."""
        for node, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
            node.post(events.PeerDown(other.me, PeerLost("cut").info))

    def ticket(self, room: int = 0, *, attempt: int = 0, budget_s: float = 100.0, **more: Any) -> Ticket:
        """A ticket of the newest room, or of `room`."""
        halves = {"prefill": self.prefill.me, "decode": self.decode.me}
        return Ticket(room=room or self.rooms, attempt=attempt, budget_s=budget_s, **(halves | more))

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        budget_s: float = 100.0,
        to: tuple[bool, bool] = (True, True),
        prefill: LeaderId | None = None,
        **request: Any,
    ) -> list[int]:
        """Give a request with a room of its own to both, or to those in `to`; returns its right tokens. With
        another `prefill` decode alone is asked; with decode itself it computes the prompt."""
        self.rooms += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=self.rooms)
        ticket = self.ticket(budget_s=budget_s, prefill=prefill or self.prefill.me)
        message = Submit(Request(request_id=name, prompt=prompt, sampling=sampling, **request), ticket)
        for node, asked in zip((self.prefill, self.decode), to, strict=True):
            if asked and (prefill is None or node is self.decode):
                node.scheduler.submit(FRONT, message, self.clock.now())
        return reference(prompt, sampling, VOCAB, max_tokens)

    def at_decode(self, name: str, prompt: list[int], max_tokens: int) -> list[int]:
        """Give a request to decode alone, which computes its prompt; returns its right tokens."""
        return self.submit(name, prompt, max_tokens, prefill=self.decode.me)

    def transfer(self, room: int, attempt: int = 0) -> TransferId:
        """The hand-off of a room between the two."""
        return TransferId(room, attempt, self.prefill.me, self.decode.me)

    def pump(self) -> None:
        """Carry effects out until there are none, then collect outputs."""
        while self.prefill.effects or self.decode.effects:
            for node, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
                while node.effects:
                    self._carry_out(node, other, node.effects.popleft())
        for node in (self.prefill, self.decode):
            for _origin, output in node.scheduler.outbox:
                self.outputs.setdefault(output.request_id, []).append(output)
            node.scheduler.outbox.clear()

    def _carry_out(self, node: Node, other: Node, effect: events.Effect) -> None:
        if self.lose(effect):
            return
        match effect:
            case events.Send():
                other.post(events.Received(node.me, effect.message))
            case events.PostWrite():
                for b in effect.blocks:
                    for at, to, nbytes in b.ranges():
                        source = node.engine.memory[at : at + nbytes]
                        other.engine.memory[to : to + nbytes] = source
                node.post(events.WriteLanded(effect.transfer, effect.rank, effect.tag, 0.0))
            case events.Fence():
                proven = self.fences_proven or node is self.prefill
                node.post(events.FenceDone(effect.transfer, effect.rank, effect.partner, proven))
            case events.Grant():
                node.post(events.Granted(effect.transfer, effect.rank))
            case events.Phase() | events.Release() | events.Quarantined():
                node.changed(effect)

    def turns(self, count: int = 1) -> None:
        """So many steps of both."""
        for _ in range(count):
            self.pump()
            self.prefill.turn()
            self.decode.turn()

    def run(self, turns: int = 10_000) -> None:
        """Until nothing moves any more."""
        for _ in range(turns):
            self.pump()
            moved = [node.turn() for node in (self.prefill, self.decode)]
            quiet = not self.prefill.effects and not self.decode.effects
            if not any(moved) and quiet:
                self.pump()
                return
        raise AssertionError("did not come to rest")

    def tokens(self, name: str) -> list[int]:
        result: list[int] = []
        for output in self.outputs[name]:
            assert output.position == len(result) or not output.token_ids
            result += output.token_ids
        return result

    def errors(self, name: str) -> list[str]:
        return [o.error.code.value for o in self.outputs.get(name, []) if o.error]

    def assert_at_rest(self) -> None:
        """Nothing is held by any request on either side."""
        for node in (self.prefill, self.decode):
            assert not any(node.scheduler.sizes().values()), node.scheduler.sizes()
            assert not node.handles
            assert not node.held
            assert node.exchange.sizes()["transfers"] == 0
            assert node.engine.sizes()["sequences"] == 0
            assert node.pool.quarantined == 0
            node.scheduler.check_integrity()
            node.exchange.check_integrity()
