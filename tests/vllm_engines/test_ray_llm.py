"""`ray.serve.llm` with segue's backend and real vLLM engines on CPUs, on a cluster of two raylets.

`make test-ray-llm` runs it. Two replicas of prefill and one of decode answer as one vLLM engine does alone.
The engines cache no prefixes, so tokens that vLLM counts as cached are those that came from prefill.
A hand-off that fails is an error (`kv_load_failure_policy` is `fail`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from engines import ENGINE, environment, make_model

pytestmark = pytest.mark.ray
pytest.importorskip("vllm")

COUNT, WORDS, STORE_BYTES = 200, 12, 80 * 2**20
SERVED = {key: value for key, value in ENGINE.items() if key != "skip_tokenizer_init"}  # answers are text
RAY = {"RAY_USAGE_STATS_ENABLED": "0"}
ALONE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    asked = [{"prompt_token_ids": prompt} for prompt in json.load(sys.stdin)]
    sampling = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    answers = LLM(**json.loads(sys.argv[1])).generate(asked, sampling)
    print(json.dumps([one.outputs[0].text for one in answers]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An application of two replicas of prefill and one of decode."""
    os.environ.update(environment("nobind") | RAY)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.llm import LLMConfig, build_pd_openai_app

    from ports import HeldPort
    from segue.integrations.ray import register_connector

    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("5e" * 32)
    secret.chmod(0o600)
    port = HeldPort().port
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=8, include_dashboard=False, object_store_memory=STORE_BYTES)
        cluster.add_node(num_cpus=8, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        register_connector()

        def side(role: str, replicas: int, **extra: Any) -> LLMConfig:
            transfer = {"kv_connector": "SegueConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
            transfer["kv_connector_extra_config"] = {"secret_file": str(secret), **extra}
            return LLMConfig(
                model_loading_config={"model_id": "dummy", "model_source": str(model)},
                accelerator_config={"kind": "cpu"},
                deployment_config={"num_replicas": replicas},
                engine_kwargs=SERVED | {"enable_prompt_tokens_details": True, "kv_transfer_config": transfer},
            )

        peers = [f"{ray.util.get_node_ip_address()}/32"]
        sides = {
            "prefill_config": side("kv_producer", 2),
            "decode_config": side("kv_consumer", 1, peers=peers),
        }
        serve.run(build_pd_openai_app(sides), name="llm", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_answers_are_those_of_one_engine_and_the_kv_is_prefills(url: str, model: Path) -> None:
    rng = random.Random(5)
    asked = [[rng.randrange(2, 500) for _ in range(rng.randrange(40, 300))] for _ in range(COUNT)]

    def ask(prompt: list[int]) -> Any:
        body = {"model": "dummy", "prompt": prompt, "max_tokens": WORDS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(ask, asked))
    words = [json.dumps(SERVED | {"model": str(model)}), str(WORDS)]
    alone = subprocess.run(
        [sys.executable, "-c", ALONE, *words],
        env=environment("nobind"),
        input=json.dumps(asked),
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    expected = json.loads(alone.stdout.splitlines()[-1])
    assert [answer["choices"][0]["text"] for answer in answers] == expected
    loaded = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert [i for i, prompt in enumerate(asked) if loaded[i] < len(prompt) - 1] == []
