"""The backend against the recorded interface of each version of SGLang that it was run with."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from sglang_api import RECORDED, Api, difference, members, uses
from sglang_pair import kv_args

from segue.integrations.sglang.sglang_phases import SglPoll
from segue.integrations.sglang.sglang_settings import TRIED_VERSIONS

VERSIONS: dict[str, Api] = json.loads(RECORDED.read_text())
package = find_spec("segue.integrations.sglang")
assert package is not None
assert package.origin is not None
BACKEND = ast.parse(Path(package.origin).with_name("sglang_backend.py").read_text())
#: features that SGLang asks for and that the backend does not have
OPTIONAL = {
    "_prefetch_staging_reqs",
    "deregister_buffer_to_engine",
    "register_buffer_to_engine",
    "set_kv_buffer_tensors",
    "supports_host_tensor_indices",
}
#: fields that CommonKVManager's constructor sets
FIELDS = {
    "_staging_handler",
    "attn_cp_rank",
    "attn_cp_size",
    "enable_all_cp_ranks_for_transfer",
    "is_dummy_cp_rank",
    "kv_args",
    "prefill_info_table",
    "transfer_infos",
}


def fields(name: str) -> set[str]:
    """The attributes that the constructor of one of our classes sets."""
    [found] = [node for node in BACKEND.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        target.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


@pytest.mark.parametrize("version", sorted(VERSIONS))
@pytest.mark.parametrize(
    ("ours", "base"),
    [
        ("SegueKVManager", "CommonKVManager"),
        ("SegueKVManager", "BaseKVManager"),
        ("SegueKVSender", "BaseKVSender"),
        ("SegueKVReceiver", "BaseKVReceiver"),
        ("SegueKVBootstrapServer", "CommonKVBootstrapServer"),
    ],
)
def test_each_method_is_called_as_this_version_calls_it(version: str, ours: str, base: str) -> None:
    theirs = {name: kind for name, kind in VERSIONS[version][base].items() if "(" in kind}
    found = {name: kind for name, kind in members(BACKEND, ours).items() if name in theirs}
    assert {name: _names(theirs[name]) for name in found} == {
        name: _names(kind) for name, kind in found.items()
    }
    if base in ("BaseKVSender", "BaseKVReceiver"):
        assert {name for name, kind in theirs.items() if "abstractmethod" in kind} <= {*found}


def _names(signature: str) -> str:
    return signature.removeprefix("@abstractmethod ")


@pytest.mark.parametrize("version", sorted(VERSIONS))
@pytest.mark.parametrize("role", ["manager", "sender", "receiver"])
def test_the_backend_has_each_name_that_sglangs_queues_use(version: str, role: str) -> None:
    ours = f"SegueKV{role.capitalize()}"
    api = VERSIONS[version]
    bases = [f"BaseKV{role.capitalize()}"] + (["CommonKVManager"] if role == "manager" else [])
    known = {*members(BACKEND, ours), *fields(ours), *(name for base in bases for name in api[base])}
    known |= FIELDS | {"_ensure_prefill_recompute_executor"} if role == "manager" else set()
    assert {*api[f"uses of a {role}"]} - known - OPTIONAL == set()


def test_another_version_gets_one_line_and_no_backend(tmp_path: Path) -> None:
    """The plug-in imports nothing of an SGLang that it does not know."""
    (tmp_path / "sglang-9.9.dist-info").mkdir()
    (tmp_path / "sglang-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from segue.integrations.sglang.sglang_plugin import register\n"
        "register(); print('sglang' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False")
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("segue is no transfer backend of SGLang 9.9")


def test_the_recorded_versions_are_the_ones_that_are_let_in() -> None:
    assert sorted(VERSIONS) == sorted(TRIED_VERSIONS)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_phases_have_sglangs_numbers(version: str) -> None:
    theirs = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): value
        for name, value in VERSIONS[version]["KVPoll"].items()
    }
    assert theirs == {phase.name: f"= {phase.value}" for phase in SglPoll}


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_each_field_of_kv_args_that_is_read_is_there(version: str) -> None:
    assert {*vars(kv_args([]))} <= {*VERSIONS[version]["KVArgs"]}


def test_the_record_shows_a_change() -> None:
    before = "class A:\n x: int\n def a(self, y=1, *, z): ...\n def _p(self): ...\n"
    after = "class A:\n x: str\n def a(self, y): ...\n async def b(self, **k): ...\n"
    recorded, found = ({"A": members(ast.parse(source), "A")} for source in (before, after))
    assert recorded == {"A": {"x": "int", "a": "(self, y=, *, z)"}}
    assert difference(recorded, found) == [
        "A: a: recorded '(self, y=, *, z)', found '(self, y)'",
        "A: b: recorded 'is not there', found '(self, **k)'",
        "A: x: recorded 'int', found 'str'",
    ]
    assert uses(
        ast.parse("req.kv_receiver.clear(); getattr(kv_receiver, 'x', 1); other.y"), ("kv_receiver",)
    ) == {"clear", "x"}
