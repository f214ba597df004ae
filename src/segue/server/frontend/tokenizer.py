"""The model's tokenizer: text to ids, ids to text, messages to a prompt.

torch is not imported: a folder with `tokenizer.json` is read by the Rust tokenizer alone, which keeps a
frontend small (60 MB instead of 245) and quick to start.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from segue.kv import ConfigError, Internal
from segue.server.frontend.past_messages import PROBE_TOOL, TemplateForm
from segue.server.frontend.problems import BadParam
from segue.server.frontend.response_template import ResponseForm

log = logging.getLogger(__name__)

_SHORT_CHARS = 4096
_PIECE_CHARS = 2**18
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class TooManyTokens(Exception):
    """A text has more tokens than were asked for: `tokens`, or if not `exact` at least so many."""

    def __init__(self, tokens: int, *, exact: bool) -> None:
        super().__init__(f"{tokens}" if exact else f"at least {tokens}")


class ModelTokenizer:
    """Safe to use from several threads: nothing in it changes after the start but caches."""

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
        self._token_bytes, self._dropped = _longest_token(spec, self._fast.get_vocab(with_added_tokens=True))
        self._bytes: dict[int, bytes] = {}
        self._forms: dict[bool, TemplateForm] = {}
        #: the model's own description of its answers, if it has one
        self.response = _response_form(hf)

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

    def encode(self, text: str, *, special: bool, most: int | None = None) -> list[int]:
        """Token ids; with `special` the tokens that the model expects around a text are added.

        Raises TooManyTokens for more than `most`. The list of ids is not made then: making it keeps the
        interpreter's lock. A text that is too long by its bytes is not encoded.
        """
        if most is not None and self._token_bytes and 4 * len(text) > most * self._token_bytes:
            fewest = -(-self._kept_bytes(text) // self._token_bytes)
            if fewest > most:
                raise TooManyTokens(fewest, exact=False)
        if len(text) <= _SHORT_CHARS:
            encoding = self._fast.encode(text, add_special_tokens=special)
        else:
            # `encode` keeps the interpreter's lock for as long as it takes (2 s for 4 MB), and with it the
            # event loop; the batch call lets it go.
            encoding = self._fast.encode_batch_fast([text], add_special_tokens=special)[0]
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding), exact=True)
        ids: list[int] = encoding.ids
        return ids

    def _kept_bytes(self, text: str) -> int:
        # In pieces: other threads run between them.
        pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
        return sum(len(piece.encode(errors="replace").translate(None, self._dropped)) for piece in pieces)

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

    def info(self) -> dict[str, Any]:
        """The tokenizer as clients may know it: its kind, templates and special tokens, and no path."""
        hf = self._hf
        return {
            "tokenizer_class": type(hf).__name__,
            "vocab_size": self.vocab_size,
            "chat_template": hf.chat_template,
            "response_template": getattr(hf, "response_template", None),
            **{name: str(token) for name, token in hf.special_tokens_map.items() if isinstance(token, str)},
        }

    def token_id(self, text: str) -> int | None:
        """The id of the token that is this text, or None."""
        found: int | None = self._fast.token_to_id(text)
        return found

    def is_special(self, text: str) -> bool:
        """Whether this text is one special token, which is no text for a client."""
        return self.token_id(text) in self._special

    def chat_template(self, *, tools: bool) -> str | None:
        """The template's source, or None: this model has none."""
        if not self._hf.chat_template:
            return None
        source: str = self._hf.get_chat_template(tools=[{}] if tools else None)
        return source

    def form(self, *, tools: bool) -> TemplateForm:
        """The form in which the chat template takes messages; a model may have another one for `tools`."""
        form = self._forms.get(tools)
        if form is None:
            given = [PROBE_TOOL] if tools else None

            def render(messages: list[dict[str, Any]]) -> str:
                return self.render(
                    messages, given, generation_prompt=True, continue_final=False, variables={}
                )

            form = TemplateForm.of(self.chat_template(tools=tools) or "", render, tools=tools)
            self._forms[tools] = form
            if not form.tools:
                log.warning(
                    "event=tools_not_shown reason='the chat template does not show tools to the model'"
                )
        return form

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
        source = self.chat_template(tools=tools is not None)
        if source is None:
            raise BadParam("this model has no chat template; use /v1/completions", "messages")
        try:
            # `apply_chat_template` would take keys out whose value is null: some templates ask for it.
            texts, _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=generation_prompt,
                continue_final_message=continue_final,
                **{**self._hf.special_tokens_map, **variables},
            )
        except Exception as error:
            # A template is a program over what the client sent, and its only input; whatever ends it is about
            # that. `raise_exception` has a text for clients.
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise BadParam(f"the chat template refuses these messages: {kind}{error}", "messages") from None
        text: str = texts[0]
        try:
            text.encode()
        except UnicodeEncodeError:
            # A past call whose JSON has half a pair of surrogates as an escape; no tokenizer takes that.
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text


def _response_form(hf: Any) -> ResponseForm | None:
    template = getattr(hf, "response_template", None)
    if template is None:
        return None
    try:
        return ResponseForm(template)
    except (ValueError, TypeError) as error:
        log.warning("event=response_template_refused reason=%r", str(error))
        return None


def _no_token_id(token: int) -> Internal:
    # Only a worker can have sent it: what a client sends is compared with the vocabulary before.
    return Internal(f"{token} came as a token id, which it cannot be", phase="stream")


def _contains(node: object, kind: str) -> bool:
    """Whether a tokenizer part, or one nested in it, is of `kind`."""
    if isinstance(node, dict):
        return node.get("type") == kind or any(_contains(child, kind) for child in node.values())
    return isinstance(node, list) and any(_contains(child, kind) for child in node)


def _longest_token(spec: dict[str, Any], vocab: dict[str, int]) -> tuple[int, bytes]:
    """The most bytes of a text that one token can stand for, and the bytes that give no token; 0 where the
    tokenizer may drop or merge others, too (unknown characters, white space)."""
    model, added = spec["model"], spec.get("added_tokens") or []
    parts = [
        *_parts(spec.get("normalizer"), "normalizers"),
        *_parts(spec.get("pre_tokenizer"), "pretokenizers"),
    ]
    if (
        model.get("type") != "BPE"
        or not all(_keeps_bytes(part) for part in parts)
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return 0, b""
    if any(part["type"] == "ByteLevel" for part in parts):
        names = {token["content"] for token in added}
        longest = max(len(token.encode()) if token in names else len(token) for token in vocab)
        return longest, bytes(byte for char, byte in _BYTE_OF.items() if char not in vocab)
    fallback = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if fallback or (model.get("unk_token") in vocab and not model.get("fuse_unk")):
        # An unknown character has up to four bytes.
        return max(4, *(len(token.encode()) for token in vocab)), b""
    return 0, b""


def _parts(node: dict[str, Any] | None, nested: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a list of the simple ones that it consists of."""
    if node is None:
        return []
    if node.get("type") == "Sequence":
        return [part for child in node[nested] for part in _parts(child, nested)]
    return [node]


def _keeps_bytes(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer is known to make no text shorter."""
    match part["type"]:
        case "ByteLevel" | "Digits" | "Metaspace" | "Prepend":
            return True
        case "Split" | "Punctuation":
            return bool(part.get("behavior") != "Removed")
        case "Replace":
            old = part["pattern"].get("String")
            return old is not None and len(old.encode()) <= len(part["content"].encode())
    return False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the rest for U+0100 and on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
