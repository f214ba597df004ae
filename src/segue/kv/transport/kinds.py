"""The transports: which exist, which work here, and which one two sides should use.

A transport is one file and one line of `KINDS`: its class describes itself (see `base.Transport`), and
nobody else asks for a transport by its name. The module is imported when its transport is made or asked
about, so that a laptop never loads an RDMA library.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from segue.kv.errors import ConfigError
from segue.kv.transport.base import Endpoint, EventSink, Transport
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions

#: In a command's `--transport`: all transports of `TransportKinds.automatic` that work here.
AUTO_TRANSPORT = "auto"
#: The value of `TransportKinds.available` for a transport that works here.
USABLE = "ok"
#: Before the name of a transport: the same through staging slots.
STAGED = "staged_"

Known = Mapping[str, str | type[Transport]]


class TransportKinds:
    """Transports by name. `known` maps each to its class, or to where that is ("module:Class")."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def kind(self, name: str) -> type[Transport]:
        """The class of a transport. Raises ConfigError for one that is unknown or cannot be imported."""
        where = self.known.get(name)
        if where is None:
            raise ConfigError(
                f"unknown transport {name!r}; known are {', '.join(self.known)} (or {AUTO_TRANSPORT})"
            )
        if not isinstance(where, str):
            return where
        module, _, attribute = where.partition(":")
        try:
            found: type[Transport] = getattr(importlib.import_module(module), attribute)
        except ImportError as exc:
            raise ConfigError(f"cannot be imported: {exc}") from exc
        return found

    def available(self) -> dict[str, str]:
        """Each transport with `OK`, or with the reason why it cannot be used here."""
        return {name: self._reason(name) for name in self.known}

    def automatic(self) -> tuple[str, ...]:
        """The transports of `auto`, best first, whether they work here or not."""
        found = [kind for kind in map(self.kind, self.known) if kind.automatic]
        return tuple(kind.name for kind in sorted(found, key=lambda kind: kind.preference))

    def offered(self, setting: str, memory: Memory) -> dict[str, str]:
        """The transports to offer for `memory` and a setting (see `names`): each name with `OK`, and unusable
        ones of several with the reason."""
        names = self.names(setting)
        if len(names) == 1 and setting != AUTO_TRANSPORT:
            return {setting: USABLE}
        kinds = frozenset(region.kind for region in memory.regions)
        return {name: self._reason(name, kinds) for name in names}

    def names(self, setting: str) -> tuple[str, ...]:
        """The transports that a setting means: names with commas between them, of which `auto` stands for
        several."""
        found = [self.automatic() if name == AUTO_TRANSPORT else (name,) for name in setting.split(",")]
        return tuple(dict.fromkeys(name for names in found for name in names))

    def for_memory(self, names: Sequence[str], memory: Memory) -> list[str]:
        """The forms of `names` for `memory`: if none of them takes a device's memory, their staged forms."""
        kinds = frozenset(region.kind for region in memory.regions)
        if MemoryKind.DEVICE not in kinds or any(
            name in self.known and kinds <= self.kind(name).memory_kinds for name in names
        ):
            return list(names)
        return [STAGED + name if STAGED + name in self.known else name for name in names]

    def create(self, name: str, on_event: EventSink, options: TransportOptions) -> Transport:
        """Make a transport. Raises ConfigError for one that is unknown or cannot be used here, and for a port
        in use."""
        if name in self.known and (reason := self._reason(name)) != USABLE:
            raise ConfigError(f"transport {name!r} cannot be used here: {reason}")
        return self.kind(name)(on_event, options)

    def common(
        self, prefill: Mapping[str, Sequence[Endpoint]], decode: Mapping[str, Sequence[Endpoint]]
    ) -> list[str]:
        """The transports that a pair of sides could use, in prefill's order, by the endpoints of the ranks
        that both offer: each rank must reach each. Pure, so both sides come to the same answer."""
        both = [self.kind(name) for name in prefill if name in decode and name in self.known]
        return [kind.name for kind in both if self._all_reach(kind, prefill[kind.name], decode[kind.name])]

    def _all_reach(self, kind: type[Transport], ours: Sequence[Endpoint], theirs: Sequence[Endpoint]) -> bool:
        ends = [(a, b) for a in ours for b in theirs]
        return bool(ends) and all(kind.reaches(a, b) for a, b in ends)

    def _reason(self, name: str, memory: frozenset[MemoryKind] = frozenset()) -> str:
        try:
            kind = self.kind(name)
        except ConfigError as exc:
            return exc.info.text
        if missing := memory - kind.memory_kinds:
            return f"it registers no {' or '.join(sorted(missing))} memory"
        return kind.unusable() or USABLE


#: All transports of this version. `KINDS.available()` says of each whether it works on this host.
KINDS = TransportKinds(
    {
        "fake": "segue.kv.transport.fake:FakeTransport",
        "shm": "segue.kv.transport.shm.shm_transport:ShmTransport",
        "tcp": "segue.kv.transport.tcp.tcp_transport:TcpTransport",
        "nixl": "segue.kv.transport.nixl:NixlTransport",
        "mooncake": "segue.kv.transport.mooncake:MooncakeTransport",
        "mori": "segue.kv.transport.mori:MoriTransport",
        "ascend": "segue.kv.transport.ascend:AscendTransport",
        "staged_shm": "segue.kv.transport.staged.staged_transport:StagedShmTransport",
        "staged_tcp": "segue.kv.transport.staged.staged_transport:StagedTcpTransport",
    }
)
