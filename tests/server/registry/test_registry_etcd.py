"""The registry on a real etcd: restarts, pauses, compaction, leases and data that are lost."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from etcd_server import EtcdServer, needs_etcd
from registry_records import SECRET, A, B, names, record

from segue.kv.errors import (
    BootstrapUnreachable,
    ConfigError,
    SegueError,
    Unauthorized,
)
from segue.kv.ids import LeaderId
from segue.kv.limits import Limits
from segue.kv.session.tls import Tls
from segue.server.registry.client import RegistryClient
from segue.server.registry.etcd import Etcd, Read
from segue.server.registry.etcd_backend import EtcdBackend
from segue.server.registry.registry_records import InstanceRecord
from segue.server.registry.sealed import Seal
from segue.server.settings.registry_address import registry_places
from tls_files import Authority

T = TypeVar("T")

LIMITS = Limits(registry_ttl_s=2.0, connect_s=2.0)
DEADLINE_S = 60.0
RANKS = Seal(SECRET).prefix + b"ranks/"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.kill()


class Seen:
    """The lists that a watcher got, in order."""

    def __init__(self, client: RegistryClient) -> None:
        self.lists: list[list[str]] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow(client))

    async def _follow(self, client: RegistryClient) -> None:
        async for records in client.watch():
            shown = sorted(names(records))
            if shown != (self.lists or [None])[-1]:
                self.lists.append(shown)
            self._news.set()

    async def until(self, wanted: list[str]) -> None:
        while not self.lists or self.lists[-1] != wanted:
            self._news.clear()
            await self._news.wait()


class Errors:
    """The errors that a client reported, to be waited for."""

    def __init__(self) -> None:
        self._heard = asyncio.Event()

    def __call__(self, error: SegueError) -> None:
        self._heard.set()

    async def heard(self) -> None:
        self._heard.clear()
        await self._heard.wait()


class Fleet:
    """Two instances that keep themselves alive, and a watcher, each with a client of its own."""

    def __init__(self, url: str, tls: Tls | None) -> None:
        self.instance_url = url
        self.errors, self.watch_errors = Errors(), Errors()
        self.instance, self.second = (
            RegistryClient(url, secret=SECRET, limits=LIMITS, on_error=self.errors, tls=tls) for _ in range(2)
        )
        self.watcher = RegistryClient(url, secret=SECRET, limits=LIMITS, on_error=self.watch_errors, tls=tls)
        self.others: list[RegistryClient] = []
        self.keeping: list[asyncio.Task[None]] = []

    def other(self) -> RegistryClient:
        """One more client."""
        self.others.append(RegistryClient(self.instance_url, secret=SECRET, limits=LIMITS))
        return self.others[-1]

    async def begin(self) -> Seen:
        for who, client in ((A, self.instance), (B, self.second)):
            await client.register(record(who))
            self.keeping.append(asyncio.create_task(client.keep_alive()))
        seen = Seen(self.watcher)
        await seen.until([A, B])
        return seen

    async def leave(self, seen: Seen) -> None:
        """Both leave, which is seen at once: what came before has broken nothing."""
        assert [task.done() for task in self.keeping] == [False, False]
        await self.instance.leave(LeaderId(A))
        await seen.until([B])
        await self.second.leave(LeaderId(B))
        await seen.until([])
        await asyncio.gather(*self.keeping)

    async def close(self) -> None:
        for client in (self.instance, self.second, self.watcher, *self.others):
            await client.aclose()


@asynccontextmanager
async def fleet(url: str, tls: Tls | None = None) -> AsyncIterator[Fleet]:
    one = Fleet(url, tls)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield one
    finally:
        await one.close()


def etcd(test: T) -> T:
    """A test against a server."""
    return pytest.mark.slow(needs_etcd(test))


@etcd
async def test_etcd_that_is_killed_and_started_again_shows_nobody_gone(server: EtcdServer) -> None:
    async with fleet(server.url) as one:
        seen = await one.begin()
        server.kill()
        await asyncio.gather(one.errors.heard(), one.watch_errors.heard())
        assert isinstance(one.watcher.last_error, BootstrapUnreachable)
        await asyncio.to_thread(server.start)
        await one.instance.register_room(7, LeaderId(A), ttl_s=60)
        assert await one.watcher.resolve_room(7, DEADLINE_S) == LeaderId(A)
        await one.leave(seen)
        assert seen.lists[-3:] == [[A, B], [B], []]


@etcd
async def test_etcd_that_has_lost_its_data_is_told_everything_again(server: EtcdServer) -> None:
    async with fleet(server.url) as one:
        seen = await one.begin()
        await one.instance.register_room(7, LeaderId(A), ttl_s=600)
        server.kill()
        server.forget()
        await asyncio.to_thread(server.start)
        stranger = Seen(one.other())
        await stranger.until([A, B])
        assert await one.watcher.resolve_room(7, DEADLINE_S) == LeaderId(A)
        await one.leave(seen)
        assert seen.lists[-3:] == [[A, B], [B], []], "the watcher never saw them gone"


@etcd
async def test_etcd_stopped_for_longer_than_its_leases_last_shows_nobody_gone(server: EtcdServer) -> None:
    """All leases end in the moment in which it goes on."""
    async with fleet(server.url) as one:
        seen = await one.begin()
        server.pause()
        await one.errors.heard()
        await asyncio.sleep(2 * LIMITS.registry_ttl_s)  # what is tested: leases that end meanwhile
        server.resume()
        stranger = Seen(one.other())
        await stranger.until([A, B])
        await one.leave(seen)
        assert seen.lists[-3:] == [[A, B], [B], []]


@etcd
async def test_a_lease_that_was_lost_is_taken_anew_and_who_is_silent_is_dropped(server: EtcdServer) -> None:
    async with fleet(server.url) as one:
        seen = await one.begin()
        for lease in (await asyncio.to_thread(server.ask, "lease/leases"))["leases"]:  # type: ignore[attr-defined]
            await asyncio.to_thread(server.ask, "lease/revoke", ID=lease["ID"])
        # Both come back before anybody takes them for gone; then one falls silent.
        etcd = Etcd(registry_places(server.url), LIMITS, None)
        while len((await etcd.read(RANKS)).kvs) < 2:  # noqa: ASYNC110 (what etcd holds)
            await asyncio.sleep(0.05)
        await etcd.close()
        assert [task.done() for task in one.keeping] == [False, False]
        one.keeping[0].cancel()
        await seen.until([B])
        assert seen.lists[-2:] == [[A, B], [B]]


@etcd
async def test_a_watch_from_a_compacted_revision_reads_the_list_again(server: EtcdServer) -> None:
    """The events between a list and its watch have been discarded."""
    async with fleet(server.url) as one:
        backend = one.watcher.backend
        assert isinstance(backend, EtcdBackend)
        etcd = backend._mirror._etcd
        read = etcd.read
        reads: list[int] = []

        async def late(key: bytes) -> Read:
            found = await read(key)
            reads.append(found.revision)
            if len(reads) == 1:
                await one.second.register(record(B))
                await one.second.set_draining(True)
                later = await read(key)
                await asyncio.to_thread(server.ask, "kv/compaction", revision=later.revision, physical=True)
            return found

        etcd.read = late  # type: ignore[method-assign]
        await one.instance.register(record(A))
        seen = Seen(one.watcher)
        await seen.until([A, B])
        assert reads[0] < reads[1], "the list was read again, and is not that of the first time"
        await one.second.leave(LeaderId(B))
        await seen.until([A])


@etcd
async def test_a_member_that_is_away_is_passed_over(server: EtcdServer) -> None:
    url = f"etcd://127.0.0.1:1,127.0.0.1:{server.port}"
    async with fleet(url) as one:
        seen = await one.begin()
        await one.leave(seen)


@pytest.mark.slow
@needs_etcd
def test_etcd_under_mutual_tls_serves_as_without_and_who_does_not_fit_is_told_why(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    server = EtcdServer(tmp_path, tls=ours.issue())
    wrong = {
        "cannot be reached": None,
        "may not accept our --tls-cert": others.issue(trust=ours),
        "its certificate is not valid here": ours.issue(trust=others),
    }

    async def main() -> None:
        async with fleet(server.url, ours.issue().load()) as one:
            seen = await one.begin()
            await one.instance.register_room(7, LeaderId(A), ttl_s=60)
            assert await one.watcher.resolve_room(7, DEADLINE_S) == LeaderId(A)
            for says, files in wrong.items():
                tls = None if files is None else files.load()
                other = RegistryClient(server.url, secret=SECRET, limits=LIMITS, tls=tls)
                with pytest.raises((BootstrapUnreachable, Unauthorized), match=says):
                    await other.register(record(B, port=9001))
                await other.aclose()
            server.kill()
            await asyncio.gather(one.errors.heard(), one.watch_errors.heard())
            await asyncio.to_thread(server.start)
            await one.leave(seen)

    server.start()
    try:
        asyncio.run(main())
    finally:
        server.kill()


@etcd
async def test_etcd_with_users_serves_who_has_the_password_also_after_tokens_are_lost(
    server: EtcdServer,
) -> None:
    """A restart loses the tokens, as minutes without a question do."""
    server.ask("auth/user/add", name="root", password="of root")
    server.ask("auth/user/add", name="segue", password="first")
    server.ask("auth/user/grant", user="root", role="root")
    server.ask("auth/role/add", name="segue")
    key, end = (base64.b64encode(name).decode() for name in (b"/segue/", b"/segue0"))
    permission = {"permType": "READWRITE", "key": key, "range_end": end}
    server.ask("auth/role/grant", name="segue", perm=permission)
    server.ask("auth/user/grant", user="segue", role="segue")
    server.ask("auth/enable")
    file = server.folder / "password"
    url = server.url.replace("//", "//segue@") + f"?password-file={file}"

    async def refused(url: str) -> str:
        other = RegistryClient(url, secret=SECRET, limits=LIMITS)
        with pytest.raises(SegueError) as failed:
            await other.register(record(B, port=9001))
        await other.aclose()
        assert not failed.value.info.retryable
        return failed.value.info.text

    assert "password" not in await refused(server.url)
    assert f"{file} of --registry cannot be read" in await refused(url)
    file.write_text("wrong\n")
    assert "invalid user ID or password" in await refused(url)
    file.write_text("first\n")
    async with fleet(url) as one:
        seen = await one.begin()
        await one.instance.register_room(7, LeaderId(A), ttl_s=60)
        assert await one.watcher.resolve_room(7, DEADLINE_S) == LeaderId(A)
        server.kill()
        await asyncio.gather(one.errors.heard(), one.watch_errors.heard())
        await asyncio.to_thread(server.start)
        # Users that change make every token of before worthless.
        root = server.ask("auth/authenticate", name="root", password="of root")["token"]
        server.ask("auth/user/changepw", token=root, name="segue", password="second")
        file.write_text("second\n")
        await one.leave(seen)


@etcd
async def test_who_gives_certificates_and_has_an_etcd_without_is_told_so(server: EtcdServer) -> None:
    tls = Authority(server.folder).issue().load()
    client = RegistryClient(server.url, secret=SECRET, limits=LIMITS, tls=tls)
    with pytest.raises(BootstrapUnreachable, match="it may not speak TLS"):
        await client.register(record(A))
    await client.aclose()


def test_a_sealed_value_is_worth_nothing_at_another_key_or_changed() -> None:
    seal = Seal(SECRET)
    data = seal.close(b"/a", LeaderId(A, 1))
    assert seal.open(b"/a", data, LeaderId) == LeaderId(A, 1)
    for key, value in ((b"/b", data), (b"/a", data[:-2] + b"2}"), (b"/a", b""), (b"/a", b"\xff" * 80)):
        assert seal.open(key, value, LeaderId) is None
    assert seal.open(b"/a", data, InstanceRecord) is None
    assert Seal(b"another secret of others").prefix != seal.prefix


def test_etcd_on_another_host_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="--secret-file"):
        EtcdBackend("etcd://127.0.0.1:2379,10.0.0.1:2379", None, LIMITS, None)
