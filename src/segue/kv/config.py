"""The configuration of a leader: its identity, its peers, and the resources of its parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from segue.kv.errors import ConfigError
from segue.kv.ids import ChecksumMode, LeaderId, Role, new_incarnation
from segue.kv.io import Io, IoThread
from segue.kv.layout.spec import PoolSpec
from segue.kv.limits import Limits
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import HandoffMessage, PathChosen
from segue.kv.protocol.room_ranks import DpRanks
from segue.kv.ranks.checksums import Digester
from segue.kv.session.node import SessionNode
from segue.kv.session.tls import Tls
from segue.kv.threads import ThreadPerCall
from segue.kv.transport.kinds import KINDS, TransportKinds

#: The role at the other end of a hand-off.
COUNTERPART = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """The identity of a leader and its sessions.

    `role` is what the leader does, `me` its identity: a new one for each process. Sessions listen at
    `host`:`port` (`port` 0: any). `advertise` and `advertise_port` are what peers are told if they reach the
    listener elsewhere; two leaders must not advertise the same address. `secret` (at least 16 bytes, equal on
    all hosts) is mandatory beyond loopback; `tls` adds mutual TLS (`load_tls`). `limits` bounds times, queues
    and buffers. `messages` is the union of the structs that sessions carry; only callers with peers of other
    roles extend it.
    """

    role: Role
    me: LeaderId = field(default_factory=lambda: LeaderId(new_incarnation()))
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    advertise_port: int | None = None
    secret: bytes | None = None
    limits: Limits = field(default_factory=Limits)
    tls: Tls | None = None
    messages: Any = HandoffMessage | PathChosen


@dataclass(frozen=True, kw_only=True)
class KVConfig(SessionConfig):
    """The configuration of a `KVManager`: `SessionConfig`, and the KV that is handed over.

    `role` is PREFILL or DECODE. `model` is a fingerprint of configuration and weights; a peer with another
    one is refused. `spec` says how the pool lies in memory. `transports` are the names to offer, of those
    that `KINDS.available()` lists; a pair uses the first one of prefill's list that decode offers and that
    works. They listen on `host` at `transport_port` (0: any); `advertise_transport_port` is what peers are
    told if it is another. `dp` are the DP ranks of our instance. `kv_checksum` is how much of each chunk that
    this side sends is covered by its checksum. `staging_bytes` of host memory are the slots of each rank's
    transport that stages (`staged_tcp`, `staged_shm`; for a device's memory they stand for `tcp` and `shm`
    where no transport takes it).

    Raises ConfigError for another role and for `transports` that are no list of names.
    """

    model: str
    spec: PoolSpec
    transports: Sequence[str] = field(default_factory=KINDS.automatic)
    transport_port: int = 0
    advertise_transport_port: int | None = None
    dp: DpRanks = field(default_factory=DpRanks)
    kv_checksum: ChecksumMode = ChecksumMode.FULL
    staging_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not isinstance(self.role, Role) or self.role not in COUNTERPART:
            raise ConfigError(f"role: a KVManager is Role.PREFILL or Role.DECODE, not {self.role!r}")
        if isinstance(self.transports, str) or not self.transports:
            raise ConfigError(f"transports: a list of names is needed, not {self.transports!r}")


@dataclass(frozen=True, kw_only=True)
class LeaderRuntime:
    """Factories of the parts that a leader runs on: the I/O thread `io`, the session `node`, `transports`,
    the hash threads `digester`, the threads `connecting` that open paths, the protocol `exchange`, and the
    random source `uniform`. An engine uses `HOST`; the simulator has its own."""

    io: Callable[[Callable[[dict[str, Any]], None]], Io] = IoThread
    node: Callable[..., SessionNode] = SessionNode
    transports: TransportKinds = KINDS
    digester: Callable[..., Digester] = Digester
    connecting: Callable[[str], Executor] = ThreadPerCall
    exchange: Callable[..., Exchange] = Exchange
    uniform: Callable[[float, float], float] = random.uniform


#: The host's threads and sockets, and real chance.
HOST = LeaderRuntime()
