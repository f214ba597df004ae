"""The worker side under two engines of the model: real sessions, real bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_struct
from vllm_bench import LOST, TO_PREFILL, request
from vllm_pair import CPU_ATTN, DeviceTensor, Pair, TensorWorker, expected, make_caches

import double_mori
from ports import HeldPort
from segue.integrations.vllm import vllm_rank
from segue.integrations.vllm.vllm_memory import cache_pool
from segue.integrations.vllm.vllm_orders import (
    AbortOrder,
    BlocksReleased,
    DeclineOrder,
    ExpectOrder,
    HandoffEnded,
    Order,
    ReceiveOrder,
)
from segue.integrations.vllm.vllm_params import PeerAddress, engine_id
from segue.integrations.vllm.vllm_query import RankDirectory, session_port
from segue.integrations.vllm.vllm_rank import (
    RankSide,
    Share,
    StepResults,
    WorkerPlace,
    before_ranks_meet,
    lead,
)
from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy
from segue.integrations.vllm.vllm_table import RequestEnd
from segue.integrations.vllm.vllm_worker import WorkerSide
from segue.kv import (
    KINDS,
    BootstrapTimeout,
    ChecksumMode,
    ConfigError,
    ErrorCode,
    Incarnation,
    Internal,
    KVManager,
    LeaderId,
    PeerLost,
    PeerRestarted,
    Role,
    RoomKey,
    TransferFailed,
)
from segue.kv.layout.content import Content, checksum
from segue.kv.ranks import checksums
from segue.kv.transport.base import EventSink
from segue.kv.transport.mori import MoriTransport
from segue.kv.transport.options import TransportOptions


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def port_holder() -> HeldPort:
    return HeldPort()


@pytest.fixture
def free_port(port_holder: HeldPort) -> int:
    return port_holder.port


def side_of(pair: Pair, role: str) -> TensorWorker:
    worker = getattr(pair, role).worker
    assert isinstance(worker, TensorWorker)
    return worker


def step(side: WorkerSide, orders: Sequence[Order]) -> None:
    """One step of an engine that computes nothing."""
    side.begin_step(orders)
    side.end_forward()


def hand_over(pair: Pair, name: str, tokens: int, prefix: int = 0) -> None:
    """The sequential flow: prefill answers, then decode begins."""
    pair.prefill.add(request(f"p{name}", tokens, TO_PREFILL))
    pair.until(lambda: f"p{name}" in pair.prefill.answers)
    pair.decode.add(request(f"d{name}", tokens, pair.prefill.answers[f"p{name}"]), prefix)


def served(pair: Pair, name: str) -> RequestEnd:
    pair.until(lambda: name in pair.decode.ends)
    return pair.decode.ends[name]


def at_rest(pair: Pair) -> None:
    """Nothing is held on either side, and each block is free."""
    pair.until(lambda: not pair.sizes())
    for engine in (pair.prefill, pair.decode):
        assert engine.at_rest
        assert len(engine.pool.free) == len(engine.pool.blocks)


def loaded_kv(pair: Pair, name: str) -> torch.Tensor:
    assert name in pair.decode.loaded, f"decode computed it itself: {outcomes(pair)}"
    return side_of(pair, "decode").kv[name]


def outcomes(pair: Pair) -> dict[str, int]:
    return dict(pair.decode.table.take_figures().outcomes)


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
@pytest.mark.parametrize("tokens", [1, 4, 13, 30])
def test_decode_has_the_kv_that_prefill_computed(stack: ExitStack, tokens: int, shared: bool) -> None:
    pair = Pair(stack, shared=shared)
    hand_over(pair, "1", tokens)
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert torch.equal(loaded_kv(pair, "d1"), expected(range(tokens)))
    at_rest(pair)


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)])
def test_tensor_parallel_ranks_hand_over_their_heads(
    stack: ExitStack, free_port: int, ranks: tuple[int, int], shared: bool
) -> None:
    """Also where the sides have different numbers of ranks; chunks leave when all have computed them."""
    pair = Pair(stack, ranks=ranks, shared=shared, query_port=free_port)
    for number in (1, 2):
        hand_over(pair, f"s{number}", 13)
        to_prefill, to_decode = concurrent(pair, f"t{number}")
        pair.decode.add(request(f"dc{number}", 30, to_decode))
        pair.prefill.add(request(f"pc{number}", 30, to_prefill))
        for name, tokens in ((f"ds{number}", 13), (f"dc{number}", 30)):
            assert served(pair, name) is RequestEnd.LENGTH
            assert torch.equal(loaded_kv(pair, name), expected(range(tokens)))
    at_rest(pair)
    assert outcomes(pair) == {"OK": 4}


@pytest.mark.parametrize(
    ("on_device", "transport", "ranks"),
    [
        ((True, True), [], (1, 1)),
        ((True, True), ["shm"], (1, 1)),
        ((True, False), ["tcp", "staged_tcp"], (1, 1)),
        ((False, True), ["tcp", "staged_tcp"], (1, 1)),
        ((True, True), [], (2, 1)),
    ],
)
def test_kv_of_a_device_leaves_when_the_device_has_computed_it(
    stack: ExitStack,
    free_port: int,
    on_device: tuple[bool, bool],
    transport: list[str],
    ranks: tuple[int, int],
) -> None:
    """Through staging, in both flows. The device of prefill computes nothing before somebody waits for it."""
    pair = Pair(stack, on_device=on_device, transport=transport, ranks=ranks, query_port=free_port)
    hand_over(pair, "s", 13)
    to_prefill, to_decode = concurrent(pair, "t")
    pair.decode.add(request("dc", 30, to_decode))
    pair.prefill.add(request("pc", 30, to_prefill))
    for name, tokens in (("ds", 13), ("dc", 30)):
        assert served(pair, name) is RequestEnd.LENGTH
        assert torch.equal(loaded_kv(pair, name), expected(range(tokens)))
    at_rest(pair)
    assert outcomes(pair) == {"OK": 2}


def test_a_prompt_that_the_device_still_computes_is_not_sent(stack: ExitStack) -> None:
    """Prefill's answers are there, and decode has asked. One thread waits for both, in the device's order."""
    pair = Pair(stack, on_device=(True, True), transport=[])
    [device] = side_of(pair, "prefill").devices
    device.goes_on.clear()
    hand_over(pair, "1", 13)
    hand_over(pair, "2", 13)
    for _ in range(20):
        pair.step()
    assert not pair.decode.ends
    assert sum(thread.name == "segue-ready" for thread in threading.enumerate()) == 1
    device.goes_on.set()
    for name in ("d1", "d2"):
        assert served(pair, name) is RequestEnd.LENGTH
        assert torch.equal(loaded_kv(pair, name), expected(range(13)))
    at_rest(pair)


class DoubleMori(MoriTransport):
    """`mori` over a double of its library."""

    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        super().__init__(on_event, options, double_mori.modules)

    @classmethod
    def unusable(cls) -> str:
        return ""


def test_a_transport_that_takes_a_devices_memory_needs_no_staging(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS.known, "mori", DoubleMori)  # type: ignore[index]
    monkeypatch.setattr(DeviceTensor, "device", torch.device("cuda:0"))
    stack.callback(double_mori.reset)
    # A checksum of this memory would be computed by torch on a GPU.
    pair = Pair(stack, on_device=(True, True), transport=["mori", "tcp"], kv_checksum=ChecksumMode.OFF)
    hand_over(pair, "1", 13)
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert torch.equal(loaded_kv(pair, "d1"), expected(range(13)))
    assert double_mori.FAULTS.writes
    at_rest(pair)


def test_a_device_that_fails_ends_the_hand_off(stack: ExitStack) -> None:
    """Decode computes the prompt, and prefill goes on."""
    pair = Pair(stack, on_device=(True, True), transport=[])
    worker = side_of(pair, "prefill")

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    worker.devices[0].launch(fail)
    hand_over(pair, "1", 13)
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert "d1" not in pair.decode.loaded
    hand_over(pair, "2", 13)
    assert served(pair, "d2") is RequestEnd.LENGTH
    assert torch.equal(loaded_kv(pair, "d2"), expected(range(13)))
    assert outcomes(pair) == {"TRANSFER_FAILED": 1, "OK": 1}
    at_rest(pair)


def children() -> set[int]:
    """The processes that this one has started."""
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_agent_hands_over_until_it_dies(stack: ExitStack, free_port: int, transport: str) -> None:
    """Its end ends the step, as that of the thread does: vLLM fails its health check."""
    pair = Pair(stack, shared=True, transport=[transport], agent=True, query_port=free_port)
    hand_over(pair, "1", 13)
    to_prefill, to_decode = concurrent(pair, "t2")
    pair.decode.add(request("d2", 30, to_decode))
    pair.prefill.add(request("p2", 30, to_prefill))
    for name, tokens in (("d1", 13), ("d2", 30)):
        assert served(pair, name) is RequestEnd.LENGTH
        assert torch.equal(loaded_kv(pair, name), expected(range(tokens)))
    at_rest(pair)
    agents = children()
    assert len(agents) == 2
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    for worker in (side_of(pair, "prefill"), side_of(pair, "decode")):
        with pytest.raises(PeerLost):
            until_raises(worker.side)


def until_raises(side: WorkerSide) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        step(side, [])
        time.sleep(0.001)


def test_an_agent_is_refused_where_it_cannot_map_the_pool(stack: ExitStack) -> None:
    with pytest.raises(ConfigError, match="an agent maps the pool"):
        Pair(stack, agent=True)


def test_many_requests_leave_nothing_behind(stack: ExitStack) -> None:
    pair = Pair(stack)
    for number in range(30):
        hand_over(pair, str(number), 5 + number % 20)
        if number % 3 == 0:
            assert served(pair, f"d{number}") is RequestEnd.LENGTH
    for number in range(30):
        assert served(pair, f"d{number}") is RequestEnd.LENGTH
        assert torch.equal(loaded_kv(pair, f"d{number}"), expected(range(5 + number % 20)))
    at_rest(pair)
    assert outcomes(pair) == {"OK": 30}


def test_a_prefix_that_decode_has_is_not_sent(stack: ExitStack) -> None:
    pair = Pair(stack)
    hand_over(pair, "1", 13, prefix=8)
    assert served(pair, "d1") is RequestEnd.LENGTH
    kv = loaded_kv(pair, "d1")
    assert torch.equal(kv[:, :, 8:], expected(range(13))[:, :, 8:])
    assert not kv[:, :, :8].any()
    at_rest(pair)


def concurrent(pair: Pair, transfer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router sends to prefill and to decode at once."""
    leader = side_of(pair, "prefill").side.address.leader
    to_decode = {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_bootstrap_addr": f"http://127.0.0.1:{pair.settings.query_port}",
        "remote_engine_id": engine_id(leader),
    }
    return {**TO_PREFILL, "transfer_id": transfer}, to_decode


def test_in_the_concurrent_flow_chunks_leave_while_the_prompt_is_computed(
    stack: ExitStack, free_port: int
) -> None:
    pair = Pair(stack, query_port=free_port)
    # Long enough that a chunk that did not wait for its forward would leave without its KV.
    side_of(pair, "prefill").forward_s = 0.05
    to_prefill, to_decode = concurrent(pair, "t1")
    pair.decode.add(request("d1", 30, to_decode))
    pair.prefill.add(request("p1", 30, to_prefill))
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert torch.equal(loaded_kv(pair, "d1"), expected(range(30)))
    # The engine of the model computes at most 6 tokens in a step: the chunks ended inside of blocks.
    assert pair.prefill.answers["p1"] is None
    at_rest(pair)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize(("ranks", "raising"), [((1, 1), 0), ((2, 1), 0), ((2, 1), 1)])
def test_what_a_step_that_raised_should_have_computed_is_not_sent(
    stack: ExitStack, free_port: int, ranks: tuple[int, int], raising: int, called: bool, on_device: bool
) -> None:
    """On no rank, also if the step raised on another one. vLLM calls `wait_for_save` all the same, or does
    not, by its runner."""
    pair = Pair(
        stack, query_port=free_port, retain_s=0.0, ranks=ranks, on_device=(on_device, on_device), transport=[]
    )
    worker = side_of(pair, "prefill")
    to_prefill, to_decode = concurrent(pair, "t1")
    pair.decode.add(request("d1", 5, to_decode))
    pair.prefill.add(request("p1", 5, to_prefill))
    worker.raised = {raising: RuntimeError("the forward failed") if called else None}
    with pytest.raises(TransferFailed, match="raised RuntimeError" if called else "before wait_for_save"):
        pair.until(lambda: False)  # the next step raises, too: vLLM fails its health check
    pair.running = [pair.decode]
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert "d1" not in pair.decode.loaded
    assert outcomes(pair) == {"TRANSFER_FAILED": 1}
    ends = [report for report in worker.side.take_results().reports if isinstance(report, HandoffEnded)]
    assert [report.error.code for report in ends if report.error] == [ErrorCode.TRANSFER_FAILED]


def test_the_second_request_does_not_ask_for_the_sessions_again(stack: ExitStack, free_port: int) -> None:
    pair = Pair(stack, query_port=free_port)
    for name in ("1", "2"):
        to_prefill, to_decode = concurrent(pair, name)
        pair.prefill.add(request(f"p{name}", 9, to_prefill))
        if name == "2":
            to_decode["remote_bootstrap_addr"] = "http://127.0.0.1:1"
        pair.decode.add(request(f"d{name}", 9, to_decode))
        assert served(pair, f"d{name}") is RequestEnd.LENGTH
        loaded_kv(pair, f"d{name}")
    at_rest(pair)


@pytest.mark.parametrize("leaves", ["decode", "prefill"])
def test_a_client_that_leaves_in_mid_prompt_ends_both_sides(
    stack: ExitStack, free_port: int, leaves: str
) -> None:
    """No other decode may come for the room (`retain_s` 0): prefill does not keep it either."""
    pair = Pair(stack, query_port=free_port, room_s=120.0, retain_s=0.0)
    to_prefill, to_decode = concurrent(pair, "t1")
    pair.decode.add(request("d1", 30, to_decode))
    pair.until(lambda: side_of(pair, "decode").side.sizes()["keys"])  # it knows the session
    pair.prefill.add(request("p1", 30, to_prefill))
    pair.step()
    pair.step()
    getattr(pair, leaves).abort(f"{leaves[0]}1")
    pair.until(lambda: "p1" in pair.prefill.ends and "d1" in pair.decode.ends)
    assert pair.decode.loaded == []
    assert getattr(pair, leaves).ends[f"{leaves[0]}1"] is RequestEnd.ABORT
    at_rest(pair)
    assert outcomes(pair) == {"ABORTED_BY_CLIENT": 1}


def test_kv_that_decode_declines_is_kept_no_longer(stack: ExitStack) -> None:
    pair = Pair(stack, room_s=600.0)
    hand_over(pair, "1", 13)
    pair.decode.abort("d1")
    at_rest(pair)


@pytest.mark.parametrize("policy", LoadFailurePolicy)
def test_a_prompt_whose_kv_is_spoiled_where_it_landed_is_computed_or_fails(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, policy: LoadFailurePolicy
) -> None:
    pair = Pair(stack, policy=policy)
    cache = next(iter(side_of(pair, "decode").caches[0].values())).untyped_storage()
    flips = iter((0x10,))

    def flipped(regions: Sequence[memoryview], content: Content) -> int:
        at = int(content.ranges()[0, 1]) - 1
        for region in regions:
            address = int(np.frombuffer(region, np.int8).ctypes.data)
            if 0 <= at < len(region) and 0 <= address - cache.data_ptr() < cache.nbytes():
                region[at] ^= next(flips, 0)
            at -= len(region)
        return checksum(regions, content)

    monkeypatch.setattr(checksums, "checksum", flipped)
    hand_over(pair, "1", 13)
    recomputed = policy is LoadFailurePolicy.RECOMPUTE
    assert served(pair, "d1") is (RequestEnd.LENGTH if recomputed else RequestEnd.ERROR)
    assert pair.decode.loaded == []
    if recomputed:
        assert torch.equal(side_of(pair, "decode").kv["d1"], expected(range(13)))
    assert outcomes(pair) == {"CHECKSUM_MISMATCH": 1}
    at_rest(pair)


def test_nobody_at_query_is_a_failed_load(stack: ExitStack, free_port: int) -> None:
    pair = Pair(stack)
    _, to_decode = concurrent(pair, "t1")
    pair.decode.add(request("d1", 9, {**to_decode, "remote_bootstrap_addr": f"http://127.0.0.1:{free_port}"}))
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert torch.equal(side_of(pair, "decode").kv["d1"], expected(range(9)))
    assert pair.decode.loaded == []
    assert outcomes(pair) == {"BOOTSTRAP_UNREACHABLE": 1}
    at_rest(pair)


def test_another_process_at_query_is_a_restarted_peer(stack: ExitStack, free_port: int) -> None:
    pair = Pair(stack, query_port=free_port)
    _, to_decode = concurrent(pair, "t1")
    pair.decode.add(request("d1", 9, {**to_decode, "remote_engine_id": "b" * 32}))
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert outcomes(pair) == {"PEER_RESTARTED": 1}
    at_rest(pair)


def test_an_abort_while_the_sessions_are_asked_for(stack: ExitStack, free_port: int) -> None:
    pair = Pair(stack, query_port=free_port)
    to_prefill, to_decode = concurrent(pair, "t1")
    pair.decode.add(request("d1", 9, to_decode))
    pair.decode.schedule(6)
    pair.decode.abort("d1")
    pair.decode.complete()
    pair.prefill.add(request("p1", 9, to_prefill))
    pair.prefill.abort("p1")
    at_rest(pair)


def test_prefill_gives_up_rooms_that_nobody_has_when_it_lacks_blocks(stack: ExitStack) -> None:
    pair = Pair(stack)
    for number in range(8):  # 5 of 24 blocks each
        pair.prefill.add(request(f"p{number}", 20, TO_PREFILL))
    pair.until(lambda: len(pair.prefill.ends) == 8)
    for number in (0, 7):
        pair.decode.add(request(f"d{number}", 20, pair.prefill.answers[f"p{number}"]))
        assert served(pair, f"d{number}") is RequestEnd.LENGTH
        assert torch.equal(side_of(pair, "decode").kv[f"d{number}"], expected(range(20)))
    assert pair.decode.loaded == ["d7"]
    assert outcomes(pair) == {"OUT_OF_CAPACITY": 1, "OK": 1}
    for number in range(1, 7):
        pair.decode.add(request(f"d{number}", 20, pair.prefill.answers[f"p{number}"]))
        assert served(pair, f"d{number}") is RequestEnd.LENGTH
    at_rest(pair)


def test_prefill_gives_up_a_room_whose_decode_left_when_it_lacked_blocks(stack: ExitStack) -> None:
    """Long before the room's time."""
    pair = Pair(stack, on_device=(True, True), transport=[], room_s=600.0)
    [device] = side_of(pair, "prefill").devices
    device.goes_on.clear()
    hand_over(pair, "1", 60)  # 15 of 24 blocks; the device has not computed them
    prefill = side_of(pair, "prefill").side
    pair.until(lambda: prefill.sizes()["transfers"])
    device.goes_on = threading.Event()
    device.goes_on.set()
    pair.prefill.add(request("late", 60))
    for _ in range(100):
        pair.step()
    assert prefill.sizes()["transfers"], "decode still has the room"
    pair.decode.abort("d1")
    pair.until(lambda: "late" in pair.prefill.ends)
    at_rest(pair)


@pytest.mark.slow
@pytest.mark.parametrize("policy", LoadFailurePolicy)
def test_a_load_whose_prefill_is_gone(stack: ExitStack, policy: LoadFailurePolicy) -> None:
    pair = Pair(stack, policy=policy)
    hand_over(pair, "1", 13)
    side_of(pair, "prefill").side.close()
    pair.running = [pair.decode]
    pair.until(lambda: "d1" in pair.decode.ends, within_s=60)
    recomputed = policy is LoadFailurePolicy.RECOMPUTE
    assert pair.decode.ends["d1"] is (RequestEnd.LENGTH if recomputed else RequestEnd.ERROR)
    if recomputed:
        assert torch.equal(side_of(pair, "decode").kv["d1"], expected(range(13)))
    assert pair.decode.loaded == []
    pair.until(lambda: pair.decode.at_rest)
    assert len(pair.decode.pool.free) == len(pair.decode.pool.blocks)


def test_another_prompt_is_not_loaded(stack: ExitStack) -> None:
    pair = Pair(stack, room_s=2.0)
    pair.prefill.add(request("p1", 9, TO_PREFILL))
    pair.until(lambda: "p1" in pair.prefill.answers)
    answer = pair.prefill.answers["p1"]
    pair.decode.add(replace(request("d1", 9, answer), tokens=list(range(1, 10))))
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert pair.decode.loaded == []
    assert torch.equal(side_of(pair, "decode").kv["d1"], expected(range(1, 10)))
    # The refused decode has not taken the room from the right one.
    pair.decode.add(request("d2", 9, answer))
    assert served(pair, "d2") is RequestEnd.LENGTH
    assert torch.equal(loaded_kv(pair, "d2"), expected(range(9)))
    at_rest(pair)


@pytest.mark.slow
def test_other_blocks_or_weights_are_refused_when_the_sides_meet(stack: ExitStack) -> None:
    other_isa = Pair(stack, decode_facts=replace(CPU_ATTN, isa="amx"), room_s=2.0)
    other_weights = Pair(stack, models=("model/float32", "other/float32"), room_s=2.0)
    for pair, code in ((other_isa, "LAYOUT_MISMATCH"), (other_weights, "PEER_REFUSED")):
        hand_over(pair, "1", 9)
        assert served(pair, "d1") is RequestEnd.LENGTH
        assert outcomes(pair) == {code: 1}
        at_rest(pair)


def test_a_secret_of_another_deployment_is_refused(stack: ExitStack) -> None:
    pair = Pair(stack, secret=b"s" * 16, decode_secret=b"t" * 16, room_s=1.0)
    hand_over(pair, "1", 9)
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert pair.decode.loaded == []
    assert outcomes(pair) == {}, "nobody was contacted"
    assert "wrong signature" in "".join(pair.decode.table.take_warnings())
    at_rest(pair)


def test_with_one_secret_sides_meet(stack: ExitStack) -> None:
    pair = Pair(stack, secret=b"s" * 16)
    hand_over(pair, "1", 9)
    assert served(pair, "d1") is RequestEnd.LENGTH
    loaded_kv(pair, "d1")
    at_rest(pair)


def test_the_first_data_parallel_rank_answers_query_for_the_others(stack: ExitStack, free_port: int) -> None:
    settings = ConnectorSettings(transport=["tcp"], query_port=free_port)
    sides = []
    for place in (WorkerPlace(), WorkerPlace(data_rank=1)):
        caches, _ = make_caches()
        pool = cache_pool(caches, CPU_ATTN)
        common = (Role.PREFILL, settings, b"", "m", pool, place)
        sides.append(WorkerSide(*common, *lead(lambda value: value or ("", b""), place)))
        stack.callback(sides[-1].close)
    deadline = time.monotonic() + 20
    for side in sides:
        while True:
            try:
                asked = session_port("127.0.0.1", free_port, side.address.leader, 5.0)
                assert asyncio.run(asked) == side.address.port
                break
            except PeerRestarted:  # it has not said yet where it is
                assert time.monotonic() < deadline
                time.sleep(0.05)


def second_rank(share: Share) -> RankSide:
    caches, _ = make_caches(heads=1)
    place = WorkerPlace(tensor_rank=1, tensor_ranks=2)
    pool = cache_pool(caches, replace(CPU_ATTN, tensor_rank=1, tensor_ranks=2))
    return RankSide(Role.DECODE, ConnectorSettings(transport=["tcp"]), b"", "m", pool, place, share)


def test_an_error_of_the_first_rank_is_that_of_all() -> None:
    shared: Future[Any] = Future()

    def share(value: Any) -> Any:
        if value is not None:
            shared.set_result(value)
        return shared.result(20)

    first = before_ranks_meet(share, WorkerPlace(tensor_ranks=2))
    with pytest.raises(ConfigError, match="unknown backend"), first:
        raise ConfigError("unknown backend")
    with pytest.raises(ConfigError, match="unknown backend"):
        second_rank(share)


def test_a_rank_does_not_wait_for_ever_for_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_rank, "_MEET_S", 0.05)
    ends = threading.Event()
    with pytest.raises(BootstrapTimeout, match="did not meet"):
        second_rank(lambda _: ends.wait(20))
    ends.set()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_second_hand_off_of_one_room_ends_at_once(stack: ExitStack, role: str) -> None:
    """The first one goes on: to open a room twice is refused in this process."""
    pair = Pair(stack)
    side, room = side_of(pair, role).side, RoomKey(7)
    peer = side_of(pair, "prefill").side.address
    for handoff, name in ((1, "a"), (2, "b")):
        if role == "prefill":
            step(side, [ExpectOrder(handoff, room, 9, b"claim", 20.0, 0.0)])
        else:
            step(side, [ReceiveOrder(handoff, name, room, peer, 9, 0, [1, 2, 3], b"claim", 20.0)])
    found = side.take_results()
    ended, released = found.reports
    assert isinstance(ended, HandoffEnded)
    assert ended.error is not None
    assert (ended.handoff, released) == (2, BlocksReleased(2))
    assert found.failed_recving == found.finished_recving == ({"b"} if role == "decode" else set())
    assert side.sizes()["halves"] == side.sizes()["keys"] == 1


class SlowQuery:
    """A `GET /query` that answers when it is told to."""

    def __init__(self, stack: ExitStack) -> None:
        self.leader = LeaderId(Incarnation("b" * 32))
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._stack = stack
        port = self._listener.getsockname()[1]
        self.address = PeerAddress(self.leader, "127.0.0.1", port, query=True)

    def asked(self) -> socket.socket:
        self._listener.settimeout(20)
        connection = self._stack.enter_context(self._listener.accept()[0])
        connection.recv(1000)
        return connection

    def answer(self, connection: socket.socket) -> None:
        ranks = RankDirectory()
        ranks.add(0, replace_struct(self.address, port=1))
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + ranks.answer())
        connection.close()


def collected(side: WorkerSide, until: Callable[[StepResults], object]) -> StepResults:
    """The results of steps until a condition holds for them together."""
    found, deadline = StepResults(), time.monotonic() + 20
    while not until(found):
        assert time.monotonic() < deadline, (found, side.sizes())
        step = side.take_results()
        found.reports += step.reports
        found.finished_recving |= step.finished_recving
        time.sleep(0.001)
    return found


def test_a_hand_off_of_a_room_that_another_had_while_it_waited_ends(stack: ExitStack) -> None:
    """Its request would wait for ever, and its blocks never be free."""
    pair, query = Pair(stack), SlowQuery(stack)
    side, peer = side_of(pair, "decode").side, side_of(pair, "prefill").side.address
    for handoff, name, where in ((1, "a", peer), (2, "b", query.address)):
        step(side, [ReceiveOrder(handoff, name, RoomKey(7), where, 9, 0, [handoff], b"claim", 20.0)])
    connection = query.asked()
    step(side, [AbortOrder(1, LOST)])
    collected(side, lambda found: BlocksReleased(1) in found.reports)
    query.answer(connection)
    deadline = time.monotonic() + 20
    while not side.sizes()["keys"] and time.monotonic() < deadline:
        time.sleep(0.001)
    step(side, [AbortOrder(2, LOST)])
    found = collected(side, lambda found: BlocksReleased(2) in found.reports)
    assert found.finished_recving == {"b"}
    assert side.sizes()["halves"] == side.sizes()["keys"] == 0


def test_a_peer_that_was_dropped_while_it_was_asked_is_dropped_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else decode would dial it for ever."""
    dialled: set[LeaderId] = set()
    add, remove = KVManager.add_peer, KVManager.remove_peer

    def add_peer(self: KVManager, leader: LeaderId, host: str, port: int) -> None:
        dialled.add(leader)
        add(self, leader, host, port)

    def remove_peer(self: KVManager, leader: LeaderId) -> None:
        dialled.discard(leader)
        remove(self, leader)

    monkeypatch.setattr(KVManager, "add_peer", add_peer)
    monkeypatch.setattr(KVManager, "remove_peer", remove_peer)
    pair, query = Pair(stack), SlowQuery(stack)
    side = side_of(pair, "decode").side

    def decline(*peers: PeerAddress) -> None:
        step(side, [DeclineOrder(RoomKey(3), peer, LOST, b"") for peer in peers])

    others = [PeerAddress(LeaderId(Incarnation(f"{i:032x}")), "127.0.0.1", 1) for i in range(1, 200)]
    decline(query.address)
    connection = query.asked()
    decline(*others[:100])
    query.answer(connection)
    deadline = time.monotonic() + 20
    while query.leader not in dialled and time.monotonic() < deadline:
        time.sleep(0.001)
    decline(*others[100:])
    assert query.leader not in dialled


def test_an_order_for_what_has_ended_is_ignored(stack: ExitStack) -> None:
    pair = Pair(stack)
    side = side_of(pair, "decode").side
    step(side, [AbortOrder(99, LOST)])
    assert not side.take_results().reports


def test_a_worker_whose_thread_has_ended_fails_the_step(stack: ExitStack) -> None:
    pair = Pair(stack)
    side = side_of(pair, "decode").side
    side.close()
    side.close()
    with pytest.raises(Internal, match="thread of the KV hand-off"):
        side.begin_step([])


def test_settings_that_do_not_work_are_refused_at_the_start(stack: ExitStack, free_port: int) -> None:
    with pytest.raises(ConfigError, match="shm cannot register"):
        Pair(stack, transport=["shm"])
    with pytest.raises(ConfigError, match="secret"):
        Pair(stack, host="0.0.0.0")
    Pair(stack, query_port=free_port)
    with pytest.raises(ConfigError, match=rf"port {free_port} .* choose another query_port"):
        Pair(stack, query_port=free_port)
    with pytest.raises(ConfigError, match="cpus"):
        Pair(stack, cpus=[4095])


def test_checksums_can_be_switched_off(stack: ExitStack) -> None:
    pair = Pair(stack, kv_checksum=ChecksumMode.OFF)
    hand_over(pair, "1", 9)
    assert served(pair, "d1") is RequestEnd.LENGTH
    assert torch.equal(loaded_kv(pair, "d1"), expected(range(9)))
    at_rest(pair)
