"""Who a leader is, how it meets its peers, and what its parts run on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from segue.kv.ids import ChecksumMode, LeaderId, Role, new_incarnation
from segue.kv.io import Io, IoThread
from segue.kv.layout.spec import PoolSpec
from segue.kv.limits import Limits
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import HandoffMessage, PathMessage
from segue.kv.protocol.room_ranks import DpRanks
from segue.kv.ranks.checksums import Digester
from segue.kv.session.node import SessionNode
from segue.kv.session.tls import Tls
from segue.kv.threads import ThreadPerCall
from segue.kv.transport.kinds import KINDS, TransportKinds
from segue.kv.transport.probe import HostSpeed, host_speed


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Who a leader is, and how it talks to others.

    `host:port` is where sessions listen (port 0: any), `advertise` and `advertise_port` what peers are told
    if it is something else: two leaders must not advertise the same. `secret` is mandatory beyond loopback.
    `messages` is the union of the structs that sessions carry: a caller with peers of other roles adds more.
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
    messages: Any = HandoffMessage | PathMessage


@dataclass(frozen=True, kw_only=True)
class KVConfig(SessionConfig):
    """And what it hands over.

    `model` is the fingerprint that both sides must share, `transports` the names to offer, in order of
    preference. Transports listen on `host` at `transport_port` (0: any), `advertise_transport_port` is what
    peers are told if it is another. `dp` are the DP ranks of our instance. `kv_checksum` is what the
    checksums of chunks that this side sends cover. `scratch_bytes` at the end of each rank's memory, behind
    its pool, are for the probe that chooses a pair's transport; 0: the preferred one is taken without it.
    """

    model: str
    spec: PoolSpec
    transports: Sequence[str] = field(default_factory=KINDS.automatic)
    transport_port: int = 0
    advertise_transport_port: int | None = None
    dp: DpRanks = field(default_factory=DpRanks)
    kv_checksum: ChecksumMode = ChecksumMode.FULL
    scratch_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LeaderRuntime:
    """What makes the parts that a leader runs on: threads, sockets, chance. Another one (the simulator's)
    runs the same leader in a world of its own."""

    io: Callable[[Callable[[dict[str, Any]], None]], Io] = IoThread
    node: Callable[..., SessionNode] = SessionNode
    transports: TransportKinds = KINDS
    digester: Callable[..., Digester] = Digester
    connecting: Callable[[str], Executor] = ThreadPerCall
    exchange: Callable[..., Exchange] = Exchange
    uniform: Callable[[float, float], float] = random.uniform
    host_speed: Callable[[], HostSpeed] = host_speed


#: The host's threads and sockets, and real chance.
HOST = LeaderRuntime()
