"""The sampling settings of requests that do not name them: the model's, or OpenAI's.

A model's `generation_config.json` says how its makers sample from it; other servers apply it by default, and
so does this one (`--sampling-defaults model`). A value in the request always wins, 0 and 1 included.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from segue.kv import ConfigError

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling settings like those of `SamplingParams`; without arguments, OpenAI's. `top_k` 0 is all
    tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


OPENAI = SamplingDefaults()

#: The values that make sense, both ends included but for those of `_OPEN`, which begin above the low one.
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
}
_OPEN = frozenset({"top_p", "repetition_penalty"})
_NEVER = frozenset((0, name) for name in _OPEN)


def of_model(folder: Path, vocab_size: int) -> SamplingDefaults:
    """The sampling defaults of the model in `folder`; missing ones are OpenAI's. `do_sample` is ignored.
    Raises ConfigError, in one sentence, for a file that cannot be read or has a value that a client may not
    send either."""
    path = folder / FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return OPENAI
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {_WAY_OUT}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object; {_WAY_OUT}")
    given = {name: _checked(path, name, raw[name]) for name in _RANGES if raw.get(name) is not None}
    top_k = min(max(0, int(given.pop("top_k", 0))), vocab_size)
    return SamplingDefaults(**given, top_k=top_k)


_WAY_OUT = "correct it, or start with --sampling-defaults openai"


def _checked(path: Path, name: str, value: object) -> float:
    low, high = _RANGES[name]
    # JSON's true is a number to Python.
    number = type(value) is int or (type(value) is float and name != "top_k")
    if number and isinstance(value, int | float) and low <= value <= high and (value, name) not in _NEVER:
        return value
    kind = "a whole number" if name == "top_k" else "a number"
    bounds = f"{'above' if name in _OPEN else 'from'} {low:g} to {high:g}"
    raise ConfigError(f"{path}: {name} must be {kind} {bounds}, not {value!r}; {_WAY_OUT}")
