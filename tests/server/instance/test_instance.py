"""Instances in one process, with real sessions, registry and shared memory, and provable KV."""

from __future__ import annotations

import os
import random
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from deployment import LIMITS, VOCAB, Deployment, deployment

from segue.engine.engine_api import Engine
from segue.engine.request import FinishReason
from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ErrorCode,
    Internal,
    OutOfCapacity,
    SegueError,
)
from segue.kv.ids import Role
from segue.kv.transport.memory.pool_memory import Memory, allocate
from segue.server.fleet.operator import operator
from segue.server.instance import instance as instance_module
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec, reference


def assert_served(made: Deployment, count: int, *, batch: int = 64, longest: int = 60) -> None:
    rng = random.Random(count)
    prefills, decodes = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
    for start in range(0, count, batch):
        wanted = {}
        for i in range(start, min(count, start + batch)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
            sampling = made.front.submit(f"r{i}", prompt, rng.choice(prefills), rng.choice(decodes))
            wanted[f"r{i}"] = reference(prompt, sampling, VOCAB, 4)
        for name, tokens in wanted.items():
            assert made.front.tokens(name) == tokens
            del made.front.outputs[name], made.front.done[name]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_and_two_answer_with_the_right_tokens(transport: str) -> None:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    with deployment(*roles, transport=transport) as made:
        assert_served(made, 128)
        made.assert_comes_to_rest()


def test_decode_hands_over_with_a_prefill_that_only_the_frontend_knows() -> None:
    """As over `dns://` for some seconds: its own registry has not named that one yet."""
    with deployment(Role.PREFILL) as made, deployment(Role.DECODE) as other:
        [p], [d] = made.by_role(Role.PREFILL), other.by_role(Role.DECODE)
        made.front.join(d)
        for name in ("first", "second"):
            sampling = made.front.submit(name, [1, 2, 3], p, d, prefill_at=p.plane.address)
            assert made.front.tokens(name) == reference([1, 2, 3], sampling, VOCAB, 4)
        assert d.manager is not None
        assert set(d.plane.sessions) >= {p.me}


def test_an_address_at_which_another_leader_answers_makes_no_session() -> None:
    """The frontend's word says who is there; that one has to prove it."""
    with deployment(Role.PREFILL, Role.PREFILL) as made, deployment(Role.DECODE) as other:
        (p, wrong), [d] = made.by_role(Role.PREFILL), other.by_role(Role.DECODE)
        made.front.join(d)
        made.front.submit("r", [1, 2, 3], p, d, prefill_at=wrong.plane.address, only=d, budget_s=1.0)
        [output] = made.front.wait("r")
        assert output.error is not None
        assert output.error.code is ErrorCode.DEADLINE_EXCEEDED
        assert not {p.me, wrong.me} & set(d.plane.sessions)


def test_unified_answers_alike() -> None:
    with deployment(Role.UNIFIED) as made:
        [one] = made.by_role(Role.UNIFIED)
        sampling = made.front.submit("r", [1, 2, 3], one, one)
        assert made.front.tokens("r") == reference([1, 2, 3], sampling, VOCAB, 4)
        assert made.front.outputs["r"][-1].finish is FinishReason.LENGTH
        made.assert_comes_to_rest()


def test_the_first_output_says_where_the_time_went() -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        made.front.submit("r", [1, 2, 3], p, d)
        first = made.front.wait("r")[0]
        assert {"queue", "bootstrap", "reserve", "prefill", "wire", "commit"} <= set(first.timeline)
        assert all(seconds >= 0 for seconds in first.timeline.values())
        assert first.timeline["at_ready"] >= first.timeline["at_forward_end"]


def test_cancel_on_both_sides_leaves_nothing() -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        for i in range(20):
            made.front.submit(f"r{i}", list(range(200)), p, d, max_tokens=500)
            made.front.cancel(f"r{i}", p, d)
        made.assert_comes_to_rest()


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_lesson_11_a_request_that_reached_one_side_only_ends_by_its_deadline(side: Role) -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        [reached] = made.by_role(side)
        made.front.submit("half", [1, 2, 3], p, d, budget_s=0.3, only=reached)
        [output] = made.front.wait("half")
        assert output.error is not None
        assert output.error.code in (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.BOOTSTRAP_TIMEOUT)
        made.assert_comes_to_rest()


def test_a_frontend_that_leaves_takes_its_requests_along() -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        for i in range(5):
            made.front.submit(f"r{i}", list(range(100)), p, d, max_tokens=700)
        made.front.close()
        made.assert_comes_to_rest()
        made.front = type(made.front)()


def test_the_http_door_shows_what_happens() -> None:
    with deployment(Role.PREFILL, Role.DECODE, http_port=0) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        made.front.submit("r", list(range(50)), p, d, max_tokens=3)
        made.front.tokens("r")
        made.assert_comes_to_rest()
        for instance in (p, d):
            assert instance.http is not None
            host, port = instance.http.address
            url = f"http://{host}:{port}"
            assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}
            about = httpx.get(f"{url}/server_info", timeout=60).json()
            assert about["disaggregation_mode"] == instance.config.role.value
            assert not any("path" in key for key in about)
            numbers = httpx.get(f"{url}/metrics", timeout=60).text
            assert 'segue_instance_table{table="peers"} 1.0' in numbers
            assert 'segue_instance_pages{state="free"}' in numbers
            lines = dict(line.rsplit(" ", 1) for line in numbers.splitlines() if line[0] != "#")
            labels = 'engine="0",model_name="test"'
            # Prefill computes the first token, and decode hands out all three.
            tokens = 1 if instance is p else 3
            assert float(lines[f"vllm:generation_tokens_total{{{labels}}}"]) == tokens
            assert float(lines[f"vllm:inter_token_latency_seconds_count{{{labels}}}"]) == tokens - 1
            for name in ("time_to_first_token", "e2e_request_latency"):
                assert float(lines[f"vllm:{name}_seconds_count{{{labels}}}"]) == 1
            assert float(lines['segue_instance_handoffs_total{outcome="ok"}']) == 1
            assert float(lines["segue_instance_handoff_bytes_total"]) > 0


@pytest.mark.parametrize("trouble", [BootstrapUnreachable, BootstrapTimeout, OutOfCapacity])
def test_a_registry_that_restarts_at_the_first_word_is_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: type[SegueError]
) -> None:
    register, tries = RegistryClient.register, []

    async def restarting(self: RegistryClient, record: InstanceRecord) -> None:
        tries.append(record)
        if len(tries) == 1:
            raise trouble("it restarts")
        await register(self, record)

    monkeypatch.setattr(RegistryClient, "register", restarting)
    with deployment(Role.UNIFIED) as found:
        [one] = found.by_role(Role.UNIFIED)
        found.front.submit("r", [1, 2, 3], one, one)
        assert len(found.front.tokens("r")) == 4
    assert len(tries) >= 2
    said = [record.message for record in caplog.records if "it restarts" in record.message]
    assert len(said) == 1


def test_who_finds_an_instance_in_the_registry_finds_its_door_open(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    start, register = instance_module.start_http, RegistryClient.register

    def opened(*args: Any, **options: Any) -> Any:
        steps.append("door")
        return start(*args, **options)

    async def registered(self: RegistryClient, record: InstanceRecord) -> None:
        steps.append("registered")
        await register(self, record)

    monkeypatch.setattr(instance_module, "start_http", opened)
    monkeypatch.setattr(RegistryClient, "register", registered)
    with deployment(Role.UNIFIED, http_port=0):
        assert steps == ["door", "registered"]


def test_an_instance_is_ready_once_it_has_registered_and_until_it_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early: list[httpx.Response] = []
    urls: list[str] = []
    start, register = instance_module.start_http, RegistryClient.register

    def opened(*args: Any, **options: Any) -> Any:
        server = start(*args, **options)
        urls.append("http://{}:{}/ready".format(*server.address))
        return server

    async def registered(self: RegistryClient, record: InstanceRecord) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            early.append(await http.get(urls[-1]))
        await register(self, record)

    monkeypatch.setattr(instance_module, "start_http", opened)
    monkeypatch.setattr(RegistryClient, "register", registered)
    with deployment(Role.UNIFIED, http_port=0) as made:
        [running], [url] = made.running, urls

        def ready() -> tuple[int, str]:
            answer = httpx.get(url, timeout=60)
            assert answer.json()["ready"] is (answer.status_code == 200)
            return answer.status_code, answer.json()["reason"]

        assert early[0].status_code == 503
        assert early[0].headers["retry-after"] == "1"
        assert "has not registered" in early[0].json()["reason"]
        running.ask()  # the leader runs
        assert ready() == (200, "ready")
        for draining, answer in ((True, (503, "the instance is draining")), (False, (200, "ready"))):
            made.io.call(steer(f"http://127.0.0.1:{made.registry.port}", draining), 60)
            assert ready() == answer
        running.instance.failure = Internal("a rank is lost")
        status, reason = ready()
        assert status == 503
        assert "a rank is lost" in reason


async def steer(url: str, draining: bool) -> None:
    async with operator(url, secret=None, limits=LIMITS.limits(), tls=None) as one:
        [record] = await one.instances()
        await one.steer(record, draining=draining, timeout_s=60)


@pytest.mark.parametrize(("pages", "context", "said"), [(32, 4096, 128), (256, 512, 512)])
def test_the_registry_hears_what_every_request_gets(pages: int, context: int, said: int) -> None:
    """Not the model's context where the pool is smaller."""

    def engine() -> tuple[Engine, Memory]:
        spec = lineage_spec(pages)
        memory = allocate(spec.nbytes)
        return LineageEngine(
            spec, memoryview(memory.buffer), vocab_size=VOCAB, context_tokens=context
        ), memory

    with deployment(Role.UNIFIED, make_engine=engine) as made:
        [unified] = made.by_role(Role.UNIFIED)
        assert unified._record().context_tokens == said
        made.front.submit("r", list(range(said - 10)), unified, unified, max_tokens=10)
        assert len(made.front.tokens("r")) == 10


def test_lesson_18_a_forged_ticket_is_refused() -> None:
    with deployment(Role.UNIFIED, secret=b"k" * 32) as made:
        [one] = made.by_role(Role.UNIFIED)
        made.front.submit("r", [1, 2, 3], one, one)
        [output] = made.front.wait("r")
        assert output.error is not None
        assert output.error.code is ErrorCode.UNAUTHORIZED


def descriptors(made: Deployment) -> int:
    """How many this process has, without the connections to the registry: a renewal that meets a waiting
    query takes one more, and its client keeps it."""
    here = psutil.Process().net_connections("tcp")
    ports = [{at.port for at in (link.laddr, link.raddr) if at} for link in here]
    return len(os.listdir("/proc/self/fd")) - sum(made.registry.port in pair for pair in ports)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("transport", "count"), [("shm", 2000), ("tcp", 2000)])
def test_many_hand_offs_leave_nothing(transport: str, count: int) -> None:
    with deployment(Role.PREFILL, Role.DECODE, transport=transport) as made:
        me = psutil.Process()
        assert_served(made, 256)
        rss, fds = me.memory_info().rss, descriptors(made)
        assert_served(made, count)
        made.assert_comes_to_rest()
        assert descriptors(made) == fds
        assert me.memory_info().rss - rss < 16 * 2**20
