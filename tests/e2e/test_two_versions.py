"""This tree and the wheel of an earlier version in one deployment, where the ranges of versions meet."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from itertools import count
from pathlib import Path

import msgspec
import pytest
from cluster import MODEL, Cluster
from tiny_model import VOCAB
from traffic import Result, asks, stream

from segue.kv.protocol.messages import HANDOFF_VERSIONS
from segue.kv.session.frames import SESSION_VERSIONS
from segue.kv.versions import Versions

ROOT = Path(__file__).resolve().parents[2]
#: A commit of version 0.2.0, and not its tag: a clone need not have tags.
EARLIER = "54d7d41125f011bbdcc345d2b83c77dd96cfab84"
pytestmark = pytest.mark.slow

#: Prints the ranges that a version speaks, the session's first.
RANGES = (
    "import msgspec; from segue.kv.session.frames import SESSION_VERSIONS as s; "
    "from segue.kv.protocol.messages import HANDOFF_VERSIONS as h; "
    "print(msgspec.json.encode([s, h]).decode())"
)
#: Runs an example whose child process imports segue from another folder.
OTHER_CHILD = (
    "import os, runpy, sys; from segue import kv; child, example, *sys.argv[1:] = sys.argv[1:]; "
    "os.environ['PYTHONPATH'] = child; sys.argv[0] = example; runpy.run_path(example, run_name='__main__')"
)


def run(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python that imports segue from `source`."""
    environ = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files that the wheel of `EARLIER` installs."""
    archive = subprocess.run(["git", "archive", EARLIER], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"this clone has no commit {EARLIER}")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder / "source", filter="data")
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "installed")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "installed"


@pytest.fixture(scope="module")
def apart(earlier: Path) -> list[Versions]:
    """The two ranges of the first protocol of which there is no common version; empty if there is none."""
    said = run(earlier, RANGES)
    if said.returncode != 0:
        pytest.skip(f"{EARLIER} says no range of versions")
    theirs = msgspec.json.decode(said.stdout, type=list[Versions])
    both = zip((SESSION_VERSIONS, HANDOFF_VERSIONS), theirs, strict=True)
    return next(([ours, other] for ours, other in both if ours.common(other) is None), [])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("older", ["prefill", "decode"])
def test_this_version_and_an_earlier_one_hand_over_or_say_why_not(
    earlier: Path, apart: list[Versions], older: str, transport: str
) -> None:
    decode, prefill = (ROOT / "src", earlier) if older == "prefill" else (earlier, ROOT / "src")
    done = run(decode, OTHER_CHILD, str(prefill), str(ROOT / "examples" / "handover.py"), transport)
    if apart:
        assert "protocol in common" in done.stderr
        assert [str(versions) in done.stderr for versions in apart] == [True, True]
    else:
        assert done.stdout.strip() == "first token 42, KV equal", done.stderr


@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_instances_are_replaced_by_this_version_one_by_one_under_load(
    earlier: Path, apart: list[Versions], tiny: Path
) -> None:
    """Clients of a frontend of each version: no request fails, and each greedy answer is the same at every
    stage."""
    if apart:
        pytest.skip(f"{EARLIER} and this tree speak no version in common: {apart[0]} and {apart[1]}")
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    older = {name: {"PYTHONPATH": str(earlier)} for name in (*names, "frontend-older")}
    frontends = ("frontend", "frontend-older")
    with Cluster(tiny, names, frontends=frontends, environ=older) as made:
        registry = f"http://127.0.0.1:{made.registry.port}"

        def replace(name: str) -> None:
            """As an orchestrator does: `preStop`, SIGTERM, a new process at the same place."""
            words = ["ps", "--registry", registry, "--json"]
            rows = msgspec.json.decode(segue(*words))
            address = f"127.0.0.1:{made.ports(name)[0]}"
            [row] = [row for row in rows if row["address"] == address]
            segue("drain", row["instance"], "--registry", registry, "--timeout", "120")
            part = made.parts[name]
            assert part.stop(at_rest=False) == 0
            del made.environ[name]
            made.start(name)

        results = asyncio.run(_under_load([made.parts[name].url for name in frontends], names, replace))
        assert Counter(result.error for result in results) == {"": len(results)}
        answers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for result in results:
            answers.setdefault(result.ask.prompt, set()).add(tuple(result.tokens))
        assert all(len(each) == 1 for each in answers.values())
        assert len(results) > 4 * len(answers), "each prompt was asked again at several stages"


def segue(*words: str) -> bytes:
    command = [sys.executable, "-m", "segue.cli.main", *words]
    done = subprocess.run(command, capture_output=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def _under_load(
    urls: list[str], names: tuple[str, ...], replace: Callable[[str], None]
) -> list[Result]:
    """Four clients ask both frontends in turns while each of `names` is replaced, and for a while before and
    after."""
    greedy = [ask for ask in asks(5, 32, vocab=VOCAB, longest=200, max_tokens=24) if ask.seed is None]
    results: list[Result] = []
    over, news = asyncio.Event(), asyncio.Event()
    numbers = count()

    async def client() -> None:
        while not over.is_set():
            number = next(numbers)
            ask = greedy[number // 2 % len(greedy)]
            results.append(await stream(urls[number % 2], MODEL, ask, within_s=180))
            news.set()

    async def answered(more: int) -> None:
        until = len(results) + more
        while len(results) < until:
            news.clear()
            await news.wait()

    clients = [asyncio.create_task(client()) for _ in range(4)]
    try:
        for name in names:
            await answered(2 * len(greedy))
            await asyncio.to_thread(replace, name)
        await answered(2 * len(greedy))
    finally:
        over.set()
        await asyncio.gather(*clients)
    return results
