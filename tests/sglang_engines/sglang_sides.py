"""SGLang engines as processes, for tests and measurements."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from segue.engine.models.model_store import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORDS = ["the", "capital", "of", "France", "is", "Paris", "and", "a", "river", "flows", "through", "it"]
WITHIN_S = 480.0


def prompts(count: int = 50) -> list[str]:
    """Some take two chunks, and each fifth begins as another one does."""
    rng = random.Random(5)
    shared = count // 5
    made = [
        " ".join(rng.choice(WORDS) for _ in range(rng.choice([5, 20, 60, 90]))) for _ in range(count - shared)
    ]
    return made + [f"{made[n]} and {rng.choice(WORDS)}" for n in range(shared)]


class Side:
    """An engine. `probe`: the folder of `sglang_probe`. Each side waits `wait_s` for the other one.
    `retract_each`: it retracts a request each so many steps. `model` is a folder, else the default model."""

    def __init__(
        self,
        mode: str,
        port: int,
        bootstrap: int,
        log: Path,
        probe: Path | None = None,
        wait_s: int = 20,
        retract_each: int = 0,
        model: Path | None = None,
        **options: Any,
    ) -> None:
        env = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": f"{HERE}:{HERE / 'absent'}:{ROOT / 'src'}",
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(wait_s),
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(wait_s),
        }
        if probe is not None:
            env["SGLANG_PROBE"] = str(probe)
        if retract_each:
            env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(retract_each)}
        ranks = options.get("tp_size", 1) * options.get("dp_size", 1)
        if ranks > 1:  # SGLang wants a NUMA node, or a list of cores, for each of them
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(ranks)
            )
        model = model or resolve_model(DEFAULT_MODEL, progress=lambda *_: None)
        arguments = [mode, str(model), str(port), str(bootstrap), json.dumps(options)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "sglang_side.py", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        self.log = log
        self.port = port
        self._answers: dict[str, dict[str, Any]] = {}
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._number = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self, job: str = "ready", within_s: float = WITHIN_S) -> dict[str, Any]:
        """The answer to a job."""
        end = time.monotonic() + within_s
        while job not in self._answers:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no answer within {within_s} s: {self.log}") from None
            assert line, f"the engine has ended: {self.log}"
            found = json.loads(line)
            self._answers[found["id"]] = found
        return self._answers.pop(job)

    def ask(self, asked: list[str], rooms: list[int] | None = None, tokens: int = 8, **job: Any) -> str:
        """Begin a job; returns its name."""
        self._number += 1
        name = f"job{self._number}"
        self._write({"id": name, "prompts": asked, "rooms": rooms, "tokens": tokens, **job})
        return name

    def abort(self, job: str) -> None:
        """The client of a job leaves."""
        self._write({"abort": job})

    def _write(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")

    def signal(self, number: int) -> None:
        """Send a signal to the engine and all its processes."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        if self.process.returncode is None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self._reader.join()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Sides:
    """Engines that were started in `folder`, where their logs are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sides: list[Side] = []
        self.rng = random.Random(6)

    def start(self, mode: str, bootstrap: int = 31098, port: int = 0, **options: Any) -> Side:
        """Start one; it is ready after `answer()`."""
        port = port or 31000 + 40 * len(self.sides)
        log = self.folder / f"{mode}{len(self.sides)}.log"
        self.sides.append(Side(mode, port, bootstrap, log, self.folder, **options))
        return self.sides[-1]

    def rooms(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 2**63) for _ in range(count)]

    def sizes(self) -> dict[str, dict[str, int]]:
        """The tables of the engines that run, by role and process."""
        found = {}
        for path in self.folder.glob("sizes-*-*"):
            pid = path.name.rsplit("-", 1)[1]
            if pid.isdigit() and Path("/proc", pid).exists():
                found[path.name.removeprefix("sizes-")] = json.loads(path.read_text())
        return found

    def close(self) -> None:
        for side in self.sides:
            side.end()


def until(reached: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end, "not reached"
        time.sleep(0.05)
