"""The rules of CONTRIBUTING.md, enforced: floors, purity, safety, docstrings, frozen messages."""

import ast
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import rules

MODULES = list(rules.sources())
NAMES = [s.name for s in MODULES]
Rule = Callable[[rules.Source], list[str]]


def test_every_package_of_the_house_is_known() -> None:
    assert {source.package for source in MODULES} - {""} == set(rules.FLOORS) | set(rules.SIDE_MAY_IMPORT)


def test_no_two_modules_share_a_name() -> None:
    names = [
        name.rpartition(".")[2] for name, source in zip(NAMES, MODULES, strict=True) if not source.is_package
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(
    "rule",
    [
        rules.floor_faults,
        rules.face_faults,
        rules.device_faults,
        rules.family_faults,
        rules.purity_faults,
        rules.safety_faults,
        rules.guard_faults,
        rules.docstring_faults,
        rules.wording_faults,
        rules.struct_faults,
        rules.task_faults,
        rules.markup_faults,
    ],
)
def test_rule_holds_everywhere(rule: Rule) -> None:
    assert len(MODULES) > 30
    faults = [fault for source in MODULES for fault in rule(source)]
    assert faults == [], "\n".join(faults)


def test_no_two_classes_share_a_name() -> None:
    assert rules.names_that_mean_two_things(MODULES) == []
    twins = [rules.parse("segue.kv.a", "class Part: ..."), rules.parse("segue.engine.b", "class _Part: ...")]
    assert rules.names_that_mean_two_things(twins) == ["Part: segue.kv.a, segue.engine.b"]


def test_packages_form_no_circle() -> None:
    assert rules.cycles(rules.package_edges(MODULES)) == []


@pytest.mark.parametrize("package", sorted({source.package for source in MODULES} - {""}))
def test_modules_of_a_package_form_no_circle(package: str) -> None:
    assert rules.cycles(rules.module_edges(MODULES, package)) == []


@pytest.mark.parametrize(
    "module",
    [
        "segue",
        "segue.server.settings.commands",
        "segue.kv.protocol",
        "segue.server.schedulers",
        "segue.cli.main",
        "segue.engine",
    ],
)
def test_import_brings_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_the_library_needs_three_packages_and_no_settings() -> None:
    """An import hook sees every module that the faces and a hand-off between two managers ask for, also
    within functions and in vain. msgspec asks for typing_extensions, numpy for what it may work with."""
    code = """
import queue, sys

asked = set()


class Hook:
    def find_spec(self, name, path=None, target=None):
        frame, importer = sys._getframe(), ""
        while frame is not None and (not importer or importer.partition(".")[0] == "importlib"):
            frame = frame.f_back
            importer = frame.f_globals.get("__name__", "") if frame else ""
        if importer.partition(".")[0] == "segue":
            asked.add(name)


sys.meta_path.insert(0, Hook())
import segue.kv, segue.kv.session
for face in (segue.kv, segue.kv.session):
    assert all(getattr(face, name) is not None for name in face.__all__)
from segue.kv import *

shape = KVShape(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="float16", item_bytes=2)
spec = PoolSpec(shape=shape, pages=2, layer_count=1, head_count=1)
changes = queue.Queue()
ends = []
for role in (Role.PREFILL, Role.DECODE):
    config = KVConfig(role=role, model="m", spec=spec, transports=["tcp", "shm"], secret=bytes(16))
    ends.append(KVManager(config, allocate(spec.nbytes), on_change=changes.put))
addresses = [end.start() for end in ends]
prefill, decode = ends
decode.add_peer(prefill.config.me, *addresses[0])
room = RoomKey(new_room())
sender, receiver = prefill.expect(room, 20, 60), decode.receive(room, prefill.config.me, 20, 60)


def reaches(handle, phase):
    while (now := handle.poll()) is not phase:
        assert not now.terminal, handle.error
        changes.get(timeout=60)


reaches(receiver, KVPoll.WAITING_FOR_INPUT)
receiver.publish([0, 1])
sender.send(Span(0, 20), [0, 1], b"1")
reaches(receiver, KVPoll.SUCCESS)
reaches(sender, KVPoll.SUCCESS)
for end in ends:
    end.close()
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
ours = {name for name in (*files, *asked) if name.startswith("segue.") and not name.startswith("segue.kv")}
others = {name.partition(".")[0] for name, file in files.items() if "site-packages" in file}
others |= {name.partition(".")[0] for name in asked} - sys.stdlib_module_names - {"segue"}
others -= {"_distutils_hack", "typing_extensions", "msgspec", "numpy", "uvloop", "xxhash"}
print(sorted(ours), sorted(others))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[] []", "")


@pytest.mark.parametrize("face", sorted(rules.FACES))
def test_each_name_of_a_face_has_a_docstring_of_its_own(face: str) -> None:
    """Also its methods; and fields and arguments are described."""
    module = importlib.import_module(face)
    faults = []
    for name in module.__all__:
        text = Path(importlib.import_module(module._MODULE_OF[name]).__file__ or "").read_text()
        faults += rules.face_docstring_faults(text, name)
    assert faults == []


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("class A: ...", ["A"]),
        ('class A:\n    """A."""\n    x: int', ["A.x"]),
        ('class A:\n    """A `x`."""\n    x: int\n    #: y\n    y: int\n    z: int  #: z', []),
        ('class A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...', ["A.f"]),
        ('class A:\n    """A `x`."""\n    def __init__(self, x, y):\n        """Not y."""', ["A: y"]),
        ("def A(x): ...", ["A: x", "A"]),
        ('async def A(*, x):\n    """`x`."""', []),
        ("A = 1", ["A"]),
        ("\n# about A\nA: int = 1", ["A"]),
        ("#: about A\nA = 1", []),
        ("B, A = 1, 2", ["A"]),
    ],
)
def test_an_undocumented_name_is_found(text: str, faults: list[str]) -> None:
    assert rules.face_docstring_faults(text, "A") == faults


@pytest.mark.parametrize("face", sorted(rules.FACES))
def test_each_name_of_a_face_is_known_to_type_checkers(face: str) -> None:
    module = importlib.import_module(face)
    tree = ast.parse(Path(module.__file__ or "").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == module._MODULE_OF
    submodules = {path.stem for path in Path(module.__file__ or "").parent.iterdir()}
    assert submodules & set(module.__all__) == set(), "an import of the module would hide the name"


@pytest.mark.parametrize("package", sorted(rules.PURE))
def test_pure_package_imports_alone(package: str) -> None:
    """All modules of a pure package load, and what they load is free of sockets, loops and torch."""
    names = [s.name for s in MODULES if s.package == package]
    code = (
        f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; "
        "print([m for m in ('torch', 'asyncio', 'socket', 'starlette', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


# ---- the rules can fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (rules.floor_faults, "segue.kv.ids", "from segue.kv.protocol import events"),
        (rules.floor_faults, "segue.kv.protocol.x", "def f():\n    import segue.kv.manager"),
        (rules.floor_faults, "segue.kv.protocol.x", "from .. import manager"),
        (rules.floor_faults, "segue.server.schedulers.x", "from segue.server import instance"),
        (rules.floor_faults, "segue.kv.x", "import segue.lab.sim.world"),
        (rules.floor_faults, "segue.server.schedulers.x", "from segue.server.observe import metrics"),
        (rules.floor_faults, "segue.server.observe.x", "from segue.server.instance import leader"),
        (rules.floor_faults, "segue.lab.sim.x", "from segue.cli import main"),
        (
            rules.floor_faults,
            "segue.kv.ids",
            "import importlib\nimportlib.import_module('segue.engine.engine_api')",
        ),
        (rules.face_faults, "segue.engine.x", "from segue.kv.ids import Role"),
        (rules.face_faults, "segue.server.instance.x", "from segue.kv.session import tls"),
        (rules.face_faults, "segue.integrations.x", "from segue.kv.session import SessionNode"),
        (rules.face_faults, "segue.integrations.vllm.x", "from segue.kv.session import SessionNode"),
        (rules.device_faults, "segue.engine.x", "from segue.engine.cpu import cpu_forward"),
        (rules.device_faults, "segue.engine.ranks.x", "from segue.engine.cpu.cpu_fused import Head"),
        (rules.family_faults, "segue.engine.cpu.x", "gemma = config.model_type == 'gemma3_text'"),
        (rules.family_faults, "segue.cli.x", "values.get('model_type')"),
        (rules.family_faults, "segue.cli.x", "values['model_type']"),
        (rules.family_faults, "segue.engine.x", "def f(model_type): pass"),
        (rules.family_faults, "segue.engine.x", "from segue.engine.models.families import qwen"),
        (rules.purity_faults, "segue.server.schedulers.x", "from time import monotonic"),
        (rules.task_faults, "segue.kv.x", "import asyncio\nt = asyncio.create_task(f())"),
        (rules.task_faults, "segue.kv.x", "def f(loop):\n    return loop.create_task"),
        (rules.task_faults, "segue.server.instance.x", "from asyncio import ensure_future"),
        (rules.task_faults, "segue.server.frontend.x", "import asyncio\nasyncio.TaskGroup()"),
        (rules.purity_faults, "segue.kv.ids", "import os.path"),
        (rules.purity_faults, "segue.kv.layout.x", "def f():\n    import torch"),
        (rules.safety_faults, "segue.kv.x", "import pickle"),
        (rules.safety_faults, "segue.kv.x", "from cloudpickle import loads"),
        (rules.safety_faults, "segue.kv.x", "eval('1')"),
        (rules.safety_faults, "segue.kv.x", "if hasattr(x, 'y'): pass"),
        (rules.safety_faults, "segue.kv.x", "class A:\n    def __del__(self): pass"),
        (rules.safety_faults, "segue.kv.x", "class A:\n    async def __del__(self): pass"),
        (rules.safety_faults, "segue.engine.x", "import torch\ntorch.load('f')"),
        (rules.guard_faults, "segue.server.frontend.x", "import uvicorn"),
        (rules.guard_faults, "segue.server.instance.x", "from http.server import HTTPServer"),
        (rules.markup_faults, "segue.cli.x", "from rich.console import Console"),
        (rules.markup_faults, "segue.cli.x", "from rich.progress import BarColumn, TextColumn"),
        (rules.markup_faults, "segue.cli.x", "def f():\n    import rich"),
        (rules.markup_faults, "segue.cli.x", "from rich import print"),
        (rules.markup_faults, "segue.cli.x", "from rich.text import Text\nText.from_markup(x)"),
        (rules.docstring_faults, "segue.kv.ids", "class A:\n    pass"),
        (rules.docstring_faults, "segue.kv.ids", "async def f():\n    pass"),
        (rules.wording_faults, "segue.kv.x", "#: What a peer sends.\nX = 1"),
        (rules.wording_faults, "segue.kv.x", "x = 1  # of the last stage"),
        (rules.wording_faults, "segue.kv.x", "# The first. One\n# that comes late is refused."),
        (rules.wording_faults, "segue.kv.x", 'def f():\n    """A peer. Who asks\n    waits."""'),
        (
            rules.struct_faults,
            "segue.kv.ids",
            "import msgspec\nclass A(msgspec.Struct, tag=True):\n    x: int",
        ),
        (rules.struct_faults, "segue.kv.ids", "class A(Struct, frozen=False):\n    x: int"),
    ],
)
def test_rule_sees_a_fault(rule: Rule, name: str, text: str) -> None:
    assert rule(rules.parse(name, text)) != []


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (rules.floor_faults, "segue.lab.sim.x", "from segue.kv import manager"),
        (rules.floor_faults, "segue.server.instance.x", "from segue.server.observe import metrics"),
        (rules.floor_faults, "segue.kv.protocol.x", "from segue.kv.layout.spec import PoolSpec"),
        (rules.face_faults, "segue.server.instance.x", "from segue.kv.session import SessionNode"),
        (rules.face_faults, "segue.lab.sim.x", "from segue.kv.manager import KVManager"),
        (rules.device_faults, "segue.engine.cpu.x", "from segue.engine.cpu.cpu_fused import Head"),
        (
            rules.family_faults,
            "segue.engine.models.families.x",
            "from segue.engine.models.families import qwen",
        ),
        (rules.purity_faults, "segue.server.instance.x", "import socket"),
        (rules.safety_faults, "segue.engine.x", "model.eval()"),
        (rules.guard_faults, "segue.server.http.guarded_http", "import uvicorn"),
        (rules.markup_faults, "segue.cli.x", "from rich.table import Table\nfrom rich.text import Text"),
        (rules.docstring_faults, "segue.kv.ids", "def _f():\n    pass"),
        (
            rules.wording_faults,
            "segue.kv.x",
            '"""Says what a peer sends, and of whom."""\n# see what `f` does',
        ),
        (rules.struct_faults, "segue.kv.ids", "class A(msgspec.Struct, frozen=True):\n    x: int"),
    ],
)
def test_rule_lets_the_legal_pass(rule: Rule, name: str, text: str) -> None:
    assert rule(rules.parse(name, text)) == []


def test_circle_is_found() -> None:
    assert rules.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
    assert rules.cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    texts = {
        "segue.lab.sim.a": "def f():\n    from segue.lab.sim.b import g",
        "segue.lab.sim.b": "if TYPE_CHECKING:\n    from segue.lab.sim import a",
    }
    edges = rules.module_edges([rules.parse(name, text) for name, text in texts.items()], "lab.sim")
    assert len(rules.cycles(edges)) == 1


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their file's name alone: of two with one name it refuses the second."""
    places = Counter(
        path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py"
    )
    assert [name for name, count in places.items() if count > 1] == []
