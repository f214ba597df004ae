"""Instances killed and paused under load: no hang, no wrong token, typed errors, service goes on."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from served import Served

pytestmark = pytest.mark.timeout(300)

TOKENS = 600
ARGUMENTS = ("--dtype", "float32", "--port", "0", "--kv-gib", "0.05", "--threads-per-worker", "1")
ARGUMENTS += ("--served-model-name", "tiny", "--model")


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 256) for _ in range(rng.randint(5, 60))] for _ in range(count)]


def body(prompt: list[int]) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


def stream(url: str, prompt: list[int], begun: threading.Event | None = None) -> tuple[list[int], str]:
    """Tokens that came, and the error code that ended the stream ("" for none). It must end."""
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body(prompt), timeout=60) as answer:
        if answer.status_code != 200:
            answer.read()
            return tokens, str(answer.json()["error"]["code"])
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return tokens, str(event["error"]["code"])
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if begun is not None:
                begun.set()
    return tokens, ""


def wait_until_served(url: str, prompt: list[int], within_s: float) -> None:
    """Until a request succeeds again."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if stream(url, prompt)[1] == "":
            return
    raise AssertionError(f"nobody served within {within_s} s")


@pytest.mark.parametrize("victim", ["decode", pytest.param("prefill", marks=pytest.mark.soak)])
def test_lesson_09_a_killed_instance_costs_only_what_it_held(victim: str, tiny: Path) -> None:
    asked = prompts(5, 8)
    with Served(*ARGUMENTS, str(tiny), "--prefill", "2", "--decode", "2") as made:
        with ThreadPoolExecutor(8) as pool:
            expected = [tokens for tokens, _ in pool.map(lambda p: stream(made.url, p), asked)]
            assert all(len(tokens) == TOKENS for tokens in expected)
            begun = threading.Event()
            running = [pool.submit(stream, made.url, p, begun) for p in asked]
            assert begun.wait(60)
            made.instances(victim)[0].send_signal(signal.SIGKILL)
            results = [r.result(timeout=60) for r in running]
        completed = 0
        for (tokens, error), wanted in zip(results, expected, strict=True):
            assert tokens == wanted[: len(tokens)], "a wrong token"
            if error:
                assert error in ("PEER_LOST", "PEER_RESTARTED", "TRANSFER_FAILED"), error
            else:
                assert tokens == wanted
                completed += 1
        assert completed > 0, "one of two instances died, and nothing was completed"
        wait_until_served(made.url, asked[0], 60)
        with ThreadPoolExecutor(8) as pool:
            again = list(pool.map(lambda p: stream(made.url, p), asked))
        assert again == [(wanted, "") for wanted in expected]


def test_lesson_10_a_paused_prefill_is_noticed_and_may_come_back(tiny: Path) -> None:
    [prompt, other] = prompts(6, 2)
    with Served(*ARGUMENTS, str(tiny), "--keepalive-s", "0.5", "--peer-silence-s", "4") as made:
        expected = stream(made.url, prompt)[0]
        [prefill] = made.instances("prefill")
        prefill.send_signal(signal.SIGSTOP)
        try:
            tokens, error = stream(made.url, other)
            assert error, f"a paused prefill answered: {tokens}"
        finally:
            prefill.send_signal(signal.SIGCONT)
        wait_until_served(made.url, prompt, 60)
        assert stream(made.url, prompt) == (expected, "")
        assert prefill.status() != psutil.STATUS_ZOMBIE
        assert made.stop() == 0
