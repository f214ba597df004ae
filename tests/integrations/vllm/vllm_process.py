"""One engine (`vllm_pair`) in a process of its own, to be stopped and killed: driven by lines of JSON.

`python vllm_process.py '{"role": …, "policy": …, "shared": …, "settings": {…}}'`. Commands: `{"add": name,
"tokens": n, "params": …}`, `{"run": bool}`, `{"step": count}`, `{"sends_only": tokens}`, `{}`. Each is
answered with what the engine is like; the first line is it, too.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from vllm_bench import request
from vllm_pair import TensorWorker, expected, held_by, landed, make_engine, run_step

from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy
from segue.kv import Role

STARTS_S = 60.0
ANSWERS_S = 20.0


class Remote:
    """The engine in its process, as a test drives it."""

    def __init__(
        self, stack: ExitStack, role: Role, policy: LoadFailurePolicy, shared: bool, **settings: Any
    ) -> None:
        options = {"role": role, "policy": policy, "shared": shared, "settings": settings}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        stack.callback(self.close)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.incarnation: str = self._answer(STARTS_S)["incarnation"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def _answer(self, within_s: float) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.get(timeout=within_s))
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        """Give it a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        return self._answer(ANSWERS_S)

    def until(self, condition: Callable[[dict[str, Any]], object], within_s: float = 30.0) -> dict[str, Any]:
        """Ask until `condition` holds of its answer."""
        deadline = time.monotonic() + within_s
        while not condition(found := self.ask()):
            assert time.monotonic() < deadline, found
            time.sleep(0.005)
        return found

    def signal(self, number: int) -> None:
        """Send a signal, and wait for the end if it is SIGKILL."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(20)

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def serve(options: dict[str, Any]) -> None:
    """Step, and answer commands, until stdin ends."""
    with ExitStack() as stack:
        role, policy = Role(options["role"]), LoadFailurePolicy(options["policy"])
        settings = ConnectorSettings(**options["settings"])
        engine = make_engine(stack, role, settings, policy, shared=options["shared"])
        worker = engine.worker
        assert isinstance(worker, TensorWorker)
        prompts: dict[str, int] = {}
        outcomes: dict[str, int] = {}

        def say() -> None:
            for code, count in engine.table.take_figures().outcomes.items():
                outcomes[code] = outcomes.get(code, 0) + count
            found = {
                "incarnation": worker.side.address.leader.incarnation,
                "ends": engine.ends,
                "answers": engine.answers,
                "loaded": engine.loaded,
                "right": {
                    name: torch.equal(kv, expected(range(prompts[name]))) for name, kv in worker.kv.items()
                },
                "outcomes": outcomes,
                "held": held_by(engine),
                "free": len(engine.pool.free) == len(engine.pool.blocks),
                "landed": {name: landed(engine, name) for name in engine.requests},
            }  # fmt: skip
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()

        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_all, args=(lines,), daemon=True).start()
        running = True
        say()
        while True:
            try:
                line = lines.get(timeout=0.001 if running else None)
            except queue.Empty:
                run_step(engine)
                continue
            if not line:
                return
            command = json.loads(line)
            running = command.get("run", running)
            worker.sends_only = command.get("sends_only", worker.sends_only)
            if "add" in command:
                prompts[command["add"]] = command["tokens"]
                engine.add(request(command["add"], command["tokens"], command["params"]))
            for _ in range(command.get("step", 0)):
                run_step(engine)
            say()


def _read_all(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
