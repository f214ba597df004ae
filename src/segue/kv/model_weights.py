"""The identity of a model: its configuration and every byte of its weights. Two engines with one identity
compute the same KV.

To read all weights takes as long as the disk needs, once: the digest of each large file is kept in
`.segue-weights.json` beside it, or in segue's cache folder if the model's folder is read-only. A digest is
taken from there while the file has the size, times and inode that it had then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from segue.kv.errors import DECODE_ERRORS, ConfigError

log = logging.getLogger("segue.weights")

RECORD = ".segue-weights.json"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
#: Which file or library wrote the model, and the type that it is served in, which engines compare apart.
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
#: Digests of smaller files are not kept: to read them takes milliseconds.
_KEPT_BYTES = 16 * 2**20
_BLOCK_BYTES = 4 * 2**20
_READERS = 4


class _FileDigest(msgspec.Struct, frozen=True, array_like=True):
    """A file's size, times of its last changes (content, inode), inode, and digest."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    digest: str = ""

    @classmethod
    def of(cls, path: Path) -> _FileDigest:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def cache_folder() -> Path:
    """`SEGUE_CACHE`, else `segue` in `XDG_CACHE_HOME`, else `~/.cache/segue`."""
    explicit = os.environ.get("SEGUE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "segue"


def model_fingerprint(configuration: Mapping[str, object], *facts: object) -> str:
    """32 hex digits over a model's `configuration` (its `config.json`) and further `facts`: the digest of its
    weights, and of a draft model's."""
    kept = {key: value for key, value in configuration.items() if key not in _NOT_THE_MODEL}
    content = json.dumps(("segue model 1", kept, facts), sort_keys=True, default=str).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def weights_digest(path: Path, names: Iterable[str] = _WEIGHT_FILES) -> str | None:
    """A digest of the files of weights in the folder `path` that match `names`, or of the file `path`; None
    if there are none. Raises ConfigError for files that cannot be read."""
    folder = path if path.is_dir() else path.parent
    files = sorted({p for name in names for p in path.glob(name)}) if path.is_dir() else [path]
    if not files:
        return None
    # A named pipe would be waited for.
    if odd := next((file for file in files if file.exists() and not file.is_file()), None):
        raise ConfigError(f"the weights in {path} cannot be read: {odd.name} is no file")
    try:
        digests = _digests(folder, files)
    except OSError as error:
        raise ConfigError(f"the weights in {path} cannot be read: {error}") from error
    return hashlib.blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()


def _digests(folder: Path, files: list[Path]) -> list[tuple[str, int, str]]:
    """Name, size and digest of each file."""
    now = {file: _FileDigest.of(file) for file in files}
    known = {name: kept for place in _places(folder) for name, kept in _read(place).items()}
    found = {
        file: known[file.name].digest
        for file, state in now.items()
        if file.name in known and msgspec.structs.replace(known[file.name], digest="") == state
    }
    unknown = [file for file in files if file not in found]
    large = [file for file in unknown if now[file].size >= _KEPT_BYTES]
    place = _writable(folder) if large else None
    if large:
        gib = sum(now[file].size for file in large) / 2**30
        log.info("reading %.1f GiB of weights in %s for their digest", gib, folder)
    with ThreadPoolExecutor(_READERS) as pool:
        found |= zip(unknown, pool.map(_hash, unknown), strict=True)
    if place is not None:
        # A change within the tick of the clock in which a file was last changed cannot be seen later.
        settled = [f for f in large if now[f] == _FileDigest.of(f) and now[f].ctime_ns < place.began_ns]
        kept = {file.name: msgspec.structs.replace(now[file], digest=found[file]) for file in settled}
        _write(place.path, known | kept)
    return [(file.name, now[file].size, found[file]) for file in files]


def _hash(file: Path) -> str:
    digest, block = xxhash.xxh3_128(), bytearray(_BLOCK_BYTES)
    with file.open("rb", buffering=0) as content:
        while count := content.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


class _RecordPlace(NamedTuple):
    """Where a record can be written, and the time there when that was tried."""

    path: Path
    began_ns: int


def _places(folder: Path) -> tuple[Path, Path]:
    """Where the record of a folder may be, the preferred one last."""
    name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
    return cache_folder() / "weights" / f"{name}.json", folder / RECORD


def _writable(folder: Path) -> _RecordPlace | None:
    for place in reversed(_places(folder)):
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place.parent) as tried:
                return _RecordPlace(place, os.fstat(tried.fileno()).st_mtime_ns)
    log.warning("the digest of the weights in %s can be kept nowhere: each start reads them again", folder)
    return None


def _read(place: Path) -> dict[str, _FileDigest]:
    try:
        if not place.is_file():
            return {}
        return msgspec.json.decode(place.read_bytes(), type=dict[str, _FileDigest])
    except (OSError, *DECODE_ERRORS):
        return {}


def _write(place: Path, record: dict[str, _FileDigest]) -> None:
    new = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        new.write_bytes(msgspec.json.encode(record))
        new.replace(place)
    except OSError as error:
        log.warning("the digest of the weights is not kept in %s: %s", place, error)
        with contextlib.suppress(OSError):
            new.unlink()
