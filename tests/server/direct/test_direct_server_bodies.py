"""The parsing of a router's body by each server, without instances behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from msgspec.structs import replace
from test_direct_routes import ME

from segue.engine.request import Request, SamplingParams
from segue.kv.errors import (
    BootstrapUnreachable,
    ErrorCode,
    InvalidRequest,
    NotFound,
    OutOfCapacity,
    PeerLost,
    SegueError,
)
from segue.kv.ids import OPEN_RANK, Incarnation, LeaderId, Role, RoomKey
from segue.kv.limits import Limits
from segue.kv.protocol.room_ranks import DpRanks
from segue.server.direct import direct_routes as routes_module
from segue.server.direct import direct_server as direct
from segue.server.direct.direct_routes import LazyDirectServer
from segue.server.direct.direct_server import DecodeDirectServer, DirectServer, PrefillDirectServer
from segue.server.fleet.call import DirectHalf
from segue.server.fleet.replica import Replica
from segue.server.frontend.app import OpenAIServerSettings
from segue.server.frontend.body_reader import read_body
from segue.server.frontend.legs import Bootstrap, ComputedRoom, computed_room, transfer_params
from segue.server.frontend.params import rank_hints
from segue.server.frontend.request_fields import ChatBody, CompletionBody
from segue.server.frontend.request_memory import MemoryBudget, RequestMemory
from segue.server.frontend.sampling_defaults import SamplingDefaults
from segue.server.instance import instance_http as http
from segue.server.instance.instance_http import InstanceStatus, start_http
from segue.server.instance.kv_settings import dp_ranks
from segue.server.observe.metrics import Metrics
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.settings.commands import InstanceConfig
from segue.server.settings.shared_config import AccessConfig
from segue.server.supervisor.dp_rank_processes import RankProcesses

SECRET = b"a secret of enough bytes"
BUDGET_S = 100.0
ROOM = {"bootstrap_host": "h", "bootstrap_port": 8998, "bootstrap_room": 7}
WHERE = InstanceRecord(
    incarnation=ME.incarnation,
    role=Role.PREFILL,
    model="m",
    served_model="tiny",
    context_tokens=9,
    bootstrap_port=8998,
    replicas=[ReplicaRecord(dp_rank=rank, host="h", port=9) for rank in range(4)],
)
REMOTE = {"kv_transfer_params": {"do_remote_decode": True}}


class Call:
    """A client that waits for its answer."""

    id = "call"

    def __init__(self, **headers: str) -> None:
        self.headers = headers
        self.answered: Any = None
        self.held = RequestMemory(MemoryBudget(0))

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def header(self, name: bytes) -> str | None:
        return self.headers.get(name.decode().replace("-", "_"))

    async def answer(self, status: int, body: Any) -> None:
        self.answered = (status, body)


class Parts:
    """Stands for what a door plans and runs with."""

    def plan_of(self, door: Any, samples: int = 1) -> None:
        self.bodies: list[Any] = []
        self.runs: list[tuple[Any, Any, Any]] = []
        self.plans: list[Any] = []

        async def plan(call: Any, body: Any, raw: bytes, make: Any) -> Any:
            self.bodies.append(body)
            requests = [
                Request(request_id=f"r{k}", prompt=[1], sampling=SamplingParams(), ranks=rank_hints(body))
                for k in range(samples)
            ]
            plan = SimpleNamespace(samples=[SimpleNamespace(request=request) for request in requests])
            self.plans.append(plan)
            return plan

        async def run(call: Any, plan: Any, started: float, backend: Any, *answers: Any) -> None:
            self.runs.append((backend, *answers))

        door.plan, door.run, door.budget_s = plan, run, lambda started: BUDGET_S - started


def read(body: dict[str, Any], kind: Any = CompletionBody) -> tuple[Any, bytes]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if kind is ChatBody else {"prompt": "hi"}
    raw = json.dumps(prompt | body).encode()
    return read_body(raw, kind), raw


SETTINGS = OpenAIServerSettings(model="tiny", context_tokens=9, vocab_size=9, limits=Limits())


class Submits:
    """A fleet that notes what it is given."""

    def __init__(self) -> None:
        self.halves: list[DirectHalf] = []

    def submit(self, request: Any, *, budget_s: float, half: DirectHalf) -> None:
        self.halves.append(half)


def halves(backend: Any, samples: int) -> list[DirectHalf]:
    """The half of each sample, in any order."""
    backend._fleet = fleet = Submits()
    for k in reversed(range(samples)):
        backend.submit(SimpleNamespace(request_id=f"r{k}"), budget_s=1.0)
    return fleet.halves[::-1]


def prefill(size: int = 4) -> tuple[Any, Parts]:
    door: Any = object.__new__(PrefillDirectServer)
    door.settings, door._dp, door._where = SETTINGS, DpRanks(size=size), WHERE
    door.me, door.fleet, door.halves = ME, SimpleNamespace(), None
    parts = Parts()
    parts.plan_of(door, samples=2)
    return door, parts


@pytest.mark.parametrize(
    ("routed", "hint", "rank"), [(None, None, None), (0, None, 0), (None, 2, 2), (3, 2, 3)]
)
def test_prefill_s_leg_opens_a_room_for_each_sample_on_the_rank_that_was_asked_for(
    routed: int | None, hint: int | None, rank: int | None
) -> None:
    door, parts = prefill(size=1 if rank is None else 4)
    asked = {
        "routed_dp_rank": routed,
        "disagg_prefill_dp_rank": hint,
        "stream": True,
        "max_tokens": 5,
        **ROOM,
    }
    asyncio.run(door.generation(Call(), 30.0, *read(asked), None))
    [(backend, more, instead)], [body] = parts.runs, parts.bodies
    assert (body.stream, body.max_tokens, body.routed_dp_rank) == (False, 5, rank)
    assert (more, instead["object"], instead["choices"]) == (None, "prefill", [])
    assert halves(backend, 2) == [DirectHalf(7, 0), DirectHalf(7, 1)]


@pytest.mark.parametrize(("rule", "rank"), [("total_requests", 2), ("follow_bootstrap_room", 3)])
@pytest.mark.parametrize("samples", [1, 3])
def test_samples_of_one_room_are_on_one_rank_and_a_single_one_where_the_policy_says(
    rule: str, rank: int, samples: int
) -> None:
    door, parts = prefill()
    door._dp = DpRanks(size=4, load_balance=rule)
    replicas = [Replica(WHERE, where, session=object()) for where in WHERE.replicas]  # type: ignore[arg-type]
    for replica, busy in zip(replicas, (3, 2, 0, 1), strict=True):
        replica.running = dict.fromkeys(map(str, range(busy)))  # type: ignore[assignment]
    door.fleet = SimpleNamespace(membership=SimpleNamespace(replicas={r.leader: r for r in replicas}))
    parts.plan_of(door, samples=samples)
    asyncio.run(door.generation(Call(), 30.0, *read(ROOM), None))
    ranks = {sample.request.ranks.routed_dp_rank for sample in parts.plans[0].samples}
    assert ranks == ({None} if samples == 1 else {rank})


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize("rank", [None, 0, 2])
def test_prefill_computes_the_prompt_and_one_token_whatever_the_client_wants_and_names_the_room(
    kind: Any, rank: int | None
) -> None:
    door, parts = prefill()
    asked = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 1,
        "n": 1,
        "routed_dp_rank": rank,
        "disagg_prefill_dp_rank": 9,
        "temperature": 0.5,
        **REMOTE,
    }
    ranks = set()
    for _ in range(16 if rank is None else 1):
        asyncio.run(door.generation(Call(), 30.0, *read(asked, kind), None))
        [(backend, more, instead)], [body] = parts.runs, parts.bodies
        transfer = more["kv_transfer_params"]
        assert (transfer["do_remote_prefill"], transfer["do_remote_decode"], instead) == (True, False, None)
        room = computed_room(transfer)
        assert room.prefill == LeaderId(ME.incarnation, body.routed_dp_rank)
        assert halves(backend, 2) == [DirectHalf(room.room, 0), DirectHalf(room.room, 1)]
        assert (body.stream, body.stream_options, body.min_tokens) == (False, None, None)
        assert (body.max_tokens, body.max_completion_tokens) == (1, None)
        assert (body.disagg_prefill_dp_rank, body.temperature) == (body.routed_dp_rank, 0.5)
        assert rank in (None, body.routed_dp_rank)
        ranks.add(body.routed_dp_rank)
        parts.runs.clear()
        parts.bodies.clear()
    assert len(ranks) > 1 or rank is not None, "all ranks have a share"
    assert all(0 <= found < 4 for found in ranks)


def decode(*records: InstanceRecord) -> tuple[Any, Parts]:
    door: Any = object.__new__(DecodeDirectServer)
    door.settings, door._listed = SETTINGS, SimpleNamespace(prefill=list(records))
    door.fleet, door.halves = SimpleNamespace(changed=asyncio.Event().wait), None
    parts = Parts()
    parts.plan_of(door, samples=3)
    return door, parts


def prefill_at(letter: str, host: str = "h", port: int = 8998) -> InstanceRecord:
    where = [ReplicaRecord(dp_rank=rank, host=host, port=9) for rank in range(4)]
    return replace(WHERE, incarnation=Incarnation(letter * 32), bootstrap_port=port, replicas=where)


@pytest.mark.parametrize("style", ["room", "computed"])
def test_decode_gets_every_sample_from_the_instance_that_the_leg_names(style: str) -> None:
    newest = prefill_at("c")
    door, parts = decode(prefill_at("b"), newest, prefill_at("d", host="x"), prefill_at("e", port=1))
    named = ComputedRoom(5, LeaderId(newest.incarnation, 2))
    body = ROOM if style == "room" else {"kv_transfer_params": transfer_params(named)}
    asyncio.run(door.generation(Call(), 0.0, *read(body), None))
    [(backend,)] = parts.runs
    room, rank = (7, OPEN_RANK) if style == "room" else (5, 2)
    prefill = LeaderId(newest.incarnation, rank)
    assert halves(backend, 3) == [DirectHalf(room, k, prefill) for k in range(3)]


@pytest.mark.parametrize("style", ["room", "computed", "rank"])
def test_decode_waits_for_an_instance_to_be_listed_and_then_says_that_nobody_is_there(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "FIND_S", 0.01)
    door, parts = decode(prefill_at("e", port=1))
    named = ComputedRoom(5, LeaderId(Incarnation(("e" if style == "rank" else "f") * 32), 4))
    body = ROOM if style == "room" else {"kv_transfer_params": transfer_params(named)}
    with pytest.raises(BootstrapUnreachable):
        asyncio.run(door.generation(Call(), 0.0, *read(body), None))
    assert parts.runs == []


@pytest.mark.parametrize(
    ("begun", "error", "told"),
    [
        (0, OutOfCapacity("full"), [0, 1, 2]),
        (1, OutOfCapacity("full"), []),
        (1, PeerLost("the rank's process is gone"), [0, 1, 2]),
        (None, TimeoutError(), [0, 1, 2]),
    ],
    ids=["no leader has it", "a leader tells itself", "its leader is gone", "not submitted"],
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_other_half_of_a_leg_that_fails_hears_of_it_once_from_one_who_can_tell(
    role: Role, begun: int | None, error: Exception, told: list[int]
) -> None:
    said: list[tuple[Any, ...]] = []
    door, parts = prefill(size=1) if role is Role.PREFILL else decode(prefill_at("c"))
    parts.plan_of(door, samples=3)
    door.halves = SimpleNamespace(
        refuse=lambda key, error, budget_s, announce: said.append((key, error.code)),
        decline=lambda key, prefill, error: said.append((key, error.code)),
    )
    call = SimpleNamespace(attempts=SimpleNamespace(begun=begun))
    door.fleet.submit = lambda request, budget_s, half: call

    async def run(_call: Any, plan: Any, started: float, backend: Any, *_: Any) -> None:
        for sample in plan.samples if begun is not None else ():
            backend.submit(sample.request, budget_s=1.0)
        raise error

    door.run = run
    with pytest.raises(type(error)):
        asyncio.run(door.generation(Call(), 0.0, *read(ROOM | {"n": 3}), None))
    code = error.info.code if isinstance(error, SegueError) else ErrorCode.DEADLINE_EXCEEDED
    assert said == [(RoomKey(7, ordinal=k), code) for k in told]


def test_a_computed_room_that_fails_is_known_to_nobody_yet() -> None:
    door, _ = prefill()
    door.halves = object()

    async def run(*_: Any) -> None:
        raise OutOfCapacity("full")

    door.run = run
    with pytest.raises(OutOfCapacity):
        asyncio.run(door.generation(Call(), 0.0, *read(REMOTE), None))


@pytest.mark.parametrize(
    ("registered", "named", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("Node-1.example", "node-1.EXAMPLE", True),
        ("fd00::1", "[FD00::1]", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "[::1]", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "10.0.0.1", False),
    ],
)
def test_hosts_are_one_as_they_are_written_or_if_both_are_this_machine(
    registered: str, named: str, same: bool
) -> None:
    assert direct.is_at(prefill_at("a", host=registered), Bootstrap(named, 8998, 1)) is same


def test_a_router_s_unknown_model_is_any_and_another_is_refused() -> None:
    door: Any = object.__new__(DirectServer)
    door.settings = SETTINGS
    for name in (None, "unknown", "tiny"):
        door.check_model(name)
    for name in ("default", "", "Unknown"):
        with pytest.raises(NotFound):
            door.check_model(name)


# ---- what a door is made of --------------------------------------------------------------------------


class Opened(Exception):
    """Stops the opening once everything is known."""


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.UNIFIED])
def test_a_door_places_once_with_the_secret_and_tls_of_its_instance_and_samples_as_its_model_says(
    monkeypatch: pytest.MonkeyPatch, role: Role, secret: bytes
) -> None:
    made: dict[str, Any] = {}
    defaults, tls = SamplingDefaults(temperature=0.25), object()

    def fleet(registry: Any, settings: Any, **more: Any) -> Any:
        made.update(more, settings=settings)
        return SimpleNamespace(start=lambda: made.update(started=True))

    class Made:
        def __init__(self, *args: Any, **more: Any) -> None:
            made.update(server=args[2], kind=type(self).__name__, more=more)

    monkeypatch.setattr(routes_module.ModelTokenizer, "load", lambda folder: object())
    monkeypatch.setattr(routes_module, "model_bounds", lambda folder, tokenizer: (64, 330))
    monkeypatch.setattr(routes_module, "of_model", lambda folder, vocab: defaults if vocab == 330 else None)
    monkeypatch.setattr(routes_module, "Fleet", fleet)
    for name in ("PrefillDirectServer", "DecodeDirectServer", "DirectServer"):
        monkeypatch.setattr(routes_module, name, type(name, (Made,), {}))
    config = InstanceConfig(
        model="m",
        registry="http://127.0.0.1:1",
        role=role,
        secret=secret,
        load_balance="total_requests",
    )
    lazy = LazyDirectServer(config, ME, None, dp=DpRanks(), where=WHERE, halves=None, tls=tls)  # type: ignore[arg-type]
    asyncio.run(lazy.opened())
    settings = made["settings"]
    assert (settings.max_attempts, settings.policy) == (1, "total_requests"), "a router tries again by itself"
    assert (made["secret"], made["tls"], made["server"].defaults) == (secret or None, tls, defaults)
    assert made["limits"] == config.limit.limits() == made["server"].limits
    assert (made["server"].context_tokens, made["server"].vocab_size) == (64, 330)
    assert made["kind"] == {Role.PREFILL: "PrefillDirectServer", Role.DECODE: "DecodeDirectServer"}.get(
        role, "DirectServer"
    )
    assert made["started"]


def test_an_instance_s_door_needs_its_key_and_has_the_times_of_a_public_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt may take longer to come than a probe's request."""
    guards: list[Any] = []
    server = http.GuardedServer

    def made(app: Any, sock: Any, *, guard: Any, drain_s: float) -> Any:
        guards.append(guard)
        return server(app, sock, guard=guard, drain_s=drain_s)

    monkeypatch.setattr(http, "GuardedServer", made)

    async def answers() -> Any:
        raise InvalidRequest("not asked")

    status = InstanceStatus(
        about={"served_model_name": "tiny"},
        load=lambda: None,
        counts=dict,
        alive=lambda: True,
        integrity=answers,
    )

    async def main() -> dict[str, int]:
        lazy: Any = SimpleNamespace(metrics=Metrics(), server=None)
        keys = http.ApiKeys(("a-key",))
        made = start_http(status, "127.0.0.1", 0, 5.0, lazy=lazy, keys=keys)
        try:
            url = "http://{}:{}".format(*made.address)
            async with httpx.AsyncClient(timeout=60) as client:
                paths = ("/health", "/metrics", "/server_info", "/get_load", "/health_generate", "/integrity")
                found = {path: (await client.get(url + path)).status_code for path in paths}
                header = {"authorization": "Bearer a-key"}
                found["with a key"] = (await client.get(url + "/get_load", headers=header)).status_code
                return found
        finally:
            await made.stop()

    closed = dict.fromkeys(("/metrics", "/server_info", "/get_load", "/health_generate", "/integrity"), 401)
    assert asyncio.run(main()) == {"/health": 200, **closed, "with a key": 200}
    [guard] = guards
    assert guard.head_s == 5.0 < guard.request_s


# ---- what each rank is told --------------------------------------------------------------------------


def test_how_an_instance_s_ranks_are_chosen_is_what_it_was_set_to() -> None:
    config = InstanceConfig(
        model="m",
        registry="http://127.0.0.1:1",
        role=Role.PREFILL,
        dp=3,
        load_balance="total_tokens",
        force_query_prefill_dp_rank=True,
        dp_rank_conflict="fail",
    )
    found = dp_ranks(config)
    assert (found.size, found.load_balance) == (3, "total_tokens")
    assert (found.force_query, found.on_conflict) == (True, "fail")


@pytest.mark.parametrize("given", [True, False])
def test_clients_keys_reach_each_rank_as_a_file_that_only_they_inherit(tmp_path: Path, given: bool) -> None:
    (tmp_path / "keys").write_text("one-key\nother-key\n")
    file = str(tmp_path / "keys") if given else None
    access = AccessConfig(api_key_file=file, client_order="all", prefix_cache_sharing="all")
    config = InstanceConfig(model="m", registry="http://127.0.0.1:1", dp=2, access=access, http_port=0)
    told: list[Any] = []

    async def main() -> None:
        def command(role: Role, leader: Any) -> list[str]:
            assert leader.access.client_order == "all"
            name = leader.access.api_key_file
            told.append(None if name is None else Path(name).read_text())
            assert leader.access.prefix_cache_sharing == "all"
            return ["true"]

        processes = RankProcesses(config, command, lambda _: None)

        async def keep(specs: Any) -> Any:
            return [unit.make(unit) for unit in specs]

        processes.keep = keep  # type: ignore[method-assign]
        await processes.run()

    asyncio.run(main())
    assert told == ["one-key\nother-key" if given else None] * 2
