"""This tree and the wheel of an earlier version in one deployment, where the ranges of versions meet."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from collections import Counter
from io import BytesIO
from itertools import count
from pathlib import Path

import msgspec
import pytest
from cluster import MODEL
from served import Served
from tiny_model import VOCAB
from traffic import Ask, Result, asks, stream

from segue.kv.protocol.messages import HANDOFF_VERSIONS
from segue.kv.session.frames import SESSION_VERSIONS
from segue.kv.versions import Versions

ROOT = Path(__file__).resolve().parents[2]
#: A commit of version 0.2.0, and not its tag: a clone need not have tags.
EARLIER = "54d7d41125f011bbdcc345d2b83c77dd96cfab84"
pytestmark = pytest.mark.slow
GREEDY = [ask for ask in asks(5, 32, vocab=VOCAB, longest=200, max_tokens=24) if ask.seed is None]

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
    # What it needs and this version does not.
    wheels = [str(folder / "source"), "httpx==0.28.1", "httpcore==1.0.9"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, *wheels]
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


@pytest.mark.parametrize(("older", "transport"), [("prefill", "shm"), ("decode", "tcp")])
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


@pytest.mark.timeout(600)
def test_a_deployment_of_this_version_takes_the_place_of_an_earlier_one_under_load(
    earlier: Path, tiny: Path
) -> None:
    """As docs/upgrading.md says where the versions have none in common: the second deployment starts beside
    the first one, the clients move, the first one drains. No request fails, and each greedy answer is the
    same on both."""
    model = ("--model", str(tiny), "--served-model-name", MODEL, "--dtype", "float32")
    words = (*model, "--port", "0", "--kv-gib", "0.05", "--threads-per-worker", "1")
    with (
        Served(*words, environ={"PYTHONPATH": str(earlier)}) as first,
        Served(*words, wait=False) as second,
    ):
        results = asyncio.run(_replaced(first, second))
    found = [result for of_one in results.values() for result in of_one]
    assert Counter(result.error for result in found) == {"": len(found)}
    answers = [
        {(result.ask.prompt, tuple(result.tokens)) for result in results[each.url]}
        for each in (first, second)
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(GREEDY)


async def _replaced(first: Served, second: Served) -> dict[str, list[Result]]:
    """What four clients get, by the URL that they ask; each prompt is asked at both."""
    results: dict[str, list[Result]] = {first.url: []}
    url, numbers = first.url, count()
    over, news = asyncio.Event(), asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            at = url
            results[at].append(await stream(at, MODEL, GREEDY[next(numbers) % len(GREEDY)], within_s=180))
            news.set()

    async def answered(more: int) -> None:
        until = len(results[url]) + more
        while len(results[url]) < until:
            news.clear()
            await asyncio.wait_for(news.wait(), 180)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    try:
        await answered(2 * len(GREEDY))
        await asyncio.to_thread(second.ready)
        await answered(len(GREEDY))
        results[second.url] = []
        url = second.url
        # All requests that the first one still has came before this one, which it has when it is told to end.
        begun, long = asyncio.Event(), Ask(GREEDY[0].prompt, 1000)
        last = asyncio.create_task(stream(first.url, MODEL, long, within_s=180, first=begun))
        await asyncio.wait_for(begun.wait(), 180)
        assert await asyncio.to_thread(first.stop, at_rest=False) == 0
        assert (last.done(), (await last).error, len(last.result().tokens)) == (True, "", 1000)
        await answered(2 * len(GREEDY))
    finally:
        over.set()
        await asyncio.gather(*clients)
    return results
