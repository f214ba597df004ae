"""`segue top`'s screen of one look."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from segue.cli.commands.top_command import shown
from segue.cli.terminal import live, print_json, terminal
from segue.kv.ids import Role
from segue.server.fleet.fleet_view import (
    ErrorView,
    FleetView,
    LinkView,
    Percentiles,
    ReplicaView,
    RequestView,
)

VIEW = FleetView(
    model="tiny",
    frontend="frontend 0123abcd",
    frontends=[],
    version="1.2.3",
    uptime_s=3720,
    ready=True,
    reason="",
    answering=3,
    window_s=29.9,
    requests_per_s=2.5,
    tokens_per_s=100,
    ttft_ms=Percentiles(10, 20, 30.25, 5),
    itl_ms=None,
    ttft_parts_ms={"queue": 1.04, "prefill": 9},
    replicas=[
        ReplicaView(name="dddd0123 dp0", role=Role.DECODE, address="h:1", state="no session"),
        ReplicaView(
            name="pppp0123 dp0",
            role=Role.PREFILL,
            address="h:2",
            state="serving",
            running=1,
            waiting=2,
            pages={"free": 8, "used": 12, "quarantined": 4},
        ),
    ],
    links=[
        LinkView(
            prefill="pppp0123 dp0",
            decode="dddd0123 dp0",
            transport="shm",
            bytes_per_s=1.5e9,
            nbytes=20_000_000,
            succeeded=7,
            failed=1,
        )
    ],
    requests=[
        RequestView(request_id="now", ago_s=None, seconds=1.5, what="7 tokens in, 2 out"),
        RequestView(
            request_id="then", ago_s=61, seconds=2, what="HTTP 503", code="PEER_LOST", text="prefill is gone"
        ),
    ],
    errors=[
        ErrorView("OUT_OF_CAPACITY", 9, "No memory, slot or credit was free in time.", ""),
        ErrorView("PEER_LOST", 4, "The session to the peer ended.", "prefill is gone"),
    ],
    trouble="links between instances are old: the registry is away",
)
SHOWN = """\
segue tiny  ready  frontend 0123abcd, 1.2.3, up 1h2m
3 generations, 2 waiting; in the last 30 s 2.5 requests/s, 100.0 tokens/s
first token p50/p90/p99 10.0/20.0/30.2 ms, between tokens -
first token's parts (means): queue 1.0 ms, prefill 9.0 ms
INSTANCE      ROLE     STATE       PAGES     USED  QUARANTINED  RUNNING  WAITING
dddd0123 dp0  decode   no session               0            0        0        0
pppp0123 dp0  prefill  serving     ████▓▓░░    12            4        1        2
PREFILL       DECODE        TRANSPORT  GB/S     GB  HAND-OFFS  FAILED
pppp0123 dp0  dddd0123 dp0  shm        1.50  0.020          7       1
links between instances are old: the registry is away
REQUEST  ENDED     RESULT                                SECONDS
now      goes on   7 tokens in, 2 out                       1.50
then     1m1s ago  HTTP 503, PEER_LOST: prefill is gone     2.00
ERROR            THE LATEST                                   REQUESTS
OUT_OF_CAPACITY  No memory, slot or credit was free in time.         9
PEER_LOST        prefill is gone                                     4
"""


def test_a_look_fits_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(shown(VIEW))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == SHOWN.splitlines()


HARMFUL = "\x1b]0;mine\x07\x9b2J\u202e\x7f\U000e0001"


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "once"])
def test_the_texts_of_clients_tell_the_terminal_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    request = RequestView(
        request_id=HARMFUL, ago_s=1, seconds=1, what=HARMFUL, code="NOT_FOUND", text=HARMFUL
    )
    view = msgspec.structs.replace(
        VIEW,
        model=HARMFUL,
        reason=HARMFUL,
        requests=[request],
        errors=[ErrorView("NOT_FOUND", 1, HARMFUL, HARMFUL)],
        trouble=HARMFUL,
    )
    console = terminal()
    if is_live:
        with live(console) as display:
            display.update(shown(view), refresh=True)
    else:
        console.print(shown(view))
    said = capsys.readouterr().out
    assert r"\x1b]0;mine\x9b2J\u202e\x7f\U000e0001" in said  # rich drops the bell
    assert all(line.isprintable() for line in said.split("\n"))


def test_json_for_a_terminal_is_json_and_printable(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": HARMFUL, "été": ["a\nb"]})
    said = capsys.readouterr().out
    assert all(line.isprintable() for line in said.split("\n"))
    assert msgspec.json.decode(said) == {"text": HARMFUL, "été": ["a\nb"]}
