"""Compiles kernels and keeps the machine code in `kernels` in segue's cache folder.

numba reads and writes the files. Its key has the signature, the processor, the bytecode and the closure, but
neither the options nor other source files. All entries of one function share an index file, and two processes
that add different entries at once can leave one's code under the other's key. So each kernel has a name, and
with it files, of its own, in a folder for these versions, this source and this processor. Two processes that
compile the same kernel write the same files, and each file is replaced whole.

The files are code. A folder that another user owns or may write to is not used.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba

log = logging.getLogger("segue.engine")

#: Files that kernels are made from.
SOURCES = tuple(Path(__file__).with_name(name) for name in ("cpu_kernels.py", "cpu_numba.py"))
#: Held while numba is told where to keep a function's code: it asks a variable of its whole process.
_telling = threading.Lock()


class Source(NamedTuple):
    """A function to compile. `name` names all that its code depends on beside source and options."""

    name: str
    function: Callable[..., None]
    signature: Any


def compile_kernels(
    sources: Sequence[Source], options: dict[str, Any], cache: Path
) -> list[Callable[..., None]]:
    """The compiled functions, from `cache` where they are there. If `cache` cannot be used, one warning says
    so, and the code stays in memory."""
    began, from_cache = time.monotonic(), 0
    folder = usable_folder(cache)
    made = []
    for done, source in enumerate(sources):
        files = _files(source, options, folder)
        if not files:
            log.info("event=kernel_compiling kernel=%s done=%d of=%d", source.name, done, len(sources))
        dispatcher = _compiled(source, options, folder, files)
        from_cache += sum(dispatcher.stats.cache_hits.values())
        made.append(dispatcher)
    log.info(
        "event=kernels_ready compiled=%d from_cache=%d seconds=%.1f",
        len(sources) - from_cache,
        from_cache,
        time.monotonic() - began,
    )
    return made


@functools.lru_cache(maxsize=16)
def usable_folder(cache: Path) -> Path | None:
    """The folder for kernels of this source, these versions and this processor; None, after one warning, if
    it cannot be written to, or if others could write there."""
    kernels = cache / "kernels"
    folder = kernels / _edition()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for path in (kernels, folder):
            path.mkdir(mode=0o700, exist_ok=True)  # one by one: parents have the mode of the umask
            found = path.stat()
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(f"{path} belongs to another user, or others may write to it")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as exc:
        log.warning(
            "event=kernels_not_kept folder=%s error=%r advice='choose another --cache'",
            kernels,
            str(exc),
        )
        return None
    return folder


def _edition() -> str:
    """A name for everything that all kernels depend on: versions, source and processor."""
    chosen = numba.config  # which has what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say
    processor = chosen.CPU_NAME or llvm.get_host_cpu_name()
    features = chosen.CPU_FEATURES
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    digest = hashlib.sha256()
    for part in (version("numba"), version("llvmlite"), sys.implementation.cache_tag, processor, features):
        digest.update(f"{part}\n".encode())
    for path in SOURCES:
        digest.update(path.read_bytes())
    return f"{processor}-{digest.hexdigest()[:16]}"


def _file_name(source: Source, options: dict[str, Any]) -> str:
    # the order of a set is another one in each process
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in options.items()}
    chosen = sorted((key, repr(value)) for key, value in values.items())
    return f"{source.name}_{hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]}"


def _files(source: Source, options: dict[str, Any], folder: Path | None) -> list[Path]:
    return [] if folder is None else list(folder.rglob(f"*.{_file_name(source, options)}-*"))


def _compiled(source: Source, options: dict[str, Any], folder: Path | None, files: list[Path]) -> Any:
    """The kernel, from its `files` if there are some. Damaged files are replaced."""
    source.function.__qualname__ = _file_name(source, options)
    while True:
        dispatcher = numba.njit(**options)(source.function)
        if folder is not None:
            _keep_in(dispatcher, folder)
        try:
            dispatcher.compile(source.signature)
            break
        except Exception as exc:  # from the kernel, from damaged files, or from writing
            error = f"{type(exc).__name__}: {exc}"
            if dispatcher.overloads:
                log.warning("event=kernel_not_kept kernel=%s error=%r", source.name, error)
                break
            if not files:
                raise
            log.warning("event=kernel_files_damaged kernel=%s error=%r", source.name, error)
            while files:
                files.pop().unlink(missing_ok=True)
    dispatcher.disable_compile()
    return dispatcher


def _keep_in(dispatcher: Any, folder: Path) -> None:
    with _telling:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            dispatcher.enable_caching()
        finally:
            numba.config.CACHE_DIR = before
