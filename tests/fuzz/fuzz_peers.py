"""Targets behind a session: what a peer that proved itself may still get wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
from fuzz_changes import SEPARATOR, Target, changed_msgpack

from segue.engine.engine_api import run_step
from segue.engine.pages import PagePool
from segue.engine.request import FinishReason, Grammar, Output, Request, SamplingParams, TokenLogprob, Usage
from segue.kv.errors import DECODE_ERRORS, ErrorCode, ErrorInfo, InvalidRequest
from segue.kv.ids import Incarnation, LeaderId, Role, Span, TransferId
from segue.kv.layout.planner import plan_pair
from segue.kv.limits import Limits
from segue.kv.peers import join
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import (
    HANDOFF_VERSIONS,
    Abort,
    Accepted,
    ChunkPosted,
    Committed,
    Declined,
    Destination,
    Drained,
    Failed,
    Gone,
    HandoffMessage,
    LeaderInfo,
    Metadata,
    Moved,
)
from segue.kv.session.api import PeerInfo
from segue.kv.transport.base import Endpoint
from segue.server.messages.control import Cancel, ControlMessage, Load, Outputs, Submit
from segue.server.messages.ticket import Ticket, sign_ticket, verify_ticket
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.unified import UnifiedScheduler
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec

SECRET = b"a secret of the tests"
P, D, F = LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("d" * 32)), Incarnation("f" * 32)
TRANSFER, SECOND = TransferId(7, 0, P, D), TransferId(7, 1, P, D)
CLAIM = b"the prompt and the weights"
BROKEN = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, text="it broke", room=7, retryable=True)
SPEC = lineage_spec(32, 4)
PLAN = plan_pair([SPEC], [SPEC])
encode = msgspec.msgpack.encode


def info(**changes: Any) -> LeaderInfo:
    endpoint = encode(Endpoint("fake", SPEC.nbytes, b"x"))
    fields: dict[str, Any] = {
        "versions": HANDOFF_VERSIONS,
        "model": "lineage-1",
        "dp_size": 1,
        "ranks": [SPEC],
        "endpoints": {"fake": [endpoint]},
        "max_transfers": 100,
    }
    return LeaderInfo(**(fields | changes))


# ---- joining ------------------------------------------------------------------------------------


def _join(data: bytes) -> str:
    peer = PeerInfo(P, Role.PREFILL, "127.0.0.1:1", data)
    return f"joined over {join(Role.DECODE, info(), peer).names[0]}"


def _hellos() -> list[bytes]:
    two = [msgspec.structs.replace(SPEC, pages=64), SPEC]
    return [encode(info()), encode(info(model="m")), encode(info(ranks=two)), encode(info(endpoints={}))]


# ---- hand-off messages --------------------------------------------------------------------------

_messages = msgspec.msgpack.Decoder(HandoffMessage)


def _message_seeds() -> list[bytes]:
    messages = [
        Accepted(TRANSFER),
        Moved(TRANSFER, 1),
        ChunkPosted(
            transfer=TRANSFER, source=0, target=0, sequence=0, span=Span(0, 8), nbytes=64, final=False
        ),
        ChunkPosted(
            transfer=TRANSFER, source=0, target=0, sequence=1, span=Span(8, 10), nbytes=16, final=True
        ),
        Metadata(transfer=TRANSFER, prompt_tokens=10, content=b"what the engine says"),
        Declined(TRANSFER, BROKEN, CLAIM),
        Committed(TRANSFER),
        Failed(TRANSFER, BROKEN),
        Abort(TRANSFER),
        Drained(TRANSFER),
        Gone(TRANSFER),
    ]
    destination = _destination()
    second = {"transfer": SECOND, "epoch": destination.epoch + 1}
    destinations = [
        destination,
        msgspec.structs.replace(destination, **second),
        msgspec.structs.replace(destination, **second, inferred=True),
    ]
    return [encode(m) for m in (*messages, *destinations)]


@cache
def _destination() -> Destination:
    """The real one: what a decode exchange sends."""
    exchange = _exchange(Role.DECODE, P)
    exchange.handle(events.Publish(TRANSFER.received_as, (0, 1, 2), 0), 0.1)
    effects = exchange.handle(events.Granted(TRANSFER, 0), 0.1)
    return next(
        e.message for e in effects if isinstance(e, events.Send) and isinstance(e.message, Destination)
    )


def _exchange(role: Role, peer: LeaderId) -> Exchange:
    me = P if role is Role.PREFILL else D
    exchange = Exchange(role, me, f"{role.value} x", Limits(), "fake")
    exchange.handle(events.PeerUp(peer, PLAN, "fake"), 0.0)
    if role is Role.DECODE:
        opening = events.OpenReceiver(
            key=TRANSFER.received_as, prefill=peer, prompt_tokens=10, deadline=50.0, claim=CLAIM
        )
        exchange.handle(opening, 0.0)
    return exchange


def _expect(exchange: Exchange, now: float, **options: Any) -> None:
    """Prefill's engine opens the room; all of its KV is there already."""
    room = TRANSFER.sent_as
    with suppress(InvalidRequest):  # decode's words may have closed it
        exchange.handle(
            events.ExpectRoom(key=room, prompt_tokens=10, deadline=50.0, claim=CLAIM, **options), now
        )
        exchange.handle(events.SendChunk(room, Span(0, 10), (0, 1, 2)), now)


def _prefill(data: bytes) -> str:
    exchange = _exchange(Role.PREFILL, D)
    _expect(exchange, 0.0, decode=D)
    exchange.handle(events.Received(D, _destination()), 0.1)
    return _deliver(exchange, D, data)


def _rooms(data: bytes) -> str:
    """The same words before the engine's request, and in a room that waits for the next attempt."""
    exchange = _exchange(Role.PREFILL, D)
    told = _deliver(exchange, D, data, over=False)
    _expect(exchange, 0.2, retain_s=20.0)
    return f"{told} | {_deliver(exchange, D, data)}"


def _decode(data: bytes) -> str:
    exchange = _exchange(Role.DECODE, P)
    exchange.handle(events.Publish(TRANSFER.received_as, (0, 1, 2), 0), 0.1)
    return _deliver(exchange, P, data)


def _deliver(exchange: Exchange, peer: LeaderId, data: bytes, *, over: bool = True) -> str:
    """Up to three messages, each a msgpack value after the other."""
    told = []
    for piece in data.split(SEPARATOR)[:3]:
        try:
            message = _messages.decode(piece)
        except DECODE_ERRORS as error:
            told.append(f"undecodable {str(error)[:30]}")
            continue
        effects = exchange.handle(events.Received(peer, message), 0.2)
        exchange.check_integrity()
        told.append(" ".join([type(message).__name__, *(type(e).__name__ for e in effects)]))
    assert exchange.counters["internal_errors"] == 0, "a peer's message hit a bug"
    for effects_of in (events.PeerDown(peer, BROKEN), events.Tick()) if over else ():
        exchange.handle(effects_of, 60.0)
    exchange.check_integrity()
    return " | ".join(told)


# ---- requests -----------------------------------------------------------------------------------

_control = msgspec.msgpack.Decoder(ControlMessage)


def _ticket(room: int = 7) -> Ticket:
    return sign_ticket(Ticket(room=room, attempt=0, prefill=P, decode=P, budget_s=30.0), b"", F)


def _submit_seeds() -> list[bytes]:
    plain = SamplingParams(max_tokens=2)
    rich = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop_token_ids=[1, 2],
        logprobs=2,
        prompt_logprobs=1,
        logit_bias={3: -1.5},
        grammar=Grammar("regex", "a+"),
    )
    requests = [
        Request(request_id=f"r{i}", prompt=list(range(1, 12)), sampling=sampling)
        for i, sampling in enumerate((plain, rich, plain))
    ]
    return [
        *(encode(Submit(request, _ticket(9 + i))) for i, request in enumerate(requests)),
        encode(Cancel("r0", BROKEN)),
        encode(Load(dp_rank=0, running=1, waiting=0, tokens=5, pages_free=3, pages_total=9)),
    ]


def _submit(data: bytes) -> str:
    """A frontend's message at a role; then a few steps. (The role's own errors are its answers.)"""
    try:
        message = _control.decode(data)
    except DECODE_ERRORS as error:
        return f"undecodable {str(error)[:30]}"
    engine = LineageEngine(SPEC, vocab_size=1000)
    config = SchedulerConfig(me=P, name="u", limits=Limits(max_batch=4, max_queue=8))
    scheduler = UnifiedScheduler(engine, PagePool(32, 4), config)
    if isinstance(message, Submit):
        scheduler.submit(F, message, 1.0)
    elif isinstance(message, Cancel):
        scheduler.cancel(F, message.request_id, message.reason, 1.0)
    told = type(message).__name__
    for step in range(3):
        scheduler.advance(1.0 + step)
        plan = scheduler.plan(1.0 + step)
        if plan:
            scheduler.complete(run_step(engine, plan), 1.0 + step)
    told += " ".join(o.error.code for _, o in scheduler.outbox if o.error is not None)
    scheduler.frontend_gone(F, BROKEN, 5.0)
    scheduler.advance(1e9)
    scheduler.check_integrity()
    assert not any(scheduler.sizes().values())
    return told


def _ticket_target(data: bytes) -> str:
    try:
        ticket = msgspec.msgpack.decode(data, type=Ticket)
    except DECODE_ERRORS:
        ticket = msgspec.json.decode(data, type=Ticket) if data[:1] == b"{" else _ticket()
    assert verify_ticket(ticket, SECRET, F, 5.0, 100.0) <= 105.0
    return "good"


def _ticket_guard(data: bytes) -> str:
    try:
        return _ticket_target(data)
    except DECODE_ERRORS as error:
        return f"undecodable {str(error)[:30]}"


def _ticket_seeds() -> list[bytes]:
    signed = sign_ticket(_ticket(), SECRET, F)
    return [encode(signed), msgspec.json.encode(signed), encode(_ticket())]


# ---- what a frontend hears ----------------------------------------------------------------------


def _outputs_seeds() -> list[bytes]:
    outputs = [
        Output(request_id="r0", token_ids=[5], timeline={"queue": 0.1}),
        Output(
            request_id="r0",
            position=1,
            token_ids=[6, 7],
            logprobs=[TokenLogprob(6, -0.1, [(6, -0.1)])],
            finish=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=3, computed=3, output_tokens=3),
        ),
        Output(request_id="r0", error=BROKEN),
    ]
    return [encode(Outputs([o])) for o in outputs] + [encode(Outputs(outputs[:2]))]


_FOUND_HELLOS = [
    encode(info(model="lineage-1")).replace(b"lineage-1", b"lineage\xff1"),
    encode(info(endpoints={"fake": []})),
    encode(info(ranks=[SPEC])).replace(b"\xa6layers\x02", b"\xa6layers\xce\x10\0\0\0"),
]
_FOUND_TICKETS = [
    msgspec.json.encode(_ticket()).replace(b'"room":7', b'"room":' + b"7" * 60),
    msgspec.json.encode(_ticket()).replace(b'"dp_rank":0', b'"dp_rank":-' + b"7" * 60),
]

TARGETS: list[Target] = [
    Target("join", _hellos, _join, changed_msgpack, _FOUND_HELLOS),
    Target("handoff_prefill", _message_seeds, _prefill, changed_msgpack),
    Target("handoff_rooms", _message_seeds, _rooms, changed_msgpack),
    Target("handoff_decode", _message_seeds, _decode, changed_msgpack),
    Target("submit", _submit_seeds, _submit, changed_msgpack),
    Target("ticket", _ticket_seeds, _ticket_guard, changed_msgpack, _FOUND_TICKETS),
]


def outputs_target(answer: Callable[[list[Output]], str]) -> Target:
    """Outputs of an instance, as `answer` (the frontend's side, which needs a tokenizer) takes them."""

    def run(data: bytes) -> str:
        try:
            message = _control.decode(data)
        except DECODE_ERRORS as error:
            return f"undecodable {str(error)[:30]}"
        return answer(message.outputs) if isinstance(message, Outputs) else type(message).__name__

    found = [encode(Outputs([Output(request_id="r0", token_ids=[2**53])]))]  # no token id
    return Target("outputs", _outputs_seeds, run, changed_msgpack, found)
