"""The registry on a real etcd: restarts, pauses, compaction, leases and data that are lost."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from etcd_server import EtcdServer, needs_etcd
from registry_records import SECRET, A, B, names, record

from segue.kv.errors import (
    BootstrapUnreachable,
    ConfigError,
    DpRankConflict,
    Draining,
    PeerRefused,
    PeerRestarted,
    SegueError,
    Unauthorized,
)
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.session.tls import Tls
from segue.server.registry.client import RegistryClient
from segue.server.registry.etcd import Etcd, Kv, Read
from segue.server.registry.etcd_backend import EtcdBackend
from segue.server.registry.sealed import Seal
from segue.server.settings.registry_address import registry_places
from tls_files import Authority

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
        self.instance = RegistryClient(url, secret=SECRET, limits=LIMITS, on_error=self.errors, tls=tls)
        self.watcher = RegistryClient(url, secret=SECRET, limits=LIMITS, on_error=self.watch_errors, tls=tls)
        self.others: list[RegistryClient] = []
        self.keeping: list[asyncio.Task[None]] = []

    def other(self) -> RegistryClient:
        """One more client."""
        self.others.append(RegistryClient(self.instance_url, secret=SECRET, limits=LIMITS))
        return self.others[-1]

    async def begin(self) -> Seen:
        for who in (A, B):
            await self.instance.register(record(who))
            self.keeping.append(asyncio.create_task(self.instance.keep_alive(who)))
        seen = Seen(self.watcher)
        await seen.until([A, B])
        return seen

    async def leave(self, seen: Seen) -> None:
        """Both leave, which is seen at once: what came before has broken nothing."""
        assert [task.done() for task in self.keeping] == [False, False]
        await self.instance.leave(LeaderId(A))
        await seen.until([B])
        await self.instance.leave(LeaderId(B))
        await seen.until([])
        await asyncio.gather(*self.keeping)

    async def close(self) -> None:
        for client in (self.instance, self.watcher, *self.others):
            await client.aclose()


@asynccontextmanager
async def fleet(url: str, tls: Tls | None = None) -> AsyncIterator[Fleet]:
    one = Fleet(url, tls)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield one
    finally:
        await one.close()


def etcd(test: Callable[[EtcdServer], Awaitable[None]]) -> Callable[[EtcdServer], None]:
    """A test against a server, as a coroutine."""

    @pytest.mark.slow
    @needs_etcd
    def run(server: EtcdServer) -> None:
        asyncio.run(test(server))  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


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
                await one.instance.register(record(B))
                await one.instance.set_draining(B, True)
                later = await read(key)
                await asyncio.to_thread(server.ask, "kv/compaction", revision=later.revision, physical=True)
            return found

        etcd.read = late  # type: ignore[method-assign]
        await one.instance.register(record(A))
        seen = Seen(one.watcher)
        await seen.until([A, B])
        assert reads[0] < reads[1], "the list was read again, and is not that of the first time"
        await one.instance.leave(LeaderId(B))
        await seen.until([A])


@etcd
async def test_of_two_incarnations_at_one_address_the_later_one_counts_and_the_first_is_told(
    server: EtcdServer,
) -> None:
    async with fleet(server.url) as one:
        await one.instance.register(record(A, port=9000))
        keeping = asyncio.create_task(one.instance.keep_alive(A))
        seen = Seen(one.watcher)
        await seen.until([A])
        later = one.other()
        await later.register(record(B, port=9000))
        await seen.until([B])
        with pytest.raises(PeerRestarted):
            await keeping
        assert [A, B] not in seen.lists
        assert [B, A] not in seen.lists


@etcd
async def test_what_contradicts_a_living_rank_is_refused_and_who_left_does_not_come_back(
    server: EtcdServer,
) -> None:
    async with fleet(server.url) as one:
        await one.instance.register(record(A, dp_rank=0, dp_size=2))
        other = one.other()
        with pytest.raises(DpRankConflict, match="cannot move"):
            await other.register(record(A, dp_rank=0, dp_size=2, port=1234))
        with pytest.raises(DpRankConflict, match="must agree"):
            await other.register(record(A, dp_rank=1, dp_size=2, role=Role.DECODE))
        await other.register(record(A, dp_rank=1, dp_size=2))
        seen = Seen(one.watcher)
        await seen.until([A])
        await one.instance.leave(LeaderId(A, 0))
        with pytest.raises(Draining, match="left"):
            await one.instance.register(record(A, dp_rank=0, dp_size=2))


@etcd
async def test_a_record_that_somebody_without_the_secret_wrote_is_shown_to_nobody(server: EtcdServer) -> None:
    def put(key: bytes, value: bytes) -> None:
        server.ask("kv/put", key=base64.b64encode(key).decode(), value=base64.b64encode(value).decode())

    async with fleet(server.url) as one:
        await one.instance.register(record(A))
        (kv,) = (await (etcd := Etcd(registry_places(server.url), LIMITS, None)).read(RANKS)).kvs
        await etcd.close()
        forged = Seal(b"another secret of others")
        key = RANKS + b"127.0.0.1:6666"
        await asyncio.to_thread(put, key, forged.close(key, record(B, port=6666)))
        await asyncio.to_thread(put, RANKS + b"127.0.0.1:7777", kv.value)  # a true one, at another's place
        await asyncio.to_thread(put, RANKS + b"nonsense", b"\x00" * 70)
        seen = Seen(one.watcher)
        await seen.until([A])
        await one.instance.set_draining(A, True)
        await one.instance.leave(LeaderId(A))
        await seen.until([])
        assert not any(B in shown for shown in seen.lists)


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
        with pytest.raises(PeerRefused):
            seal.open(key, value, LeaderId)
    assert Seal(b"another secret of others").prefix != seal.prefix


def test_etcd_on_another_host_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="--secret-file"):
        EtcdBackend("etcd://127.0.0.1:2379,10.0.0.1:2379", None, LIMITS, None)


class TinyEtcd:
    """Keys and leases in memory, of which the first lease takes until somebody has left."""

    def __init__(self) -> None:
        self.keys: dict[bytes, Kv] = {}
        self.leaves: Callable[[], Awaitable[None]] | None = None

    async def get(self, key: bytes) -> tuple[Kv, int]:
        return self.keys.get(key, Kv(key)), len(self.keys)

    async def read(self, prefix: bytes) -> Read:
        return Read([kv for key, kv in self.keys.items() if key.startswith(prefix)], len(self.keys))

    async def grant(self, ttl_s: int) -> int:
        if self.leaves is not None:
            await self.leaves()
        return 7

    async def put(self, known: Kv, value: bytes, lease: int | None) -> bool:
        self.keys[known.key] = Kv(known.key, value, 1, 1, lease or known.lease)
        return True

    async def revoke(self, lease: int) -> None:
        self.keys = {key: kv for key, kv in self.keys.items() if kv.lease != lease}


def test_a_rank_that_leaves_while_its_registration_is_on_the_way_leaves_nothing_behind() -> None:
    async def main() -> None:
        backend, tiny = EtcdBackend("etcd://127.0.0.1:1", SECRET, LIMITS, None), TinyEtcd()
        backend._etcd = tiny  # type: ignore[assignment]
        tiny.leaves = lambda: backend.delete(LeaderId(A))
        with pytest.raises(Draining):
            await backend.put_rank(record(A), 0)
        assert not tiny.keys, "a lease would show it to frontends until it ends"

    asyncio.run(main())
