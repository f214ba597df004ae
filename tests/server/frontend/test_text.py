"""Tokens to text, stop strings, tool calls: the parts without I/O."""

import json
import random
import threading
import time
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from conftest import make_tokenizer
from segue.kv.errors import ConfigError, Internal
from segue.server.frontend.chat import check_messages
from segue.server.frontend.detokenize import Detokenizer, StopStrings
from segue.server.frontend.problems import BadParam
from segue.server.frontend.reply_parts import Part, ReplyParser, ToolCall
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import ForcedParser, parser_for

BYTE_LEVEL = ModelTokenizer(make_tokenizer())


def _byte_fallback() -> ModelTokenizer:
    """Llama's way: `▁` for spaces and `<0xAB>` for bytes that have no piece."""
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    for piece in ("▁Hello", "▁world", "▁", "a", "你", "!", "▁the"):
        vocab[piece] = len(vocab)
    tok = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=tok))


FALLBACK = _byte_fallback()


def stream(tokenizer: ModelTokenizer, ids: list[int], steps: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    out, at = "", 0
    while at < len(ids):
        step = steps[at % len(steps)] if steps else 1
        out += detokenizer.feed(ids[at : at + step])
        at += step
    return out + detokenizer.flush()


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.lists(st.integers(1, 4), max_size=5))
def test_streamed_text_is_the_whole_text(text: str, steps: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text, special=False)
    assert stream(BYTE_LEVEL, ids, steps) == BYTE_LEVEL.decode(ids, skip_special=True)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=60), st.lists(st.integers(1, 4), max_size=5))
def test_streamed_garbage_is_decoded_as_a_whole_would_be(ids: list[int], steps: list[int]) -> None:
    """Random tokens: broken characters of any length, special tokens between."""
    assert stream(BYTE_LEVEL, ids, steps) == BYTE_LEVEL.decode(ids, skip_special=True)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(257, 263).map(lambda i: [i]),
            st.text(min_size=1, max_size=3).map(lambda s: [b + 1 for b in s.encode()]),
        ),
        max_size=20,
    )
)
def test_byte_fallback_streams_exactly(parts: list[list[int]]) -> None:
    ids = [i for part in parts for i in part]
    assert stream(FALLBACK, ids, []) == FALLBACK.decode(ids, skip_special=True)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK])
def test_a_long_answer_of_characters_of_several_tokens_is_the_whole_text(
    tokenizer: ModelTokenizer, seed: int
) -> None:
    """The window moves on many times, and each time it must begin where a character does."""
    rng = random.Random(seed)
    text = "".join(rng.choice("aé你🙂 \u0301") for _ in range(300))
    ids = tokenizer.encode(text, special=False)
    detokenizer, out = Detokenizer(tokenizer), ""
    for at, token in enumerate(ids):
        out += detokenizer.feed([token])
        assert "\ufffd" not in out, at
        assert len(detokenizer._window) <= 24, "what is decoded again for each token is bounded"
    assert out + detokenizer.flush() == tokenizer.decode(ids, skip_special=True)


def test_half_a_character_is_held_back() -> None:
    detokenizer = Detokenizer(FALLBACK)
    shown = [detokenizer.feed([b + 1]) for b in "é你".encode()]
    assert shown == ["", "é", "", "", "你"]


def test_the_bytes_of_tokens_make_the_text() -> None:
    text = "the é你 answer 🙂"
    ids = BYTE_LEVEL.encode(text, special=False)
    assert b"".join(BYTE_LEVEL.token_bytes(i) for i in ids).decode() == text
    assert FALLBACK.token_bytes(0xE4 + 1) == b"\xe4"
    assert FALLBACK.token_bytes(257) == b" Hello"
    assert FALLBACK.token_bytes(10**6) == b""


@pytest.mark.parametrize("number", [-1, 2**32, 2**53])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK])
def test_a_number_of_a_worker_that_is_no_token_id_is_a_typed_error(
    tokenizer: ModelTokenizer, number: int
) -> None:
    with pytest.raises(Internal, match=f"^{number} came as a token id"):
        tokenizer.decode([1, number], skip_special=True)
    with pytest.raises(Internal, match=f"^{number} came as a token id"):
        tokenizer.token_text(number)


@settings(max_examples=300, deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_stop_strings_are_found_wherever_pieces_end(text: str, stops: list[str], step: int) -> None:
    watcher = StopStrings(stops)
    out = ""
    for at in range(0, len(text), step):
        out += watcher.feed(text[at : at + step])
        assert not any(s in out for s in stops)
        if watcher.found():
            break
    found = [s for s in stops if s in text]
    assert watcher.found() == bool(found)
    if found:
        assert watcher.matched is not None
        assert text.startswith(out + watcher.matched)
    else:
        assert out + watcher.flush() == text


def held_and_found(text: str, stops: list[str]) -> tuple[str, str | None, str]:
    """By the definition: what of `text` is shown, the stop string that ends it, and what comes after that."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop, text[end:]
    ends = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(ends)], None, ""


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=4),
    st.booleans(),
)
def test_after_each_piece_what_is_shown_is_what_the_definition_says(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    watcher, seen, out = StopStrings(stops, include=include), "", ""
    for piece in pieces:
        seen += piece
        out += watcher.feed(piece)
        shown, stop, rest = held_and_found(seen, stops)
        assert (out, watcher.matched) == (shown + stop if stop and include else shown, stop)
        if stop:
            assert watcher.rest == rest
            return
    assert out + watcher.flush() == seen


class Counted(str):
    """A string that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        Counted.looks += 1
        return super().__getitem__(at)


def test_the_work_is_linear_in_the_text_however_long_the_stop_strings_are() -> None:
    text, step = "a" * 4000, 4
    for length in (10, 1000):
        # The first one holds back what the other one is compared with.
        held, other = "a" * (length - 1) + "x", "b" + "a" * (length - 2) + "c"
        watcher = StopStrings([Counted(held), Counted(other)])
        Counted.looks = 0
        for at in range(0, len(text), step):
            watcher.feed(text[at : at + step])
        assert not watcher.found()
        assert Counted.looks <= 12 * (len(text) + length)


def test_of_two_stop_strings_in_one_piece_the_one_that_was_complete_first_ends_the_text() -> None:
    watcher = StopStrings(["bcde", "cd"])
    assert watcher.feed("abcdef") == "ab"
    assert watcher.matched == "cd"


def parse(parser: ReplyParser | None, text: str, step: int) -> list[Part]:
    assert parser is not None
    parts: list[Part] = []
    for at in range(0, len(text), step):
        parts += parser.feed(text[at : at + step])
    parts += parser.finish()
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


CALL = '{"name": "f", "arguments": {"city": "Paris"}}'
LLAMA = CALL.replace("arguments", "parameters")


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("<tool_call>", f"<tool_call>\n{CALL}\n</tool_call>", ["f"]),
        (
            "<tool_call>",
            f"I will. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
            ["I will. ", "f", "\n", "f"],
        ),
        ("<tool_call>", "a < b <tool", ["a < b <tool"]),
        ("<tool_call>", f"<tool_call>{CALL}", ["f"]),
        ("<tool_call>", "<tool_call>nonsense</tool_call>!", ["<tool_call>nonsense</tool_call>!"]),
        ("[TOOL_CALLS]", f"[TOOL_CALLS] [{CALL}, {CALL}]", ["f", "f"]),
        ("[TOOL_CALLS]", 'Well. [TOOL_CALLS]f[ARGS]{"city": "Paris"}', ["Well. ", "f"]),
        ("[TOOL_CALLS]", "no call here [TOOL", ["no call here [TOOL"]),
        ("[TOOL_CALLS]", "[TOOL_CALLS] oops", ["[TOOL_CALLS] oops"]),
        ("<|python_tag|>", LLAMA, ["f"]),
        ("<|python_tag|>", f"<|python_tag|>{LLAMA}; {LLAMA}", ["f", "f"]),
        ("<|python_tag|>", "Plain text {", ["Plain text {"]),
        ("<|python_tag|>", '{"a": 1}', ['{"a": 1}']),
    ],
)
def test_tool_calls_are_found_in_any_pieces(template: str, text: str, expected: list[str], step: int) -> None:
    parts = parse(parser_for(template), text, step)
    assert [p.name if isinstance(p, ToolCall) else p for p in parts] == expected
    for part in parts:
        if isinstance(part, ToolCall):
            assert json.loads(part.arguments) == {"city": "Paris"}
            assert part.id.startswith("call_")


@pytest.mark.parametrize(
    ("template", "start", "text"),
    [
        ("<tool_call>", "<tool_call>", "word "),
        ("<|python_tag|>", "{", "word "),
        ("<|python_tag|>", " ", "  "),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", "word "),
    ],
)
def test_the_work_is_linear_in_the_text_of_a_call(template: str, start: str, text: str) -> None:
    """A token in a call of 128,000 tokens took 0.1 to 0.4 ms of the event loop."""

    def seconds(count: int) -> float:
        took = []
        for _ in range(3):
            parser = parser_for(template)
            assert parser is not None
            parser.feed(start)
            began = time.thread_time()
            for _ in range(count):
                parser.feed(text)
            took.append(time.thread_time() - began)
        return min(took)

    assert seconds(48_000) < 20 * seconds(6_000), "eight times, and not its square"


@pytest.mark.parametrize(
    ("template", "before", "one", "after"),
    [
        ("<tool_call>", "<tool_call>", '{"name": "f"};', "</tool_call>"),
        ("<tool_call>", "<tool_call>[", '{"name": "f"},', '{"name": "f"}]</tool_call>'),
        ("<|python_tag|>", "", '{"name": "f"};', ""),
        ("[TOOL_CALLS]", "", '[TOOL_CALLS] {"name": "f"}', ""),
        ("[TOOL_CALLS]", "", "[TOOL_CALLS]f[ARGS]{}", ""),
    ],
)
def test_a_text_of_hundreds_of_calls_is_none(template: str, before: str, one: str, after: str) -> None:
    """They are made at its end, all at once: 128,000 took seconds of the event loop."""
    text = before + one * 300 + after
    assert parse(parser_for(template), text, 1000) == [text]
    few = parse(parser_for(template), before + one * 100 + after, 1000)
    assert [type(part) for part in few[:100]] == [ToolCall] * 100


def test_forced_calls() -> None:
    (call,) = parse(ForcedParser("arguments", "g"), '{"a": 1}', 2)
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("g", '{"a": 1}')
    assert len(parse(ForcedParser("calls"), f"[{CALL}, {CALL}]", 3)) == 2


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_forced_call_that_is_cut_is_a_call_with_the_arguments_so_far_and_never_text(step: int) -> None:
    whole = '[{"name": "f", "arguments": {"city": "Paris"}}, {"name": "g", "arguments": {"a": [1, "}"]}}]'
    assert len(parse(ForcedParser("calls"), whole, step)) == 2
    for cut in range(len(whole)):
        parts = parse(ForcedParser("calls"), whole[:cut], step)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        assert len(calls) == len(parts), f"text in {whole[:cut]}"
        for call, name, arguments in zip(calls, "fg", ('{"city": "Paris"}', '{"a": [1, "}"]}'), strict=False):
            assert call.name == name
            assert arguments.startswith(call.arguments.rstrip("}, ")), call.arguments
    cut_in_second = parse(ForcedParser("calls"), whole[: whole.index('"}"')], step)
    assert [call.arguments for call in cut_in_second if isinstance(call, ToolCall)] == [
        '{"city": "Paris"}',
        '{"a": [1, ',
    ]


def test_a_template_without_tools_has_no_parser() -> None:
    assert parser_for("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    assert parser_for(None) is None


def test_messages_become_what_templates_expect() -> None:
    out = check_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ]
    )
    assert out[0]["content"] == "ab"
    assert out[1]["content"] == ""
    assert out[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert out[2]["tool_call_id"] == "1"


def test_a_long_text_does_not_stop_the_other_threads() -> None:
    """Else one long prompt stops `/health` and every stream for seconds."""
    text = "the capital of France is " * 40_000
    assert BYTE_LEVEL.encode(text[:5000], special=False) == BYTE_LEVEL._fast.encode(text[:5000]).ids
    done = threading.Event()

    def work() -> None:
        BYTE_LEVEL.encode(text, special=False)
        done.set()

    beats = 0
    beating = threading.Event()

    def beat() -> None:
        nonlocal beats
        while not done.is_set():
            beats += 1
            beating.set()
            time.sleep(0.0005)

    other = threading.Thread(target=beat)
    other.start()
    beating.wait()
    before = beats
    work()
    other.join()
    assert beats - before > 20


def test_a_model_without_a_chat_template_says_so() -> None:
    plain = ModelTokenizer(make_tokenizer(template=None))
    with pytest.raises(BadParam, match="no chat template"):
        plain.render([], None, generation_prompt=True, continue_final=False, variables={})


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: object) -> None:
    with pytest.raises(ConfigError):
        ModelTokenizer.load(f"{tmp_path}/nothing")
    with pytest.raises(ConfigError):
        ModelTokenizer.load(str(tmp_path))
