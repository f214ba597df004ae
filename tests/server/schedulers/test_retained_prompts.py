"""After a failed hand-off: the next attempt is answered from KV that prefill still has, and from no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs
from pair import FRONT, VOCAB, Pair

from segue.engine.request import Request, SamplingParams
from segue.kv.errors import (
    AbortedByClient,
    ChecksumMismatch,
    ErrorCode,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    PeerLost,
    TransferFailed,
)
from segue.kv.ids import Incarnation
from segue.kv.protocol import events
from segue.kv.protocol.messages import Committed, Metadata
from segue.kv.protocol.ticket import Ticket
from segue.lab.sim.sim_engine import reference
from segue.server.messages.control import Submit
from segue.server.schedulers.prefill_result import PrefillResult
from segue.server.schedulers.request_state import RequestState
from segue.server.schedulers.retained_prompts import RetainedPrompts

COUNT = 6


def ask(
    pair: Pair,
    name: str,
    prompt: list[int],
    *,
    attempt: int = 0,
    seed: int = 5,
    output: list[int] | None = None,
    count: int = COUNT,
    budget_s: float = 100.0,
    salt: int = 0,
) -> list[int]:
    """Submit to both sides; returns the whole output that a run without faults gives."""
    pair.rooms += 1
    sampling = SamplingParams(max_tokens=count, seed=seed)
    ticket = Ticket(
        room=pair.rooms,
        attempt=attempt,
        prefill=pair.prefill.me,
        decode=pair.decode.me,
        budget_s=budget_s,
    )
    request = Request(request_id=name, prompt=prompt, sampling=sampling, output=output or [], cache_salt=salt)
    for node in (pair.prefill, pair.decode):
        node.scheduler.submit(FRONT, Submit(request, ticket), pair.clock.now())
    return reference(prompt, sampling, VOCAB, count)


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
    """Its session ends; the request is told on both sides, as a frontend does; another session follows."""
    pair.lose = lambda _effect: False
    pair.part()
    pair.run()
    pair.join()
    pair.run()


def hold(kind: type) -> Callable[[events.Effect], bool]:
    return lambda effect: isinstance(effect, events.Send) and isinstance(effect.message, kind)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 39, 40, 41])
@pytest.mark.parametrize("lost", [Metadata, Committed])
def test_a_computed_prompt_is_sent_again_without_a_forward(tokens: int, lost: type) -> None:
    pair, prompt = Pair(), [(7 * i) % VOCAB for i in range(tokens)]
    pair.lose = hold(lost)
    ask(pair, "first", prompt)
    until_computed(pair, tokens)
    pair.pump()
    decode_dies(pair)
    assert pair.errors("first")[0] == "PEER_LOST" or lost is Committed
    # Decode is another one in truth: what it has cached must not help.
    pair.decode.scheduler.cache.tree.clear()
    before = pair.prefill.engine.computed_tokens
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    assert pair.prefill.engine.computed_tokens == before, "a token was computed again"
    usage = pair.outputs["again"][-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.computed) == (tokens, 0)
    assert len(pair.prefill.scheduler.retained) == 0
    pair.assert_at_rest()


def test_a_computed_prompt_is_for_its_tenant_s_next_attempt_alone() -> None:
    pair, prompt = Pair(), list(range(22))
    pair.lose = hold(Metadata)
    ask(pair, "first", prompt, salt=7)
    until_computed(pair, 22)
    pair.pump()
    decode_dies(pair)
    pair.decode.scheduler.cache.tree.clear()
    for salt in (8, 0):
        before = pair.prefill.engine.computed_tokens
        wanted = ask(pair, f"of {salt}", prompt, salt=salt)
        pair.run()
        assert pair.tokens(f"of {salt}") == wanted
        assert pair.prefill.engine.computed_tokens - before == 22
    before = pair.prefill.engine.computed_tokens
    ask(pair, "again", prompt, attempt=1, salt=7)
    pair.run()
    assert pair.prefill.engine.computed_tokens == before
    pair.assert_at_rest()


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_was_computed_of_a_prompt_is_not_computed_again(chunks: int) -> None:
    pair, prompt = Pair(), list(range(43))
    ask(pair, "first", prompt)
    until_computed(pair, 16 * chunks)
    decode_dies(pair)
    assert "PEER_LOST" in pair.errors("first")
    before = pair.prefill.engine.computed_tokens
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    assert pair.prefill.engine.computed_tokens - before == 43 - 16 * chunks
    pair.assert_at_rest()


def test_twice_in_a_row() -> None:
    pair, prompt = Pair(), list(range(22))
    for attempt in range(3):
        pair.lose = hold(Metadata)
        wanted = ask(pair, f"r{attempt}", prompt, attempt=attempt)
        until_computed(pair, 22)
        for _ in range(4):
            pair.pump()
            pair.prefill.turn()
            pair.decode.turn()
        if attempt < 2:
            decode_dies(pair)
    pair.lose = lambda _effect: False
    # The metadata of the last attempt was held back too: it is not lost, its session lives.
    key = next(iter(pair.decode.handles))
    [state] = pair.prefill.scheduler.admission.by_seq.values()
    assert state.result is not None
    transfer = pair.transfer(key.room, key.attempt)
    kept = Metadata(transfer=transfer, prompt_tokens=22, content=state.result.encode())
    pair.decode.post(events.Received(pair.prefill.me, kept))
    pair.run()
    assert pair.tokens("r2") == wanted
    assert pair.prefill.engine.computed_tokens == 22
    pair.assert_at_rest()


@pytest.mark.parametrize(
    ("reason", "computed"),
    [
        (PeerLost("gone"), 0),
        (TransferFailed("broke"), 0),
        (OutOfCapacity("decode is full"), 0),
        (AbortedByClient("left"), 2),
        (ChecksumMismatch("a doubt"), 2),
        (Internal("a bug"), 2),
    ],
    ids=lambda value: value.code.value if hasattr(value, "code") else str(value),
)
def test_only_where_a_new_attempt_may_come_and_nothing_is_in_doubt(reason: object, computed: int) -> None:
    pair, prompt = Pair(), list(range(18))
    pair.lose = hold(Metadata)
    ask(pair, "first", prompt)
    until_computed(pair, 18)
    pair.pump()
    info: ErrorInfo = reason.info  # type: ignore[attr-defined]
    for node in (pair.prefill, pair.decode):
        node.scheduler.cancel(FRONT, "first", info, pair.clock.now())
    pair.lose = lambda _effect: False
    pair.run()
    before = pair.prefill.engine.computed_tokens
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    assert pair.prefill.engine.computed_tokens - before == computed
    pair.assert_at_rest()


def test_another_seed_or_another_output_is_another_request() -> None:
    pair, prompt = Pair(), list(range(18))
    pair.lose = hold(Metadata)
    whole = ask(pair, "first", prompt)
    until_computed(pair, 18)
    decode_dies(pair)
    for name, more in (("seed", {"seed": 6}), ("output", {"output": whole[:2]})):
        before = pair.prefill.engine.computed_tokens
        wanted = ask(pair, name, prompt, attempt=1, **more)  # type: ignore[arg-type]
        pair.run()
        got = [t for o in pair.outputs[name] for t in o.token_ids]
        assert [*more.get("output", []), *got] == wanted  # type: ignore[misc]
        assert pair.prefill.engine.computed_tokens > before
    assert len(pair.prefill.scheduler.retained) == 1
    pair.clock.advance(200)
    pair.run()
    assert len(pair.prefill.scheduler.retained) == 0, "nobody can ask for it any more"
    pair.assert_at_rest()


@pytest.mark.parametrize("evicted", [1, 2, 4])
@pytest.mark.parametrize("tokens", [16, 18], ids=["whole pages", "and a tail"])
def test_evicted_pages_are_computed_again(tokens: int, evicted: int) -> None:
    pair, prompt = Pair(prefill_pages=12), list(range(tokens))
    pair.lose = hold(Metadata)
    ask(pair, "first", prompt)
    until_computed(pair, tokens)
    decode_dies(pair)
    assert pair.prefill.scheduler.cache.tree.evict(evicted) == evicted
    before = pair.prefill.engine.computed_tokens
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    still_there = min(4 - evicted, (tokens - 1) // 4)
    assert pair.prefill.engine.computed_tokens - before == tokens - 4 * still_there
    pair.assert_at_rest()


def test_a_pool_without_a_page_for_the_tail_waits_like_any_other() -> None:
    pair, prompt = Pair(prefill_pages=12), list(range(18))
    pair.lose = hold(Metadata)
    ask(pair, "first", prompt)
    until_computed(pair, 18)
    decode_dies(pair)
    held = pair.prefill.pool.allocate(pair.prefill.pool.free)
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert "again" not in pair.outputs
    pair.prefill.scheduler.check_integrity()
    pair.prefill.pool.release(held)
    pair.run()
    assert pair.tokens("again") == wanted
    pair.assert_at_rest()


def test_a_tail_that_cannot_be_copied_back_is_computed_again_and_costs_no_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, prompt = Pair(prefill_pages=12), list(range(18))
    pair.lose = hold(Metadata)
    ask(pair, "first", prompt)
    until_computed(pair, 18)
    decode_dies(pair)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug in copy_in")

    monkeypatch.setattr(pair.prefill.engine, "copy_in", broken)
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    assert [what for what, _ in pair.prefill.scheduler.bugs] == ["copy_in of what was kept for room 2"]
    pair.assert_at_rest()


# ---- the bounds ------------------------------------------------------------------------------------


class Tail:
    nbytes = 1000


def job(prompt: list[int], seed: int = 1, deadline: float = 10.0) -> RequestState:
    p, d = Incarnation("a" * 32), Incarnation("d" * 32)
    return RequestState(
        origin=FRONT,
        request=Request(request_id="r", prompt=prompt, sampling=SamplingParams(seed=seed)),
        ticket=Ticket(room=1, attempt=0, prefill=p, decode=d, budget_s=1.0),
        seq_id=1,
        entered=0.0,
        deadline=deadline,
        max_tokens=4,
    )


RESULT = PrefillResult(first_token=1)


def test_entries_and_bytes_are_bounded_and_the_oldest_go() -> None:
    kept = RetainedPrompts(max_entries=3, max_bytes=2500)
    jobs = [job([i]) for i in range(5)]
    for each in jobs:
        kept.put(each, RESULT, Tail())
        kept.check_integrity()
    assert [kept.take(each) is not None for each in jobs] == [False, False, False, True, True]
    assert (len(kept), kept.nbytes) == (0, 0)
    for each in jobs:
        kept.put(each, RESULT, None)
    assert len(kept) == 3
    kept.put(job(list(range(1000))), RESULT, Tail())
    assert len(kept) == 3, "one that is too large is not kept, and pushes nobody out"
    kept.check_integrity()


def test_the_same_prompt_again_replaces_what_was_kept_and_time_ends_it() -> None:
    kept = RetainedPrompts()
    for _ in range(3):
        kept.put(job([1, 2]), RESULT, Tail())
    kept.put(job([1, 2], seed=2, deadline=20.0), RESULT, Tail())
    assert len(kept) == 2
    kept.expire(10.0)
    kept.check_integrity()
    assert kept.take(job([1, 2])) is None
    assert kept.take(job([1, 2], seed=2)) is not None


# ---- a peer that goes away is heard of at once ---------------------------------------------------------


@pytest.mark.parametrize("turns", range(9))
@pytest.mark.parametrize("pages", [64, 12])
def test_a_lost_peer_fails_what_waits_for_it_in_each_phase_and_not_at_the_deadline(
    turns: int, pages: int
) -> None:
    """Bootstrap, queued for pages, computing, in flight, landed: no time passes here at all."""
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
        if f"r{i}" in begun:
            assert not pair.errors(f"r{i}"), "decode has everything: prefill's end no longer matters"
        else:
            assert set(pair.errors(f"r{i}")) == {"PEER_LOST"}
    pair.assert_at_rest()


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {1: 5.0}},
        {"min_tokens": 2},
        {"stop_token_ids": [1]},
        {"ignore_eos": True},
        {"logprobs": 1},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_first_token_drawn_otherwise_is_another_request_s(other: dict[str, object]) -> None:
    """Prompt and seed, which the key is of, are the same; the first token may differ."""
    kept, first = RetainedPrompts(), job([1, 2, 3], 5)
    kept.put(first, RESULT, None)
    asked = job([1, 2, 3], 5)
    asked.request = structs.replace(asked.request, sampling=structs.replace(asked.sampling, **other))
    assert kept.take(asked) is None
    assert kept.take(job([1, 2, 3], 5)) is not None


def test_an_equal_hash_is_not_an_equal_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is a hash; the tokens decide, of the prompt and of what was given already."""
    monkeypatch.setattr("segue.server.schedulers.retained_prompts.claim_of", lambda _request: b"7")
    kept, first = RetainedPrompts(), job([1, 2, 3])
    kept.put(first, RESULT, None)
    assert kept.take(job([1, 2, 4])) is None
    given = job([1, 2, 3])
    given.request = structs.replace(given.request, output=[9])
    assert kept.take(given) is None
    assert kept.take(job([1, 2, 3])) is not None


def broken(*_args: object) -> None:
    raise KeyError("a bug")


def test_a_prompt_whose_tail_could_not_be_copied_is_computed_again() -> None:
    """Its whole pages alone are not all of its KV."""
    pair, prompt = Pair(), list(range(18))
    pair.lose = hold(Metadata)
    ask(pair, "first", prompt)
    until_computed(pair, 18)
    pair.prefill.engine.copy_out, right = broken, pair.prefill.engine.copy_out  # type: ignore[method-assign, assignment]
    decode_dies(pair)
    pair.prefill.engine.copy_out = right  # type: ignore[method-assign]
    assert len(pair.prefill.scheduler.retained) == 0
    wanted = ask(pair, "again", prompt, attempt=1)
    pair.run()
    assert pair.tokens("again") == wanted
    pair.assert_at_rest()


@pytest.mark.parametrize("code", sorted(ErrorCode))
def test_what_is_not_to_be_trusted_after_an_error_is_not_kept(code: ErrorCode) -> None:
    """After other retryable errors the computed KV is kept for the next attempt."""
    pair = Pair()
    pair.lose = hold(Metadata)
    ask(pair, "r", list(range(18)))
    until_computed(pair, 18)
    [state] = pair.prefill.scheduler.admission.requests.values()
    pair.prefill.scheduler.fail(state, ErrorInfo(code=code, text="it failed", retryable=True), 0.0)
    doubted = code in (ErrorCode.CHECKSUM_MISMATCH, ErrorCode.METADATA_MISMATCH, ErrorCode.INTERNAL)
    assert len(pair.prefill.scheduler.retained) == (0 if doubted else 1)


def test_what_is_kept_ends_one_after_the_other() -> None:
    kept = RetainedPrompts()
    for prompt, deadline in (([1], 30.0), ([2], 10.0), ([3], 20.0)):
        kept.put(job(prompt, deadline=deadline), RESULT, None)
    for end in (10.0, 20.0, 30.0):
        assert kept.next_end() == end
        kept.expire(end)
    assert kept.next_end() is None
