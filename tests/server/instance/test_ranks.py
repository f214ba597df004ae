"""Instances of several ranks, with real processes: equal tokens, and one end for all when one ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deployment as module
import psutil
import pytest
import torch
from deployment import LIMITS, Deployment, Running, deployment, generates_only_with
from engine_models import VOCAB, generate, save_model
from test_tokens import carried_bytes

from segue.engine.models.model_store import resolve_model
from segue.engine.parallel import ParallelSize
from segue.kv.errors import ErrorCode, SegueError
from segue.kv.ids import Role

COUNT = 12
SIDES = (Role.PREFILL, Role.DECODE)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 query heads over 3 KV heads, as SmolLM2 has."""
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def asked(vocab: int = VOCAB) -> list[list[int]]:
    return [[3 + (7 * i + 11 * k * k) % (vocab - 3) for k in range(n)] for i, n in enumerate((1, 16, 50, 70))]


def answers(made: Deployment, prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    [prefill], [decode] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
    for i, prompt in enumerate(prompts):
        made.front.submit(
            f"r{i}", prompt, prefill, decode, max_tokens=count, temperature=0.0, ignore_eos=True
        )
    return [made.front.tokens(f"r{i}") for i in range(len(prompts))]


def sizes(prefill: str, decode: str) -> dict[Role, ParallelSize]:
    """The sizes in words such as `tp2 cp2`; an empty one is one rank."""
    words = {Role.PREFILL: prefill, Role.DECODE: decode}
    return {
        role: ParallelSize(**{word[:2]: int(word[2:]) for word in text.split()})
        for role, text in words.items()
    }


def soak(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        ("cp2", "tp2", "tcp"),
        soak("", "tp2", "tcp"),
        soak("tp2", "", "shm"),
        soak("tp2", "tp2", "shm"),
        soak("tp3", "", "tcp"),
        soak("tp3", "tp2", "shm"),
        soak("pp2", "", "shm"),
        soak("", "pp2", "tcp"),
        ("pp2", "tp2", "shm"),
        soak("cp2", "", "shm"),
        ("cp3", "pp2", "tcp"),
        soak("tp2 pp2", "tp2", "tcp"),
        soak("tp2 cp2", "", "shm"),
    ],
)
def test_tokens_equal_generate_whatever_the_parallel_sizes(
    prefill: str, decode: str, transport: str, llama: Path
) -> None:
    ranks = sizes(prefill, decode)
    with deployment(*SIDES, model=str(llama), ranks=ranks, transport=transport, chunk_tokens=32) as made:
        assert answers(made, asked()) == generate(llama, asked(), COUNT)
        made.assert_comes_to_rest()
        counts = [len(r.workers.all) + 1 if r.workers else 1 for r in made.running]
        assert counts == [size.ranks for size in ranks.values()]


@pytest.mark.slow
def test_decode_of_several_ranks_computes_prompts_itself(llama: Path) -> None:
    with deployment(Role.DECODE, model=str(llama), ranks=sizes("", "tp2"), chunk_tokens=32) as made:
        [instance] = made.by_role(Role.DECODE)
        for i, prompt in enumerate(asked()):
            made.front.submit(
                f"r{i}", prompt, instance, instance, max_tokens=COUNT, temperature=0.0, ignore_eos=True
            )
        assert [made.front.tokens(f"r{i}") for i in range(len(asked()))] == generate(llama, asked(), COUNT)
        made.assert_comes_to_rest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prefill", "decode", "transport"),
    [
        ("mixtral", "tp2", "", "shm"),
        soak("qwen3-moe", "", "tp2", "tcp"),
        ("qwen3-moe", "tp2", "tp2", "tcp"),
    ],
)
def test_tensor_parallel_ranks_hold_a_part_of_every_expert(
    family: str, prefill: str, decode: str, transport: str, tmp_path: Path
) -> None:
    folder, ranks = save_model(tmp_path, family), sizes(prefill, decode)
    with deployment(*SIDES, model=str(folder), ranks=ranks, transport=transport, chunk_tokens=32) as made:
        assert answers(made, asked()) == generate(folder, asked(), COUNT)
        made.assert_comes_to_rest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [
        ("qwen2", "tp2", "tp2"),
        soak("qwen2", "", "tp3"),
        ("deepseek-v3", "", "tp2"),
        soak("deepseek-v3", "tp2", "tp2"),
        soak("deepseek-v3", "pp2", "tp2"),
    ],
)
def test_kv_that_several_ranks_hold_is_passed_on_among_them(
    family: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    """One KV head, or one latent, on each tensor-parallel rank: it crosses the wire once."""
    folder = save_model(tmp_path, family)
    with deployment(*SIDES, model=str(folder), ranks=sizes(prefill, decode), chunk_tokens=32) as made:
        assert answers(made, asked()) == generate(folder, asked(), COUNT)
        if not prefill:  # its transport alone says what crossed the wire
            token_bytes = made.running[0].engine.spec.shape.token_bytes
            assert carried_bytes(made.by_role(Role.PREFILL)[0]) == sum(map(len, asked())) * token_bytes
        made.assert_comes_to_rest()


@pytest.mark.slow
def test_layers_with_and_without_a_sliding_window_are_shared_out_unlike_on_both_sides(tmp_path: Path) -> None:
    """The window has 18 tokens, most prompts more."""
    folder = save_model(tmp_path, "gemma3")
    with deployment(*SIDES, model=str(folder), ranks=sizes("cp2", "tp2"), chunk_tokens=32) as made:
        assert answers(made, asked()) == generate(folder, asked(), COUNT)
        made.assert_comes_to_rest()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("tp2", "tp2"),
        soak("cp2", ""),
        soak("", "tp2"),
        soak("tp2", ""),
        soak("tp3", ""),
        soak("pp2", ""),
        soak("", "pp2"),
    ],
)
def test_the_default_model_gives_the_tokens_of_generate(prefill: str, decode: str) -> None:
    folder = resolve_model("smollm2", progress=lambda *_: None)
    prompts = asked(40000)
    ranks = sizes(prefill, decode)
    with deployment(*SIDES, model=str(folder), ranks=ranks, chunk_tokens=32) as made:
        assert answers(made, prompts) == generate(folder, prompts, COUNT)


@pytest.mark.slow
def test_retracted_sequences_come_back_on_every_rank(llama: Path) -> None:
    prompts = [[3 + (7 * i + k) % 90 for k in range(44)] for i in range(6)]
    page_bytes = 2 * 3 * 3 * 16 * 16 * 4  # K and V of 3 layers, 3 heads of 16 items, 16 tokens
    options = {
        "model": str(llama),
        "ranks": {Role.DECODE: ParallelSize(tp=2)},
        "kv_gib": 14 * page_bytes / 2**30,
    }
    with deployment(*SIDES, chunk_tokens=64, **options) as made:
        [decode] = made.by_role(Role.DECODE)
        generates_only_with(decode, 3)  # each of which comes to need half of the pages
        assert answers(made, prompts, 60) == generate(llama, prompts, 60)
        assert decode.engine.spec.pages == 14
        assert decode.scheduler.batch.retractions > 0, "the pool was too large to need one"  # type: ignore[attr-defined]


@pytest.fixture(params=["tp2", "pp2"])
def generating(
    request: pytest.FixtureRequest, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Deployment, Running]]:
    """A decode instance of two ranks in the middle of a long answer."""
    monkeypatch.setattr(module, "LIMITS", replace(LIMITS, peer_silence_s=5))
    with deployment(*SIDES, model=str(llama), ranks=sizes("", request.param), kv_gib=0.2) as made:
        [prefill], [decode] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        made.front.submit(
            "long", [5, 6, 7], prefill, decode, max_tokens=4000, temperature=0.0, ignore_eos=True
        )
        begun = threading.Event()
        collect = decode.engine.collect
        decode.engine.collect = lambda handle: (begun.set(), collect(handle))[1]  # type: ignore[method-assign]
        assert begun.wait(60)
        yield made, next(r for r in made.running if r.instance is decode)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still_ends_its_replica_at_once_and_typed(
    number: signal.Signals, generating: tuple[Deployment, Running]
) -> None:
    made, running = generating
    assert running.workers is not None
    [worker] = running.workers.all
    worker.process.send_signal(number)
    # Of a stopped process the silence is noticed: 5 s here, before the 30 s of the group.
    outputs = made.front.wait("long", 28)
    assert outputs[-1].error is not None
    assert outputs[-1].error.code is ErrorCode.PEER_LOST
    assert outputs[-1].error.retryable
    running.thread.join(60)
    assert not running.thread.is_alive(), "it goes on without a rank"
    failure = running.instance.failure
    assert isinstance(failure, SegueError), "run_instance would end with status 0"
    assert worker.process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_is_computed_ends_its_replica_too(llama: Path) -> None:
    with deployment(*SIDES, model=str(llama), ranks={Role.PREFILL: ParallelSize(tp=2)}) as made:
        prefill = made.running[0]
        assert prefill.workers is not None
        prefill.workers.all[0].process.kill()
        prefill.thread.join(60)
        assert not prefill.thread.is_alive()
        assert prefill.instance.failure is not None


@pytest.mark.slow
def test_ranks_leave_with_their_leader(llama: Path) -> None:
    with deployment(*SIDES, model=str(llama), ranks={Role.PREFILL: ParallelSize(tp=2)}) as made:
        [worker] = made.running[0].workers.all  # type: ignore[union-attr]
    assert worker.process.returncode == 0
    assert worker.process.pid not in [p.pid for p in psutil.Process(os.getpid()).children(recursive=True)]
