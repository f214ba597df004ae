"""The size of the source: lines by package, modules that the library loads, duplicate and private names.

    .venv/bin/python tools/size.py [SRC]     SRC: a folder that holds `segue` (default: this checkout's `src`)

Run it on two trees to compare them. Most figures are read from the source. Two need a run (`--static` leaves
them out): the files of a hand-off between two engines of one process (`examples/own_memory.py`), and the
files and thread switches of one request to `segue serve` with a random model of two layers. Each process is
traced with `sys.setprofile` while the request runs. A file counts if it runs in each of several requests, and
switches are those of the request with the fewest: keep-alives and probes run beside some of them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: The library's own entry, in trees with and without a face.
ENTRIES = ("segue.kv", "segue.conn.manager")
ROLES = ("frontend", "prefill", "decode")
WARM_UP, REQUESTS, START_S = 2, 7, 120.0
_TRACE_SCRIPT = """
import runpy, sys, threading
files = set()
def seen(frame, event, arg):
    name = frame.f_code.co_filename
    if "/segue/" in name:
        files.add(name)
threading.setprofile(seen)
sys.setprofile(seen)
runpy.run_path(sys.argv[1], run_name="__main__")
sys.setprofile(None)
print("files", len(files))
"""
#: Python runs it at the start of each process, before anything else. It counts between two words of the
#: socket, and answers the second one. A switch: the next call of a function of segue is in another thread.
_TRACE_PROCESS = """
import json, os, socket, sys, threading
control = socket.socket(socket.AF_UNIX)
control.connect(os.environ["SIZE_SOCKET"])
below = os.environ["SIZE_SOURCE"]
files, thread, switches, counting = set(), 0, 0, False
def seen(frame, event, arg):
    global thread, switches
    if counting and event == "call" and frame.f_code.co_filename.startswith(below):
        files.add(frame.f_code.co_filename)
        if thread != (now := threading.get_ident()):
            thread, switches = now, switches + (thread != 0)
def obey():
    global counting, thread, switches
    stream = control.makefile("rw")
    print(json.dumps(sys.orig_argv), file=stream, flush=True)
    for word in stream:
        counting = word == "begin\\n"
        print(json.dumps([sorted(files), switches]), file=stream, flush=True)
        if not counting:
            files.clear()
            thread = switches = 0
threading.Thread(target=obey, daemon=True).start()
threading.setprofile(seen)
sys.setprofile(seen)
sys.setswitchinterval(1.0)
"""


class Tree:
    """The modules below one `segue`, and what each imports of the others."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.paths = {self._name(path): path for path in sorted((source / "segue").rglob("*.py"))}
        self.lines = {name: len(path.read_text().splitlines()) for name, path in self.paths.items()}
        self.imports: dict[str, set[str]] = {}
        self.private: list[str] = []
        for name, path in self.paths.items():
            self.imports[name] = set(self._imported(name, ast.parse(path.read_text())))

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.source).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imported(self, name: str, tree: ast.Module) -> list[str]:
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.append(whole if whole in self.paths else node.module)
                    hidden = alias.name.startswith("_") and alias.name != "__version__"
                    if hidden and node.module in self.paths and package(node.module) != package(name):
                        self.private.append(f"{name}: {whole}")
        return [module for module in found if module in self.paths]

    def closure(self, entry: str) -> set[str]:
        """Every module that the entry loads once each of its names was asked for."""
        seen: set[str] = set()
        left = [entry]
        while left:
            module = left.pop()
            if module not in seen:
                seen.add(module)
                left += self.imports[module]
        return seen

    def twice(self) -> dict[str, list[str]]:
        """Names that several modules have."""
        found = defaultdict(list)
        for name, path in self.paths.items():
            if path.stem not in ("__init__", "__main__"):
                found[path.stem].append(name)
        return {stem: names for stem, names in found.items() if len(names) > 1}


def package(module: str) -> str:
    """The folder below `segue` that a module is in; of the large ones the folder within."""
    parts = module.split(".")[1:]
    return "/".join(parts[:2] if parts[:1] in (["kv"], ["server"], ["lab"]) and len(parts) > 2 else parts[:1])


#: Underscored names of Python itself that are no part of another module's inside.
_PUBLIC = {"_exit", "_replace", "_asdict", "_fields", "_make"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def reaches_inside(test: ast.AST, imported: set[str]) -> bool:
    """Whether a test uses a private attribute of an object other than itself, replaces one by name, or uses
    one of the private names that its file has `imported` from segue."""
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if node.func.attr in ("setattr", "delattr") and any(
                isinstance(text, str) and _is_private(text.rpartition(".")[2]) for text in texts
            ):
                return True
        elif isinstance(node, ast.Name) and node.id in imported:
            return True
    return False


def inside_tests(folder: Path) -> tuple[int, int]:
    """The number of tests below `folder`, and of those that use private names."""
    tests = inside = 0
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("segue")
            for alias in node.names
            if _is_private(alias.name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                tests += 1
                inside += reaches_inside(node, imported)
    return tests, inside


def handed_over(source: Path) -> int:
    """Files of segue that run while two engines of one process hand KV over."""
    example = source.parent / "examples" / "own_memory.py"
    environ = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-c", _TRACE_SCRIPT, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environ)
    return int(done.stdout.split()[-1])


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

    def tell(self, word: str) -> dict[str, tuple[list[str], int]]:
        """`begin` or `end`; each role's files and thread switches since `begin`."""
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


def one_request(source: Path) -> dict[str, tuple[set[str], int]]:
    """Files of segue that run in each process of a deployment in each of `REQUESTS` requests, and how often
    the thread changes in the one with the fewest changes."""
    files: dict[str, list[set[str]]] = defaultdict(list)
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
                    files[role].append(set(ran))
                    switches[role].append(changes)
    return {role: (set.intersection(*files[role]), min(switches[role])) for role in ROLES}


def main() -> int:
    """Print the tables; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", type=Path, default=ROOT / "src", metavar="SRC")
    parser.add_argument("--static", action="store_true", help="run no code: leave out what needs a request")
    args = parser.parse_args()
    source = args.source.resolve()
    if not (source / "segue" / "__init__.py").is_file():
        parser.error(f"{source} holds no folder segue; give the folder src of a checkout")
    missing = [name for name in ("msgspec", "torch") if importlib.util.find_spec(name) is None]
    if missing and not args.static:
        parser.error(
            f"{sys.executable} has no {' and no '.join(missing)}: run it with .venv/bin/python, or give "
            "--static"
        )
    tree = Tree(source)
    by_package: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, lines in tree.lines.items():
        by_package[package(name)] += lines
        files[package(name)] += 1
    print("| package | files | lines |\n|---|---|---|")
    for name, lines in sorted(by_package.items()):
        print(f"| {name or '.'} | {files[name]} | {lines} |")
    entry = next(entry for entry in ENTRIES if entry in tree.paths)
    closure = tree.closure(entry)
    tests = list((source.parent / "tests").rglob("*.py"))
    print("\n| figure | |\n|---|---|")
    print(f"| lines of src | {sum(tree.lines.values())} |")
    print(f"| lines of tests | {sum(len(path.read_text().splitlines()) for path in tests)} |")
    print(f"| modules that `{entry}` loads | {len(closure)} |")
    print(f"| their lines | {sum(tree.lines[name] for name in closure)} |")
    print(f"| module names that stand in several places | {len(tree.twice())} |")
    print(f"| private names imported over a package's edge | {len(tree.private)} |")
    count, inside = inside_tests(source.parent / "tests")
    print(f"| tests, and those that use private names | {count}; {inside} |")
    if args.static:
        return 0
    print(f"| files that run in one hand-off (`examples/own_memory.py`) | {handed_over(source)} |")
    print("\n| one request | files | thread switches |\n|---|---|---|")
    measured = one_request(source)
    for role, (ran, switches) in measured.items():
        print(f"| {role} | {len(ran)} | {switches} |")
    print(f"| all three | {len(set().union(*(ran for ran, _ in measured.values())))} | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
