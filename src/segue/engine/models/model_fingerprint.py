"""The identity of the model in a folder, which is equal on both sides or no hand-off takes place; headers of
safetensors files."""

from __future__ import annotations

import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from segue.kv import ConfigError, model_fingerprint, weights_digest

_MAX_HEADER_BYTES = 100 * 2**20


def fingerprint(folder: Path) -> str:
    """32 hex digits over the configuration and the weights in `folder` (see `model_fingerprint`).

    Raises ConfigError when the folder has no readable configuration or weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    archives = [] if files else sorted(folder.glob("pytorch_model*.bin"))
    if not files and not archives:
        raise ConfigError(f"{folder} has no weights (*.safetensors or pytorch_model*.bin)")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for path in files:
            with path.open("rb") as file:
                tensor_header(file)
        for path in archives:
            if not zipfile.is_zipfile(path):
                raise ConfigError(
                    f"{path} is no zip archive, as PyTorch writes it since 1.6; save the model as safetensors"
                )
        return model_fingerprint(config, weights_digest(folder))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as exc:
        raise ConfigError(f"the model in {folder} cannot be read: {exc}") from exc


def weight_count(folder: Path) -> int:
    """Numbers in the safetensors files in `folder`, of whatever type. Raises ValueError, KeyError, TypeError,
    IndexError, AttributeError or OSError for files that are broken."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            count += sum(math.prod(entry["shape"]) for entry in tensor_header(file).values())
    return count


def tensor_header(file: BinaryIO) -> dict[str, Any]:
    """The description of each tensor of one safetensors file. Raises ValueError for a file that is cut short
    or too long, and ValueError, AttributeError, LookupError or TypeError for one that is something else."""
    size = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"{file.name} is not a safetensors file")
    header: dict[str, Any] = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    last = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end:
            raise ValueError(f"{file.name}: tensor {name} has no bytes of the file, but {begin} to {end}")
        last = max(last, end)
    if (end := 8 + header_bytes + last) != size:
        raise ValueError(f"{file.name} has {size} bytes where its header needs {end}: copy it again")
    return header
