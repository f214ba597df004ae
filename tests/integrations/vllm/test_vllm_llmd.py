"""llm-d's sidecar at SegueConnector, by requests recorded from its source (`llmd_sidecar`), over stand-ins
for vLLM's own classes."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch
from llmd_sidecar import mooncake, nixlv2_decode, nixlv2_prefill
from test_vllm_connector import TOKENS, at_rest, kv, until
from vllm_bench import request
from vllm_doubles import connector_engine
from vllm_doubles import install as install_vllm
from vllm_pair import expected

from ports import HeldPort

BODY = {"model": "m", "prompt": list(range(TOKENS)), "max_tokens": 9, "stream": True}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install_vllm(monkeypatch)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def wire(body: dict[str, Any]) -> Any:
    """The transfer params after a trip over HTTP."""
    return msgspec.json.decode(msgspec.json.encode(body))["kv_transfer_params"]


@pytest.mark.parametrize("flow", ["nixlv2", "mooncake"])
def test_the_sidecars_requests_hand_over(stack: ExitStack, module: Any, flow: str) -> None:
    port = HeldPort()
    prefill = connector_engine(stack, module, "kv_producer", transport=["tcp"], query_port=port.port)
    decode = connector_engine(stack, module, "kv_consumer", transport=["tcp"])
    both = [prefill, decode]
    if flow == "nixlv2":
        first = nixlv2_prefill(BODY, "r")
        assert first.body["max_tokens"] == 1
        prefill.add(request("p1", TOKENS, wire(first.body)))
        until(both, lambda: "p1" in prefill.answers)
        second = nixlv2_decode(BODY, "r", {"kv_transfer_params": prefill.answers["p1"]})
    else:
        with urllib.request.urlopen(f"http://127.0.0.1:{port.port}/query", timeout=30) as answer:
            query = msgspec.json.decode(answer.read())
        assert set(query) == {"0"}
        first, second = mooncake(BODY, "127.0.0.1", port.port, query)
        assert first.headers == {"X-data-parallel-rank": "0"}
        prefill.add(request("p1", TOKENS, wire(first.body)))
    decode.add(request("d1", TOKENS, wire(second.body)))
    until(both, lambda: "d1" in decode.ends)
    assert decode.loaded == ["d1"]
    assert torch.equal(kv(decode, "d1"), expected(range(TOKENS)))
    at_rest(both)


def test_a_decode_without_prefills_params_computes_itself(stack: ExitStack, module: Any) -> None:
    """Without its header the sidecar sends the client's body as it is. Prefill answered no params:
    null."""
    decode = connector_engine(stack, module, "kv_consumer", transport=["tcp"])
    for name, params in (("d1", None), ("d2", wire(nixlv2_decode(BODY, "r", {}).body))):
        assert params is None
        decode.add(request(name, TOKENS, params))
    until([decode], lambda: len(decode.ends) == 2)
    assert decode.loaded == []
    at_rest([decode])
