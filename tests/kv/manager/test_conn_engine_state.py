"""The state that a real engine keeps beside its KV, handed over: every byte of it, under a checksum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_models import VOCAB, GreedySampler, engine_for, save_model
from kv_sides import Side, assert_fails, assert_succeeds, begin
from test_conn_checksums import Hook
from test_conn_own_memory import handing_over

from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.replica_engine import ReplicaEngine
from segue.engine.request import SamplingParams
from segue.kv.errors import ErrorCode
from segue.kv.ids import KVPoll, Span
from segue.kv.layout.content import Content

PROMPT = [3 + (17 * at * at + 5 * at) % (VOCAB - 3) for at in range(41)]
CHUNK, MORE = 16, 6
HERE, THERE = [4, 0, 2, 7], [9, 3, 4, 11, 1, 6]  # of 16 tokens, of 8
SLOT, TO_SLOT = 2, 5
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return lambda family: save_model(tmp_path_factory.mktemp(family), family)


def engines(folder: Path, dtype: str) -> tuple[ReplicaEngine, ReplicaEngine]:
    made = [engine_for(folder, GreedySampler(), dtype, page_tokens=size) for size in (16, 8)]
    for engine in made:
        engine.open(1, PROMPT, SamplingParams(temperature=0.0))
    return made[0], made[1]


def step(
    engine: ReplicaEngine, tokens: list[int], start: int, pages: list[int], slot: int, sample: bool = True
) -> int:
    results = run_step(engine, [SequenceStep(1, tokens, start, pages, sample, slot)])
    assert all(result.error is None for result in results)
    return int(results[0].token or 0) if sample else -1


def send(engine: ReplicaEngine, near: Side, far: Side) -> tuple[list, int]:
    """Compute the prompt chunk by chunk and send each; both handles, and the first token."""
    _, sender, receiver = begin(near, far, len(PROMPT))
    receiver.publish(THERE, slot=TO_SLOT)
    near.wait(sender, KVPoll.WAITING_FOR_INPUT)
    first = -1
    for start in range(0, len(PROMPT), CHUNK):
        part = PROMPT[start : start + CHUNK]
        end = start + len(part)
        first = step(engine, part, start, HERE, SLOT, end == len(PROMPT))
        last = str(first).encode()
        sender.send(Span(start, end), HERE, last if end == len(PROMPT) else None, slot=SLOT)
    return [sender, receiver], first


@pytest.mark.parametrize(
    ("family", "dtype", "transport"),
    [
        ("qwen3-next", "float32", "shm"),
        pytest.param("qwen3.5", "bfloat16", "tcp", marks=pytest.mark.slow),
        pytest.param("lfm2", "float32", "tcp", marks=pytest.mark.slow),
    ],
)
def test_the_state_arrives_byte_for_byte_and_decode_goes_on_with_it(
    family: str, dtype: str, transport: str, folders: Folders
) -> None:
    prefill, decode = engines(folders(family), dtype)
    pools = [(engine.spec, engine.memory, []) for engine in (prefill, decode)]
    decode.pool.by_slot.fill_(255)  # what others have left there
    with handing_over(transport, pools[0], pools[1]) as (near, far):
        (sender, receiver), first = send(prefill, near, far)
        assert_succeeds({far: receiver, near: sender})
    assert torch.equal(decode.pool.by_slot[TO_SLOT], prefill.pool.by_slot[SLOT])
    for tensor in decode.pool.states:
        assert tensor[TO_SLOT].abs().max() > 0
    if family != "lfm2":
        assert decode.pool.states[1].dtype is torch.float32
    wanted, found = [first], [first]
    for at in range(len(PROMPT), len(PROMPT) + MORE):
        wanted.append(step(prefill, wanted[-1:], at, HERE, SLOT))
        found.append(step(decode, found[-1:], at, THERE, TO_SLOT))
    assert found == wanted


def test_a_bit_of_the_state_that_changes_after_landing_fails_both_sides(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = engines(folders("qwen3-next"), "float32")
    pools = [(engine.spec, engine.memory, []) for engine in (prefill, decode)]
    hook = Hook(monkeypatch)
    # the lowest bit of the first sum of the delta rule: the tokens would hardly tell
    at = decode.spec.slot_offset(TO_SLOT) + decode.spec.shape.state_offsets[1]

    def flip(memory: memoryview, content: Content) -> None:
        if content.state is not None:  # once: the other chunk may be read after the state has landed
            memory[at] ^= 1

    with handing_over("shm", pools[0], pools[1]) as (near, far):
        hook.side, hook.before = far, flip
        (sender, receiver), _ = send(prefill, near, far)
        said = f"chunk 2 (tokens 32 to {len(PROMPT)}"
        assert_fails(ErrorCode.CHECKSUM_MISMATCH, said, {near: sender, far: receiver})
