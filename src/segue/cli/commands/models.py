"""Resolves a model's name to a local folder, with a progress bar while it is downloaded or converted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

from segue.cli.terminal import progress
from segue.engine.model_names import DEFAULT_MODEL
from segue.engine.models.model_fingerprint import weight_count
from segue.engine.models.model_registry import ModelFamily, family_of
from segue.engine.pool_size import ModelSize
from segue.kv import ConfigError
from segue.server.observe import logs

#: More than any size in a description.
_MAX_SIZE = 2**40


def located(model: str) -> str:
    """`model` as an absolute path if it is one that exists here, so that what is left is a name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if model != DEFAULT_MODEL and path.exists() else model


def resolve(model: str, cache: str | None, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of `model`. Raises ConfigError for an unknown or broken one. Without `weights` a
    folder may lack them, and of a model of the Hub its tokenizer alone is fetched."""
    from segue.engine.models.model_store import resolve_model

    with progress(BarColumn(), DownloadColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(model, total=None, visible=False)
        said = ""

        def shown(stage: str, done_bytes: int, total_bytes: int) -> None:
            nonlocal said
            text = f"{stage} {Path(model).name}"
            bar.update(task, description=text, completed=done_bytes, total=total_bytes or None, visible=True)
            if stage != said and not bar.console.is_terminal:
                logs.say(text, logging.INFO)
            said = stage

        folder = Path(cache) if cache else None
        return Path(resolve_model(model, cache=folder, revision=revision, weights=weights, progress=shown))


def model_size(path: Path, dtype: str) -> ModelSize | None:
    """The sizes of the model in the folder `path` with weights and KV in `dtype`, from its description; None
    if that lacks them. Raises ConfigError for an invalid size."""
    try:
        config = json.loads((path / "config.json").read_bytes())
        config = config.get("text_config", config)
        family = family_of(config) or ModelFamily()
        _check_sizes(path / "config.json", config, family.sizes)
        item_bytes = 4 if dtype == "float32" else 2
        token_bytes = item_bytes * family.kv_layers(config) * family.kv_items(config)
        state_bytes = sum(tensor.nbytes for tensor in family.state(config, dtype, item_bytes))
        weight_bytes = item_bytes * weight_count(path)
        return ModelSize(weight_bytes, token_bytes, family.context_tokens(config), state_bytes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _check_sizes(file: Path, config: dict[str, object], names: Iterable[str]) -> None:
    for name in names:
        value = config.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 1 <= value <= _MAX_SIZE):  # type: ignore[operator]
            raise ConfigError(
                f"{file}: {name} is {str(value)[:40]!r}; it must be a whole number from 1 to {_MAX_SIZE}"
            )
