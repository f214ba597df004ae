"""Real SGLang engines on CPUs in other forms: tensor parallelism, overlap scheduling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_sides import Side, Sides, prompts, until

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(600)]
#: ranks that wait for each other spin: on few cores a step takes seconds
OPTIONS = {"dtype": "float32", "wait_s": 120}


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.close()


def answers(
    prefill: Side, decode: Side, asked: list[str], rooms: list[int], **more: dict[str, int]
) -> list[dict[str, object]]:
    """The answers of both legs; `more` are options of one leg's request by its name."""
    legs = [(prefill, more.get("prefill", {})), (decode, more.get("decode", {}))]
    jobs = [(side, side.ask(asked, rooms, tokens=4, more=options)) for side, options in legs]
    return [side.answer(job) for side, job in jobs]


def digests(sides: Sides, room: int, role: str) -> list[list[str]]:
    """The digests of the pages of a room on all ranks."""
    lines = map(json.loads, (sides.folder / "digests").read_text().splitlines())
    return sorted(line["pages"] for line in lines if (line["room"], line["role"]) == (room, role))


def test_26394_a_rank_that_is_late_holds_the_others_and_one_that_fails_fails_all(sides: Sides) -> None:
    """Three ranks on each side. Rank 1 of prefill fails a second after the others have succeeded: the request
    fails on all ranks of both sides, and the next one is answered."""
    prefill, decode = (sides.start(role, tp_size=3, **OPTIONS) for role in ("prefill", "decode"))
    for side in (prefill, decode):
        side.answer()
    asked = ["the capital of France is", "a river flows through"]
    rooms = sides.rooms(2)
    prefilled, decoded = answers(prefill, decode, asked, rooms)
    assert "error" not in prefilled, prefilled
    assert "error" not in decoded, decoded
    for room in rooms:
        stored, landed = (digests(sides, room, role) for role in ("prefill", "decode"))
        assert len(stored) == 3
        assert stored == landed
    (sides.folder / "fail-1").touch()
    [room] = sides.rooms(1)
    failed = answers(prefill, decode, asked[:1], [room])
    assert all("error" in answer for answer in failed), failed
    assert not (sides.folder / "fail-1").exists()
    assert len(digests(sides, room, "decode")) == 2
    until(lambda: "a rank of the test" in decode.log.read_text())
    again = answers(prefill, decode, asked, sides.rooms(2))
    assert again[1]["texts"] == decoded["texts"]
    until(lambda: all(not tables["halves"] for tables in sides.sizes().values()))


def test_overlap_scheduling_with_prompts_whose_prefix_prefill_has(sides: Sides) -> None:
    """SGLang computes a batch while it handles the results of the one before."""
    options = OPTIONS | {"disable_overlap_schedule": False}
    prefill, decode = (sides.start(role, **options) for role in ("prefill", "decode"))
    for side in (prefill, decode):
        side.answer()
    for asked in (prompts()[:6], prompts()[40:46]):
        rooms = sides.rooms(6)
        found = answers(prefill, decode, asked, rooms)
        assert all("error" not in answer for answer in found), found
        for room in rooms:
            assert digests(sides, room, "prefill") == digests(sides, room, "decode")


def test_two_dp_ranks_of_prefill(sides: Sides) -> None:
    """Prefill spreads its requests by turns; decode asks its bootstrap server which rank has a room."""
    spread = {"dp_size": 2, "load_balance_method": "round_robin"}
    prefill, decode = (
        sides.start(role, **OPTIONS, **(spread if role == "prefill" else {}))
        for role in ("prefill", "decode")
    )
    for side in (prefill, decode):
        side.answer()
    rooms = sides.rooms(6)
    found = answers(prefill, decode, prompts()[:6], rooms)
    assert all("error" not in answer for answer in found), found
    for room in rooms:
        assert digests(sides, room, "prefill") == digests(sides, room, "decode")
    lines = map(json.loads, (sides.folder / "digests").read_text().splitlines())
    assert len({line["pid"] for line in lines if line["role"] == "prefill"}) == 2
