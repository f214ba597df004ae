"""The deployments and the instances of this user on this host: a folder with a file for each process, which
says how to reach it.

A file's name begins with the process-number namespace of its process. A container may share the folder and
not the process numbers: files of other namespaces are neither read nor taken away.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from segue.kv import DECODE_ERRORS, ConfigError
from segue.server.settings.shared_config import TlsConfig

#: Limits of the folder: files that are read, and bytes of one.
MAX_FILES = 256
MAX_BYTES = 64 << 10


class LocalProcess(msgspec.Struct, frozen=True, kw_only=True):
    """How an operator reaches a process that runs here: `registry` is an address for `--registry`, the files
    are those that a part of the deployment needs; the secret is in no file of the folder. `pid` and `started`
    are those of the announcing process; `started` counts ticks since the boot, so that no setting of a clock
    changes it."""

    registry: str
    secret_file: str | None = None
    tls: TlsConfig
    pid: int
    started: int

    def lives(self) -> bool:
        """The process that announced it still runs; another one with the same number does not count."""
        return started_at(self.pid) == self.started


class LocalInstance(LocalProcess, frozen=True, kw_only=True):
    """An instance that was started by hand, with all of its DP ranks. `registry` is `static://…` with their
    control ports."""


class LocalDeployment(LocalProcess, frozen=True, kw_only=True):
    """A frontend that runs here: its URL for clients, the name of its model, the files with its API keys and
    its certificate; `registry` is its own."""

    url: str
    model: str
    api_key_file: str | None = None
    https_cert: str | None = None


#: The ending of the files of each kind.
_ENDINGS: dict[type[LocalProcess], str] = {LocalDeployment: "json", LocalInstance: "instance"}
Local = TypeVar("Local", bound=LocalProcess)


def started_at(pid: int) -> int | None:
    """When the process `pid` started, in clock ticks since the boot; None without one."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(line.rpartition(")")[2].split()[19])  # its name, in parentheses, may hold anything


def _namespace() -> int:
    """In which process numbers mean what they mean here; 0 where the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def runtime_folder() -> Path:
    """`segue` in `$XDG_RUNTIME_DIR`; without that variable `segue-UID` in the folder for temporary files."""
    parent = os.environ.get("XDG_RUNTIME_DIR")
    return Path(parent) / "segue" if parent else Path(tempfile.gettempdir()) / f"segue-{os.getuid()}"


def announced(
    url: str,
    model: str,
    registry: str,
    secret_file: str | None,
    tls: TlsConfig,
    folder: Path | None = None,
    *,
    api_key_file: str | None = None,
    https_cert: str | None = None,
) -> AbstractContextManager[None]:
    """List a deployment of this process while this is open. Paths may be relative. Raises OSError where the
    folder cannot be written, ConfigError where others can."""
    make = partial(
        LocalDeployment,
        url=url,
        model=model,
        api_key_file=_absolute(api_key_file),
        https_cert=_absolute(https_cert),
    )
    return _listed(make, registry, secret_file, tls, folder)


def announced_instance(
    addresses: Sequence[str], secret_file: str | None, tls: TlsConfig, folder: Path | None = None
) -> AbstractContextManager[None]:
    """List an instance of this process, whose leaders are at `addresses`, as `announced` does; it replaces
    one that was listed before."""
    return _listed(LocalInstance, f"static://{','.join(addresses)}", secret_file, tls, folder)


@contextlib.contextmanager
def _listed(
    make: Callable[..., LocalProcess],
    registry: str,
    secret_file: str | None,
    tls: TlsConfig,
    folder: Path | None,
) -> Iterator[None]:
    place = folder or runtime_folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(place, "XDG_RUNTIME_DIR")
    me = os.getpid()
    local = make(
        registry=registry,
        secret_file=_absolute(secret_file),
        tls=TlsConfig(
            tls_cert=_absolute(tls.tls_cert), tls_key=_absolute(tls.tls_key), tls_ca=_absolute(tls.tls_ca)
        ),
        pid=me,
        started=started_at(me) or 0,
    )
    stem = f"{_namespace()}-{me}"
    file, part = place / f"{stem}.{_ENDINGS[type(local)]}", place / f"{stem}.part"
    part.write_bytes(msgspec.json.encode(local))
    part.replace(file)  # a reader sees all of it or nothing
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def local_deployments(folder: Path | None = None) -> list[LocalDeployment]:
    """The deployments that run, the latest first. Files of processes that have ended are taken away. Raises
    ConfigError for a folder that another user owns or can write."""
    return _found(LocalDeployment, folder)


def local_instances(folder: Path | None = None) -> list[LocalInstance]:
    """The instances that run; else as `local_deployments`."""
    return _found(LocalInstance, folder)


def _found(kind: type[Local], folder: Path | None) -> list[Local]:
    place = folder or runtime_folder()
    if not place.exists():
        return []
    check_private(place, "XDG_RUNTIME_DIR")
    found = []
    for file in sorted(place.glob(f"{_namespace()}-*.{_ENDINGS[kind]}"))[:MAX_FILES]:
        local = _read(file, kind)
        if local is not None and local.lives():
            found.append(local)
        else:
            file.unlink(missing_ok=True)
    return sorted(found, key=lambda local: -local.started)


def _read(file: Path, kind: type[Local]) -> Local | None:
    try:
        with file.open("rb") as content:
            return msgspec.json.decode(content.read(MAX_BYTES), type=kind)
    except (OSError, ConfigError, *DECODE_ERRORS):
        return None


def check_private(place: Path, variable: str) -> None:
    """Another user who can write there could name a registry of theirs for our next command. Raises
    ConfigError, which names the `variable` that says another folder."""
    seen = place.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o022:
        raise ConfigError(
            f"{place} must be a folder that this user owns and nobody else can write: correct it, or set "
            f"{variable}"
        )


def _absolute(file: str | None) -> str | None:
    return None if file is None else str(Path(file).absolute())
