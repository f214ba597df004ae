"""Runs a supervisor over fake children, for the tests beside it and as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from segue.engine.pool_size import Host
from segue.kv.ids import Role
from segue.server.settings.commands import FrontendConfig, InstanceConfig, ServeConfig
from segue.server.supervisor.children import ChildSpec
from segue.server.supervisor.console import Console
from segue.server.supervisor.process_tree import ServeResult
from segue.server.supervisor.supervisor import Supervisor

FAKE = Path(__file__).with_name("fake_child.py")


@contextlib.asynccontextmanager
async def no_registry(secret: bytes) -> AsyncIterator[str]:
    assert len(secret) == 64
    yield "http://127.0.0.1:9"


def make(
    journal: Path,
    announce: Callable[[Supervisor, str], None],
    *,
    behaviours: Mapping[str, str] | None = None,
    console: io.StringIO | None = None,
    startup_s: float = 60.0,
    keys: Sequence[str] = (),
    **settings: object,
) -> Supervisor:
    def command(role: Role, config: InstanceConfig | FrontendConfig) -> list[str]:
        name = config.label
        return [sys.executable, str(FAKE), str(journal), name, (behaviours or {}).get(name, "ok")]

    supervisor = Supervisor(
        ServeConfig(port=0, **settings),  # type: ignore[arg-type]
        host=Host(cores=4, free_bytes=2**34),
        command=command,
        registry=no_registry,
        announce=lambda url, _registry, _secret_file: announce(supervisor, url),
        console=Console(io.StringIO() if console is None else console),
        startup_s=startup_s,
        keys=keys,
    )
    return supervisor


def specs(supervisor: Supervisor) -> list[ChildSpec]:
    """The children that it would start, for descriptors 77 and 78."""
    units = supervisor.planned("http://127.0.0.1:9", 77, 78)
    return [spec for unit in units for spec in unit.make(unit)]


class Ahead(asyncio.SelectorEventLoop):
    """A loop whose time a test moves on: a child is late when the test says so."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def move_on(seconds: float = 1000.0) -> None:
    """All that is due within these `seconds` is due now, on the running `Ahead`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Ahead)
    loop.ahead_s += seconds


async def run(supervisor_of: Callable[[], Supervisor]) -> ServeResult:
    return await supervisor_of().run()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    outcome = asyncio.run(run(lambda: make(Path(sys.argv[1]), lambda _, url: say(f"ready {url}"))))
    sys.exit(outcome.status)
