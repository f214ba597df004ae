"""Pairs of workers whose KV caches differ: in the layouts of GPU backends the KV arrives whole (on tensors of
these shapes in host memory); pairs whose bytes mean other things refuse each other when they meet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from vllm_pair import DeviceTensor

from segue.integrations.vllm.vllm_memory import CacheFacts, cache_pool
from segue.integrations.vllm.vllm_orders import (
    BlocksReleased,
    ExpectOrder,
    HandoffEnded,
    Order,
    ReceiveOrder,
    Report,
    SendOrder,
)
from segue.integrations.vllm.vllm_settings import ConnectorSettings
from segue.integrations.vllm.vllm_worker import WorkerSide
from segue.kv import ErrorCode, ErrorInfo, Role, RoomKey

LAYERS, HEADS, DIM, TOKENS = 2, 3, 8, 13
FACTS = CacheFacts(backend="FLASH_ATTN", blocks=8, block_size=4, head_size=DIM, dtype="float32")
CPU = replace(FACTS, backend="CPU_ATTN", isa="vec")


@dataclass(frozen=True)
class Cache:
    """A KV cache: `order` is its physical layout; `kind`, of its tensors, says where it is declared to be."""

    facts: CacheFacts
    order: str = "HND"
    kind: type[torch.Tensor] = torch.Tensor

    def __str__(self) -> str:
        device = " on a device" if self.kind is DeviceTensor else ""
        return f"{self.facts.backend} {self.order} {self.facts.block_size}{device}"

    def make(self) -> dict[str, torch.Tensor]:
        blocks, size = self.facts.blocks, self.facts.block_size
        dtype = getattr(torch, self.facts.dtype)
        if self.facts.backend == "CPU_MLA":
            return {f"l{i}": torch.zeros(blocks, size, DIM, dtype=dtype) for i in range(LAYERS)}
        if self.order == "NHD":
            made = [
                torch.zeros(blocks, size, HEADS, 2 * DIM, dtype=dtype).transpose(1, 2) for _ in range(LAYERS)
            ]
        elif self.order == "HND":
            made = [torch.zeros(blocks, HEADS, size, 2 * DIM, dtype=dtype) for _ in range(LAYERS)]
        else:  # all layers of a block in one run
            whole = torch.zeros(blocks, LAYERS, HEADS, size, 2 * DIM, dtype=dtype)
            made = [whole[:, i] for i in range(LAYERS)]
        return {f"l{i}": cache for i, cache in enumerate(made)}

    def rows(self, caches: dict[str, torch.Tensor], blocks: list[int]) -> torch.Tensor:
        """K and V of each token, head and layer."""
        found = []
        for cache in caches.values():
            at = cache[blocks]
            at = at[:, None] if len(at.shape) == 3 else at
            found.append(at.transpose(1, 2).reshape(-1, at.shape[1], at.shape[-1])[:TOKENS])
        return torch.stack(found)

    @property
    def needed(self) -> int:
        return -(-TOKENS // self.facts.block_size)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def fill(cache: Cache, caches: dict[str, torch.Tensor], blocks: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    for each in caches.values():
        for block in blocks:
            each[block] = torch.rand(each[block].shape, generator=generator).to(each.dtype)


def hand_over(
    stack: ExitStack, ours: Cache, theirs: Cache, models: tuple[str, str] = ("m", "m")
) -> tuple[torch.Tensor, torch.Tensor, ErrorInfo | None]:
    """What prefill has, what decode has afterwards, and the error of decode's half."""
    settings = ConnectorSettings(transport=["tcp"], room_s=2.0)
    sides, caches = [], []
    for role, cache, model in zip((Role.PREFILL, Role.DECODE), (ours, theirs), models, strict=True):
        caches.append(cache.make())
        declared = {name: each.as_subclass(cache.kind) for name, each in caches[-1].items()}
        sides.append(WorkerSide(role, settings, b"", model, cache_pool(declared, cache.facts)))
        stack.callback(sides[-1].close)
    prefill, decode = sides
    sent, got = list(range(7, 7 - ours.needed, -1)), list(range(1, 1 + theirs.needed))
    fill(ours, caches[0], sent)
    room = RoomKey(7)
    step(prefill, ExpectOrder(1, room, TOKENS, b"claim", 2.0, 0.0), SendOrder(1, 0, TOKENS, sent, True, True))
    step(decode, ReceiveOrder(1, "d", room, prefill.address, TOKENS, 0, got, b"claim", 2.0))
    reports: list[Report] = []
    deadline = time.monotonic() + 30
    while not any(isinstance(report, BlocksReleased) for report in reports):
        assert time.monotonic() < deadline, reports
        step(prefill)
        step(decode)
        prefill.take_results()
        reports += decode.take_results().reports
        time.sleep(0.001)
    ended = next(report for report in reports if isinstance(report, HandoffEnded))
    return ours.rows(caches[0], sent), theirs.rows(caches[1], got), ended.error


def step(side: WorkerSide, *orders: Order) -> None:
    side.begin_step(orders)
    side.end_forward()


LARGER = replace(FACTS, block_size=8)
LATENT = replace(FACTS, backend="CPU_MLA")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Cache(FACTS, "NHD"), Cache(FACTS, "NHD")),
        (Cache(FACTS, "NHD"), Cache(FACTS, "HND")),
        (Cache(FACTS, "HND"), Cache(LARGER, "NHD")),
        (Cache(LARGER, "NHD"), Cache(FACTS, "HND")),
        (Cache(FACTS, "blocks outermost"), Cache(LARGER, "NHD")),
        (Cache(replace(FACTS, block_size=3), "NHD"), Cache(FACTS, "blocks outermost")),
        (Cache(replace(FACTS, backend="TRITON_ATTN"), "NHD"), Cache(FACTS, "HND")),
        (Cache(LATENT), Cache(LATENT)),
        (Cache(LATENT), Cache(replace(LATENT, block_size=16, blocks=4))),
        (Cache(CPU), Cache(CPU)),
        (Cache(FACTS, "NHD", DeviceTensor), Cache(FACTS, "HND", DeviceTensor)),
        (Cache(FACTS, "blocks outermost", DeviceTensor), Cache(LARGER, "NHD", DeviceTensor)),
        (Cache(LATENT, kind=DeviceTensor), Cache(LATENT, kind=DeviceTensor)),
    ],
    ids=str,
)
def test_kv_of_unequal_layouts_arrives_whole(stack: ExitStack, ours: Cache, theirs: Cache) -> None:
    sent, got, error = hand_over(stack, ours, theirs)
    assert error is None
    if ours.facts.backend == "CPU_ATTN":
        return  # K is transposed within a block: test_vllm_worker compares its tokens
    assert torch.equal(sent, got)


@pytest.mark.parametrize(
    ("ours", "theirs", "models", "code", "reason"),
    [
        (Cache(CPU), Cache(replace(CPU, block_size=8)), ("m", "m"), ErrorCode.LAYOUT_MISMATCH, "8x8"),
        (Cache(CPU), Cache(replace(CPU, isa="amx")), ("m", "m"), ErrorCode.LAYOUT_MISMATCH, "amx"),
        (
            Cache(FACTS),
            Cache(replace(FACTS, dtype="bfloat16")),
            ("m", "m"),
            ErrorCode.LAYOUT_MISMATCH,
            "bfloat16",
        ),
        (Cache(FACTS), Cache(CPU), ("m", "m"), ErrorCode.LAYOUT_MISMATCH, "CPU_ATTN"),
        (Cache(FACTS), Cache(LATENT), ("m", "m"), ErrorCode.LAYOUT_MISMATCH, "mla"),
        (Cache(FACTS), Cache(FACTS), ("weights 1/x", "weights 2/x"), ErrorCode.PEER_REFUSED, "weights 1"),
    ],
    ids=["block size", "ISA", "dtype", "backend", "MLA", "weights"],
)
def test_a_wrong_pair_is_refused_when_it_meets(
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    ours: Cache,
    theirs: Cache,
    models: tuple[str, str],
    code: ErrorCode,
    reason: str,
) -> None:
    """Both logs have the reason; no byte moves."""
    _, got, error = hand_over(stack, ours, theirs, models)
    assert error is not None
    assert error.code is code
    assert reason in error.text
    assert not got.any()
    said = [message for message in caplog.messages if reason in message]
    assert any("cannot join" in message for message in said), "decode's log"
    assert any("no session with decode" in message for message in said), "prefill's log"
