"""Texts with more tokens than are of use: refused before the work that they would make, and no others are."""

from __future__ import annotations

from typing import Any

import pytest
from frontend_rig import CONTEXT, FakeBackend, Running, make_tokenizer, serve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from segue.kv.limits import Limits
from segue.server.frontend.params import ModelCard
from segue.server.frontend.plan import Planner
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import ChatBody, CompletionBody
from segue.server.frontend.request_memory import MIN_BUDGET, TOKEN_BYTES
from segue.server.frontend.tokenizer import ModelTokenizer, TooManyTokens

CARD = ModelCard("tiny", CONTEXT, 330)
#: Far more than CONTEXT tokens, whatever a token stands for.
FAR = "the " * 20 * CONTEXT
#: More than CONTEXT tokens, but one of the longest tokens could stand for several of its words.
NEAR = "the " * (CONTEXT + 40)


class Encoding:
    """The result of the Rust tokenizer. Its ids are made into a list when they are asked for."""

    def __init__(self, rust: Any, lists: list[int]) -> None:
        self._rust, self._lists = rust, lists

    def __len__(self) -> int:
        return len(self._rust)

    @property
    def ids(self) -> Any:
        self._lists.append(len(self))
        return self._rust.ids


class Rust:
    """The Rust tokenizer, which notes the texts that it encodes and the lists that it makes."""

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self.texts: list[str] = []
        self.lists: list[int] = []

    def encode(self, text: str, **how: Any) -> Encoding:
        self.texts.append(text)
        return Encoding(self._rust.encode(text, **how), self.lists)

    def encode_batch_fast(self, texts: list[str], **how: Any) -> list[Encoding]:
        self.texts += texts
        return [Encoding(found, self.lists) for found in self._rust.encode_batch_fast(texts, **how)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rust, name)


class Noting:
    """transformers' tokenizer around `Rust`."""

    def __init__(self) -> None:
        self._hf = make_tokenizer()
        self.backend_tokenizer = Rust(self._hf.backend_tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hf, name)


@pytest.fixture
def noting() -> Noting:
    return Noting()


def refused(noting: Noting, body: CompletionBody | ChatBody) -> BadParam:
    planner = Planner(ModelTokenizer(noting), today=lambda: 0)
    make: Any = planner.chat if isinstance(body, ChatBody) else planner.completion
    with pytest.raises(BadParam) as caught:
        make(body, CARD, "id")
    assert caught.value.openai_code == "context_length_exceeded"
    assert f"the model's context {CONTEXT}" in str(caught.value)
    return caught.value


def test_a_text_that_no_tokens_of_the_context_can_hold_is_not_encoded(noting: Noting) -> None:
    long = "<|python_tag|>"
    fewest = -(-len(FAR) // len(long))
    error = refused(noting, CompletionBody(prompt=FAR))
    assert f"the prompt has at least {fewest} tokens" in str(error)
    error = refused(noting, ChatBody(messages=[{"role": "user", "content": FAR}]))
    assert "the prompt has at least " in str(error)
    assert noting.backend_tokenizer.texts == []


@pytest.mark.parametrize("words", [NEAR, NEAR * 3])
def test_the_ids_of_a_prompt_that_is_too_long_are_counted_and_not_listed(noting: Noting, words: str) -> None:
    tokens = len(make_tokenizer().backend_tokenizer.encode(words).ids)
    error = refused(noting, CompletionBody(prompt=words))
    assert f"the prompt has {tokens} tokens" in str(error)
    refused(noting, ChatBody(messages=[{"role": "user", "content": words}]))
    assert len(noting.backend_tokenizer.texts) == 2
    assert noting.backend_tokenizer.lists == []


def test_each_prompt_is_checked_before_the_next_one_is_encoded(noting: Noting) -> None:
    refused(noting, CompletionBody(prompt=["the", NEAR, "is"]))
    assert noting.backend_tokenizer.texts == ["the", NEAR]


def test_the_number_of_samples_is_checked_before_a_prompt_is_encoded(noting: Noting) -> None:
    with pytest.raises(BadParam, match="3 prompts with 64 samples each"):
        Planner(ModelTokenizer(noting)).completion(CompletionBody(prompt=["the"] * 3, n=64), CARD, "id")
    assert noting.backend_tokenizer.texts == []


# ---- no text is refused that has no more tokens than it may ---------------------------------------------


def bpe(vocab: str = "abc ", **options: Any) -> Tokenizer:
    names = ["<unk>", *vocab, "aa", "aaaa", *options.pop("more", [])]
    vocab_ids = {name: i for i, name in enumerate(names)}
    return Tokenizer(models.BPE(vocab_ids, [("a", "a"), ("aa", "aa")], **options))


def with_parts(tok: Tokenizer, normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    if normalizer is not None:
        tok.normalizer = normalizer
    if pre_tokenizer is not None:
        tok.pre_tokenizer = pre_tokenizer
    return tok


def stripping() -> Tokenizer:
    tok = bpe(unk_token="<unk>")
    tok.add_special_tokens([AddedToken("<x>", lstrip=True, rstrip=True)])
    return tok


def long_word() -> Tokenizer:
    tok = with_parts(bpe(unk_token="<unk>"), normalizers.Replace(" ", "▁"))
    tok.add_tokens([AddedToken("你你你你")])
    return tok


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = {
    "bytes": make_tokenizer().backend_tokenizer,
    "some bytes only": with_parts(bpe("abĠ"), None, LEVEL),
    "some bytes and words": with_parts(
        bpe("abĠ"), None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), LEVEL])
    ),
    "byte fallback": bpe(unk_token="<unk>", byte_fallback=True, more=BYTES),
    "unknown": bpe(unk_token="<unk>"),
    "unknown together": bpe(unk_token="<unk>", fuse_unk=True),
    "unknown dropped": bpe(),
    "composed": with_parts(bpe(unk_token="<unk>"), normalizers.NFC()),
    "collapsed": with_parts(bpe(unk_token="<unk>"), normalizers.Replace(Regex(" +"), " ")),
    "shortened": with_parts(bpe(unk_token="<unk>"), normalizers.Replace("bbb", "a")),
    "stripped": with_parts(bpe(unk_token="<unk>"), normalizers.Strip()),
    "white space dropped": with_parts(bpe(unk_token="<unk>"), None, pre_tokenizers.WhitespaceSplit()),
    "split and dropped": with_parts(bpe(unk_token="<unk>"), None, pre_tokenizers.Split("b", "removed")),
    "white space in a token": stripping(),
    "long word": long_word(),
}
PARTS = [
    "a",
    "aaaa",
    " ",
    "b",
    "<x>",
    "é",
    "e\u0301",
    "你",
    "🙂",
    "\x04",
    "7",
    "<|endoftext|>",
    "<unk>",
    "the",
]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@example([(" ", 200), ("<x>", 1)], "")
@example([("b", 200)], "")
@example([("7", 200)], "")
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(1, 200)), max_size=6), st.text(max_size=8))
def test_a_text_is_refused_if_and_only_if_it_has_too_many_tokens(
    kind: str, runs: list[tuple[str, int]], end: str
) -> None:
    tokenizer = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[kind]))
    text = "".join(part * count for part, count in runs) + end
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.encode(text, special=False, most=len(ids)) == ids
    for fewer in {len(ids) // 20, len(ids) - 1} if ids else ():
        with pytest.raises(TooManyTokens) as caught:
            tokenizer.encode(text, special=False, most=fewer)
        words = str(caught.value)
        assert fewer < int(words.removeprefix("at least ")) <= len(ids), words


# ---- the ids themselves ------------------------------------------------------------------------------


def test_tokenize_gives_a_bounded_number_of_ids(backend: FakeBackend, tokenizer: ModelTokenizer) -> None:
    """It is asked how many tokens a text has, so its bound is not the context."""
    most = MIN_BUDGET // 8 // TOKEN_BYTES
    text = "你" * (most // 3 + 1)
    with serve(backend, tokenizer, limits=Limits(max_body_bytes=2**21, drain_s=2)) as door:
        for asked in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
            answer = door.post("/tokenize", asked)
            assert answer.status_code == 413
            assert f"/tokenize gives at most {most}" in answer.json()["error"]["message"]
        answer = door.post("/tokenize", {"prompt": NEAR * 8})
        assert answer.status_code == 200
        found = answer.json()
        assert found["count"] == len(found["tokens"]) > CONTEXT
        assert found["tokens"] == tokenizer.encode(NEAR * 8, special=True)


def test_a_long_list_with_a_wrong_id_is_refused_by_its_id(door: Running) -> None:
    answer = door.post("/detokenize", {"tokens": [5] * 20_000 + [330]})
    assert answer.status_code == 400
    assert "token 330 is not in the vocabulary of 330" in answer.json()["error"]["message"]
