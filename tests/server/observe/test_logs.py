"""Log lines as text and as JSON: one line for each event, the id of its request in one place."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from segue.kv.errors import AbortedByClient, PeerLost
from segue.server.messages.records import RequestRecord
from segue.server.observe import logs
from segue.server.settings.shared_config import LogConfig

JSON = LogConfig(log_format="json", log_level="debug")


@pytest.fixture(autouse=True)
def _logging_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root, segue = logging.getLogger(), logging.getLogger("segue")
    before = root.handlers[:], root.level, segue.level
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level = before[:2]
    segue.setLevel(before[2])


def logged(config: LogConfig, part: str = "", rank: int = 0) -> io.StringIO:
    out = io.StringIO()
    logs.configure(config, part, out, rank=rank)
    return out


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_of_json_names_its_part_and_its_request() -> None:
    out = logged(JSON, "decode-0", rank=2)
    log = logging.getLogger("segue.test")
    log.info("event=%s\nforged %s", "one", "\ud800")
    log.warning("two", extra=logs.about("mine-0"))
    first, second = lines(out)
    assert first.pop("ts")
    assert first == {
        "level": "info",
        "part": "decode-0",
        "rank": 2,
        "logger": "segue.test",
        "message": "event=one\nforged \ud800",
    }
    assert (second["level"], second["message"], second["request_id"]) == ("warning", "two", "mine-0")


def test_text_ends_with_the_request() -> None:
    out = logged(LogConfig(), "decode-0", rank=2)
    logging.getLogger("segue.test").info("event=one", extra=logs.about("mine"))
    assert out.getvalue().endswith("Z INFO    decode-0 rank 2 segue.test event=one request_id=mine\n")


def test_tracebacks_and_warnings_are_one_line_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    out = logged(JSON, "decode-0")

    def fails() -> None:
        raise ValueError("a bug")

    try:
        fails()
    except ValueError as error:
        logging.getLogger("segue.test").exception("event=bug")
        sys.excepthook(type(error), error, error.__traceback__)
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # what pytest records is not shown
        warnings.warn("old", stacklevel=1)
        logging.captureWarnings(False)
    *bugs, warned = lines(out)
    assert [bug["message"] for bug in bugs] == ["event=bug", "uncaught ValueError", "uncaught ValueError"]
    assert all("in fails" in str(bug["exception"]) for bug in bugs)
    assert "old" in str(warned["message"])


def test_a_sentence_of_a_command_has_the_form_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    logged(LogConfig())
    logs.say("no such model")
    assert capsys.readouterr().err == "segue: no such model\n"
    out = logged(JSON, "serve")
    logs.say("no such model")
    [line] = lines(out)
    assert (line["part"], line["level"], line["message"]) == ("serve", "error", "no such model")


def test_lines_of_a_child_get_its_name_and_what_is_no_log_line_is_wrapped() -> None:
    out = logged(JSON)
    logging.getLogger("segue.test").info("event=one", extra=logs.about("mine"))
    own = out.getvalue().strip()
    assert "part" not in json.loads(own)
    passed = json.loads(logs.forwarded("decode-0", own))
    assert passed == {**json.loads(own), "part": "decode-0"}
    for raw in ("Fatal Python error", own[:-5], '{"ts": 1}', '{"ts"' + "[" * 100_000, ""):
        wrapped = json.loads(logs.forwarded("decode-0", raw))
        assert wrapped.pop("ts")
        assert wrapped == {"level": "warning", "part": "decode-0", "message": raw}
        assert logs.as_text(raw) == raw
    assert logs.as_text(own) == "event=one"


def test_an_instance_logs_failed_requests_as_warnings_and_the_rest_for_debugging() -> None:
    out = logged(JSON)

    for error in (None, AbortedByClient("left").info, PeerLost("prefill is gone").info):
        record = RequestRecord(request_id="mine-0~1", where="decode-0", began=0.0, seconds=1.5, error=error)
        logs.log_record(record)
    assert [line["level"] for line in lines(out)] == ["debug", "debug", "warning"]
    assert {line["request_id"] for line in lines(out)} == {"mine-0~1"}
    text = "event=ended seconds=1.500 code=PEER_LOST reason='prefill is gone'"
    assert lines(out)[-1]["message"] == text


def test_a_line_of_text_tells_the_terminal_nothing() -> None:
    out = logged(LogConfig())
    harmful = "\x1b[2J\r\n2026 INFO forged \x9b\u202e"
    log = logging.getLogger("segue.test")
    log.warning("event=%s", harmful, extra=logs.about(harmful))
    try:
        raise ValueError(harmful)
    except ValueError:
        log.exception("event=bug")
    written = out.getvalue().removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in written)
    assert written[0].endswith(
        r"event=\x1b[2J\r\n2026 INFO forged \x9b\u202e request_id=\x1b[2J\r\n2026 INFO forged \x9b\u202e"
    )


def test_a_sentence_of_a_command_tells_the_terminal_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logs.say("two\nlines \x1b[2J")
    assert capsys.readouterr().err == "segue: two\nlines \\x1b[2J\n"
