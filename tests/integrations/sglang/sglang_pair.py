"""A prefill and a decode rank over tcp, with SGLang's pools, metadata slots and poll agreement as doubles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from segue.integrations.prompt_claim import ClaimedPrompt
from segue.integrations.sglang.sglang_handoffs import (
    Intake,
    PrefillRow,
    RankHandoffs,
    RankHooks,
    ReceiverHalf,
    SenderHalf,
)
from segue.integrations.sglang.sglang_phases import SglPoll
from segue.integrations.sglang.sglang_pool import MetadataSlots, page_pool
from segue.kv import DpRanks, KVConfig, Region, Role

PAGE, PAGES, LAYERS, ROW, SLOTS = 16, 24, 3, 8, 4
ADDRESS = "127.0.0.1:8998"
WITHIN_S = 20.0
#: tables that remember ends until their deadline, peers, and the uses of rooms
REMEMBERED = {"ended", "deadlines", "peers", "room_uses"}


def kv_args(buffers: Sequence[np.ndarray], **changes: Any) -> SimpleNamespace:
    """`KVArgs` of buffers `[page, bytes]`."""
    args = {
        "kv_data_ptrs": [b.ctypes.data for b in buffers],
        "kv_data_lens": [b.nbytes for b in buffers],
        "kv_item_lens": [b[0].nbytes for b in buffers],
        "kv_cache_dtype_str": "bfloat16",
        "kv_layout": None,
        "page_size": PAGE,
        "state_types": [],
        "num_draft_entries": 0,
    }
    return SimpleNamespace(**{**args, **changes})


def prompt_of(tokens: int, first: int = 0, **more: Any) -> ClaimedPrompt:
    """A prompt of so many tokens, the first of which tells it apart."""
    return ClaimedPrompt(tokens=range(first, first + tokens), **more)


class Rank:
    """One scheduler rank: its memory, and its hand-offs. `ranks_end` closes it."""

    made: ClassVar[list[Rank]] = []

    def __init__(
        self,
        role: Role,
        *,
        mla: bool = False,
        bootstrap_s: float = 60.0,
        waiting_s: float = 60.0,
        dp: DpRanks | None = None,
        dp_rank: int = 0,
        hooks: RankHooks | None = None,
        model: str = "m",
        on_device: bool = False,
    ) -> None:
        Rank.made.append(self)
        count = LAYERS if mla else 2 * LAYERS
        self.kv = [np.zeros((PAGES, PAGE * ROW), np.uint8) for _ in range(count)]
        self.output_ids = np.zeros((SLOTS, 16), np.int32)
        self.rooms = np.zeros((SLOTS, 8), np.uint64)
        rows = (self.output_ids, self.rooms)
        self.slots = MetadataSlots(
            [r.ctypes.data for r in rows], [r.nbytes for r in rows], [r[0].nbytes for r in rows]
        )
        pool = page_pool(kv_args(self.kv), mla=mla, region=self._on_device if on_device else Region)
        config = KVConfig(role=role, model=model, spec=pool.spec, transports=["tcp"])
        self.handoffs = RankHandoffs(
            config,
            pool,
            self.slots,
            bootstrap_s=bootstrap_s,
            waiting_s=waiting_s,
            dp=dp,
            dp_rank=dp_rank,
            hooks=hooks,
        )
        host, port = self.handoffs.start()
        self.row = PrefillRow(config.me, host, port, dp_rank, dp.size if dp else 1)

    def _on_device(self, address: int, nbytes: int) -> Region:
        """A tensor of the CPU that is declared as a device's."""
        [buffer] = [buffer for buffer in self.kv if buffer.ctypes.data == address]
        return Region(address, nbytes, "cpu:0", owner=torch.from_numpy(buffer))

    def sender(self, room: int, tokens: int = PAGE, hint: int | None = None, **prompt: Any) -> SenderHalf:
        return SenderHalf(self.handoffs, room, Intake(prompt_of(tokens, **prompt), hint))

    def receiver(self, room: int, tokens: int = PAGE, **prompt: Any) -> ReceiverHalf:
        return ReceiverHalf(self.handoffs, ADDRESS, room, prompt_of(tokens, **prompt))

    def compute(self, pages: Sequence[int], seed: int) -> None:
        """Write the KV of a prompt."""
        rng = np.random.default_rng(seed)
        for buffer in self.kv:
            buffer[list(pages)] = rng.integers(0, 256, (len(pages), PAGE * ROW), np.uint8)

    def kv_of(self, pages: Sequence[int]) -> list[np.ndarray]:
        return [buffer[list(pages)].copy() for buffer in self.kv]

    def close(self) -> None:
        self.handoffs.close()


@pytest.fixture(autouse=True)
def ranks_end() -> Iterator[None]:
    """Close the ranks that a test has made."""
    yield
    for rank in Rank.made:
        rank.close()
    Rank.made.clear()


def agreed(halves: Sequence[SenderHalf | ReceiverHalf]) -> SglPoll:
    """The phase of a request on all its ranks, as SGLang reduces it."""
    return min(half.poll() for half in halves)


def wait_for(reached: Callable[[], bool], poll: Callable[[], object] = lambda: None) -> None:
    """Run the scheduler's loop until something is reached."""
    end = time.monotonic() + WITHIN_S
    while not reached():
        poll()
        assert time.monotonic() < end, "not reached"
        time.sleep(0.001)


def at_rest(*ranks: Rank) -> None:
    """Every table is empty but those that remember who was met and which rooms were used."""

    def full() -> dict[str, int]:
        return {
            f"{number} {name}": size
            for number, rank in enumerate(ranks)
            for name, size in rank.handoffs.sizes().items()
            if size and name not in REMEMBERED
        }

    end = time.monotonic() + WITHIN_S
    while full() and time.monotonic() < end:
        time.sleep(0.001)
    assert full() == {}
