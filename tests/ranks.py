"""Ranks that tests speak of by a word, and transports of theirs."""

from __future__ import annotations

import dataclasses
from typing import Any

from segue.kv.ids import Incarnation, LeaderId, RankId
from segue.kv.limits import Limits
from segue.kv.transport.base import EventSink
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.shm.shm_transport import ShmTransport, ShmTuning
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_transport import TcpTransport


def rank(word: str, dp_rank: int = 0, number: int = 0) -> RankId:
    """The rank `number` of a leader whose incarnation spells `word` in hex digits."""
    return RankId(LeaderId(Incarnation(word.encode("ascii").hex().ljust(32, "0")), dp_rank), number)


def options(
    me: RankId, *, stall_s: float = 60.0, handshake_s: float = 60.0, **fields: Any
) -> TransportOptions:
    """The options of a transport of `me`: patient, so that a pause of the machine loses no peer."""
    limits = Limits(peer_silence_s=stall_s, handshake_s=handshake_s)
    return TransportOptions(me=me, limits=limits, **fields)


def _apart(fields: dict[str, Any], tuning: type) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {field.name for field in dataclasses.fields(tuning)}
    return {k: v for k, v in fields.items() if k in names}, {
        k: v for k, v in fields.items() if k not in names
    }


def make_tcp(sink: EventSink, me: RankId, **fields: Any) -> TcpTransport:
    """A `tcp` of `me`; `fields` are of its options and of its tuning."""
    tuned, rest = _apart(fields, TcpTuning)
    return TcpTransport(sink, options(me, **rest), TcpTuning(**tuned))


def make_shm(sink: EventSink, me: RankId, **fields: Any) -> ShmTransport:
    """A `shm` of `me`; `fields` are of its options and of its tuning."""
    tuned, rest = _apart(fields, ShmTuning)
    return ShmTransport(sink, options(me, **rest), ShmTuning(**tuned))
