"""The one writer of a terminal: whole lines of all, a bound on what waits, and files with whole logs."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from segue.server.observe import logs
from segue.server.settings.shared_config import LogConfig
from segue.server.supervisor import console as module
from segue.server.supervisor.console import KEPT_FOLDERS, Console, LogFolder


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


# ---- files -------------------------------------------------------------------------------------------


def test_each_child_has_a_file_with_its_whole_log(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path / "logs")
    console = Console(io.StringIO(), folder=folder)
    for number in range(3):
        console.line("one", f"line {number}")
    console.line("two", "other")
    console.close()
    file = console.log_of("one")
    assert file is not None
    assert file.read_text() == "line 0\nline 1\nline 2\n"
    assert folder.file("two").read_text() == "other\n"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close(keep=True)
    assert file.exists()


def test_a_log_file_is_bounded_and_begins_again(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path, limit_bytes=100)
    for number in range(100):
        folder.append("one", f"{number:09d}\n")
    files = sorted(folder.path.iterdir())
    assert [file.name for file in files] == ["one.log", "one.log.1"]
    assert [file.stat().st_size for file in files] == [100, 100]
    assert files[0].read_text().endswith("000000099\n")
    folder.append("one", "x" * 1000 + "\n")  # longer than a file may be, and whole
    assert files[0].stat().st_size == 1001
    folder.close(keep=False)
    assert not folder.path.exists()


def test_a_folder_without_logs_is_removed_and_one_of_a_run_that_failed_stays_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = LogFolder(tmp_path)
    empty.close(keep=True)
    empty.close(keep=True)
    assert not empty.path.exists()
    runs = iter(range(100))
    monkeypatch.setattr(module.time, "strftime", lambda *_: f"20261124T{next(runs):06d}")
    living = LogFolder(tmp_path)
    kept = []
    for _ in range(KEPT_FOLDERS + 5):
        folder = LogFolder(tmp_path)
        folder.append("one", "why\n")
        folder.close(keep=True)
        kept.append(folder.path)
    assert sorted(tmp_path.iterdir()) == [living.path, *kept[-KEPT_FOLDERS:]], "nobody removes who lives"
    living.close(keep=False)


def test_folders_in_logs_that_are_not_of_a_run_are_left_alone(tmp_path: Path) -> None:
    """`--cache` may name a folder in which somebody else keeps logs, too."""
    others = [tmp_path / f"{number}-nginx" for number in range(2 * KEPT_FOLDERS)]
    for folder in others:
        folder.mkdir()
        (folder / "access.log").write_text("not ours")
    LogFolder(tmp_path).close(keep=False)
    assert [(folder / "access.log").exists() for folder in others] == [True] * len(others)


def test_a_disk_that_is_full_ends_the_files_and_not_the_terminal_and_is_said(tmp_path: Path) -> None:
    out = io.StringIO()
    folder = LogFolder(tmp_path)
    folder.file("one").symlink_to("/dev/full")
    console = Console(out, folder=folder)
    for number in range(3):
        console.line("one", f"line {number}")
    console.close()
    reason = "'[Errno 28] No space left on device'; no log files from here on"
    said = f"serve      | event=log_files_end reason={reason}"
    assert sorted(out.getvalue().splitlines()) == [*(f"one        | line {n}" for n in range(3)), said]
    assert console.log_of("one") is None, "nobody is sent to a file that is not there"
    folder.close(keep=False)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        LogFolder(tmp_path / "file")


def test_in_json_every_line_but_an_announcement_is_an_object() -> None:
    out, elsewhere = io.StringIO(), io.StringIO()
    console = Console(out, log_format="json")
    console.line("decode-0", '{"ts": "1", "level": "info", "message": "event=one"}')
    console.line("decode-0", "Fatal Python error")
    console.say("try: curl")
    console.announce("ready", elsewhere)
    console.close()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    shown = [(line["part"], line["level"], line["message"]) for line in lines]
    assert shown == [
        ("decode-0", "info", "event=one"),
        ("decode-0", "warning", "Fatal Python error"),
        ("serve", "info", "try: curl"),
    ]
    assert elsewhere.getvalue() == "ready\n"
