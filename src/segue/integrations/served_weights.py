"""The weights that another engine serves: digests of its models, by name or path, and of its adapters."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

from segue.kv import ConfigError, weights_digest

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
#: The adapters that were used last.
_MAX_ADAPTERS = 1024


def served_weights(name: str, revision: str | None, load_format: str, seed: object) -> object:
    """The digest of the weights that an engine loads by `name`; if they are not in files here, or are random
    (`load_format` dummy), what the engine loads them by. Raises ConfigError for files that cannot be read."""
    dummy = load_format == "dummy"
    path = None if dummy else model_path(name, revision)
    digest = None if path is None else weights_digest(path)
    if digest is None and not dummy:
        log = logging.getLogger("segue.weights")
        log.warning("no files with weights of %s were found: its name stands for them", name)
    return digest or (name, str(revision), load_format, seed if dummy else None)


def model_path(name: str, revision: str | None) -> Path | None:
    """The folder or file of a model, or its folder in Hugging Face's cache; None if it is not here."""
    if os.path.exists(name):
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:
        return None  # no name of the hub: an address of a bucket, for example
    return Path(found).parent if isinstance(found, str) else None


class AdapterFingerprints:
    """Digests of LoRA adapters: their configuration and weights.

    Files are read once for each adapter that the engine has loaded. An adapter has no digest if it is not in
    files here, or if its files have changed since they were read: it is not known then which weights the
    engine computes with.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[Hashable, str], tuple[list[object], str | None]] = OrderedDict()

    def of(self, loaded: Hashable, folder: str) -> str | None:
        """The digest of the adapter in `folder`, which the engine has loaded under the number or name
        `loaded`; or None."""
        files = sorted(p for kind in _ADAPTER_FILES for p in Path(folder).glob(kind))
        if len(files) < 2:  # the configuration and weights
            return None
        try:
            state: list[object] = [
                (p.name, s.st_size, s.st_mtime_ns, s.st_ino) for p in files for s in [p.stat()]
            ]
            known = self._found.pop((loaded, folder), None) or (
                state,
                weights_digest(Path(folder), _ADAPTER_FILES),
            )
        except (OSError, ConfigError):
            return None
        self._found[loaded, folder] = known
        if len(self._found) > _MAX_ADAPTERS:
            self._found.popitem(last=False)
        return known[1] if known[0] == state else None
