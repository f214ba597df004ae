"""Output formats: JSON, JSON schema, regex and Lark grammars, through llguidance.

A compiled grammar is kept as a matcher in its first state, and a sequence gets a copy (7 µs). The state
depends on the tokens alone, so a first token drawn on prefill and told to decode leads to the same masks
on both sides. For the same reason the limits on a grammar are counts of work, never seconds: both sides,
on any machine, take or refuse the same grammars. At the limits compiling took 0.1 s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import llguidance
import llguidance.hf
import numpy as np
import transformers
from numpy.typing import NDArray

from segue.core.errors import InvalidRequest
from segue.core.request import Grammar

MAX_GRAMMAR_BYTES = 64 * 2**10
MAX_CACHED = 64
#: Bounded white space: a small model otherwise likes to end a JSON text in blanks without end.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
_MAX_REASON = 500


class GrammarMatcher:
    """Where one sequence is in its grammar. Once stuck it stays so."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._refused: int | None = None

    @property
    def finished(self) -> bool:
        """The text is complete and cannot go on: only an end-of-sequence token is admitted."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def accepting(self) -> bool:
        """The text so far is complete, though it may go on."""
        return bool(self._matcher.is_accepting())

    def admitted(self) -> NDArray[np.bool_]:
        """One flag per token of the vocabulary; the array is the caller's.

        InvalidRequest once the grammar is stuck: it refused a token, or became too complex.
        """
        if self._refused is None and not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if not self._matcher.is_error():
                flags = np.zeros(self._vocab_size, np.bool_)
                known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
                flags[: len(known)] = known
                return flags
        if self._refused is not None:
            raise InvalidRequest(f"token {self._refused} does not fit the output format")
        raise InvalidRequest(f"the output format cannot be followed: {_reason(self._matcher.get_error())}")

    def accept(self, token: int) -> None:
        """Advance by `token`. If it does not fit, every later `admitted` raises."""
        if self._refused is None and not self._matcher.is_error() and not self._matcher.consume_token(token):
            self._refused = token


class GrammarCompiler:
    """Compiles grammars for one tokenizer; keeps the last `MAX_CACHED` it was asked for.

    Making one costs a quarter of a second (the tokenizer is turned into a trie). One thread only.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerFast,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        max_grammar_bytes: int = MAX_GRAMMAR_BYTES,
        max_cached: int = MAX_CACHED,
    ) -> None:
        eos = sorted(eos_token_ids)
        words = max(vocab_size, len(tokenizer))
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=words, eos_token=eos or None)
        self._vocab_size = vocab_size
        self._max_grammar_bytes = max_grammar_bytes
        self._max_cached = max_cached
        self._limits = llguidance.LLParserLimits(max_grammar_size=250_000, verbose_errors=False)
        self._compiled: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()

    def __len__(self) -> int:
        """Grammars in the cache."""
        return len(self._compiled)

    def open(self, grammar: Grammar) -> GrammarMatcher:
        """A fresh state of `grammar`. InvalidRequest with the library's reason if it cannot be compiled."""
        key = (grammar.kind, grammar.text)
        matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._compile(grammar)
            self._compiled[key] = matcher
            if len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(key)
        return GrammarMatcher(matcher.deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        size = len(grammar.text.encode(errors="replace"))
        if size > self._max_grammar_bytes:
            raise InvalidRequest(
                f"The output format has {size} bytes; the limit is {self._max_grammar_bytes}."
            )
        build = llguidance.LLMatcher
        try:
            match grammar.kind:
                case "json_object":
                    source = build.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
                case "json_schema":
                    source = build.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
                case "regex":
                    source = build.grammar_from_regex(grammar.text)
                case "lark":
                    source = build.grammar_from_lark(grammar.text)
        except ValueError as exc:  # text that is not JSON, or not UTF-8
            raise InvalidRequest(f"The output format ({grammar.kind}) is not valid: {_reason(exc)}") from exc
        matcher = build(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(
                f"The output format ({grammar.kind}) is not valid: {_reason(matcher.get_error())}"
            )
        return matcher


def _reason(text: object) -> str:
    """The library's message in one line of bounded length."""
    return " ".join(str(text).split())[:_MAX_REASON]
