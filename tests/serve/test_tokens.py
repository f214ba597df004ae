"""Prefill and decode apart give the tokens that `transformers` generates, for every family."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deployment import Deployment, deployment

from segue.core.types import Role
from segue.engine.api import Engine
from segue.engine.runner import load_engine
from segue.transport.memory import Memory

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from engine_models import FAMILY_CONFIGS, VOCAB, generate, save_model

COUNT = 12
ONE_ONE = (Role.PREFILL, Role.DECODE)
TWO_TWO = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


def engines(folder: Path, page_tokens: int = 16) -> Callable[[], tuple[Engine, Memory]]:
    def make() -> tuple[Engine, Memory]:
        engine = load_engine(folder, dtype="float32", pool_bytes=2**23, page_tokens=page_tokens)
        return engine, engine.memory

    return make


def prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def answer(
    made: Deployment, wanted: list[list[int]], tag: str, count: int = COUNT, **sampling: object
) -> list[list[int]]:
    """All prompts at once, spread over the instances at random."""
    rng = random.Random(tag)
    prefills = made.by_role(Role.PREFILL) or made.by_role(Role.UNIFIED)
    decodes = made.by_role(Role.DECODE) or prefills
    for i, prompt in enumerate(wanted):
        p, d = rng.choice(prefills), rng.choice(decodes)
        made.front.submit(
            f"{tag}{i}", prompt, p, d, max_tokens=count, ignore_eos=True, **{"temperature": 0.0, **sampling}
        )
    return [made.front.tokens(f"{tag}{i}") for i in range(len(wanted))]


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_each_family_equals_generate(family: str, folder: Callable[[str], Path]) -> None:
    asked = prompts(1, 6, 90)
    with deployment(*ONE_ONE, make_engine=engines(folder(family)), chunk_tokens=64) as made:
        assert answer(made, asked, "r") == generate(folder(family), asked, COUNT)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("chunk_tokens", [16, 64, 4096])
def test_two_and_two_with_sixteen_at_once(
    transport: str, chunk_tokens: int, folder: Callable[[str], Path]
) -> None:
    asked = [*prompts(2, 15, 300), [5]]
    made_engines = engines(folder("llama"))
    with deployment(
        *TWO_TWO, make_engine=made_engines, transport=transport, chunk_tokens=chunk_tokens
    ) as made:
        assert answer(made, asked, "r") == generate(folder("llama"), asked, COUNT)


def test_prefix_hits_on_either_side(folder: Callable[[str], Path]) -> None:
    base, *others = prompts(3, 4, 200)
    base = (base * 200)[:120]
    with deployment(*ONE_ONE, make_engine=engines(folder("qwen3")), chunk_tokens=64) as made:
        [first] = answer(made, [base], "first")
        asked = [base + first + other for other in others] + [base[:64] + other for other in others]
        asked = [prompt[:300] for prompt in asked]
        assert answer(made, asked, "more") == generate(folder("qwen3"), asked, COUNT)
        usages = [made.front.outputs[f"more{i}"][-1].usage for i in range(len(asked))]
        for usage in usages:
            assert usage is not None
            assert usage.prompt_tokens == usage.decode_cached + usage.prefill_cached + usage.computed
            assert usage.decode_cached >= 64


def test_seeded_sampling_is_equal_apart_and_unified(folder: Callable[[str], Path]) -> None:
    asked = prompts(4, 8, 120)
    how = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 1234, "repetition_penalty": 1.1}
    with deployment(*ONE_ONE, make_engine=engines(folder("llama")), chunk_tokens=16) as made:
        apart = answer(made, asked, "r", **how)
    with deployment(Role.UNIFIED, make_engine=engines(folder("llama")), chunk_tokens=64) as made:
        together = answer(made, asked, "r", **how)
    assert apart == together
    assert apart != generate(folder("llama"), asked, COUNT)


def test_logprobs_travel_with_the_first_token(folder: Callable[[str], Path]) -> None:
    [asked] = prompts(5, 1, 50)
    with deployment(*ONE_ONE, make_engine=engines(folder("llama")), chunk_tokens=16) as made:
        answer(made, [asked], "r", logprobs=3, prompt_logprobs=2)
        outputs = made.front.outputs["r0"]
    with deployment(Role.UNIFIED, make_engine=engines(folder("llama"))) as made:
        answer(made, [asked], "r", logprobs=3, prompt_logprobs=2)
        together = made.front.outputs["r0"]
    for a, b in zip(outputs, together, strict=True):
        assert [x.token for x in a.logprobs] == a.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert len(x.top) == 3
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
    first = outputs[0].prompt_logprobs
    assert first is not None
    assert first[0] is None
    assert [x.token for x in first[1:] if x is not None] == asked[1:]


def test_unequal_page_sizes_between_the_sides(folder: Callable[[str], Path]) -> None:
    asked = prompts(6, 5, 100)
    sizes = iter((16, 32))

    def make() -> tuple[Engine, Memory]:
        return engines(folder("llama"), next(sizes))()

    with deployment(*ONE_ONE, make_engine=make, chunk_tokens=64) as made:
        assert answer(made, asked, "r") == generate(folder("llama"), asked, COUNT)


def test_retraction_keeps_the_tokens_equal(folder: Callable[[str], Path]) -> None:
    asked = [[3 + (7 * i + k) % 90 for k in range(44)] for i in range(6)]
    path = folder("llama")

    def make() -> tuple[Engine, Memory]:
        page = load_engine(path, dtype="float32", pool_bytes=2**20).spec.page_bytes
        engine = load_engine(path, dtype="float32", pool_bytes=page * 14)
        return engine, engine.memory

    with deployment(*ONE_ONE, make_engine=make, chunk_tokens=64) as made:
        assert answer(made, asked, "r", 60) == generate(path, asked, 60)
        [decode] = made.by_role(Role.DECODE)
        assert decode.role.generation.retractions > 0, "the pool was too large to need one"
