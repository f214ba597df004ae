"""An instance that does not fit joins a deployment that serves: nobody notices but its own log."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx2 as httpx
import pytest
import traffic
from cluster import MODEL, Cluster
from served import Served
from tiny_model import VOCAB

pytestmark = [pytest.mark.timeout(240)]

SMALL = ("--kv-gib", "0.05", "--threads-per-worker", "1")


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    with Cluster(tiny, flags=("--transport", "shm")) as made:
        yield made


@pytest.fixture(scope="module")
def other_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny`, but of another length: its context is shorter than what the deployment serves."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


def ready(cluster: Cluster) -> bool:
    return httpx.get(f"{cluster.url}/ready", timeout=60).status_code == 200


def served(cluster: Cluster, asks: list[traffic.Ask]) -> dict[traffic.Ask, list[int]]:
    """The tokens of each; none may fail, whomever they are given to."""

    async def run() -> list[traffic.Result]:
        return list(await asyncio.gather(*(traffic.stream(cluster.url, MODEL, ask) for ask in asks)))

    results = asyncio.run(run())
    assert [(r.error, r.text) for r in results if r.error] == []
    return {r.ask: r.tokens for r in results}


#: The log line of the incompatible instance, and its flags.
INCOMPATIBLE = {
    "dtype": ("start both with --dtype float32", ("--dtype", "float16")),
    "model": ("start both with the same --model, --revision and --dtype", ("--dtype", "float32")),
    "transport": (
        "start both sides with the same --transport",
        ("--dtype", "float32", "--transport", "tcp"),
    ),
}


@pytest.mark.parametrize(
    ("role", "what"),
    [
        pytest.param("decode", "dtype", marks=pytest.mark.slow),
        pytest.param("prefill", "model", marks=pytest.mark.soak),
        pytest.param("decode", "model", marks=pytest.mark.soak),
        pytest.param("decode", "transport", marks=pytest.mark.soak),
        pytest.param("prefill", "dtype", marks=pytest.mark.soak),
        pytest.param("prefill", "transport", marks=pytest.mark.soak),
    ],
)
def test_an_incompatible_peer_disturbs_no_other_and_learns_what_to_change(
    cluster: Cluster, tiny: Path, other_model: Path, role: str, what: str
) -> None:
    said, flags = INCOMPATIBLE[what]
    asks = traffic.asks(5, 16, vocab=VOCAB - 8, longest=200, max_tokens=12)
    assert any(len(ask.prompt) > 64 for ask in asks), "one must be too long for the other model"
    wanted = served(cluster, asks)
    model = other_model if what == "model" else tiny
    registry = f"http://127.0.0.1:{cluster.registry.port}"
    words = ("--registry", registry, "--model", str(model), "--served-model-name", MODEL, "--name", "odd-one")
    with Served(*words, *SMALL, *flags, command=role) as odd:
        # Who dials hears why: decode.
        listener = odd if role == "decode" else cluster.parts["decode-0"]
        port = cluster.ports("prefill-0")[0] if role == "decode" else int(odd.line.rpartition(":")[2])
        heard = re.compile(rf"cannot join \S+:{port}: .*{re.escape(said)}")
        assert listener.logged(heard)
        tried = listener.logged(re.compile(rf"cannot join \S+:{port}: "))
        reasons = [line.partition("cannot join")[2] for line in tried]
        assert all(one != after for one, after in pairwise(reasons)), "what stays as it is is said once"
        [(name, _)] = odd.states().items()
        until = time.monotonic() + 60
        while len(odd.states()[name]["sessions"]) < 1:  # nobody tells a test that the frontend has come
            assert time.monotonic() < until, "the frontend has no session to it"
            time.sleep(0.05)
        for _ in range(3):
            assert served(cluster, asks) == wanted
            assert ready(cluster)
        assert odd.states()[name]["at_rest"]
        assert "Traceback" not in odd.log()
        # A deployment at rest has a session from each half to each other one, which these refuse.
        assert odd.stop(at_rest=False) == 0
    assert served(cluster, asks[:4]) == {ask: wanted[ask] for ask in asks[:4]}
    assert ready(cluster)
    cluster.rest()
