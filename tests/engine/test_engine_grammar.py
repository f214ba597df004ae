"""Grammars over a tokenizer of single bytes: no model is needed to see what is admitted."""

import copy
import json
import queue
import selectors
import threading
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from segue.engine.grammar import MAX_PREPARING, GrammarCompiler
from segue.engine.grammar_check import GrammarChecker
from segue.engine.request import CallGrammar, FormedCall, Grammar, SamplingParams
from segue.engine.sampler import Sampler
from segue.kv.errors import InvalidRequest, OutOfCapacity

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "n": {"type": "integer"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
)


def of_bytes(merges):
    """A tokenizer of single bytes, and of what `merges` join."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="module")
def tokenizer():
    return of_bytes([("t", "r"), ("u", "e"), ("tr", "ue")])


@pytest.fixture(scope="module")
def tokenizer_of_joints():
    """Has also words that go over the end of a value and of a key, as those of a real tokenizer do."""
    merges = {}
    blank, line = "\u0120", "\u010a"  # as a vocabulary of bytes writes them
    for word in ('","', f'",{blank}"', f'",{line}"', f'",{line}{blank}"', f'",{blank}{blank}"', '":"","'):
        for end in range(2, len(word) + 1):
            merges[word[: end - 1], word[end - 1]] = None
    return of_bytes(merges)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("words", ["tokenizer", "tokenizer_of_joints"])
def test_a_schema_of_500_optional_properties_can_be_followed(words, closed, request):
    tokenizer = request.getfixturevalue(words)
    kinds = [({"type": "string"}, "x"), ({"type": "integer"}, 1), ({"type": "array"}, [])]
    properties = {f"prop_{i}": kinds[i % 3][0] for i in range(500)}
    schema = {"type": "object", "properties": properties}
    if closed:
        schema["additionalProperties"] = False
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0])
    text = json.dumps({f"prop_{i}": kinds[i % 3][1] for i in (0, 3, 4, 499)})
    state, at = follow(compiler, tokenizer, Grammar("json_schema", json.dumps(schema)), text)
    assert (at, state.accepting) == (len(text), True)


@pytest.fixture
def compiler(tokenizer, monkeypatch):
    monkeypatch.setattr("segue.engine.grammar.MAX_CACHED", 2)
    return GrammarCompiler(tokenizer, len(tokenizer) + 5, [0])


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
        (Grammar("json_schema", "true"), '{"a": 1}'),
        (Grammar("json_schema", "{}"), '{"a": 1}'),
        (Grammar("lark", 'start: "yes" | "no"'), "yes"),
        # GBNF, as vLLM and SGLang show grammars
        (Grammar("lark", 'root ::= "yes" | "no"'), "yes"),
        (
            Grammar(
                "lark", "# one\nroot ::= item{2}\nitem ::= 'it\\'s' # two\n  | \"\\u00e9\"\n  | [x\\u0022-]"
            ),
            "it's\"",
        ),
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


def calls(mark):
    """Free text, and after `mark` a call of `f`, whose arguments have a schema, or of `g`."""
    made = [
        FormedCall(['{"name": "f", "arguments": '], json.loads(SCHEMA), ["}"]),
        FormedCall(['{"name": "g", "arguments": '], {"type": "object"}, ["}"]),
    ]
    return Grammar("tool_calls", msgspec.json.encode(CallGrammar([mark], made, [", "], ["</c>"])).decode())


F, G = (f'{{"name": "{name}", "arguments": {{"city": ' for name in "fg")


@pytest.mark.parametrize("mark", ["<call>", "[CALL]"])  # the second one is a special token
@pytest.mark.parametrize(
    ("text", "stops_at", "ends"),
    [
        ("a < b <cal\n é", None, True),
        (f'x MARK{F}"Rome", "n": 1}}}}, {G}7}}}}</c> MARK{F}"Paris", "n": 2}}}}</c>y', None, True),
        (f'MARK{G}"Oslo"', None, False),
        (f'MARK{F}"Oslo"', len(F) + 2, False),
        ("MARKhello", 1, False),
        (f'MARK{F}"Rome"}}', len(F) + 7, False),
    ],
)
def test_calls_are_bound_from_their_mark_on_and_the_text_around_them_is_free(
    tokenizer, mark, text, stops_at, ends
):
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["[CALL]"]})
    text = text.replace("MARK", mark)
    state, at = follow(GrammarCompiler(own, len(own), [0]), own, calls(mark), text)
    assert at == (len(text) if stops_at is None else len(own.encode(mark)) - 1 + stops_at)
    if stops_at is None:
        assert (state.accepting, bool(state.admitted()[0])) == (ends, ends)


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
        (Grammar("lark", 'answer = "yes"'), "written in Lark .start: .* or in GBNF .root ::= "),
        (
            Grammar("lark", 'root ::= "yes" | no'),
            "as GBNF: Rule 'no' not found; a grammar is written in Lark",
        ),
        (Grammar("lark", "root ::= " + "(" * 3000), "as GBNF: maximum recursion"),
        (Grammar("lark", 'root ::= "\\'), "as GBNF"),
        (Grammar("regex", "a" * 100_000), "65536"),
        (Grammar("regex", r"[^\s\S]"), "no text"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no text"),
        (Grammar("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'), "no text"),
        (Grammar("json_schema", '{"enum": []}'), "empty"),
        (Grammar("json_schema", "false"), "json_schema"),
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
    """The text of a grammar is a valid regular expression, too."""
    source = 'start: "a"'
    for kind, text in (("lark", "a"), ("regex", source), ("lark", "a")):
        state, at = follow(compiler, tokenizer, Grammar(kind, source), text)
        assert (at, state.accepting) == (len(text), True)
    assert len(compiler) == 2


def test_of_formats_the_one_that_was_asked_for_longest_ago_is_forgotten(compiler):
    for text in ("a", "b", "a", "c"):
        compiler.open(Grammar("regex", text))
    assert [compiler.known(Grammar("regex", text)) for text in "abc"] == [True, False, True]


def test_the_size_of_a_format_is_counted_in_bytes(compiler, monkeypatch):
    monkeypatch.setattr("segue.engine.grammar.MAX_GRAMMAR_BYTES", 8)
    compiler.open(Grammar("regex", "é" * 4))
    with pytest.raises(InvalidRequest, match="has 10 bytes; the limit is 8"):
        compiler.open(Grammar("regex", "é" * 5))


def test_a_tokenizer_may_know_more_words_than_the_model(tokenizer):
    compiler = GrammarCompiler(tokenizer, len(tokenizer) - 1, [0])
    assert len(compiler.open(Grammar("regex", "a+")).admitted()) == len(tokenizer) - 1


# ---- compiled beside the owner's thread, within limits -------------------------------------------------


def prepared(compiler, *grammars):
    """Settle `grammars` as the leader does."""
    done = queue.SimpleQueue()
    for grammar in grammars:
        compiler.prepare(grammar, partial(done.put, grammar))
    for _ in grammars:
        compiler.settle(done.get(timeout=60))


@pytest.fixture(scope="module")
def checking(tokenizer):
    """Little CPU time: what is counted here is whether a limit ends a compilation, not when."""
    compiler = GrammarCompiler(
        tokenizer, len(tokenizer) + 5, [0], checker=partial(GrammarChecker, cpu_s=0.25, answer_s=120.0)
    )
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}'),
        Grammar("json_schema", '{"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}'),
        Grammar("lark", "start: A\nA: /.*a.{18}/ & /.*b.{17}/ & /.*c.{16}/ & ~/.*d.{15}/"),
        Grammar("lark", 'start: x\nx: %json {"type": "integer", "multipleOf": 999983}'),
    ],
)
def test_a_format_without_a_bound_is_refused_and_the_next_one_is_compiled(checking, tokenizer, grammar):
    honest = Grammar("regex", f"[{grammar.kind[0]}]x")
    prepared(checking, grammar, honest)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="make it simpler"):
            checking.open(grammar)
    assert checking.known(grammar), "a refusal is remembered"
    assert follow(checking, tokenizer, honest, grammar.kind[0] + "x")[0].finished


def test_a_format_that_takes_too_much_memory_is_refused(tokenizer):
    checker = partial(GrammarChecker, cpu_s=60.0, memory_mib=16, answer_s=120.0)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0], checker=checker)
    grammar = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
    prepared(compiler, grammar)
    with pytest.raises(InvalidRequest, match="16 MiB"):
        compiler.open(grammar)
    compiler.close()


def test_a_prepared_format_gives_the_library_s_reasons(checking):
    bad = [Grammar("regex", "("), Grammar("json_schema", '{"$ref": "#"}'), Grammar("regex", "a" * 100_000)]
    prepared(checking, *bad)
    for grammar, reason in zip(bad, ("unclosed", "no text", "65536"), strict=True):
        with pytest.raises(InvalidRequest, match=reason):
            checking.open(grammar)


def test_a_killed_child_refuses_with_an_error_that_may_be_tried_again_and_a_new_one_is_started(tokenizer):
    checkers = []

    def made(*args):
        checkers.append(GrammarChecker(*args, answer_s=120.0))
        return checkers[0]

    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0], checker=made)
    first, second = Grammar("regex", "a"), Grammar("regex", "b")
    prepared(compiler, first)
    checkers[0]._end()
    prepared(compiler, second)
    assert compiler.open(second).admitted().sum() == 1
    compiler.close()
    third = Grammar("regex", "c")
    with pytest.raises(OutOfCapacity):
        checkers[0].check(third)


def test_a_child_that_reads_nothing_has_a_deadline(tmp_path, monkeypatch):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 5\n")
    silent.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(silent))
    checker = GrammarChecker("x" * 2**20, 10, [0], answer_s=0.1)
    with pytest.raises(OutOfCapacity, match="TimeoutError"):
        checker.check(Grammar("regex", "a"))
    checker.close()


def test_a_close_ends_whoever_waits_for_the_child_before_it_closes_the_pipes(tmp_path, monkeypatch):
    """A thread that waits for a pipe is not woken if another thread closes the pipe: 6 of 400 waited on."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nread head\necho '{}'\nread question\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(silent))
    ended, reads, waiting, selecting = [], [], threading.Event(), threading.Event()
    real = selectors.DefaultSelector

    class Late(real):
        """Waits for the answer only once `close` has killed the child."""

        def select(self, timeout=None):
            if self.get_map() and next(iter(self.get_map().values())).events == selectors.EVENT_READ:
                reads.append(1)
                if len(reads) == 2:
                    waiting.set()
                    assert selecting.wait(60)
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Late)
    checker = GrammarChecker("{}", 10, [0], answer_s=30.0)

    def check():
        with pytest.raises(OutOfCapacity) as caught:
            checker.check(Grammar("regex", "a"))
        ended.append(str(caught.value))

    thread = threading.Thread(target=check)
    thread.start()
    assert waiting.wait(60)  # registered, and not waiting yet
    closing = threading.Thread(target=checker.close)
    closing.start()
    closing.join(1.0)
    selecting.set()
    thread.join(60)
    closing.join(60)
    assert ["the process ended" in text for text in ended] == [True], ended


def test_a_close_drops_what_waits_and_leaves_no_thread(tokenizer):
    """Else the interpreter compiles everything that waits before it ends: 24 s for twenty formats."""
    entered, goes_on = threading.Event(), threading.Event()

    class Waiting:
        def __init__(self, *args): ...

        def check(self, grammar):
            entered.set()
            assert goes_on.wait(60)
            return 0

        def close(self):
            goes_on.set()

    before = set(threading.enumerate())
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0], checker=Waiting)
    done = []
    for letter in "abc":
        compiler.prepare(Grammar("regex", letter), partial(done.append, letter))
    assert entered.wait(60)
    compiler.close()
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before
    assert len(done) < 3


class Scripted:
    """A checker with these answers, in order; an exception is raised."""

    def __init__(self, answers):
        self.answers = answers

    def check(self, grammar):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self): ...


def test_a_failure_of_the_child_is_told_and_the_format_may_be_prepared_again(tokenizer):
    answers = [OutOfCapacity("not now"), 100]

    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0], checker=lambda *_: Scripted(answers))
    grammar = Grammar("regex", "a")
    prepared(compiler, grammar)
    with pytest.raises(OutOfCapacity, match="not now"):
        compiler.open(grammar)
    assert not compiler.known(grammar)
    prepared(compiler, grammar)
    assert compiler.open(grammar).admitted().sum() == 1
    compiler.close()


def test_formats_that_wait_are_bounded(checking):
    done = queue.SimpleQueue()
    grammars = [Grammar("regex", f"w{i}") for i in range(MAX_PREPARING + 1)]
    for grammar in grammars[:-1]:
        checking.prepare(grammar, partial(done.put, grammar))
    with pytest.raises(OutOfCapacity):
        checking.prepare(grammars[-1], partial(done.put, grammars[-1]))
    for _ in grammars[:-1]:
        checking.settle(done.get(timeout=60))


def test_tenants_take_turns_where_formats_wait(tokenizer):
    """Formats that cost a second each were compiled in their order: one client could have those of all others
    refused, or wait for minutes."""
    first, goes_on, order = threading.Event(), threading.Event(), []

    class Noting:
        def __init__(self, *args): ...

        def check(self, grammar):
            first.set()
            assert goes_on.wait(60)
            order.append(grammar.text)
            return 0

        def close(self): ...

    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0], checker=Noting)
    done = queue.SimpleQueue()

    def prepare(text, tenant):
        compiler.prepare(Grammar("regex", text), partial(done.put, Grammar("regex", text)), tenant)

    for i in range(MAX_PREPARING):
        prepare(f"h{i}", "key 1")
    assert first.wait(60)
    with pytest.raises(OutOfCapacity, match="64 output formats"):
        prepare("more", "key 1")
    for text, tenant in (("x0", "key 2"), ("x1", "key 2"), ("y0", "key 3")):
        prepare(text, tenant)
    goes_on.set()
    for _ in range(MAX_PREPARING + 3):
        compiler.settle(done.get(timeout=60))
    compiler.close()
    assert order[:7] == ["h0", "h1", "x0", "y0", "h2", "x1", "h3"]
    assert order[7:] == [f"h{i}" for i in range(4, MAX_PREPARING)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["s s s | /./ | /../", "s s | /[a-z]/ | /[a-z ]/", "s s | /a/ |"])
def test_an_ambiguous_grammar_ends_with_the_client_s_error_before_it_costs_others_much(
    compiler, tokenizer, rule
):
    """With llguidance's own limits these go on; the counts of a step say how much work a token may be."""
    with pytest.raises(InvalidRequest, match=r"Too many items|Current row"):  # noqa: PT012
        state = compiler.open(Grammar("lark", f"start: s\ns: {rule}"))
        for _ in range(2000):
            state.admitted()
            state.accept(tokenizer.encode("a")[0])


def test_a_format_that_was_prepared_again_is_the_last_one_to_be_forgotten(tokenizer, monkeypatch):
    """The owner opens it next, on the thread that must not compile."""
    monkeypatch.setattr("segue.engine.grammar.MAX_CACHED_BYTES", 150)
    answers = [OutOfCapacity("not now"), 100, 100]

    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0], checker=lambda *_: Scripted(answers))
    again, other = Grammar("regex", "a"), Grammar("regex", "b")
    for grammar in (again, other, again):
        prepared(compiler, grammar)
    assert compiler.known(again)
    compiler.close()
