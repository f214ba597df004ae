"""Two real SGLang engines on CPUs, prefill and decode, against one engine that does both; then their ends."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest
from sglang_sides import Side, Sides, prompts, until

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(600)]
#: float32: sums in bfloat16 depend on the other requests of a batch, also within one engine
OPTIONS = {"dtype": "float32"}
OF_ROLE = {"prefill": {}, "decode": {"disaggregation_decode_enable_radix_cache": True}}
#: tables that remember ends until their deadline, peers, and the uses of rooms
REMEMBERED = {"ended", "deadlines", "peers", "room_uses"}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    made = Sides(tmp_path_factory.mktemp("sglang"))
    yield made
    made.close()


class Pair:
    """A prefill and a decode engine at the same addresses over their restarts; `one` does both."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.one = sides.start("null", **OPTIONS)
        self.prefill, self.decode = (sides.start(role, **OPTIONS, **OF_ROLE[role]) for role in OF_ROLE)
        for side in (self.one, self.prefill, self.decode):
            side.answer()

    def ask(self, asked: list[str], **job: int) -> tuple[str, str]:
        rooms = self.sides.rooms(len(asked))
        return self.prefill.ask(asked, rooms, **job), self.decode.ask(asked, rooms, **job)

    def answers(self, jobs: tuple[str, str]) -> tuple[dict[str, object], dict[str, object]]:
        return self.prefill.answer(jobs[0]), self.decode.answer(jobs[1])

    def restart(self, role: str) -> Side:
        getattr(self, role).end()
        side = self.sides.start(role, **OPTIONS, **OF_ROLE[role])
        setattr(self, role, side)
        side.answer()
        return side

    def serves(self) -> None:
        """A request is answered by both."""
        prefilled, decoded = self.answers(self.ask(["the capital of France is"]))
        assert "error" not in prefilled, prefilled
        assert "error" not in decoded, decoded

    def at_rest(self) -> None:
        """Nothing of any request is left, and SGLang's own check of its pools has not failed."""

        def full() -> dict[str, int]:
            return {
                f"{process} {table}": size
                for process, tables in self.sides.sizes().items()
                for table, size in tables.items()
                if size and table not in REMEMBERED
            }

        until(lambda: not full())
        for side in (self.prefill, self.decode):
            assert "leak" not in side.log.read_text()

    def half_way(self) -> tuple[str, str]:
        """A request whose first chunk has been sent and whose second one is held; its prompt is a new one,
        or prefill would have it in its cache and send it in one chunk."""
        (self.sides.folder / "hold").touch()
        [room] = self.sides.rooms(1)
        jobs = self.ask([f"{room} " + "the river flows through the capital " * 14])
        until(lambda: sum(tables["transfers"] for tables in self.sides.sizes().values()) >= 2)
        return jobs

    def go_on(self) -> None:
        (self.sides.folder / "hold").unlink()


@pytest.fixture(scope="module")
def pair(sides: Sides) -> Pair:
    return Pair(sides)


def batches() -> list[list[str]]:
    made = prompts()
    return [made[at : at + 5] for at in range(0, len(made), 5)]


@pytest.fixture(scope="module")
def wanted(pair: Pair) -> list[str]:
    """The answers of one engine that does both."""
    texts = [text for batch in batches() for text in pair.one.answer(pair.one.ask(batch))["texts"]]
    pair.one.end()
    return texts


def test_two_engines_answer_as_one_does(sides: Sides, pair: Pair, wanted: list[str]) -> None:
    """50 of 50, some with a prefix that decode has; each page has the bytes that prefill stored."""
    found: list[str] = []
    for batch in batches():
        prefilled, decoded = pair.answers(pair.ask(batch))
        assert "error" not in prefilled, prefilled
        assert "error" not in decoded, decoded
        found += decoded["texts"]  # type: ignore[arg-type]
    assert [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b] == []
    halves = [json.loads(line) for line in (sides.folder / "digests").read_text().splitlines()]
    stored = {half["room"]: half["pages"] for half in halves if half["role"] == "prefill"}
    landed = [half for half in halves if half["role"] == "decode"]
    assert (len(stored), len(landed)) == (50, 50)
    assert [half["pages"] for half in landed] == [stored[half["room"]][half["prefix"] :] for half in landed]
    assert any(half["prefix"] for half in landed)
    assert len({page for half in landed for page in half["pages"]}) > 100
    pair.at_rest()


def test_a_killed_prefill_fails_its_request_and_its_successor_serves(pair: Pair) -> None:
    """`kill -9` in mid-transfer; another process starts at the same address, under a new incarnation."""
    jobs = pair.half_way()
    pair.prefill.end()
    pair.go_on()
    answer = pair.decode.answer(jobs[1])
    assert re.search("PEER_LOST|TRANSFER_FAILED|BOOTSTRAP_UNREACHABLE", str(answer["error"])), answer
    pair.restart("prefill")
    pair.serves()
    pair.at_rest()


def test_a_killed_decode_fails_its_request_and_its_successor_serves(pair: Pair) -> None:
    jobs = pair.half_way()
    pair.decode.end()
    pair.go_on()
    answer = pair.prefill.answer(jobs[0])
    assert "PEER_LOST" in str(answer["error"]), answer
    pair.restart("decode")
    pair.serves()
    pair.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_stands_still_fails_its_request_on_the_other_side(pair: Pair, role: str) -> None:
    """SIGSTOP in mid-transfer: the other side fails within the silence that it allows. The stopped side goes
    on later, has the same end, and both serve again."""
    jobs = dict(zip(("prefill", "decode"), pair.half_way(), strict=True))
    stopped = getattr(pair, role)
    other = "decode" if role == "prefill" else "prefill"
    stopped.signal(signal.SIGSTOP)
    pair.go_on()
    try:
        answer = getattr(pair, other).answer(jobs[other], within_s=60.0)
    finally:
        stopped.signal(signal.SIGCONT)
    assert "PEER_LOST" in str(answer["error"]), answer
    assert "error" in stopped.answer(jobs[role])
    pair.serves()
    pair.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_that_leaves_in_mid_transfer_ends_both_sides(pair: Pair, role: str) -> None:
    jobs = dict(zip(("prefill", "decode"), pair.half_way(), strict=True))
    getattr(pair, role).abort(jobs[role])
    other = "decode" if role == "prefill" else "prefill"
    answer = getattr(pair, other).answer(jobs[other])
    assert "ABORTED_BY_CLIENT" in str(answer.get("error")), answer
    pair.go_on()
    pair.serves()
    pair.at_rest()


def test_24772_a_half_without_its_other_half_ends_with_the_reason(pair: Pair) -> None:
    """Prefill's leg alone, and decode's leg alone."""
    room = pair.sides.rooms(2)
    alone = pair.prefill.ask(["the river"], room[:1]), pair.decode.ask(["the river"], room[1:])
    prefilled, decoded = pair.answers(alone)
    assert "BOOTSTRAP_TIMEOUT" in str(prefilled["error"]), prefilled
    assert "error" in decoded
    assert re.search("TIMEOUT|DEADLINE", str(decoded["error"])), decoded
    pair.serves()
    pair.at_rest()


def test_a_room_that_comes_again_is_another_hand_off(pair: Pair, wanted: list[str]) -> None:
    """A duplicate room: both requests are answered, in their order; then the same room once more."""
    room = pair.sides.rooms(1)
    asked = prompts()[:2]
    for _ in range(2):
        jobs = [(pair.prefill.ask([one], room), pair.decode.ask([one], room)) for one in asked]
        for at, both in enumerate(jobs):
            prefilled, decoded = pair.answers(both)
            assert "error" not in prefilled, prefilled
            assert decoded["texts"] == [wanted[at]]
    pair.at_rest()


def test_24601_nothing_is_left_over_200_rooms(pair: Pair) -> None:
    """Half of them are answered; of the others, the client of one leg leaves."""
    for turn in range(8):
        rooms = pair.sides.rooms(25)
        asked = ["the capital of France"] * 25
        jobs = pair.prefill.ask(asked, rooms, tokens=1), pair.decode.ask(asked, rooms, tokens=1)
        if turn % 2:
            side = pair.prefill if turn % 4 == 1 else pair.decode
            side.abort(jobs[0] if turn % 4 == 1 else jobs[1])
        else:
            prefilled, decoded = pair.answers(jobs)
            assert "error" not in prefilled, prefilled
            assert "error" not in decoded, decoded
            continue
        pair.answers(jobs)
    pair.serves()
    pair.at_rest()


def test_decode_that_names_the_room_of_another_prompt_gets_an_error(pair: Pair) -> None:
    """Of as many tokens. Both clients hear the reason; decode has neither KV nor a token of that prompt."""
    [room] = pair.sides.rooms(1)
    jobs = [
        side.ask([f"the capital of {country} is"], [room])
        for side, country in ((pair.prefill, "France"), (pair.decode, "Spain"))
    ]
    for answer in (pair.prefill.answer(jobs[0]), pair.decode.answer(jobs[1])):
        assert "METADATA_MISMATCH" in str(answer.get("error")), answer
    pair.serves()
    pair.at_rest()
