"""The phases that SGLang's queues may see, the names of rooms, DP ranks, and what is refused at the start."""

from __future__ import annotations

import itertools

import pytest

from segue.integrations.sglang.sglang_phases import (
    RoomUses,
    SglPoll,
    digest_of,
    must_register,
    receiver_phase,
    sender_phase,
)
from segue.integrations.sglang.sglang_settings import (
    SchedulerFacts,
    backend_settings,
    check_scheduler,
    may_contact,
    version_refusal,
)
from segue.kv import ChecksumMode, ConfigError, DpRankConflict, DpRanks, KVPoll, RoomKey


@pytest.mark.parametrize(("phase", "released"), list(itertools.product(KVPoll, (False, True))))
def test_no_phase_is_illegal_in_its_queue(phase: KVPoll, released: bool) -> None:
    early = sender_phase(phase, inited=False, released=released)
    assert early in (SglPoll.FAILED, SglPoll.BOOTSTRAPPING, SglPoll.WAITING_FOR_INPUT)
    late = sender_phase(phase, inited=True, released=released)
    assert late is not SglPoll.BOOTSTRAPPING
    for told in (early, late):
        assert (told is SglPoll.FAILED) == (phase is KVPoll.FAILED and released)
    assert (late is SglPoll.SUCCESS) == (phase is KVPoll.SUCCESS and released)
    assert receiver_phase(phase) is not SglPoll.BOOTSTRAPPING


def test_a_sender_leaves_the_bootstrap_queue_when_decode_has_bound_the_room() -> None:
    assert sender_phase(KVPoll.BOOTSTRAPPING, inited=False, released=False) is SglPoll.BOOTSTRAPPING
    assert sender_phase(KVPoll.WAITING_FOR_INPUT, inited=False, released=False) is SglPoll.WAITING_FOR_INPUT


def test_uses_of_a_room_are_counted_and_bounded() -> None:
    uses = RoomUses(limit=2)
    assert [uses.next(7), uses.next(7), uses.next(8)] == [RoomKey(7), RoomKey(7, ordinal=1), RoomKey(8)]
    assert uses.next(7) == RoomKey(7, ordinal=2)
    uses.next(9)  # 8 was used the longest ago
    assert (len(uses), uses.next(7).ordinal) == (2, 3)
    for wrong in (0, -1, 2**64):
        with pytest.raises(ValueError):
            uses.next(wrong)


def test_a_use_with_other_tokens_has_a_generation_in_whatever_order_it_comes() -> None:
    """Two samples of a request that are computed again, each with its own tokens so far."""
    first, one, other = map(digest_of, ([5, 6], [5, 6, 7], [5, 6, 8]))
    prefill, decode = RoomUses(), RoomUses()
    for side in (prefill, decode):
        assert [side.next(7, first), side.next(7, first)] == [RoomKey(7), RoomKey(7, ordinal=1)]
    wanted = {tokens: decode.next(7, tokens) for tokens in (one, other)}
    assert {tokens: prefill.next(7, tokens) for tokens in (other, one)} == wanted
    assert len({key.generation for key in wanted.values()} | {0}) == 3
    assert decode.next(7, first) == RoomKey(7, ordinal=2)


FOLLOW = DpRanks(size=4, load_balance="follow_bootstrap_room")


@pytest.mark.parametrize(
    ("dp", "own", "room", "hint", "registers"),
    [
        (DpRanks(), 0, 5, None, False),
        (DpRanks(size=4, load_balance="round_robin"), 1, 5, None, True),
        (DpRanks(size=4, load_balance="round_robin"), 1, 5, 1, False),
        (FOLLOW, 1, 5, None, False),
        (DpRanks(size=4, load_balance="follow_bootstrap_room", force_query=True), 3, 5, None, True),
    ],
)
def test_only_a_rank_that_decode_cannot_infer_is_registered(
    dp: DpRanks, own: int, room: int, hint: int | None, registers: bool
) -> None:
    assert must_register(dp, own, room, hint) is registers


@pytest.mark.parametrize(("own", "hint", "named"), [(2, None, 1), (1, 3, 3)])
def test_a_rank_that_contradicts_the_room_or_the_hint_is_a_conflict(
    own: int, hint: int | None, named: int
) -> None:
    with pytest.raises(DpRankConflict, match=rf"on DP rank {own} .* names DP rank {named}: .*FORCE_QUERY"):
        must_register(FOLLOW, own, 5, hint)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"device": "npu"}, "device npu"),
        ({"device": "cuda"}, "DEVICE_MEMORY=unverified"),
        ({"device_metadata": True}, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
        ({"pipeline_stages": 2}, "--pp-size 1"),
        ({"context_ranks": 2}, "of prefill"),
        ({"decode_context_ranks": 2}, "of decode"),
        ({"kv_sharding": True}, "--enable-kv-cache-sharding"),
        ({"allocation_policy": "prefill_complete"}, "use early"),
        ({"host_receive": True}, "host-receive-threshold"),
        ({"staging_buffer": True}, "SGLANG_DISAGG_STAGING_BUFFER"),
        ({"deferred_release": False}, "DEFERRED_DECODE_KV_RELEASE=0"),
        ({"rust_server": True}, "SGLANG_RUST_SERVER"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(facts: dict[str, object], text: str) -> None:
    check_scheduler(SchedulerFacts())
    check_scheduler(SchedulerFacts(device="cuda"), "unverified")
    with pytest.raises(ConfigError, match=text):
        check_scheduler(SchedulerFacts(**facts))  # type: ignore[arg-type]


def test_settings_come_from_the_environment() -> None:
    settings = backend_settings(
        {"SEGUE_SGLANG_HOST": "10.0.0.1", "SEGUE_SGLANG_KV_CHECKSUM": "sampled", "PATH": "x"}
    )
    assert (settings.host, settings.kv_checksum) == ("10.0.0.1", ChecksumMode.SAMPLED)
    with pytest.raises(ConfigError, match="SEGUE_SGLANG_SECRETFILE: did you mean SEGUE_SGLANG_SECRET_FILE"):
        backend_settings({"SEGUE_SGLANG_SECRETFILE": "x"})
    with pytest.raises(ConfigError, match="kv_checksum"):
        backend_settings({"SEGUE_SGLANG_KV_CHECKSUM": "half"})
    with pytest.raises(ConfigError, match="device_memory"):
        backend_settings({"SEGUE_SGLANG_DEVICE_MEMORY": "1"})


def test_without_a_secret_loopback_alone_is_contacted() -> None:
    assert [
        may_contact(host, b"") for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "a.example")
    ] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert may_contact("10.0.0.1", bytes(16))


def test_another_version_gets_one_line() -> None:
    assert version_refusal("0.5.23") is None
    refusal = version_refusal("0.5.24")
    assert refusal is not None
    assert "0.5.24" in refusal
    assert "0.5.23" in refusal
