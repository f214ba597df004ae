"""A model's identity: equal on both sides, or no hand-off takes place.

Hashes the configuration, each tensor's name, type and shape, and samples of each tensor's bytes, so
that it costs a fraction of a second whatever the model's size. For a model in PyTorch's own format, which is
a zip archive, it hashes the sizes and checksums in the archive's directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from segue.kv import ConfigError

SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 2**20
#: Says which file or library wrote the model, nothing about the model.
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


def fingerprint(folder: Path) -> str:
    """32 hex digits over the model in `folder`, however its tensors are spread over files.

    The same weights as safetensors and in PyTorch's format are two models to it. Raises ConfigError when
    the folder has no readable configuration or weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(folder.glob("*.safetensors"))
    archives = [] if files else sorted(folder.glob("pytorch_model*.bin"))
    if not files and not archives:
        raise ConfigError(f"{folder} has no weights (*.safetensors or pytorch_model*.bin)")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kept = {key: config[key] for key in config if key not in _NOT_THE_MODEL}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        tensors: list[tuple[str, bytes]] = []
        for path in files:
            with path.open("rb") as file:
                tensors.extend(_tensors(file))
        for path in archives:
            tensors.extend(_members(path))
    except zipfile.BadZipFile as exc:
        text = f"{path} is no zip archive, as PyTorch writes it since 1.6; save the model as safetensors"
        raise ConfigError(text) from exc
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"the model in {folder} cannot be read: {exc}") from exc
    for name, content in sorted(tensors):
        digest.update(len(name).to_bytes(4, "little") + name.encode() + content)
    return digest.hexdigest()


def weight_count(folder: Path) -> int:
    """Numbers in the safetensors files in `folder`, of whatever type. Raises ValueError, KeyError, TypeError,
    AttributeError or OSError for files that are broken."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            count += sum(math.prod(entry["shape"]) for entry in tensor_header(file)[0].values())
    return count


def tensor_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The description of each tensor of one safetensors file, and where their bytes begin. Raises ValueError
    or AttributeError for another file."""
    size = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"{file.name} is not a safetensors file")
    header: dict[str, Any] = json.loads(file.read(header_bytes))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + header_bytes


def _tensors(file: BinaryIO) -> list[tuple[str, bytes]]:
    """Each tensor of one file: its name, and a hash of its type, shape and sampled bytes."""
    size = os.fstat(file.fileno()).st_size
    header, start = tensor_header(file)
    found = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - start:
            raise ValueError(f"{file.name} is cut short: tensor {name} ends at byte {end}")
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([entry["dtype"], entry["shape"]]).encode())
        last = max(begin, end - SAMPLE_BYTES)
        for at in (begin, begin + (last - begin) // 2, last):
            digest.update(os.pread(file.fileno(), min(SAMPLE_BYTES, end - at), start + at))
        found.append((name, digest.digest()))
    return found


def _members(path: Path) -> list[tuple[str, bytes]]:
    """Each member of a PyTorch archive: where it lies, its size and its checksum (of all of it)."""
    with zipfile.ZipFile(path) as archive:
        return [
            # The folder at its top is named after the file it was written to first.
            (f"{path.name}/{member.filename.partition('/')[2]}", f"{member.file_size} {member.CRC}".encode())
            for member in archive.infolist()
        ]
