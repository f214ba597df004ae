"""The house of CONTRIBUTING.md, enforced: floors, purity, side rooms, safety, docstrings, frozen messages."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import rules

MODULES = list(rules.sources())
NAMES = [s.name for s in MODULES]
Rule = Callable[[rules.Source], list[str]]


def test_every_room_of_the_house_is_known() -> None:
    rooms = {p.name for p in rules.SRC.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == set(rules.FLOORS) | set(rules.SIDE_MAY_IMPORT)


@pytest.mark.parametrize(
    "rule",
    [
        rules.floor_faults,
        rules.purity_faults,
        rules.safety_faults,
        rules.guard_faults,
        rules.docstring_faults,
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
    twins = [rules.parse(name, "class Part: ...") for name in ("segue.conn.a", "segue.roles.b")]
    assert rules.names_that_mean_two_things(twins) == ["Part: segue.conn.a, segue.roles.b"]


def test_rooms_form_no_circle() -> None:
    assert rules.cycles(rules.room_edges(MODULES)) == []


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


@pytest.mark.parametrize("room", sorted(rules.PURE))
def test_pure_room_imports_alone(room: str) -> None:
    """All modules of a pure room load, and what they load is free of sockets, loops and torch."""
    names = [s.name for s in MODULES if s.room == room]
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
        (rules.floor_faults, "segue.core.x", "from segue.kv.protocol import events"),
        (rules.floor_faults, "segue.handoff.x", "def f():\n    import segue.kv.manager"),
        (rules.floor_faults, "segue.handoff.x", "from ..conn import manager"),
        (rules.floor_faults, "segue.roles.x", "from segue import serve"),
        (rules.floor_faults, "segue.conn.x", "import segue.lab.sim.world"),
        (rules.floor_faults, "segue.roles.x", "from segue.server.observe import metrics"),
        (rules.floor_faults, "segue.observe.x", "from segue.kv import manager"),
        (rules.floor_faults, "segue.sim.x", "from segue.cli import main"),
        (
            rules.floor_faults,
            "segue.core.x",
            "import importlib\nimportlib.import_module('segue.engine.model')",
        ),
        (rules.purity_faults, "segue.roles.x", "from time import monotonic"),
        (rules.task_faults, "segue.conn.x", "import asyncio\nt = asyncio.create_task(f())"),
        (rules.task_faults, "segue.conn.x", "def f(loop):\n    return loop.create_task"),
        (rules.task_faults, "segue.serve.x", "from asyncio import ensure_future"),
        (rules.task_faults, "segue.frontend.x", "import asyncio\nasyncio.TaskGroup()"),
        (rules.purity_faults, "segue.core.x", "import os.path"),
        (rules.purity_faults, "segue.layout.x", "def f():\n    import torch"),
        (rules.safety_faults, "segue.conn.x", "import pickle"),
        (rules.safety_faults, "segue.conn.x", "from cloudpickle import loads"),
        (rules.safety_faults, "segue.conn.x", "eval('1')"),
        (rules.safety_faults, "segue.conn.x", "if hasattr(x, 'y'): pass"),
        (rules.safety_faults, "segue.conn.x", "class A:\n    def __del__(self): pass"),
        (rules.safety_faults, "segue.engine.x", "import torch\ntorch.load('f')"),
        (rules.guard_faults, "segue.frontend.x", "import uvicorn"),
        (rules.guard_faults, "segue.serve.x", "from http.server import HTTPServer"),
        (rules.markup_faults, "segue.cli.x", "from rich.console import Console"),
        (rules.markup_faults, "segue.cli.x", "from rich.progress import BarColumn, TextColumn"),
        (rules.markup_faults, "segue.cli.x", "def f():\n    import rich"),
        (rules.markup_faults, "segue.cli.x", "from rich import print"),
        (rules.markup_faults, "segue.cli.x", "from rich.text import Text\nText.from_markup(x)"),
        (rules.docstring_faults, "segue.core.x", "class A:\n    pass"),
        (rules.docstring_faults, "segue.core.x", "async def f():\n    pass"),
        (
            rules.struct_faults,
            "segue.core.x",
            "import msgspec\nclass A(msgspec.Struct, tag=True):\n    x: int",
        ),
        (rules.struct_faults, "segue.core.x", "class A(Struct, frozen=False):\n    x: int"),
    ],
)
def test_rule_sees_a_fault(rule: Rule, name: str, text: str) -> None:
    assert rule(rules.parse(name, text)) != []


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (rules.floor_faults, "segue.sim.x", "from segue.kv import manager"),
        (rules.floor_faults, "segue.serve.x", "from segue.server.observe import metrics"),
        (rules.floor_faults, "segue.handoff.x", "from segue.kv.layout.spec import PoolSpec"),
        (rules.purity_faults, "segue.serve.x", "import socket"),
        (rules.safety_faults, "segue.engine.x", "model.eval()"),
        (rules.guard_faults, "segue.server.http.guarded_http", "import uvicorn"),
        (rules.markup_faults, "segue.cli.x", "from rich.table import Table\nfrom rich.text import Text"),
        (rules.docstring_faults, "segue.core.x", "def _f():\n    pass"),
        (rules.docstring_faults, "segue.core.x", "class A(SegueError):\n    pass"),
        (rules.struct_faults, "segue.core.x", "class A(msgspec.Struct, frozen=True):\n    x: int"),
    ],
)
def test_rule_lets_the_legal_pass(rule: Rule, name: str, text: str) -> None:
    assert rule(rules.parse(name, text)) == []


def test_circle_is_found() -> None:
    assert rules.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
    assert rules.cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
