"""The registry as one process uses it, in this process, over HTTP and on etcd, and across its restarts."""

from __future__ import annotations

import asyncio
import itertools
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
import msgspec
import pytest
import uvloop
from etcd_server import EtcdServer, needs_etcd
from registry_records import DEADLINE_S, SECRET, A, B, C, names, record

from ports import HeldPort
from segue.kv.backoff import Backoff
from segue.kv.clock import Clock, VirtualClock
from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ChecksumMismatch,
    ConfigError,
    DpRankConflict,
    DpRankOutOfRange,
    Draining,
    InvalidRequest,
    NotFound,
    OutOfCapacity,
    PeerRefused,
    PeerRestarted,
    SegueError,
    Unauthorized,
)
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.io import MonotonicClock
from segue.kv.limits import Limits
from segue.server.http.guarded_http import ErrorBody
from segue.server.registry.backends import HttpBackend, RegistryBackend
from segue.server.registry.client import BackendRegistry, ErrorReport, InstanceView, RegistryClient
from segue.server.registry.message_headers import DIGEST_HEADER, digest_of
from segue.server.registry.registry_records import (
    DrainFlag,
    InstanceList,
    InstanceRecord,
    Registered,
    RoomRecord,
)
from segue.server.registry.registry_server import RegistryServer, serve
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import StoreBackend

T = TypeVar("T")

#: Of registries and of those who watch: they give nobody up because the machine stands still for a while.
LIMITS = Limits(registry_ttl_s=60.0, handshake_s=60.0, connect_s=60.0)
#: Of instances: every 0.05 s one says that it lives.
OFTEN = msgspec.structs.replace(LIMITS, registry_ttl_s=0.15)
#: Of both on etcd, whose leases last for whole seconds.
ON_ETCD = msgspec.structs.replace(LIMITS, registry_ttl_s=4.0)


#: Makes one more client of the registry that a test has opened.
Clients = Callable[[], BackendRegistry]
OpenRegistry = Callable[..., AbstractAsyncContextManager[Clients]]


@asynccontextmanager
async def clients(make: Clients) -> AsyncIterator[Clients]:
    made: list[BackendRegistry] = []

    def client() -> BackendRegistry:
        made.append(make())
        return made[-1]

    try:
        yield client
    finally:
        for each in made:
            await each.aclose()


@asynccontextmanager
async def local(store: RegistryStore | None = None, _clock: Clock | None = None) -> AsyncIterator[Clients]:
    store = store or RegistryStore(MonotonicClock(), ttl_s=LIMITS.registry_ttl_s)
    async with clients(lambda: BackendRegistry(StoreBackend(store), OFTEN, None)) as make:
        yield make


@asynccontextmanager
async def http(store: RegistryStore | None = None, clock: Clock | None = None) -> AsyncIterator[Clients]:
    server = await serve("127.0.0.1", 0, secret=SECRET, limits=LIMITS, store=store, clock=clock)
    async with clients(lambda: RegistryClient(server.url, secret=SECRET, limits=OFTEN)) as make:
        yield make
    await server.close()


@asynccontextmanager
async def etcd() -> AsyncIterator[Clients]:
    with tempfile.TemporaryDirectory() as folder:
        server = EtcdServer(Path(folder))
        server.start()
        try:
            async with clients(lambda: RegistryClient(server.url, secret=SECRET, limits=ON_ETCD)) as make:
                yield make
        finally:
            server.kill()


on_etcd = pytest.param(etcd, marks=[pytest.mark.slow, needs_etcd])
both = pytest.mark.parametrize("client", [local, http, on_etcd], indirect=True)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Clients]:
    """A registry in this process, or of the kind that a test names."""
    made: AbstractAsyncContextManager[Clients] = getattr(request, "param", local)()
    return made


async def soon(waiting: Awaitable[list[InstanceRecord]]) -> list[InstanceRecord]:
    async with asyncio.timeout(DEADLINE_S):
        return await waiting


@both
async def test_a_watcher_sees_ready_instances_come_drain_and_leave(client: Clients) -> None:
    registry = client()
    watch = registry.watch(Role.PREFILL)
    assert await soon(anext(watch)) == []
    first, second, decode = client(), client(), client()
    await first.register(record(A, dp_rank=0, dp_size=2))
    await decode.register(record(B, role=Role.DECODE))
    await second.register(record(A, dp_rank=1, dp_size=2))
    keeping = [asyncio.create_task(each.keep_alive()) for each in (first, second, decode)]
    seen = await soon(anext(watch))
    assert names(seen) == [A], "not before all its ranks are there"
    assert [r.dp_rank for r in seen[0].replicas] == [0, 1]
    await first.set_draining(True)
    seen = await soon(anext(watch))
    assert [r.draining for r in seen[0].replicas] == [True, False], "each rank drains on its own"
    await second.set_draining(True)
    [seen_now] = await soon(anext(watch))
    assert seen_now.draining
    await first.leave(LeaderId(A, 0))
    assert [r.dp_rank for i in await soon(anext(watch)) for r in i.replicas] == [1], "the other stays"
    await second.leave(LeaderId(A, 1))
    assert await soon(anext(watch)) == []
    await decode.leave(LeaderId(B))
    await asyncio.gather(*keeping)


@pytest.mark.parametrize("opened", [local, http])
async def test_keep_alive_outlives_the_ttl_and_without_it_an_instance_disappears(
    opened: OpenRegistry,
) -> None:
    """The registry's time passes between two keep-alives, however long those take to come."""

    clock, heard = VirtualClock(), asyncio.Event()
    store = RegistryStore(clock, ttl_s=10.0)
    async with opened(store, clock) as client:
        registry = client()
        await registry.register(record(A))
        await client().register(record(B))
        keeping = asyncio.create_task(registry.keep_alive())
        watch = registry.watch()
        assert names(await soon(anext(watch))) == [A, B]
        normal, pause, pauses = store.register, registry._pause, list[float]()

        def register(one: InstanceRecord, dp_rank: int) -> Registered:
            heard.set()
            return normal(one, dp_rank)

        def paused(wait_s: float, *others: asyncio.Event) -> Awaitable[bool]:
            pauses.append(wait_s)
            return pause(wait_s, *others)

        store.register = register  # type: ignore[method-assign]
        registry._pause = paused  # type: ignore[method-assign]

        async def three_of_its_ttl() -> None:
            for _ in range(6):
                heard.clear()
                await heard.wait()
                clock.advance(5.0)

        async with asyncio.timeout(DEADLINE_S):
            await three_of_its_ttl()
            assert names(await anext(watch)) == [A]
            following = asyncio.ensure_future(anext(watch))
            await three_of_its_ttl()
        assert not following.done()
        assert names(store.instances().instances) == [A]
        assert max(pauses) <= OFTEN.registry_ttl_s / 3, "two of three may be lost"
        keeping.cancel()
        following.cancel()


@pytest.mark.slow
@needs_etcd
async def test_on_etcd_a_keep_alive_outlives_the_ttl_and_without_it_an_instance_disappears() -> None:
    async with etcd() as client:
        registry = client()
        await registry.register(record(A))
        await client().register(record(B))
        keeping = asyncio.create_task(registry.keep_alive())
        watch = registry.watch()
        assert names(await soon(anext(watch))) == [A, B]
        assert names(await soon(anext(watch))) == [A]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watch), 2 * ON_ETCD.registry_ttl_s)
        keeping.cancel()


@both
async def test_a_room_query_waits_for_its_registration_and_times_out_typed(client: Clients) -> None:
    registry = client()
    await registry.register(record(A, dp_size=2))
    waiting = asyncio.create_task(registry.resolve_room(2**64 - 1, DEADLINE_S))
    with pytest.raises(BootstrapTimeout, match="room 6"):
        await registry.resolve_room(6, 0.05)
    assert not waiting.done()
    await registry.register_room(2**64 - 1, LeaderId(A, 1), ttl_s=600)
    assert await waiting == LeaderId(A, 1)
    with pytest.raises(DpRankConflict):
        await registry.register_room(2**64 - 1, LeaderId(A, 0), ttl_s=600)
    with pytest.raises(DpRankOutOfRange):
        await registry.register_room(5, LeaderId(A, 2), ttl_s=600)
    with pytest.raises(NotFound):
        await registry.register_room(5, LeaderId(C, 0), ttl_s=600)


@both
async def test_lesson_18_typed_refusals_reach_the_caller(client: Clients) -> None:
    registry = client()
    for unregistered in (registry.set_draining(True), registry.keep_alive()):
        with pytest.raises(NotFound):
            await unregistered
    await registry.register(record(A))
    with pytest.raises(DpRankConflict):
        await client().register(record(A, port=1))
    with pytest.raises(DpRankOutOfRange):
        await client().register(record(B, dp_rank=3, dp_size=2))


@pytest.mark.parametrize("turns", range(1, 8))
async def test_an_instance_that_leaves_in_the_turn_of_its_keep_alive_ends_it_quietly(turns: int) -> None:
    """It ended by a KeyError when the pause ran out in the very turn in which the instance left."""

    limits = Limits(registry_ttl_s=1e-6)  # a keep-alive is due in each turn
    store = RegistryStore(VirtualClock(), ttl_s=1.0)
    registry = BackendRegistry(StoreBackend(store), limits, None)
    await registry.register(record(A))
    keeping = asyncio.create_task(registry.keep_alive())
    for _ in range(turns):
        await asyncio.sleep(0)
    await registry.leave(LeaderId(A))
    await asyncio.wait_for(keeping, DEADLINE_S)
    await registry.aclose()


@both
async def test_lesson_09_the_old_incarnation_learns_that_it_was_replaced(client: Clients) -> None:
    registry = client()
    await registry.register(record(A, port=9000))
    keeping = asyncio.create_task(registry.keep_alive())
    await client().register(record(B, port=9000))
    with pytest.raises(PeerRestarted):
        await asyncio.wait_for(keeping, DEADLINE_S)


@both
async def test_closing_ends_watches_waits_and_keep_alives_at_once(client: Clients) -> None:
    registry = client()
    await registry.register(record(A))
    watch = registry.watch()
    await soon(anext(watch))
    following = asyncio.ensure_future(anext(watch))
    resolving = asyncio.create_task(registry.resolve_room(9, DEADLINE_S))
    keeping = asyncio.create_task(registry.keep_alive())
    await asyncio.sleep(0.01)
    await registry.aclose()
    results = await asyncio.gather(following, resolving, keeping, return_exceptions=True)
    assert isinstance(results[0], StopAsyncIteration)
    assert isinstance(results[1], SegueError)
    assert results[2] is None


@pytest.mark.parametrize("client", [http, on_etcd], indirect=True)
async def test_a_closed_client_says_so_with_an_error_of_ours(client: Clients) -> None:
    registry = client()
    await registry.register(record(A))
    leader = LeaderId(A, 0)
    backend = registry.backend
    # One that is about to ask again: every operation below the client's own check.
    await backend.close()
    for asking in (
        backend.put_rank(record(A)),
        backend.put_draining(A, DrainFlag(draining=True)),
        backend.delete(leader),
        backend.put_room(7, RoomRecord(incarnation=A, dp_rank=0, ttl_s=1.0)),
        backend.room(7, 0.1),
    ):
        with pytest.raises(Draining, match="client was closed"):
            await asking


class Restarts:
    """A registry at one port that can be stopped and started again, empty."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.server: RegistryServer | None = None
        self._held = HeldPort()
        self.port = self._held.port

    async def start(self, store: RegistryStore | None = None) -> str:
        self.server = await serve("127.0.0.1", self.port, secret=SECRET, limits=self.limits, store=store)
        return self.server.url

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()
        self.server = None


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_registry_restart_loses_nobody(runner: Callable[..., None]) -> None:
    async def main() -> None:
        restarts = Restarts()
        gone, back = asyncio.Event(), asyncio.Event()

        def hear(error: SegueError) -> None:
            if isinstance(error, BootstrapUnreachable):
                gone.set()

        url = await restarts.start()
        instances = {who: RegistryClient(url, secret=SECRET, limits=OFTEN) for who in (A, B)}
        frontend = RegistryClient(url, secret=SECRET, limits=LIMITS, on_error=hear)
        for who, instance in instances.items():
            await instance.register(record(who))
        keeping = [asyncio.create_task(instance.keep_alive()) for instance in instances.values()]
        watch = frontend.watch(Role.PREFILL)
        assert names(await soon(anext(watch))) == [A, B]
        following = asyncio.ensure_future(anext(watch))
        await restarts.stop()
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        assert isinstance(frontend.last_error, SegueError)
        normal = frontend.backend.instances

        async def listed(role: Role | None, version: int | None, wait_s: float) -> InstanceList:
            answer = await normal(role, version, wait_s)
            if sorted(names(answer.instances)) == [A, B]:
                back.set()
            return answer

        frontend.backend.instances = listed  # type: ignore[method-assign]
        await restarts.start()
        assert restarts.server is not None
        assert not restarts.server.store.instances().instances
        # Everybody comes back by itself, and the watcher never sees them gone.
        other = RegistryClient(url, secret=SECRET, limits=LIMITS)
        async for seen in other.watch():
            if names(seen) == [A, B]:
                break
        await asyncio.wait_for(back.wait(), DEADLINE_S)
        assert not following.done()
        await instances[A].register_room(5, LeaderId(A, 0), ttl_s=600)
        assert await other.resolve_room(5, DEADLINE_S) == LeaderId(A, 0)
        await instances[B].leave(LeaderId(B))
        assert names(await soon(following)) == [A]
        assert frontend.last_error is None
        await instances[A].leave(LeaderId(A))
        await asyncio.gather(*keeping)
        for client in (*instances.values(), frontend, other):
            await client.aclose()
        await restarts.stop()

    runner(main())


class Resets(uvloop.Loop):
    """The loop of an instance's I/O thread, where `killed` ends with each connection in its queue, and who
    made that goes on when it has been reset."""

    killed: socket.socket

    async def create_connection(self, make: Callable[[], Any], *args: Any, **how: Any) -> Any:  # type: ignore[override]
        protocol, reset = make(), asyncio.Event()
        normal = protocol.connection_lost

        def connection_lost(error: Exception | None) -> None:
            normal(error)
            reset.set()

        protocol.connection_lost = connection_lost
        made = await super().create_connection(lambda: protocol, *args, **how)
        self.killed.close()
        await asyncio.wait_for(reset.wait(), DEADLINE_S)
        return made


ROOM = RoomRecord(incarnation=A, dp_rank=0, ttl_s=600)


@pytest.mark.parametrize(
    "ask",
    [
        lambda backend: backend.put_rank(record(A)),
        lambda backend: backend.put_room(5, ROOM),
        lambda backend: backend.room(5, 1.0),
        lambda backend: backend.instances(None, None, 1.0),
    ],
)
def test_a_registry_that_is_killed_with_a_query_in_its_queue_may_be_asked_again(
    ask: Callable[[RegistryBackend], Awaitable[object]],
) -> None:
    """anyio then asks for a socket that uvloop has no more: an AttributeError, which is none of httpx's. It
    ended one request of 1,000, and with a keep-alive or a watch the whole instance."""

    async def main() -> None:
        loop, held = asyncio.get_running_loop(), HeldPort()
        assert isinstance(loop, Resets)
        loop.killed = socket.create_server(("127.0.0.1", held.port))
        backend = HttpBackend(f"http://127.0.0.1:{held.port}", SECRET, LIMITS, None)
        with pytest.raises(BootstrapUnreachable, match="cannot be reached") as refused:
            await ask(backend)
        assert refused.value.info.retryable
        await backend.close()

    with asyncio.Runner(loop_factory=Resets) as runner:
        runner.run(main())


async def test_who_does_not_come_back_after_a_restart_is_dropped_after_a_ttl() -> None:
    restarts = Restarts()
    url = await restarts.start()
    instance = RegistryClient(url, secret=SECRET, limits=OFTEN)
    await instance.register(record(A))
    watch = instance.watch()
    assert names(await soon(anext(watch))) == [A]
    await restarts.stop()
    await restarts.start()
    assert await soon(anext(watch)) == []
    await instance.aclose()
    await restarts.stop()


async def test_a_registry_that_restarts_is_told_its_rooms_again_and_who_waits_is_answered() -> None:
    restarts = Restarts()
    url = await restarts.start()
    prefill, decode = (RegistryClient(url, secret=SECRET, limits=limits) for limits in (OFTEN, LIMITS))
    await prefill.register(record(A, dp_size=2))
    keeping = asyncio.create_task(prefill.keep_alive())
    await prefill.register_room(5, LeaderId(A, 0), ttl_s=600)
    await prefill.register_room(6, LeaderId(A, 0), ttl_s=600)
    await restarts.stop()
    store = RegistryStore(MonotonicClock(), ttl_s=LIMITS.registry_ttl_s)
    store.register(record(B), 0)
    store.register_room(6, RoomRecord(incarnation=B, dp_rank=0, ttl_s=600))
    await restarts.start(store)
    assert await decode.resolve_room(5, DEADLINE_S) == LeaderId(A, 0)
    assert not keeping.done(), "that another owns a room by now ends nobody"
    assert await decode.resolve_room(6, DEADLINE_S) == LeaderId(B, 0)
    await prefill.leave(LeaderId(A, 0))
    await keeping
    for client in (prefill, decode):
        await client.aclose()
    await restarts.stop()


async def test_a_rank_leaves_alone_and_what_it_registered_after_a_restart_is_complete() -> None:
    restarts = Restarts()
    url = await restarts.start()
    ranks = [RegistryClient(url, secret=SECRET, limits=OFTEN) for _ in range(2)]
    for rank, client in enumerate(ranks):
        await client.register(record(A, dp_rank=rank, dp_size=2))
    keeping = [asyncio.create_task(client.keep_alive()) for client in ranks]
    watch = ranks[1].watch()
    assert [len(i.replicas) for i in await soon(anext(watch))] == [2]
    await ranks[0].set_draining(True)
    assert [r.draining for i in await soon(anext(watch)) for r in i.replicas] == [True, False]
    await ranks[0].leave(LeaderId(A, 0))
    assert [r.dp_rank for i in await soon(anext(watch)) for r in i.replicas] == [1]
    await keeping[0]
    assert ranks[1]._own is not None
    assert ranks[1]._own.complete
    await restarts.stop()
    await restarts.start()
    stranger = RegistryClient(url, secret=SECRET, limits=LIMITS)
    async for seen in stranger.watch():
        if names(seen) == [A]:  # ready, though the other rank is gone for ever
            break
    await ranks[1].leave(LeaderId(A, 1))
    for client in (*ranks, stranger):
        await client.aclose()
    keeping[1].cancel()
    await restarts.stop()


async def test_a_wrong_secret_is_unauthorized_and_nobody_there_is_unreachable() -> None:
    restarts = Restarts()
    url = await restarts.start()
    for secret in (None, b"another secret!!"):
        stranger = RegistryClient(url, secret=secret, limits=LIMITS)
        with pytest.raises(Unauthorized):
            await stranger.register(record(A))
        with pytest.raises(Unauthorized):
            await anext(stranger.watch())
        with pytest.raises(Unauthorized):
            await stranger.resolve_room(1, DEADLINE_S)
        await stranger.aclose()
    client = RegistryClient(url, secret=SECRET, limits=LIMITS)
    await restarts.stop()
    with pytest.raises(BootstrapUnreachable):
        await client.register(record(A))
    for timeout_s in (0.3, 3.0, 30.0):  # in so short a time a starved process may not even have asked
        with pytest.raises(BootstrapTimeout) as late:
            await client.resolve_room(1, timeout_s)
        if "last: " in str(late.value):
            break
    assert "cannot be reached" in str(late.value)
    await client.leave(LeaderId(A))  # never raises because the registry is away
    await client.aclose()


@pytest.mark.parametrize("url", ["", "localhost:8998", "ftp://x", "http://", "http://[::1"])
def test_a_wrong_address_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError):
        RegistryClient(url, secret=None, limits=LIMITS)


async def test_something_else_at_the_registrys_address_is_said_clearly() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = RegistryClient(f"http://127.0.0.1:{port}", secret=None, limits=LIMITS)
        with pytest.raises(PeerRefused):
            await anext(client.watch())
        await client.aclose()


@pytest.mark.parametrize("kind", ["http", "etcd"])
async def test_lesson_19_the_client_follows_no_redirect_and_no_proxy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append("elsewhere")
        writer.close()

    async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as trap:
        trap_url = f"http://127.0.0.1:{trap.sockets[0].getsockname()[1]}"

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 307 X\r\nlocation: {trap_url}\r\ncontent-length: 0\r\n\r\n".encode())
            writer.close()

        monkeypatch.setenv("HTTP_PROXY", trap_url)
        monkeypatch.setenv("ALL_PROXY", trap_url)
        async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = RegistryClient(f"{kind}://127.0.0.1:{port}", secret=SECRET, limits=LIMITS)
            with pytest.raises(PeerRefused):
                await client.register(record(A))
            await client.aclose()
    assert not asked


@pytest.mark.parametrize("kind", ["http", "etcd"])
async def test_as_many_rooms_as_requests_are_waited_for_at_the_same_time(kind: str) -> None:
    """Each holds a connection: none may keep the others from being asked for, nor the list."""
    many = 40

    came, gone = list[asyncio.StreamWriter](), list[asyncio.StreamWriter]()
    all_came, all_gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        came.append(writer)
        if len(came) == many:
            all_came.set()
        await reader.read()
        writer.close()
        gone.append(writer)
        if len(gone) == many:
            all_gone.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        limits = msgspec.structs.replace(LIMITS, max_queue=many)
        client = RegistryClient(f"{kind}://127.0.0.1:{port}", secret=SECRET, limits=limits)
        asking = [asyncio.create_task(client.resolve_room(1 + n, DEADLINE_S)) for n in range(many)]
        await asyncio.wait_for(all_came.wait(), DEADLINE_S)
        await client.aclose()
        assert all(isinstance(e, Draining) for e in await asyncio.gather(*asking, return_exceptions=True))
        await asyncio.wait_for(all_gone.wait(), DEADLINE_S)


async def test_a_question_that_waits_has_its_wait_and_an_answer_s_time_and_no_other_time_is_longer() -> None:
    times: list[dict[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        times.append(request.extensions["timeout"])
        return httpx.Response(200, content=msgspec.json.encode(LeaderId(A)))

    limits = msgspec.structs.replace(LIMITS, connect_s=5.0)
    transport = httpx.MockTransport(answer)
    client = RegistryClient("http://r:1", secret=SECRET, limits=limits, transport=transport)
    await client.backend.room(5, 30.0)
    await client.backend.put_draining(A, DrainFlag(draining=True))
    await client.aclose()
    assert [(one["connect"], one["read"]) for one in times] == [(5.0, 35.0), (5.0, 5.0)]


async def test_a_drain_that_the_registry_did_not_hear_is_told_with_the_next_keep_alive() -> None:
    """The registry was away for a moment and has forgotten nothing, so registering again says nothing new."""

    server = await serve("127.0.0.1", 0, secret=SECRET, limits=LIMITS)
    instance = RegistryClient(server.url, secret=SECRET, limits=OFTEN)
    front = RegistryClient(server.url, secret=SECRET, limits=LIMITS)
    watch = front.watch()
    await instance.register(record(A))
    assert [i.draining for i in await soon(anext(watch))] == [False]
    keeping = asyncio.create_task(instance.keep_alive())
    backend = instance.backend
    normal = backend.put_draining

    async def away(*_: object) -> None:
        backend.put_draining = normal  # type: ignore[method-assign]
        raise BootstrapUnreachable("the registry is away for a moment")

    backend.put_draining = away  # type: ignore[method-assign]
    await instance.set_draining(True)
    assert isinstance(instance.last_error, BootstrapUnreachable)
    assert [i.draining for i in await soon(anext(watch))] == [True]
    assert not keeping.done()
    await instance.aclose()
    await keeping
    await front.aclose()
    await server.close()


async def test_a_drain_told_to_a_registry_that_began_again_counts_though_a_heartbeat_comes_first(
    client: Clients,
) -> None:
    registry = client()
    await registry.register(record(A))
    backend = registry.backend
    normal = backend.put_draining

    async def began_anew(*_: object) -> None:
        backend.put_draining = normal  # type: ignore[method-assign]
        # A keep-alive that was made before comes first: with it the registry knows us as serving.
        await backend.put_rank(record(A))
        raise NotFound("nobody is here")

    backend.put_draining = began_anew  # type: ignore[method-assign]
    await registry.set_draining(True)
    assert [i.draining for i in await soon(anext(registry.watch()))] == [True]


async def test_a_flag_that_changed_while_the_one_before_was_being_told_is_told_again(client: Clients) -> None:
    registry = client()
    await registry.register(record(A))
    backend = registry.backend
    normal, asked, go_on = backend.put_draining, asyncio.Event(), asyncio.Event()

    async def slow_then_away(incarnation: Incarnation, flag: DrainFlag) -> None:
        if not flag.draining:
            raise BootstrapUnreachable("the registry is away for a moment")
        asked.set()
        await go_on.wait()
        await normal(incarnation, flag)

    backend.put_draining = slow_then_away  # type: ignore[method-assign]
    first = asyncio.create_task(registry.set_draining(True))
    await asked.wait()
    await registry.set_draining(False)  # which the registry does not hear
    go_on.set()
    await first
    backend.put_draining = normal  # type: ignore[method-assign]
    watch = registry.watch()
    assert [i.draining for i in await soon(anext(watch))] == [True]
    keeping = asyncio.create_task(registry.keep_alive())
    assert [i.draining for i in await soon(anext(watch))] == [False]
    await registry.leave(LeaderId(A))
    await keeping


async def test_who_waits_asks_again_within_a_ttl_so_a_registry_that_is_silently_gone_is_noticed(
    client: Clients,
) -> None:
    """Nobody tells of a machine that lost its power; a query that waits longer is deaf for longer."""

    asked: list[float] = []
    registry = client()
    backend = registry.backend
    normal = backend.instances

    async def instances(role: Role | None, version: int | None, wait_s: float) -> object:
        asked.append(wait_s)
        return await normal(role, version, 0.0)

    async def room(room: int, wait_s: float) -> LeaderId:
        asked.append(wait_s)
        return LeaderId(B)

    backend.instances, backend.room = instances, room  # type: ignore[method-assign,assignment]
    watch = registry.watch()
    assert await soon(anext(watch)) == []
    await registry.register(record(A))
    await soon(anext(watch))
    assert await registry.resolve_room(5, DEADLINE_S) == LeaderId(B)
    assert len(asked) > 2
    assert max(asked) <= OFTEN.registry_ttl_s


async def test_a_query_that_arrived_as_no_http_was_changed_on_its_way_and_ends_nobody() -> None:
    """An error before any handler has the query concerns the connection, not the instance: a flipped bit of
    one keep-alive must not make it leave."""

    broken, often = [False], asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if not broken[0]:
            return httpx.Response(200, content=b'{"version": 1, "epoch": "e", "complete": true}')
        broken.append(True)
        if len(broken) > 4:
            often.set()
        error = InvalidRequest("what came is not an HTTP request")
        return httpx.Response(400, content=msgspec.json.encode(ErrorBody(error.info)))

    transport = httpx.MockTransport(answer)
    registry = RegistryClient("http://r:1", secret=SECRET, limits=OFTEN, transport=transport)
    await registry.register(record(A))
    broken[0] = True
    with pytest.raises(ChecksumMismatch):
        await registry.register(record(B))
    keeping = asyncio.create_task(registry.keep_alive())
    async with asyncio.timeout(DEADLINE_S):
        await often.wait()
    assert not keeping.done()
    await registry.aclose()
    await keeping


def test_whom_a_restarted_registry_has_not_heard_of_yet_stands_for_a_ttl_and_no_longer() -> None:
    clock = VirtualClock()
    view = InstanceView(10.0, clock)
    old = InstanceList(version=1, epoch="first", age_s=100.0, instances=[record(A), record(B)])
    assert names(view.merge(old)) == [A, B]
    for age_s, version in ((1.0, 2), (5.0, 3)):
        young = InstanceList(version=version, epoch="second", age_s=age_s, instances=[record(B)])
        assert sorted(names(view.merge(young))) == [A, B]
        assert view.wait_s(30.0) <= 9.0, "it asks again when the time is over"
        clock.advance(4.0)
    clock.advance(0.9)
    assert sorted(names(view.merge(young))) == [A, B]
    clock.advance(0.2)
    assert names(view.merge(young)) == [B]
    assert view.wait_s(30.0) == 30.0
    taken = record(C, port=record(B).replicas[0].port)
    again = InstanceList(version=4, epoch="third", age_s=0.5, instances=[taken])
    assert names(view.merge(again)) == [C], "two processes do not listen at one address"


def test_who_was_not_heard_of_yet_stands_also_when_the_registry_restarts_again() -> None:
    view = InstanceView(10.0, VirtualClock())
    lives = (("first", 100.0, [record(A), record(B)]), ("second", 1.0, [record(B)]), ("third", 1.0, []))
    for epoch, age_s, there in lives:
        shown = view.merge(InstanceList(version=1, epoch=epoch, age_s=age_s, instances=there))
        assert sorted(names(shown)) == [A, B]


async def test_an_answer_that_was_changed_on_its_way_is_not_believed() -> None:
    body = msgspec.json.encode(InstanceList(version=1, epoch="e", age_s=1.0, instances=[record(A)]))

    def changed(request: httpx.Request) -> httpx.Response:
        right = {DIGEST_HEADER: digest_of(b"200", body)}
        return httpx.Response(200, content=body.replace(b"9000", b"9001"), headers=right)

    transport = httpx.MockTransport(changed)
    registry = RegistryClient("http://r:1", secret=SECRET, limits=LIMITS, transport=transport)
    with pytest.raises(ChecksumMismatch):
        await registry.backend.instances(None, None, 0.0)
    await registry.aclose()


class Answers(RegistryBackend):
    """A backend that has written down what it was told, and answers with what it is given: errors to raise
    first (None: not this time), or nothing. `epoch` is the registry's life."""

    def __init__(self, *errors: SegueError | None) -> None:
        self.errors = list(errors)
        self.ranks: list[InstanceRecord] = []
        self.rooms: list[tuple[int, RoomRecord]] = []
        self.asked = asyncio.Event()
        self.epoch = "first"
        #: how often it begins anew as soon as it was told of a rank
        self.forgets = 0
        self.lists: list[InstanceList | SegueError] = []

    def _raise(self) -> None:
        self.asked.set()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error

    async def put_rank(self, record: InstanceRecord) -> Registered:
        self._raise()
        self.ranks.append(record)
        if self.forgets:
            self.forgets -= 1
            self.errors.append(NotFound("nobody is here"))
        return Registered(version=1, epoch=self.epoch, complete=False)

    async def put_room(self, room: int, record: RoomRecord) -> None:
        self._raise()
        self.rooms.append((room, record))

    async def delete(self, leader: LeaderId) -> None:
        self._raise()

    async def put_draining(self, incarnation: Incarnation, flag: DrainFlag) -> None:
        self._raise()

    async def room(self, room: int, wait_s: float) -> LeaderId | None:
        self._raise()
        return LeaderId(A)

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        if not self.lists:
            await asyncio.Event().wait()
        answer = self.lists.pop(0)
        if isinstance(answer, SegueError):
            raise answer
        return answer

    async def close(self) -> None: ...


def registry_on(
    backend: RegistryBackend | Mortal,
    clock: VirtualClock | None = None,
    ttl_s: float = 1e-6,
    on_error: ErrorReport | None = None,
    **limits: int,
) -> BackendRegistry:
    bounds = Limits(registry_ttl_s=ttl_s, **limits)  # type: ignore[arg-type]
    return BackendRegistry(backend, bounds, on_error, clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [PeerRestarted, Draining, DpRankConflict, DpRankOutOfRange, InvalidRequest])
async def test_a_keep_alive_and_a_drain_end_with_what_says_that_the_incarnation_is_over(
    error: type[SegueError],
) -> None:
    backend = Answers()
    registry = registry_on(backend)
    await registry.register(record(A))
    for work in (registry.keep_alive(), registry.set_draining(True)):
        backend.errors[:] = [error("no more")]
        with pytest.raises(error):
            await asyncio.wait_for(work, DEADLINE_S)


@pytest.mark.parametrize("error", [BootstrapUnreachable, Unauthorized, OutOfCapacity, PeerRefused, NotFound])
async def test_a_keep_alive_goes_on_after_what_may_pass_and_says_the_same_again(
    error: type[SegueError],
) -> None:
    backend = Answers()
    registry = registry_on(backend)
    await registry.register(record(A, dp_rank=1, dp_size=3))
    backend.errors += [error("for a moment")] * 2
    keeping = asyncio.create_task(registry.keep_alive())
    await until(backend, lambda: len(backend.ranks) > 2)
    assert backend.ranks[:3] == [record(A, dp_rank=1, dp_size=3)] * 3
    assert not keeping.done()
    await registry.leave(LeaderId(A, 1))
    await asyncio.wait_for(keeping, DEADLINE_S)


def noted(registry: BackendRegistry) -> list[float]:
    """How long it pauses, from now on; no time passes."""
    pauses: list[float] = []

    async def pause(wait_s: float, *others: asyncio.Event) -> bool:
        pauses.append(wait_s)
        await asyncio.sleep(0)
        return registry._closing.is_set() or any(event.is_set() for event in others)

    registry._pause = pause  # type: ignore[method-assign]
    return pauses


async def test_a_keep_alive_that_failed_comes_again_soon_and_else_after_a_third_of_the_ttl() -> None:
    backend = Answers()
    away, troubles = BootstrapUnreachable("away"), list[SegueError | None]()
    registry = registry_on(backend, ttl_s=30.0, on_error=lambda _: troubles.append(registry.last_error))
    await registry.register(record(A))
    backend.errors[:] = [None, *[away] * 7, None, away]
    pauses = noted(registry)
    keeping = asyncio.create_task(registry.keep_alive())
    while backend.errors:  # noqa: ASYNC110  each turn is one of its
        await asyncio.sleep(0)
    while len(pauses) < 12:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert pauses[:12] == [10.0, 10.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 10.0, 0.1, 10.0]
    assert troubles == [away] * 8
    assert registry.last_error is None, "the registry is back"
    await registry.aclose()
    await asyncio.wait_for(keeping, DEADLINE_S)


async def test_who_asks_a_registry_that_is_away_pauses_longer_each_time_and_shortly_after_it_was_there() -> (
    None
):
    backend, away = Answers(), BootstrapUnreachable("away")
    registry = registry_on(backend)
    pauses = noted(registry)
    backend.lists += [*[away] * 6, answer("e", 1.0, record(A)), away, answer("e", 1.0)]
    watch = registry.watch()
    assert names(await soon(anext(watch))) == [A]
    assert await soon(anext(watch)) == []
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 0.1]
    pauses.clear()
    backend.errors[:] = [away] * 6
    assert await registry.resolve_room(5, DEADLINE_S) == LeaderId(A)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


async def test_a_drain_flag_that_the_registry_has_heard_is_not_repeated() -> None:
    backend, flags = Answers(), list[DrainFlag]()

    async def put_draining(_who: Incarnation, flag: DrainFlag) -> None:
        flags.append(flag)

    backend.put_draining = put_draining  # type: ignore[method-assign]
    registry = registry_on(backend)
    await registry.register(record(A))
    await registry.set_draining(True)
    keeping = asyncio.create_task(registry.keep_alive())
    await until(backend, lambda: len(backend.ranks) > 3)
    assert flags == [DrainFlag(draining=True, dp_rank=0)]
    keeping.cancel()


async def test_a_room_of_an_instance_that_has_left_does_not_register_it_again() -> None:
    backend = Answers()
    registry = registry_on(backend)
    await registry.register(record(A))
    await registry.leave(LeaderId(A))
    backend.errors[:] = [NotFound("nobody of that name")]
    with pytest.raises(NotFound):
        await registry.register_room(5, LeaderId(A), ttl_s=60.0)
    assert len(backend.ranks) == 1


async def test_a_client_that_is_closed_asks_no_more_and_leaves_no_task() -> None:
    backend = Answers(*[BootstrapUnreachable("away")] * 99)
    registry = registry_on(backend, VirtualClock())
    following = asyncio.ensure_future(anext(registry.watch()))
    registering = asyncio.create_task(registry.register_room(5, LeaderId(A), ttl_s=3600.0))
    await backend.asked.wait()
    await registry.aclose()
    with pytest.raises(BootstrapUnreachable):
        await asyncio.wait_for(registering, DEADLINE_S)
    assert len(backend.errors) >= 97
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(following, DEADLINE_S)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("query", ["put_rank", "put_draining"])
async def test_a_rank_that_leaves_while_the_registry_is_told_of_it_ends_without_an_error(query: str) -> None:
    """What is under way then is refused, because it has left."""

    backend = Answers()
    registry = registry_on(backend)
    await registry.register(record(A))

    async def leaves(*_: object) -> None:
        await registry.leave(LeaderId(A))
        raise Draining("it has left")

    setattr(backend, query, leaves)
    work = registry.keep_alive() if query == "put_rank" else registry.set_draining(True)
    await asyncio.wait_for(work, DEADLINE_S)


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.server.registry.client.LONGEST_PAUSE_S", 0.001)


@pytest.mark.usefixtures("_short_pauses")
async def test_a_room_is_registered_through_a_moment_without_registry_and_no_longer_than_it_lives() -> None:
    backend, clock = Answers(BootstrapUnreachable("away"), OutOfCapacity("full")), VirtualClock()
    registry = registry_on(backend, clock)
    await registry.register_room(5, LeaderId(A), ttl_s=60.0)
    assert [room for room, _ in backend.rooms] == [5]
    for refused in (DpRankConflict("another's"), DpRankOutOfRange("none"), InvalidRequest("no room")):
        backend.errors[:] = [refused] * 2
        with pytest.raises(type(refused)):
            await registry.register_room(6, LeaderId(A), ttl_s=60.0)
        assert len(backend.errors) == 1, "asked once"
    backend.errors[:] = [BootstrapUnreachable("away")] * 9
    with pytest.raises(BootstrapUnreachable):
        await registry.register_room(7, LeaderId(A), ttl_s=1e-6)
    assert len(backend.errors) == 8, "its time is over before it could be tried again"


async def until(backend: Answers, true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            backend.asked.clear()
            await backend.asked.wait()


async def test_a_registry_that_begins_anew_hears_of_the_rooms_that_live_with_the_time_that_is_left() -> None:
    """Each once and the newest first, however many requests find out that it is a new one."""

    backend, clock = Answers(), VirtualClock()
    registry = registry_on(backend, clock)
    await registry.register(record(A))
    for room, ttl_s in ((5, 30.0), (6, 10.0), (7, 50.0)):
        await registry.register_room(room, LeaderId(A), ttl_s=ttl_s)
    clock.advance(10.0)
    backend.rooms.clear()
    await registry.register(record(A))
    keeping = asyncio.create_task(registry.keep_alive())
    await until(backend, lambda: len(backend.ranks) > 2)
    assert backend.rooms == [], "the registry is the same one"
    keeping.cancel()
    normal, knows = backend.put_room, set[int]()

    async def put_room(room: int, record: RoomRecord) -> None:
        await asyncio.sleep(0)
        if room not in knows:
            knows.add(room)
            raise NotFound("nobody is here")
        await normal(room, record)

    backend.put_room, backend.epoch = put_room, "second"  # type: ignore[method-assign]
    news = [registry.register_room(room, LeaderId(A), ttl_s=50.0) for room in range(11, 20)]
    await asyncio.gather(*news)
    assert sorted(room for room, _ in backend.rooms) == [*range(11, 20)], "no request waits for others"
    backend.put_room = normal  # type: ignore[method-assign]
    backend.rooms.clear()
    keeping = asyncio.create_task(registry.keep_alive())
    await until(backend, lambda: len(backend.rooms) > 10)
    said = [(room, said.ttl_s) for room, said in backend.rooms]
    assert said == [*((room, 50.0) for room in range(19, 10, -1)), (7, 40.0), (5, 20.0)]
    ranks = len(backend.ranks)
    await until(backend, lambda: len(backend.ranks) > ranks + 1)
    assert len(backend.rooms) == 11
    # One that stumbles while it hears of them is told again, of all of them.
    backend.rooms.clear()
    backend.epoch = "third"
    backend.errors[:] = [None, BootstrapUnreachable("for a moment")]
    await until(backend, lambda: len(backend.rooms) > 10)
    assert [room for room, _ in backend.rooms] == [*range(19, 10, -1), 7, 5]
    keeping.cancel()


@pytest.mark.parametrize("between", [Unauthorized("another secret"), PeerRefused("a page of HTML")])
async def test_rooms_are_kept_for_the_registry_though_something_else_answers_at_its_address_meanwhile(
    between: SegueError,
) -> None:
    backend = Answers()
    registry = registry_on(backend, VirtualClock())
    await registry.register(record(A))
    for room in (5, 6, 7):
        await registry.register_room(room, LeaderId(A), ttl_s=60.0)
    backend.rooms.clear()
    backend.epoch = "second"
    backend.errors[:] = [None, None, between]  # as it hears of the second room
    keeping = asyncio.create_task(registry.keep_alive())
    await until(backend, lambda: len(backend.rooms) == 3)
    assert [room for room, _ in backend.rooms] == [7, 6, 5]
    assert not backend.errors
    keeping.cancel()


async def test_a_room_whose_time_has_passed_in_a_pause_was_lost_for_what_was_wrong_before_it() -> None:
    backend, clock = Answers(BootstrapUnreachable("away")), VirtualClock()
    registry = registry_on(backend, clock)
    registering = asyncio.create_task(registry.register_room(5, LeaderId(A), ttl_s=5.0))
    await backend.asked.wait()
    clock.advance(6.0)
    with pytest.raises(BootstrapUnreachable, match="away"):
        await asyncio.wait_for(registering, DEADLINE_S)
    assert not backend.rooms


async def test_a_room_is_registered_though_the_registry_begins_anew_again_and_again() -> None:
    backend = Answers()
    registry = registry_on(backend)
    await registry.register(record(A))
    for _ in range(2):  # it was told who we are, and has forgotten it before it was told the room
        backend.errors += [NotFound("nobody is here")]
        backend.forgets += 1
    await registry.register_room(5, LeaderId(A), ttl_s=60.0)
    assert [room for room, _ in backend.rooms] == [5]
    backend.errors = [NotFound("nobody is here")]
    with pytest.raises(NotFound):
        await registry.register_room(6, LeaderId(B), ttl_s=60.0)


async def test_a_room_that_the_last_registry_has_acknowledged_late_is_known_to_the_next_one() -> None:
    backend = Answers()
    registry = registry_on(backend)
    await registry.register(record(A))
    normal, answered = backend.put_room, asyncio.Event()

    async def put_room(room: int, record: RoomRecord) -> None:
        backend.put_room = normal  # type: ignore[method-assign]
        await answered.wait()

    backend.put_room = put_room  # type: ignore[method-assign]
    telling = asyncio.create_task(registry.register_room(5, LeaderId(A), ttl_s=60.0))
    await asyncio.sleep(0)
    backend.epoch = "second"
    keeping = asyncio.create_task(registry.keep_alive())
    await until(backend, lambda: len(backend.ranks) > 4)
    answered.set()
    await telling
    assert [room for room, _ in backend.rooms] == [5]
    keeping.cancel()
    backend.errors = [DpRankConflict("another's")]
    with pytest.raises(DpRankConflict):
        await registry.register_room(6, LeaderId(A), ttl_s=60.0)
    assert list(registry._rooms) == [5]


async def test_a_registry_that_has_not_heard_of_an_instance_for_a_ttl_is_told_its_rooms_again() -> None:
    """It has dropped the instance and the rooms with it, and is no new one."""

    clock = VirtualClock()
    store = RegistryStore(clock, ttl_s=10.0)
    registry = registry_on(StoreBackend(store))
    await registry.register(record(A))
    await registry.register_room(5, LeaderId(A), ttl_s=600)
    clock.advance(11.0)
    assert store.room(5) is None
    keeping = asyncio.create_task(registry.keep_alive())
    assert await registry.resolve_room(5, DEADLINE_S) == LeaderId(A)
    keeping.cancel()
    await registry.aclose()


async def test_between_many_rooms_an_instance_says_that_it_lives_and_goes_on_where_it_stopped() -> None:
    backend, clock = Answers(), VirtualClock()
    registry = registry_on(backend, clock, ttl_s=30.0)
    rooms = range(5, 30)
    await registry.register(record(A))
    for room in rooms:
        await registry.register_room(room, LeaderId(A), ttl_s=600)
    backend.rooms.clear()
    normal = backend.put_room
    away = [None, None, BootstrapUnreachable("away"), None]

    async def put_room(room: int, record: RoomRecord) -> None:
        clock.advance(4.0)
        if away and (error := away.pop()) is not None:
            raise error
        await normal(room, record)

    backend.put_room, backend.epoch = put_room, "second"  # type: ignore[method-assign]
    await registry.register(record(A))
    ranks = len(backend.ranks)
    keeping = asyncio.create_task(registry.keep_alive())
    await until(backend, lambda: len(backend.rooms) == len(rooms))
    assert sorted(room for room, _ in backend.rooms) == [*rooms], "each once"
    assert len(backend.ranks) - ranks >= len(rooms) // 3
    keeping.cancel()


class Mortal:
    """A registry that dies at some of its queries, and is there again at once, empty: `before` it hears one,
    `unanswered` when it has done what that says, or `answered` when it has said so."""

    def __init__(self, how: str) -> None:
        self.how = how
        self._alive = StoreBackend(RegistryStore(VirtualClock(), ttl_s=60.0))
        self.live(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._alive, name)

    def live(self, dies_at: Collection[int]) -> None:
        """Die at those of the queries from now on; `over` when all of these have come."""
        self.queries, self.dies_at, self.over = 0, set(dies_at), asyncio.Event()

    async def _die(self) -> None:
        last, self._alive = self._alive, StoreBackend(RegistryStore(VirtualClock(), ttl_s=60.0))
        await last.close()  # who waits hears that it has ended
        if not self.dies_at:
            self.over.set()

    async def _query(self, work: Coroutine[Any, Any, T], how: str = "") -> T:
        self.queries += 1
        how = (how or self.how) if self.queries in self.dies_at else ""
        self.dies_at.discard(self.queries)
        if how == "before":
            work.close()
            await self._die()
            raise BootstrapUnreachable("it was killed")
        try:
            return await work
        finally:
            if how:
                await self._die()
            if how == "unanswered":
                raise BootstrapUnreachable("it was killed")

    async def put_rank(self, record: InstanceRecord) -> Registered:
        return await self._query(self._alive.put_rank(record))

    async def put_room(self, room: int, record: RoomRecord) -> None:
        await self._query(self._alive.put_room(room, record))

    async def room(self, room: int, wait_s: float) -> LeaderId | None:
        return await self._query(self._alive.room(room, wait_s), "before")  # else it has what it asks for


@pytest.mark.parametrize("how", ["before", "unanswered", "answered"])
def test_whenever_a_registry_dies_every_room_is_found(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Two ranks of one instance, with any earlier messages: the registry is killed at each query of theirs
    and of the readers of rooms, and at each pair of these."""
    monkeypatch.setattr("segue.server.registry.client.LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr("segue.server.registry.client.Backoff", lambda longest_s: Backoff(0.0, longest_s))

    async def main(dies_at: Collection[int]) -> int:
        backend = Mortal(how)
        ranks = [registry_on(backend) for _ in range(2)]
        decode = registry_on(backend)
        decode._longest_s = DEADLINE_S
        for rank, client in enumerate(ranks):
            await client.register(record(A, dp_rank=rank, dp_size=2))
            await client.register_room(rank + 5, LeaderId(A, rank), ttl_s=600.0)
        backend.live(dies_at)
        asking = [asyncio.create_task(decode.resolve_room(room, DEADLINE_S)) for room in (7, 8)]
        keeping = [asyncio.create_task(client.keep_alive()) for client in ranks]
        telling = [
            asyncio.create_task(client.register_room(rank + 7, LeaderId(A, rank), ttl_s=600.0))
            for rank, client in enumerate(ranks)
        ]
        found = await asyncio.gather(*asking)
        queries = backend.queries
        if dies_at:
            await asyncio.wait_for(backend.over.wait(), DEADLINE_S)
        found += [await decode.resolve_room(room, DEADLINE_S) for room in (5, 6, 7, 8)]
        assert found == [LeaderId(A, 0), LeaderId(A, 1)] * 3, dies_at
        await asyncio.gather(*telling)
        assert not any(task.done() for task in keeping), dies_at
        for task in keeping:
            task.cancel()
        await decode.aclose()
        return queries

    queries = asyncio.run(main(()))
    assert queries >= 6
    times = range(1, queries + 5)
    for dies_at in [*((one,) for one in times), *itertools.combinations(times, 2)]:
        asyncio.run(main(dies_at))


async def test_rooms_that_are_remembered_are_bounded_and_those_that_are_over_make_room() -> None:
    backend, clock = Answers(), VirtualClock()
    registry = registry_on(backend, clock, max_transfers=2)
    for room, ttl_s in ((5, 10.0), (6, 30.0), (7, 30.0)):
        await registry.register_room(room, LeaderId(A), ttl_s=ttl_s)
    assert sorted(registry._rooms) == [5, 6]
    clock.advance(20.0)
    await registry.register_room(8, LeaderId(A), ttl_s=30.0)
    assert sorted(registry._rooms) == [6, 8]


@pytest.mark.usefixtures("_short_pauses")
async def test_a_watch_that_has_shown_a_list_survives_what_would_have_ended_its_beginning() -> None:
    backend = Answers()
    registry = registry_on(backend)
    backend.lists += [
        BootstrapUnreachable("away"),
        InstanceList(version=1, epoch="e", age_s=1.0, instances=[record(A), record(B, dp_size=2)]),
        Unauthorized("the secret is being changed"),
        InstanceList(version=2, epoch="e", age_s=1.0, instances=[record(A)]),
        InstanceList(version=3, epoch="e", age_s=1.0, instances=[]),
    ]
    watch = registry.watch()
    assert names(await soon(anext(watch))) == [A], "and nobody whose ranks are not all there"
    assert await soon(anext(watch)) == [], "the same list is no news"
    backend.lists.append(PeerRefused("no registry"))
    with pytest.raises(PeerRefused):
        await soon(anext(registry.watch()))


def answer(epoch: str, age_s: float, *there: InstanceRecord) -> InstanceList:
    return InstanceList(version=1, epoch=epoch, age_s=age_s, instances=list(there))


def test_an_instance_of_which_a_young_registry_knows_fewer_ranks_stands_as_it_was() -> None:
    clock = VirtualClock()
    view = InstanceView(10.0, clock)
    ranks = [record(A, dp_rank=rank, dp_size=2).replicas[0] for rank in range(2)]
    whole = record(A, dp_size=2, replicas=ranks)
    half = record(A, dp_size=2, replicas=ranks[:1], complete=True)
    assert view.merge(answer("first", 99.0, whole)) == [whole]
    assert view.merge(answer("first", 99.0, half)) == [half], "one and the same registry is believed at once"
    assert view.merge(answer("first", 99.0, whole)) == [whole]
    assert view.merge(answer("second", 1.0, half)) == [whole]
    unready = record(A, dp_size=2, replicas=ranks[:1])
    assert view.merge(answer("second", 1.0, unready)) == [whole]
    clock.advance(9.0)
    assert view.merge(answer("second", 10.0, half)) == [half]


def test_a_registry_that_is_old_is_believed_at_once_also_by_who_did_not_know_its_life() -> None:
    view = InstanceView(10.0, VirtualClock())
    view.merge(answer("first", 99.0, record(A), record(B)))
    assert names(view.merge(answer("second", 10.0, record(B)))) == [B]
    assert view.wait_s(30.0) == 30.0
