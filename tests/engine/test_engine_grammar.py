"""Grammars over a tokenizer of single bytes: no model is needed to see what is admitted."""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from segue.core.errors import InvalidRequest
from segue.core.request import Grammar, SamplingParams
from segue.engine.grammar import GrammarCompiler
from segue.engine.sampler import Sampler

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "n": {"type": "integer"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    merges = [("t", "r"), ("u", "e"), ("tr", "ue")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, len(tokenizer) + 5, [0], max_cached=2)


def follow(compiler, tokenizer, grammar, text):
    """The state after `text`, and how much of it was admitted."""
    state = compiler.open(grammar)
    for at, token in enumerate(tokenizer.encode(text)):
        if not state.admitted()[token]:
            return state, at
        state.accept(token)
    return state, len(text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar("json_schema", SCHEMA), '{"city": "Rome", "n": -12}'),
        (Grammar("json_object"), '{"a": [1, {"b": null}], "c": "é"}'),
        (Grammar("regex", "[a-c]{3}x"), "abcx"),
        (Grammar("lark", 'start: "yes" | "no"'), "yes"),
    ],
)
def test_a_complete_text_is_admitted_and_then_only_the_end(compiler, tokenizer, grammar, text):
    state, _ = follow(compiler, tokenizer, grammar, text)
    assert state.accepting
    assert state.finished
    assert np.flatnonzero(state.admitted()).tolist() == [0]


@pytest.mark.parametrize(
    ("grammar", "text", "stops_at"),
    [
        (Grammar("json_schema", SCHEMA), '{"city": "Rimini"', 11),
        (Grammar("json_object"), "[1]", 0),
        (Grammar("regex", "[0-9]+"), "12a", 2),
    ],
)
def test_what_does_not_fit_is_not_admitted(compiler, tokenizer, grammar, text, stops_at):
    state, at = follow(compiler, tokenizer, grammar, text)
    assert at == stops_at
    assert not state.finished


def test_a_text_that_may_end_or_go_on_admits_both(compiler, tokenizer):
    state, _ = follow(compiler, tokenizer, Grammar("regex", "[0-9]+"), "12")
    flags = state.admitted()
    assert state.accepting
    assert flags[0]
    assert flags.sum() == 11
    assert not flags[-5:].any()  # the model's vocabulary is wider than the tokenizer's


def test_white_space_in_json_is_bounded(compiler, tokenizer):
    state, at = follow(compiler, tokenizer, Grammar("json_object"), "{" + " " * 40)
    assert at == 21
    assert not state.finished


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", "not json"), "json_schema"),
        (Grammar("json_schema", '{"type": "wrong"}'), "wrong"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (Grammar("json_schema", "[1]"), "object"),
        (Grammar("json_schema", '{"a":' * 5000), "recursion"),
        (Grammar("json_schema", '"\ud800"'), "json_schema"),
        (Grammar("regex", "("), "unclosed"),
        (Grammar("regex", "(?=x)"), "look"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", ""), "[Ee]mpty"),
        (Grammar("regex", "a" * 100_000), "65536"),
        (
            Grammar(
                "json_schema",
                json.dumps(
                    {
                        "allOf": [
                            {"anyOf": [{"properties": {f"{a}{i}": {"type": "string"}}} for a in "ab"]}
                            for i in range(25)
                        ]
                    }
                ),
            ),
            "too large",
        ),
    ],
)
def test_a_bad_grammar_is_the_requests_fault_with_the_reason(compiler, grammar, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.open(grammar)
    assert "\n" not in caught.value.info.text
    assert len(compiler) == 0


def test_the_cache_is_bounded_and_its_copies_are_apart(compiler, tokenizer):
    digits = Grammar("regex", "[0-9]")
    first = compiler.open(digits)
    first.accept(tokenizer.encode("1")[0])
    assert first.finished
    assert compiler.open(digits).admitted().sum() == 10
    for letter in "abc":
        compiler.open(Grammar("regex", letter))
    assert len(compiler) == 2


def test_a_refused_token_is_an_error_of_that_sequence(compiler, tokenizer):
    sampler = Sampler(len(tokenizer) + 5, {0}, compiler)
    sampler.open(1, [1], SamplingParams(temperature=0.0, grammar=Grammar("regex", "ab")))
    sampler.append(1, tokenizer.encode("x")[0])
    result = sampler.sample([1], torch.zeros(1, len(tokenizer) + 5))[0]
    assert result.token is None
    assert "output format" in result.error


def test_random_logits_under_a_schema_give_the_schema_on_both_sides(compiler, tokenizer):
    """First token on prefill, told to decode: same text as one machine, and it is valid JSON."""
    vocab = len(tokenizer) + 5
    params = SamplingParams(seed=4, temperature=0.8, max_tokens=400, grammar=Grammar("json_schema", SCHEMA))

    def run(apart):
        generator = torch.Generator().manual_seed(0)
        sampler = Sampler(vocab, {0}, compiler)
        sampler.open(1, [1, 2], params)
        tokens = []
        while len(tokens) < 400 and (not tokens or tokens[-1] != 0):
            result = sampler.sample([1], torch.randn(1, vocab, generator=generator))[0]
            assert result.error is None
            tokens.append(result.token)
            if apart:
                sampler = Sampler(vocab, {0}, compiler)
                sampler.open(1, [1, 2], params)
                for token in tokens:
                    sampler.append(1, token)
        return tokens

    tokens = run(apart=False)
    assert tokens == run(apart=True)
    value = json.loads(tokenizer.decode(tokens[:-1]))
    assert value["city"] in ("Paris", "Rome")
    assert isinstance(value["n"], int)


def test_a_refused_token_is_named_and_the_state_stays_as_it_was(compiler, tokenizer):
    state, _ = follow(compiler, tokenizer, Grammar("regex", "abc"), "a")
    wrong = tokenizer.encode("z")[0]
    state.accept(wrong)
    state.accept(tokenizer.encode("b")[0])
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=f"token {wrong} does not fit"):
            state.admitted()


def test_one_text_of_two_kinds_is_two_formats(compiler, tokenizer):
    """What is a grammar is a regular expression for itself, too."""
    source = 'start: "a"'
    for kind, text in (("lark", "a"), ("regex", source), ("lark", "a")):
        state, at = follow(compiler, tokenizer, Grammar(kind, source), text)
        assert (at, state.accepting) == (len(text), True)
    assert len(compiler) == 2


def test_of_formats_the_one_that_was_asked_for_longest_ago_is_forgotten(compiler):
    compiled, compile_ = [], compiler._compile

    def noted(grammar):
        compiled.append(grammar.text)
        return compile_(grammar)

    compiler._compile = noted
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.open(Grammar("regex", text))
    assert compiled == ["a", "b", "c", "b"]


def test_the_size_of_a_format_is_counted_in_bytes(tokenizer):
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0], max_grammar_bytes=8)
    compiler.open(Grammar("regex", "é" * 4))
    with pytest.raises(InvalidRequest, match="has 10 bytes; the limit is 8"):
        compiler.open(Grammar("regex", "é" * 5))


def test_a_tokenizer_may_know_more_words_than_the_model(tokenizer):
    compiler = GrammarCompiler(tokenizer, len(tokenizer) - 1, [0])
    assert len(compiler.open(Grammar("regex", "a+")).admitted()) == len(tokenizer) - 1
