"""Tokens to text, stop strings, tool calls: the parts without I/O."""

import random
import threading
import time
from typing import SupportsIndex

import pytest
from frontend_rig import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from segue.kv.errors import ConfigError, Internal
from segue.server.frontend.detokenize import Detokenizer, StopStrings
from segue.server.frontend.problems import BadParam
from segue.server.frontend.reply_parts import Part, ReplyParser, ToolCall
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import ForcedParser

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
