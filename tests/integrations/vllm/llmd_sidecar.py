"""What llm-d's routing sidecar sends to prefill and decode, and what its endpoint picker reads. Recorded from
the source of llm-d-router at ebab68792:

- `pkg/sidecar/proxy/connector_nixlv2.go`, `connector_mooncake.go`, `pkg/common/request/tokens.go`
- `pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go`, `extractor.go`

Nobody has run the sidecar itself against segue.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

Body = dict[str, Any]
#: `chatCompletionTokenLimitFields`: each is 1 for prefill, also where the client gave none.
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
#: `defaultEngineConfigs` for the engine type vllm: waiting, running, share of the KV cache, its sizes.
VALUES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
CACHE_INFO, CACHE_LABELS = "vllm:cache_config_info", ("block_size", "num_gpu_blocks")


class Leg(NamedTuple):
    """One request of the sidecar."""

    body: Body
    headers: dict[str, str]


def nixlv2_prefill(body: Mapping[str, Any], request_id: str) -> Leg:
    """`--kv-connector=nixlv2`, first step."""
    sent = dict(body)
    sent["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    sent["stream"] = False
    sent.pop("stream_options", None)
    return Leg(sent | dict.fromkeys(TOKEN_LIMITS, 1), {"x-request-id": request_id})


def nixlv2_decode(body: Mapping[str, Any], request_id: str, answer: Mapping[str, Any]) -> Leg:
    """Second step: the client's body with the `kv_transfer_params` of prefill's answer (null without)."""
    sent = {**body, "kv_transfer_params": answer.get("kv_transfer_params")}
    return Leg(sent, {"x-request-id": request_id})


def mooncake(body: Mapping[str, Any], host: str, port: int, query: Mapping[str, Any]) -> tuple[Leg, Leg]:
    """`--kv-connector=mooncake`: both at once, for a rank that `GET http://HOST:PORT/query` names."""
    engines = {
        rank: found["engine_id"] for rank, found in query.items() if isinstance(found["engine_id"], str)
    }
    rank, engine = next(iter(engines.items()))
    transfer = f"xfer-{uuid.uuid4()}"
    prefill = dict(body)
    prefill["kv_transfer_params"] = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "transfer_id": transfer,
    }
    prefill["max_tokens"] = 1
    if "max_completion_tokens" in body:
        prefill["max_completion_tokens"] = 1
    prefill["stream"] = False
    prefill.pop("stream_options", None)
    decode = dict(body)
    decode["kv_transfer_params"] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer,
        "remote_bootstrap_addr": f"http://{host}:{port}",
        "remote_engine_id": engine,
    }
    return Leg(prefill, {"X-data-parallel-rank": rank}), Leg(decode, {})


def picker_reads(text: str) -> dict[str, float]:
    """What the endpoint picker takes from a page of metrics; KeyError names the metric that it misses."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = {family.name: family.samples for family in text_string_to_metric_families(text)}
    found = {name: samples[name][0].value for name in VALUES}
    labels = samples[CACHE_INFO][0].labels
    return found | {name: int(labels[name]) for name in CACHE_LABELS}
