"""The rules of the house as functions over source text."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import segue.kv

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "segue"
LAB = ROOT / "lab" / "segue_lab"

#: Modules at the top of `kv` that everything else of it stands on; the others make its highest floor.
KV_BASE = {
    "addresses",
    "backoff",
    "clock",
    "errors",
    "ids",
    "limits",
    "model_match",
    "pending",
    "printable",
    "ready",
    "versions",
}

#: Each package's floor. A package imports only from its own floor or below.
FLOORS = {
    "kv.base": 0,
    "kv.layout": 1,
    "kv.protocol": 1,
    "kv.session": 2,
    "kv.transport": 2,
    "kv": 3,
    "engine": 4,
    "server": 4,
    "server.settings": 5,
    "server.messages": 5,
    "server.balance": 6,
    "server.http": 6,
    "server.observe": 7,
    "server.schedulers": 6,
    "server.registry": 7,
    "server.kv_events": 7,
    "server.fleet": 8,
    "server.frontend": 8,
    "server.direct": 9,
    "server.instance": 10,
    "server.supervisor": 10,
    "cli": 11,
}

#: Packages beside the floors: what each may import, and who may import it.
SIDE_MAY_IMPORT = {
    "lab": set[str](),
    "lab.advise": {"kv"},
    "lab.commands": {"cli", "engine", "kv", "lab.advise", "lab.sim", "server.settings"},
    "lab.sim": set(FLOORS) - {"cli"},
    # Its modules are shared by connectors that hand KV over.
    "integrations": {"kv", "kv.base"},
    # It runs segue's own processes, not another engine.
    "integrations.ray": {
        "cli",
        "kv",
        "kv.session",
        "server.http",
        "server.registry",
        "server.settings",
        "server.supervisor",
    },
    "integrations.sglang": {"integrations", "kv"},
    "integrations.vllm": {"integrations", "kv", "kv.base"},
}
SIDE_MAY_BE_IMPORTED_BY = {
    "lab": set[str](),
    "lab.advise": {"lab.commands"},
    "lab.commands": set[str](),
    "lab.sim": {"lab.commands"},
    "integrations": {"cli", "integrations.sglang", "integrations.vllm"},
    "integrations.ray": set[str](),
    "integrations.sglang": set[str](),
    "integrations.vllm": set[str](),
}

PURE = {
    "kv.base",
    "kv.layout",
    "kv.protocol",
    "lab.advise",
    "server.balance",
    "server.messages",
    "server.schedulers",
    "server.settings",
}
#: Modules of other packages that decide only.
PURE_MODULES = {
    *(f"segue.engine.{name}" for name in ("kv_events", "model_names", "parallel", "pool_size", "request")),
    *(f"segue.server.fleet.{name}" for name in ("fleet_settings", "replica", "router")),
    *(f"segue.integrations.{name}" for name in ("device_memory", "host_rules", "prompt_claim")),
    *(f"segue.integrations.ray.ray_{name}" for name in ("params", "plan")),
    *(f"segue.integrations.sglang.sglang_{name}" for name in ("phases", "settings")),
    *(
        f"segue.integrations.vllm.vllm_{name}"
        for name in (
            "decode_table",
            "orders",
            "params",
            "pins",
            "prefill_table",
            "request",
            "settings",
            "table",
        )
    ),
}

#: What a pure package must not touch: sockets, threads, clocks, files, processes, torch, HTTP.
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
    "httpx2",
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
#: Ray Serve calls `__del__` of a replica that it takes away, and waits for it: there is no other hook.
CALLED_DESTRUCTORS = {"segue.integrations.ray.ray_actors"}


@dataclass(frozen=True)
class Source:
    """One module: its dotted name, its text and its tree."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool = False

    @property
    def package(self) -> str:
        return package_of(self.name)


def parse(name: str, text: str, is_package: bool = False) -> Source:
    return Source(name, text, ast.parse(text, filename=name), is_package)


def sources() -> Iterator[Source]:
    for folder in (SRC, LAB):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
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


def package_of(module: str) -> str:
    """The package of a module by its dotted name: `kv` alone has packages on three floors."""
    top, second = [*module.replace("segue_lab", "segue.lab", 1).split("."), "", ""][1:3]
    if top == "kv":
        if second in KV_BASE:
            return "kv.base"
        return f"kv.{second}" if f"kv.{second}" in FLOORS else "kv"
    return f"{top}.{second}" if f"{top}.{second}" in FLOORS | SIDE_MAY_IMPORT else top


def _is_module(name: str) -> bool:
    top, *parts = name.split(".")
    path = {"segue": SRC, "segue_lab": LAB}.get(top, Path("none")).joinpath(*parts)
    return bool(parts) and (path.is_dir() or path.with_suffix(".py").is_file())


def imported_packages(source: Source) -> set[str]:
    packages = set()
    for module in imported_modules(source):
        if _is_module(module):
            packages.add(package_of(module))
    return packages


def floor_faults(source: Source) -> list[str]:
    """Imports that go upward, or into or out of a side package that does not allow it."""
    package = source.package
    faults = []
    for other in sorted(imported_packages(source) - {package}):
        if other in SIDE_MAY_BE_IMPORTED_BY:
            legal = package in SIDE_MAY_BE_IMPORTED_BY[other]
        elif package in SIDE_MAY_IMPORT:
            legal = other in SIDE_MAY_IMPORT[package]
        elif package == "":
            legal = False
        else:
            legal = FLOORS[other] <= FLOORS[package]
        if not legal:
            faults.append(f"{source.name} imports segue.{other}, which its package must not")
    return faults


#: The two packages of `kv` whose names others may import; `lab` alone looks inside.
FACES = {"segue.kv", "segue.kv.session"}
#: Beside them: its function has the module's name, which a face cannot have, too.
_FACELESS = {"segue.kv.printable"}
#: Modules with names that only segue's own engine, server and commands need: no embedder's, so on no face.
INNER = {
    f"segue.kv.{name}"
    for name in (
        "clock",
        "config",
        "control_plane",
        "errors",
        "ids",
        "layout.content",
        "layout.spec",
        "model_match",
        "model_weights",
        "process_link",
        "protocol.messages",
        "protocol.room_ranks",
        "transport.host_speed",
        "transport.kinds",
        "transport.memory.host_memory",
    )
}


def face_faults(source: Source) -> list[str]:
    """Imports from within `kv` by a package above it, and of a name of a face from elsewhere; an engine of
    others needs `segue.kv` alone."""
    top = source.package.partition(".")[0]
    if top in {"", "kv", "lab"}:
        return []
    of_others = top == "integrations" and source.package != "integrations.ray"
    allowed = {"segue.kv"} if of_others else FACES | INNER
    faults = [
        f"{source.name} imports {module}, not from {' or '.join(sorted(allowed))}"
        for module in sorted(set(imported_modules(source)))
        if module.startswith("segue.kv") and _is_module(module) and module not in allowed | _FACELESS
    ]
    return faults + [
        f"{source.name} imports {alias.name} from {node.module}, not from segue.kv"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module in INNER
        for alias in node.names
        if alias.name in segue.kv.__all__
    ]


def device_faults(source: Source) -> list[str]:
    """Imports of the CPU forward by the rest of the engine: an engine of another device needs that, too."""
    if source.package != "engine" or source.name.startswith("segue.engine.cpu."):
        return []
    return [
        f"{source.name} imports {module}, which is for CPUs alone"
        for module in sorted(set(imported_modules(source)))
        if module.startswith("segue.engine.cpu") and _is_module(module)
    ]


#: The module that alone asks what family a model is of, and the package of the families' files.
MODEL_REGISTRY = "segue.engine.models.model_registry"
MODEL_FAMILIES = "segue.engine.models.families"


def family_faults(source: Source) -> list[str]:
    """Questions about a model's family beside the registry: to add a family, add a file."""
    if source.name == MODEL_REGISTRY:
        return []
    faults = [
        f"{source.name} imports {module}, not {MODEL_REGISTRY}"
        for module in sorted(set(imported_modules(source)))
        if module.startswith(f"{MODEL_FAMILIES}.") and not source.name.startswith(MODEL_FAMILIES)
    ]
    for node in ast.walk(source.tree):
        name = getattr(node, "attr", None) or getattr(node, "arg", None) or getattr(node, "value", None)
        if name == "model_type":
            faults.append(f"{source.name}:{getattr(node, 'lineno', 0)} reads model_type")
    return faults


def purity_faults(source: Source) -> list[str]:
    if source.package not in PURE and source.name not in PURE_MODULES:
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
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name == "__del__" and source.name not in CALLED_DESTRUCTORS:
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
    if source.name in TASK_MAKERS or source.package == "lab.sim":
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


#: They read JSON whose levels `body_forms.check_levels` bounded before.
BOUNDED_READERS = {"segue.server.frontend.body_reader", "segue.server.frontend.legs"}


def decode_faults(source: Source) -> list[str]:
    """A reader of bytes from outside that misses what deep nesting or wrong UTF-8 raises."""
    if source.name in BOUNDED_READERS:
        return []
    return [
        f"{source.name}:{node.lineno} catches {name}, not DECODE_ERRORS"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        for name in ("msgspec.DecodeError", "msgspec.MsgspecError")
        if name in ast.unparse(node.type)
    ]


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
    """Public classes and functions of a module without a docstring."""
    faults = []
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or ast.get_docstring(node):
            continue
        faults.append(f"{source.name}:{node.lineno} {node.name} has no docstring")
    return faults


#: The first words of a sentence whose noun comes last, or never.
_NO_NOUN = re.compile(
    r"(?:^|(?<=[.!?]\s))(what|who|whoever|whatever|whose|whom|of|those|one that|one who)\b", re.IGNORECASE
)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Each comment with its first line; neighbouring lines are one."""
    block, began, last = list[str](), 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield began, " ".join(block)
            block = []
        began = began if block else line
        block.append(token.string.lstrip("#: "))
        last = line
    if block:
        yield began, " ".join(block)


def wording_faults(source: Source) -> list[str]:
    """Sentences of docstrings and comments that do not begin with a noun or a verb."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (
        (getattr(node, "lineno", 1), ast.get_docstring(node) or "")
        for node in ast.walk(source.tree)
        if isinstance(node, documented)
    )
    faults = []
    for line, text in (*docstrings, *comments(source.text)):
        words = " ".join(text.split())
        faults += [
            f"{source.name}:{line} a sentence begins with {words[found.start() : found.start() + 40]!r}"
            for found in _NO_NOUN.finditer(words)
        ]
    return faults


def face_docstring_faults(text: str, name: str) -> list[str]:
    """Missing documentation of `name`, which a face exports, in its module's `text`.

    A class or function needs a docstring of its own, and so does each public method of a class. Each field
    and argument is named in backquotes in the class's or function's docstring, or has a comment. A constant
    or alias needs a `#:` comment above it.
    """
    lines, body = text.splitlines(), ast.parse(text).body

    def commented(node: ast.stmt) -> bool:
        above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
        return above.startswith("#:") or "  #: " in lines[(node.end_lineno or node.lineno) - 1]

    def named_in(doc: str, word: str) -> bool:
        return re.search(rf"`{word}\b", doc) is not None

    def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, doc: str) -> list[str]:
        named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return [f"{name}: {a.arg}" for a in named if a.arg != "self" and not named_in(doc, a.arg)]

    faults: list[str] = []
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)):
                if found == name and not commented(node):
                    faults.append(name)
            case ast.Assign(targets=[ast.Tuple(elts=elements)]):
                if name in map(_dotted, elements) and not commented(node):
                    faults.append(name)
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) if found == name:
                faults += arguments(node, ast.get_docstring(node) or "")
                faults += [] if ast.get_docstring(node) else [name]
            case ast.ClassDef(name=found) if found == name:
                doc = ast.get_docstring(node) or ""
                faults += [] if doc else [name]
                for part in node.body:
                    match part:
                        case ast.FunctionDef(name="__init__"):
                            faults += arguments(part, doc + (ast.get_docstring(part) or ""))
                        case ast.FunctionDef(name=method) | ast.AsyncFunctionDef(name=method):
                            if not method.startswith("_") and not ast.get_docstring(part):
                                faults.append(f"{name}.{method}")
                        case ast.AnnAssign(target=ast.Name(id=field)):
                            if not field.startswith("_") and not named_in(doc, field) and not commented(part):
                                faults.append(f"{name}.{field}")
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
    """Classes of several files that have one name, with or without an underscore: a reader takes one for the
    other."""
    where: dict[str, list[str]] = {}
    for source in modules:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name.lstrip("_"), []).append(source.name)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(where.items()) if len(found) > 1]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Circles in a graph of packages, each as the list of packages along it."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(package: str, path: list[str]) -> None:
        if package in path:
            found.append([*path[path.index(package) :], package])
            return
        if package in done:
            return
        for other in sorted(edges.get(package, ())):
            visit(other, [*path, package])
        done.add(package)

    for package in sorted(edges):
        visit(package, [])
    return found


def package_edges(modules: Iterable[Source]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for source in modules:
        if package := source.package:
            edges.setdefault(package, set()).update(imported_packages(source) - {package})
    return edges


def module_edges(modules: Iterable[Source], package: str) -> dict[str, set[str]]:
    """The imports between the modules of `package`, anywhere in the file and also for types alone."""
    found = {source.name: source for source in modules if source.package == package and not source.is_package}
    return {name: set(imported_modules(source)) & set(found) for name, source in found.items()}


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
