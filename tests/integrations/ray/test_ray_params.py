"""What the backend of `ray.serve.llm` tells prefill and decode, read by the segue connector itself."""

from __future__ import annotations

import pytest

from segue.integrations.ray.ray_params import connector_config, decode_params, prefill_params, published
from segue.integrations.vllm.vllm_params import (
    PeerAddress,
    ReceiveParams,
    SendParams,
    engine_id,
    parse_params,
)
from segue.integrations.vllm.vllm_query import RankDirectory
from segue.integrations.vllm.vllm_settings import parse_settings
from segue.kv import ConfigError, LeaderId, new_incarnation

QUERY = "http://10.0.0.7:9003"


def test_both_sides_meet_in_one_room_at_the_published_address() -> None:
    leader = LeaderId(new_incarnation())
    ranks = RankDirectory()
    ranks.add(0, PeerAddress(leader, "10.0.0.7", 4444))
    peer = published(ranks.answer(), QUERY)
    assert peer["segue_engine_id"] == engine_id(leader)
    sends, receives = parse_params(prefill_params("t1")), parse_params(decode_params("t1", peer))
    assert isinstance(sends, SendParams)
    assert receives == ReceiveParams(sends.room, PeerAddress(leader, "10.0.0.7", 9003, query=True))
    other = parse_params(prefill_params("t2"))
    assert isinstance(other, SendParams)
    assert other.room != sends.room


@pytest.mark.parametrize("peer", [None, {}, {"segue_query": QUERY}, {"mori_zmq_address": "host:x"}])
def test_a_replica_without_an_address_is_refused(peer: dict[str, str] | None) -> None:
    with pytest.raises(ConfigError, match="published no address: give SegueConnector in both"):
        decode_params("t", peer)


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"0": 3}', b'{"0": {"engine": "x"}}', b"<html>"])
def test_another_servers_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(ConfigError, match="no segue connector"):
        published(answer, QUERY)


def test_an_answer_without_the_first_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no engine"):
        published(b"{}", QUERY)


def test_prefill_gets_a_port_of_its_own_and_decode_none() -> None:
    given = {"kv_connector": "SegueConnector", "kv_role": "kv_producer"}
    made = connector_config(given, "10.0.0.7", 5, 1)
    assert made["kv_connector_module_path"] == "segue.integrations.vllm"
    settings = parse_settings(made["kv_connector_extra_config"])
    assert (settings.host, settings.query_port) == ("10.0.0.7", 9003)
    assert "kv_connector_extra_config" not in given, "Ray keeps the configuration that it was given"
    extra = {"query_port": 7000, "host": "0.0.0.0", "room_s": 5}
    made = connector_config({**given, "kv_connector_extra_config": extra}, "10.0.0.7", 2, 1)
    assert made["kv_connector_extra_config"] == {
        "query_port": 7002,
        "host": "0.0.0.0",
        "advertise_host": "10.0.0.7",
        "room_s": 5,
    }
    made = connector_config({"kv_role": "kv_consumer"}, "10.0.0.8", 5, 1)
    assert made["kv_connector_extra_config"] == {"host": "10.0.0.8"}


@pytest.mark.parametrize(
    ("given", "offset", "ranks", "says"),
    [
        ({"kv_role": "kv_producer"}, 0, 2, "data_parallel_size 2"),
        (
            {"kv_role": "kv_producer", "kv_connector_extra_config": {"query_port": 65535}},
            1,
            1,
            "leaves no port for replica 1",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    given: dict[str, object], offset: int, ranks: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        connector_config(given, "10.0.0.7", offset, ranks)
