"""`segue serve`: a whole deployment as one process tree, of which nothing outlives the supervisor.

The supervisor runs the registry itself and starts every leader of every instance and the frontend as a child
process. An instance or a frontend that fails is started again, in a new incarnation.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from urllib.parse import urlsplit

from segue.engine.pool_size import Host, ModelSize
from segue.kv import ConfigError, Role
from segue.server.settings.commands import FrontendConfig, InstanceConfig, ServeConfig
from segue.server.supervisor.children import ChildSpec
from segue.server.supervisor.console import Console
from segue.server.supervisor.dp_rank_processes import Command, leaders
from segue.server.supervisor.lifeline import encode_restarting
from segue.server.supervisor.process_tree import (
    STARTUP_S,
    ProcessTree,
    ServeResult,
    Unit,
    secret_fd,
)
from segue.server.supervisor.restarts import Restarts

#: Told that the deployment is ready: the frontend's URL, the registry's, and a file with the secret.
Announce = Callable[[str, str, str], None]
#: Runs a registry on loopback under the given secret while entered; gives its URL.
Registry = Callable[[bytes], AbstractAsyncContextManager[str]]


def check_port(host: str, port: int) -> None:
    """Raise a ConfigError if nobody can listen on `host:port` now; before anything is started."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(info[0], info[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --host or --port"
        ) from exc


class Supervisor(ProcessTree):
    """One run of `segue serve`. `config.model` is already a local path; `announce` gets the
    frontend's URL once a request can complete. `keys` are those that clients must show, if there are any: the
    frontend reads them from an anonymous file, never from its command line."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        host: Host,
        command: Command,
        registry: Registry,
        announce: Announce,
        size: ModelSize | None = None,
        console: Console | None = None,
        environ: Mapping[str, str] | None = None,
        startup_s: float = STARTUP_S,
        keys: Sequence[str] = (),
    ) -> None:
        super().__init__(
            config.limit.drain_s,
            console=console,
            environ=environ,
            startup_s=startup_s,
            delay_s=config.clients.shutdown_delay_s,
        )
        self.config = config
        self._host = host
        self._size = size
        self.command = command
        self._registry = registry
        self._announce = announce
        self._keys = "\n".join(keys).encode()
        self._reach = ("", "")

    async def run(self) -> ServeResult:
        """Start, serve until a signal or the end of what can serve, drain. Every child is reaped
        when it returns. Raises ConfigError before anything is started."""
        check_port(self.config.host, self.config.port)
        secret = self.config.secret or secrets.token_hex(32).encode()
        try:
            with self.signals(), secret_fd(secret) as the_secret, secret_fd(self._keys) as the_keys:
                async with self._registry(secret) as url:
                    self._reach = url, f"/proc/{os.getpid()}/fd/{the_secret}"
                    return await self.keep(self.planned(url, the_secret, the_keys))
        finally:
            self._console.close()

    def ready(self, urls: Sequence[tuple[Role, str]]) -> None:
        """See `ProcessTree.ready`; the frontend's address is ours."""
        self._announce(next(url for role, url in urls if role is Role.FRONTEND), *self._reach)

    def restarting(self) -> None:
        """Tell the frontend whom it should wait for."""
        message = encode_restarting([u.role for u in self.units if u.restarting])
        for child in self.children:
            if child.spec.told:
                child.tell(message)

    def planned(self, url: str, the_secret: int, the_keys: int) -> list[Unit]:
        """The instances and the frontend of this deployment, for a registry at `url`. The descriptors are
        those of the files with its secret and with the clients' keys."""
        config, host = self.config, self._host
        counts = (
            {Role.UNIFIED: 1}
            if config.unified
            else {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        )
        secret_file = f"/proc/self/fd/{the_secret}"
        units: list[Unit] = []
        taken = 0
        for role, count in counts.items():
            for index in range(count):
                instance = config.instance(role, f"{role}-{index}", host, url, self._size)
                events = config.events.after(taken)
                taken += instance.dp
                instance = dataclasses.replace(instance, secret_file=secret_file, events=events)
                make = partial(self._instance, instance, (the_secret,))
                units.append(self._unit(instance.label, role, make))
        keys_file = f"/proc/self/fd/{the_keys}" if self._keys else None
        access = dataclasses.replace(config.access, api_key=None, api_key_file=keys_file)
        frontend = dataclasses.replace(config.frontend(url), secret_file=secret_file, access=access)
        fds = (the_secret, the_keys)
        units.append(self._unit("frontend", Role.FRONTEND, partial(self._frontend, frontend, fds)))
        return units

    def _unit(self, name: str, role: Role, make: Callable[[Unit], list[ChildSpec]]) -> Unit:
        return Unit(name, role, make, Restarts() if self.config.restart == "on-failure" else None)

    def _instance(self, instance: InstanceConfig, fds: tuple[int, ...], unit: Unit) -> list[ChildSpec]:
        """The leaders of one instance in the role that it has now; in logs it keeps its first one."""
        now = dataclasses.replace(instance, role=unit.role)
        specs = leaders(self, now, self.command, fds)
        return [dataclasses.replace(spec, role=instance.role) for spec in specs]

    def _frontend(self, frontend: FrontendConfig, fds: tuple[int, ...], unit: Unit) -> list[ChildSpec]:
        """The frontend, at the port that the one before it had."""
        port = urlsplit(unit.url).port or frontend.port
        argv = self.command(Role.FRONTEND, dataclasses.replace(frontend, port=port))
        return [dataclasses.replace(self.spec("frontend", Role.FRONTEND, argv, 1, fds), told=True)]
