"""Prefill and decode apart give the tokens that `transformers` generates, for every family."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment, deployment, generates_only_with
from engine_models import FAMILY_CONFIGS, VOCAB, engines, generate, leads, save_model

from segue.engine.cpu.cpu_forward import load_engine
from segue.engine.engine_api import Engine
from segue.engine.request import Usage
from segue.kv.ids import Role
from segue.kv.transport.memory.pool_memory import Memory
from segue.server.instance.instance import Instance

COUNT = 12
ONE_ONE = (Role.PREFILL, Role.DECODE)
ONE_TWO = (Role.PREFILL, Role.DECODE, Role.DECODE)
TWO_ONE = (Role.PREFILL, Role.PREFILL, Role.DECODE)
TWO_TWO = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
WHOLE = 4096
# Sixteen at once. The sliding windows of the tiny models have 18, 20 and 24 tokens.
LENGTHS = (1, 2, 15, 16, 17, 18, 19, 20, 21, 24, 25, 33, 64, 65, 130, 600)
LONG_LENGTHS = (1, 2, 15, 16, 17, 19, 25, 33, 64, 65, 129, 257, 512, 777, 1300, 2000)
#: By how much of a logit each greedy token must lead: far more than the order of float32 sums can change.
LEAD = 1e-4
ANSWER_S = 240.0
#: Families that `make test` serves: full attention, windows, a latent cache, a recurrent state.
QUICK = ("llama", "gemma3", "deepseek-v3", "qwen3-next")
Reference = tuple[list[list[int]], list[list[int]]]


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


@pytest.fixture(scope="module")
def reference(folder: Callable[[str], Path]) -> Callable[[str, tuple[int, ...]], Reference]:
    """Prompts of these lengths, drawn until none meets a tie, and what transformers generates for them,
    once per family."""
    made: dict[tuple[str, tuple[int, ...]], Reference] = {}

    def make(family: str, lengths: tuple[int, ...]) -> Reference:
        if (family, lengths) not in made:
            rng = random.Random(8)

            def draw(length: int) -> list[int]:
                return [rng.randrange(3, VOCAB) for _ in range(length)]

            asked = [draw(length) for length in lengths]
            wanted = generate(folder(family), asked, COUNT)
            # Of two tokens that are equally likely but for the last bits, transformers itself takes one
            # in a whole forward and the other in generate: no answer would be the right one.
            while ties := [i for i, lead in enumerate(leads(folder(family), asked, wanted)) if lead < LEAD]:
                for i in ties:
                    asked[i] = draw(lengths[i])
                    [wanted[i]] = generate(folder(family), [asked[i]], COUNT)
            made[family, lengths] = asked, wanted
        return made[family, lengths]

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
            f"{tag}{i}",
            prompt,
            p,
            d,
            max_tokens=count,
            budget_s=ANSWER_S,
            ignore_eos=True,
            **{"temperature": 0.0, **sampling},
        )
    for i in range(len(wanted)):
        made.front.wait(f"{tag}{i}", ANSWER_S)
    return [made.front.tokens(f"{tag}{i}") for i in range(len(wanted))]


#: One deployment for `make test`, one more for `make test-slow`: both transports, both sizes of a deployment,
#: and the extremes of a chunk.
SERVED = {"2P2D-tcp-16": (TWO_TWO, "tcp", 16), "1P1D-shm-whole": (ONE_ONE, "shm", WHOLE)}


def marked(family: str, *, first: bool = False) -> list[pytest.MarkDecorator]:
    """The `QUICK` families stand for the kinds of attention: the others go one suite further."""
    if family in QUICK:
        return [] if first else [pytest.mark.slow]
    return [pytest.mark.slow if first else pytest.mark.soak]


@pytest.mark.parametrize(
    ("family", "roles", "transport", "chunk_tokens"),
    [
        pytest.param(family, *how, id=f"{family}-{name}", marks=marked(family, first=how[0] == TWO_TWO))
        for family in FAMILY_CONFIGS
        for name, how in SERVED.items()
    ],
)
def test_each_family_equals_generate(
    family: str,
    roles: tuple[Role, ...],
    transport: str,
    chunk_tokens: int,
    folder: Callable[[str], Path],
    reference: Callable[[str, tuple[int, ...]], Reference],
) -> None:
    asked, wanted = reference(family, LENGTHS)
    make = engines(folder(family))
    with deployment(*roles, make_engine=make, transport=transport, chunk_tokens=chunk_tokens) as made:
        assert answer(made, asked, "r") == wanted


@pytest.mark.parametrize("family", [pytest.param(f, marks=marked(f)) for f in FAMILY_CONFIGS])
def test_each_family_equals_generate_where_decode_computes_half_of_the_prompts(
    family: str,
    folder: Callable[[str], Path],
    reference: Callable[[str, tuple[int, ...]], Reference],
) -> None:
    asked, wanted = reference(family, LENGTHS)
    with deployment(*ONE_ONE, make_engine=engines(folder(family)), chunk_tokens=32) as made:
        [prefill], [decode] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        for i, prompt in enumerate(asked):
            first = decode if i % 2 else prefill
            made.front.submit(
                f"r{i}", prompt, first, decode, max_tokens=COUNT, temperature=0.0, ignore_eos=True
            )
        assert [made.front.tokens(f"r{i}") for i in range(len(asked))] == wanted
        made.assert_comes_to_rest()


@pytest.mark.soak
@pytest.mark.parametrize("chunk_tokens", [16, 64, WHOLE])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("roles", [ONE_ONE, TWO_TWO], ids=["1P1D", "2P2D"])
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_each_family_with_prompts_of_up_to_2000_tokens(
    family: str,
    roles: tuple[Role, ...],
    transport: str,
    chunk_tokens: int,
    folder: Callable[[str], Path],
    reference: Callable[[str, tuple[int, ...]], Reference],
) -> None:
    asked, wanted = reference(family, LONG_LENGTHS)
    make = engines(folder(family), pool_bytes=2**25)
    with deployment(*roles, make_engine=make, transport=transport, chunk_tokens=chunk_tokens) as made:
        assert answer(made, asked, "r") == wanted
        # Once more: now windows reach over cached pages, and decode is sent only what it lacks.
        assert answer(made, asked, "again") == wanted


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


def carried_bytes(prefill: Instance) -> int:
    """Bytes that the transport has landed in the pools of all decodes of `prefill`."""
    manager = prefill.manager
    assert manager is not None
    done: list[int] = []
    heard = threading.Event()

    def count() -> None:
        done.append(sum(speed.nbytes for speed in manager.paths().values()))
        heard.set()

    manager.io.post(count)
    assert heard.wait(60)
    return done[0]


def one(made: Deployment, name: str, prompt: list[int], prefill: Instance, decode: Instance) -> list[int]:
    """One prompt on these two instances."""
    made.front.submit(name, prompt, prefill, decode, max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    return made.front.tokens(name)


def usage_of(made: Deployment, name: str) -> Usage:
    usage = made.front.outputs[name][-1].usage
    assert usage is not None
    return usage


# A page has 16 tokens. gemma3 and mistral have sliding windows that cross from cached to new pages.
each_with_one_transport = pytest.mark.parametrize(
    ("family", "transport"), [("qwen3", "shm"), ("mistral", "tcp"), ("gemma3", "shm"), ("deepseek-v3", "tcp")]
)


@each_with_one_transport
def test_a_prefix_hit_on_prefill_while_decode_is_cold(
    family: str, transport: str, folder: Callable[[str], Path]
) -> None:
    """Prefill computes the tail only, and the whole prompt is sent."""
    [base, tail] = [(p * 200)[:n] for p, n in zip(prompts(9, 2, 90), (112, 37), strict=True)]
    asked = base + tail
    [first, wanted] = generate(folder(family), [base, asked], COUNT)
    make = engines(folder(family))
    with deployment(*ONE_TWO, make_engine=make, transport=transport, chunk_tokens=16) as made:
        [prefill], [warm, cold] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        token_bytes = made.running[0].engine.spec.page_bytes // 16
        assert one(made, "first", base, prefill, warm) == first
        assert carried_bytes(prefill) == len(base) * token_bytes
        assert one(made, "hit", asked, prefill, cold) == wanted
        assert carried_bytes(prefill) == (len(base) + len(asked)) * token_bytes
        usage = usage_of(made, "hit")
        assert (usage.decode_cached, usage.prefill_cached, usage.computed) == (0, len(base), len(tail))


@each_with_one_transport
def test_a_prefix_hit_on_decode_while_prefill_is_cold(
    family: str, transport: str, folder: Callable[[str], Path]
) -> None:
    """Prefill has to compute the whole prompt, and only what decode lacks is sent."""
    [base, tail] = [(p * 200)[:n] for p, n in zip(prompts(10, 2, 90), (112, 37), strict=True)]
    asked = base + tail
    [first, wanted] = generate(folder(family), [base, asked], COUNT)
    make = engines(folder(family))
    with deployment(*TWO_ONE, make_engine=make, transport=transport, chunk_tokens=16) as made:
        [warm, cold], [decode] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        token_bytes = made.running[0].engine.spec.page_bytes // 16
        assert one(made, "first", base, warm, decode) == first
        assert one(made, "hit", asked, cold, decode) == wanted
        assert carried_bytes(warm) == len(base) * token_bytes
        assert carried_bytes(cold) == len(tail) * token_bytes
        usage = usage_of(made, "hit")
        assert (usage.decode_cached, usage.prefill_cached, usage.computed) == (0, 0, len(asked))
        # What came from two prefills is one prefix now: it serves the next prompt whole.
        assert one(made, "both", asked, cold, decode) == wanted
        again = usage_of(made, "both")
        assert (again.decode_cached, again.computed) == (len(asked) // 16 * 16, len(asked) % 16)


@pytest.mark.slow
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


# Penalties too: what they know of the output so far must outlive a retraction.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("deepseek-v2", {}),
        (
            "llama",
            {
                "temperature": 0.9,
                "top_p": 0.95,
                "seed": 77,
                "repetition_penalty": 1.1,
                "presence_penalty": 0.4,
            },
        ),
    ],
    ids=["greedy", "seeded"],
)
def test_retraction_keeps_the_tokens_equal(
    family: str, how: dict[str, Any], folder: Callable[[str], Path]
) -> None:
    asked = [[3 + (7 * i + k) % 90 for k in range(44)] for i in range(6)]
    path = folder(family)

    def make() -> tuple[Engine, Memory]:
        page = load_engine(path, dtype="float32", pool_bytes=2**20).spec.page_bytes
        engine = load_engine(path, dtype="float32", pool_bytes=page * 14)
        return engine, engine.memory

    with deployment(*ONE_ONE, make_engine=make, chunk_tokens=64) as made:
        [decode] = made.by_role(Role.DECODE)
        generates_only_with(decode, 3)  # each of which comes to need half of the pages
        retracted = answer(made, asked, "r", 60, **how)
        assert decode.scheduler.batch.retractions > 0, "the pool was too large to need one"
    greedy = generate(path, asked, 60)
    if not how:
        assert retracted == greedy
        return
    assert retracted != greedy, "nothing was sampled"
    for roles in (ONE_ONE, (Role.UNIFIED,)):
        with deployment(*roles, make_engine=engines(path), chunk_tokens=64) as made:
            assert answer(made, asked, "r", 60, **how) == retracted
            for instance in made.by_role(Role.DECODE) + made.by_role(Role.UNIFIED):
                assert instance.scheduler.batch.retractions == 0, "this run was not undisturbed"
