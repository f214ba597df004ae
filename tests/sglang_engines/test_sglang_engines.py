"""Real SGLang engines on CPUs: prefill and decode, each a process, against one engine that does both."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from segue.engine.models.model_store import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
WORDS = ["the", "capital", "of", "France", "is", "Paris", "and", "a", "river", "flows", "through", "it"]

pytestmark = [pytest.mark.sglang, pytest.mark.model]


class Side:
    """An engine's process."""

    def __init__(self, mode: str, model: Path, port: int, bootstrap: int, log: IO[str]) -> None:
        env = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": f"{HERE / 'absent'}:{ROOT / 'src'}",
        }
        self.process = subprocess.Popen(
            [PYTHON, HERE / "sglang_side.py", mode, model, str(port), str(bootstrap)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engine has ended; its log has the reason"
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")

    def end(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def prompts() -> list[str]:
    """Some of them take two chunks."""
    rng = random.Random(5)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.choice([5, 20, 60, 90]))) for _ in range(5)]


class Engines:
    """Engines that were started; their logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sides: list[Side] = []
        self.rng = random.Random(6)

    def start(self, mode: str) -> Side:
        model = resolve_model(DEFAULT_MODEL, progress=lambda *_: None)
        port = 31000 + 100 * ["null", "prefill", "decode"].index(mode)
        with (self.folder / f"{mode}{len(self.sides)}.log").open("w") as log:
            self.sides.append(Side(mode, model, port, 31098, log))
        return self.sides[-1]

    def rooms(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 2**63) for _ in range(count)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("logs"))
    yield made
    for side in made.sides:
        side.end()


@pytest.fixture(scope="module")
def wanted(engines: Engines) -> list[str]:
    """The answers of one engine that does both."""
    one = engines.start("null")
    assert one.answer() == {"ready": "null"}
    one.ask(prompts=prompts(), tokens=12)
    texts: list[str] = one.answer()["texts"]
    one.end()
    return texts


@pytest.fixture(scope="module")
def pair(engines: Engines, wanted: list[str]) -> list[Side]:
    sides = [engines.start(mode) for mode in ("prefill", "decode")]
    assert [side.answer()["ready"] for side in sides] == ["prefill", "decode"]
    return sides


def ask(engines: Engines, pair: list[Side], batch: list[str]) -> None:
    rooms = engines.rooms(len(batch))
    for side in pair:
        side.ask(prompts=batch, rooms=rooms, tokens=12)


def test_a_killed_prefill_fails_its_requests_and_its_successor_serves(
    engines: Engines, pair: list[Side], wanted: list[str]
) -> None:
    """`kill -9` of prefill with requests open; another one starts at the same address. Answers are those of
    one engine, before and after."""
    prefill, decode = pair
    first = prompts()
    ask(engines, pair, first)
    assert "error" not in prefill.answer()
    assert decode.answer()["texts"] == wanted
    ask(engines, pair, first)
    prefill.end()
    answer = decode.answer()
    assert re.search("PEER_LOST|TRANSFER_FAILED|BOOTSTRAP_UNREACHABLE", answer.get("error", "")), answer
    again = engines.start("prefill")
    assert again.answer() == {"ready": "prefill"}
    ask(engines, [again, decode], first)
    assert "error" not in again.answer()
    assert decode.answer()["texts"] == wanted
