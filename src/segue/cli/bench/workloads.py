"""The requests of a measurement: synthetic prompts, ShareGPT conversations, Mooncake traces.

A vocabulary draws prompts of a given length: token ids where the server can tokenize, words elsewhere.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from segue.kv import DECODE_ERRORS, ConfigError

#: Tokens that one hash id of a Mooncake trace stands for.
BLOCK_TOKENS: Final = 512
MAX_FILE_BYTES: Final = 2 * 2**30
MAX_INPUT_TOKENS: Final = 10**7
MAX_OUTPUT_TOKENS: Final = 10**6
#: A year.
MAX_TIMESTAMP_MS: Final = 365 * 86400e3

#: Common words, most of which are one token in any vocabulary.
_WORDS = """
the of and to in is was he for it with as his on be at by had not are but from or have an they which
one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any
like my now over such our man me even most made after also did many off before must well back
through years where much your way down should because long each just state those people too little
world still own see work men here life both get between under never day same another know while last
might us great old year come since go against came right used take three small house place again
water found always part night head given however school every fact
"""
WORDS: Final = _WORDS.split()

_SPACE: Final = re.compile(r"\s*")

Prompt: TypeAlias = list[int] | str


class Vocabulary:
    """Token ids, or words of which `per_token` make a token. The same key draws the same units."""

    def __init__(self, units: Sequence[int] | Sequence[str] = WORDS, per_token: float = 1.0) -> None:
        self._units = units
        self._per_token = per_token

    @property
    def exact(self) -> bool:
        """Prompts have exactly as many tokens as asked for."""
        return isinstance(self._units[0], int)

    def draw(self, key: str, tokens: int) -> list[int | str]:
        """Units for `tokens` tokens."""
        return random.Random(key).choices(self._units, k=self.count(tokens))

    def count(self, tokens: int) -> int:
        """The number of units that make `tokens` tokens."""
        return round(tokens * self._per_token)

    def tokens(self, text: str) -> int:
        """An estimate of the tokens of `text`, for servers that cannot count them."""
        return max(1, round(len(text.split()) / self._per_token))

    def prompt(self, units: list[int | str]) -> Prompt:
        """Units as a request has them; never empty."""
        units = units or [self._units[0]]
        return [u for u in units if isinstance(u, int)] if self.exact else " ".join(map(str, units))


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts of `input_tokens` tokens that share only their first `shared_tokens`."""

    input_tokens: int
    shared_tokens: int
    seed: int

    def prompt(self, index: int, vocabulary: Vocabulary) -> Prompt:
        """The prompt of request `index`; warm-up requests count from -1 down."""
        own = max(1, vocabulary.count(self.input_tokens) - vocabulary.count(self.shared_tokens))
        units = vocabulary.draw(f"{self.seed}/shared", self.shared_tokens)
        return vocabulary.prompt(units + vocabulary.draw(f"{self.seed}/{index}", self.input_tokens)[:own])


class Conversation(msgspec.Struct, frozen=True):
    """The first question of a ShareGPT conversation and its answer, which only gives the output's length."""

    question: str
    answer: str


class TraceLine(msgspec.Struct, frozen=True):
    """A line of a Mooncake trace; `timestamp` in milliseconds. Equal hash ids are equal blocks of tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    def __post_init__(self) -> None:
        blocks = -(-self.input_length // BLOCK_TOKENS)
        if not 1 <= self.input_length <= MAX_INPUT_TOKENS:
            raise ValueError(f"input_length must be between 1 and {MAX_INPUT_TOKENS}")
        if not 1 <= self.output_length <= MAX_OUTPUT_TOKENS:
            raise ValueError(f"output_length must be between 1 and {MAX_OUTPUT_TOKENS}")
        if not 0 <= self.timestamp <= MAX_TIMESTAMP_MS:
            raise ValueError(f"timestamp must be between 0 and {MAX_TIMESTAMP_MS:.0f} milliseconds")
        if len(self.hash_ids) > blocks:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids are more than the {blocks} blocks of {BLOCK_TOKENS} tokens "
                f"of input_length {self.input_length}"
            )

    def prompt(self, index: int, vocabulary: Vocabulary, seed: int) -> Prompt:
        """The blocks, cut or filled up with tokens of the request's own to `input_length`."""
        units: list[int | str] = []
        for block in self.hash_ids:
            units += vocabulary.draw(f"{seed}/block/{block}", BLOCK_TOKENS)
        units += vocabulary.draw(
            f"{seed}/{index}", max(0, self.input_length - len(self.hash_ids) * BLOCK_TOKENS)
        )
        return vocabulary.prompt(units[: vocabulary.count(self.input_length)])


class _ShareGptTurn(msgspec.Struct, frozen=True):
    value: str


class _ShareGptEntry(msgspec.Struct, frozen=True):
    conversations: list[_ShareGptTurn]


Dataset: TypeAlias = list[Conversation] | list[TraceLine]


def read_dataset(name: str) -> Dataset:
    """The requests of a file: a JSON list is ShareGPT, JSON lines are a Mooncake trace, with ascending
    timestamps. Raises ConfigError, which names the line."""
    path = Path(name)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"--dataset {name} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--dataset {name} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--dataset {name}, byte {exc.start}: not UTF-8") from exc
    if text.lstrip()[:1] == "[":
        return _share_gpt(name, text)
    return _mooncake(name, text)


def _share_gpt(name: str, text: str) -> list[Conversation]:
    found = []
    for at, entry in _elements(name, text):
        try:
            turns = msgspec.convert(entry, _ShareGptEntry).conversations
        except msgspec.ValidationError as exc:
            raise _wrong(name, text, at, f"not a ShareGPT conversation: {exc}") from exc
        if len(turns) > 1 and turns[0].value.strip():
            found.append(Conversation(turns[0].value, turns[1].value))
    if not found:
        raise ConfigError(f"--dataset {name} has no ShareGPT conversation of two turns")
    return found


def _elements(name: str, text: str) -> Iterator[tuple[int, object]]:
    """Each element of the JSON list `text`, after the place where it begins."""
    decode = json.JSONDecoder().raw_decode
    at = _after_space(text, text.index("[") + 1)
    while text[at : at + 1] != "]":
        try:
            entry, end = decode(text, at)
        except json.JSONDecodeError as exc:
            raise _wrong(name, text, exc.pos, f"not JSON: {exc.msg}") from exc
        except RecursionError as exc:
            raise _wrong(name, text, at, "not a ShareGPT conversation: nested too deeply") from exc
        yield at, entry
        at = _after_space(text, end)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != "]":
            raise _wrong(name, text, at, "not JSON: a comma or ] is missing")


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _wrong(name: str, text: str, at: int, why: str) -> ConfigError:
    return ConfigError(f"--dataset {name}, line {text.count(chr(10), 0, at) + 1}: {why}")


def _mooncake(name: str, text: str) -> list[TraceLine]:
    decode = msgspec.json.Decoder(TraceLine).decode
    found: list[TraceLine] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(decode(line))
        except DECODE_ERRORS as exc:
            raise ConfigError(
                f"--dataset {name}, line {number}: not a line of a Mooncake trace: {exc}"
            ) from exc
        if len(found) > 1 and found[-1].timestamp < found[-2].timestamp:
            raise ConfigError(
                f"--dataset {name}, line {number}: its timestamp is before that of the line above"
            )
    if not found:
        raise ConfigError(
            f"--dataset {name} is empty: give a ShareGPT JSON list or a Mooncake trace (JSON lines)"
        )
    return found
