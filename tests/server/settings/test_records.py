"""Records of requests: bounded by count and bytes, found by the client's id."""

from __future__ import annotations

from segue.server.messages.records import MAX_FOUND, MAX_STEPS, Path, Records, RequestRecord


def record(request_id: str, text: str = "") -> RequestRecord:
    path = Path(5.0)
    path.enter("place", 5.0, text)
    path.enter("answer", 7.5)
    return RequestRecord(request_id=request_id, where="here", began=5.0, seconds=3.0, steps=path.steps())


def test_a_request_is_found_with_its_samples_and_attempts_and_nobody_elses() -> None:
    records = Records()
    names = ["a", "a-0", "a-0~1", "a-11~12", "a-b", "ab-0", "a-0~1x", "b"]
    for name in names:
        records.put(record(name))
    assert [r.request_id for r in records.find("a")] == names[:4]
    assert [r.request_id for r in records.find("a-0")] == names[1:3]
    [found] = records.find("b")
    assert found == record("b")
    assert [(step.name, step.at_s) for step in found.steps] == [("place", 0.0), ("answer", 2.5)]
    assert records.find("a.*") == []
    for name in ("a-", "a~", "a-0~", "a-0~1~2", "a-٣", "a--1"):
        records.put(record(name))
    assert [r.request_id for r in records.find("a")] == names[:4]


def test_of_more_than_an_answer_holds_the_latest_are_found() -> None:
    records = Records()
    for sample in range(MAX_FOUND + 9):
        records.put(record(f"a-{sample}"))
    assert [r.request_id for r in records.find("a")] == [f"a-{n}" for n in range(9, MAX_FOUND + 9)]


def test_the_oldest_go_first_by_count_and_by_bytes() -> None:
    records = Records(max_count=3)
    for name in "abcd":
        records.put(record(name))
    assert len(records) == 3
    assert records.find("a") == []
    records = Records(max_bytes=1000)
    for number in range(50):
        records.put(record(f"r{number}", "x" * 100))
        assert 0 < records.nbytes <= 1000
    assert records.find("r49")
    assert not records.find("r30")
    records.put(record("large", "x" * 2000))
    assert (len(records), records.nbytes) == (0, 0)


def test_a_path_that_never_ends_is_bounded() -> None:
    path = Path(0.0)
    for number in range(MAX_STEPS + 5):
        path.enter("again", float(number))
    assert len(path.steps()) == MAX_STEPS
    assert path.omitted == 5


def test_whoever_listens_hears_each_once() -> None:
    heard: list[RequestRecord] = []
    records = Records(on_record=heard.append)
    records.put(record("a"))
    assert heard == [record("a")]
