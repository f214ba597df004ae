"""The backend of `ray.serve.llm` below Ray's own base class, without an engine. `make test-ray` runs it.

The engine's answer to `GET /query`, and the reader of the parameters, are the segue connector's own.
"""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest

from ports import HeldPort
from segue.integrations.vllm.vllm_params import PeerAddress, ReceiveParams, SendParams, parse_params
from segue.integrations.vllm.vllm_query import QueryServer, RankDirectory
from segue.kv import BootstrapUnreachable, ConfigError, LeaderId, new_incarnation

base = pytest.importorskip("ray.llm._internal.serve.engines.vllm.kv_transfer.base", exc_type=ImportError)


class Request(SimpleNamespace):
    """The members of a request of vLLM that a backend touches."""

    def model_copy(self, *, deep: bool = False, update: dict[str, Any] | None = None) -> Request:
        return Request(**(copy.deepcopy(vars(self)) | (update or {})))


class Config:
    """The members of Ray's `LLMConfig` that a backend touches, once the engine's configuration is made."""

    def __init__(self, **kwargs: Any) -> None:
        self.engine_kwargs = kwargs
        self.engines = dict(kwargs)

    def update_engine_kwargs(self, **kwargs: Any) -> None:
        self.engine_kwargs.update(kwargs)
        self.engines.update(kwargs)


def backend(role: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    from segue.integrations.ray import SegueConnectorBackend

    transfer = {"kv_connector": "SegueConnector", "kv_role": role, "kv_connector_extra_config": extra}
    made = SegueConnectorBackend(Config(kv_transfer_config=transfer))
    monkeypatch.setattr(made, "_compute_port_offset", lambda: 0, raising=True)
    made.setup()
    return made


def test_prefill_and_decode_of_one_request_meet_below_rays_base_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, ranks = HeldPort(), RankDirectory()
    ranks.add(0, PeerAddress(LeaderId(new_incarnation()), "127.0.0.1", 4444))
    extra = {"host": "127.0.0.1", "query_port": held.port}

    async def published() -> dict[str, str]:
        server = QueryServer("127.0.0.1", held.port, ranks)
        await server.open()
        try:
            return dict(await asyncio.to_thread(prefill.replica_metadata))
        finally:
            await server.close()

    prefill, decode = backend("kv_producer", extra, monkeypatch), backend("kv_consumer", {}, monkeypatch)
    assert isinstance(prefill, base.BaseConnectorBackend)
    peer = asyncio.run(published())
    request = Request(prompt="x", max_tokens=9, stream=True, kv_transfer_params={"do_remote_prefill": True})
    asked = decode.prepare_prefill_request(request=request, peer=peer)
    told = decode.prepare_decode_request(request=request, peer=peer, prefill_response=None)
    assert (asked.max_tokens, asked.stream) == (1, False)
    assert (told.max_tokens, told.stream) == (9, True)
    sends, receives = parse_params(asked.kv_transfer_params), parse_params(told.kv_transfer_params)
    assert isinstance(sends, SendParams)
    assert isinstance(receives, ReceiveParams)
    assert receives.room == sends.room
    assert (receives.peer.host, receives.peer.port, receives.peer.query) == ("127.0.0.1", held.port, True)


def test_an_engine_whose_configuration_is_made_already_gets_the_connectors_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = backend("kv_producer", {}, monkeypatch)
    for kwargs in (made.llm_config.engine_kwargs, made.llm_config.engines):
        assert kwargs["kv_transfer_config"]["kv_connector_module_path"] == "segue.integrations.vllm"


def test_an_engine_that_does_not_answer_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPort()
    prefill = backend("kv_producer", {"host": "127.0.0.1", "query_port": held.port}, monkeypatch)
    with pytest.raises(BootstrapUnreachable, match=f"{held.port}/query"):
        prefill.replica_metadata()


def test_a_prefill_of_another_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs kv_role kv_producer"):
        backend("kv_both", {}, monkeypatch).replica_metadata()


def test_ray_finds_the_backend_by_the_connectors_name_however_often_it_is_registered() -> None:
    """A cluster keeps the registration; each driver that deploys the application registers again."""
    from segue.integrations.ray import SegueConnectorBackend, ray_connector

    factory = ray_connector.KVConnectorBackendFactory
    try:
        ray_connector.register_connector()
        ray_connector.register_connector()
        assert factory.get_backend_class("SegueConnector") is SegueConnectorBackend
    finally:
        factory.unregister_backend("SegueConnector")
