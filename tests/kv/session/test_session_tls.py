"""Mutual TLS under sessions: who gets in, who does not, and what each side hears."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path

import pytest
from session_peers import DEADLINE_S, Events, Note, RawPeer, closing, incarnation, node

from loops import LOOPS, in_loop, on_each_loop
from segue.kv.errors import BootstrapUnreachable, ConfigError, PeerRefused, SegueError, Unauthorized
from segue.kv.limits import Limits
from segue.kv.session.node import SessionNode
from segue.kv.session.tls import tls_from_files
from segue.server.settings.shared_config import TlsConfig
from tls_files import Authority, TlsFiles


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


async def nobody_waits(listener: SessionNode) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while listener.pending:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.001)


def config(files: TlsFiles) -> TlsConfig:
    return TlsConfig(tls_cert=str(files.cert), tls_key=str(files.key), tls_ca=str(files.ca))


@on_each_loop
async def test_sessions_run_over_mutual_tls(authority: Authority) -> None:
    here, there = Events(payload=b"p" * 50_000), Events()
    listener = node("a", here, tls=authority.issue().load())
    dialler = node("b", there, tls=authority.issue("10.1.1.1").load())
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        session.send(Note(1, b"x" * 300_000))
        assert await here.wait("received") == [Note(1, b"x" * 300_000)]
        here.sessions[0].send(Note(2, b"y" * 300_000))
        assert await there.wait("received") == [Note(2, b"y" * 300_000)]
        assert listener.pending == 0


@on_each_loop
async def test_nothing_of_a_session_can_be_read_on_the_way(authority: Authority) -> None:
    seen = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                seen.extend(data)
                sink.write(data)
            sink.close()

        there = await asyncio.open_connection(*address)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    here = Events(payload=b"our payload " * 20)
    listener = node("a", here, tls=authority.issue().load())
    dialler = node("b", Events(), tls=authority.issue().load())
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        tap = await asyncio.start_server(relay, "127.0.0.1", 0)
        session = await dialler.connect(*tap.sockets[0].getsockname(), timeout_s=DEADLINE_S)
        session.send(Note(1, b"the prompt of somebody " * 10))
        await here.wait("received")
        await dialler.close()
        tap.close()
    assert len(seen) > 1000
    for secret in (b"the prompt", b"our payload", b"segue\x00", incarnation("a").encode()):
        assert secret not in seen


@on_each_loop
async def test_a_plain_dialler_hears_that_tls_is_spoken_here(authority: Authority) -> None:
    here = Events()
    listener = node("a", here, tls=authority.issue().load())
    plain = node("d", Events())
    async with closing(plain, listener):
        with pytest.raises(PeerRefused, match=r"only TLS is spoken here.*--tls-cert"):
            await plain.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        assert listener.stats.refused == 1
        assert not here.log


@pytest.mark.parametrize("runner", LOOPS)
def test_a_tls_dialler_hears_that_the_listener_is_plain_and_so_does_the_listener(
    runner: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        listener, dialler = node("a", Events()), node("d", Events(), tls=authority.issue().load())
        async with closing(dialler, listener):
            with pytest.raises(PeerRefused, match=r"does not speak TLS.*--tls-cert"):
                await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
            assert listener.stats.bad_frames == 1

    LOOPS[runner](main())
    assert "speaks TLS and this side does not" in caplog.text


@pytest.mark.parametrize("runner", LOOPS)
def test_a_certificate_of_another_authority_is_refused_with_a_reason_on_both_sides(
    runner: str, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        here = Events()
        listener = node("a", here, tls=authority.issue().load())
        # One trusts the listener and is not trusted; the other does not even trust the listener.
        forger = node("b", Events(), tls=stranger.issue(trust=authority).load())
        wary = node("c", Events(), tls=stranger.issue().load())
        async with closing(forger, wary, listener):
            address = await listener.listen("127.0.0.1", 0)
            with pytest.raises(BootstrapUnreachable, match=r"may not accept our --tls-cert"):
                await forger.connect(*address, timeout_s=DEADLINE_S)
            with pytest.raises(Unauthorized, match=r"certificate of 127\.0\.0\.1"):
                await wary.connect(*address, timeout_s=DEADLINE_S)
            assert not here.log
            assert listener.stats.refused >= 1
            await nobody_waits(listener)

    LOOPS[runner](main())
    assert "its certificate is not valid here" in caplog.text


@in_loop
async def test_the_certificate_of_one_host_does_not_pass_for_another(authority: Authority) -> None:
    listener = node("a", Events(), tls=authority.issue("10.9.9.9").load())
    dialler = node("b", Events(), tls=authority.issue().load())
    async with closing(dialler, listener):
        with pytest.raises(Unauthorized, match=r"127\.0\.0\.1"):
            await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)


@on_each_loop
async def test_a_silent_peer_before_tls_is_cut_after_the_handshake_deadline(authority: Authority) -> None:
    limits = Limits(handshake_s=0.1)
    listener = node("a", Events(), tls=authority.issue().load(), limits=limits)
    async with closing(listener):
        address = await listener.listen("127.0.0.1", 0)
        mute, halfway = await RawPeer.dial(*address), await RawPeer.dial(*address)
        halfway.writer.write(b"\x16\x03\x01\x02\x00\x01")  # a hello that never ends
        assert await mute.ended() == b""
        await halfway.ended()
        await nobody_waits(listener)
        assert listener.stats.opened == 0
        await mute.close()
        await halfway.close()


@on_each_loop
async def test_a_flood_before_tls_is_bounded_and_a_good_peer_gets_in(authority: Authority) -> None:
    unhurried = Limits(handshake_s=3600.0)  # whoever goes makes room for others, and is not late
    tls = authority.issue().load()
    listener = node("a", Events(), tls=tls, max_half_open=8, limits=unhurried)
    dialler = node("b", Events(), tls=authority.issue().load())
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        strangers = [await RawPeer.dial(*address) for _ in range(40)]
        await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert listener.pending <= 8
        assert listener.stats.pending_dropped >= 40 - 8
        for each in strangers:
            await each.close()


# ---- files --------------------------------------------------------------------------------------


def test_good_files_are_taken_for_the_address_they_are_for(authority: Authority) -> None:
    files = authority.issue("127.0.0.1", "node.example")
    for host in ("127.0.0.1", "node.example", None):
        assert tls_from_files(config(files), host) is not None
    assert tls_from_files(TlsConfig(), "127.0.0.1") is None


def _broken(files: TlsFiles, what: str, authority: Authority, other: Authority, folder: Path) -> TlsFiles:
    bad = folder / "bad.pem"
    match what:
        case "no certificate file":
            return TlsFiles(folder / "none.pem", files.key, files.ca)
        case "no key file":
            return TlsFiles(files.cert, folder / "none.pem", files.ca)
        case "no authority file":
            return TlsFiles(files.cert, files.key, folder / "none.pem")
        case "garbage":
            bad.write_bytes(b"not pem")
            return TlsFiles(bad, files.key, files.ca)
        case "authority is garbage":
            bad.write_bytes(b"not pem")
            return TlsFiles(files.cert, files.key, bad)
        case "not a pair":
            return TlsFiles(files.cert, authority.issue().key, files.ca)
        case "encrypted key":
            from cryptography.hazmat.primitives import serialization as s

            key = s.load_pem_private_key(files.key.read_bytes(), None)
            lock = s.BestAvailableEncryption(b"secret")
            bad.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, lock))
            return TlsFiles(files.cert, bad, files.ca)
        case "another authority":
            return other.issue("127.0.0.1", trust=authority)
        case "expired":
            return authority.issue("127.0.0.1", expired=True)
        case _:
            return authority.issue("10.0.0.1")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no certificate file", "--tls-cert .*none.pem cannot be read"),
        ("no key file", "--tls-key .*none.pem cannot be read"),
        ("no authority file", "--tls-ca .*none.pem cannot be read"),
        ("garbage", "--tls-cert .* matching pair"),
        ("authority is garbage", "--tls-ca .* holds no certificate"),
        ("not a pair", "matching pair"),
        ("encrypted key", "--tls-key is encrypted; give a key without"),
        ("another authority", "is not accepted by --tls-ca"),
        ("expired", "is not accepted by --tls-ca .*expired"),
        ("another address", "was not issued for 127.0.0.1.*alternative names"),
    ],
)
def test_files_that_cannot_work_are_one_sentence_that_says_what_to_change(
    what: str, says: str, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    files = _broken(authority.issue(), what, authority, stranger, tmp_path)
    with pytest.raises(ConfigError, match=says) as caught:
        tls_from_files(config(files), "127.0.0.1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [("cert",), ("key", "ca"), ("cert", "key")])
def test_half_of_tls_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"--tls-.* missing"):
        TlsConfig(**{f"tls_{name}": "f.pem" for name in given})


def test_a_refusal_under_tls_keeps_its_type(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> SegueError:
        listener = node("a", Events(), tls=authority.issue().load())
        other = node("b", Events(), tls=authority.issue().load(), secret=b"another secret of the tests")
        async with closing(other, listener):
            with pytest.raises(Unauthorized, match="secret") as caught:
                await other.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
            return caught.value

    assert asyncio.run(main()).info.code == "UNAUTHORIZED"


def _shake(*ends: ssl.SSLObject) -> None:
    """A handshake in memory, as far as it comes."""
    for end in 4 * ends:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()


def test_no_older_tls_than_1_3_is_spoken(authority: Authority) -> None:
    ours, theirs = authority.issue().load(), authority.issue().load()
    for server, client in ((ours.server, theirs.client), (theirs.server, ours.client)):
        older = client if client is theirs.client else server
        older.minimum_version, older.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        dialler = client.wrap_bio(back, there, server_hostname="127.0.0.1")
        listener = server.wrap_bio(there, back, server_side=True)
        with pytest.raises(ssl.SSLWantReadError):
            dialler.do_handshake()
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol|version"):
            _shake(listener, dialler)
