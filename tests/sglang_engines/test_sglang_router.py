"""sglang-router over HTTP before two of SGLang's servers with the segue backend, as in production."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from sglang_sides import ROOT, Side, Sides, prompts, until

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(600)]
ROUTER = Path(os.environ.get("ROUTERS_VENV") or ROOT / ".venv/routers") / "bin/python"
BOOTSTRAP, PORT = 31398, 31390
OPTIONS = {"dtype": "float32", "http": True}
#: tables that remember ends until their deadline, peers, and the uses of rooms
REMEMBERED = {"ended", "deadlines", "peers", "room_uses"}


class Servers:
    """One server without disaggregation, then prefill and decode behind the router."""

    def __init__(self, folder: Path) -> None:
        self.sides = Sides(folder)
        self.of = {role: self.start(role) for role in ("null", "prefill", "decode")}
        for side in self.of.values():
            side.answer()
        addresses = {role: f"http://127.0.0.1:{side.port}" for role, side in self.of.items()}
        #: one thread for each prompt in flight
        self.threads = ThreadPoolExecutor(8)
        words = f"""-m sglang_router.launch_router --pd-disaggregation --host 127.0.0.1 --port {PORT}
            --prefill {addresses["prefill"]} {BOOTSTRAP} --decode {addresses["decode"]}
            --policy round_robin --prometheus-port {PORT + 1} --disable-retries --disable-circuit-breaker
            --disable-health-check"""
        with (folder / "router.log").open("w") as log:
            self.router = subprocess.Popen([ROUTER, *words.split()], stdout=log, stderr=log)
        until(self._routed)
        self.alone = addresses["null"]

    def start(self, role: str) -> Side:
        return self.sides.start(role, BOOTSTRAP, **OPTIONS)

    def _routed(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{PORT}/readiness", timeout=10.0).status_code == 200
        return False

    def ask(self, text: str, url: str = f"http://127.0.0.1:{PORT}", **body: Any) -> httpx.Response:
        sampling = {"temperature": 0, "max_new_tokens": 8}
        return httpx.post(
            f"{url}/generate", json={"text": text, "sampling_params": sampling, **body}, timeout=120.0
        )

    def serves(self) -> None:
        """The router's answer is that of one server."""
        prompt = prompts()[1]
        assert self.ask(prompt).json()["text"] == self.ask(prompt, self.alone).json()["text"]

    def half_way(self) -> Future[httpx.Response]:
        """A request in mid-transfer: prefill has sent its first chunk, and holds the second one."""
        (self.sides.folder / "hold").touch()
        answer = self.threads.submit(self.ask, f"{time.monotonic()} " + "the river flows through it " * 16)
        until(lambda: sum(tables["transfers"] for tables in self.sides.sizes().values()) >= 2)
        return answer

    def go_on(self) -> None:
        (self.sides.folder / "hold").unlink()

    def restart(self, role: str) -> None:
        """Another process at the same addresses."""
        dead = self.of[role]
        self.of[role] = self.sides.start(role, BOOTSTRAP, port=dead.port, **OPTIONS)
        self.of[role].answer()

    def at_rest(self) -> None:
        """Nothing of any request is left."""

        def full() -> list[str]:
            return [
                name
                for tables in self.sides.sizes().values()
                for name, size in tables.items()
                if size and name not in REMEMBERED
            ]

        until(lambda: not full())

    def close(self) -> None:
        self.router.kill()
        self.router.wait()
        self.sides.close()
        self.threads.shutdown()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    if not ROUTER.exists():
        pytest.skip("the routers are not installed: make routers")
    made = Servers(tmp_path_factory.mktemp("router"))
    yield made
    made.close()


def test_50_prompts_over_the_router_are_answered_as_by_one_server(servers: Servers) -> None:
    asked = prompts()
    found = list(servers.threads.map(servers.ask, asked))
    assert [answer.status_code for answer in found] == [200] * 50
    wanted = list(servers.threads.map(lambda text: servers.ask(text, servers.alone), asked))
    assert [answer.json()["text"] for answer in found] == [answer.json()["text"] for answer in wanted]
    servers.at_rest()


def test_three_samples_of_one_request(servers: Servers) -> None:
    """`n` of a request: SGLang gives its samples one room."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "n": 3}
    answer = servers.ask(prompts()[0], sampling_params=sampling)
    assert answer.status_code == 200, answer.text
    wanted = servers.ask(prompts()[0], servers.alone).json()["text"]
    assert [sample["text"] for sample in answer.json()] == [wanted] * 3
    servers.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_hears_of_a_killed_side_and_its_successor_serves(servers: Servers, role: str) -> None:
    """`kill -9` in mid-transfer."""
    answer = servers.half_way()
    servers.of[role].end()
    servers.go_on()
    assert answer.result().status_code >= 500
    servers.restart(role)
    # The first request may meet the dead one: decode then asks the bootstrap server again.
    with contextlib.suppress(AssertionError, KeyError):
        servers.serves()
    servers.serves()
    servers.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_stands_still_in_mid_transfer(servers: Servers, role: str) -> None:
    """SIGSTOP: the other side fails with the reason; after SIGCONT both serve again."""
    other = servers.of["decode" if role == "prefill" else "prefill"].log
    answer, before = servers.half_way(), other.read_text().count("PEER_LOST")
    servers.of[role].signal(signal.SIGSTOP)
    servers.go_on()
    try:
        until(lambda: other.read_text().count("PEER_LOST") > before)
    finally:
        servers.of[role].signal(signal.SIGCONT)
    assert answer.result().status_code >= 400
    servers.serves()
    servers.at_rest()


def test_a_client_that_leaves_in_mid_transfer_leaves_nothing(servers: Servers) -> None:
    (servers.sides.folder / "hold").touch()
    body = json.dumps({"text": f"{time.monotonic()} " + "it flows through the capital " * 16}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    with socket.create_connection(("127.0.0.1", PORT)) as client:
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        until(lambda: sum(tables["transfers"] for tables in servers.sides.sizes().values()) >= 2)
    servers.go_on()
    servers.serves()
    servers.at_rest()


def test_both_legs_twice_with_one_room_are_two_hand_offs(servers: Servers) -> None:
    """As by a router that repeats a room. Each server is asked directly."""
    prefill, decode = (f"http://127.0.0.1:{servers.of[role].port}" for role in ("prefill", "decode"))
    [room] = servers.sides.rooms(1)
    leg = {"bootstrap_host": "127.0.0.1", "bootstrap_port": BOOTSTRAP, "bootstrap_room": room}
    for text in prompts()[2:4]:
        answers = [servers.threads.submit(servers.ask, text, url, **leg) for url in (prefill, decode)]
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert answers[1].result().json()["text"] == servers.ask(text, servers.alone).json()["text"]
    servers.at_rest()
