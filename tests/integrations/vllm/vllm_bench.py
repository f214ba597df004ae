"""What the tests of the vLLM tables share: a prefill and a decode engine, and requests to them."""

from __future__ import annotations

from typing import Any

from vllm_model import BLOCK, ModelEngine, ModelPool

from segue.integrations.prompt_claim import ModelFacts
from segue.integrations.vllm.vllm_decode_table import DecodeTable
from segue.integrations.vllm.vllm_params import PeerAddress, answer_params, engine_id
from segue.integrations.vllm.vllm_prefill_table import PrefillTable
from segue.integrations.vllm.vllm_request import EngineRequest
from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy
from segue.kv import Incarnation, LeaderId, PeerLost

MODEL = ModelFacts("weights", "float32")
SECRET = b"s" * 16
ADDRESS = PeerAddress(LeaderId(Incarnation("a" * 32), 1), "127.0.0.1", 7001)
LOST = PeerLost("the peer is gone").info
#: what routers send to prefill in the sequential flow, and what is added in the concurrent one
TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CONCURRENT_TO_DECODE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t1",
    "remote_bootstrap_addr": "http://127.0.0.1:8998",
    "remote_engine_id": engine_id(ADDRESS.leader),
}


def request(name: str = "r1", tokens: int = 10, params: Any = None, **more: Any) -> EngineRequest:
    return EngineRequest(request_id=name, tokens=list(range(tokens)), params=params, **more)


def to_decode(tokens: int = 10, room: int = 77, secret: bytes = b"") -> dict[str, object]:
    return answer_params(room, ADDRESS, tokens, secret)


def prefill_engine(blocks: int = 16, depth: int = 1, **settings: Any) -> ModelEngine:
    pool = ModelPool(blocks)
    rooms = iter(range(1000, 10**6))
    table = PrefillTable(MODEL, pool, BLOCK, ConnectorSettings(**settings), make_room=lambda: next(rooms))
    table.address = ADDRESS
    return ModelEngine(table, pool, LoadFailurePolicy.FAIL, depth)


def decode_engine(
    blocks: int = 16,
    policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
    depth: int = 1,
    secret: bytes = b"",
) -> ModelEngine:
    pool = ModelPool(blocks)
    table = DecodeTable(MODEL, pool, BLOCK, ConnectorSettings(), secret, policy=policy)
    return ModelEngine(table, pool, policy, depth)
