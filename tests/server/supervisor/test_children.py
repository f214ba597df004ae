"""Single children of a process tree: their lines, their reports, their end; shell scripts without a model."""

from __future__ import annotations

import asyncio
import io
import os
import select
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from segue.kv.ids import Role
from segue.server.supervisor import children as module
from segue.server.supervisor import lifeline as lifeline_module
from segue.server.supervisor import process_tree
from segue.server.supervisor.children import LAST_LINE_CHARS, LAST_LINES, Child, ChildSpec
from segue.server.supervisor.console import Console
from segue.server.supervisor.lifeline import Lifeline, Ready, encode_restarting
from segue.server.supervisor.process_tree import THREAD_VARIABLES, ProcessTree, ServeResult, Unit, lifeline

#: Says `$1` over the pipe of reports.
REPORT = "say() { eval \"echo '$1' >&$fd\"; }; fd=${1#--report-fd=}; "
READY = REPORT + 'say \'{"type":"Ready","url":"http://x:1"}\'; '


# ---- a child -----------------------------------------------------------------------------------------


def script(text: str, name: str = "child") -> ChildSpec:
    return ChildSpec(name, Role.DECODE, ["/bin/bash", "-c", text], {"PATH": os.environ["PATH"]})


def run(text: str, look: Callable[[Child], Awaitable[None]] | None = None) -> tuple[Child, list[str]]:
    """A child with this script, looked at while it runs; with the lines that were written of it."""
    out = io.StringIO()

    async def main() -> Child:
        console = Console(out)
        with lifeline() as fd:
            child = await Child.start(script(text), console, fd)
            try:
                async with asyncio.timeout(60):
                    if look is not None:
                        await look(child)
                    await child.exited
            finally:
                if child.process.returncode is None:
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.listens.cancel()
                await asyncio.gather(child.listens, return_exceptions=True)
        console.close()
        return child

    child = asyncio.run(main())
    return child, [line.partition("| ")[2] for line in out.getvalue().splitlines()]


def test_lines_are_passed_on_whole_bounded_and_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 8)
    child, lines = run(r"printf 'a\r\nb\377c\n\n0123456789abcdef0123\nthe end'")
    assert lines[:3] == ["a", "b\ufffdc", ""]
    assert "".join(lines[3:-1]) == "0123456789abcdef0123the end"[: -len(lines[-1])]
    assert lines[-1] == "the end", "the last line has no end of its own"
    assert all(len(line) < 16 for line in lines), "one endless line is not kept until it ends"
    assert list(child.last_lines) == lines
    assert child.exit_text() == "exit status 0"


def test_of_a_child_that_says_much_the_last_lines_are_kept() -> None:
    child, lines = run(f"i=0; while [ $i -lt {LAST_LINES + 5} ]; do echo $i; i=$((i+1)); done")
    assert list(child.last_lines) == [str(number) for number in range(5, LAST_LINES + 5)]
    assert len(lines) == LAST_LINES + 5


def test_an_endless_line_is_shown_by_its_beginning_where_a_reason_is_given() -> None:
    child, lines = run("head -c 300000 /dev/zero | tr '\\0' x")
    assert sum(map(len, lines)) == 300_000
    assert max(map(len, child.last_lines)) == LAST_LINE_CHARS


def test_a_grandchild_that_keeps_the_output_open_does_not_hide_the_end_of_the_child() -> None:
    child, lines = run("sleep 60 & echo $!; exit 3")
    try:
        assert child.exit_text() == "exit status 3"
        assert len(lines) == 1
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)


@pytest.mark.slow
def test_a_grandchild_that_goes_on_writing_does_not_hide_the_end_of_the_child() -> None:
    child, _ = run("yes & exit 3")  # `yes` ends once nobody reads it
    assert child.exit_text() == "exit status 3"


def test_all_that_a_full_pipe_holds_is_read_after_the_end_of_the_child() -> None:
    """Not more lines than may wait for the terminal (`WAITING_LINES`): a busy machine drops those beyond."""
    _, lines = run("seq -f %0100.f 5000")
    assert lines == [f"{number:0100}" for number in range(1, 5001)]


def test_a_signal_to_a_child_that_has_just_ended_leaves_its_exit_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a service manager signals all processes at once: asyncio's thread is to reap it, not we."""
    waitpid, signalled = os.waitpid, threading.Event()

    def late(pid: int, options: int) -> tuple[int, int]:
        if not options:  # the thread's
            assert signalled.wait(60)
        return waitpid(pid, options)

    async def look(child: Child) -> None:
        fd = os.pidfd_open(child.process.pid)
        await asyncio.to_thread(select.select, [fd], [], [])
        os.close(fd)
        child.signal(signal.SIGTERM)
        signalled.set()

    monkeypatch.setattr(os, "waitpid", late)
    assert run("exit 0", look)[0].exit_text() == "exit status 0"


def test_a_kill_takes_what_the_child_has_started_along_and_another_signal_does_not() -> None:
    fds: list[int] = []

    async def look(child: Child) -> None:
        while not child.last_lines:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.01)
        fds.append(os.pidfd_open(int(child.last_lines[0])))
        child.signal(signal.SIGCONT)
        assert not select.select(fds, [], [], 0)[0]
        child.signal(signal.SIGKILL)
        await child.exited
        child.signal(signal.SIGKILL)  # it has ended

    child, _ = run("sleep 60 & echo $!; wait", look)
    assert select.select(fds, [], [], 30)[0], "a grandchild outlives the kill"
    os.close(fds[0])
    assert child.exit_text() == "signal 9 (SIGKILL)"
    assert not child.alive


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert run("kill -s 40 $$; sleep 60")[0].exit_text() == "signal 40 (unknown)"


@pytest.mark.parametrize(
    ("says", "first"),
    [
        (READY, Ready("http://x:1")),
        (READY + 'say \'{"type":"Ready","role":"prefill"}\';', Ready("http://x:1")),
        (REPORT + "say nonsense;" + READY, None),
        (REPORT + "say \"$(head -c 20000 /dev/zero | tr '\\0' x)\";" + READY, None),
        ("", None),
    ],
    ids=["ready", "and later switched", "nonsense", "endless", "nothing"],
)
def test_the_first_report_counts_and_what_is_none_ends_them(says: str, first: Ready | None) -> None:
    async def look(child: Child) -> None:
        assert await child.report == first
        await child.listens

    child, _ = run(says + "exit 0", look)
    assert child.role is (Role.PREFILL if "role" in says else Role.DECODE)
    assert child.name == ("child-as-prefill" if "role" in says else "child")


def test_a_child_that_cannot_be_started_leaves_no_descriptor() -> None:
    async def main() -> None:
        before = os.listdir("/proc/self/fd")
        spec = ChildSpec("x", Role.DECODE, ["/no/such/program"], {})
        with pytest.raises(FileNotFoundError):
            await Child.start(spec, console, 0)
        assert len(os.listdir("/proc/self/fd")) <= len(before)

    console = Console(io.StringIO())
    asyncio.run(main())
    console.close()


# ---- their tree --------------------------------------------------------------------------------------


class Tree(ProcessTree):
    """Children of shell scripts; `then` is what is done once all are ready."""

    def __init__(self, then: Callable[[Tree], None], **options: Any) -> None:
        super().__init__(5.0, console=Console(io.StringIO()), **options)
        self.then = then
        self.urls: list[tuple[Role, str]] = []

    def ready(self, urls: Sequence[tuple[Role, str]]) -> None:
        self.urls = list(urls)
        self.then(self)


def keep(*scripts: str, then: Callable[[Tree], None] = lambda tree: tree.stop()) -> tuple[Tree, ServeResult]:
    async def main() -> tuple[Tree, ServeResult]:
        tree = Tree(then)
        async with asyncio.timeout(60):
            specs = [script(text, f"c{n}") for n, text in enumerate(scripts)]
            units = [Unit(s.name, Role.DECODE, lambda _, s=s: [s]) for s in specs]  # type: ignore[misc]
            return tree, await tree.keep(units)

    tree, result = asyncio.run(main())
    assert not any(child.alive for child in tree.children)
    return tree, result


def test_a_child_that_ends_by_the_very_signal_that_asks_it_to_leave_has_left_well() -> None:
    """It had no time to say how it wants to hear of it: it was still loading."""
    tree, result = keep(READY + "exec sleep 60", "trap 'kill $!; exit 0' TERM;" + READY + "sleep 60 & wait")
    assert result == ServeResult(0)
    assert tree.urls == [(Role.DECODE, "http://x:1")] * 2
    assert tree.children[0].exit_text() == "signal 15 (SIGTERM)"


def test_a_child_that_ends_by_another_signal_when_asked_to_leave_has_not() -> None:
    _, result = keep("trap 'kill $!; kill -s KILL $$' TERM;" + READY + "sleep 60 & wait")
    assert result.status == 1


def test_a_child_that_lives_and_closes_its_reports_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "ABORT_S", 0.2)
    _, result = keep(READY + "exec sleep 60", 'eval "exec ${1#--report-fd=}>&-"; exec sleep 60')
    assert result == ServeResult(1, "c1 closed its report pipe without a report")


def test_a_child_that_says_nothing_and_ends_is_told_by_how_it_ended() -> None:
    _, result = keep("exit 7")
    assert result == ServeResult(1, "c0 ended during the start with exit status 7; it wrote nothing")


def test_a_program_that_cannot_be_started_ends_all_with_a_sentence() -> None:
    async def main() -> ServeResult:
        tree = Tree(lambda _: pytest.fail("nothing is ready"))
        nowhere = ChildSpec("x", Role.DECODE, ["/no/such/program"], {})
        units = [Unit("c0", Role.DECODE, lambda _: [script(READY + "exec sleep 60")])]
        return await tree.keep([*units, Unit("c1", Role.DECODE, lambda _: [nowhere])])

    result = asyncio.run(main())
    assert result.status == 1
    assert result.reason.startswith("a process for c1 could not be started: [Errno 2] No such file")


def test_the_settings_of_the_parent_are_not_those_of_a_child() -> None:
    async def main() -> ChildSpec:
        environ = {"SEGUE_PORT": "9", "PATH": "/bin", "OMP_NUM_THREADS": "64", "HOME": "/root"}
        tree = Tree(lambda _: None, environ=environ)
        return tree.spec("x", Role.DECODE, ["x"], 3, (5,))

    spec = asyncio.run(main())
    assert spec.pass_fds == (5,)
    assert dict(spec.environ) == {
        "PATH": "/bin",
        "HOME": "/root",
        **dict.fromkeys(THREAD_VARIABLES, "3"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


# ---- the lifeline ------------------------------------------------------------------------------------


def test_a_process_whose_supervisor_is_gone_is_asked_to_leave_and_then_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[object] = []
    over = threading.Event()

    def ended(status: int) -> None:
        steps.append(status)
        over.set()

    monkeypatch.setattr(lifeline_module.os, "_exit", ended)
    read, write = os.pipe()
    Lifeline(read).watch(0.0, lambda: steps.append("asked"))
    assert steps == []
    os.close(write)
    assert over.wait(60)
    assert steps == ["asked", 1]
    os.close(read)


def test_a_process_started_by_hand_has_nobody_to_lose_and_nobody_to_tell() -> None:
    before = set(threading.enumerate())
    alone = Lifeline()
    alone.watch(0.0, lambda: pytest.fail("nobody is lost"))
    alone.report(Ready())
    assert not alone.supervised
    # One of an earlier test may end meanwhile.
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("end", [b"", b"nonsense\n", b'{"roles":["king"]}\n', b"x" * 20_000])
def test_a_frontend_hears_who_is_being_started_again_until_the_news_end(
    monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    read, write = os.pipe()
    told: list[list[Role]] = []
    with os.fdopen(read, "rb") as stdin:
        monkeypatch.setattr(lifeline_module.sys, "stdin", stdin)
        os.write(write, encode_restarting([]) + encode_restarting([Role.DECODE, Role.PREFILL]) + end)
        os.close(write)
        asyncio.run(Lifeline(None, write).follow(told.append))
        assert told == [[], [Role.DECODE, Role.PREFILL]]
        asyncio.run(Lifeline().follow(told.append))  # started by hand: its standard input is a person's
    assert len(told) == 2


def test_what_a_child_wrote_before_its_end_is_read_also_where_its_end_is_seen_first() -> None:
    """It is in the pipe, and says why the child ended."""

    async def main() -> list[bytes]:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]  # no wait is over, however long the machine takes
        child: Any = object.__new__(Child)
        child.process = SimpleNamespace(stdout=asyncio.StreamReader())
        child._ended = asyncio.Event()
        child._ended.set()
        lines: list[bytes] = []
        child._line = lines.append
        reading = asyncio.ensure_future(child._forward_lines())
        for _ in range(8):
            await asyncio.sleep(0)
        child.process.stdout.feed_data(b"the last\nwords")
        child.process.stdout.feed_eof()
        await reading
        return lines

    assert asyncio.run(main()) == [b"the last", b"words"]
