"""The model's tokenizer: text to ids, ids to text, messages to a prompt.

torch is not imported: a folder with `tokenizer.json` is read by the Rust tokenizer alone, which keeps a
frontend small (60 MB instead of 245) and quick to start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from segue.core.errors import ConfigError, Internal
from segue.frontend.problems import BadParam

_SHORT_CHARS = 4096
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class ModelTokenizer:
    """Safe to use from several threads: nothing in it changes after the start but a cache."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._fast = hf.backend_tokenizer
        # A file may carry training-time truncation; a prompt is refused or whole, never cut.
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(
            i for i, token in self._fast.get_added_tokens_decoder().items() if token.special
        )
        spec = json.loads(self._fast.to_str())
        self._byte_level = _contains(spec.get("decoder"), "ByteLevel")
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: str | Path) -> ModelTokenizer:
        """Read a model folder. Raises ConfigError if there is no usable tokenizer in it."""
        path = Path(folder)
        if not path.is_dir():
            raise ConfigError(f"{path} is not a model folder")
        try:
            if (path / "tokenizer.json").exists():
                hf = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            else:
                # Only a slow tokenizer (a sentencepiece file): let transformers convert it.
                from transformers import AutoTokenizer

                hf = AutoTokenizer.from_pretrained(path, local_files_only=True)
            return cls(hf)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"the tokenizer in {path} cannot be read: {error}") from error

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; with `special` the tokens that the model expects around a text are added."""
        if len(text) <= _SHORT_CHARS:
            short: list[int] = self._fast.encode(text, add_special_tokens=special).ids
            return short
        # `encode` keeps the interpreter's lock for as long as it takes (2 s for 4 MB), and with it the event
        # loop; the batch call lets it go.
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of `ids`; unknown ones are left out. Raises Internal for a number that is no id at all."""
        try:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special)
        except OverflowError:
            raise _no_token_id(next(i for i in ids if not 0 <= i < 2**32)) from None
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; together the tokens of a text give its UTF-8. An
        unknown token has none; raises Internal for a number that is no id at all."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        try:
            text = self._fast.id_to_token(token)
        except OverflowError:
            raise _no_token_id(token) from None
        byte = _BYTE_TOKEN.match(text) if text else None
        if text is None:
            out = b""
        elif token in self._special:
            out = text.encode()
        elif byte:
            out = bytes([int(byte[1], 16)])
        elif self._byte_level and all(c in _BYTE_OF for c in text):
            out = bytes(_BYTE_OF[c] for c in text)
        elif self._byte_level:
            out = text.encode()
        else:
            out = text.replace("▁", " ").encode()
        self._bytes[token] = out
        return out

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is only a part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def chat_template(self, *, tools: bool) -> str | None:
        """The template's source, or None: this model has none."""
        if not self._hf.chat_template:
            return None
        source: str = self._hf.get_chat_template(tools=[{}] if tools else None)
        return source

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        generation_prompt: bool,
        continue_final: bool,
        variables: dict[str, Any],
    ) -> str:
        """The prompt's text. Runs in transformers' jinja sandbox. Raises BadParam if the template refuses."""
        if not self._hf.chat_template:
            raise BadParam("this model has no chat template; use /v1/completions", "messages")
        try:
            text: str = self._hf.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                continue_final_message=continue_final,
                **variables,
            )
        except (jinja2.TemplateError, ValueError, TypeError, RecursionError) as error:
            # What a template raises is about the messages it was given: it is the client's to read.
            raise BadParam(f"the chat template refuses these messages: {error}", "messages") from None
        return text


def _no_token_id(token: int) -> Internal:
    # Only a worker can have sent it: what a client sends is compared with the vocabulary before.
    return Internal(f"{token} came as a token id, which it cannot be", phase="stream")


def _contains(node: object, kind: str) -> bool:
    """Whether a tokenizer part, or one nested in it, is of `kind`."""
    if isinstance(node, dict):
        return node.get("type") == kind or any(_contains(child, kind) for child in node.values())
    return isinstance(node, list) and any(_contains(child, kind) for child in node)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the rest for U+0100 and on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
