"""Whether a folder holds a complete Hugging Face model: by names, headers and sizes before it is loaded, by
the names of its weights afterwards."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from segue.engine.models.model_fingerprint import tensor_header
from segue.engine.models.model_registry import type_of
from segue.kv import ConfigError


def check_folder(folder: Path, *, weights: bool = True) -> Path:
    """`folder` itself if it holds a complete Hugging Face model; ConfigError names what is missing. Without
    `weights` they are not looked for."""
    config = read_json(folder / "config.json", f"{folder} has no config.json, so it is no Hugging Face model")
    if type_of(config) is None:
        raise ConfigError(f"{folder / 'config.json'} names no model_type.")
    tokenizers = (["tokenizer.json"], ["tokenizer.model"], ["vocab.json", "merges.txt"])
    if not any(all((folder / name).is_file() for name in names) for names in tokenizers):
        raise ConfigError(f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json).")
    if weights:
        _check_weights(folder)
    return folder


def _check_weights(folder: Path) -> None:
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            files = {single}
        elif index.is_file():
            weight_map = read_json(index, "").get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ConfigError(f"{index} lists no weights.")
            files = {str(name) for name in weight_map.values()}
        else:
            continue
        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing:
            raise ConfigError(f"{folder} lacks the weight file {missing[0]} ({len(missing)} missing in all).")
        for name in files:
            if name.endswith(".safetensors"):
                _check_header(folder / name)
        return
    raise ConfigError(f"{folder} has no weights (model.safetensors or pytorch_model.bin, whole or sharded).")


def _check_header(path: Path) -> None:
    """Refuse a file that is cut short or is something else, by its header alone."""
    try:
        with path.open("rb") as file:
            tensor_header(file)
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise ConfigError(f"{path} has a broken safetensors header: {exc}") from exc


def check_loaded(source: Path, found: Mapping[str, Any], unused: Collection[str]) -> None:
    """Raise a ConfigError unless all weights of a model came from `source` with their shapes (`found` is what
    transformers says of the loading), and none of those in `source` are `unused`. transformers fills gaps
    with random numbers, and passes over what it does not know."""
    if missing := found["missing_keys"]:
        raise ConfigError(
            f"{source} lacks {_some(missing)}: weights of the model that its configuration describes. Copy "
            "all files of the model again; an adapter has to be merged into its model first."
        )
    mismatched = [f"{name} {tuple(has)} for {tuple(need)}" for name, has, need in found["mismatched_keys"]]
    if wrong := mismatched or unused:
        raise ConfigError(
            f"{source} has {_some(wrong)}: not of the model that its configuration describes. Give the "
            "configuration and the weights of one model."
        )


def of_layers(model: Any, names: Collection[str]) -> list[str]:
    """Which weights of these `names`, none of them in `model`, would change its answers. Others are of models
    that share the file: a vision tower, heads for training, layers that predict further tokens."""
    parts = {name for name, _ in model.named_modules() if "." in name} | {"lm_head"}
    layers, more = model.config.num_hidden_layers, getattr(model.config, "num_nextn_predict_layers", 0)
    beside = {f"model.layers.{layers + i}" for i in range(more)}
    return [
        name for name in names if not parts.isdisjoint(_parents(name)) and beside.isdisjoint(_parents(name))
    ]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def read_json(path: Path, missing: str) -> dict[str, Any]:
    """The JSON object in `path`; a ConfigError says `missing` if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{missing}.") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    return content


def check_room(folder: Path, need: int) -> None:
    """Raise OSError (ENOSPC) before `need` bytes are written that cannot fit, with some room for others."""
    free = shutil.disk_usage(folder).free
    if free < need + 64 * 2**20:
        raise OSError(errno.ENOSPC, f"{need / 1e6:.0f} MB and some needed, {free / 1e6:.0f} MB free")
