"""The rules of the house as functions over source text, so that the rules themselves can be tested."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src" / "segue"

#: Each room's floor. A room imports only from its own floor or below.
FLOORS = {
    "core": 0,
    "layout": 1,
    "handoff": 1,
    "balance": 1,
    "advise": 1,
    "transport": 2,
    "session": 2,
    "bootstrap": 2,
    "conn": 3,
    "engine": 3,
    "roles": 4,
    "fleet": 4,
    "serve": 5,
    "frontend": 5,
    "cli": 6,
}

#: Side rooms stand beside the house: what each may import, and who may import it.
SIDE_MAY_IMPORT = {
    "observe": {"core"},
    "sim": set(FLOORS) - {"cli"},
    "integrations": set(FLOORS) - {"cli"},
}
SIDE_MAY_BE_IMPORTED_BY = {
    "observe": {"serve", "fleet", "frontend", "cli", "sim", "integrations"},
    "sim": {"cli"},
    "integrations": {"cli"},
}

PURE = {"core", "layout", "handoff", "balance", "advise", "roles"}
#: Modules of other rooms that decide only.
PURE_MODULES = {
    "segue.server.fleet.replica",
    "segue.server.fleet.router",
    "segue.server.fleet.fleet_settings",
}

#: What a pure room must not touch: sockets, threads, clocks, files, processes, torch, HTTP.
IMPURE_MODULES = {
    "accelerate",
    "aiohttp",
    "anyio",
    "asyncio",
    "concurrent",
    "datetime",
    "fcntl",
    "http",
    "httptools",
    "httpx",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "prometheus_client",
    "psutil",
    "queue",
    "requests",
    "rich",
    "safetensors",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "socketserver",
    "ssl",
    "starlette",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "transformers",
    "urllib",
    "uvicorn",
    "uvloop",
}

#: Modules that turn bytes into code.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "hasattr"}


@dataclass(frozen=True)
class Source:
    """One module: its dotted name under `segue` and its tree."""

    name: str
    tree: ast.Module
    is_package: bool = False

    @property
    def room(self) -> str:
        return self.name.split(".")[1] if "." in self.name else ""


def parse(name: str, text: str, is_package: bool = False) -> Source:
    return Source(name, ast.parse(text, filename=name), is_package)


def sources() -> Iterator[Source]:
    for path in sorted(SRC.rglob("*.py")):
        parts = ["segue", *path.relative_to(SRC).with_suffix("").parts]
        package = parts[-1] == "__init__"
        yield parse(".".join(parts[:-1] if package else parts), path.read_text(), package)


def imported_modules(source: Source) -> Iterator[str]:
    """Absolute dotted names of everything `source` imports, wherever in the file it does."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = source.name if source.is_package else source.name.rpartition(".")[0]
                for _ in range(node.level - 1):
                    package = package.rpartition(".")[0]
                base = f"{package}.{base}".rstrip(".")
            yield base
            # `from segue import core` and `from segue.kv import manager` name modules too.
            for alias in node.names:
                yield f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _called(node).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def imported_rooms(source: Source) -> set[str]:
    rooms = set()
    for module in imported_modules(source):
        parts = module.split(".")
        if parts[0] == "segue" and len(parts) > 1 and (SRC / parts[1]).is_dir():
            rooms.add(parts[1])
    return rooms


def floor_faults(source: Source) -> list[str]:
    """Imports that go upward, or into or out of a side room that does not allow it."""
    room = source.room
    faults = []
    for other in sorted(imported_rooms(source) - {room}):
        if other in SIDE_MAY_BE_IMPORTED_BY:
            legal = room in SIDE_MAY_BE_IMPORTED_BY[other]
        elif room in SIDE_MAY_IMPORT:
            legal = other in SIDE_MAY_IMPORT[room]
        elif room == "":
            legal = False
        else:
            legal = FLOORS[other] <= FLOORS[room]
        if not legal:
            faults.append(f"{source.name} imports segue.{other}, which its room must not")
    return faults


def purity_faults(source: Source) -> list[str]:
    if source.room not in PURE and source.name not in PURE_MODULES:
        return []
    return [
        f"{source.name} is pure and imports {module}"
        for module in sorted(set(imported_modules(source)))
        if module.split(".")[0] in IMPURE_MODULES
    ]


def safety_faults(source: Source) -> list[str]:
    """pickle and its kin, eval and exec, `__del__`, probing by `hasattr`."""
    faults = [
        f"{source.name} imports {module}"
        for module in set(imported_modules(source))
        if module.split(".")[0] in UNSAFE_MODULES
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            faults.append(f"{source.name}:{node.lineno} has a __del__")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            faults.append(f"{source.name}:{node.lineno} calls {node.func.id}")
        elif isinstance(node, ast.Call) and _called(node) == "torch.load" and not _weights_only(node):
            faults.append(f"{source.name}:{node.lineno} calls torch.load without weights_only=True")
    return faults


#: Where tasks are made: the three ways to run one, and the simulator, whose loop ends the run at an exception
#: that nobody took.
TASK_MAKERS = {"segue.kv.session.tasks"}
TASK_CALLS = {"create_task", "ensure_future", "run_coroutine_threadsafe", "TaskGroup"}
#: These wait for the result themselves.
TASK_WAITERS = {"segue.kv.io": {"run_coroutine_threadsafe"}}


def task_faults(source: Source) -> list[str]:
    """A task beside `segue.kv.session.tasks`: what it raises is seen by nobody."""
    if source.name in TASK_MAKERS or source.room == "sim":
        return []
    forbidden = TASK_CALLS - TASK_WAITERS.get(source.name, set())
    faults = []
    for node in ast.walk(source.tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            name = next((alias.name for alias in node.names if alias.name in forbidden), "")
        if name in forbidden:
            faults.append(f"{source.name}:{getattr(node, 'lineno', 0)} uses {name}, not session.tasks")
    return faults


def guard_faults(source: Source) -> list[str]:
    """uvicorn in another module than the one that guards every HTTP door with deadlines and bounds."""
    if source.name == "segue.server.http.guarded_http":
        return []
    return [
        f"{source.name} imports {module}: an HTTP server without a guard"
        for module in sorted(set(imported_modules(source)))
        if module.split(".")[0] in {"uvicorn", "aiohttp", "hypercorn"}
        or module in {"http.server", "socketserver"}
    ]


#: Parts of rich that interpret no markup by themselves.
RICH_WITHOUT_MARKUP = {
    "rich.progress.BarColumn",
    "rich.progress.DownloadColumn",
    "rich.progress.MofNCompleteColumn",
    "rich.progress.TimeElapsedColumn",
    "rich.progress.TimeRemainingColumn",
    "rich.table.Table",
    "rich.text.Text",
}


def markup_faults(source: Source) -> list[str]:
    """rich's markup beside `segue.cli.terminal`: it takes brackets in names and paths for styles."""
    if source.name == "segue.cli.terminal":
        return []
    faults = []
    for node in ast.walk(source.tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "from_markup":
            names = ["rich.text.Text.from_markup"]
        faults += [
            f"{source.name}:{node.lineno} uses {name}, not cli.terminal"
            for name in names
            if name.split(".")[0] == "rich" and name not in RICH_WITHOUT_MARKUP
        ]
    return faults


def docstring_faults(source: Source) -> list[str]:
    """Public classes and functions of a module without a docstring.

    The leaves of the error tree are described in one drawing at the top of their module.
    """
    faults = []
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or ast.get_docstring(node):
            continue
        if isinstance(node, ast.ClassDef) and "SegueError" in {_dotted(b) for b in node.bases}:
            continue
        faults.append(f"{source.name}:{node.lineno} {node.name} has no docstring")
    return faults


def struct_faults(source: Source) -> list[str]:
    """msgspec structs that are not frozen: a message must not change after it was made."""
    faults = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if not {_dotted(base) for base in node.bases} & {"msgspec.Struct", "Struct"}:
            continue
        frozen = any(
            k.arg == "frozen" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in node.keywords
        )
        if not frozen:
            faults.append(f"{source.name}:{node.lineno} struct {node.name} is not frozen")
    return faults


def names_that_mean_two_things(modules: Iterable[Source]) -> list[str]:
    """Classes at the top of several files that have one name: a reader takes one for the other."""
    where: dict[str, list[str]] = {}
    for source in modules:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(source.name)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(where.items()) if len(found) > 1]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Circles in a graph of rooms, each as the list of rooms along it."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(room: str, path: list[str]) -> None:
        if room in path:
            found.append([*path[path.index(room) :], room])
            return
        if room in done:
            return
        for other in sorted(edges.get(room, ())):
            visit(other, [*path, room])
        done.add(room)

    for room in sorted(edges):
        visit(room, [])
    return found


def room_edges(modules: Iterable[Source]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for source in modules:
        if source.room:
            edges.setdefault(source.room, set()).update(imported_rooms(source) - {source.room})
    return edges


def _called(node: ast.Call) -> str:
    return _dotted(node.func)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _weights_only(node: ast.Call) -> bool:
    return any(
        k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in node.keywords
    )
