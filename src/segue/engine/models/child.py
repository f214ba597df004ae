"""Work that converts a model runs in a child process, which says in JSON lines how far it is.

Its memory is given back when it ends, and it can be ended at any time. Messages are `{"stage", "done",
"total"}`, and as the last one `{"error"}` if it fails.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from segue.kv import ConfigError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

#: Called with a stage (`download`, `unpack`, `hash`, `wait`, `convert`), the bytes done and the
#: bytes in all (0: unknown).
Progress = Callable[[str, int, int], None]


# --- the parent's side ------------------------------------------------------------------------


def run(
    module: str,
    arguments: list[str],
    environment: Mapping[str, str],
    progress: Progress,
    *,
    deadline_s: float,
    percent: re.Pattern[bytes],
) -> tuple[int, str]:
    """Run `python -m module arguments` and pass its progress on; where it says nothing itself, `percent`
    finds it in the output of its libraries. Its exit status, and why it failed if that is not 0.

    Raises ConfigError with the child's own word, and TimeoutError after `deadline_s`; nothing is left
    running.
    """
    environ = os.environ | environment
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_source_root(), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    )
    deadline = time.monotonic() + deadline_s
    error, noise, total = "", b"", 0
    try:
        for stream, line in _lines(child, deadline):
            if stream == "err":
                noise = (noise + line + b"\n")[-4000:]
                found = percent.search(line)
                if found:
                    progress("convert", total * int(found[1]) // 100, total)
                continue
            message = json.loads(line)
            if "stage" in message:
                total = message["total"]
                progress(message["stage"], message["done"], total)
            error = message.get("error", error)
        try:
            status = child.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as exc:
            raise TimeoutError from exc
    finally:
        _end(child)
    if error:
        raise ConfigError(error)
    if status == -signal.SIGKILL:
        return status, "it was killed, perhaps for lack of memory"
    return status, noise.decode(errors="replace").strip().rpartition("\n")[2] or "no message"


def _source_root() -> str:
    """The folder `segue` was imported from, so that the child runs the same code."""
    return str(Path(__file__).resolve().parents[3])


def _lines(child: subprocess.Popen[bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
    """Lines of the child's output ("out") and errors ("err") as they come; `\\r` ends one too.
    TimeoutError at `deadline`."""
    assert child.stdout is not None
    assert child.stderr is not None
    rest = {"out": b"", "err": b""}
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, "out")
        selector.register(child.stderr, selectors.EVENT_READ, "err")
        while selector.get_map():
            wait_s = max(0.0, deadline - time.monotonic())
            # Twice: whoever was stopped for longer is told of nothing, and what was said meanwhile waits.
            ready = selector.select(wait_s) or selector.select(0.0)
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                *whole, rest[key.data] = re.split(rb"[\r\n]", rest[key.data] + data)
                rest[key.data] = rest[key.data][-65536:]
                for line in whole:
                    if line.strip():
                        yield key.data, line


def _end(child: subprocess.Popen[bytes]) -> None:
    """Make sure that the child is gone; it removes its temporary files when asked to end."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


# --- the child's side -------------------------------------------------------------------------


def say(**message: object) -> None:
    """Send one message to the parent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def report(stage: str, done: int, total: int) -> None:
    """Tell the parent how far it is; see `Progress`."""
    say(stage=stage, done=done, total=total)


def is_no_room(exc: BaseException) -> bool:
    """Whether `exc` says that the disk is full; libraries in between keep only the text."""
    if isinstance(exc, OSError) and exc.errno in _NO_ROOM:
        return True
    return bool(re.search(r"No space left|os error (28|122|27)\b|quota exceeded", str(exc)))


def work(job: Callable[[], object], explain: Callable[[Exception], str]) -> NoReturn:
    """The child's main: run `job`, and say a ConfigError's text, or what `explain` makes of another
    exception. SIGTERM leaves through every `finally`."""

    def stop(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    status = 1
    with contextlib.suppress(KeyboardInterrupt):
        try:
            job()
            status = 0
        except ConfigError as exc:
            say(error=exc.info.text)
        except Exception as exc:  # the process's edge: the parent raises what is said here
            say(error=explain(exc))
        sys.exit(status)
    sys.exit(130)
