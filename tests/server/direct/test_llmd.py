"""llm-d's sidecar and endpoint picker at segue's own instances, by requests recorded from their source."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import tiny_model
import torch
from deployment import Deployment, deployment
from llmd_sidecar import CACHE_LABELS, Leg, nixlv2_decode, nixlv2_prefill, picker_reads

from segue.kv.ids import Role

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TEXT = {
    "model": "unknown",
    "prompt": "a prompt of some pages, which both get",
    "max_tokens": 9,
    "temperature": 0,
}
CHAT = {
    "model": "unknown",
    "messages": [{"role": "user", "content": "hello there"}],
    "max_completion_tokens": 9,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    torch.set_num_threads(1)
    folder = tiny_model.save(tmp_path_factory.mktemp("tiny"))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    with deployment(Role.PREFILL, Role.DECODE, http_port=0, model=str(folder)) as made:
        yield made


@pytest.fixture(autouse=True)
def _at_rest(pair: Deployment) -> Iterator[None]:
    yield
    pair.assert_comes_to_rest()


def door(made: Deployment, role: Role) -> str:
    [found] = made.by_role(role)
    assert found.http is not None
    return "http://{}:{}".format(*found.http.address)


def post(made: Deployment, role: Role, leg: Leg, path: str) -> httpx.Response:
    # `min_tokens` 1 and the rest of prefill's leg come from the sidecar, as does the name of the request.
    return httpx.post(door(made, role) + path, json=leg.body, headers=leg.headers, timeout=60)


def text(answer: httpx.Response) -> str:
    """The text of a whole or a streamed answer."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["text"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"]["completion_tokens"] == 9
    return "".join(choice["delta"].get("content") or "" for one in events for choice in one["choices"])


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_the_sidecars_two_steps_with_nixlv2(pair: Deployment, path: str, body: dict[str, Any]) -> None:
    first = post(pair, Role.PREFILL, nixlv2_prefill(body, "r1"), path)
    assert first.status_code == 200
    assert first.json()["kv_transfer_params"]["do_remote_prefill"] is True
    one = text(post(pair, Role.DECODE, nixlv2_decode(body, "r1", first.json()), path))
    again = post(pair, Role.PREFILL, nixlv2_prefill(body, "r2"), path)
    assert text(post(pair, Role.DECODE, nixlv2_decode(body, "r2", again.json()), path)) == one
    assert one


def test_a_request_that_the_picker_gives_no_prefill_is_refused_by_name(pair: Deployment) -> None:
    """The sidecar then sends the client's body to decode alone: its picker has to choose prefill always."""
    answer = post(pair, Role.DECODE, Leg(dict(TEXT), {}), "/v1/completions")
    assert answer.status_code == 400
    assert "kv_transfer_params" in answer.text


def test_a_prefill_that_answers_without_params_leaves_a_refusal(pair: Deployment) -> None:
    answer = post(pair, Role.DECODE, nixlv2_decode(TEXT, "r", {}), "/v1/completions")
    assert answer.status_code == 400


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_picker_finds_its_metrics_at_every_instance(pair: Deployment, role: Role) -> None:
    read = picker_reads(httpx.get(f"{door(pair, role)}/metrics", timeout=60).text)
    assert read["vllm:num_requests_waiting"] == read["vllm:num_requests_running"] == 0
    assert all(read[name] > 0 for name in CACHE_LABELS)


def test_what_the_picker_reads_moves(pair: Deployment) -> None:
    """A prompt that prefill holds for a decode that has not come uses KV."""
    first = post(pair, Role.PREFILL, nixlv2_prefill(TEXT, "r"), "/v1/completions")
    at, ends_at = f"{door(pair, Role.PREFILL)}/metrics", time.monotonic() + 10
    # An instance counts its pages at the end of a turn, which may be after the answer.
    while not picker_reads(httpx.get(at, timeout=60).text)["vllm:kv_cache_usage_perc"]:
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    text(post(pair, Role.DECODE, nixlv2_decode(TEXT, "r", first.json()), "/v1/completions"))
