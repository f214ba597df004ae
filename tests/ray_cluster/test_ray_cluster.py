"""segue on Ray Serve, on a cluster of several raylets: requests while actors, nodes and counts come and go.

`make test-ray` runs it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from ray_hosts import RayHosts, until
from traffic import Ask, Result, asks, stream

pytestmark = pytest.mark.ray

COUNT = 1000
CLIENTS = 6
WITHIN_S = 240
MODEL = "tiny"


def busy(hosts: RayHosts) -> list[str]:
    """Instances that do not answer, or hold a request or a page that nobody may use."""
    found = []
    for instance in hosts.listed():
        load = (instance.get("sight") or {}).get("load")
        if load is None or load["running"] or load["waiting"] or load["pages_quarantined"]:
            found.append(f"{instance['instance']}: {load or instance.get('trouble')}")
    return found


async def load(url: str, work: list[Ask], done: Callable[[int], None], over: threading.Event) -> list[Result]:
    """Each of `work`, `CLIENTS` at a time, then again until `over`; `done` is told how many have ended."""
    indices = itertools.count()
    results: dict[int, Result] = {}

    async def client() -> None:
        while (index := next(indices)) < len(work) or not over.is_set():
            results[index] = await stream(url, MODEL, work[index % len(work)], within_s=WITHIN_S)
            done(len(results))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return [results[index] for index in sorted(results)]


def test_a_thousand_requests_while_a_node_an_actor_and_counts_change(hosts: RayHosts) -> None:
    hosts.run(prefill={"replicas": 2}, decode={"replicas": 1})
    before = {instance["instance"] for instance in hosts.listed()}
    distinct = [ask for ask in asks(7, 40, vocab=250, longest=60, max_tokens=12) if ask.seed is None]
    once = threading.Event()
    once.set()
    expected = asyncio.run(load(hosts.url, distinct, lambda _: None, once))
    assert [result.error for result in expected] == [""] * len(distinct)

    def counts(decode: int, **settings: Any) -> None:
        hosts.run(prefill={"replicas": 2}, decode={"replicas": decode}, **settings)

    # Another setting of each part: Serve replaces all actors, a few at a time.
    other = {"request_budget_s": 250}
    steps: dict[int, tuple[str, Callable[[], object]]] = {
        COUNT // 8: ("decode 1 -> 3", lambda: counts(3)),
        2 * COUNT // 8: ("kill a decode actor", lambda: hosts.actors("decode")[0].kill()),
        3 * COUNT // 8: ("kill a prefill actor", lambda: hosts.actors("prefill")[0].kill()),
        4 * COUNT // 8: ("remove a node", lambda: (hosts.add_node(), hosts.remove_node(hosts.nodes.pop(0)))),
        5 * COUNT // 8: ("rolling update", lambda: counts(3, **other)),
        7 * COUNT // 8: ("decode 3 -> 1", lambda: counts(1, **other)),
    }
    due: queue.Queue[int] = queue.Queue()
    work = [distinct[i % len(distinct)] for i in range(COUNT)]
    came, over = [], threading.Event()
    with ThreadPoolExecutor(1) as clients:
        # Requests go on until the last step is over, however long the steps take.
        loaded = clients.submit(lambda: asyncio.run(load(hosts.url, work, due.put, over)))
        try:
            # Ray starts a node in the main thread alone.
            while len(came) < len(steps):
                count = due.get(timeout=WITHIN_S)
                if count in steps:
                    name, step = steps[count]
                    step()
                    came.append(name)
        finally:
            over.set()
        results = loaded.result(COUNT)
    errors = [(i, r.error, r.text) for i, r in enumerate(results) if r.error]
    assert errors == [], f"{len(errors)} of {len(results)} failed"
    tokens = {result.ask: result.tokens for result in expected}
    wrong = [i for i, result in enumerate(results) if result.tokens != tokens[result.ask]]
    assert wrong == []
    until(lambda: len(hosts.parts()) == 4, "two prefill, one decode and one frontend")
    until(lambda: len(hosts.listed()) == 3, "the entries of those that left are gone")
    assert not before & {instance["instance"] for instance in hosts.listed()}
    until(lambda: busy(hosts) == [], "no request and no page is held")
    print(f"{len(results)} requests, {came}: 0 failed, 0 wrong")  # noqa: T201  the record of `make test-ray`


def test_a_stream_comes_in_pieces_and_ends_with_its_client(hosts: RayHosts) -> None:
    hosts.run(prefill={"replicas": 2}, decode={"replicas": 1})
    body: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3500, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{hosts.url}/v1/completions", json=body, timeout=WITHIN_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines)[6:])["choices"]
        assert json.loads(next(lines)[6:])["choices"]
    until(lambda: busy(hosts) == [], "the request has ended with its client")


def test_other_paths_and_errors_are_the_frontends(hosts: RayHosts) -> None:
    models = httpx.get(f"{hosts.url}/v1/models", timeout=60).json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    answer = httpx.post(f"{hosts.url}/v1/completions", json={"model": "other", "prompt": "x"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_process_that_dies_is_replaced_by_a_new_incarnation(hosts: RayHosts) -> None:
    before = {instance["instance"] for instance in hosts.listed()}
    [decode] = [part for part in hosts.parts() if "decode" in part.cmdline()]
    decode.kill()
    until(lambda: len({row["instance"] for row in hosts.listed()} - before) == 1, "a new decode", 240)
    result = asyncio.run(stream(hosts.url, MODEL, Ask((1, 2, 3), 4), within_s=WITHIN_S))
    assert (result.error, len(result.tokens)) == ("", 4)


def test_a_gang_of_a_pair_serves_and_leaves_nothing(hosts: RayHosts) -> None:
    hosts.delete()
    until(lambda: not hosts.parts(), "the end of the application")
    hosts.run(pairs=1)
    assert len(hosts.parts()) == 3
    result = asyncio.run(stream(hosts.url, MODEL, Ask((1, 2, 3), 4), within_s=WITHIN_S))
    assert (result.error, len(result.tokens)) == ("", 4)
    hosts.delete()
    until(lambda: not hosts.parts(), "the end of the application")
