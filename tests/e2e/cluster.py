"""A deployment whose parts are started by hand, as an orchestrator would: each at ports of its own, so
that a part that was killed can be started again at the same place."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from served import Served, State, rest

from ports import HeldPort
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.kv.io import IoThread
from segue.kv.limits import Limits
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.registry.registry_server import RegistryServer
from segue.server.registry.registry_server import serve as serve_registry

MODEL = "tiny"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, and that the system hands to nobody who takes any. For who listens at
    those that follow them, too; a `HeldPort` is one that no other test can draw."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [*range(10_000, low), *range(high + 1, 65_536)] or range(10_000, 65_536)
    found: list[int] = []
    for port in random.sample(outside, len(outside)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} ports are free")


class Registry:
    """A registry in this process, which can end and come back at the same port."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._io = IoThread()
        self._io.start()
        self._held = HeldPort()
        self.port = self._held.port
        self._server: RegistryServer | None = None
        self.open()

    def open(self) -> None:
        serve = serve_registry("127.0.0.1", self.port, secret=None, limits=self._limits)
        self._server = self._io.call(serve, 60)

    def shut(self) -> None:
        if self._server is not None:
            self._io.call(self._server.close(), 60)
            self._server = None

    def stir(self) -> None:
        """Let everybody who watches hear something: a stranger comes and goes."""
        assert self._server is not None
        me = new_incarnation()
        record = InstanceRecord(
            incarnation=me,
            role=Role.UNIFIED,
            model="of nobody",
            served_model="of nobody",
            context_tokens=1,
            replicas=[ReplicaRecord(dp_rank=0, host="127.0.0.1", port=1)],
        )
        self._io.call(self._come_and_go(record), 60)

    async def _come_and_go(self, record: InstanceRecord) -> None:
        assert self._server is not None
        self._server.store.register(record, 0)
        self._server.store.leave(LeaderId(record.incarnation))

    def close(self) -> None:
        self.shut()
        self._io.stop()


class Cluster:
    """`names` like `prefill-0`; each instance keeps its ports for as long as the cluster lives.

    `flags` go to every instance, `more` by name to one part (a frontend too); `doors` are HTTP ports
    of instances whose log cannot be read. There are as many `frontends`, of which the first one is `url`.
    `environ` are variables of one part, by name.
    """

    def __init__(
        self,
        model: Path,
        names: Sequence[str] = ("prefill-0", "decode-0"),
        *,
        flags: Sequence[str] = (),
        more: Mapping[str, Sequence[str]] | None = None,
        registry_url: Mapping[str, str] | None = None,
        registry: Registry | None = None,
        limits: Sequence[str] = (),
        stderr: Mapping[str, Path] | None = None,
        doors: Mapping[str, int] | None = None,
        kv_gib: float = 0.05,
        frontends: Sequence[str] = ("frontend",),
        environ: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.model = model
        self.names = list(names)
        self.registry = registry or Registry()
        self._flags = ["--dtype", "float32", "--kv-gib", str(kv_gib), "--threads-per-worker", "1", *flags]
        self._limits = list(limits)
        self._more = dict(more or {})
        self._registry_url = dict(registry_url or {})
        self._stderr = dict(stderr or {})
        self._doors = dict(doors or {})
        self.environ = dict(environ or {})
        self._logs = Path(tempfile.mkdtemp(prefix="segue-test-"))
        self._held = {name: (HeldPort(), HeldPort()) for name in self.names}
        self.parts: dict[str, Served] = {}
        try:
            for name in [*self.names, *frontends]:
                self.launch(name)
            for part in self.parts.values():
                part.ready()
            # What each holds before the first request is what it may hold after the last one.
            self.rest()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    @property
    def url(self) -> str:
        return self.parts["frontend"].url

    def ports(self, name: str) -> tuple[int, int]:
        """Control and data port of an instance."""
        port, data_port = self._held[name]
        return port.port, data_port.port

    def launch(self, name: str) -> Served:
        """Start a part that does not run; `ready` is the caller's."""
        role = name.split("-")[0]
        url = self._registry_url.get(name, f"http://127.0.0.1:{self.registry.port}")
        words = ["--registry", url, "--name", name, *self._limits]
        if role == "frontend":
            words += ["--model", str(self.model), "--served-model-name", MODEL, "--port", "0"]
        else:
            port, data_port = self.ports(name)
            words += ["--model", str(self.model), "--served-model-name", MODEL]
            words += ["--port", str(port), "--data-port", str(data_port), *self._flags]
        words += self._more.get(name, ())  # the last word on a setting counts
        log = self._stderr.get(name, self._logs / f"{name}.log")
        part = self.parts[name] = Served(
            *words,
            command=role,
            wait=False,
            start_s=180,
            stderr=log,
            door_port=self._doors.get(name),
            environ=self.environ.get(name),
        )
        return part

    def kill(self, name: str) -> None:
        """kill -9 a part."""
        self.parts[name].kill()

    def start(self, name: str) -> None:
        """Start a part that was killed, at its old ports; returns when it serves."""
        self.launch(name).ready()

    def rest(self, within_s: float = 60) -> dict[str, State]:
        """See `served.rest`; every part must be alive."""
        return rest(list(self.parts.values()), within_s)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.rest()
            # The door first, then who computes: nobody is drained while it still gets requests.
            for name in [*(n for n in self.parts if n not in self.names), *self.names]:
                part = self.parts.get(name)
                if part is None:
                    continue
                if kind is not None and part.process.poll() is None:
                    part.process.kill()
                    part.process.wait(60)
                part.line = ""
                part.__exit__(kind, error, trace)
        finally:
            self.registry.close()
