"""Decode fails before its first token: prefill's half goes on in its room, for the next decode."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from pair import FRONT, VOCAB, Pair

from segue.engine.request import Request, SamplingParams
from segue.kv.errors import (
    AbortedByClient,
    ChecksumMismatch,
    ErrorCode,
    ErrorInfo,
    Internal,
    MetadataMismatch,
    OutOfCapacity,
    PeerLost,
    TransferFailed,
)
from segue.kv.ids import Incarnation, KVPoll, LeaderId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Committed, Metadata
from segue.server.messages.control import Replace, Submit
from segue.server.schedulers import prefill
from segue_lab.sim.sim_engine import reference

COUNT = 6


def ask(
    pair: Pair,
    name: str,
    prompt: list[int],
    *,
    attempt: int = 0,
    output: list[int] | None = None,
    count: int = COUNT,
    **how: object,
) -> list[int]:
    """Submit to both sides; returns the whole output that a run without faults gives."""
    pair.rooms += 1
    sampling = SamplingParams(max_tokens=count, seed=5, **how)  # type: ignore[arg-type]
    request = Request(request_id=name, prompt=prompt, sampling=sampling, output=output or [])
    for node in (pair.prefill, pair.decode):
        node.scheduler.submit(FRONT, Submit(request, pair.ticket(attempt=attempt)), pair.clock.now())
    return reference(prompt, sampling, VOCAB, count)


def ask_decode(pair: Pair, prompt: list[int], attempt: int = 1, first: str = "first", **how: object) -> None:
    """Give decode's half of the newest room to the next attempt, as a frontend does."""
    sampling = SamplingParams(max_tokens=COUNT, seed=5, **how)  # type: ignore[arg-type]
    request = Request(request_id=f"{first}~{attempt}", prompt=prompt, sampling=sampling)
    now = pair.clock.now()
    pair.decode.scheduler.submit(FRONT, Submit(request, pair.ticket(attempt=attempt)), now)
    pair.prefill.scheduler.replace(FRONT, Replace(first, pair.ticket(attempt=attempt)), now)


def until_computed(pair: Pair, tokens: int) -> None:
    """Run until prefill has computed `tokens`."""
    for _ in range(200):
        pair.pump()
        if pair.prefill.engine.computed_tokens >= tokens:
            return
        pair.decode.turn()
        pair.prefill.turn()
    raise AssertionError("prefill did not get there")


def decode_dies(pair: Pair) -> None:
    """Its session ends; another one follows. What it had cached must not help the next decode."""
    pair.lose = lambda _effect: False
    pair.part()
    pair.run()
    pair.join()
    pair.run()
    pair.decode.scheduler.cache.tree.clear()


def hold(kind: type) -> Callable[[events.Effect], bool]:
    return lambda effect: isinstance(effect, events.Send) and isinstance(effect.message, kind)


def one_computed(pair: Pair, prompt: list[int], **how: object) -> list[int]:
    """A request whose prompt is computed, and whose metadata decode does not get."""
    pair.lose = hold(Metadata)
    wanted = ask(pair, "first", prompt, **how)  # type: ignore[arg-type]
    until_computed(pair, len(prompt))
    pair.pump()
    return wanted


@pytest.mark.parametrize("slots", [(0, 0), (2, 2)], ids=["", "with a state"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 39, 40, 41])
def test_a_computed_prompt_is_sent_again_without_a_forward(tokens: int, slots: tuple[int, int]) -> None:
    pair, prompt = Pair(slots=slots), [(7 * i) % VOCAB for i in range(tokens)]
    wanted = one_computed(pair, prompt)
    decode_dies(pair)
    assert pair.errors("first") == ["PEER_LOST"], "decode's half alone has failed"
    ask_decode(pair, prompt)
    pair.run()
    assert pair.tokens("first~1") == wanted
    assert pair.prefill.engine.computed_tokens == tokens, "a token was computed again"


def test_log_probabilities_of_a_prompt_are_sent_again_with_it() -> None:
    pair, prompt = Pair(), list(range(18))
    wanted = one_computed(pair, prompt, prompt_logprobs=1)
    decode_dies(pair)
    ask_decode(pair, prompt, prompt_logprobs=1)
    pair.run()
    assert pair.tokens("first~1") == wanted
    assert len(pair.outputs["first~1"][0].prompt_logprobs or []) == 18
    assert pair.prefill.engine.computed_tokens == 18


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after the forward"])
def test_a_prompt_that_is_being_computed_goes_on_while_decode_is_replaced(chunks: int, waits: bool) -> None:
    pair, prompt = Pair(), list(range(43))
    wanted = ask(pair, "first", prompt)
    if chunks:
        until_computed(pair, 16 * chunks)
    pair.part()
    if waits:
        pair.run()
    pair.join()
    ask_decode(pair, prompt)
    pair.run()
    assert pair.tokens("first~1") == wanted
    assert pair.prefill.engine.computed_tokens == 43


def test_twice_in_a_row() -> None:
    pair, prompt = Pair(), list(range(22))
    wanted = one_computed(pair, prompt)
    for attempt in (1, 2):
        decode_dies(pair)
        pair.lose = hold(Metadata) if attempt == 1 else lambda _effect: False
        ask_decode(pair, prompt, attempt)
        pair.run()
    assert pair.tokens("first~2") == wanted
    assert pair.prefill.engine.computed_tokens == 22


@pytest.mark.parametrize("first", ["destination", "word"])
def test_the_next_destination_waits_for_the_placer_s_word(first: str) -> None:
    """The first decode is another leader, which hangs: it holds the binding and says nothing."""
    pair, prompt = Pair(), list(range(18))
    hung = LeaderId(Incarnation("e" * 32))
    pair.rooms += 1
    sampling = SamplingParams(max_tokens=COUNT, seed=5)
    half, again = (Request(request_id=n, prompt=prompt, sampling=sampling) for n in ("first", "first~1"))
    pair.prefill.scheduler.submit(FRONT, Submit(half, pair.ticket(decode=hung)), 0.0)
    if first == "word":
        pair.prefill.scheduler.replace(FRONT, Replace("first", pair.ticket(attempt=1)), 0.0)
    pair.decode.scheduler.submit(FRONT, Submit(again, pair.ticket(attempt=1)), 0.0)
    pair.run()
    if first == "destination":
        assert pair.prefill.exchange.phase_of(next(iter(pair.prefill.handles))) is KVPoll.BOOTSTRAPPING
        pair.prefill.scheduler.replace(FRONT, Replace("first", pair.ticket(attempt=1)), 0.0)
        pair.run()
    assert pair.tokens("first~1") == reference(prompt, sampling, VOCAB, COUNT)


def test_a_half_that_has_succeeded_is_not_there_any_more() -> None:
    """Decode has committed, and dies before its first token is heard."""
    pair, prompt = Pair(), list(range(18))
    ask(pair, "first", prompt)
    until_computed(pair, 18)
    pair.run()
    pair.prefill.scheduler.replace(FRONT, Replace("first", pair.ticket(attempt=1)), 0.0)
    pair.pump()
    assert pair.errors("first") == ["OUT_OF_CAPACITY"]
    assert pair.outputs["first"][-1].error.retryable  # type: ignore[union-attr]
    before = pair.prefill.engine.computed_tokens
    pair.decode.scheduler.cache.tree.clear()
    wanted = ask(pair, "again", prompt, attempt=2)
    pair.run()
    assert pair.tokens("again") == wanted
    assert pair.prefill.engine.computed_tokens - before == 2, "the tail that is no whole page"


@pytest.mark.parametrize("lost", [Metadata, Committed])
def test_a_half_whose_commit_is_in_doubt_goes_on_with_the_next_decode(lost: type) -> None:
    pair, prompt = Pair(), list(range(18))
    pair.lose = hold(lost)
    wanted = ask(pair, "first", prompt)
    until_computed(pair, 18)
    pair.pump()
    pair.lose = lambda _effect: False
    pair.part()
    pair.run()
    pair.decode.scheduler.cache.tree.clear()
    ask_decode(pair, prompt)  # before decode could say that it has committed
    pair.join()
    pair.run()
    assert pair.tokens("first~1") == wanted
    assert pair.prefill.engine.computed_tokens == 18


def test_a_commit_that_the_session_has_lost_ends_prefill_s_half_with_the_next_session() -> None:
    """Decode goes on, and the frontend has no reason to say anything to prefill."""
    pair, prompt = Pair(), list(range(18))
    pair.lose = hold(Committed)
    wanted = ask(pair, "first", prompt)
    pair.run()
    assert pair.tokens("first") == wanted
    assert pair.prefill.scheduler.sizes()["requests"] == 1
    decode_dies(pair)
    assert not pair.errors("first")


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ({"room": 77}, ErrorCode.INVALID_REQUEST),
        ({"attempt": 0}, ErrorCode.INVALID_REQUEST),
        ({"attempt": -1}, ErrorCode.INVALID_REQUEST),
    ],
    ids=["another room", "a spent ticket", "no attempt"],
)
def test_a_ticket_that_is_not_good_ends_the_half(bad: dict[str, int], code: ErrorCode) -> None:
    pair, prompt = Pair(), list(range(18))
    one_computed(pair, prompt)
    wrong = pair.ticket(bad.get("room", 0), attempt=bad.get("attempt", 1))
    pair.prefill.scheduler.replace(FRONT, Replace("first", wrong), 0.0)
    pair.pump()
    assert set(pair.errors("first")) == {code.value}


def test_a_ticket_of_another_sample_ends_the_half_and_leaves_its_pages_where_they_are_read() -> None:
    pair, prompt = Pair(), list(range(18))
    one_computed(pair, prompt)
    wrong = msgspec.structs.replace(pair.ticket(attempt=1), ordinal=1)
    pair.prefill.scheduler.replace(FRONT, Replace("first", wrong), 0.0)
    [state] = [entry.state for entry in pair.prefill.scheduler.table.values()]
    assert state.pages, "given back before `Release`"
    pair.run()
    assert set(pair.errors("first")) == {ErrorCode.INVALID_REQUEST.value}


def test_another_frontend_cannot_replace_it() -> None:
    pair, prompt = Pair(), list(range(18))
    wanted = one_computed(pair, prompt)
    pair.prefill.scheduler.replace(Incarnation("9" * 32), Replace("first", pair.ticket(attempt=1)), 0.0)
    decode_dies(pair)
    ask_decode(pair, prompt)
    pair.run()
    assert pair.tokens("first~1") == wanted


@pytest.mark.parametrize(
    "doubt", [ChecksumMismatch("a doubt"), MetadataMismatch("a doubt"), Internal("a bug")]
)
def test_what_is_in_doubt_ends_prefill_s_half_and_is_computed_again(doubt: object) -> None:
    pair, prompt = Pair(), list(range(18))
    one_computed(pair, prompt)
    info: ErrorInfo = doubt.info  # type: ignore[attr-defined]
    for node in (pair.prefill, pair.decode):
        node.scheduler.cancel(FRONT, "first", info, 0.0)
    pair.lose = lambda _effect: False
    pair.run()
    pair.decode.scheduler.cache.tree.clear()
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    assert pair.prefill.engine.computed_tokens == 18 + 2, "whole pages were in the tree before the doubt"


@pytest.mark.parametrize(
    ("reason", "again"),
    [
        (PeerLost("gone"), 3),
        (TransferFailed("broke"), 3),
        (OutOfCapacity("full"), 3),
        (AbortedByClient("left"), 19),
        (ChecksumMismatch("a doubt"), 19),
    ],
    ids=lambda value: value.code.value if hasattr(value, "code") else "",
)
def test_whole_pages_of_a_half_that_ends_early_stay_where_another_attempt_may_come(
    reason: object, again: int
) -> None:
    pair, prompt = Pair(), list(range(19))
    ask(pair, "first", prompt)
    until_computed(pair, 16)
    info: ErrorInfo = reason.info  # type: ignore[attr-defined]
    for node in (pair.prefill, pair.decode):
        node.scheduler.cancel(FRONT, "first", info, 0.0)
    pair.run()
    before = pair.prefill.engine.computed_tokens
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    assert pair.prefill.engine.computed_tokens - before == again


# ---- pages that others need ------------------------------------------------------------------------


def test_a_half_without_a_decode_gives_its_pages_to_a_prompt_that_has_waited_for_them() -> None:
    pair, prompt = Pair(prefill_pages=8), list(range(30))
    one_computed(pair, prompt)
    decode_dies(pair)
    pair.prefill.scheduler.replace(
        FRONT, Replace("first", pair.ticket(attempt=1)), 0.0
    )  # its decode does not come
    wanted = ask(pair, "other", list(range(100, 130)))
    pair.run()
    assert "other" not in pair.outputs
    assert pair.prefill.scheduler.next_deadline() == prefill.HELD_S
    pair.clock.advance(prefill.HELD_S)
    pair.run()
    assert pair.errors("first")[-1] == "OUT_OF_CAPACITY"
    assert pair.tokens("other") == wanted


def test_a_half_that_decode_has_bound_again_keeps_its_pages() -> None:
    pair, prompt = Pair(prefill_pages=8, rests=False), list(range(30))
    one_computed(pair, prompt)
    decode_dies(pair)
    pair.lose = hold(Metadata)
    ask_decode(pair, prompt)
    pair.run()
    ask(pair, "other", list(range(100, 130)))
    pair.run()
    pair.clock.advance(2 * prefill.HELD_S)
    pair.run()
    assert "other" not in pair.outputs
    assert pair.errors("first") == ["PEER_LOST"]


def unheard(pair: Pair, prompt: list[int]) -> None:
    """Decode has committed and answered, and its word to prefill is lost."""
    pair.lose = hold(Committed)
    wanted = ask(pair, "first", prompt)
    pair.run()
    assert pair.tokens("first") == wanted
    assert pair.prefill.scheduler.sizes()["requests"] == 1


def until_ended(pair: Pair) -> None:
    """Until prefill has ended its half by timers of its own; soon."""
    end = pair.clock.now() + 2 * prefill.HELD_S
    while "OUT_OF_CAPACITY" not in pair.errors("first"):
        deadline = pair.prefill.scheduler.next_deadline()
        assert deadline is not None
        assert deadline <= end
        pair.clock.advance(deadline - pair.clock.now())
        pair.run()


def decode_is_gone(pair: Pair) -> None:
    """Its process ends for good: prefill never hears of it again. Another one is there for other requests."""
    pair.lose = lambda effect: isinstance(effect, events.Send) and effect.message.transfer.room == 1
    pair.part()
    pair.run()
    pair.join()
    pair.run()
    pair.decode.scheduler.cache.tree.clear()


@pytest.mark.parametrize("waits_s", [0.0, 10.0], ids=["while nobody waits", "long after others wait"])
def test_a_half_whose_decode_dies_after_an_unheard_commit_gives_its_pages_to_others(waits_s: float) -> None:
    """The request has ended, and no frontend has a reason to say anything to prefill."""
    pair, prompt = Pair(prefill_pages=8, rests=not waits_s), list(range(30))
    unheard(pair, prompt)
    if not waits_s:
        decode_is_gone(pair)
    wanted = ask(pair, "other", list(range(100, 130)))
    pair.run()
    if waits_s:
        pair.clock.advance(waits_s)
        pair.run()
        assert "other" not in pair.outputs, "decode may still say that it has committed"
        decode_is_gone(pair)
    until_ended(pair)
    assert pair.errors("first") == ["OUT_OF_CAPACITY"], "which no frontend hears any more"
    assert pair.prefill.engine.computed_tokens == 60
    if not waits_s:
        assert pair.tokens("other") == wanted


@pytest.mark.parametrize("heard", [True, False], ids=["the next decode comes", "nobody comes"])
def test_a_prefill_that_drains_waits_a_second_for_the_next_decode_of_a_half_and_not_for_its_deadline(
    heard: bool,
) -> None:
    pair, prompt = Pair(), list(range(18))
    wanted = one_computed(pair, prompt)
    decode_dies(pair)
    pair.prefill.scheduler.drain()
    pair.run()
    assert not pair.prefill.scheduler.drained
    if heard:
        ask_decode(pair, prompt)
        pair.run()
        assert pair.tokens("first~1") == wanted
    else:
        until_ended(pair)
        assert pair.errors("first") == ["PEER_LOST", "OUT_OF_CAPACITY"]
    assert pair.prefill.scheduler.drained


# ---- a peer that goes away is heard of at once ---------------------------------------------------------


@pytest.mark.parametrize("turns", range(9))
@pytest.mark.parametrize("pages", [64, 12])
def test_a_lost_peer_fails_decode_s_half_in_each_phase_and_not_at_the_deadline(
    turns: int, pages: int
) -> None:
    """Bootstrap, queued for pages, computing, in flight, landed: no time passes here at all. Prefill's half
    goes on."""
    pair = Pair(prefill_pages=pages)
    for i in range(3):
        ask(pair, f"r{i}", [i, *range(39)])
    for _ in range(turns):
        pair.pump()
        pair.decode.turn()
        pair.prefill.turn()
    pair.pump()
    begun = {name for name in pair.outputs if pair.tokens(name)}
    pair.part()
    pair.run()
    assert pair.clock.now() == 0.0
    for i in range(3):
        assert pair.errors(f"r{i}") == ([] if f"r{i}" in begun else ["PEER_LOST"])
    for state in list(pair.prefill.scheduler.admission.requests.values()):
        pair.prefill.scheduler.cancel(FRONT, state.request.request_id, PeerLost("gone").info, 0.0)
