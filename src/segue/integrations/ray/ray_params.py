"""Settings and `kv_transfer_params` of the segue connector under `ray.serve.llm`, concurrent flow. Pure.

Prefill and decode get one `transfer_id` at the same time. Decode also gets the address of prefill's
`GET /query` and the `engine_id` that it answers, from what the replica of prefill has published of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from segue.kv import DECODE_ERRORS, ConfigError

#: The port of `GET /query` of the first replica; each further one takes a later port.
QUERY_PORT = 8998
MODULE = "segue.integrations.vllm"
_ENGINE_ID, _QUERY = "segue_engine_id", "segue_query"


class _QueriedRank(msgspec.Struct, frozen=True):
    """One data-parallel rank in the answer to `GET /query`."""

    engine_id: str


_ANSWER = msgspec.json.Decoder(dict[int, _QueriedRank])


def connector_config(given: Mapping[str, Any], host: str, offset: int, data_ranks: int) -> dict[str, Any]:
    """`kv_transfer_config` of a replica on `host`: `given`, with the connector's module, the address, and on
    prefill a port of its own for `GET /query`. Raises ConfigError for data-parallel ranks."""
    if data_ranks > 1:
        raise ConfigError(
            f"data_parallel_size {data_ranks}: under ray.serve.llm the segue connector serves one "
            "data-parallel rank; give num_replicas"
        )
    extra = dict(given.get("kv_connector_extra_config") or {})
    if extra.setdefault("host", host) in ("0.0.0.0", "::"):  # no peer reaches that
        extra.setdefault("advertise_host", host)
    if given.get("kv_role") == "kv_producer":
        port = (extra.get("query_port") or QUERY_PORT) + offset
        if not 0 < port < 2**16:
            raise ConfigError(f"query_port {extra.get('query_port')} leaves no port for replica {offset}")
        extra["query_port"] = port
    return {"kv_connector_module_path": MODULE, **given, "kv_connector_extra_config": extra}


def published(answer: bytes, query: str) -> dict[str, str]:
    """The metadata of a prefill replica, whose `GET /query` at `query` answers `answer`. Raises ConfigError
    for another server's answer."""
    try:
        entries = _ANSWER.decode(answer)
    except DECODE_ERRORS as error:
        raise ConfigError(f"{query}/query is no segue connector's: {error}") from None
    if 0 not in entries:
        raise ConfigError(f"{query}/query names no engine")
    return {_ENGINE_ID: entries[0].engine_id, _QUERY: query}


def prefill_params(transfer_id: str) -> dict[str, Any]:
    """For prefill: hand the prompt's KV over."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def decode_params(transfer_id: str, peer: Mapping[str, Any] | None) -> dict[str, Any]:
    """For decode: take the KV from the prefill replica `peer`. Raises ConfigError if `peer` has published no
    address."""
    missing = [key for key in (_ENGINE_ID, _QUERY) if not (peer or {}).get(key)]
    if peer is None or missing:
        raise ConfigError(
            "the replica of prefill has published no address: give SegueConnector in both configurations, "
            "with kv_role kv_producer in prefill's"
        )
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": peer[_ENGINE_ID],
        "remote_bootstrap_addr": peer[_QUERY],
    }
