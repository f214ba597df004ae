"""The fields that foreign routers add to a body to pair a prefill and a decode instance.

Read beside the body itself, whose types have no room for an address. None of it is ever contacted: a
bootstrap address is looked up in the registry's list, and what another server would take an address from
(`remote_host`, …) is not read at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from segue.kv import MAX_ROOM, Incarnation, LeaderId
from segue.server.frontend.body_reader import read_float
from segue.server.frontend.problems import BadParam, unparsable

#: Where prefill's registry is if a router names no port.
DEFAULT_BOOTSTRAP_PORT: Final = 8998
#: The range of rooms that routers draw from; 0 is none.
MAX_BOOTSTRAP_ROOM: Final = 2**63 - 1
#: The key in `kv_transfer_params` that names a computed prompt.
ROOM: Final = "segue_room"
_ROOM: Final = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,5})\.([0-9a-f]{32})", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """SGLang's style: both legs are posted at once, and name the registry of the prefill instance and a room
    that nobody else has."""

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class ComputedRoom:
    """vLLM's style: prefill has computed the prompt; decode gets its KV in `room` of the leader `prefill`."""

    room: int
    prefill: LeaderId


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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


def transfer_params(room: ComputedRoom) -> dict[str, Any]:
    """The `kv_transfer_params` that prefill answers with, and that a router passes on to decode."""
    prefill = room.prefill
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        ROOM: f"{room.room:x}.{prefill.dp_rank}.{prefill.incarnation}",
    }


def computed_room(transfer: dict[str, Any]) -> ComputedRoom:
    """The reverse of `transfer_params`. Raises BadParam."""
    text = transfer.get(ROOM)
    found = _ROOM.fullmatch(text) if isinstance(text, str) else None
    if found is None or not 1 <= (room := int(found[1], 16)) <= MAX_ROOM:
        raise BadParam(
            f"kv_transfer_params.{ROOM}: a decode instance needs the object that prefill has answered with",
            "kv_transfer_params",
        )
    return ComputedRoom(room, LeaderId(Incarnation(found[3]), int(found[2])))
