"""The sampling settings of requests that do not name them: the model's, or OpenAI's.

A model's `generation_config.json` says how its makers sample from it; other servers apply it by default, and
so does this one (`--sampling-defaults model`). A value in the request always wins, 0 and 1 included.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.kv import ConfigError
from segue.server.frontend.body_reader import RANGES
from segue.server.frontend.problems import BadParam

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

_NAMES = tuple(field.name for field in dataclasses.fields(SamplingDefaults))


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
    given = {name: _checked(path, name, raw[name]) for name in _NAMES if raw.get(name) is not None}
    top_k = min(max(0, int(given.pop("top_k", 0))), vocab_size)
    return SamplingDefaults(**given, top_k=top_k)


_WAY_OUT = "correct it, or start with --sampling-defaults openai"


def _checked(path: Path, name: str, value: Any) -> Any:
    try:
        if isinstance(value, float) and name == "top_k":
            raise BadParam(name)
        RANGES[name].check(name, value)
    except BadParam:
        kind = "a whole number" if name == "top_k" else "a number"
        raise ConfigError(
            f"{path}: {name} must be {kind} {RANGES[name]}, not {value!r}; {_WAY_OUT}"
        ) from None
    return value
