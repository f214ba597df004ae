"""The names of a model: the Hub's, and the one that clients ask for."""

from __future__ import annotations

import re

#: The model that is served where none is named.
DEFAULT_MODEL = "smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def served_name(model: str, name: str | None) -> str:
    """The name that clients ask for: the given one, a Hub's name as it is (`Qwen/Qwen3-0.6B`), or the last
    part of the model's path without `.gguf`. Give `/…/a/b` if `a/b` is a folder."""
    if name:
        return name
    if is_hub_name(model):
        return model
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return last.removesuffix(".gguf") or model


def is_hub_name(text: str) -> bool:
    """Whether `text` can be the name of a repository of the Hugging Face Hub, `ORG/NAME`."""
    return _HUB_NAME.fullmatch(text) is not None and not text.endswith(".gguf")
