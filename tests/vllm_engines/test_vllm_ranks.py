"""`vllm serve` with several ranks: tensor parallelism of unequal sizes, and two data-parallel ranks behind
one `GET /query`. On two cores the ranks wait for each other asleep (`plugins/waiting_ranks.py`)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from engines import PYTHON, TO_PREFILL, make_model, prompts
from serving import Servers, complete, serve, text

from ports import HeldPort

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON.exists(), reason="needs `make test-vllm`")]

COUNT = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
def test_tensor_parallel_sizes_that_differ(model: Path, tmp_path: Path, ranks: tuple[int, int]) -> None:
    ports = [HeldPort() for _ in range(2)]
    first, second = (held.port for held in ports)
    sizes = [("--tensor-parallel-size", str(count)) for count in ranks]
    with (
        serve(model, "kv_producer", "nobind", first, tmp_path, *sizes[0], transport=["tcp"]) as prefill,
        serve(model, "kv_consumer", "nobind", second, tmp_path, *sizes[1], transport=["tcp"]) as decode,
    ):
        servers = Servers(prefill, decode)
        asked = prompts(8, seed=18)
        wanted = [text(servers.decode, prompt, count=COUNT) for prompt in asked]
        for prompt, answer in zip(asked, wanted, strict=True):
            params = complete(servers.prefill, prompt, 1, TO_PREFILL)["kv_transfer_params"]
            assert text(servers.decode, prompt, params, COUNT) == answer
        servers.check(len(asked))


def engine_ids_at(query_port: int) -> list[str]:
    """Those of both ranks, as a router learns them; the second one tells the first one where it is."""
    deadline = time.monotonic() + 20
    while True:
        entries = httpx.get(f"http://127.0.0.1:{query_port}/query", timeout=10).json()
        if set(entries) == {"0", "1"}:
            return [str(entries[rank]["engine_id"]) for rank in ("0", "1")]
        assert time.monotonic() < deadline, entries
        time.sleep(0.1)  # it is asked


def test_two_data_parallel_ranks(model: Path, tmp_path: Path) -> None:
    """A router finds both at one `GET /query`, or by the answer of the rank that it has asked."""
    ports = [HeldPort() for _ in range(3)]
    first, second, query = (held.port for held in ports)
    size = ("--data-parallel-size", "2", "--api-server-count", "1")
    with (
        serve(
            model, "kv_producer", "nobind", first, tmp_path, *size, transport=["tcp"], query_port=query
        ) as prefill,
        serve(model, "kv_consumer", "nobind", second, tmp_path, transport=["tcp"]) as decode,
    ):
        servers = Servers(prefill, decode, query)
        asked = prompts(8, seed=19)
        wanted = [text(servers.decode, prompt, count=COUNT) for prompt in asked]
        engine_ids = engine_ids_at(query)
        assert len(set(engine_ids)) == 2
        for number, (prompt, answer) in enumerate(zip(asked, wanted, strict=True)):
            rank = number % 2
            params = complete(servers.prefill, prompt, 1, TO_PREFILL, rank)["kv_transfer_params"]
            assert text(servers.decode, prompt, params, COUNT) == answer
            to_decode = {
                "do_remote_prefill": True,
                "remote_bootstrap_addr": f"http://127.0.0.1:{query}",
                "remote_engine_id": engine_ids[rank],
                "transfer_id": f"t{number}",
            }
            with ThreadPoolExecutor() as threads:
                answered = threads.submit(text, servers.decode, prompt, to_decode, COUNT)
                complete(servers.prefill, prompt, 1, {**TO_PREFILL, "transfer_id": f"t{number}"}, rank)
                assert answered.result(60) == answer
        servers.check(2 * len(asked))
