"""The real routers of other projects, and Dynamo's KV indexer, with real instances in a network apart."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import tiny_model
from deployment import Running, deployment

from loopback import only_loopback
from segue.cli.main import main
from segue.kv.ids import Role
from segue.server.settings.kv_events_config import KVEventsConfig

pytestmark = pytest.mark.slow

ROUTERS = Path(os.environ.get("ROUTERS_VENV") or Path(sys.prefix) / "routers") / "bin"
PREFILL, DECODE, FRONTEND, SGLANG, VLLM, BOOTSTRAP = 18101, 18111, 18103, 18120, 18130, 18998
WORKERS, KV_AWARE, INDEXER = (18201, 18211), 18140, 18150
#: A registry by itself, so that it can be killed alone.
REGISTRY = f"""
import asyncio
from segue.cli.commands.processes import run_registry
from segue.kv import Limits

async def main():
    async with run_registry({BOOTSTRAP}, None, Limits(), None):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
#: What a request may take here at most: what a leg waits for the other one.
BUDGET_S = 6.0
ASK = {"model": "tiny", "prompt": "hello there, this is a prompt", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """See `only_loopback`."""
    if not (ROUTERS / "vllm-router").exists():
        pytest.skip("the routers are not installed: make routers")
    with only_loopback():
        yield


@dataclass
class Parts:
    """Processes by name."""

    folder: Path
    dp: int
    #: the registry is a process of its own, not prefill's
    registry_apart: bool = False
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        registry = ("--registry", f"http://127.0.0.1:{BOOTSTRAP}")
        # Routers name prefill by this port, whoever runs the registry.
        theirs = ("--bootstrap-port", str(BOOTSTRAP), *(registry if self.registry_apart else ()))
        words = {
            "registry": [sys.executable, "-c", REGISTRY],
            "prefill": self._segue("prefill", PREFILL, *theirs),
            "decode": self._segue("decode", DECODE, *registry),
            "frontend": [
                *(sys.executable, "-m", "segue.cli.main", "frontend", "--port", str(FRONTEND)),
                *("--registry", f"http://127.0.0.1:{BOOTSTRAP}"),
            ],
            "sglang": [
                *(str(ROUTERS / "python"), "-m", "sglang_router.launch_router", "--pd-disaggregation"),
                *("--prefill", f"http://127.0.0.1:{PREFILL}", str(BOOTSTRAP)),
                *("--decode", f"http://127.0.0.1:{DECODE}", "--host", "127.0.0.1", "--port", str(SGLANG)),
                *("--policy", "round_robin", "--prometheus-port", "18121", "--disable-circuit-breaker"),
            ],
            "vllm": [
                *(str(ROUTERS / "vllm-router"), "--vllm-pd-disaggregation", "--policy", "round_robin"),
                *("--prefill", f"http://127.0.0.1:{PREFILL}", "--decode", f"http://127.0.0.1:{DECODE}"),
                *("--host", "127.0.0.1", "--port", str(VLLM), "--prometheus-port", "18131"),
                *(("--intra-node-data-parallel-size", str(self.dp)) if self.dp > 1 else ()),
            ],
            "kv-aware": [
                *(str(ROUTERS / "vllm-router"), "--policy", "kv_aware", "--kv-event-model", "tiny"),
                *("--worker-urls", *(f"http://127.0.0.1:{port}" for port in WORKERS)),
                *(word for port in WORKERS for word in _events_of(port)),
                *("--host", "127.0.0.1", "--port", str(KV_AWARE), "--prometheus-port", "18141"),
                *("--log-level", "debug", "--worker-startup-check-interval", "1"),
            ],
            "dynamo": [str(ROUTERS / "python"), "-m", "dynamo.indexer", "--port", str(INDEXER)],
        }[name]
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                words,
                stdout=log if name in ("sglang", "vllm", "kv-aware", "dynamo") else subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )

    def ready(self, name: str) -> None:
        process = self.running[name]
        if process.stdout is not None:
            line = process.stdout.readline()
            assert line.startswith("ready"), (self.folder / f"{name}.log").read_text()[-3000:]
            return
        at = {
            "sglang": f"{SGLANG}/readiness",
            "vllm": f"{VLLM}/health",
            "kv-aware": f"{KV_AWARE}/health",
            "dynamo": f"{INDEXER}/health",
        }[name]
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{at}", timeout=60).status_code == 200:
                    return
            assert process.poll() is None
            assert time.monotonic() < until, (self.folder / f"{name}.log").read_text()[-3000:]
            time.sleep(0.05)

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self.running.pop(name)
        process.send_signal(number)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()

    def _segue(self, role: str, door: int, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "segue.cli.main", role, "--model", str(self.folder)),
            *("--served-model-name", "tiny", "--dtype", "float32", "--kv-gib", "0.05"),
            *("--threads-per-worker", "1"),
            *("--transport", "shm", "--dp", str(self.dp), "--http-port", str(door)),
            *("--request-budget-s", str(BUDGET_S), *more),
        ]


@pytest.fixture(scope="module", params=[1, 2], ids=["dp1", "dp2"])
def parts(
    alone: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parts]:
    folder = tiny_model.save(tmp_path_factory.mktemp("tiny"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    made = Parts(folder, request.param)
    try:
        for name in ("prefill", "decode", "frontend"):
            made.start(name)
        for name in ("prefill", "decode", "frontend"):
            made.ready(name)
        for name in ("sglang", "vllm"):
            made.start(name)
        for name in ("sglang", "vllm"):
            made.ready(name)
        yield made
    finally:
        for name in list(made.running)[::-1]:
            made.end(name)


def post(port: int, path: str, body: dict[str, Any], timeout_s: float = 60) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=timeout_s)


def said(answer: httpx.Response) -> list[Any]:
    """A client's view of an answer, without ids, dates and the numbers of caches; a stream whole."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [_rounded(answer.json()["choices"])]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for line in lines:
        for choice in json.loads(line)["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            ends |= {choice["index"]: choice["finish_reason"]} if choice["finish_reason"] else {}
    return [texts, ends]


def _rounded(value: Any) -> Any:
    """Log-probabilities differ by what a batch of other rows does to the last bits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def at_rest(role_port: int) -> None:
    until = time.monotonic() + 60
    while True:
        state = httpx.get(f"http://127.0.0.1:{role_port}/integrity", timeout=60).json()
        if state["at_rest"] and not state["problems"]:
            return
        assert time.monotonic() < until, state
        time.sleep(0.05)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0}
BODIES = {
    "text": ("/v1/completions", ASK),
    "n": ("/v1/completions", ASK | {"n": 3}),
    "prompts": ("/v1/completions", ASK | {"prompt": ["one prompt", "and another one"]}),
    "logprobs": ("/v1/completions", ASK | {"logprobs": 1}),
    "echo": ("/v1/completions", ASK | {"logprobs": 1, "echo": True, "max_tokens": 4}),
    "seed": ("/v1/completions", ASK | {"temperature": 0.8, "seed": 4}),
    "min_tokens": ("/v1/completions", ASK | {"min_tokens": 5}),
    "long": ("/v1/completions", ASK | {"prompt": "many words " * 150}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat n": ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("router", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_every_answer_is_that_of_the_paired_mode(parts: Parts, router: int, name: str, stream: bool) -> None:
    path, body = BODIES[name]
    body = body | {"stream": stream}
    wanted = said(post(FRONTEND, path, body))
    for _ in range(parts.dp):
        assert said(post(router, path, body)) == wanted
    at_rest(PREFILL)
    at_rest(DECODE)


@pytest.mark.parametrize("router", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_a_request_that_is_wrong_is_a_400_at_once(parts: Parts, router: int) -> None:
    began = time.monotonic()
    assert post(router, "/v1/completions", ASK | {"prompt": "x" * 5000}).status_code == 400
    assert time.monotonic() - began < BUDGET_S


@pytest.mark.parametrize("router", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_a_client_that_leaves_and_a_router_that_is_killed_leave_nothing(parts: Parts, router: int) -> None:
    name = "sglang" if router == SGLANG else "vllm"
    slow = ASK | {"max_tokens": 3000, "stream": True}
    url = f"http://127.0.0.1:{router}/v1/completions"
    with httpx.stream("POST", url, json=slow, timeout=60) as answer:
        assert next(answer.iter_lines())
    at_rest(PREFILL)
    at_rest(DECODE)
    with httpx.stream("POST", url, json=slow, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        parts.end(name, signal.SIGKILL)
        with contextlib.suppress(httpx.TransportError):
            for _ in lines:
                pass
    at_rest(PREFILL)
    at_rest(DECODE)
    parts.start(name)
    parts.ready(name)
    assert post(router, "/v1/completions", ASK).status_code == 200


@pytest.mark.parametrize("role_port", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("router", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_a_leg_that_is_refused_ends_the_other_one_and_leaves_no_room(
    parts: Parts, router: int, role_port: int
) -> None:
    """A drained instance answers its leg with 503 while the other one waits: a worker's error."""
    wanted = said(post(FRONTEND, "/v1/completions", ASK))
    name = httpx.get(f"http://127.0.0.1:{role_port}/integrity", timeout=60).json()["incarnation"]
    registry = ("--registry", f"http://127.0.0.1:{BOOTSTRAP}")
    assert main(["drain", name, *registry, "--timeout", "30"]) == 0
    try:
        began = time.monotonic()
        answer = post(router, "/v1/completions", ASK, timeout_s=10 * BUDGET_S)
        assert answer.status_code >= 500, answer.text
        assert time.monotonic() - began < 10 * BUDGET_S
        at_rest(PREFILL)
        at_rest(DECODE)
    finally:
        assert main(["resume", name, *registry, "--timeout", "30"]) == 0
    until = time.monotonic() + 60
    while (answer := post(router, "/v1/completions", ASK)).status_code != 200:
        assert time.monotonic() < until, answer.text
        time.sleep(0.2)
    assert said(answer) == wanted


def test_prefill_that_is_killed_and_comes_back_at_its_address_serves_again(parts: Parts) -> None:
    wanted = said(post(FRONTEND, "/v1/completions", ASK))
    parts.end("prefill", signal.SIGKILL)
    began = time.monotonic()
    for router in (SGLANG, VLLM):
        assert post(router, "/v1/completions", ASK).status_code >= 500
    assert time.monotonic() - began < 10 * BUDGET_S
    parts.start("prefill")
    parts.ready("prefill")
    until = time.monotonic() + 60
    for router in (SGLANG, VLLM):
        while (answer := post(router, "/v1/completions", ASK)).status_code != 200:
            assert time.monotonic() < until, answer.text
            time.sleep(0.2)
        assert said(answer) == wanted


@pytest.mark.parametrize("parts", [1], indirect=True, ids=["dp1"])
def test_prefill_that_dies_between_its_room_and_decode_s_leg_costs_a_typed_error_and_no_wrong_answer(
    parts: Parts,
) -> None:
    """Its successor at the same address knows neither room."""
    remote = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": BOOTSTRAP, "bootstrap_room": 4711}
    first = post(PREFILL, "/v1/completions", ASK | {"max_tokens": 1} | remote)
    computed = ASK | {"kv_transfer_params": first.json()["kv_transfer_params"]}
    assert post(PREFILL, "/v1/completions", ASK | room).status_code == 200
    parts.end("prefill", signal.SIGKILL)
    parts.start("prefill")
    parts.ready("prefill")
    for body, expected in ((computed, (503,)), (ASK | room, (503, 504))):
        began = time.monotonic()
        answer = post(DECODE, "/v1/completions", body)
        assert answer.status_code in expected, answer.text
        assert time.monotonic() - began < 2 * BUDGET_S
    at_rest(PREFILL)
    at_rest(DECODE)


@pytest.mark.parametrize("parts", [1], indirect=True, ids=["dp1"])
def test_decode_that_dies_with_its_leg_and_comes_back_at_its_address_serves_and_nothing_is_left(
    parts: Parts,
) -> None:
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": BOOTSTRAP}
    slow = ASK | {"max_tokens": 3000, "ignore_eos": True, "stream": True, **room}
    wanted = said(post(FRONTEND, "/v1/completions", ASK))
    url = f"http://127.0.0.1:{DECODE}/v1/completions"
    assert post(PREFILL, "/v1/completions", slow | {"bootstrap_room": 4712}).status_code == 200
    with httpx.stream("POST", url, json=slow | {"bootstrap_room": 4712}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        assert post(PREFILL, "/v1/completions", ASK | room | {"bootstrap_room": 4713}).status_code == 200
        parts.end("decode", signal.SIGKILL)
        with contextlib.suppress(httpx.TransportError):
            for _ in lines:
                pass
    parts.start("decode")
    parts.ready("decode")
    # The room that no decode had bound is open: it is this one's, too.
    answer = post(DECODE, "/v1/completions", ASK | room | {"bootstrap_room": 4713})
    assert answer.status_code == 504 or said(answer) == wanted, answer.text
    at_rest(PREFILL)
    at_rest(DECODE)


# ---- KV events -------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(("router", "port"), [("sglang", SGLANG), ("vllm", VLLM)], ids=["sglang", "vllm"])
def test_a_thousand_requests_while_prefill_decode_and_the_registry_are_killed(
    alone: None, tmp_path: Path, router: str, port: int
) -> None:
    """Each request ends once: with the right answer, or with an error while a part is away. Then both
    instances are at rest."""
    parts, total = Parts(tiny_model.save(tmp_path), 1, registry_apart=True), 1000
    bodies = [ASK | {"prompt": f"prompt {number} " * 6} for number in range(8)]
    ends: Counter[str] = Counter()
    #: when each failed request began and ended, and each part was killed and ready again
    failed: list[tuple[float, float, str]] = []
    away: dict[str, tuple[float, float]] = {}
    left = iter(range(total))
    lock = threading.Lock()
    reached = {part: threading.Event() for part in ("prefill", "decode", "registry")}

    def client() -> None:
        with httpx.Client(timeout=60) as http:
            while True:
                with lock:
                    number = next(left, None)
                    for event, at in zip(reached.values(), (200, 400, 600), strict=True):
                        if number is None or number >= at:
                            event.set()
                if number is None:
                    return
                began = time.monotonic()
                answer = http.post(f"http://127.0.0.1:{port}/v1/completions", json=bodies[number % 8])
                right = answer.status_code == 200 and said(answer) == wanted[number % 8]
                end = "right" if right else f"{answer.status_code} {answer.text[:160]}"
                with lock:
                    ends[end] += 1
                    if not right:
                        failed.append((began, time.monotonic(), end))
                if answer.status_code != 200:
                    time.sleep(1)  # what a client does that is told to try again

    try:
        for name in ("registry", "prefill", "decode", router):
            parts.start(name)
            parts.ready(name)
        wanted = [said(post(port, "/v1/completions", body)) for body in bodies]
        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        for name, event in reached.items():
            assert event.wait(120)
            killed = time.monotonic()
            parts.end(name, signal.SIGKILL)
            parts.start(name)
            parts.ready(name)
            away[name] = (killed, time.monotonic())
        for thread in clients:
            thread.join(120)
            assert not thread.is_alive()
        at_rest(PREFILL)
        at_rest(DECODE)
    finally:
        for name in list(parts.running)[::-1]:
            parts.end(name)
    seconds = {name: round(ready - killed, 1) for name, (killed, ready) in away.items()}
    sys.stdout.write(f"{router}: {json.dumps({'ends': ends, 'seconds away': seconds}, indent=1)}\n")
    assert sum(ends.values()) == total
    assert not [end for end in ends if end.startswith("200")], "a wrong answer"
    # A leg may wait for the other one's instance as long as a request may take.
    unexplained = [
        end
        for began, ended, end in failed
        if not any(killed <= ended and began <= ready + BUDGET_S for killed, ready in away.values())
    ]
    assert unexplained == []


def _events_of(door: int) -> list[str]:
    """The flags that name the KV events of the worker at this port to vllm-router."""
    url = f"http://127.0.0.1:{door}=tcp://127.0.0.1:"
    return ["--kv-event-source", f"{url}{door + 1}", "--kv-event-replay-source", f"{url}{door + 2}"]


def test_vllm_router_sends_a_prompt_where_our_kv_events_say_its_prefix_is(
    alone: None, tmp_path: Path
) -> None:
    """The router asks nobody: its index is made of the events, and what its worker had cached shows it."""
    folder, said_by = tiny_model.save(tmp_path / "tiny"), tmp_path / "kv-aware.log"
    made = Parts(tmp_path, 1)
    #: the batches of each worker after the first one, which says that it has nothing
    told = dict.fromkeys(WORKERS, 0)
    begun: dict[int, int] = {}

    def cached(port: int, name: str) -> int:
        answer = post(port, "/v1/completions", ASK | {"prompt": f"{name} prompt " * 20})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def ask_at(worker: int, name: str) -> None:
        assert cached(worker, name) == 0
        told[worker] += 1

    def log() -> str:
        return re.sub(r"\x1b\[\d+m", "", said_by.read_text())

    def heard() -> None:
        lines = [
            f"source=http://127.0.0.1:{worker} rank=0 seq={begun[worker] + told[worker]}\n" for worker in told
        ]
        until = time.monotonic() + 60
        while not all(line in log() for line in lines):
            assert time.monotonic() < until, log()[-3000:]
            time.sleep(0.02)

    with deployment() as here:
        for port in WORKERS:
            events = KVEventsConfig(kv_events_port=port + 1, kv_events_replay_port=port + 2)
            url = f"http://127.0.0.1:{here.registry.port}"
            named: dict[str, Any] = {"model": str(folder), "http_port": port, "events": events}
            here.running.append(Running(Role.UNIFIED, url, **named))
            publisher = here.running[-1].instance._publisher
            assert publisher is not None
            begun[port] = publisher.first_number
        made.start("kv-aware")
        try:
            made.ready("kv-aware")
            for number in range(4):
                ask_at(WORKERS[number % 2], f"{number}th")
            heard()
            for number in range(4):
                assert cached(KV_AWARE, f"{number}th") > 100, number
            assert post(WORKERS[0], "/flush_cache", {}).status_code == 200
            told[WORKERS[0]] += 1
            heard()
            assert cached(KV_AWARE, "0th") == 0
            assert re.findall(r"credited_prefix_tokens=(\d+)", log())[-1] == "0", "it is known to be gone"
        finally:
            made.end("kv-aware")


def test_dynamos_indexer_knows_what_our_instances_have_cached_also_when_it_comes_late_and_after_a_restart(
    alone: None, tmp_path: Path
) -> None:
    folder, made = tiny_model.save(tmp_path / "tiny"), Parts(tmp_path, 1)
    prompts = [[(7 * number + i) % 250 for i in range(100)] for number in range(3)]

    def worker(port: int, registry: str) -> Running:
        events = KVEventsConfig(kv_events_port=port + 1, kv_events_replay_port=port + 2)
        named: dict[str, Any] = {"model": str(folder), "http_port": port, "events": events}
        return Running(Role.UNIFIED, registry, **named)

    def ask_at(port: int, prompt: list[int]) -> int:
        answer = post(port, "/v1/completions", ASK | {"prompt": prompt})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def known(wanted: dict[tuple[int, int], int]) -> None:
        """Wait until the indexer says how many tokens of a prompt each worker has; unnamed means none."""
        until = time.monotonic() + 60
        while True:
            found = {
                (number, int(at)): ranks["0"]
                for number, prompt in enumerate(prompts)
                for at, ranks in post(INDEXER, "/query", {"model_name": "tiny", "token_ids": prompt})
                .json()["scores"]
                .items()
            }
            if found == wanted:
                return
            assert time.monotonic() < until, (found, wanted, (tmp_path / "dynamo.log").read_text()[-3000:])
            time.sleep(0.02)

    with deployment() as here:
        registry = f"http://127.0.0.1:{here.registry.port}"
        here.running += [worker(port, registry) for port in WORKERS]
        pages = here.running[0].engine.spec.page_tokens
        whole = 100 // pages * pages
        assert ask_at(WORKERS[0], prompts[0]) == 0  # before the indexer is there
        made.start("dynamo")
        try:
            made.ready("dynamo")
            for port in WORKERS:
                told = {"instance_id": port, "model_name": "tiny", "block_size": pages}
                told |= {"endpoint": f"tcp://127.0.0.1:{port + 1}"}
                told |= {"replay_endpoint": f"tcp://127.0.0.1:{port + 2}"}
                assert post(INDEXER, "/register", told).status_code == 201
            known({(0, WORKERS[0]): whole})  # without another event
            for port in WORKERS:
                assert ask_at(port, prompts[1]) == 0
            known({(0, WORKERS[0]): whole, (1, WORKERS[0]): whole, (1, WORKERS[1]): whole})
            assert ask_at(WORKERS[0], prompts[0]) == whole, "what it knows is so"
            assert post(WORKERS[0], "/flush_cache", {}).status_code == 200
            known({(1, WORKERS[1]): whole})
            assert ask_at(WORKERS[0], prompts[0]) == 0, "what it knows is so"
            known({(0, WORKERS[0]): whole, (1, WORKERS[1]): whole})
            here.running.pop(1).close()
            here.running.append(worker(WORKERS[1], registry))
            assert ask_at(WORKERS[1], prompts[2]) == 0
            known({(0, WORKERS[0]): whole, (2, WORKERS[1]): whole})
        finally:
            made.end("dynamo")
