"""An instance's own HTTP server: alive or not, its resources, and its metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx

from segue.kv.errors import DeadlineExceeded, PeerLost
from segue.kv.ids import RoomKey
from segue.kv.peers import PathSpeed
from segue.kv.protocol.events import KVPoll, Phase
from segue.server.instance.instance_http import InstanceStatus, start_http
from segue.server.instance.operators import HandoffTotals
from segue.server.messages.control import Load
from segue.server.observe.integrity_report import NodeState
from segue.server.schedulers.request_figures import RequestFigures

LOAD = Load(
    dp_rank=0,
    running=2,
    waiting=3,
    tokens=9,
    pages_free=5,
    pages_total=16,
    pages_quarantined=4,
    slots_total=0,
)
STATE = NodeState(role="decode", incarnation="a", at_rest=True, problems=[], tables={"x": 1}, sessions=[])


class Status:
    """The status that a test sets."""

    def __init__(self) -> None:
        self.load: Load | None = None
        self.alive = True
        self.stuck = False
        self.paths: dict[str, PathSpeed] = {}
        self.figures = RequestFigures()
        self.handoffs = HandoffTotals()

    async def _integrity(self) -> NodeState:
        if self.stuck:
            raise DeadlineExceeded("the leader did not answer")
        return STATE

    def ask(self, *paths: str) -> list[httpx.Response]:
        status = InstanceStatus(
            about={"served_model_name": "tiny", "dp_rank": 1},
            load=lambda: self.load,
            counts=lambda: {"transfers": 7},
            alive=lambda: self.alive,
            integrity=self._integrity,
            paths=lambda: self.paths,
            figures=self.figures,
            handoffs=lambda: self.handoffs,
            page_tokens=16,
            pages=16,
        )

        async def main() -> list[httpx.Response]:
            server = start_http(status, "127.0.0.1", 0, 5.0)
            try:
                url = "http://{}:{}".format(*server.address)
                async with httpx.AsyncClient(timeout=60) as client:
                    return [await client.get(url + path) for path in paths]
            finally:
                await server.stop()

        return asyncio.run(main())


def test_an_instance_that_is_not_alive_or_does_not_answer_says_so_by_its_status() -> None:
    status = Status()
    health, state, about = status.ask("/health", "/integrity", "/server_info")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (state.status_code, state.json()["tables"]) == (200, {"x": 1})
    assert about.json()["served_model_name"] == "tiny"
    assert about.json()["version"]
    status.alive, status.stuck = False, True
    health, state = status.ask("/health", "/integrity")
    assert (health.status_code, health.json()) == (503, {"status": "dead"})
    assert (state.status_code, state.json()["error"]["code"]) == (504, "DEADLINE_EXCEEDED")


def series(answer: httpx.Response, prefix: str = "segue_instance_") -> dict[str, float]:
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    found: dict[str, Any] = {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)
    }
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def test_its_numbers_are_those_of_the_leader_and_of_the_paths_that_it_measured() -> None:
    """The path to `q` has carried nothing."""

    def own() -> dict[str, float]:
        found = series(status.ask("/metrics")[0])
        return {name: value for name, value in found.items() if not name.startswith("handoff")}

    status = Status()
    assert own() == {'table{table="transfers"}': 7.0}
    status.load = LOAD
    status.paths = {"p": PathSpeed("shm", 20, 5.0), "q": PathSpeed("tcp")}
    assert own() == {
        'requests{state="running"}': 2.0,
        'requests{state="waiting"}': 3.0,
        'pages{state="used"}': 7.0,
        'pages{state="free"}': 5.0,
        'pages{state="quarantined"}': 4.0,
        'table{table="transfers"}': 7.0,
        'path_bytes_per_second{peer="p",transport="shm"}': 4.0,
    }


def test_autoscalers_and_routers_find_its_load_under_the_names_of_vllm() -> None:
    status = Status()
    model = 'model_name="tiny"'
    idle = series(status.ask("/metrics")[0], "vllm:")
    assert idle['num_requests_waiting{engine="1",model_name="tiny"}'] == 0
    assert idle['kv_cache_usage_perc{engine="1",model_name="tiny"}'] == 0
    status.load = LOAD
    status.figures.ttft.observe(0.15)
    status.figures.prompt_tokens = 40
    found = series(status.ask("/metrics")[0], "vllm:")
    assert found['num_requests_running{engine="1",model_name="tiny"}'] == 2
    assert found['num_requests_waiting{engine="1",model_name="tiny"}'] == 3
    assert found['kv_cache_usage_perc{engine="1",model_name="tiny"}'] == 1 - 5 / 16
    assert found[f'cache_config_info{{block_size="16",engine="1",{model},num_gpu_blocks="16"}}'] == 1
    assert found[f'time_to_first_token_seconds_bucket{{engine="1",le="0.1",{model}}}'] == 0
    assert found[f'time_to_first_token_seconds_bucket{{engine="1",le="0.2",{model}}}'] == 1
    assert found[f'time_to_first_token_seconds_sum{{engine="1",{model}}}'] == 0.15
    assert found[f'prompt_tokens_total{{engine="1",{model}}}'] == 40
    process = series(status.ask("/metrics")[0], "process_")
    assert process["resident_memory_bytes"] > 2**20
    assert process["open_fds"] > 0


def test_hand_offs_are_counted_by_their_end() -> None:
    status = Status()
    key = RoomKey(7)
    status.handoffs.add(Phase(key, KVPoll.SUCCESS, wire_s=0.25, nbytes=100))
    status.handoffs.add(Phase(key, KVPoll.SUCCESS, wire_s=0.25, nbytes=50))
    status.handoffs.add(Phase(key, KVPoll.FAILED, PeerLost("gone").info))
    status.figures.ended["ok"] = 2
    found = series(status.ask("/metrics")[0])
    assert found['handoffs_total{outcome="ok"}'] == 2
    assert found['handoffs_total{outcome="PEER_LOST"}'] == 1
    assert found["handoff_bytes_total"] == 150
    assert found["handoff_transfer_seconds_count"] == 2
    assert found['requests_ended_total{outcome="ok"}'] == 2
