"""The time of one hand-off between two SGLang ranks by page size: `python bench/sglang_pages.py`.

16,384 tokens of 24 layers, K and V, 192 MiB, over tcp between two managers of one process, full checksums,
pages in one run or scattered at random. The best of some runs.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from segue.integrations.prompt_claim import ClaimedPrompt
from segue.integrations.sglang.sglang_handoffs import (
    Intake,
    PrefillRow,
    RankHandoffs,
    ReceiverHalf,
    SenderHalf,
)
from segue.integrations.sglang.sglang_phases import SglPoll
from segue.integrations.sglang.sglang_pool import MetadataSlots, page_pool
from segue.kv import KVConfig, Role, new_room

TOKENS, BUFFERS, TOKEN_BYTES = 16_384, 48, 256


def rank(role: Role, page: int) -> tuple[RankHandoffs, PrefillRow, list[np.ndarray[Any, Any]]]:
    """A rank whose pool holds one prompt."""
    rng = np.random.default_rng(1)
    shape = (TOKENS // page, page * TOKEN_BYTES)
    buffers = [rng.integers(0, 256, shape, np.uint8) for _ in range(BUFFERS)]
    args = SimpleNamespace(
        kv_data_ptrs=[b.ctypes.data for b in buffers],
        kv_data_lens=[b.nbytes for b in buffers],
        kv_item_lens=[b[0].nbytes for b in buffers],
        kv_cache_dtype_str="bfloat16",
        page_size=page,
        state_types=[],
        num_draft_entries=0,
    )
    pool = page_pool(args, mla=False)
    slot = ctypes.create_string_buffer(64)
    slots = MetadataSlots([ctypes.addressof(slot)], [64], [64])
    config = KVConfig(role=role, model="m", spec=pool.spec, transports=["tcp"])
    found = RankHandoffs(config, pool, slots, bootstrap_s=60, waiting_s=60)
    host, port = found.start()
    return found, PrefillRow(config.me, host, port), [*buffers, slot]  # type: ignore[list-item]


def main() -> None:
    """Print a line for each page size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    rng = np.random.default_rng(2)
    print("page   one run   scattered")
    for page in (1, 4, 16, 64):
        (prefill, row, kept), (decode, _, also) = rank(Role.PREFILL, page), rank(Role.DECODE, page)
        times = []
        for scattered in (False, True):
            found = []
            for _ in range(repeats):
                pages = [
                    rng.permutation(TOKENS // page) if scattered else np.arange(TOKENS // page) for _ in "ab"
                ]
                found.append(hand_over(prefill, decode, row, pages[0].tolist(), pages[1].tolist()))
            times.append(min(found))
        print(f"{page:4d} {times[0] * 1e3:7.0f} ms {times[1] * 1e3:8.0f} ms", flush=True)
        prefill.close()
        decode.close()
        del kept, also


def hand_over(
    prefill: RankHandoffs, decode: RankHandoffs, row: PrefillRow, source: list[int], target: list[int]
) -> float:
    """Seconds from `send` to the end of both sides."""
    room, prompt = new_room(), ClaimedPrompt(tokens=range(TOKENS))
    sender, receiver = SenderHalf(prefill, room, Intake(prompt)), ReceiverHalf(decode, "", room, prompt)
    receiver.init(row)
    receiver.send_metadata(target, 0, 0)
    while sender.poll() is not SglPoll.WAITING_FOR_INPUT:
        receiver.poll()
        time.sleep(0.001)
    sender.init(len(source), 0)
    began = time.perf_counter()
    sender.send(source)
    while {sender.poll(), receiver.poll()} != {SglPoll.SUCCESS}:
        if SglPoll.FAILED in (sender.poll(), receiver.poll()):
            raise SystemExit(receiver.failure().text)
        time.sleep(0.001)
    seconds = time.perf_counter() - began
    sender.clear()
    receiver.clear()
    return seconds


if __name__ == "__main__":
    main()
