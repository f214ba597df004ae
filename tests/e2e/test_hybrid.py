"""Real servers with a model that keeps a state beside its KV: tokens equal generate, over shm and tcp, also
when sequences are retracted or continued on another instance."""

from __future__ import annotations

import asyncio
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
import tiny_model
import traffic
from cluster import MODEL, Cluster
from engine_models import HYBRIDS, generate
from served import Served
from test_serve import completion, token_ids

from segue.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OPTIONS = ("--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1", "--port", "0")
COUNT = 8


def saved(folder: Path, family: str) -> Path:
    make, sizes = HYBRIDS[family]
    changes = {"vocab_size": tiny_model.VOCAB, "initializer_range": 0.2}
    return tiny_model.save(folder / "model", make(**{**sizes, **changes}))


@pytest.mark.parametrize(
    ("family", "transport"),
    [("lfm2", "shm"), ("qwen3-next", "tcp"), pytest.param("qwen3.5", "shm", marks=pytest.mark.soak)],
)
def test_a_hybrid_folder_is_served(tmp_path: Path, family: str, transport: str) -> None:
    folder = saved(tmp_path, family)
    draw = random.Random(3)
    asked = [[draw.randrange(3, 250) for _ in range(n)] for n in (1, 2, 15, 16, 17, 64, 100, 300)]
    wanted = generate(folder, asked, COUNT)
    how = ("--model", str(folder), "--served-model-name", "hybrid", "--transport", transport)
    with Served(*OPTIONS, *how, "--chunk-tokens", "64") as made, ThreadPoolExecutor(8) as pool:

        def answer(prompt: list[int]) -> list[int]:
            return token_ids(completion(made.url, prompt, COUNT, model="hybrid"))

        assert list(pool.map(answer, asked)) == wanted
        # Once more: the pages of before are worth nothing without the state that was behind them.
        assert answer(asked[-1]) == wanted[-1]
        # A frontend sees how many more sequences fit.
        seen = httpx.get(f"{made.url}/metrics", timeout=60).text
        assert re.search(r'^segue_slots\{.*role="decode".*state="free"\} [1-9]', seen, re.MULTILINE), seen
        assert made.stop() == 0


#: Of each decode pool: slots for seven sequences or more, and 19 pages (lfm2) or 40.
TIGHT = ("--kv-gib", "0.0001")


# One sequence comes to fill more than half of the pages: two never end without a retraction, however late one
# of them begins.
@pytest.mark.parametrize(
    ("family", "many"), [("lfm2", 220), pytest.param("qwen3-next", 500, marks=pytest.mark.soak)]
)
def test_retracted_and_continued_sequences_have_the_tokens_of_generate(
    tmp_path: Path, family: str, many: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path, family)
    asks = [ask for ask in traffic.asks(5, 16, vocab=250, longest=60, max_tokens=many) if ask.seed is None]
    wanted = generate(folder, [list(ask.prompt) for ask in asks], many)
    with Cluster(
        folder,
        ("prefill-0", "decode-0", "decode-1"),
        flags=("--chunk-tokens", "32"),
        more={"decode-0": TIGHT, "decode-1": TIGHT},
    ) as cluster:

        async def one_dies() -> list[traffic.Result]:
            begun = [asyncio.Event() for _ in asks]
            running = [
                asyncio.create_task(
                    traffic.stream(cluster.url, MODEL, ask, first=first, request_id=f"r{at}", within_s=120)
                )
                for at, (ask, first) in enumerate(zip(asks, begun, strict=True))
            ]
            # In turn, each decode gets half of them: of five that have a token one at least is there.
            for one in asyncio.as_completed([first.wait() for first in begun]):
                await one
                if sum(first.is_set() for first in begun) > len(asks) // 2:
                    break
            await asyncio.to_thread(cluster.kill, "decode-0")
            return list(await asyncio.gather(*running))

        results = asyncio.run(one_dies())
        assert [(result.error, result.tokens) for result in results] == [("", tokens) for tokens in wanted]
        metrics = httpx.get(f"{cluster.url}/metrics", timeout=60).text
        retracted = any("retracted" in steps_of(cluster, f"r{at}", capsys) for at in range(len(asks)))
        del cluster.parts["decode-0"]  # what is left has to be at rest
    continued = [line for line in metrics.splitlines() if line.startswith("segue_continuations_total{")]
    assert sum(float(line.split()[-1]) for line in continued) > 0, "nothing was continued"
    assert retracted, "nothing was retracted"


def steps_of(cluster: Cluster, request_id: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The steps of a request on all instances that still run."""
    registry = f"http://127.0.0.1:{cluster.registry.port}"
    assert main(["explain", request_id, "--registry", registry, "--json"]) == 0
    life = json.loads(capsys.readouterr().out)
    return [name for part in life["parts"] for name, *_ in part["record"]["steps"]]
