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
        rules.decode_faults,
        rules.markup_faults,
    ],
)
def test_rule_holds_everywhere(rule: Rule) -> None:
    assert len(MODULES) > 30
    faults = [fault for source in MODULES for fault in rule(source)]
    assert faults == [], "\n".join(faults)


def test_no_two_classes_share_a_name() -> None:
    assert rules.names_that_mean_two_things(MODULES) == []


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
others -= {"_distutils_hack", "__editable___segue_lab_0_finder"}  # of pip, in a checkout
others -= {"typing_extensions", "msgspec", "numpy", "uvloop", "xxhash"}
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
        "print([m for m in ('torch', 'asyncio', 'socket', 'starlette', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their file's name alone: of two with one name it refuses the second."""
    places = Counter(
        path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py"
    )
    assert [name for name, count in places.items() if count > 1] == []
