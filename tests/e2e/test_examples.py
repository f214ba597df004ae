"""The examples run as the documentation says, and both processes end with nothing held."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Python runs this in each process of the example: its manager must be at rest before it closes, and
#: leave no segment mapped. What a manager still owes its peer after the last state takes a moment.
CHECK = """
import gc, os, pathlib, sys, time
from segue.kv.manager import KVManager
from segue.server.observe.integrity_report import busy

close = KVManager.close

async def held(manager):
    return busy(manager.sizes()), manager.problems()

def checked(manager):
    until = time.monotonic() + 60
    while any(found := manager.io.call(held(manager), 60)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(found), found
    close(manager)
    mapped = [line for line in open("/proc/self/maps") if "/memfd:segue" in line]
    assert len(mapped) <= 1, mapped  # the pool is the caller's
    links = [os.readlink(entry) for entry in pathlib.Path("/proc/self/fd").iterdir() if entry.exists()]
    assert not [link for link in links if link.startswith("socket:")], links
    pathlib.Path(os.environ["CHECKED"], str(os.getpid())).touch()

KVManager.close = checked
"""


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_handover(transport: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CHECK)
    checked = tmp_path / "checked"
    checked.mkdir()
    command = [sys.executable, str(ROOT / "examples" / "handover.py"), transport]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environ = os.environ | {"PYTHONPATH": path, "CHECKED": str(checked)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "first token 42, KV equal\n"
    assert done.stderr == ""
    assert len(list(checked.iterdir())) == 2, "one of the two processes was not asked"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_use_the_face_alone(name: str) -> None:
    found = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse((ROOT / "examples" / name).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    ours = {module for module in found if module and module.startswith("segue")}
    assert ours <= {"segue", "segue.kv"}
    assert ours or name == "clients.py", "that one is about clients of other projects"


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killed_peer(role: str) -> None:
    """With every warning of Python an error, also in the child."""
    command = [sys.executable, str(ROOT / "examples" / "killed_peer.py"), role]
    environ = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    told = "the peer was killed: FAILED, 40 pages free\na new peer: SUCCESS, 40 pages free\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_own_memory() -> None:
    command = [sys.executable, str(ROOT / "examples" / "own_memory.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "KV equal\n", "")


def test_agent() -> None:
    """With every warning of Python an error, also in the agents."""
    command = [sys.executable, str(ROOT / "examples" / "agent.py")]
    environ = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "metadata 42, KV equal\n", "")


@pytest.mark.slow
def test_rank_worker() -> None:
    command = [sys.executable, str(ROOT / "examples" / "rank_worker.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "KV of both ranks equal\n", "")


@pytest.mark.slow
def test_symmetric_ranks() -> None:
    command = [sys.executable, str(ROOT / "examples" / "symmetric_ranks.py")]
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    told = "running [1, 2, 3, 4, 6], KV equal; room 5 has failed: the cable of rank 1 is broken"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rank 0: {told}\nrank 1: {told}\n", "")
