"""A real `segue serve` in a subprocess, with real model, processes and sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import psutil


class Served:
    """`segue serve` with `arguments`; a context manager that ends it and checks what it leaves."""

    def __init__(self, *arguments: str, command: str = "serve", start_s: float = 180) -> None:
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log", delete=False)  # noqa: SIM115
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "segue.cli.main", command, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        self.url = self.line.removeprefix("ready ")
        if not self.line.startswith("ready "):
            self.process.stdout.close()
            self.process.wait(start_s)
            raise AssertionError(f"not ready: exit {self.process.returncode}\n{self.log()}")

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def instances(self, word: str) -> list[psutil.Process]:
        """Descendants whose command has `word` as its subcommand."""
        return [p for p in self.family()[1:] if word in p.cmdline()[:5]]

    def stop(self, *, signals: int = 1, within_s: float = 60) -> int:
        """Send SIGINT `signals` times; the exit status. Nothing of the family may survive."""
        family = self.family()
        for _ in range(signals):
            self.process.send_signal(signal.SIGINT)
        status = self.process.wait(within_s)
        gone, alive = psutil.wait_procs(family[1:], timeout=5)
        assert not alive, f"left behind: {alive} (ended: {len(gone)})"
        return status

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            family = self.family()
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                for process in family:
                    process.kill()
                raise
        if kind is not None:
            sys.stderr.write(self.log()[-6000:])
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        os.unlink(self._log.name)
