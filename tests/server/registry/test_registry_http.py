"""The registry's HTTP API: authentication, bounds, typed errors, waiting."""

from __future__ import annotations

import asyncio
import pickle
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_records import DEADLINE_S, SECRET, A, B, record

from segue.kv.clock import VirtualClock
from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ConfigError,
    Draining,
    ErrorCode,
    OutOfCapacity,
    PeerRefused,
    SegueError,
    Unauthorized,
)
from segue.kv.ids import LeaderId, Role
from segue.kv.io import MonotonicClock
from segue.kv.limits import Limits
from segue.server.http.guarded_http import ErrorBody
from segue.server.registry import backends
from segue.server.registry.backends import HttpBackend
from segue.server.registry.message_headers import DIGEST_HEADER, bearer_token, digest_of
from segue.server.registry.registry_records import InstanceList, RoomRecord
from segue.server.registry.registry_server import MAX_BODY_BYTES, MAX_WAIT_S, registry_app, serve
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import StoreBackend
from tls_files import Authority


@asynccontextmanager
async def api(
    secret: bytes | None = None, *, token: str | None = None, client: tuple[str, int] = ("127.0.0.1", 1)
) -> AsyncIterator[tuple[httpx.AsyncClient, RegistryStore]]:
    store = RegistryStore(MonotonicClock(), ttl_s=600.0)
    backend = StoreBackend(store)
    app = registry_app(backend, secret)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    transport = httpx.ASGITransport(app=app, client=client)
    async with httpx.AsyncClient(transport=transport, base_url="http://registry", headers=headers) as http:
        yield http, store
    await backend.close()


def code(answer: httpx.Response) -> ErrorCode:
    return ErrorCode(answer.json()["error"]["code"])


def rank(incarnation: str = A, dp_rank: object = 0) -> str:
    return f"/v1/instances/{incarnation}/ranks/{dp_rank}"


async def test_an_alert_after_the_handshake_is_a_registry_that_may_not_accept_our_certificate(
    tmp_path: Path,
) -> None:
    def alert(request: httpx.Request) -> httpx.Response:
        error = ssl.SSLError(1, "[SSL: SSLV3_ALERT_BAD_CERTIFICATE] sslv3 alert bad certificate")
        error.reason = "SSLV3_ALERT_BAD_CERTIFICATE"
        raise error

    tls, transport = Authority(tmp_path).issue().load(), httpx.MockTransport(alert)
    backend = HttpBackend("https://127.0.0.1:1", None, Limits(), tls, transport)
    with pytest.raises(BootstrapUnreachable, match=r"bad certificate.*; it may not accept our"):
        await backend.instances(None, None, 1.0)
    await backend.close()


async def test_register_list_drain_and_leave() -> None:
    async with api() as (http, _):
        body = msgspec.json.encode(record())
        assert (await http.put(rank(), content=body)).status_code == 200
        assert (await http.put(rank(), content=body)).status_code == 200
        await http.put(f"/v1/instances/{A}/draining", json={"draining": True})
        answer = await http.get("/v1/instances", params={"role": "prefill"})
        (instance,) = msgspec.json.decode(answer.content, type=InstanceList).instances
        assert instance.ready
        assert instance.draining
        assert not (await http.get("/v1/instances?role=decode")).json()["instances"]
        assert (await http.delete(rank())).status_code == 200
        assert not (await http.get("/v1/instances")).json()["instances"]
        assert (await http.get("/v1/health")).json() == {"status": "ok"}
        assert (await http.get("/ready")).json() == {"ready": True, "reason": "ready"}


async def test_a_query_that_was_changed_on_its_way_does_nothing_and_may_be_repeated() -> None:
    async with api() as (http, store):
        body = msgspec.json.encode(record())
        digest, version = digest_of(b"PUT " + rank().encode(), body), store.version
        for path, content in (
            (rank(), body.replace(b"127.0.0.1", b"127.0.0.3")),
            (rank(dp_rank=1), body),
        ):
            answer = await http.put(path, content=content, headers={DIGEST_HEADER: digest})
            assert code(answer) is ErrorCode.CHECKSUM_MISMATCH
            assert answer.json()["error"]["retryable"]
        assert (await http.get("/v1/instances", headers={DIGEST_HEADER: digest})).status_code == 500
        await http.put(rank(), content=body)
        version = store.version
        for path in (rank(), rank(dp_rank=1)):  # another rank would leave in the place of the one
            answer = await http.delete(path, headers={DIGEST_HEADER: digest})
            assert code(answer) is ErrorCode.CHECKSUM_MISMATCH
        for method, path, content in (
            ("PUT", rank().replace("ranks", "ranku"), body),
            ("GET", "/v1/instancds", b""),
            ("DELETE", "/w1/instances", b""),
        ):
            headers = {DIGEST_HEADER: digest}
            answer = await http.request(method, path, content=content, headers=headers)
            assert code(answer) is ErrorCode.CHECKSUM_MISMATCH, path
        assert store.version == version
        right = {DIGEST_HEADER: digest_of(b"GET /v1/nothing", b"")}
        assert code(await http.get("/v1/nothing", headers=right)) is ErrorCode.NOT_FOUND
        assert (await http.put(rank(), content=body, headers={DIGEST_HEADER: digest})).status_code == 200
        answer = await http.get("/v1/instances")
        assert answer.headers[DIGEST_HEADER] == digest_of(b"200", answer.content)


async def test_a_secret_of_which_one_bit_was_changed_on_its_way_is_no_wrong_secret() -> None:
    asked = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        if asked > 1:
            return httpx.Response(200, content=b"{}")
        error = Unauthorized("the registry needs the deployment's secret")
        return httpx.Response(401, content=msgspec.json.encode(ErrorBody(error.info)))

    backend = HttpBackend("http://r:1", SECRET, Limits(), None, httpx.MockTransport(answer))
    await backend.put_room(5, RoomRecord(incarnation=A, dp_rank=0, ttl_s=1.0))
    assert asked == 2
    await backend.close()


@pytest.mark.parametrize("cls", [c for c in SegueError.__subclasses__() if c is not Unauthorized])
async def test_every_other_error_is_an_answer_and_the_caller_decides_whether_it_is_asked_again(
    cls: type[SegueError],
) -> None:
    asked = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        body = msgspec.json.encode(ErrorBody(cls("because").info))
        return httpx.Response(
            cls.status, content=body, headers={DIGEST_HEADER: digest_of(b"%d" % cls.status, body)}
        )

    backend = HttpBackend("http://r:1", SECRET, Limits(), None, httpx.MockTransport(answer))
    with pytest.raises(cls, match="because"):
        await backend.delete(LeaderId(A))
    assert asked == 1
    await backend.close()


class Endless(httpx.AsyncByteStream):
    """So many pieces of 64 KiB, after which nothing comes and the answer does not end."""

    def __init__(self, count: int) -> None:
        self.count, self.sent = count, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.count):
            self.sent += 1
            yield b"x" * 2**16
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("count", "status", "error", "sent"),
    [(100, 200, PeerRefused, 17), (100, 503, PeerRefused, 17), (3, 200, BootstrapTimeout, 3)],
    ids=["large", "large error", "slow"],
)
async def test_an_answer_has_a_bound_and_one_deadline(
    count: int, status: int, error: type[SegueError], sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read had a limit of its own, and nothing counted the bytes."""
    monkeypatch.setattr(backends, "MAX_ANSWER", 2**20)

    body, asked = Endless(count), list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Accept-Encoding"])
        return httpx.Response(status, stream=body)

    limits = Limits(connect_s=0.05)
    backend = HttpBackend("http://r:1", SECRET, limits, None, httpx.MockTransport(answer))
    with pytest.raises(error):
        await asyncio.wait_for(backend.instances(None, None, 0.0), DEADLINE_S)
    assert (body.sent, asked) == (sent, ["identity"])
    await backend.close()


@pytest.mark.parametrize(
    "token", [None, "", "wrong", bearer_token(b"another secret!!"), SECRET.decode(), "é"]
)
async def test_lesson_18_nothing_is_registered_without_the_secret(token: str | None) -> None:
    async with api(SECRET) as (http, store):
        headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
        calls = [
            ("PUT", rank(), msgspec.json.encode(record())),
            ("GET", "/v1/instances", b""),
            ("DELETE", rank(), b""),
            ("PUT", f"/v1/instances/{A}/draining", b'{"draining": true}'),
            ("PUT", "/v1/rooms/5", b"{}"),
            ("GET", "/v1/rooms/5", b""),
        ]
        for method, path, body in calls:
            answer = await http.request(method, path, content=body, headers=headers)
            assert answer.status_code == 401, path
            assert code(answer) is ErrorCode.UNAUTHORIZED
        assert not store.instances().instances
        assert (await http.get("/v1/health")).status_code == 200


async def test_with_the_secret_also_another_machine_is_answered_and_without_one_none_is() -> None:
    far = ("10.1.2.3", 5)
    async with api(SECRET, token=bearer_token(SECRET), client=far) as (http, _):
        assert (await http.get("/v1/instances")).status_code == 200
    async with api(None, client=far) as (http, _):
        answer = await http.get("/v1/instances")
        assert answer.status_code == 401
        assert "own machine" in answer.json()["error"]["text"]


BAD_BODIES = {
    "no json": b"hello",
    "empty": b"",
    "not an object": b"[]",
    "wrong type": b'{"incarnation": 3}',
    "unknown role": msgspec.json.encode(record()).replace(b'"prefill"', b'"chef"'),
    "no port": msgspec.json.encode(record()).replace(b'"port"', b'"harbour"'),
    "text for a number": msgspec.json.encode(record()).replace(b"9000", b'"9000"'),
    "huge number": msgspec.json.encode(record()).replace(b"9000", b"9" * 400),
    "deep nesting": b"[" * 50_000,
    "invalid utf-8": msgspec.json.encode(record()).replace(b"smollm2", b"\xff\xfe\x00"),
    "pickle": pickle.dumps({"incarnation": A}),
    "another incarnation": msgspec.json.encode(record(B)),
}


@pytest.mark.parametrize("body", BAD_BODIES)
async def test_lesson_17_a_wrong_body_is_a_clear_400(body: str) -> None:
    async with api() as (http, store):
        answer = await http.put(rank(), content=BAD_BODIES[body])
        assert answer.status_code == 400, answer.text
        assert code(answer) is ErrorCode.INVALID_REQUEST
        assert answer.json()["error"]["text"]
        assert not store.instances().instances
        assert (await http.put(rank(), content=msgspec.json.encode(record()))).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/instances?role=chef", 400),
        ("GET", "/v1/instances?version=x", 400),
        ("GET", "/v1/instances?wait_s=-1", 400),
        ("GET", "/v1/instances?wait_s=nan", 400),
        ("GET", "/v1/instances?wait_s=1e999", 400),
        ("GET", "/v1/rooms/five", 400),
        ("GET", "/v1/rooms/5", 504),
        ("PUT", rank(A, "x"), 400),
        ("PUT", rank(A, 1), 400),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/instances", 404),
        ("GET", "/", 404),
    ],
)
async def test_wrong_questions_have_typed_answers(method: str, path: str, status: int) -> None:
    async with api() as (http, _):
        body = msgspec.json.encode(record()) if method == "PUT" else b""
        answer = await http.request(method, path, content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["text"]


async def test_a_bug_is_answered_as_one_by_a_registry_and_not_as_by_something_else() -> None:
    async with api() as (http, store):
        store.register = lambda *_: {}["a bug"]  # type: ignore[method-assign, index]
        answer = await http.put(rank(), content=msgspec.json.encode(record()))
        assert (answer.status_code, code(answer)) == (500, ErrorCode.INTERNAL)
        assert "a bug" not in answer.text
        assert (await http.get("/v1/instances")).status_code == 200


async def test_no_query_waits_longer_than_any_may() -> None:
    asked: list[float] = []

    class Asked(StoreBackend):
        async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
            asked.append(wait_s)
            return self.store.instances(role)

        async def room(self, room: int, wait_s: float) -> LeaderId | None:
            asked.append(wait_s)
            return LeaderId(A)

    store = RegistryStore(MonotonicClock(), ttl_s=600.0)
    transport = httpx.ASGITransport(
        app=registry_app(Asked(store), None),
        client=("127.0.0.1", 1),
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as http:
        for path in ("/v1/instances", "/v1/rooms/5"):
            for wait_s in ("", "?wait_s=7", "?wait_s=1e9"):
                assert (await http.get(path + wait_s)).status_code == 200
    assert asked == [0.0, 7.0, MAX_WAIT_S] * 2


async def test_a_body_beyond_the_bound_is_413() -> None:
    async with api() as (http, _):
        answer = await http.put(rank(), content=b" " * (MAX_BODY_BYTES + 1))
        assert answer.status_code == 413


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=120), st.sampled_from(["/v1/rooms/5", rank(), f"/v1/instances/{A}/draining"]))
def test_lesson_17_no_body_breaks_the_registry(body: bytes, path: str) -> None:
    async def main() -> None:
        async with api() as (http, _):
            answer = await http.put(path, content=body)
            assert answer.status_code == 400

    asyncio.run(main())


async def test_a_topology_query_waits_for_the_next_change_and_no_longer() -> None:
    async with api() as (http, store):
        seen = (await http.get("/v1/instances")).json()["version"]
        query = {"version": seen, "wait_s": DEADLINE_S}
        waiting = asyncio.create_task(http.get("/v1/instances", params=query))
        await _until_subscribed(store)
        store.register(record(), 0)
        answer = msgspec.json.decode((await waiting).content, type=InstanceList)
        assert [i.incarnation for i in answer.instances] == [A]
        assert answer.version != seen
        late = await http.get("/v1/instances", params={"version": answer.version, "wait_s": 0.01})
        assert late.json()["version"] == answer.version
        assert not store.subscribed(0)


async def test_a_room_query_is_released_by_its_registration() -> None:
    async with api() as (http, store):
        store.register(record(dp_size=4), 0)
        last = f"/v1/rooms/{2**64 - 1}"
        waiting = asyncio.create_task(http.get(f"{last}?wait_s={DEADLINE_S}"))
        await _until_subscribed(store, 2**64 - 1)
        body = msgspec.json.encode(RoomRecord(incarnation=A, dp_rank=3, ttl_s=600))
        assert (await http.put("/v1/rooms/7", content=body)).status_code == 200
        assert not waiting.done()
        assert (await http.put(last, content=body)).status_code == 200
        assert msgspec.json.decode((await waiting).content, type=LeaderId) == LeaderId(A, 3)
        other = msgspec.json.encode(RoomRecord(incarnation=A, dp_rank=1, ttl_s=600))
        assert (await http.put("/v1/rooms/7", content=other)).status_code == 409


async def _until_subscribed(store: RegistryStore, topic: int = 0, count: int = 1) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while store.subscribed(topic) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_waiting_queries_are_bounded_and_released_by_the_stop() -> None:
    store = RegistryStore(MonotonicClock(), ttl_s=10.0)
    backend = StoreBackend(store, max_waiters=2)
    waits = [asyncio.create_task(backend.room(n, DEADLINE_S)) for n in (1, 2)]
    await _until_subscribed(store, 2)
    with pytest.raises(OutOfCapacity):
        await backend.room(3, DEADLINE_S)
    await backend.close()
    with pytest.raises(Draining):  # one that comes while the server stops must not hold it up
        await backend.room(3, DEADLINE_S)
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(r).__name__ for r in results] == ["Draining", "Draining"]
    assert not store.subscribed()


async def test_a_query_whose_time_is_over_gives_its_place_back_and_one_without_a_wait_needs_none() -> None:
    store = RegistryStore(MonotonicClock(), ttl_s=10.0)
    backend = StoreBackend(store, max_waiters=1)
    seen = store.instances().version
    for _ in range(2):
        assert await backend.room(1, 0.01) is None
        assert (await backend.instances(None, seen, 0.01)).version == seen
    held = asyncio.create_task(backend.room(2, DEADLINE_S))
    await _until_subscribed(store, 2)
    assert await backend.room(1, 0.0) is None
    assert (await backend.instances(None, None, DEADLINE_S)).version == seen
    with pytest.raises(OutOfCapacity):
        await backend.instances(None, seen, DEADLINE_S)
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert not store.subscribed(2)
    assert await backend.room(1, 0.01) is None
    await backend.close()


async def test_expiry_wakes_a_waiting_query_by_itself() -> None:
    clock = VirtualClock()
    store = RegistryStore(clock, ttl_s=10.0)
    backend = StoreBackend(store, clock)
    store.register(record(), 0)
    seen = store.instances()
    waiting = asyncio.create_task(backend.instances(None, seen.version, DEADLINE_S))
    await _until_subscribed(store)
    clock.advance(10.1)
    gone = await waiting
    assert seen.instances
    assert not gone.instances
    await backend.close()


async def test_a_client_that_goes_away_leaves_no_waiting_query_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "segue.server.registry.registry_server.MAX_WAIT_S", 3600.0
    )  # it does not end by itself

    server = await serve("127.0.0.1", 0, secret=None, limits=Limits())
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET /v1/rooms/9?wait_s=3600 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await _until_subscribed(server.store, 9)
    before = server.store.subscribed()
    writer.close()
    await writer.wait_closed()
    await _until_subscribed(server.store, 9, 0)
    assert server.store.subscribed() == before - 1, "more than its own query has ended"
    await server.close()
    assert not server.store.subscribed()


async def test_who_waits_while_the_registry_stops_is_told_so() -> None:
    server = await serve("127.0.0.1", 0, secret=None, limits=Limits())
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as http:
        waiting = asyncio.create_task(http.get("/v1/rooms/9?wait_s=30"))
        await _until_subscribed(server.store, 9)
        await server.close()
        assert code(await waiting) is ErrorCode.DRAINING


async def test_as_many_may_wait_as_the_queue_of_requests_says_and_not_as_a_batch_does() -> None:
    limits = Limits(max_queue=2, max_batch=1)
    server = await serve("127.0.0.1", 0, secret=None, limits=limits)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as http:
        waiting = [asyncio.create_task(http.get(f"/v1/rooms/{n}?wait_s=30")) for n in range(1, 9)]
        for n in range(1, 9):
            await _until_subscribed(server.store, n)
        assert code(await http.get("/v1/rooms/9?wait_s=30")) is ErrorCode.OUT_OF_CAPACITY
        assert not any(one.done() for one in waiting)
        await server.close()
        await asyncio.gather(*waiting)


async def test_serving_refuses_a_port_in_use_and_a_wide_host_without_a_secret() -> None:
    server = await serve("127.0.0.1", 0, secret=None, limits=Limits())
    with pytest.raises(ConfigError, match=f"port {server.port} at 127.0.0.1 is in use"):
        await serve("127.0.0.1", server.port, secret=None, limits=Limits())
    with pytest.raises(ConfigError, match="secret"):
        await serve("0.0.0.0", 0, secret=None, limits=Limits())
    await server.close()
    # The port is free at once, and nothing of the first server is left in the loop.
    again = await serve("127.0.0.1", server.port, secret=None, limits=Limits())
    await again.close()
    with socket.socket() as probe:
        probe.settimeout(1)
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    assert len(asyncio.all_tasks()) == 1
