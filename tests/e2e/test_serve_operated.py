"""A `segue serve` that measures which prompts decode computes, publishes KV events, and is switched."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest
from cluster import free_ports
from served import Served

from segue.engine.kv_events import page_hashes
from segue.server.schedulers.local_prompts import HANDOFFS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

zmq = pytest.importorskip("zmq", reason="no pyzmq: pip install 'segue[dev]'")
SERVE = ("--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1", "--served-model-name", "tiny")
#: Tokens of the longest prompt that is measured at start: of 4, 16, … the last within a chunk of 512.
LONGEST = 256
_RNG = random.Random(4)


@pytest.fixture(scope="module")
def replay_ports() -> list[int]:
    """The replay ports of prefill-0 and decode-0."""
    while True:
        events, first = free_ports(2)
        if abs(events - first) > 1:
            return [events, first]


@pytest.fixture(scope="module")
def served(tiny: Path, replay_ports: list[int]) -> Iterator[Served]:
    events, replay = map(str, replay_ports)
    flags = (
        "--max-local-prefill-length",
        "-1",
        "--kv-events-port",
        events,
        "--kv-events-replay-port",
        replay,
    )
    with Served("--model", str(tiny), *SERVE, "--port", "0", *flags) as made:
        yield made


def ask(served: Served, name: str, tokens: int) -> list[int]:
    """A prompt of so many tokens that nobody has had before."""
    prompt = [_RNG.randrange(256) for _ in range(tokens)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=60)
    assert answer.status_code == 200, answer.text
    return prompt


def placed(served: Served) -> dict[str, int]:
    """How often each reason has decided where a request went."""
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    found = re.findall(r'^segue_placements_total\{reason="(\w+)"\} (\d+)', text, re.M)
    return {reason: int(count) for reason, count in found if count != "0"}


def test_the_measured_limit_decides_which_prompts_are_handed_over_and_it_is_said(served: Served) -> None:
    begun = placed(served)  # by the frontend, which has tried whether anybody serves
    for number in range(HANDOFFS):
        ask(served, f"measured-{number}", 300)
    handed = begun.get("long", 0) + HANDOFFS
    assert placed(served) == {**begun, "long": handed}, "until it is measured, everything is handed over"
    told = served.operate("explain", "measured-0")
    assert "transfer" in told
    assert "short" not in told
    tries = 0
    while "short" not in placed(served):  # the frontend hears of the limit with the next load
        tries += 1
        assert tries < 200
        ask(served, f"short-{tries}", 1)
    told = served.operate("explain", f"short-{tries}")
    [limit] = map(int, re.findall(r"short: 1 tokens uncached, at most (\d+)", told))
    assert "transfer" not in told
    assert 1 <= limit <= LONGEST
    before = placed(served)
    ask(served, "just-short", limit)
    ask(served, "just-long", limit + 1)
    assert placed(served) == {**before, "short": before["short"] + 1, "long": before["long"] + 1}
    assert f"short: {limit} tokens uncached, at most {limit}" in served.operate("explain", "just-short")
    assert "transfer" in served.operate("explain", "just-long")


def test_each_instance_publishes_its_kv_events(served: Served, replay_ports: list[int]) -> None:
    hashes = list(page_hashes(ask(served, "published", 300), 16))
    context = zmq.Context()
    try:
        for index in range(2):
            with context.socket(zmq.DEALER) as replay:
                replay.setsockopt(zmq.RCVTIMEO, 20_000)
                replay.connect(f"tcp://127.0.0.1:{replay_ports[1] + index}")
                stored = set[int]()
                while not stored.issuperset(hashes):  # decode's come a moment later
                    replay.send_multipart((b"", bytes(8)))
                    while payload := replay.recv_multipart()[2]:
                        for event in msgspec.msgpack.decode(payload)[1]:
                            stored |= set(event.get("block_hashes", ()))
    finally:
        context.destroy(linger=0)
    at = {line.split("|")[0].strip(): line for line in served.logged(re.compile("event=kv_events at="), 2)}
    for index, name in enumerate(("prefill-0", "decode-0")):
        assert f"at=127.0.0.1:{replay_ports[0] + index} " in at[name]


def test_the_log_names_a_switched_instance_by_its_role(served: Served) -> None:
    for old, new in (("prefill", "unified"), ("unified", "prefill")):
        [name] = re.findall(rf"^(\w+) .* {old} ", served.operate("ps"), re.M)
        assert f"serving, before it {old}" in served.operate("switch", name, new)
        shown = "prefill-0" if new == "prefill" else "prefill-0-as-unified"
        count = 2 if new == "prefill" else 1  # once at the start
        assert len(served.logged(re.compile(rf"^{shown} +\| .*serving role={new}"), count)) == count
        ask(served, f"by-{new}", 300)
    assert placed(served)["unified"] >= 1
    served.logged(re.compile(r"^prefill-0-as-unified +\| .*event=kv_events at="), 1)
    assert served.stop() == 0
