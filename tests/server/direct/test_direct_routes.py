"""The door of an instance without a router in front of it: whom it lists, when it is made, what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from segue.kv.errors import BootstrapUnreachable, ConfigError, DeadlineExceeded, SegueError
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.protocol.room_ranks import DpRanks
from segue.server.direct import direct_server as direct
from segue.server.direct.direct_routes import LazyDirectServer, direct_routes
from segue.server.direct.direct_server import DirectServer, OwnInstance
from segue.server.fleet.replica import Replica
from segue.server.frontend.refusals import HANDLERS
from segue.server.messages.control import FlushCache, Load
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.settings.commands import InstanceConfig

ME = LeaderId(Incarnation("a" * 32), 1)


def record(letter: str, role: Role, dp_size: int = 1) -> InstanceRecord:
    ranks = [ReplicaRecord(dp_rank=rank, host="127.0.0.1", port=9 + rank) for rank in range(dp_size)]
    return InstanceRecord(
        incarnation=Incarnation(letter * 32),
        role=role,
        model="m",
        served_model="tiny",
        context_tokens=100,
        dp_size=dp_size,
        replicas=ranks,
    )


OTHERS = [record("p", Role.PREFILL), record("d", Role.DECODE), record("u", Role.UNIFIED)]


@pytest.mark.parametrize("own", [None, Role.UNIFIED, Role.PREFILL, Role.DECODE])
def test_a_server_places_on_its_own_instance_alone_and_knows_every_prefill(own: Role | None) -> None:
    class Registry:
        async def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
            assert role is None
            yield [*OTHERS, *([] if own is None else [record("a", own)])]

    async def main() -> None:
        listed = OwnInstance(Registry(), ME.incarnation)
        shown = await anext(listed.watch())
        assert [(r.incarnation[0], r.role) for r in shown] == ([("a", Role.UNIFIED)] if own else [])
        prefill = [r.incarnation[0] for r in listed.prefill]
        assert prefill == ["p"] + ["a"] * (own is Role.PREFILL)

    asyncio.run(main())


class Session:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


class Ranks:
    """The fleet of a door: the DP ranks of its own instance, and a prefill instance."""

    def __init__(self, dp_size: int) -> None:
        own = record("a", Role.DECODE, dp_size)
        self.sessions = [Session() for _ in range(dp_size)]
        self.stranger = Session()
        found = [Replica(own, where) for where in own.replicas]
        other = record("p", Role.PREFILL)
        found.append(Replica(other, other.replicas[0], session=self.stranger))  # type: ignore[arg-type]
        self.replicas = {replica.leader: replica for replica in reversed(found)}
        self.membership = self
        self.news = asyncio.Event()

    def join(self, rank: int) -> None:
        replica = self.replicas[LeaderId(ME.incarnation, rank)]
        replica.session = self.sessions[rank]  # type: ignore[assignment]
        replica.load = load(rank)
        self.news.set()

    async def changed(self) -> None:
        await self.news.wait()
        self.news.clear()


def load(rank: int = 0) -> Load:
    return Load(dp_rank=rank, running=2 + rank, waiting=3, tokens=50, pages_free=1, pages_total=9)


def door_of(fleet: Any) -> DirectServer:
    door = object.__new__(DirectServer)
    door.fleet, door.me = fleet, ME
    return door


def test_the_cache_of_every_dp_rank_is_flushed_also_of_one_that_comes_late_and_of_nobody_else() -> None:
    async def main() -> None:
        fleet = Ranks(2)
        fleet.join(1)
        flushing = asyncio.ensure_future(door_of(fleet).flush_cache())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not flushing.done(), "a rank is not there"
        fleet.join(0)
        await flushing
        assert [session.sent for session in fleet.sessions] == [[FlushCache()]] * 2
        assert fleet.stranger.sent == []

    asyncio.run(main())


def test_the_loads_are_those_of_its_own_ranks_in_their_order_with_waiting_ones_among_the_requests() -> None:
    async def main() -> None:
        fleet = Ranks(3)
        for rank in (2, 0, 1):
            fleet.join(rank)
        fleet.replicas[LeaderId(ME.incarnation, 1)].load = None  # it has said nothing yet
        assert door_of(fleet).loads() == [
            {"dp_rank": rank, "num_reqs": 5 + rank, "num_waiting_reqs": 3, "num_tokens": 50}
            for rank in (0, 2)
        ]

    asyncio.run(main())


# ---- when it is made -----------------------------------------------------------------------------------


class Closing:
    """A server that notes its close, with resources of requests."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.fleet = SimpleNamespace(close=self._close_fleet)

    async def _close_fleet(self) -> None:
        self.closed.append("fleet")

    def close(self) -> None:
        self.closed.append("server")

    def sizes(self) -> dict[str, int]:
        return {"calls": 3}


def lazy_server(opens: Callable[[LazyDirectServer], Any], role: Role = Role.DECODE) -> LazyDirectServer:
    config = InstanceConfig(model="m", registry="http://127.0.0.1:1", role=role)
    where = record("a", role)
    lazy = LazyDirectServer(config, ME, None, dp=DpRanks(), where=where, halves=None, tls=None)  # type: ignore[arg-type]

    async def opened() -> Any:
        return await opens(lazy)

    lazy._open = opened  # type: ignore[method-assign]
    return lazy


def test_the_server_is_made_once_and_a_client_that_leaves_does_not_take_it_along() -> None:
    async def main() -> None:
        go_on, made = asyncio.Event(), list[Closing]()

        async def opens(lazy: LazyDirectServer) -> Any:
            await go_on.wait()
            made.append(Closing())
            lazy.server = made[0]  # type: ignore[assignment]
            return made[0]

        lazy = lazy_server(opens)
        first, second = (asyncio.ensure_future(lazy.opened()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        go_on.set()
        assert await second is made[0]  # type: ignore[comparison-overlap]
        assert await lazy.opened() is made[0]  # type: ignore[comparison-overlap]
        assert len(made) == 1
        await lazy.close()
        assert made[0].closed == ["fleet", "server"]

    asyncio.run(main())


def test_a_server_that_could_not_be_made_is_tried_again_for_the_next_client() -> None:
    async def main() -> None:
        tried: list[int] = []

        async def opens(lazy: LazyDirectServer) -> Any:
            tried.append(1)
            if len(tried) == 1:
                raise ConfigError("no tokenizer")
            return Closing()

        lazy = lazy_server(opens)
        with pytest.raises(ConfigError):
            await lazy.opened()
        await lazy.opened()
        assert len(tried) == 2
        await lazy.close()

    asyncio.run(main())


def test_a_door_that_is_closed_while_it_opens_opens_no_more() -> None:
    async def main() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def opens(lazy: LazyDirectServer) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        lazy = lazy_server(opens, Role.PREFILL)
        opening = asyncio.ensure_future(lazy.opened())
        await begun.wait()
        await lazy.close()
        assert ended.is_set()
        assert (await asyncio.gather(opening, return_exceptions=True))[0].__class__ is asyncio.CancelledError

    asyncio.run(main())


def test_its_tables_are_those_of_requests_and_none_before_it_is_made() -> None:
    async def main() -> None:
        async def opens(lazy: LazyDirectServer) -> Any:
            raise AssertionError

        lazy = lazy_server(opens, Role.PREFILL)
        assert lazy.counts() == lazy.tables() == {}
        lazy.server = Closing()  # type: ignore[assignment]
        assert lazy.counts() == {"door_calls": 3}
        assert lazy.tables() == {"calls": 3}
        await lazy.close()

    asyncio.run(main())


# ---- what it says --------------------------------------------------------------------------------------


class Lazy:
    """A server that is made, or cannot be."""

    def __init__(self, server: DirectServer | None = None, error: Exception | None = None) -> None:
        self.server, self.error = server, error

    async def opened(self) -> DirectServer:
        if self.error is not None:
            raise self.error
        assert self.server is not None
        return self.server


def ask(
    lazy: Lazy, method: str, path: str, said: Load | None = None, fails: SegueError | None = None
) -> httpx.Response:
    async def answers() -> None:
        if fails is not None:
            raise fails

    async def main() -> httpx.Response:
        routes = direct_routes(lazy, "tiny", lambda: said, answers)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=Starlette(routes=routes, exception_handlers=HANDLERS))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, content=b"{}")

    return asyncio.run(main())


def test_without_a_server_the_load_is_the_leader_s_own_and_none_before_it_has_one() -> None:
    nobody = Lazy()
    assert ask(nobody, "GET", "/get_load").json() == []
    assert ask(nobody, "GET", "/v1/loads").json()["dp_rank_count"] == 0
    told = ask(nobody, "GET", "/v1/loads", load(1)).json()
    assert (told["dp_rank_count"], told["loads"]) == (1, [direct.as_load(load(1))])


def test_what_the_door_cannot_do_is_a_typed_error() -> None:
    broken = Lazy(error=ConfigError("no tokenizer in the model's folder"))
    answer = ask(broken, "POST", "/flush_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "CONFIG")
    assert "no tokenizer" in answer.text
    stuck = ask(Lazy(), "GET", "/health_generate", fails=DeadlineExceeded("the leader did not answer"))
    assert (stuck.status_code, stuck.json()["error"]["code"]) == (504, "DEADLINE_EXCEEDED")
    assert ask(Lazy(), "GET", "/health_generate").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v1/models/other", 404, "'other' does not exist"),
        ("GET", "/nowhere", 404, "there is no /nowhere"),
        ("POST", "/v1/messages/batches", 404, "there is no /v1/messages/batches"),
        ("GET", "/v1/responses/resp_1", 404, "there is no /v1/responses/resp_1"),
        ("GET", "/v1/messages", 405, "GET is not allowed at /v1/messages"),
        ("PUT", "/v1/models", 405, "PUT is not allowed at /v1/models"),
        ("DELETE", "/v1/chat/completions", 405, "DELETE is not allowed"),
    ],
)
def test_no_such_path_method_or_model_is_an_error_in_json_of_the_path_s_api(
    method: str, path: str, status: int, text: str
) -> None:
    """It was the text `Not Found`."""
    answer = ask(Lazy(), method, path)
    assert answer.status_code == status
    told = answer.json()
    assert text in told["error"]["message"]
    assert (told.get("type") == "error") is path.startswith("/v1/messages")
    assert answer.headers["x-request-id"]


def test_a_model_by_its_name_is_there() -> None:
    assert ask(Lazy(), "GET", "/v1/models/tiny").json()["id"] == "tiny"


def test_a_flush_without_all_ranks_is_refused_and_flushes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "FIND_S", 0.01)

    async def main() -> Ranks:
        return Ranks(2)

    fleet = asyncio.run(main())
    fleet.join(0)
    answer = ask(Lazy(door_of(fleet)), "POST", "/flush_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, BootstrapUnreachable.code.value)
    assert fleet.sessions[0].sent == []
