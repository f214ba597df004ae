"""Fields of foreign routers in hostile bodies: a typed 400 or their value, never a bug."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from segue.kv.errors import InvalidRequest
from segue.kv.ids import Incarnation, LeaderId
from segue.server.frontend.legs import TICKET, Bootstrap, RetainedTicket, legs_of, pack_ticket, unpack_ticket
from segue.server.frontend.native import read_native

SECRET = b"a secret of the tests"
GIVEN = RetainedTicket(room=7, issuer=LeaderId(Incarnation("a" * 32), 1), dp_rank=1, seed=2**62)
BODY: dict[str, Any] = {
    "text": "hi",
    "bootstrap_host": ["h", "h"],
    "bootstrap_port": [None, None],
    "bootstrap_room": [5, 6],
    "kv_transfer_params": {TICKET: "x"},
    "sampling_params": {"max_new_tokens": 3, "stop": ["a"]},
}


def test_the_legs_of_a_body_are_those_of_its_first_sample_and_the_port_has_a_default() -> None:
    assert legs_of(json.dumps(BODY).encode()).bootstrap == Bootstrap("h", 8998, 5)


def test_a_ticket_comes_back_as_it_was_given_and_only_under_the_same_secret() -> None:
    packed = pack_ticket(GIVEN, SECRET)
    found = unpack_ticket({TICKET: packed}, SECRET)
    assert (found.room, found.issuer, found.dp_rank, found.seed) == (7, GIVEN.issuer, 1, 2**62)
    for other in (b"another secret!!", b""):
        with pytest.raises(InvalidRequest):
            unpack_ticket({TICKET: packed}, other)
    with pytest.raises(InvalidRequest):
        unpack_ticket({TICKET: pack_ticket(GIVEN, b"")}, SECRET)


@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_bytes_is_a_bug_and_none_forges_a_ticket(seed: int) -> None:
    draw = random.Random(seed)
    whole, ticket = json.dumps(BODY).encode(), pack_ticket(GIVEN, SECRET).encode()
    for _ in range(1500):
        for raw, read in ((whole, legs_of), (whole, read_native)):
            with contextlib.suppress(InvalidRequest):
                read(_changed(raw, draw))
        broken = _changed(ticket, draw)
        if broken.rstrip(b"=") != ticket.rstrip(b"="):
            try:
                found = unpack_ticket({TICKET: broken.decode("latin-1")}, SECRET)
            except InvalidRequest:
                continue
            # Other spare bits of the last letter: the same bytes.
            assert (found.room, found.seed) == (GIVEN.room, GIVEN.seed)


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
