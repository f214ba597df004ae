"""Every measurement of `bench/` still runs, at its smallest sizes: it ends well and prints a number."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_model
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
ONCE = ("--rounds", "1")
ONE_PAIR = ("--pairs", "1", "--times", "1", "--json", "/dev/null")
#: the sizes of each; MODEL stands for the folder of a model
SMALLEST = {
    "abort": ("--aborts", "8", "--http", "1"),
    "agreement": ("--polls", "2"),
    "checksum": (*ONCE, "--warmup", "0", "--tokens", "32", "--model", "MODEL"),
    "engine": (*ONCE, "--model", "MODEL"),
    "explain_cost": (*ONCE, "--streams", "2", "--tokens", "5", "--requests", "4"),
    "exposed": (*ONCE, "--warmup", "0", "--tokens", "32", "--model", "MODEL", "--transports", "shm"),
    "frontend": (*ONCE, "--streams", "2", "--tokens", "5", "--requests", "4"),
    "handoff": ("--requests", "2", "--warmup", "0", "--tokens", "32", "--model", "MODEL"),
    "layout": ONCE,
    "observe_cost": (*ONE_PAIR, "--streams", "2", "--tokens", "5", "--model", "MODEL"),
    "open_rooms": (*ONCE, "--rooms", "1", "--hand-offs", "2"),
    "plan": ONCE,
    "ranges": ONCE,
    "runs": ("--requests", "20"),
    "serve_client": ("--chunks", "4", "--requests", "4", "--concurrency", "2"),
    "session": (*ONCE, "--round-trips", "4", "--stream", "20"),
    "slow_clients": (*ONCE, "--connections", "4", "--streams", "1", "--requests", "2", "--tokens", "5"),
    "start": ("--runs", "1", "--", "--model", "MODEL"),
    "transport": ("--rounds", "2"),
    "transports": (*ONCE, "--seconds", "1"),
}
#: Those that `make test-slow` runs, of each kind: with a deployment, a frontend, two processes, one process.
#: `make soak` runs the others.
IN_SLOW = {"abort", "handoff", "frontend", "transport", "plan", "session"}
#: `tests/deploy`, `tests/e2e/chaos` and `tests/lab/sim` run what these do; `first_hour` installs everything;
#: those after them need the default model or other people's routers
ELSEWHERE = {"changes", "etcd", "first_hour", "kills", "manifests", "sim_many"}
ELSEWHERE |= {"advise", "hostile", "last_layer", "mixed", "rank_memory", "routing", "serve"}
#: These need another commit's tree, vLLM, or gigabytes of memory.
ELSEWHERE |= {"agent", "bodies", "holes", "per_request", "staging", "sglang_answers", "sglang_pages"}
ELSEWHERE |= {"vllm_answers", "vllm_beside_nixl"}


def test_no_measurement_is_forgotten() -> None:
    commands = {file.stem for file in ROOT.glob("bench/*.py") if '__name__ == "__main__"' in file.read_text()}
    # `leader_pair` is the other process of `abort` and `open_rooms`.
    assert commands - {"leader_pair"} == SMALLEST.keys() | ELSEWHERE


def test_what_a_measurement_takes_from_the_tests_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what that takes from other tests: nobody but `from_tests` says where these are."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folders = runpy.run_path(str(ROOT / "bench" / "from_tests.py"))["FOLDERS"]
    ours = {file.stem for file in ROOT.glob("tests/**/*.py")}
    files = [file for file in ROOT.glob("bench/*.py") if "import from_tests" in file.read_text()]
    assert len(files) > 3
    read = set(files)
    while files:
        file = files.pop()
        for name in imported(file) & ours:
            found = next(
                (folder / f"{name}.py" for folder in folders if (folder / f"{name}.py").exists()), None
            )
            assert found is not None or (ROOT / "bench" / f"{name}.py").exists(), (
                f"{file}: {name} is not found"
            )
            if found is not None and found not in read:
                read.add(found)
                files.append(found)
    assert {file.stem for file in read} >= {"cluster", "ports", "soak_kills", "etcd_faults"}
    for file in set(ROOT.glob("bench/*.py")) - read - {ROOT / "bench" / "from_tests.py"}:
        assert "tests" not in [node.value for node in constants(file)], f"{file}: take `from_tests`"


def imported(file: Path) -> set[str]:
    """The first part of the name of every module that is imported anywhere in `file`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names


def constants(file: Path) -> list[ast.Constant]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' model, with as many words as the prompts are drawn from."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=40_000, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return tiny_model.save(tmp_path_factory.mktemp("model"), config)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [name if name in IN_SLOW else pytest.param(name, marks=pytest.mark.soak) for name in SMALLEST]
)
def test_a_measurement_runs(name: str, model: Path) -> None:
    words = [str(model) if word == "MODEL" else word for word in SMALLEST[name]]
    command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(char.isdigit() for char in done.stdout), "it printed no number"
