"""What each door makes of a router's body, without instances behind it."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from test_direct_routes import ME, Lazy, load

from segue.kv.errors import InvalidRequest, NotFound
from segue.kv.ids import Role
from segue.kv.limits import Limits
from segue.kv.protocol.room_ranks import DpRanks
from segue.server.direct import direct_routes as routes_module
from segue.server.direct import direct_server as direct
from segue.server.direct.decode_rendezvous import DecodeRendezvous
from segue.server.direct.direct_routes import LazyDirectServer, direct_routes
from segue.server.direct.direct_server import DecodeDirectServer, DirectServer, PrefillDirectServer
from segue.server.direct.prefill_rendezvous import MEET_S, PrefillRendezvous
from segue.server.frontend.app import OpenAIServerSettings
from segue.server.frontend.legs import TICKET, RetainedTicket, pack_ticket, unpack_ticket
from segue.server.frontend.native import as_completion, read_native
from segue.server.frontend.openai_types import BodyReader, ChatBody, CompletionBody
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_memory import MemoryBudget, RequestMemory
from segue.server.frontend.sampling_defaults import SamplingDefaults
from segue.server.instance import instance_http as http
from segue.server.instance.instance_http import InstanceStatus, start_http
from segue.server.instance.kv_settings import dp_ranks
from segue.server.observe.metrics import Metrics
from segue.server.settings.commands import InstanceConfig
from segue.server.settings.shared_config import AccessConfig
from segue.server.supervisor.dp_rank_processes import RankProcesses

SECRET = b"a secret of enough bytes"
BUDGET_S = 100.0
ROOM = {"bootstrap_host": "h", "bootstrap_port": 8998, "bootstrap_room": 7}
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
        self.runs: list[tuple[Any, Any]] = []

        async def plan(call: Any, body: Any, raw: bytes, make: Any) -> Any:
            self.bodies.append(body)
            return SimpleNamespace(samples=[object()] * samples)

        async def run(call: Any, plan: Any, started: float, backend: Any, more: Any = None) -> None:
            self.runs.append((backend, more))

        door.plan, door.run, door.budget_s = plan, run, lambda started: BUDGET_S - started


def read(body: dict[str, Any], kind: Any = CompletionBody) -> tuple[Any, bytes]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if kind is ChatBody else {"prompt": "hi"}
    raw = json.dumps(prompt | body).encode()
    return BodyReader().read(raw, kind), raw


SETTINGS = OpenAIServerSettings(model="tiny", context_tokens=9, vocab_size=9, limits=Limits())


def prefill(size: int = 4) -> tuple[Any, Parts, list[Any]]:
    door: Any = object.__new__(PrefillDirectServer)
    door.settings = SETTINGS
    waits: list[Any] = []

    async def wait(number: int, routed: int | None, budget_s: float) -> None:
        waits.append((number, routed, budget_s))

    @contextmanager
    def ticket(number: int, dp_rank: int, budget_s: float) -> Any:
        waits.append((number, dp_rank, budget_s))
        yield

    door._rooms = SimpleNamespace(wait=wait, ticket=ticket, dp=DpRanks(size=size))
    door._secret, door.me, door.backend = SECRET, ME, object()
    parts = Parts()
    parts.plan_of(door)
    return door, parts, waits


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_prefill_s_leg_waits_in_its_room_for_the_rank_that_was_asked_for(rank: int | None) -> None:
    door, parts, waits = prefill()
    call = Call()
    asyncio.run(door.generation(call, 30.0, *read({"routed_dp_rank": rank, **ROOM}), None))
    assert waits == [(7, rank, 70.0)], "for what is left of the request's time"
    assert call.answered[0] == 200
    assert parts.runs == []


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize("rank", [None, 0, 2])
@pytest.mark.parametrize("seed", [None, 0, 11])
def test_prefill_computes_the_prompt_and_one_token_whatever_the_client_wants_and_gives_a_ticket(
    kind: Any, rank: int | None, seed: int | None
) -> None:
    door, parts, waits = prefill()
    asked = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 1,
        "n": 1,
        "seed": seed,
        "routed_dp_rank": rank,
        "disagg_prefill_dp_rank": 9,
        "temperature": 0.5,
        **REMOTE,
    }
    ranks = set()
    for _ in range(16 if rank is None and seed is None else 1):
        asyncio.run(door.generation(Call(), 30.0, *read(asked, kind), None))
        [(backend, more)], [body] = parts.runs, parts.bodies
        assert backend is door.backend
        transfer = more["kv_transfer_params"]
        assert (transfer["do_remote_prefill"], transfer["do_remote_decode"]) == (True, False)
        ticket = unpack_ticket(transfer, SECRET)
        assert (ticket.issuer, ticket.seed, ticket.dp_rank) == (ME, body.seed, body.routed_dp_rank)
        assert waits == [(ticket.room, ticket.dp_rank, 70.0)]
        assert (body.stream, body.stream_options, body.min_tokens) == (False, None, None)
        assert (body.max_tokens, body.max_completion_tokens) == (1, None)
        assert (body.disagg_prefill_dp_rank, body.temperature) == (None, 0.5)
        assert seed in (None, body.seed)
        assert rank in (None, ticket.dp_rank)
        ranks.add(ticket.dp_rank)
        for seen in (parts.runs, parts.bodies, waits):
            seen.clear()
    assert len(ranks) > 1 or (rank, seed) != (None, None), "all ranks have a share"
    assert all(0 <= found < 4 for found in ranks)


class PrefillFound:
    """A meeting that notes what it was made with."""

    made: list[PrefillFound]

    def __init__(self, meetings: Any, fleet: Any, other: Any, hint: int | None, meet_s: float) -> None:
        self.with_ = (other, hint, meet_s)
        self.did: list[Any] = []
        PrefillFound.made.append(self)

    async def __aenter__(self) -> PrefillFound:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.did.append("left")

    async def ask(self) -> None:
        self.did.append("ask")

    async def wait(self, samples: int) -> None:
        self.did.append(samples)


@pytest.mark.parametrize("started", [0.0, BUDGET_S - 5])
@pytest.mark.parametrize("style", ["room", "ticket"])
@pytest.mark.parametrize("seed", [None, 0, 11])
def test_decode_meets_prefill_for_all_samples_and_draws_with_the_ticket_s_seed_if_it_has_none(
    monkeypatch: pytest.MonkeyPatch, seed: int | None, style: str, started: float
) -> None:
    PrefillFound.made = []
    monkeypatch.setattr(direct, "Meeting", PrefillFound)
    door: Any = object.__new__(DecodeDirectServer)
    door._meetings, door._secret, door.fleet = DecodeRendezvous(4), SECRET, None
    door.settings = SETTINGS
    parts = Parts()
    parts.plan_of(door, samples=3)
    ticket = RetainedTicket(room=5, issuer=ME, dp_rank=2, seed=77)
    legs: dict[str, Any] = {"kv_transfer_params": {TICKET: pack_ticket(ticket, SECRET)}}
    body = {"seed": seed, "routed_dp_rank": 1, "disagg_prefill_dp_rank": 3}
    asyncio.run(door.generation(Call(), started, *read(body | (ROOM if style == "room" else legs)), None))
    [met] = PrefillFound.made
    other, hint, meet_s = met.with_
    assert (other.room, hint, meet_s) == (7 if style == "room" else 5, 3, min(MEET_S, BUDGET_S - started))
    assert met.did == ["ask", 3, "left"]
    assert [backend for backend, _ in parts.runs] == [met], "on what was met and on nobody else"
    expected = 77 if style == "ticket" and seed is None else seed
    assert [one.seed for one in parts.bodies] == [expected]


def test_a_body_without_a_leg_is_refused_by_both_doors() -> None:
    decode: Any = object.__new__(DecodeDirectServer)
    decode.settings = SETTINGS
    for door in (decode, prefill()[0]):
        with pytest.raises(BadParam, match="segue's own frontend"):
            asyncio.run(door.generation(Call(), 0.0, *read({}), None))
    decode._secret = SECRET
    with pytest.raises(BadParam):  # what prefill is to compute was given to decode's
        asyncio.run(decode.generation(Call(), 0.0, *read(REMOTE), None))


def test_sglang_s_endpoint_hears_of_the_rank_in_the_header_as_the_others_do() -> None:
    door: Any = object.__new__(DirectServer)
    seen: list[Any] = []
    raw = json.dumps({"text": "hi", "routed_dp_rank": 1}).encode()

    async def serve(scope: Any, receive: Any, send: Any, endpoint: str, work: Any) -> None:
        await work(Call(**scope), 0.0)

    async def receive(call: Any) -> bytes:
        return raw

    async def generation(call: Any, started: float, body: Any, raw: bytes, make: Any) -> None:
        seen.append(body)

    door.serve, door.receive, door.generation, door.planner = serve, receive, generation, None
    door.settings = SETTINGS
    asyncio.run(door.native({}, None, None))
    asyncio.run(door.native({"x_data_parallel_rank": "3"}, None, None))
    assert [body.routed_dp_rank for body in seen] == [1, 3]
    assert seen[0] == as_completion(read_native(raw))


def test_a_router_s_unknown_model_is_any_and_another_is_refused() -> None:
    door: Any = object.__new__(DirectServer)
    door.settings = SETTINGS
    for name in (None, "unknown", "tiny"):
        door.check_model(name)
    for name in ("default", "", "Unknown"):
        with pytest.raises(NotFound):
            door.check_model(name)


def test_the_table_of_a_decode_door_has_its_meetings() -> None:
    door: Any = object.__new__(DecodeDirectServer)
    door._calls, door.fleet = set(), SimpleNamespace(sizes=lambda: {"streams": 2})
    door._meetings = SimpleNamespace(sizes=lambda: {"meetings": 5})
    assert door.sizes() == {"calls": 0, "streams": 2, "meetings": 5}


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
            made.update(server=args[2], kind=type(self).__name__, secret_of_server=more.get("secret"))

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
    rooms = PrefillRendezvous("x", DpRanks(), 8) if role is Role.PREFILL else None
    lazy = LazyDirectServer(config, ME, None, rooms=rooms, tls=tls)  # type: ignore[arg-type]
    asyncio.run(lazy.opened())
    settings = made["settings"]
    assert (settings.max_attempts, settings.policy) == (1, "total_requests"), "a router tries again by itself"
    assert (made["secret"], made["tls"], made["server"].defaults) == (secret or None, tls, defaults)
    assert made["limits"] == config.limit.limits() == made["server"].limits
    assert (made["server"].context_tokens, made["server"].vocab_size) == (64, 330)
    assert made["kind"] == {Role.PREFILL: "PrefillDirectServer", Role.DECODE: "DecodeDirectServer"}.get(
        role, "DirectServer"
    )
    assert made["secret_of_server"] == (None if role is Role.UNIFIED else secret)
    assert made["started"]


def test_the_loads_that_a_router_reads_are_those_of_each_rank_with_their_count() -> None:
    found = [direct.as_load(load(rank)) for rank in range(3)]
    door: Any = SimpleNamespace(loads=lambda: found)

    async def main() -> list[Any]:
        routes = direct_routes(Lazy(door), "tiny", lambda: None, None)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=Starlette(routes=routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [(await client.get(path)).json() for path in ("/get_load", "/v1/loads")]

    all_, told = asyncio.run(main())
    assert all_ == found
    assert (told["dp_rank_count"], told["loads"]) == (3, found)


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

        async def keep(specs: Any, lifeline_fd: int) -> Any:
            return [unit.make(unit) for unit in specs]

        processes.keep = keep  # type: ignore[method-assign]
        await processes.run()

    asyncio.run(main())
    assert told == ["one-key\nother-key" if given else None] * 2
