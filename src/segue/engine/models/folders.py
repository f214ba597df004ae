"""Whether a folder holds a complete Hugging Face model, by names, headers and sizes."""

from __future__ import annotations

import errno
import json
import shutil
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
                _check_safetensors(folder / name)
        return
    raise ConfigError(f"{folder} has no weights (model.safetensors or pytorch_model.bin, whole or sharded).")


def _check_safetensors(path: Path) -> None:
    """Refuse a file that is cut short or is something else, by its header alone."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header, start = tensor_header(file)
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
        raise ConfigError(f"{path} has a broken safetensors header ({exc}).") from exc
    if end != size:
        raise ConfigError(f"{path} has {size} bytes where its header needs {end}: copy it again.")


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
