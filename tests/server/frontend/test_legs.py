"""Fields of foreign routers in hostile bodies: a typed 400 or their value, never a bug."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from segue.kv.errors import InvalidRequest
from segue.kv.ids import Incarnation, LeaderId
from segue.server.frontend.legs import ROOM, Bootstrap, ComputedRoom, computed_room, legs_of, transfer_params
from segue.server.frontend.native import read_native

GIVEN = ComputedRoom(2**64 - 1, LeaderId(Incarnation("a" * 32), 65535))
BODY: dict[str, Any] = {
    "text": "hi",
    "bootstrap_host": ["h", "h"],
    "bootstrap_port": [None, None],
    "bootstrap_room": [5, 6],
    "kv_transfer_params": {ROOM: "x"},
    "sampling_params": {"max_new_tokens": 3, "stop": ["a"]},
}


def test_the_legs_of_a_body_are_those_of_its_first_sample_and_the_port_has_a_default() -> None:
    assert legs_of(json.dumps(BODY).encode()).bootstrap == Bootstrap("h", 8998, 5)


def test_a_computed_room_comes_back_as_it_was_named() -> None:
    for room in (GIVEN, ComputedRoom(1, LeaderId(Incarnation("0" * 32)))):
        assert computed_room(json.loads(json.dumps(transfer_params(room)))) == room


@pytest.mark.parametrize("text", ["", "0.0.%s", "1.0.A%s", "1.%s", "1.-1.%s", 7, None])
def test_what_names_no_room_is_refused(text: object) -> None:
    with pytest.raises(InvalidRequest, match=ROOM):
        computed_room({ROOM: text.replace("%s", "a" * 32) if isinstance(text, str) else text})


@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_bytes_is_a_bug(seed: int) -> None:
    draw = random.Random(seed)
    whole, name = json.dumps(BODY).encode(), transfer_params(GIVEN)[ROOM].encode()
    for _ in range(1500):
        for raw, read in ((whole, legs_of), (whole, read_native)):
            with contextlib.suppress(InvalidRequest):
                read(_changed(raw, draw))
        with contextlib.suppress(InvalidRequest):
            computed_room({ROOM: _changed(name, draw).decode("latin-1")})


def _changed(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw))
    kind = draw.randrange(4)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
    if kind == 2:
        return raw[:at] + draw.choice([b"null", b"-1", b"1e999", b'"', b"[[[", b"\xff", b"9" * 30]) + raw[at:]
    return raw[:at] + raw[at:][: draw.randrange(9)] + raw[at:]
