"""The fields that foreign routers add to a body to pair a prefill and a decode instance.

Read beside the body itself, whose types have no room for an address. None of it is ever contacted: a
bootstrap address is looked up in the registry's list, and what another server would take an address from
(`remote_host`, …) is not read at all.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from segue.kv import DECODE_ERRORS, InvalidRequest, LeaderId
from segue.server.frontend.openai_types import read_float
from segue.server.frontend.problems import BadParam, unparsable

#: Where prefill's registry is if a router names no port.
DEFAULT_BOOTSTRAP_PORT: Final = 8998
#: The range of rooms that routers draw from; 0 is none.
MAX_BOOTSTRAP_ROOM: Final = 2**63 - 1
#: The key in `kv_transfer_params` that carries a ticket.
TICKET: Final = "segue_ticket"
_MAX_TICKET_CHARS: Final = 1024
_DOMAIN: Final = b"segue retained prompt 1\0"
BAD_TICKET: Final = (
    "kv_transfer_params: no prefill instance of this fleet gave this ticket out, or it was used already, or "
    "it has expired; send the request to prefill again"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """SGLang's style: both legs are posted at once, and name the registry of the prefill instance and a room
    that nobody else has."""

    host: str
    port: int
    room: int


class RetainedTicket(msgspec.Struct, frozen=True, array_like=True):
    """vLLM's style: prefill has computed the prompt, and this says where it lies. Its number `room` is good
    once, at the server of `issuer`; the KV is on DP rank `dp_rank` there. `seed` is what the first token was
    drawn with."""

    room: int
    issuer: LeaderId
    dp_rank: int
    seed: int
    signature: bytes = b""


class _Fields(msgspec.Struct, frozen=True):
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Legs:
    """The references of a body to its other leg: at most one, of either style."""

    bootstrap: Bootstrap | None = None
    transfer: dict[str, Any] | None = None


_decoder: Final = msgspec.json.Decoder(_Fields, float_hook=read_float)


def legs_of(raw: bytes) -> Legs:
    """The references in the body `raw`. Raises BadParam."""
    try:
        fields = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unparsable(error) from None
    if fields.bootstrap_room is None:
        return Legs(transfer=fields.kv_transfer_params)
    host = _one("bootstrap_host", fields.bootstrap_host)
    if not host:
        raise BadParam("bootstrap_host: the host of the prefill instance is needed", "bootstrap_host")
    port = _one("bootstrap_port", fields.bootstrap_port)
    rooms = fields.bootstrap_room if isinstance(fields.bootstrap_room, list) else [fields.bootstrap_room]
    for room in rooms or [None]:
        if room is None or not 1 <= room <= MAX_BOOTSTRAP_ROOM:
            raise BadParam(f"bootstrap_room: from 1 to 2**63 - 1, not {room}", "bootstrap_room")
    # The samples of one body stay together, so one of their rooms is enough to know the other leg by.
    return Legs(Bootstrap(host, DEFAULT_BOOTSTRAP_PORT if port is None else port, rooms[0] or 0))


def _one(name: str, value: T | list[T | None] | None) -> T | None:
    """The value that all entries of a list have, or the only one."""
    if not isinstance(value, list):
        return value
    if any(entry != value[0] for entry in value):
        raise BadParam(f"{name}: all samples of one request are computed by one prefill instance", name)
    return value[0] if value else None


def pack_ticket(ticket: RetainedTicket, secret: bytes) -> str:
    """`ticket` signed, as a text that a router passes on."""
    signed = msgspec.structs.replace(ticket, signature=_signature(ticket, secret))
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(signed)).decode()


def unpack_ticket(transfer: dict[str, Any], secret: bytes) -> RetainedTicket:
    """The ticket in `kv_transfer_params`. Raises BadParam if there is none, InvalidRequest for one that this
    fleet has not signed."""
    text = transfer.get(TICKET)
    if not isinstance(text, str):
        raise BadParam(
            f"kv_transfer_params.{TICKET}: a decode instance needs the object that prefill has answered with",
            "kv_transfer_params",
        )
    try:
        if len(text) > _MAX_TICKET_CHARS:
            raise ValueError("too long")
        packed = base64.b64decode(text, altchars=b"-_", validate=True)
        ticket = msgspec.msgpack.decode(packed, type=RetainedTicket)
        fine = hmac.compare_digest(ticket.signature, _signature(ticket, secret))
    except (*DECODE_ERRORS, binascii.Error, OverflowError):
        fine = False
    if not fine or not 1 <= ticket.room <= MAX_BOOTSTRAP_ROOM:
        raise InvalidRequest(BAD_TICKET)
    return ticket


def _signature(ticket: RetainedTicket, secret: bytes) -> bytes:
    """Empty without a secret, as of all tickets: its number alone is what nobody can guess then."""
    if not secret:
        return b""
    fields = (ticket.room, ticket.issuer.incarnation, ticket.issuer.dp_rank, ticket.dp_rank, ticket.seed)
    return hmac.new(secret, _DOMAIN + msgspec.msgpack.encode(fields), hashlib.sha256).digest()
