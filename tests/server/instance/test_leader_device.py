"""The leader's loop over an engine that computes by itself and answers later, as one with a device does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from segue.engine.engine_api import OnStored, SequenceResult, SequenceStep, StepHandle
from segue.engine.pages import PagePool
from segue.engine.request import Grammar, Output, Request, SamplingParams
from segue.kv.clock import Clock, VirtualClock
from segue.kv.errors import AbortedByClient, ErrorCode, Internal, OutOfCapacity, PeerLost
from segue.kv.handles import Handles
from segue.kv.ids import Incarnation, KVPoll, LeaderId, RoomKey, Span
from segue.kv.io import MonotonicClock
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.server.instance.leader import (
    Abandon,
    Drain,
    FromFrontend,
    FrontendGone,
    Hold,
    Inspect,
    Item,
    Leader,
    NextRole,
)
from segue.server.messages.control import Cancel, Replace, Submit
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.prefill import PrefillScheduler
from segue.server.schedulers.scheduler import Scheduler
from segue.server.schedulers.unified import UnifiedScheduler
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec, reference

ME, PEER = LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("d" * 32))
FRONT = Incarnation("f" * 32)
VOCAB = 1000


@dataclass(slots=True)
class Forward:
    """A forward on the device."""

    steps: Sequence[SequenceStep]
    on_stored: OnStored
    on_ready: Callable[[], None]
    ready: bool = False
    results: list[SequenceResult] = field(default_factory=list)
    error: Exception | None = None


class Device(LineageEngine):
    """An engine that computes when the test says so, and never within `collect`."""

    forward: Forward
    refuses: Exception | None = None

    def launch(
        self, steps: Sequence[SequenceStep], on_stored: OnStored, on_ready: Callable[[], None]
    ) -> StepHandle:
        if self.refuses is not None:
            raise self.refuses
        self.forward = Forward(steps, on_stored, on_ready)
        return self.forward

    def compute(self) -> None:
        """The KV of all layers is in the pool."""
        self.store(self.forward.steps)
        self.forward.on_stored([step.seq_id for step in self.forward.steps])

    def finish(self, error: Exception | None = None) -> None:
        """The forward has ended."""
        forward = self.forward
        forward.error = error
        if error is None:
            forward.results = self.draw(forward.steps)
        forward.ready = True
        forward.on_ready()

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        assert handle is self.forward
        assert handle.ready, "the leader waits for the device, not for its inbox"
        if self.forward.error is not None:
            raise self.forward.error
        return self.forward.results


class Stage(Handles):
    """One leader, driven by hand; also the `Handoffs` and the owner of a prefill leader's handles."""

    def __init__(
        self,
        make: type[Scheduler] = UnifiedScheduler,
        clock: Clock | None = None,
        drain_s: float = 20.0,
        send_layers: int = 0,
    ) -> None:
        super().__init__(clock or VirtualClock())
        self.engine = Device(lineage_spec(16), vocab_size=VOCAB)
        self.pool = PagePool(16, 4)
        config = SchedulerConfig(
            me=ME, name="x", limits=Limits(drain_s=drain_s), chunk_tokens=8, send_layers=send_layers
        )
        given: list[Any] = [self.engine, self.pool, config, *([self] if make is PrefillScheduler else [])]
        self.scheduler = make(*given)
        self.sent: list[Output] = []
        self.posted: list[events.Event] = []
        self.leader = Leader(
            self.scheduler,
            self.engine,
            limits=config.limits,
            clock=self.clock,
            send=lambda _origin, outputs: self.sent.extend(outputs),
            report=lambda _load: None,
        )

    def post(self, *batch: events.Event) -> None:
        self.posted.extend(batch)

    def submit(self, name: str, prompt: list[int], room: int, max_tokens: int = 3) -> SamplingParams:
        sampling = SamplingParams(max_tokens=max_tokens, seed=room)
        decode = PEER if isinstance(self.scheduler, PrefillScheduler) else ME
        ticket = Ticket(room=room, attempt=0, prefill=ME, decode=decode, budget_s=10.0)
        request = Request(request_id=name, prompt=prompt, sampling=sampling)
        self.leader.inbox.put(FromFrontend(FRONT, Submit(request, ticket)))
        return sampling

    def changed(self, room: int, phase: KVPoll, **more: Any) -> None:
        self.leader.changed(events.Phase(RoomKey(room), phase, **more))

    def sent_chunks(self) -> list[tuple[Span, int | None, bool]]:
        """Span, layers, and whether it may leave."""
        sent = [event for event in self.posted if isinstance(event, events.SendChunk)]
        return [(e.span, e.layers, e.ready is None or e.ready.over) for e in sent]

    def errors(self) -> dict[str, ErrorCode]:
        return {output.request_id: output.error.code for output in self.sent if output.error is not None}

    def rest(self) -> None:
        """Let every forward end."""
        while self.leader.turn() or self.leader.forward is not None:
            if self.leader.forward is not None and not self.engine.forward.ready:
                self.engine.compute()
                self.engine.finish()

    def assert_at_rest(self) -> None:
        assert not any(self.scheduler.sizes().values()), self.scheduler.sizes()
        assert self.engine.sizes() == {"sequences": 0}
        self.scheduler.check_integrity()


def prefill(send_layers: int = 0) -> Stage:
    """A prefill leader whose first forward runs: the first eight tokens of ten."""
    stage = Stage(PrefillScheduler, send_layers=send_layers)
    stage.submit("r", list(range(10)), 1)
    stage.leader.turn()
    stage.changed(1, KVPoll.WAITING_FOR_INPUT)
    assert not stage.leader.turn()
    assert stage.leader.forward is not None
    return stage


def test_what_comes_in_while_the_device_computes_is_handled_and_nothing_is_planned() -> None:
    stage = Stage()
    first = stage.submit("first", [1, 2, 3], 1)
    assert not stage.leader.turn(), "the forward is not over"
    running = stage.engine.forward
    second = stage.submit("second", [4, 5], 2)
    stage.submit("refused", [], 3)
    assert not stage.leader.turn()
    assert stage.errors() == {"refused": ErrorCode.INVALID_REQUEST}
    assert len(stage.scheduler.admission.requests) == 2
    assert stage.engine.forward is running
    stage.rest()
    for name, prompt, sampling in (("first", [1, 2, 3], first), ("second", [4, 5], second)):
        tokens = [t for output in stage.sent if output.request_id == name for t in output.token_ids]
        assert tokens == reference(prompt, sampling, VOCAB, 3)
    stage.assert_at_rest()


@pytest.mark.parametrize("end", ["cancel", "frontend gone", "deadline"])
@pytest.mark.parametrize("fails", [False, True], ids=["and the forward ends", "and the forward fails"])
def test_a_request_that_ends_in_flight_has_its_pages_and_its_sequence_until_the_forward_ends(
    end: str, fails: bool
) -> None:
    stage = Stage()
    stage.submit("r", list(range(8)), 1)
    stage.leader.turn()
    used = stage.pool.used
    assert used > 0
    left = AbortedByClient("left").info
    if end == "cancel":
        stage.leader.inbox.put(FromFrontend(FRONT, Cancel("r", left)))
    elif end == "frontend gone":
        stage.leader.inbox.put(FrontendGone(FRONT, left))
    else:
        assert isinstance(stage.clock, VirtualClock)
        stage.clock.advance(10.0)
    assert not stage.leader.turn()
    assert stage.errors() == ({"r": ErrorCode.DEADLINE_EXCEEDED} if end == "deadline" else {}), "at once"
    assert not stage.scheduler.admission.requests
    assert (stage.scheduler.load().running, stage.scheduler.load().waiting) == (0, 0)
    assert stage.pool.used == used, "somebody else is given pages that the device still writes"
    assert stage.engine.sizes() == {"sequences": 1}
    assert not stage.scheduler.idle
    stage.scheduler.check_integrity()
    if not fails:
        stage.engine.compute()
    stage.engine.finish(RuntimeError("the device is broken") if fails else None)
    told = len(stage.sent)
    assert stage.leader.turn()
    assert len(stage.sent) == told, "it is told twice"
    stage.assert_at_rest()


@pytest.mark.parametrize("at", ["launch", "collect"])
def test_a_forward_that_fails_ends_exactly_its_requests(at: str) -> None:
    stage = Stage()
    stage.submit("in it", [1, 2, 3], 1)
    if at == "launch":
        stage.engine.refuses = Internal("no memory on the device")
        assert stage.leader.turn()
        stage.engine.refuses = None
        sampling = stage.submit("later", [4, 5], 2)
    else:
        stage.leader.turn()
        sampling = stage.submit("later", [4, 5], 2)
        stage.leader.turn()
        stage.engine.finish(Internal("no memory on the device"))
        assert stage.leader.turn()
    assert stage.errors() == {"in it": ErrorCode.INTERNAL}
    stage.rest()
    tokens = [t for output in stage.sent if output.request_id == "later" for t in output.token_ids]
    assert tokens == reference([4, 5], sampling, VOCAB, 3)
    stage.assert_at_rest()


def test_the_end_of_a_hand_off_in_flight_is_taken_after_the_forward_and_that_of_others_at_once() -> None:
    stage = prefill()
    used = stage.pool.used
    told: list[object] = []
    normal = stage.scheduler.on_change
    stage.scheduler.on_change = lambda change, now: (told.append(change), normal(change, now))[1]  # type: ignore[method-assign]
    stage.submit("other", list(range(20, 24)), 2)
    stage.leader.turn()
    lost = PeerLost("gone").info
    for room in (1, 2):
        stage.changed(room, KVPoll.FAILED, error=lost)
        stage.leader.changed(events.Release(RoomKey(room)))
    stage.leader.turn()
    assert stage.errors() == {"other": ErrorCode.PEER_LOST}
    assert len(stage.scheduler.table) == 1  # type: ignore[attr-defined]
    assert stage.pool.used == used, "the pages of a hand-off that has ended are free, and the device writes"
    stage.engine.compute()
    stage.engine.finish()
    stage.leader.turn()
    assert stage.errors() == {"other": ErrorCode.PEER_LOST, "r": ErrorCode.PEER_LOST}
    stage.rest()
    stage.assert_at_rest()
    stage.leader.collect()
    assert len(told) == len({repr(change) for change in told}), "each is told once, whatever is computed next"


def test_a_chunk_leaves_when_the_device_says_so_and_not_by_what_it_said_of_the_one_before() -> None:
    stage = prefill()
    first, second = Span(0, 8), Span(8, 10)
    assert stage.sent_chunks() == [(first, None, False)], "it is sent as its forward begins"
    stage.engine.compute()
    assert stage.sent_chunks() == [(first, None, True)], "nobody wakes the leader for it"
    late = stage.engine.forward.on_stored
    stage.engine.finish()
    stage.leader.turn()
    assert not stage.leader.turn(), "the second chunk is computed"
    late([1])
    assert stage.sent_chunks() == [(first, None, True), (second, None, False)], (
        "a chunk may leave before its KV is there"
    )
    stage.rest()
    assert stage.sent_chunks() == [(first, None, True), (second, None, True)]


def test_layers_of_a_chunk_leave_while_the_device_computes_the_others() -> None:
    stage = prefill(send_layers=1)
    span = Span(0, 8)
    assert stage.sent_chunks() == [(span, 1, False), (span, None, False)]
    stage.engine.forward.on_stored([1], 1)
    assert stage.sent_chunks() == [(span, 1, True), (span, None, False)]
    stage.engine.compute()
    assert stage.sent_chunks() == [(span, 1, True), (span, None, True)]
    stage.rest()


@pytest.mark.parametrize("says", [True, False])
def test_a_chunk_of_which_the_forward_says_nothing_leaves_at_its_end_unless_that_failed(says: bool) -> None:
    stage = prefill()
    if says:
        stage.engine.store(stage.engine.forward.steps)
        stage.engine.finish()
    else:
        stage.engine.finish(RuntimeError("out of device memory"))
    stage.leader.turn()
    assert stage.sent_chunks()[0] == (Span(0, 8), None, says)
    stage.rest()


def test_a_chunk_that_could_not_be_sent_ends_its_request_alone() -> None:
    stage = Stage(PrefillScheduler)
    for room, name in ((1, "r"), (2, "other")):
        stage.submit(name, list(range(4)), room)
    stage.leader.turn()
    post = stage.post

    def breaks(*batch: events.Event) -> None:
        if isinstance(batch[0], events.SendChunk) and batch[0].key.room == 1:
            raise RuntimeError("a bug")
        post(*batch)

    stage.post = breaks  # type: ignore[method-assign]
    for room in (1, 2):
        stage.changed(room, KVPoll.WAITING_FOR_INPUT)
    stage.leader.turn()
    assert stage.errors() == {"r": ErrorCode.INTERNAL}
    assert [step.seq_id for step in stage.engine.forward.steps] == [2]


def test_a_leader_whose_device_never_answers_still_leaves() -> None:
    stage = Stage(clock=MonotonicClock(), drain_s=0.05)
    stage.submit("r", [1, 2, 3], 1)
    stage.leader.inbox.put(Drain())
    stage.leader.run()
    assert stage.leader.forward is not None


def test_a_loop_and_a_device_on_threads_of_their_own_give_every_token() -> None:
    stage = Stage(clock=MonotonicClock())
    engine, launched = stage.engine, queue.SimpleQueue[Forward | None]()
    launch = engine.launch

    def launch_there(*given: Any) -> StepHandle:
        handle = launch(*given)
        launched.put(engine.forward)
        return handle

    def device() -> None:
        while launched.get(timeout=60) is not None:
            engine.compute()
            engine.finish()

    engine.launch = launch_there  # type: ignore[method-assign]
    prompts = {f"r{i}": [i, i + 1, i + 2] * (1 + i % 3) for i in range(8)}
    wanted = {name: stage.submit(name, prompt, 1 + int(name[1:])) for name, prompt in prompts.items()}
    threads = [threading.Thread(target=device), threading.Thread(target=stage.leader.run)]
    for thread in threads:
        thread.start()
    stage.leader.inbox.put(Drain())
    threads[1].join(60)
    launched.put(None)
    threads[0].join(60)
    for name, sampling in wanted.items():
        tokens = [t for output in stage.sent if output.request_id == name for t in output.token_ids]
        assert tokens == reference(prompts[name], sampling, VOCAB, 3)
    stage.assert_at_rest()


# ---- output formats that are compiled beside the leader's thread ------------------------------------------


def test_a_forward_that_ends_while_the_leader_looks_at_its_inbox_is_collected_at_once() -> None:
    """The item that says so was taken; the leader slept until the next deadline, the request's own."""
    rig = Stage()
    rig.submit("r", [1, 2], 1, max_tokens=1)
    assert not rig.leader.turn()
    rig.leader.inbox.put(Inspect(lambda _scheduler: (rig.engine.compute(), rig.engine.finish())))
    assert rig.leader.turn(), "the leader sleeps although its forward has ended"
    rig.leader.turn()
    assert [out.finish for out in rig.sent] == ["length"]


class SlowFormats:
    """Compiles when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[Grammar, Callable[[], None]] = {}
        self.settled: set[Grammar] = set()
        self.tenants: list[str] = []
        self.full = False

    def known(self, grammar: Grammar) -> bool:
        return grammar in self.settled

    def prepare(self, grammar: Grammar, done: Callable[[], None], tenant: str = "") -> None:
        self.tenants.append(tenant)
        if self.full:
            raise OutOfCapacity("too many formats wait")
        assert grammar not in self.asked, "one compilation at a time"
        self.asked[grammar] = done

    def settle(self, grammar: Grammar) -> None:
        del self.asked[grammar]
        self.settled.add(grammar)


def shaped(rig: Stage, name: str, room: int, regex: str = "a", tenant: str = "") -> Grammar:
    """Submit a request with an output format."""
    grammar = Grammar("regex", regex)
    sampling = SamplingParams(max_tokens=3, grammar=grammar)
    ticket = Ticket(room=room, attempt=0, prefill=ME, decode=ME, budget_s=10.0)
    request = Request(request_id=name, prompt=[1, 2], sampling=sampling, tenant=tenant)
    rig.leader.inbox.put(FromFrontend(FRONT, Submit(request, ticket)))
    return grammar


def formats_rig() -> tuple[Stage, SlowFormats]:
    rig, formats = Stage(), SlowFormats()
    rig.engine.formats = formats
    return rig, formats


def open_requests(rig: Stage) -> set[str]:
    return {state.request.request_id for state in rig.scheduler.admission.requests.values()}


def test_requests_of_a_format_wait_for_one_compilation_and_others_go_on() -> None:
    rig, formats = formats_rig()
    grammar = shaped(rig, "n1", 1)
    shaped(rig, "n2", 2)
    rig.submit("plain", [3, 4], 3)
    rig.leader.decide()
    assert open_requests(rig) == {"plain"}
    formats.asked[grammar]()
    rig.leader.attend()
    assert open_requests(rig) == {"plain", "n1", "n2"}
    shaped(rig, "n3", 4)
    rig.leader.attend()
    assert "n3" in open_requests(rig), "known: nothing to wait for"


def test_a_request_that_ends_while_its_format_is_compiled_is_not_begun() -> None:
    rig, formats = formats_rig()
    grammar = shaped(rig, "cancelled", 1)
    shaped(rig, "stays", 2)
    rig.leader.inbox.put(FromFrontend(FRONT, Cancel("cancelled", AbortedByClient("gone").info)))
    rig.leader.decide()
    formats.asked[grammar]()
    rig.leader.attend()
    assert open_requests(rig) == {"stays"}
    other = shaped(rig, "orphan", 3, "b")
    rig.leader.inbox.put(FrontendGone(FRONT, PeerLost("gone").info))
    rig.leader.attend()
    formats.asked[other]()
    rig.leader.attend()
    assert open_requests(rig) == set()


def test_a_half_that_waits_for_its_format_takes_the_ticket_of_the_next_decode() -> None:
    """Else it begins with the first one's, and waits for a decode that nobody submits to any more."""
    rig, formats = formats_rig()
    grammar = shaped(rig, "kept", 1)
    shaped(rig, "stays", 2)
    rig.leader.decide()
    again = Ticket(room=1, attempt=1, prefill=ME, decode=ME, budget_s=10.0)
    rig.leader.inbox.put(FromFrontend(FRONT, Replace("kept", again)))
    rig.leader.inbox.put(FromFrontend(FRONT, Replace("unknown", again)))
    rig.leader.attend()
    assert [(out.request_id, out.error and out.error.code) for out in rig.sent] == [
        ("unknown", ErrorCode.OUT_OF_CAPACITY)
    ]
    formats.asked[grammar]()
    rig.leader.attend()
    tickets = {s.request.request_id: s.ticket for s in rig.scheduler.admission.requests.values()}
    assert tickets["kept"] == again
    assert tickets["stays"].attempt == 0


def test_a_half_of_direct_mode_that_ends_before_its_format_is_compiled_tells_the_other_half() -> None:
    """A scheduler has not seen it, and nobody else tells."""
    rig, formats = formats_rig()
    told: list[tuple[str, ErrorCode]] = []
    rig.scheduler.leave_out = lambda submit, error: told.append((submit.request.request_id, error.code))  # type: ignore[method-assign]
    shaped(rig, "cancelled", 1)
    shaped(rig, "orphan", 2)
    rig.leader.inbox.put(FromFrontend(FRONT, Cancel("cancelled", AbortedByClient("gone").info)))
    rig.leader.decide()
    assert told == [("cancelled", ErrorCode.ABORTED_BY_CLIENT)]
    rig.leader.inbox.put(FrontendGone(FRONT, PeerLost("gone").info))
    rig.leader.decide()
    assert told[1:] == [("orphan", ErrorCode.PEER_LOST)]
    formats.full = True
    shaped(rig, "full", 3, "b")
    rig.leader.decide()
    assert told[2:] == [("full", ErrorCode.OUT_OF_CAPACITY)]


def test_formats_that_cannot_wait_are_refused_and_a_draining_leader_parks_nothing() -> None:
    rig, formats = formats_rig()
    formats.full = True
    shaped(rig, "full", 1, tenant="key 2")
    rig.leader.decide()
    assert formats.tenants == ["key 2"]
    rig.leader.inbox.put(Drain())
    shaped(rig, "late", 2)
    rig.leader.decide()
    codes = {out.request_id: out.error.code for out in rig.sent if out.error is not None}
    assert codes == {"full": ErrorCode.OUT_OF_CAPACITY, "late": ErrorCode.DRAINING}


def test_a_leader_that_is_held_answers_who_waits_for_a_format_and_takes_its_next_role() -> None:
    """Else an operator is told that it has drained, and its order to turn is refused."""
    rig, _ = formats_rig()
    shaped(rig, "waits", 1)
    rig.leader.decide()
    refused: list[bool] = []
    rig.leader.inbox.put(Hold(True))
    rig.leader.inbox.put(NextRole(lambda: refused.append(True)))
    rig.leader.decide()
    assert rig.errors() == {"waits": ErrorCode.DRAINING}
    assert (rig.leader.drained(), refused) == (True, [])


def test_requests_that_wait_for_formats_count_as_held_and_as_many_may_wait_for_one() -> None:
    rig, formats = formats_rig()
    rig.submit("plain", [3, 4], 1)
    most = rig.leader.limits.max_queue
    for at in range(2, most + 2):
        shaped(rig, f"n{at}", at, "a" if at % 2 else "b")
    rig.leader.attend()
    assert rig.errors() == {f"n{most + 1}": ErrorCode.OUT_OF_CAPACITY}
    for ready in list(formats.asked.values()):
        ready()
    rig.leader.attend()
    assert len(open_requests(rig)) == most


@pytest.mark.parametrize(
    "item", [Drain(), Abandon(PeerLost("a rank is gone").info)], ids=["drain", "abandon"]
)
def test_parked_requests_of_a_leader_that_leaves_are_refused_at_once_and_not_begun(item: Item) -> None:
    rig, formats = formats_rig()
    grammar = shaped(rig, "n1", 1)
    shaped(rig, "n2", 2)
    other = shaped(rig, "n3", 3, "b")
    rig.leader.decide()
    assert rig.errors() == {}
    rig.leader.inbox.put(item)
    rig.leader.decide()
    assert rig.errors() == dict.fromkeys(("n1", "n2", "n3"), ErrorCode.DRAINING)
    assert rig.leader.drained(), "nothing is left that it would have to wait for"
    told = len(rig.sent)
    for ready in (grammar, other):
        formats.asked[ready]()
    rig.leader.decide()
    assert len(rig.sent) == told, "each is refused once"
    rig.assert_at_rest()


def test_a_parked_request_that_was_cancelled_keeps_no_leader_from_another_role() -> None:
    rig, _ = formats_rig()
    shaped(rig, "parked", 1)
    rig.leader.inbox.put(Hold(True))
    rig.leader.inbox.put(FromFrontend(FRONT, Cancel("parked", AbortedByClient("gone").info)))
    refused: list[str] = []
    rig.leader.inbox.put(NextRole(lambda: refused.append("refused")))
    rig.leader.decide()
    assert refused == []
    assert rig.leader.drained()


def test_a_leader_that_was_resumed_refuses_another_role_and_serves_on() -> None:
    rig = Stage()
    refused: list[str] = []
    rig.leader.inbox.put(Hold(True))
    rig.leader.decide()
    assert rig.scheduler.load().drained
    rig.leader.inbox.put(Hold(False))
    rig.submit("r", [1, 2, 3], 1)
    rig.leader.inbox.put(NextRole(lambda: refused.append("refused")))
    rig.leader.decide()
    assert refused == ["refused"]
    assert not rig.leader.drained()
    assert open_requests(rig) == {"r"}
