"""The measurements of `segue advise --measure` and its report of them, with an engine that computes
nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segue.cli.commands import models
from segue.cli.doctor import doctor_command as doctor
from segue.engine.engine_api import SequenceStep
from segue.engine.pool_size import ModelSize
from segue_lab.advise.costs import ForwardWork, TimedForward
from segue_lab.commands import advise, advise_measure
from segue_lab.commands.advise_flags import AdviseConfig

PAGE_TOKENS, VOCAB = 16, 50


class Engine:
    """Takes a second for the first forward of each kind, then a millisecond a token."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(vocab_size=VOCAB)
        self.spec = SimpleNamespace(page_tokens=PAGE_TOKENS)
        self.opened: list[int] = []
        self.ran: list[Sequence[SequenceStep]] = []
        self.now = 0.0

    def open(self, seq_id: int, prompt: Sequence[int], sampling: Any) -> None:
        self.opened.append(seq_id)

    def launch(self, steps: Sequence[SequenceStep], on_stored: object, on_ready: object) -> object:
        first = all(before is not steps for before in self.ran)
        self.ran.append(steps)
        self.now += 1.0 if first else 1e-3 * sum(len(step.tokens) for step in steps)
        return steps

    def collect(self, handle: object) -> list[Any]:
        return []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, dict[str, Any]]:
    made, given = Engine(), dict[str, Any]()

    def load_engine(folder: Path, **more: Any) -> Engine:
        given.update(more)
        return made

    monkeypatch.setattr(advise_measure, "load_engine", load_engine)
    monkeypatch.setattr(advise_measure, "perf_counter", lambda: made.now)
    return made, given


def test_every_forward_is_timed_warm_and_its_work_is_what_was_computed(
    engine: tuple[Engine, dict[str, Any]], tmp_path: Path
) -> None:
    made, given = engine
    timed = advise_measure.measure(tmp_path, "float32", 3, rounds=2)
    assert (given["dtype"], given["threads"]) == ("float32", 3)
    kinds = [steps for at, steps in enumerate(made.ran) if all(steps is not each for each in made.ran[:at])]
    assert len(timed) == len(kinds)
    for forward, steps in zip(timed, kinds, strict=True):
        work, tokens = forward.work, sum(len(step.tokens) for step in steps)
        assert work.rows == tokens
        assert forward.samples == pytest.approx([1e-3 * tokens] * len(forward.samples)), "none of them cold"
        chunks = [step for step in steps if len(step.tokens) > 1]
        assert len(forward.samples) == (2 if chunks else 8)
        assert work.prompt_tokens == sum(len(step.tokens) for step in chunks)
        assert work.pairs == sum(
            at + 1 for step in chunks for at in range(step.start, step.start + len(step.tokens))
        )
        assert work.context == sum(step.start + 1 for step in steps if len(step.tokens) == 1)
        assert work.sequences == len(steps) - len(chunks)
        pages = [page for step in steps for page in step.pages]
        assert len(set(pages)) == len(pages), "no two share a page"
        for step in steps:
            assert step.seq_id in made.opened
            assert len(step.pages) * PAGE_TOKENS >= step.start + len(step.tokens)
            assert all(0 <= token < VOCAB for token in step.tokens)
    decodes = [each.work for each in timed if not each.work.prompt_tokens]
    asked = [(count, count * length) for count, length in advise_measure.DECODES]
    assert [(work.sequences, work.context) for work in decodes] == asked


@pytest.mark.parametrize(("state_bytes", "more"), [(0, 0), (1000, 64_000)])
def test_its_pool_holds_every_page_that_a_forward_names(
    state_bytes: int,
    more: int,
    engine: tuple[Engine, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    made, given = engine
    size: Callable[..., ModelSize] = lambda *_: ModelSize(1, 10, 4096, state_bytes)  # noqa: E731
    monkeypatch.setattr(models, "model_size", size)
    advise_measure.measure(tmp_path, "float32", 1, rounds=1)
    last = max(page for steps in made.ran for step in steps for page in step.pages)
    assert given["pool_bytes"] - more >= (last + 1) * PAGE_TOKENS * 10
    assert given["pool_bytes"] == 10 * (16 * 1024 + 256 + 1024) + more


def test_what_was_measured_is_saved_for_the_next_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = SimpleNamespace(name="shm", speed=SimpleNamespace(gb_per_s=2.0, page_us=30.0))
    monkeypatch.setattr(advise, "need", lambda *_: None)
    monkeypatch.setattr(models, "resolve", lambda model, cache: tmp_path / model / str(cache))
    monkeypatch.setattr(models, "model_size", lambda _folder, dtype: ModelSize(1, len(dtype), 4096, 9))
    monkeypatch.setattr(
        doctor, "transport_rows", lambda _: ([row, SimpleNamespace(name="tcp", speed=None)], [])
    )
    work = TimedForward(work=ForwardWork(sequences=1, context=5), samples=(0.5,))
    monkeypatch.setattr(advise_measure, "measure", lambda folder, dtype, threads: [work] * threads)
    file = tmp_path / "measured.json"
    config = AdviseConfig(
        model="m", cache="c", dtype="float32", threads=2, measure=True, save=str(file), rate=1.0
    )
    machine = advise.measure_machine(config)
    assert advise.read_machine(str(file)) == machine
    assert (machine.model, machine.dtype, machine.threads, machine.forwards) == (
        "c",
        "float32",
        2,
        (work, work),
    )
    assert (machine.kv_token_bytes, machine.context_tokens, machine.state_bytes) == (7, 4096, 9)
    [wire] = machine.wires
    assert (wire.name, wire.bytes_per_s) == ("shm", 2e9)
    assert wire.latency_s == pytest.approx(3e-5)
