"""The sampler against plain restatements of what each parameter means."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engine.request import Grammar, Reasoning, SamplingParams
from segue.engine.sampler import MAX_LOGIT_BIAS, Sampler, candidates, check_sampling
from segue.kv.errors import ErrorCode, Internal, InvalidRequest

VOCAB = 64
EOS = 2


def logits(seed, rows=1, scale=2.0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def one(sampling, row, prompt=(5, 6), output=(), **kw):
    sampler = Sampler(row.shape[-1], {EOS}, **kw)
    sampler.open(1, prompt, sampling, output)
    return sampler.sample([1], row.reshape(1, -1))[0]


def draws(row, n=3000, **params):
    """How often each token is drawn over `n` seeds."""
    sampler = Sampler(row.shape[-1], {EOS})
    for seq in range(n):
        sampler.open(seq, [1, 2], SamplingParams(seed=seq, **params))
    results = sampler.sample(list(range(n)), row.reshape(1, -1).expand(n, -1))
    return Counter(r.token for r in results)


def support(row, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The tokens that may be drawn, by the definitions: min_p, then top_k, then top_p."""
    p = torch.softmax(row.double() / temperature, -1)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    if top_k:
        kth = p.sort(descending=True).values[min(top_k, len(p)) - 1]
        p = torch.where(p >= kth, p, 0.0)
    p = p / p.sum()
    order = p.sort(descending=True)
    above = order.values.cumsum(0) - order.values
    keep = order.indices[(above < top_p) & (order.values > 0)]
    return set(keep.tolist()), p


# --- greedy -----------------------------------------------------------------------------------


def test_a_greedy_batch_takes_the_argmax_and_remembers_it():
    sampler = Sampler(VOCAB, {EOS})
    rows = logits(0, 5)
    for seq in range(5):
        sampler.open(seq, [1, 2, 3], SamplingParams(temperature=0.0))
    results = sampler.sample([4, 2, 0, 1, 3], rows)
    assert [r.seq_id for r in results] == [4, 2, 0, 1, 3]
    assert [r.token for r in results] == rows.argmax(-1).tolist()
    assert all(r.logprob is None and r.error is None for r in results)
    assert sampler.position(4) == 4


def test_bfloat16_logits_are_taken():
    row = logits(3).bfloat16()
    assert one(SamplingParams(temperature=0.0), row).token == int(row.float().argmax())


# --- the draw ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
        {"top_k": VOCAB * 2, "top_p": 0.999},
    ],
)
def test_draws_follow_the_distribution(params):
    row = logits(1)[0]
    kept, p = support(row, **params)
    p = torch.where(torch.tensor([i in kept for i in range(VOCAB)]), p, 0.0)
    p = (p / p.sum()).numpy()
    n = 6000
    counts = draws(row, n, **params)
    assert set(counts) <= kept
    # Chi-square over tokens with enough expected draws; 5 standard deviations above the mean.
    big = [i for i in range(VOCAB) if n * p[i] >= 5]
    chi = sum((counts[i] - n * p[i]) ** 2 / (n * p[i]) for i in big)
    assert chi < len(big) + 5 * math.sqrt(2 * len(big))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.sampled_from([0, 1, 2, 7, 63, 64, 100]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.05, 1e-9]),
    min_p=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    scale=st.sampled_from([0.01, 1.0, 20.0]),
)
def test_a_draw_is_always_in_the_support(seed, top_k, top_p, min_p, scale):
    row = logits(seed, scale=scale)[0]
    result = one(SamplingParams(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p), row)
    # The edges are compared with a hair's tolerance: float32 weights against float64 ones.
    wide, _ = support(row, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=min_p * (1 - 1e-6))
    assert result.token in wide


def test_equal_tokens_at_the_edge_of_top_k_all_stay():
    row = torch.full((VOCAB,), -10.0)
    row[[3, 9, 27]] = 1.0
    assert set(draws(row, 200, top_k=2)) == {3, 9, 27}


def test_top_p_reaches_far_into_a_flat_tail():
    """More tokens than any first cut: 20,000 equal ones and one slightly likelier."""
    row = torch.zeros(20_000)
    row[17] = 0.1
    assert len(draws(row, 300, top_p=0.9)) > 280


def test_top_p_is_a_share_of_all_tokens_not_of_the_likely_ones():
    """A sixth of the mass is in a tail of tokens that need not be looked at one by one."""
    likely = 0.1 * (1.0 - 0.005 * torch.arange(60))
    row = torch.cat([torch.tensor([1.0]), likely, torch.full((300,), 0.004)]).log()
    wanted, _ = support(row, top_p=0.8)
    assert set(draws(row, 5000, top_p=0.8)) == wanted


# --- (seed, position) -------------------------------------------------------------------------


def test_the_draw_depends_on_seed_and_position_only():
    row = logits(7, scale=0.5)[0]

    def at(prompt, output, seed, mates=0):
        sampler = Sampler(VOCAB, {EOS})
        for mate in range(mates):
            sampler.open(100 + mate, [9] * mate, SamplingParams(seed=mate + 50))
        sampler.open(1, prompt, SamplingParams(seed=seed), output)
        ids = [100 + mate for mate in range(mates)] + [1]
        return sampler.sample(ids, row.expand(len(ids), -1))[-1].token

    base = [at([1] * n, [], 3) for n in range(1, 30)]
    assert len(set(base)) > 5
    assert base == [at([4] * (n - n // 2), [8] * (n // 2), 3, mates=n % 4) for n in range(1, 30)]
    assert base != [at([1] * n, [], 4) for n in range(1, 30)]


def test_prefill_then_decode_equals_one_machine():
    rows = logits(11, 20)
    params = SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=3)
    unified = Sampler(VOCAB, {EOS})
    unified.open(1, [1, 2], params)
    whole = [unified.sample([1], rows[i : i + 1])[0].token for i in range(20)]

    prefill, decode = Sampler(VOCAB, {EOS}), Sampler(VOCAB, {EOS})
    prefill.open(1, [1, 2], params)
    decode.open(9, [1, 2], params)
    decode.append(9, prefill.sample([1], rows[:1])[0].token)
    apart = [whole[0]] + [decode.sample([9], rows[i : i + 1])[0].token for i in range(1, 12)]
    decode.close(9)
    decode.open(10, [1, 2], params, output=apart)  # retracted and taken up again
    apart += [decode.sample([10], rows[i : i + 1])[0].token for i in range(12, 20)]
    assert apart == whole


def test_the_draws_of_a_seed_are_the_same_on_every_machine_and_release():
    row = torch.zeros(1000)
    sampler = Sampler(1000, {EOS})
    sampler.open(1, [0] * 10, SamplingParams(seed=42))
    assert [sampler.sample([1], row[None])[0].token for _ in range(8)] == PINNED


PINNED = [199, 416, 532, 728, 835, 918, 400, 599]


@pytest.mark.slow
def test_float_noise_rarely_changes_a_draw():
    """The race's bound: two distributions at total variation d differ with probability <= 2d/(1+d)."""
    a = logits(2, vocab=2000)[0]
    b = a + torch.randn(2000, generator=torch.Generator().manual_seed(3)) * 0.02
    p, q = torch.softmax(a.double(), -1), torch.softmax(b.double(), -1)
    d = float((p - q).abs().sum() / 2)
    n = 4000
    differ = 0
    sampler = Sampler(2000, {EOS})
    for seq in range(n):
        sampler.open(seq, [1], SamplingParams(seed=seq))
        sampler.open(n + seq, [1], SamplingParams(seed=seq))
    for seq in range(n):
        first, second = sampler.sample([seq, n + seq], torch.stack([a, b]))
        differ += first.token != second.token
    bound = 2 * d / (1 + d)
    assert differ <= n * bound + 5 * math.sqrt(n * bound)
    assert differ > 0  # the test can see a difference at all


# --- what changes logits ----------------------------------------------------------------------


def test_penalties_follow_their_formulas():
    row = logits(4)[0]
    prompt, output = [3, 3, 9], [9, 9, 11, 40]
    expected = row.clone()
    for token in {3, 9, 11, 40}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, count in Counter(output).items():
        expected[token] -= 0.25 * count + 0.75
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.75
    )
    sampler = Sampler(VOCAB, {EOS})
    sampler.open(1, prompt, params, output)
    shaped = sampler._shape(sampler._sequences[1], row.numpy())
    np.testing.assert_allclose(shaped, expected.numpy(), rtol=1e-6)
    assert one(params, row, prompt, output).token == int(expected.argmax())


def test_penalties_count_what_is_sampled():
    row = torch.zeros(VOCAB)
    row[7], row[8] = 1.0, 0.5
    sampler = Sampler(VOCAB, {EOS})
    sampler.open(1, [8], SamplingParams(temperature=0.0, presence_penalty=0.6))
    assert [sampler.sample([1], row[None])[0].token for _ in range(3)] == [7, 8, 7]


def test_logit_bias_moves_tokens():
    row = logits(5)[0]
    assert one(SamplingParams(temperature=0.0, logit_bias={33: 100.0}), row).token == 33
    best = int(row.argmax())
    assert one(SamplingParams(temperature=0.0, logit_bias={best: -100.0}), row).token != best


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_bans_stops_until_then(ignore_eos):
    row = torch.zeros(VOCAB)
    row[EOS], row[10], row[11] = 5.0, 4.0, 3.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[10], ignore_eos=ignore_eos)
    sampler = Sampler(VOCAB, {EOS})
    sampler.open(1, [1], params)
    assert [sampler.sample([1], row[None])[0].token for _ in range(3)] == [11, 11, EOS]


# --- log-probabilities ------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution():
    row = logits(6)[0]
    params = SamplingParams(seed=1, temperature=0.3, logit_bias={4: 50.0}, logprobs=5)
    result = one(params, row)
    raw = torch.log_softmax(row.double(), -1)
    assert result.token == 4
    assert result.logprob.token == 4
    assert result.logprob.logprob == pytest.approx(float(raw[4]), abs=1e-5)
    best = raw.topk(5)
    assert [t for t, _ in result.logprob.top] == best.indices.tolist()
    assert [v for _, v in result.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_zero_alternatives_still_give_the_chosen_one():
    result = one(SamplingParams(temperature=0.0, logprobs=0), logits(6)[0])
    assert result.logprob.top == []
    assert result.logprob.logprob < 0


def test_prompt_logprobs():
    rows = logits(8, 150)
    following = [(7 * i) % VOCAB for i in range(150)]
    sampler = Sampler(VOCAB, {EOS})
    sampler.open(1, following, SamplingParams(prompt_logprobs=2))
    found = sampler.prompt_logprobs(1, rows, following)
    raw = torch.log_softmax(rows.double(), -1)
    assert [f.token for f in found] == following
    assert [f.logprob for f in found] == pytest.approx(
        [float(raw[i, t]) for i, t in enumerate(following)], abs=1e-5
    )
    assert [[t for t, _ in f.top] for f in found] == raw.topk(2, -1).indices.tolist()
    assert sampler.position(1) == 150  # nothing was appended


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lesson_20_bad_logits_fail_their_own_sequence_only(bad, temperature):
    rows = logits(9, 3)
    rows[1, 30] = bad
    sampler = Sampler(VOCAB, {EOS})
    for seq in range(3):
        sampler.open(seq, [1], SamplingParams(temperature=temperature))
    first, second, third = sampler.sample([0, 1, 2], rows)
    assert second.token is None
    assert "not finite" in second.error
    assert first.error is None
    assert third.error is None
    assert (sampler.position(1), sampler.position(0)) == (1, 2)


def test_all_logits_banned_is_an_error():
    assert "not finite" in one(SamplingParams(), torch.full((VOCAB,), -math.inf)).error


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    row = logits(10)[0]
    for temperature in (1e-300, 1e-6, 1e-4):
        assert one(SamplingParams(temperature=temperature, seed=3), row).token == int(row.argmax())


class Stuck:
    """A grammar that admits `tokens`, then nothing."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.seen = []

    def open(self, grammar):
        return self

    def admitted(self):
        flags = np.zeros(VOCAB, np.bool_)
        flags[self.tokens[len(self.seen) : len(self.seen) + 1]] = True
        return flags

    def accept(self, token):
        self.seen.append(token)


def test_a_sequence_that_is_opened_with_output_is_as_far_in_its_grammar():
    grammar = Stuck([12, EOS])
    sampler = Sampler(VOCAB, {EOS}, grammar)
    sampler.open(1, [1], SamplingParams(grammar=Grammar("regex", "x")), output=[3, 4])
    assert grammar.seen == [3, 4]


def test_a_grammar_masks_and_a_stuck_one_is_that_sequences_error():
    grammar = Stuck([12, EOS])
    sampler = Sampler(VOCAB, {EOS}, grammar)
    sampler.open(1, [1], SamplingParams(grammar=Grammar("regex", "x"), min_tokens=5))
    sampler.open(2, [1], SamplingParams())
    rows = logits(12, 2)
    assert sampler.sample([1, 2], rows)[0].token == 12
    assert sampler.sample([1, 2], rows)[0].token == EOS  # finished: min_tokens gives way
    stuck, other = sampler.sample([1, 2], rows)
    assert "admits no token" in stuck.error
    assert stuck.refused
    assert stuck.failure("").code is ErrorCode.INVALID_REQUEST
    assert other.error is None
    assert grammar.seen == [12, EOS]


THINK, THOUGHT = 40, 41


def reasoned(begun, output=()):
    """A sampler whose grammar admits 12 and then EOS, after reasoning, and the tokens that it draws."""
    grammar = Stuck([12, EOS])
    sampler = Sampler(VOCAB, {EOS}, grammar)
    how = SamplingParams(
        grammar=Grammar("regex", "x"), reasoning=Reasoning(THINK, THOUGHT, begun), temperature=0
    )
    sampler.open(1, [1], how, output)

    def draw(*liked):
        row = torch.zeros(1, VOCAB)
        row[0, list(liked)] = torch.arange(len(liked), 0, -1.0)
        return sampler.sample([1], row)[0]

    return grammar, draw


def test_a_grammar_binds_after_the_reasoning_that_the_prompt_or_the_model_begins():
    for begun in (True, False):
        grammar, draw = reasoned(begun)
        if not begun:
            assert draw(7, THINK).token == THINK, "the first token is the grammar's, or begins reasoning"
        assert [draw(token).token for token in (7, THINK, EOS + 1, THOUGHT)] == [7, THINK, EOS + 1, THOUGHT]
        assert grammar.seen == []
        assert draw(7).token == 12
        assert draw(THINK).token == EOS, "the answer does not begin it again"
        assert grammar.seen == [12, EOS]


def test_a_model_that_does_not_reason_follows_its_grammar_from_the_first_token():
    grammar, draw = reasoned(begun=False)
    assert draw(12, THINK).token == 12
    assert draw(THINK, 7).token == EOS
    assert grammar.seen == [12, EOS]


def test_a_sequence_that_is_opened_with_output_is_as_far_in_its_reasoning():
    assert reasoned(begun=True, output=[7, THOUGHT])[1](7).token == 12
    assert reasoned(begun=False, output=[THINK, 7])[1](9).token == 9
    assert reasoned(begun=False, output=[12])[1](THINK).token == EOS


def test_the_books_are_kept():
    sampler = Sampler(VOCAB, {EOS})
    sampler.open(1, [1], SamplingParams())
    with pytest.raises(Internal):
        sampler.open(1, [1], SamplingParams())
    with pytest.raises(Internal):
        sampler.sample([2], logits(0))
    with pytest.raises(Internal):
        sampler.sample([1], logits(0, 2))
    with pytest.raises(Internal):
        sampler.append(1, VOCAB)
    sampler.close(1)
    sampler.close(1)
    assert len(sampler) == 0
    with pytest.raises(InvalidRequest, match="format"):
        sampler.open(1, [1], SamplingParams(grammar=Grammar("json_object")))
    assert len(sampler) == 0
    assert sampler.sample([], torch.empty(0, VOCAB)) == []


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "300"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 300}, "stop_token_ids"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params, word):
    with pytest.raises(InvalidRequest, match=word):
        check_sampling(SamplingParams(**params), VOCAB)
    sampler = Sampler(VOCAB, {EOS})
    with pytest.raises(InvalidRequest):
        sampler.open(1, [1], SamplingParams(**params))
    assert len(sampler) == 0


def test_values_at_the_edge_are_taken():
    params = SamplingParams(
        temperature=0.0, top_p=1.0, min_p=1.0, presence_penalty=-2.0, logprobs=20, prompt_logprobs=0,
        logit_bias={VOCAB - 1: -100.0}, stop_token_ids=[0], seed=-1, min_tokens=16,
    )  # fmt: skip
    check_sampling(params, VOCAB)
    sampler = Sampler(VOCAB, {EOS})
    sampler.open(1, [1], params)
    assert len(sampler) == 1


def test_each_row_has_its_own_logprob_and_who_asked_for_none_has_none():
    sampler, rows = Sampler(VOCAB, []), logits(3, rows=3)
    for seq_id, logprobs in enumerate((2, None, 2)):
        sampler.open(seq_id, [1], SamplingParams(temperature=0.0, logprobs=logprobs))
    first, second, third = sampler.sample([0, 1, 2], rows)
    assert second.logprob is None
    for result, row in ((first, rows[0]), (third, rows[2])):
        expected = torch.log_softmax(row.double(), -1)
        assert result.logprob.token == result.token == int(expected.argmax())
        assert result.logprob.logprob == pytest.approx(float(expected.max()), abs=1e-5)
        assert [token for token, _ in result.logprob.top] == expected.topk(2).indices.tolist()


def test_where_no_token_is_left_nothing_is_drawn():
    """The model admits the stop alone, and `min_tokens` bans it."""
    row = torch.full((1, VOCAB), -math.inf)
    row[0, 7] = 1.0
    for temperature in (0.0, 1.0):
        sampler = Sampler(VOCAB, [7])
        sampler.open(0, [1], SamplingParams(temperature=temperature, min_tokens=1))
        [result] = sampler.sample([0], row)
        assert result.token is None
        assert "no token is left" in result.error


def test_top_p_counts_what_min_p_has_left():
    weights = np.array([1.0, 0.6, 0.5] + [0.05] * 20, np.float32)
    # 0.7 of 2.1 is 1.47: the third one begins at 1.6.
    assert candidates(weights, SamplingParams(min_p=0.4, top_p=0.7)).tolist() == [0, 1]
    assert candidates(weights, SamplingParams(top_p=0.7)).tolist() == list(range(23))


def test_a_seed_below_nothing_is_another_one():
    def drawn(seed):
        sampler = Sampler(VOCAB, [])
        sampler.open(0, [1], SamplingParams(temperature=1.0, seed=seed))
        return [sampler.sample([0], logits(step))[0].token for step in range(12)]

    assert drawn(-1) == drawn(2**64 - 1)
    assert drawn(-1) != drawn(1)


def test_as_many_biases_as_are_allowed():
    for count in (MAX_LOGIT_BIAS, MAX_LOGIT_BIAS + 1):
        sampling = SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0))
        if count <= MAX_LOGIT_BIAS:
            check_sampling(sampling, 1000)
        else:
            with pytest.raises(InvalidRequest, match="at most"):
                check_sampling(sampling, 1000)


def test_alternatives_are_the_best_first_equal_ones_by_number_and_none_that_cannot_come():
    row = torch.full((1, VOCAB), -math.inf)
    row[0, [3, 5, 9]] = torch.tensor([1.0, 2.0, 1.0])
    sampler = Sampler(VOCAB, [])
    sampler.open(0, [1], SamplingParams(temperature=0.0, logprobs=5))
    [result] = sampler.sample([0], row)
    assert [token for token, _ in result.logprob.top] == [5, 3, 9]
    assert all(math.isfinite(value) for _, value in result.logprob.top)


def test_a_prompt_that_repetition_is_counted_over_must_be_of_the_vocabulary():
    for output, penalty in (([], 1.5), ([VOCAB], 1.0)):
        with pytest.raises(InvalidRequest, match="the prompt names token"):
            Sampler(VOCAB, []).open(0, [VOCAB], SamplingParams(repetition_penalty=penalty), output)
