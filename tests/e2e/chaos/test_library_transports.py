"""Whole deployments over the transports whose library moves the bytes: tokens, kills and restarts."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import traffic
from cluster import Cluster
from engine_models import generate
from served import Served
from soak_kills import references
from test_restart import killed_in_the_middle, serves_again
from test_serve import completion, token_ids
from tiny_model import VOCAB

from segue.kv.transport.kinds import KINDS, USABLE

pytestmark = pytest.mark.timeout(240)

COUNT = 8
AVAILABLE = KINDS.available()
#: Mooncake has its conformance tests in `make test-slow`, and these in `make soak`.
LIBRARIES = [
    pytest.param(
        name,
        marks=[*marks, pytest.mark.skipif(AVAILABLE[name] != USABLE, reason=f"{name}: {AVAILABLE[name]}")],
    )
    for name, marks in (("nixl", ()), ("mooncake", (pytest.mark.soak,)))
]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((), marks=pytest.mark.soak, id="tp 1"),
        pytest.param(("--prefill-tp", "2"), id="tp 2 to 1"),
    ],
)
@pytest.mark.parametrize("name", LIBRARIES)
def test_tokens_are_those_of_generate(tiny: Path, name: str, ranks: tuple[str, ...]) -> None:
    draw = random.Random(5)
    asked = [[draw.randrange(3, VOCAB - 8) for _ in range(n)] for n in (1, 15, 16, 17, 64, 100, 300)]
    wanted = generate(tiny, asked, COUNT)
    sizes = ("--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1", "--port", "0")
    how = ("--model", str(tiny), "--served-model-name", "tiny", "--transport", name, "--chunk-tokens", "64")
    with Served(*sizes, *how, *ranks) as made, ThreadPoolExecutor(8) as pool:

        def answer(prompt: list[int]) -> list[int]:
            return token_ids(completion(made.url, prompt, COUNT, model="tiny"))

        assert list(pool.map(answer, asked)) == wanted
        assert made.stop() == 0


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", LIBRARIES)
def test_lesson_09_an_instance_restarted_at_its_port_serves_the_next_request(
    tiny: Path, name: str, victim: str
) -> None:
    asks = traffic.asks(21, 4, vocab=VOCAB - 8, longest=300, max_tokens=200)
    with Cluster(tiny, flags=("--transport", name)) as cluster:
        reference = asyncio.run(references(cluster.url, asks))
        for result in asyncio.run(killed_in_the_middle(cluster, victim, asks)):
            assert result.tokens == reference[result.ask][: len(result.tokens)], "a wrong token"
            assert not result.error or result.error in traffic.TYPED, result.text
        asyncio.run(serves_again(cluster, asks[0], reference))
        assert asyncio.run(references(cluster.url, asks)) == reference
        cluster.rest()
