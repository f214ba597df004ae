"""How long forwards of this machine's engine take, for `segue advise --measure`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from segue.engine.cpu.cpu_forward import load_engine
from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.replica_engine import ReplicaEngine
from segue.engine.request import SamplingParams
from segue_lab.advise.costs import ForwardWork, TimedForward, pairs

#: Sequences that generate, and how long each is.
DECODES = ((1, 256), (2, 256), (4, 256), (8, 256), (16, 256), (16, 1024))
#: Tokens of a prompt's chunk, and how many came before it.
CHUNKS = ((32, 0), (128, 0), (256, 0), (256, 1024), (512, 0))
#: Both in one forward, which only checks the calculation: tokens of the chunk, sequences, how long each is.
MIXED = ((128, 8, 256),)
ROUNDS = 7
#: A forward without prompts is short: so many in each round.
_TIMES = 4
_SEQUENCES = 17
_TOKENS = 16 * 1024 + 256 + 1024


def measure(folder: Path, dtype: str, threads: int, rounds: int = ROUNDS) -> list[TimedForward]:
    """Load the model and time each forward of the lists above, `rounds` times in turns."""
    engine = load_engine(folder, dtype=dtype, pool_bytes=_pool_bytes(folder, dtype), threads=threads)
    draw = random.Random(0)
    for index in range(_SEQUENCES):
        engine.open(index, [1], SamplingParams(temperature=0.0))
    forwards = [
        *(_decode(engine, draw, count, length) for count, length in DECODES),
        *([_chunk(engine, draw, tokens, start)] for tokens, start in CHUNKS),
        *(
            [*_decode(engine, draw, count, length), _chunk(engine, draw, tokens, 0)]
            for tokens, count, length in MIXED
        ),
    ]
    times: list[list[float]] = [[] for _ in forwards]
    for at in range(rounds + 1):
        for steps, taken in zip(forwards, times, strict=True):
            for _ in range(1 if any(len(step.tokens) > 1 for step in steps) else _TIMES):
                begin = perf_counter()
                run_step(engine, steps)
                if at:  # the first round warms up
                    taken.append(perf_counter() - begin)
    return [
        TimedForward(work=_work(steps), samples=tuple(taken))
        for steps, taken in zip(forwards, times, strict=True)
    ]


def _pool_bytes(folder: Path, dtype: str) -> int:
    from segue.cli.commands.models import model_size

    size = model_size(folder, dtype)
    return 2**29 if size is None else _TOKENS * size.token_bytes + 64 * size.state_bytes


def _tokens(engine: ReplicaEngine, draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(engine.info.vocab_size) for _ in range(count)]


def _decode(engine: ReplicaEngine, draw: random.Random, count: int, length: int) -> list[SequenceStep]:
    each = -(-length // engine.spec.page_tokens)
    return [
        SequenceStep(i, _tokens(engine, draw, 1), length - 1, list(range(i * each, (i + 1) * each)), True)
        for i in range(count)
    ]


def _chunk(engine: ReplicaEngine, draw: random.Random, tokens: int, start: int) -> SequenceStep:
    size = engine.spec.page_tokens
    first = 16 * 1024 // size
    pages = list(range(first, first + -(-(start + tokens) // size)))
    return SequenceStep(_SEQUENCES - 1, _tokens(engine, draw, tokens), start, pages, True)


def _work(steps: Sequence[SequenceStep]) -> ForwardWork:
    chunks = [step for step in steps if len(step.tokens) > 1]
    decodes = [step for step in steps if len(step.tokens) == 1]
    return ForwardWork(
        prompt_tokens=sum(len(step.tokens) for step in chunks),
        pairs=sum(pairs(step.start, len(step.tokens)) for step in chunks),
        sequences=len(decodes),
        context=sum(step.start + 1 for step in decodes),
    )
