"""The one writer of a terminal: whole lines of all, a bound on what waits, and files with whole logs."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from segue.server.observe import logs
from segue.server.settings.shared_config import LogConfig
from segue.server.supervisor import console as module
from segue.server.supervisor.console import Console


class Out(io.StringIO):
    """A terminal that stops after its first line until `go_on`, or that nobody reads any more."""

    def __init__(self, *, gone: bool = False, tty: bool = False) -> None:
        super().__init__()
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.gone, self.tty = gone, tty

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.go_on.wait(60)
        if self.gone:
            raise BrokenPipeError
        return super().write(text)


# ---- the console -------------------------------------------------------------------------------------


def test_a_terminal_that_stands_still_stops_nobody_and_what_was_left_out_is_counted() -> None:
    out = Out()
    console = Console(out, limit=2)
    console.line("one", "first")
    assert out.asked.wait(60)
    for number in range(5):  # two wait, and three are too many
        console.line("one", f"line {number}")
    assert console.dropped == 3
    out.go_on.set()
    while out.getvalue().count("\n") < 3:
        pass
    console.close()
    assert out.getvalue().splitlines() == [
        "one        | first",
        "one        | line 0",
        "one        | line 1",
        "serve      | event=log_lines_dropped count=3",
    ]


def test_lines_that_are_long_take_no_more_memory_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_CHARS", 1000)
    out = Out()
    console = Console(out)
    console.line("one", "first")
    assert out.asked.wait(60)
    for _ in range(5):
        console.line("one", "x" * 600)
    assert console.dropped == 3
    out.go_on.set()
    console.close()
    assert out.getvalue().count("x" * 600) == 2


def test_a_terminal_that_is_gone_ends_the_writer_and_not_the_service() -> None:
    out = Out(gone=True)
    out.go_on.set()
    console = Console(out, limit=2)
    console.line("one", "first")
    while not console.dropped:
        console.line("one", "nobody reads it")
    console.say("an event, which nobody reads either")
    console.close(0.0)


def test_on_a_terminal_each_child_has_a_colour_of_its_own_and_keeps_it() -> None:
    out = Out(tty=True)
    out.go_on.set()
    console = Console(out)
    for name in ("one", "two", "one"):
        console.line(name, "text")
    console.close()
    first, second, third = out.getvalue().splitlines()
    assert first == third
    assert first.partition("one")[0] != second.partition("two")[0]
    assert all(line.startswith("\x1b[") and line.endswith("\x1b[0mtext") for line in (first, second))


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_child_tells_the_terminal_nothing(log_format: str) -> None:
    out = io.StringIO()
    console = Console(out, log_format=log_format)
    console.line("one", "a client's \x1b[2J\r words")
    console.close()
    assert r"\x1b[2J\r words" in out.getvalue().replace("\\\\", "\\")
    assert out.getvalue().removesuffix("\n").isprintable()


def test_what_we_say_ourselves_is_never_dropped_and_keeps_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Out()
    console = Console(out, limit=1)
    console.line("one", "first")
    assert out.asked.wait(60)
    console.line("one", "second")
    for number in range(3):
        console.say(f"said {number}")
        console.line("one", "dropped")
    out.go_on.set()
    console.announce("ready", out)
    console.close()
    assert out.getvalue().splitlines()[:6] == [
        "one        | first",
        "one        | second",
        "said 0",
        "said 1",
        "said 2",
        "ready",
    ]
    console.say("after the end")
    assert out.getvalue().endswith("after the end\n")


def test_an_announcement_elsewhere_comes_after_what_was_said_before_it() -> None:
    """A reader of `ready` finds the line with the command that shows the fleet."""
    for _ in range(100):
        out, elsewhere = io.StringIO(), io.StringIO()
        console = Console(out)
        console.say("look: segue ps")
        console.announce("ready", elsewhere)
        assert out.getvalue() == "look: segue ps\n"
        assert elsewhere.getvalue() == "ready\n"
        console.close()


def test_an_announcement_elsewhere_does_not_wait_long_for_a_terminal_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    stuck, elsewhere = Out(), io.StringIO()
    console = Console(stuck)
    console.line("one", "first")
    assert stuck.asked.wait(60)
    console.announce("ready", elsewhere)
    assert elsewhere.getvalue() == "ready\n"
    stuck.go_on.set()
    console.close()


def test_a_log_event_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(out)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    logs.configure(LogConfig(), "serve", console)
    logging.getLogger("segue.x").info("event=%s", "one")
    logging.captureWarnings(False)
    console.close()
    assert re.fullmatch(r"\S+ INFO    serve segue.x event=one\n", out.getvalue())


#: Writes from several threads, as a supervisor with busy children does.
SPAM = """
import logging, threading
from segue.server.observe import logs
from segue.cli.commands import processes
from segue.server.settings.shared_config import AccessConfig, LogConfig
from segue.server.supervisor.console import Console
console = Console()
logs.configure(LogConfig(), "serve", console)
def child(name):
    for n in range(400):
        console.line(name, f"{name} line {n} " + "x" * 60)
def events():
    for n in range(400):
        logging.getLogger("segue.serve").info("event=said n=%d of=%s", n, "y" * 60)
threads = [threading.Thread(target=child, args=(f"child-{n}",)) for n in range(3)]
threads.append(threading.Thread(target=events))
for thread in threads:
    thread.start()
for n in range(100):
    processes.announce_ready(console, f"http://127.0.0.1:{n}", "m", None)
for thread in threads:
    thread.join()
console.close()
"""

WHOLE = [
    re.compile(r"\x1b\[\d+mchild-\d    \| \x1b\[0mchild-\d line \d+ x{60}"),
    re.compile(r"\S+Z INFO    serve segue\.serve event=said n=\d+ of=y{60}"),
    re.compile(r"try: curl http://127\.0\.0\.1:\d+/v1/chat/completions -H .* -d '.*'"),
    re.compile(r"look: -c ps"),
    re.compile(r"ready http://127\.0\.0\.1:\d+"),
]


def test_on_one_terminal_no_line_is_torn_by_another() -> None:
    """Standard output and standard error are the same terminal, as in a shell."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SPAM], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        data = b""
        while True:
            try:
                data += os.read(ours, 65536)
            except OSError:  # the other end is closed: so a terminal says it
                break
        os.close(ours)
        assert process.wait(60) == 0
    lines = data.decode().replace("\r\n", "\n").splitlines()
    assert [line for line in lines if not any(form.fullmatch(line) for form in WHOLE)] == []
    assert len(lines) == 4 * 400 + 3 * 100
    ours_in_order = [line.split()[0] for line in lines if line.startswith(("try:", "look:", "ready"))]
    assert ours_in_order == ["try:", "look:", "ready"] * 100
