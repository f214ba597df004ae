"""Lesson 24: every metric that is published is seen moving, in a deployment of real models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from deployment import Running
from engine_models import VOCAB, engines, save_model
from killable import NAME, Cluster, cluster, save_tokenizer

from segue.kv.ids import Role

Series = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = save_model(tmp_path_factory.mktemp("measured"), "llama")
    save_tokenizer(made, VOCAB)
    return made


class Watch:
    """The highest value that each series of a frontend's `/metrics` was seen with."""

    def __init__(self, made: Cluster) -> None:
        self.made = made
        self.highest: Series = {}
        self.families: set[str] = set()

    def look(self) -> None:
        """Read them as a scraper does."""
        assert self.made.http.get("/metrics").status_code == 200
        for family in self.made.metrics.registry.collect():
            self.families.add(family.name)
            for s in family.samples:
                if not s.name.endswith("_created"):
                    key = (s.name, tuple(s.labels.values()))
                    self.highest[key] = max(self.highest.get(key, 0.0), s.value)

    def of(self, name: str, *labels: str) -> float:
        """The highest value over all series of `name` that carry these labels."""
        found = [v for (n, have), v in self.highest.items() if n == name and set(labels) <= set(have)]
        return max(found, default=0.0)

    def still(self) -> set[str]:
        """Families of which no series has moved."""
        moved = {name for (name, _), value in self.highest.items() if value > 0}
        return {f for f in self.families if not any(name.startswith(f) for name in moved)}


@contextmanager
def held(made: Cluster, running: Running) -> Iterator[threading.Event]:
    """`running` stops in the middle of its next step (the event says that it is there) until the end."""
    steps = made.steps[running.instance.me]
    there, go = threading.Event(), threading.Event()

    def stop() -> None:
        there.set()
        assert go.wait(60)

    steps.act, steps.at = stop, steps.count + 1
    try:
        yield there
    finally:
        steps.at = None
        go.set()


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}


def ask(made: Cluster, prompt: list[int], **more: Any) -> int:
    content = json.dumps({"model": NAME, **body(prompt, **more)})
    return made.http.post("/v1/completions", content=content).status_code


@pytest.mark.slow
def test_lesson_24_every_metric_moves_under_a_real_run(folder: Path) -> None:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    options: dict[str, Any] = {"make_engine": engines(folder), "chunk_tokens": 32, "transport": "tcp"}
    with cluster(folder, *roles, **options) as made, ThreadPoolExecutor(8) as pool:
        watch = Watch(made)
        prompts = [[3 + (7 * i + j) % 80 for j in range(70)] for i in range(8)]
        # Plain ones, and the same again: each side's prefix cache has them.
        for _ in range(3):
            assert ask(made, prompts[0]) == 200
        watch.look()
        assert watch.of("segue_replicas", "prefill") == watch.of("segue_replicas", "decode") == 2

        # Held in prefill: waiting. Held in decode: running, and what comes then is too much.
        prefills, decodes = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        with held(made, prefills[0]) as one, held(made, prefills[1]) as other:
            answers = [pool.submit(ask, made, p) for p in prompts[1:5]]
            assert one.wait(60)
            assert other.wait(60)
            while watch.of("segue_generations_waiting") < 4:
                watch.look()
        assert [a.result() for a in answers] == [200] * 4
        limits = made.fleet.limits
        with held(made, decodes[0]) as one, held(made, decodes[1]) as other:
            answers = [pool.submit(ask, made, p) for p in prompts[1:3]]
            assert one.wait(60)
            assert other.wait(60)
            made.fleet.limits = msgspec.structs.replace(limits, max_queue=1)
            assert ask(made, prompts[5]) == 429
            made.fleet.limits = limits
            watch.look()
        assert [a.result() for a in answers] == [200] * 2

        # A client that leaves after its first token, which comes before decode's first step: none ends here.
        content = json.dumps({"model": NAME, "stream": True, **body(prompts[0], max_tokens=300)})
        with held(made, decodes[0]), held(made, decodes[1]):
            with made.http.stream("POST", "/v1/completions", content=content) as answer:
                lines = answer.iter_lines()  # kept: dropping it closes the connection
                next(lines)
                watch.look()
                assert made.metric("segue_generations_running") == 1
            while not watch.of("segue_aborts_total"):
                watch.look()

        # Reports of load come at most every 100 ms: work until one was sent in the middle of it.
        for _ in range(20):
            answers = [pool.submit(ask, made, p, n=4, temperature=1) for p in prompts]
            while not all(a.done() for a in answers):
                watch.look()
            assert [a.result() for a in answers] == [200] * 8
            if watch.of("segue_replica_running") and watch.of("segue_replica_waiting"):
                break

        # One dies before the first token, another after it.
        made.kill_at(prefills[0], 1)
        while made.steps[prefills[0].instance.me].at is not None:
            assert ask(made, [5 + made.steps[prefills[0].instance.me].count % 70] * 40) == 200
        made.kill_at(decodes[0], 6)
        while made.steps[decodes[0].instance.me].at is not None:
            assert ask(made, prompts[6]) == 200
        # A new decode knows nothing of what prefill has cached.
        for dead in (prefills[0], decodes[0]):
            made.leave(dead)
        made.add(Role.DECODE)
        made.seen(2, Role.DECODE)
        for _ in range(4):
            assert ask(made, prompts[0]) == 200
        watch.look()

        assert watch.of("segue_retries_total", "PEER_LOST") >= 1
        assert watch.of("segue_continuations_total", "PEER_LOST") >= 1
        for kv in ("kept", "computed"):
            assert watch.of("segue_placed_again_prompt_tokens_total", kv) > 0, kv
        for side in ("prefill", "decode"):
            assert watch.of("segue_cached_tokens_total", side) > 0, side
        for phase in ("queue", "bootstrap", "reserve", "prefill", "wire", "commit"):
            assert watch.of("segue_handoff_seconds_sum", phase) > 0, phase
        for state in ("free", "used"):
            assert watch.of("segue_pages", state) > 0, state
        assert watch.of("segue_rejected_total") == 1
        assert watch.of("segue_aborts_total") >= 1
        # And whatever else there is: a metric that is added and never moves fails here.
        assert watch.still() == {"segue_slots"}, "llama keeps no state (see tests/e2e/test_hybrid.py)"
        made.until(lambda: made.fleet.in_flight == 0)
        watch.highest.clear()
        watch.look()
        assert watch.of("segue_generations_running") == watch.of("segue_generations_waiting") == 0
