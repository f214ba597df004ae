"""The backend of `ray.serve.llm` for the segue connector: prefill and decode work at the same time."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx
import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from segue.integrations.ray.ray_params import connector_config, decode_params, prefill_params, published
from segue.kv import BootstrapUnreachable, ConfigError

#: The name in `kv_transfer_config`.
CONNECTOR = "SegueConnector"
#: Deadline of the engine's answer about itself, in seconds.
QUERY_S = 10.0


def register_connector() -> None:
    """Make `kv_connector: SegueConnector` known to every Ray process of the cluster. Call it in the driver,
    before `build_pd_openai_app`."""
    # Ray refuses a second registration, and keeps the first one as long as the cluster runs: an application
    # that is deployed again would fail.
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, f"{__name__}:SegueConnectorBackend")


class SegueConnectorBackend(BaseConnectorBackend):
    """Tells prefill and decode of one `transfer_id`, and decode where prefill is."""

    requires_peer_binding = True
    concurrent_handoff = True

    def setup(self) -> None:
        """Fill in the connector's module and this replica's address, before the engine starts."""
        kwargs = self.llm_config.engine_kwargs
        config = connector_config(
            kwargs["kv_transfer_config"],
            ray.util.get_node_ip_address(),
            self._compute_port_offset(),
            int(kwargs.get("data_parallel_size") or 1),
        )
        # The engine's configuration may have been made from a copy of these already.
        self.llm_config.update_engine_kwargs(kv_transfer_config=config)

    def replica_metadata(self) -> dict[str, str]:
        """Where decode finds the engine of this replica of prefill. Raises BootstrapUnreachable if the engine
        does not say, ConfigError for another role than kv_producer."""
        # Not `self.kv_transfer_config`: the base class of Ray's main branch has it no more.
        extra: Mapping[str, Any] = self.llm_config.engine_kwargs["kv_transfer_config"][
            "kv_connector_extra_config"
        ]
        if "query_port" not in extra:
            raise ConfigError("prefill's kv_transfer_config needs kv_role kv_producer")
        host = extra.get("advertise_host") or extra["host"]
        query = f"http://{f'[{host}]' if ':' in host else host}:{extra['query_port']}"
        try:
            answer = httpx.get(f"{query}/query", timeout=QUERY_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise BootstrapUnreachable(f"GET {query}/query: {error!r}") from error
        return published(answer.content, query)

    def prepare_prefill_request(self, *, request: Any, peer: Mapping[str, Any] | None) -> Any:
        """A copy of `request` for prefill. A new `transfer_id` is noted in `request` itself, for
        `prepare_decode_request`; what a client has given as `kv_transfer_params` is dropped."""
        params = prefill_params(secrets.token_hex(16))
        request.kv_transfer_params = params
        made = request.model_copy(deep=True)
        clamp_request_to_single_token(made)
        return made

    def prepare_decode_request(
        self, *, request: Any, peer: Mapping[str, Any] | None, prefill_response: Any
    ) -> Any:
        """A copy of `request` for decode, which `prepare_prefill_request` has seen."""
        made = request.model_copy(deep=True)
        made.kv_transfer_params = decode_params(request.kv_transfer_params["transfer_id"], peer)
        return made
