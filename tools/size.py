"""The size of a checkout in code lines, and what one request runs through.

    .venv/bin/python tools/size.py [CHECKOUT]     CHECKOUT: a folder with `src/segue` (default: this one)

A code line holds code: blank lines, comments and docstrings do not count. A message is a struct with a
msgspec tag. `--static` leaves out the figures that need a run. They are of one request to `segue serve` with
a random model of two layers: each process is traced with `sys.setprofile` while the request runs. A function
counts if it runs in each of several requests. Thread switches are those of the request with the fewest,
since keep-alives and probes run beside it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import tokenize
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("kv", "engine", "server", "cli", "integrations")
ROLES = ("frontend", "prefill", "decode")
WARM_UP, REQUESTS, START_S = 2, 7, 120.0
#: Python runs it at the start of each process, before anything else. It counts between two words of the
#: socket, and answers the second one. A switch: the next call of a function of segue is in another thread.
_TRACE_PROCESS = """
import json, os, socket, sys, threading
control = socket.socket(socket.AF_UNIX)
control.connect(os.environ["SIZE_SOCKET"])
below = os.environ["SIZE_SOURCE"]
ran, thread, switches, counting = set(), 0, 0, False
def seen(frame, event, arg):
    global thread, switches
    if counting and event == "call" and (code := frame.f_code).co_filename.startswith(below):
        ran.add((code.co_filename, code.co_qualname))
        if thread != (now := threading.get_ident()):
            thread, switches = now, switches + (thread != 0)
def obey():
    global counting, thread, switches
    stream = control.makefile("rw")
    print(json.dumps(sys.orig_argv), file=stream, flush=True)
    for word in stream:
        counting = word == "begin\\n"
        print(json.dumps([sorted(ran), switches]), file=stream, flush=True)
        if not counting:
            ran.clear()
            thread = switches = 0
threading.Thread(target=obey, daemon=True).start()
threading.setprofile(seen)
sys.setprofile(seen)
sys.setswitchinterval(1.0)
"""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: A function: its file, its name within the file.
Function = tuple[str, str]


class Size(NamedTuple):
    """The code of a file or of several."""

    files: int
    lines: int
    statements: int
    messages: int


def size_of(path: Path) -> Size:
    """The code of one file."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    statements = messages = 0
    for node in ast.walk(ast.parse(text)):
        statements += isinstance(node, ast.stmt)
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
            statements -= 1
        if isinstance(node, ast.ClassDef):
            messages += any(word.arg in ("tag", "tag_field") for word in node.keywords)
    return Size(1, len(lines), statements, messages)


def total(sizes: Iterable[Size]) -> Size:
    """The sum of several sizes."""
    return Size(*(sum(column) for column in zip(Size(0, 0, 0, 0), *sizes, strict=True)))


def folder_size(*folders: Path) -> Size:
    """The code below some folders, which need not exist."""
    return total(size_of(path) for folder in folders for path in folder.rglob("*.py"))


class Traced:
    """The traced processes of one deployment: each connects when it starts and names its command."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "control"))
        self._listener.listen()
        self._listener.settimeout(START_S)
        self._streams: dict[str, Any] = {}

    def find(self) -> None:
        """Wait until a process of each role has connected. TimeoutError."""
        while not self._streams.keys() >= set(ROLES):
            connection, _ = self._listener.accept()
            connection.settimeout(START_S)
            stream = connection.makefile("rw")
            words = json.loads(stream.readline())
            self._streams.update({role: stream for role in ROLES if role in words})

    def tell(self, word: str) -> dict[str, tuple[list[list[str]], int]]:
        """`begin` or `end`; each role's functions and thread switches since `begin`."""
        found = {}
        for role in ROLES:
            print(word, file=self._streams[role], flush=True)
        for role in ROLES:
            found[role] = tuple(json.loads(self._streams[role].readline()))
        return found

    def close(self) -> None:
        """Close the listener and all connections."""
        self._listener.close()
        for stream in self._streams.values():
            stream.close()


@contextlib.contextmanager
def deployment(source: Path, folder: Path) -> Iterator[tuple[str, Traced]]:
    """`segue serve` of `source` on a free port, traced; its URL. RuntimeError if it does not get ready."""
    sys.path.insert(0, str(ROOT / "tests" / "e2e"))
    os.environ.setdefault("TQDM_DISABLE", "1")
    import tiny_model

    (folder / "sitecustomize.py").write_text(_TRACE_PROCESS)
    traced = Traced(folder)
    environ = os.environ | {
        "PYTHONPATH": f"{folder}:{source}",
        "SIZE_SOCKET": str(folder / "control"),
        "SIZE_SOURCE": f"{source}/segue/",
        "HF_HUB_OFFLINE": "1",
    }
    model = str(tiny_model.save(folder / "tiny"))
    # Own kernels are compiled for each tree; a cache of its own keeps the trees apart.
    flags = ["--model", model, "--port", "0", "--cache", str(folder / "cache"), "--kv-gib", "0.05"]
    command = [sys.executable, "-m", "segue.cli.main", "serve", *flags]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        traced.find()
        assert process.stdout is not None
        ready = (re.match(r"ready (http\S+)", line) for line in process.stdout)
        url = next((found[1] for found in ready if found), None)
        watchdog.cancel()
        if url is None:
            raise RuntimeError(f"segue serve did not get ready:\n{(folder / 'log').read_text()[-2000:]}")
        yield url, traced
    finally:
        watchdog.cancel()
        process.terminate()
        process.wait(60)
        traced.close()


def one_request(source: Path) -> dict[str, tuple[set[Function], int]]:
    """For each role, functions of segue that run in each of `REQUESTS` requests, and how often the thread
    changes in the one with the fewest changes."""
    functions: dict[str, list[set[Function]]] = defaultdict(list)
    switches: dict[str, list[int]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="segue-size-") as name,
        deployment(source, Path(name)) as (url, traced),
    ):
        for number in range(WARM_UP + REQUESTS):
            prompt = f"{number} times two is how much, and why is it that much?"  # no prefix of another one
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": True}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            traced.tell("begin")
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
            counted = traced.tell("end")
            if not text.rstrip().endswith("[DONE]"):
                raise RuntimeError(f"the request failed: {text[-500:]}")
            if number >= WARM_UP:
                for role, (ran, changes) in counted.items():
                    functions[role].append({(file, name) for file, name in ran})
                    switches[role].append(changes)
    return {role: (set.intersection(*functions[role]), min(switches[role])) for role in ROLES}


def main() -> int:
    """Print the tables; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, metavar="CHECKOUT")
    parser.add_argument("--static", action="store_true", help="run no code: leave out what needs a request")
    args = parser.parse_args()
    root = args.checkout.resolve()
    source = root / "src"
    if not (source / "segue" / "__init__.py").is_file():
        parser.error(f"{root} holds no folder src/segue; give a checkout")
    missing = [name for name in ("msgspec", "torch") if importlib.util.find_spec(name) is None]
    if missing and not args.static:
        parser.error(
            f"{sys.executable} has no {' and no '.join(missing)}: run it with .venv/bin/python, or give "
            "--static"
        )
    sizes = {name: folder_size(source / "segue" / name) for name in PRODUCT}
    rows = {"product": total(sizes.values()), **sizes}
    rows["lab"] = folder_size(source / "segue" / "lab", root / "lab")
    rows |= {name: folder_size(root / name) for name in ("tests", "bench", "tools")}
    print("| | files | code lines | statements | messages |\n|---|---|---|---|---|")
    for name, size in rows.items():
        print(f"| {name} | {size.files} | {size.lines:,} | {size.statements:,} | {size.messages} |")
    if args.static:
        return 0
    print("\n| one request | functions | files | thread switches |\n|---|---|---|---|")
    measured = one_request(source)
    for role, (ran, switches) in measured.items():
        print(f"| {role} | {len(ran)} | {len({file for file, _ in ran})} | {switches} |")
    both = measured["prefill"][0] | measured["decode"][0]
    switches = measured["prefill"][1] + measured["decode"][1]
    print(f"| prefill and decode | {len(both)} | {len({file for file, _ in both})} | {switches} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
