"""The life of one request, put together from the records of several processes."""

from __future__ import annotations

from segue.kv.errors import ErrorCode, ErrorInfo
from segue.server.fleet.life import HTTP, describe_life, life_of
from segue.server.messages.records import RequestRecord, Step


def record(where: str, began: float, request_id: str = "r", **more: object) -> RequestRecord:
    return RequestRecord(request_id=request_id, where=where, began=began, seconds=1.0, **more)  # type: ignore[arg-type]


def test_of_an_id_that_came_twice_each_sample_is_dated_from_its_own_arrival() -> None:
    arrivals = [record(HTTP, 100.0), record(HTTP, 200.0)]
    first = record("frontend 1", 100.5, "r-0", steps=[Step("place", 0.0), Step("attempt", 0.25)])
    second = record("frontend 1", 200.5, "r-1", steps=[Step("attempt", 0.125)])
    orphan = record("frontend 1", 50.0, "r-9")
    instance = [
        record("prefill a", 7.0, "r-0"),
        record("prefill a", 9.0, "r-1"),
        record("decode b", 3.0, "r-7"),
    ]
    life = life_of("r", [[*arrivals, first, second, orphan], instance], [])
    at = {(part.record.where, part.record.request_id): part.at_s for part in life.parts}
    assert (at["frontend 1", "r-0"], at["frontend 1", "r-1"], at["frontend 1", "r-9"]) == (0.5, 0.5, 0.0)
    assert (at["prefill a", "r-0"], at["prefill a", "r-1"]) == (0.75, 0.625)
    assert at["decode b", "r-7"] is None
    assert life.parts[-1].record.where == "decode b", "what nobody can date comes last"


def test_a_life_as_text_tells_the_terminal_nothing() -> None:
    """A client's words are in an id, a step's text and an error."""
    harmful = "\x1b[2J\rno such request\nrequest r2"
    error = ErrorInfo(code=ErrorCode.NOT_FOUND, text=harmful, origin=harmful)
    one = record(HTTP, 100.0, harmful, steps=[Step("place", 0.0, harmful)], error=error)
    text = describe_life(life_of(harmful, [[one]], [harmful]))
    assert text.count(r"\x1b[2J\rno such request\nrequest r2") == 6
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_life_as_text_says_who_when_and_why_and_who_is_silent() -> None:
    error = ErrorInfo(code=ErrorCode.PEER_LOST, text="the cable", origin="decode b")
    parts = [
        record(HTTP, 100.0),
        record("frontend 1", 100.5, steps=[Step("place", 0.0), Step("attempt", 0.25, "room 7")]),
    ]
    instance = record(
        "decode b",
        3.0,
        "r",
        steps=[Step("reserve", 0.0)],
        room=7,
        attempt=2,
        error=error,
        omitted=3,
        facts={"pages": 4},
        ended=False,
    )
    text = describe_life(
        life_of("r", [parts, [instance], [record("prefill a", 1.0, "r-9")]], ["decode c: left"])
    )
    assert text.splitlines() == [
        "request r",
        "",
        "frontend http: r, took 1000.0 ms",
        "",
        "frontend 1: r, took 1000.0 ms",
        "       500.0  place             250.0",
        "       750.0  attempt           750.0  room 7",
        "",
        "decode b: r, room 7, attempt 2, goes on, so far 1000.0 ms",
        "       750.0  reserve          1000.0",
        "  and 3 more steps",
        "  pages 4",
        "  ended with PEER_LOST by decode b: the cable",
        "",
        "prefill a: r-9, took 1000.0 ms, since its own arrival (its frontend is not known)",
        "no answer from decode c: left",
    ]
