"""The options that a leader gives each of its transports."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.kv.ids import RankId
from segue.kv.limits import Limits
from segue.kv.session.tls import Tls
from segue.kv.transport.net.key_handshake import pack_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """How the transports of one rank meet those of its peers. Each takes of it what it needs.

    me: the rank that bytes are moved for; peers grant and fence writes of exactly this one.
    host, port: where a transport with a network listens (port 0: any free one).
    advertise, advertise_port: what peers are told instead of that, if it is something else.
    limits: `handshake_s` is what a connection has to prove itself; one that owes something and is silent for
        `peer_silence_s` is given up.
    tls: encrypts what crosses a network.
    staging_bytes: host memory for the slots of a transport that stages.

    Raises ConfigError for a rank that cannot be told to peers.
    """

    me: RankId
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    advertise_port: int | None = None
    limits: Limits = field(default_factory=Limits)
    tls: Tls | None = None
    staging_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        pack_rank(self.me)
