"""Real segue processes for tests: started as a user does, asked what they hold, checked for leftovers."""

from __future__ import annotations

import atexit
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import holdings
import httpx2 as httpx
import psutil
from holdings import State

REST_S = 60.0
_DOOR = re.compile(r"http server at (\S+):(\d+)")
_DRAINING = re.compile(r"event=draining")
_STARTED = re.compile(r"event=started child=(\S+) pid=(\d+)")


def command(*words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of segue to its end."""
    return subprocess.run(
        [sys.executable, "-m", "segue.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | (environ or {}),
    )


def refused(*words: str, status: int = 2, environ: Mapping[str, str] | None = None) -> str:
    """What a command says that ends with `status` before it has begun to serve: no traceback."""
    done = command(*words, environ=environ)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


@functools.cache
def _runtime_folders() -> str:
    """The parent of the deployments' runtime folders, until this process ends."""
    parent = tempfile.mkdtemp(prefix="segue-run-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    return parent


class Served:
    """One command of segue (`segue serve` unless told otherwise); a context manager that ends it and
    checks what it leaves. With `wait` off, call `ready` before anything else."""

    #: those that run now, for the check after each test
    live: ClassVar[list[Served]] = []

    def __init__(
        self,
        *arguments: str,
        command: str = "serve",
        start_s: float = 180,
        wait: bool = True,
        stderr: Path | None = None,
        environ: Mapping[str, str] | None = None,
        door_port: int | None = None,
    ) -> None:
        self.command = command
        self.start_s = start_s
        self._own_log = stderr is None
        if stderr is None:
            with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as made:
                stderr = Path(made.name)
        self._log = stderr
        self._door_port = door_port
        #: other deployments of this user are none of this test's
        self.runtime = {"XDG_RUNTIME_DIR": tempfile.mkdtemp(dir=_runtime_folders())}
        #: what carries the KV between processes of one host
        self.transport = _value(arguments, "--transport", "shm")
        self.is_registry = "--bootstrap-port" in arguments
        #: see `holdings.faults`
        self.least: dict[str, int] = {}
        here = ("--http-port", str(door_port or 0))
        doors = {"serve": ("--instance-doors",), "frontend": ()}.get(command, here)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "segue.cli.main", command, *arguments, *doors],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | self.runtime | (environ or {}),
                start_new_session=True,
            )
        self.line = self.url = ""
        Served.live.append(self)
        if wait:
            self.ready()

    def ready(self) -> Served:
        """Wait for the `ready` line. An AssertionError with the log if there is none."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], self.start_s)
        assert readable, f"neither ready nor ended after {self.start_s} s\n{self.log()}"
        self.line = self.process.stdout.readline().strip()
        self.url = self.line.removeprefix("ready ")
        if not self.line.startswith("ready "):
            self.process.wait(self.start_s)
            self.forget()
            raise AssertionError(f"not ready: exit {self.process.returncode}\n{self.log()}")
        if self.command == "serve":
            # What it holds before the first request is what it may hold after the last one.
            self.at_rest()
        return self

    def log(self) -> str:
        if self._log.is_char_device():
            return ""
        return self._log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def instances(self, word: str) -> list[psutil.Process]:
        """Descendants whose command has `word` as its subcommand."""
        return [p for p in self.family()[1:] if word in _words(p)[:5]]

    @property
    def door(self) -> str:
        """The URL of an instance's own HTTP server."""
        if self._door_port is not None:
            return f"http://127.0.0.1:{self._door_port}"
        return list(self.doors(1).values())[-1]

    def doors(self, count: int) -> dict[str, str]:
        """The URLs of the HTTP servers of `count` instances by the name that begins their log lines;
        the log may be a moment behind what it tells of."""
        return self._until(lambda found: len(found) >= count)

    def _until(self, complete: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        until = time.monotonic() + 60
        while not complete(found := self._doors()):
            assert time.monotonic() < until, f"only {sorted(found)} have a door"
            time.sleep(0.02)
        return found

    def _doors(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in self.log().splitlines():
            if started := _STARTED.search(line):
                found.pop(started[1], None)  # its predecessor's door has closed
            elif door := _DOOR.search(line):
                # Of one that was switched, the latest.
                found[line.split("|")[0].strip().split("-as-")[0]] = f"http://{door[1]}:{door[2]}"
        return found

    def logged(self, pattern: re.Pattern[str], count: int = 1, within_s: float = 60) -> list[str]:
        """The log's lines that hold `pattern`, once there are `count`; nobody tells a test of a line."""
        until = time.monotonic() + within_s
        while len(lines := [line for line in self.log().splitlines() if pattern.search(line)]) < count:
            assert time.monotonic() < until, f"{len(lines)} of {count} lines with {pattern.pattern}"
            time.sleep(0.02)
        return lines

    def operate(self, *words: str) -> str:
        """The output of a command, which finds this deployment by its runtime folder."""
        done = command(*words, environ=self.runtime)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # ---- what it holds -----------------------------------------------------------------------

    def states(self) -> dict[str, State]:
        """The state that every live node of this command reports, by name. An AssertionError if the command
        has ended: a test that ends it does so with `stop` or `kill`, and asks no more."""
        assert self.process.poll() is None, f"{self.command} ended by itself: {self.process.returncode}"
        if self.command != "serve":
            return {self.name: _state(self.url if self.command == "frontend" else self.door)}
        pids = {name: int(pid) for name, pid in _STARTED.findall(self.log()) if name != "frontend"}
        alive = {name for name, pid in pids.items() if _alive(pid)}
        found: dict[str, State] = {"frontend": _state(self.url)}
        doors = self._until(lambda found: alive <= found.keys())
        found |= {name: _state(doors[name]) for name in alive}
        return {f"{self.name} {name}": state for name, state in found.items()}

    @property
    def name(self) -> str:
        """One process of all of this test run."""
        return f"{self.command} {self.process.pid}"

    def at_rest(self, within_s: float = REST_S) -> dict[str, State]:
        """Every live node of this deployment holds nothing and nothing is wrong with it; what they say.
        See `rest`; those that do not run `serve` are one deployment."""
        if self.command == "serve":
            return rest([self], within_s)
        return rest([part for part in Served.live if part.command != "serve" and part.line], within_s)

    # ---- the end -----------------------------------------------------------------------------

    def stop(self, *, signals: int = 1, within_s: float = 60, at_rest: bool = True) -> int:
        """Send SIGINT `signals` times; the exit status. Nothing of the family may survive. Before it every
        node must be at rest, unless a test wants the signal in the middle of something."""
        if at_rest:
            self.at_rest()
        family, sockets = self.family(), self._sockets()
        self.process.send_signal(signal.SIGINT)
        for _ in range(signals - 1):
            # Two signals at once are one to the kernel: the first must have been heard.
            self.logged(_DRAINING)
            self.process.send_signal(signal.SIGINT)
        status = self.process.wait(within_s)
        self.forget()
        gone, alive = psutil.wait_procs(family[1:], timeout=30)
        assert not alive, f"left behind: {alive} (ended: {len(gone)})"
        left = sockets & _unix_sockets().keys()
        assert not left, f"unix sockets left behind: {left}"
        return status

    def kill(self) -> None:
        """kill -9, and reap."""
        self.process.kill()
        self.process.wait(60)
        self.forget()

    def forget(self) -> None:
        if self in Served.live:
            Served.live.remove(self)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _sockets(self) -> set[str]:
        """Names of the unix sockets that the family holds."""
        inodes = set()
        for process in self.family():
            try:
                for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                    inodes.add(os.readlink(entry))
            except OSError:
                continue  # it is ending
        return {name for name, inode in _unix_sockets().items() if f"socket:[{inode}]" in inodes}

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.process.poll() is None:
                try:
                    if kind is None and self.line:
                        self.at_rest()
                finally:
                    self.terminate()
            elif kind is None:
                # `stop` and `kill` forget it; whoever else ended it was no test.
                assert self not in Served.live, f"{self.command} ended by itself: {self.process.returncode}"
        finally:
            self.forget()
            if kind is not None:
                sys.stderr.write(f"---- {self.command}\n{self.log()[-6000:]}")
            if self._own_log:
                self._log.unlink()

    def terminate(self) -> None:
        family, sockets = self.family(), self._sockets()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            for process in family:
                process.kill()
            raise
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        assert not alive, f"left behind: {alive}"
        assert not sockets & _unix_sockets().keys(), "unix sockets left behind"


def rest(parts: list[Served], within_s: float = REST_S) -> dict[str, State]:
    """Wait until all live nodes of `parts` are at rest, with nothing wrong and sessions to the living
    only; each `serve` is a deployment, all else are one. What ends last is bounded by a deadline; nobody
    tells a test of it, so it asks again."""
    by_hand = [part for part in parts if part.command != "serve"]
    deployments = [[part] for part in parts if part.command == "serve"]
    deployments += [by_hand] if by_hand else []
    until = time.monotonic() + within_s
    while True:
        states, problems = dict[str, State](), list[str]()
        for deployment in deployments:
            found = _of(deployment)
            states |= found
            problems += _faults(deployment, found)
        if not problems:
            return states
        assert time.monotonic() < until, f"not at rest after {within_s} s: {problems}"
        time.sleep(0.05)


def _of(deployment: list[Served]) -> dict[str, State]:
    states: dict[str, State] = {}
    for part in deployment:
        states |= part.states()
    return states


def _faults(deployment: list[Served], states: Mapping[str, State]) -> list[str]:
    transports = {part.transport for part in deployment if part.command != "frontend"}
    assert len(transports) <= 1, f"one deployment, several transports: {transports}"
    least = {name: count for part in deployment for name, count in part.least.items()}
    registry_at = next((part.name for part in deployment if part.is_registry), "")
    problems = holdings.faults(states, *(transports or {"shm"}), least, registry_at)
    for part in deployment:
        part.least = {name: count for name, count in least.items() if name.startswith(part.name)}
    return problems


def _value(arguments: tuple[str, ...], flag: str, default: str) -> str:
    return arguments[arguments.index(flag) + 1] if flag in arguments else default


def _state(url: str) -> State:
    until = time.monotonic() + REST_S
    while (answer := httpx.get(f"{url}/integrity", timeout=60)).status_code == 504:
        # Its leader has not answered within seconds: it stands still, on a machine that is busy elsewhere.
        assert time.monotonic() < until, f"{url}: {answer.text}"
    assert answer.status_code == 200, f"{url}: {answer.text}"
    return dict(answer.json())


def _words(process: psutil.Process) -> list[str]:
    """Its command line; none of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie is one, too
        return []


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _unix_sockets() -> dict[str, str]:
    """Inodes of this host's named unix sockets that are segue's, by name."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {row[7]: row[6] for row in rows if len(row) > 7 and "segue" in row[7]}
