"""A new user's way from nothing but Python to an answer with a key over TLS: `python bench/first_hour.py`.

In a new folder, with an empty home and no cache: clones this tree, runs `make setup`, makes a key and a
certificate, starts `segue serve`, runs the `try:` and `look:` lines that it prints and `segue bench`, and
ends it. Each line that is printed is written to `--log` with its seconds. Each step's seconds, megabytes on
disk and lines are a table at the end. Packages come from where pip's configuration says, so the seconds of
`make setup` are those of that index.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from recorded import commit

ROOT = Path(__file__).resolve().parents[1]
KEY = "(umask 077; head -c 24 /dev/urandom | base64 > keys)"
CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost "
    "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out cert.pem 2>/dev/null"
)
SERVE = ".venv/bin/segue serve --api-key-file keys --https-cert cert.pem --https-key key.pem --port {port}"
BENCH = ".venv/bin/segue bench --requests 4 --warmup 1 --input-tokens 64 --output-tokens 16"
STEP_S = 1800.0


class Way:
    """The steps so far, in `folder`; every line goes to `log` and to the terminal."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self.here = folder
        self.rows: list[tuple[str, float, float, int]] = []
        self._log = log.open("w")
        self._began = time.monotonic()
        home = folder / "home"
        home.mkdir()
        dropped = ("PYTHONPATH", "SEGUE_CACHE", "XDG_CACHE_HOME", "HF_HOME", "VIRTUAL_ENV")
        self.environ = {k: v for k, v in os.environ.items() if k not in dropped}
        self.environ |= {"HOME": str(home), "PIP_NO_CACHE_DIR": "1", "XDG_RUNTIME_DIR": str(home)}

    def say(self, line: str) -> None:
        """Write a line with the seconds since the beginning."""
        text = f"{time.monotonic() - self._began:7.1f} {line.replace(str(self.folder), '~')}"
        print(text, flush=True)
        self._log.write(text + "\n")
        self._log.flush()

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command as a shell does."""
        self.say(f"$ {command}")
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}" if command.startswith(".venv") else command],
            cwd=self.here,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def step(self, name: str, run: Callable[[], Iterator[str]]) -> list[str]:
        """Do a step and note what it took; its lines."""
        began, before = time.monotonic(), megabytes(self.folder)
        lines = []
        for line in run():
            self.say(line)
            lines.append(line)
        took = time.monotonic() - began
        self.rows.append((name, took, megabytes(self.folder) - before, len(lines)))
        return lines

    def command(self, name: str, command: str) -> list[str]:
        """A step that is one command; the end of the script if it fails."""

        def run() -> Iterator[str]:
            process = self.start(command)
            killer = threading.Timer(STEP_S, process.kill)
            killer.start()
            assert process.stdout is not None
            yield from (line.rstrip("\n") for line in process.stdout)
            killer.cancel()
            if process.wait() != 0:
                sys.exit(f"{name}: exit status {process.returncode}")

        return self.step(name, run)


def megabytes(folder: Path) -> float:
    """What the folder takes on disk."""
    found = subprocess.run(["du", "-sk", str(folder)], capture_output=True, text=True, check=False)
    return int(found.stdout.split()[0]) / 1024


def until_ready(process: subprocess.Popen[str]) -> Iterator[str]:
    """The lines of `segue serve` until it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip("\n")
        if line.startswith("ready "):
            return
    sys.exit("segue serve ended before it was ready")


def rest_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Ctrl-C, and the lines until the end."""
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    yield from (line.rstrip("\n") for line in process.stdout)
    if process.wait() != 0:
        sys.exit(f"segue serve: exit status {process.returncode}")


def after(mark: str, lines: list[str]) -> str:
    """The rest of the line that begins with `mark`."""
    return next(line.removeprefix(mark) for line in lines if line.startswith(mark))


def main() -> None:
    """Walk the way once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--log", type=Path, default=Path("first_hour.log"))
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as made:
        way = Way(Path(made), args.log)
        way.say(f"commit {commit()}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        way.command("clone", f"git clone --quiet --depth 1 file://{ROOT} segue")
        way.here = way.folder / "segue"
        way.command("`make setup`", "make setup")
        way.command("a key and a certificate", f"{KEY} && {CERTIFICATE}")
        server = way.start(SERVE.format(port=args.port))
        killer = threading.Timer(STEP_S, server.kill)
        killer.start()
        try:
            lines = way.step("`segue serve` until `ready`", lambda: until_ready(server))
            answer = way.command("the `try:` line", after("try: ", lines))
            assert any("content" in line for line in answer), "there is no answer"
            way.command("the `look:` line", after("look: ", lines))
            way.command("`segue bench` without URL, key or certificate", BENCH)
            way.step("Ctrl-C", lambda: rest_of(server))
        finally:
            killer.cancel()
            if server.poll() is None:
                server.kill()
        way.say("| step | seconds | MB on disk | lines |")
        way.say("|---|---|---|---|")
        for name, seconds, mb, count in way.rows:
            way.say(f"| {name} | {seconds:.1f} | {mb:.0f} | {count} |")


if __name__ == "__main__":
    main()
