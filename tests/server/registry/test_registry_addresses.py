"""A list of addresses or a name in the place of a registry: the instances say who they are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from registry_records import DEADLINE_S, SECRET, A, B, C, names, record

from segue.kv.errors import ConfigError, InvalidRequest, SegueError
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.node import SessionNode
from segue.server.messages.operate import OperatorMessage
from segue.server.registry import address_backend
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord
from segue.server.settings.registry_address import EtcdUser, check_url, registry_places, registry_user

#: An address that is slow to answer is waited for: nobody is shown without it.
LIMITS = Limits(connect_s=60.0, handshake_s=60.0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_backend, "AGAIN_S", 0.05)


class Rank:
    """The sessions of one rank of an instance with those who ask who it is."""

    def __init__(
        self,
        said: InstanceRecord,
        me: LeaderId | None = None,
        secret: bytes = SECRET,
        role: Role | None = None,
    ) -> None:
        self._said = said
        self.node = SessionNode(
            me=me or LeaderId(said.incarnation, said.replicas[0].dp_rank),
            role=role or said.role,
            secret=secret,
            handlers={Role.OPERATOR: self},
            message_type=OperatorMessage,
            limits=LIMITS,
        )

    async def listen(self, port: int = 0) -> int:
        return int((await self.node.listen("127.0.0.1", port))[1])

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(self._said)

    def accept(self, peer: PeerInfo) -> None: ...

    def opened(self, session: Session) -> None: ...

    def received(self, session: Session, message: object) -> None: ...

    def closed(self, session: Session, error: SegueError) -> None: ...


@asynccontextmanager
async def client(url: str) -> AsyncIterator[RegistryClient]:
    registry = RegistryClient(url, secret=SECRET, limits=LIMITS)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield registry
    finally:
        await registry.aclose()


def static(*ports: int) -> str:
    return "static://" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def test_an_instance_is_shown_once_all_its_addresses_answer_and_without_those_that_end() -> None:
    ranks = [Rank(record(A, dp_rank=rank, dp_size=2)) for rank in range(2)]
    ports = [await rank.listen() for rank in ranks]
    other = Rank(record(B))
    third = Rank(record(C))
    async with client(static(*ports, await third.listen(), await other.listen())) as registry:
        watch = registry.watch()
        seen = await anext(watch)
        assert names(seen) == [A, B, C]
        assert seen[0].complete
        await ranks[0].node.close()
        assert [r.dp_rank for r in (await anext(watch))[0].replicas] == [1]
        # What is left of an instance that was whole serves on, whatever else changes.
        await third.node.close()
        assert names(await anext(watch)) == [A, B]
        await ranks[1].node.close()
        assert names(await anext(watch)) == [B]
        # Another incarnation comes at the address of the first rank.
        again = Rank(record(A.replace("a", "d"), dp_size=1))  # type: ignore[arg-type]
        await again.listen(ports[0])
        assert names(await anext(watch)) == [B, "d" * 32]
        assert registry.backend._complete == {B, "d" * 32}, "who is gone is forgotten"  # type: ignore[attr-defined]
        for rank in (again, other):
            await rank.node.close()


async def test_a_name_stands_for_all_addresses_that_it_resolves_to_at_the_time() -> None:
    rank = Rank(record(A))
    port = await rank.listen()
    known: list[str] = []

    async def getaddrinfo(name: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        if not known:
            raise OSError("Name or service not known")
        return [(0, 0, 0, "", (host, port)) for host in known]

    asyncio.get_running_loop().getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
    async with client(f"dns://segue.internal:{port}") as registry:
        watch = registry.watch()
        assert await anext(watch) == [], "nobody yet, which is no error"
        known += ["127.0.0.1", "127.0.0.2"]
        assert names(await anext(watch)) == [A]
        known.remove("127.0.0.1")
        assert await anext(watch) == []
    await rank.node.close()


async def test_instances_stay_while_nobody_answers_for_their_name() -> None:
    rank, asked = Rank(record(A)), asyncio.Semaphore(0)
    port, away = await rank.listen(), False

    async def getaddrinfo(name: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        asked.release()
        if away:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    asyncio.get_running_loop().getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
    async with client(f"dns://segue.internal:{port}") as registry:
        watch = registry.watch()
        assert names(await anext(watch)) == [A]
        away = True
        for _ in range(4):
            await asked.acquire()
        assert names(await anext(registry.watch())) == [A]
        await rank.node.close()
        assert await anext(watch) == []


async def test_who_has_another_secret_or_the_record_of_somebody_else_is_not_shown() -> None:
    stranger, liar = Rank(record(A), secret=b"a secret of others"), Rank(record(B), me=LeaderId(C))
    true, other = Rank(record(C, dp_rank=0)), Rank(record(B), role=Role.DECODE)
    ranks = (stranger, liar, true, other)
    async with client(static(*[await rank.listen() for rank in ranks])) as registry:
        assert names(await anext(registry.watch())) == [C]
    for rank in ranks:
        await rank.node.close()


async def test_all_that_serve_are_found_and_whoever_asks_for_one_role_is_shown_that_one() -> None:
    roles = {A: Role.PREFILL, B: Role.DECODE, C: Role.UNIFIED}
    ranks = [Rank(record(who, role=role)) for who, role in roles.items()]
    async with client(static(*[await rank.listen() for rank in ranks])) as registry:
        assert names(await anext(registry.watch())) == [A, B, C]
        for who, role in roles.items():
            assert names(await anext(registry.watch(role))) == [who]
    for rank in ranks:
        await rank.node.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "a client that was closed dials nobody any more"


async def test_whoever_goes_is_off_the_list_at_once_and_not_with_the_next_look() -> None:
    address_backend.AGAIN_S = 3600.0  # the fixture sets it back
    ranks = [Rank(record(who)) for who in (A, B)]
    async with client(static(*[await rank.listen() for rank in ranks])) as registry:
        watch = registry.watch()
        assert names(await anext(watch)) == [A, B]
        await ranks[1].node.close()
        assert names(await anext(watch)) == [A]
    await ranks[0].node.close()


async def test_no_more_sessions_are_opened_than_addresses_may_be_named() -> None:
    address_backend.MAX_ADDRESSES, most = 2, address_backend.MAX_ADDRESSES
    try:
        with pytest.raises(ConfigError, match="names 3 addresses; 2 are the most"):
            RegistryClient(static(1, 2, 3), secret=SECRET, limits=LIMITS)
        ranks = [Rank(record(who)) for who in (A, B, C)]
        _, port = await ranks[0].node.listen("127.0.0.1", 0)
        for at, rank in enumerate(ranks[1:], start=2):
            await rank.node.listen(f"127.0.0.{at}", port)

        async def getaddrinfo(name: str, port: int, **_: object) -> list[tuple[Any, ...]]:
            hosts = [f"127.0.0.{at}" for at in (3, 2, 1, 1)] if name == "segue.internal" else [name]
            return [(0, 0, 0, "", (host, port)) for host in hosts]

        asyncio.get_running_loop().getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
        async with client(f"dns://segue.internal:{port}") as registry:
            assert names(await anext(registry.watch())) == [A, B]
        for rank in ranks:
            await rank.node.close()
    finally:
        address_backend.MAX_ADDRESSES = most


async def test_instances_start_with_nobody_there_and_rooms_are_refused_with_what_to_do() -> None:
    async with client(static(1)) as registry:
        await registry.register(record(A))
        await registry.set_draining(True)
        with pytest.raises(InvalidRequest, match="--load-balance follow_bootstrap_room"):
            await registry.register_room(5, LeaderId(A), ttl_s=5)
        with pytest.raises(InvalidRequest, match="name the rank"):
            await registry.resolve_room(5, 1)
        await registry.leave(LeaderId(A))


@pytest.mark.parametrize(
    "url",
    [
        *("etcd://", "etcd://host", "etcd://a:1,b", "static://", "static://a:1,,b:2", "dns://a:1,b:2"),
        *("dns://name", "http://a:1,b:2", "zookeeper://a:1", "static://a:70000", "a:1"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_forms_that_there_are(url: str) -> None:
    with pytest.raises(ConfigError, match="etcd://HOST:PORT"):
        check_url(url, encrypted=False)


def test_the_user_of_an_etcd_has_a_file_with_a_password_beside_the_addresses() -> None:
    url = "etcd://segue@10.0.0.1:1,10.0.0.2:2?password-file=/run/etcd"
    check_url(url, encrypted=False)
    assert registry_places(url) == [("10.0.0.1", 1), ("10.0.0.2", 2)]
    assert registry_user(url) == EtcdUser("segue", "/run/etcd")
    assert registry_user("etcd://10.0.0.1:1") is None
    for wrong in (
        "etcd://segue@a:1",
        "etcd://a:1?password-file=/run/etcd",
        "etcd://segue@a:1?password-file=etcd",
        "etcd://segue@a:1?pass=/run/etcd",
        "etcd://segue:word@a:1?password-file=/run/etcd",
    ):
        with pytest.raises(ConfigError, match="an etcd with users must look like"):
            check_url(wrong, encrypted=False)
    for other in ("http://segue@a:1", "static://segue@a:1", "dns://a:1?password-file=/x"):
        with pytest.raises(ConfigError, match="must look like"):
            check_url(other, encrypted=False)


def test_addresses_of_ipv6_stand_in_brackets() -> None:
    assert registry_places("static://[::1]:5,10.0.0.1:6") == [("::1", 5), ("10.0.0.1", 6)]


async def test_an_instance_that_ends_its_session_as_it_opens_is_dialled_again() -> None:
    """Its end is heard before whoever dialled it is told that there is a session."""

    class Once(Rank):
        ended = 0

        def opened(self, session: Session) -> None:
            if not self.ended:
                self.ended += 1
                session.close()

    # The smaller leader decides, so that its last word comes together with its end.
    rank = Once(record(A.replace("a", "0")))  # type: ignore[arg-type]
    async with client(static(await rank.listen())) as registry:
        watch = registry.watch()
        seen = await anext(watch)
        while not seen:
            seen = await anext(watch)
        assert names(seen) == ["0" * 32]
        assert rank.ended == 1
    await rank.node.close()


async def test_what_was_said_of_addresses_is_kept_for_a_bounded_number_of_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to others each time, say: nobody answers at any of them."""
    monkeypatch.setattr(address_backend, "MAX_ADDRESSES", 4)
    caplog.set_level("INFO", "segue.server.registry")

    async with client(static(1)) as registry:
        backend = registry.backend
        assert isinstance(backend, address_backend.AddressBackend)
        for number in range(20):
            backend._say(("10.0.0.1", number), "refused")
            backend._say(("10.0.0.1", number), "refused")
            assert len(backend._said) <= 8
    assert len([m for m in caplog.messages if "10.0.0.1" in m]) == 20
