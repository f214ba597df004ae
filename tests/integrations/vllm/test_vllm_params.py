"""`kv_transfer_params`, the claim, `extra_config` and the refusals at the start."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_bench import ADDRESS, CONCURRENT_TO_DECODE, MODEL, SECRET, TO_PREFILL, request, to_decode

from segue.integrations.prompt_claim import Media, ModelFacts, claim_of
from segue.integrations.vllm.vllm_params import (
    PeerAddress,
    ReceiveParams,
    SendParams,
    engine_id,
    parse_params,
    room_of,
)
from segue.integrations.vllm.vllm_settings import PeerPolicy, parse_settings
from segue.kv import ConfigError, InvalidRequest, Unauthorized


def test_the_toy_proxys_params_open_a_room_of_prefills_own() -> None:
    assert parse_params(TO_PREFILL) == SendParams(0)


def test_a_transfer_id_is_the_same_room_on_both_sides() -> None:
    sent = parse_params(TO_PREFILL | {"transfer_id": "t1"})
    received = parse_params(CONCURRENT_TO_DECODE)
    assert isinstance(sent, SendParams)
    assert isinstance(received, ReceiveParams)
    assert sent.room == received.room == room_of("t1") != room_of("t2")
    assert received.peer == PeerAddress(ADDRESS.leader, "127.0.0.1", 8998, query=True)
    assert not received.signed


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_params_that_ask_for_nothing(params: Any) -> None:
    assert parse_params(params) is None


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_prefills_answer_goes_to_decode_unchanged(secret: bytes) -> None:
    assert parse_params(to_decode(10, 2**64 - 1, secret), secret) == ReceiveParams(
        2**64 - 1, ADDRESS, 10, signed=bool(secret)
    )


def test_fields_of_nixl_beside_ours_are_ignored() -> None:
    more = {"remote_block_ids": [[1]], "remote_request_id": "x", "tp_size": 2, "remote_num_tokens": 3}
    assert parse_params(to_decode() | more) == parse_params(to_decode())


@pytest.mark.parametrize("field", ["room", "incarnation", "dp_rank", "host", "port", "tokens"])
def test_a_signature_covers_each_field(field: str) -> None:
    params: dict[str, Any] = to_decode(10, 77, SECRET)
    other = {"room": "78", "incarnation": "b" * 32, "dp_rank": 2, "host": "10.0.0.9", "port": 1, "tokens": 11}
    params["segue"] = params["segue"] | {field: other[field]}
    with pytest.raises(Unauthorized, match="signature"):
        parse_params(params, SECRET)


def test_an_unsigned_answer_is_not_signed() -> None:
    params = parse_params(to_decode(), SECRET)
    assert isinstance(params, ReceiveParams)
    assert not params.signed


SEGUE: dict[str, Any] = to_decode()["segue"]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_decod": True}, "do_remote_decod"),
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "both"),
        ({"do_remote_prefill": True}, "segue"),
        ({"do_remote_prefill": True, "transfer_id": ""}, "transfer_id"),
        ({"do_remote_prefill": True, "transfer_id": "t"}, "remote_bootstrap_addr"),
        (CONCURRENT_TO_DECODE | {"remote_engine_id": "other"}, "remote_engine_id"),
        (CONCURRENT_TO_DECODE | {"remote_engine_id": "a" * 32 + "_dpx"}, "remote_engine_id"),
        (CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": "http://host"}, "remote_bootstrap_addr"),
        (CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": "http://a@host:1"}, "remote_bootstrap_addr"),
        (CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": "http://host:1/x"}, "remote_bootstrap_addr"),
        (CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": "ftp://host:1"}, "remote_bootstrap_addr"),
        (CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": "http://host:99999"}, "remote_bootstrap_addr"),
        (CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": "http://[::1"}, "remote_bootstrap_addr"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"room": 77}}, "room"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"host": "\ud800"}}, "host|utf-8"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"signature": "\ud800"}}, "signature|utf-8"),
        ({"do_remote_decode": "\ud800"}, "utf-8"),
        ({"\ud800": True}, "utf-8"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"room": "0"}}, "room"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"room": str(2**64)}}, "room"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"port": 0}}, "port"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"host": ""}}, "host"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"incarnation": "a"}}, "incarnation"),
        ({"do_remote_prefill": True, "segue": SEGUE | {"more": 1}}, "more"),
        ({"do_remote_prefill": True, "segue": [1]}, "segue"),
        ({3: True}, "3|str"),
        ([1], "params"),
    ],
)
def test_wrong_params_are_one_typed_error_that_names_the_field(params: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        parse_params(params)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://p-1.example:8998/", "p-1.example"),
        ("10.0.0.1:8998", "10.0.0.1"),
        ("http://[::1]:8998", "::1"),
    ],
)
def test_addresses_of_query(address: str, host: str) -> None:
    params = parse_params(CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": address})
    assert isinstance(params, ReceiveParams)
    assert (params.peer.host, params.peer.port) == (host, 8998)


def test_an_engine_id_names_the_rank() -> None:
    params = parse_params(CONCURRENT_TO_DECODE | {"remote_engine_id": engine_id(ADDRESS.leader)})
    assert isinstance(params, ReceiveParams)
    assert params.peer.leader == ADDRESS.leader
    assert ADDRESS.leader.dp_rank == 1


# ---- the claim ---------------------------------------------------------------------------------


def test_a_claim_fits_the_protocol_and_is_reproducible() -> None:
    assert claim_of(request("a"), MODEL) == claim_of(request("b"), MODEL)
    assert len(claim_of(request(), MODEL)) == 32


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": 11},
        {"cache_salt": "x"},
        {"cache_salt": ""},
        {"lora_name": "l", "lora_weights": "w"},
        {"lora_name": "l", "lora_weights": "v"},
        {"lora_name": "k", "lora_weights": "w"},
        {"media": [Media("h", 0, 2)]},
        {"media": [Media("g", 0, 2)]},
        {"media": [Media("h", 1, 2)]},
        {"media": [Media("h", 0, 3)]},
    ],
)
def test_a_claim_covers_what_the_kv_of_a_prompt_depends_on(other: dict[str, Any]) -> None:
    mine = claim_of(request(**other), MODEL)
    others: list[dict[str, Any]] = [{}, {"cache_salt": "y"}, {"lora_name": "l", "lora_weights": "u"}]
    assert mine not in [claim_of(request(**o), MODEL) for o in [*others, {"media": [Media("f", 0, 2)]}]]


@pytest.mark.parametrize("model", [ModelFacts("other", "float32"), ModelFacts("weights", "bfloat16")])
def test_a_claim_covers_weights_and_dtype(model: ModelFacts) -> None:
    assert claim_of(request(), model) != claim_of(request(), MODEL)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"lora_name": "l"}, "LoRA 'l'"),
        ({"embeds": True}, "embeddings"),
        ({"tokens": 0}, "tokens"),
        ({"cache_salt": "\ud800"}, "no text"),
    ],
)
def test_kv_that_nothing_identifies_is_not_handed_over(more: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        claim_of(request(**more), MODEL)


# ---- the start ---------------------------------------------------------------------------------


def test_settings_have_defaults_and_take_all_keys() -> None:
    assert parse_settings(None) == parse_settings({})
    assert parse_settings({"transport": ["tcp"], "room_s": 5, "peers": ["10.0.0.0/8", "host"]}).room_s == 5.0
    assert parse_settings({"room_s": 3600, "retain_s": 3600, "port": 65535}).room_s == 3600


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"transports": ["tcp"]}, r"'transports' \(did you mean transport\?\)"),
        ({"zzz": 1}, "'zzz'; the keys are transport, "),
        ({"room_s": "5"}, "room_s"),
        ({"room_s": 0}, "room_s"),
        ({"tls_key": "k", "tls_ca": "c"}, "tls_cert"),
        ({"tls_cert": "c"}, "tls_cert"),
        ({"room_s": float("nan")}, "room_s"),
        ({"retain_s": -1}, "retain_s"),
        ({"port": 70000}, "port"),
        ({"peers": ["10.0.0.1/8"]}, "10.0.0.1/8"),
        ({"kv_checksum": "most"}, "kv_checksum"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_settings(extra)


@pytest.mark.parametrize(
    ("secret", "peers", "host", "signed", "allowed"),
    [
        (b"", (), "127.0.0.1", False, True),
        (b"", (), "127.8.0.1", False, True),
        (b"", (), "::1", False, True),
        (b"", (), "localhost", False, True),
        (b"", (), "10.0.0.1", False, False),
        (b"", (), "localhost.evil.example", False, False),
        (b"", ("10.0.0.1",), "10.0.0.1", False, False),
        (SECRET, (), "10.0.0.1", True, True),
        (SECRET, (), "10.0.0.1", False, False),
        (SECRET, (), "127.0.0.1", False, False),
        (SECRET, ("10.0.0.1",), "10.0.0.1", False, True),
        (SECRET, ("10.0.0.0/24",), "10.0.0.7", False, True),
        (SECRET, ("10.0.0.0/24",), "10.0.1.7", False, False),
        (SECRET, ("10.0.0.0/24",), "prefill", False, False),
        (SECRET, ("prefill",), "Prefill", False, True),
        (SECRET, ("prefill",), "prefill.evil.example", False, False),
        (SECRET, ("::1",), "0:0:0:0:0:0:0:1", False, True),
    ],
)
def test_which_hosts_decode_contacts(
    secret: bytes, peers: tuple[str, ...], host: str, signed: bool, allowed: bool
) -> None:
    assert PeerPolicy(secret, peers).allows(host, signed) is allowed
