"""Sessions over real sockets: opening, order, refusals, ends."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec
import pytest
from session_peers import DEADLINE_S, PATIENT, SECRET, Events, Note, Question, RawPeer, closing, leader, node

from jumps import Jumps
from loops import in_loop, on_each_loop
from segue.kv.addresses import is_loopback
from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ConfigError,
    Draining,
    InvalidRequest,
    LayoutMismatch,
    OutOfCapacity,
    PeerLost,
    PeerRefused,
    PeerRestarted,
    RequestTooLarge,
    Unauthorized,
)
from segue.kv.ids import Role
from segue.kv.limits import Limits
from segue.kv.session.frames import SESSION_VERSIONS, encode_preamble
from segue.kv.session.listen import listening
from segue.kv.versions import Versions


@pytest.mark.parametrize(("mine", "theirs"), [("a", "b"), ("b", "a")])
@on_each_loop
async def test_messages_arrive_in_order_both_ways(mine: str, theirs: str) -> None:
    here, there = Events(payload=b"h" * 100_000), Events(payload=b"there")
    listener, dialler = node(mine, here), node(theirs, there, role=Role.DECODE, me=leader(theirs, 3))
    async with closing(dialler, listener):
        host, port = await listener.listen("127.0.0.1", 0)
        session = await dialler.connect(host, port, expect=leader(mine), timeout_s=DEADLINE_S)
        assert session.peer.hello == b"h" * 100_000
        assert session.peer.address == f"{host}:{port}"
        await here.wait("opened")
        assert here.peers[0].role is Role.DECODE
        assert here.peers[0].leader.dp_rank == 3
        big = bytes(range(256)) * 12_000
        sent = [Note(i, big if i % 7 == 3 else b"") for i in range(40)]
        for note in sent:
            session.send(note)
            here.sessions[0].send(Question(note.number))
        assert await here.wait("received", 40) == sent
        assert await there.wait("received", 40) == [Question(i) for i in range(40)]
        assert list(listener.sessions) == [leader(theirs, 3)]
    assert [e.code for e in here.of("closed")] == ["DRAINING"]
    assert len(there.of("closed")) == 1
    assert not listener.sessions
    assert not dialler.sessions


@on_each_loop
async def test_a_burst_from_a_handler_is_one_ordered_batch() -> None:
    here, there = Events(), Events()

    def echo(session: Any, message: Any) -> None:
        for i in range(50):
            session.send(Note(100 * message.number + i))

    here.on_message = echo
    listener, dialler = node("a", here), node("b", there)
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        for i in range(20):
            session.send(Question(i))
        got = await there.wait("received", 1000)
        assert [m.number for m in got] == [100 * q + i for q in range(20) for i in range(50)]


@in_loop
async def test_nagle_is_off_on_both_sides() -> None:
    here = Events()
    listener, dialler = node("a", here), node("b", Events())
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        await here.wait("opened")
        for each in (session, here.sessions[0]):
            sock = each.wire._transport.get_extra_info("socket")  # type: ignore[attr-defined]
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@in_loop
async def test_connects_at_the_same_time_share_one_session() -> None:
    here = Events()
    listener, dialler = node("a", here), node("b", Events())
    async with closing(dialler, listener):
        host, port = await listener.listen("127.0.0.1", 0)
        many = await asyncio.gather(
            *(dialler.connect(host, port, expect=leader("a"), timeout_s=DEADLINE_S) for _ in range(5)),
            *(dialler.connect(host, port, expect=None, timeout_s=DEADLINE_S) for _ in range(5)),
            *(dialler.connect("localhost", port, expect=None, timeout_s=DEADLINE_S) for _ in range(5)),
        )
        assert len(set(map(id, many))) == 1
        assert many[0] is dialler.sessions[leader("a")]
        many[0].send(Note(1))
        await here.wait("received")
        assert len(here.of("opened")) == 1
        assert not here.of("closed")


@in_loop
async def test_who_expects_somebody_else_at_the_same_address_does_not_share_the_attempt() -> None:
    listener, dialler = node("a", Events()), node("b", Events())
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        right, wrong = await asyncio.gather(
            *(dialler.connect(*address, expect=leader(c), timeout_s=DEADLINE_S) for c in "ac"),
            return_exceptions=True,
        )
        assert right is dialler.sessions[leader("a")]
        assert isinstance(wrong, PeerRestarted)


def test_a_host_of_which_one_address_does_not_answer_is_reached_at_the_next() -> None:
    async def main() -> None:
        loop, listener, dialler = asyncio.get_running_loop(), node("a", Events()), node("b", Events())

        async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
            found = ["127.0.0.9", "127.0.0.1"] if host == "node-1" else [host]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
        async with closing(dialler, listener):
            _, port = await listener.listen("127.0.0.1", 0)
            session = await dialler.connect("node-1", port, timeout_s=DEADLINE_S)
            assert session.peer.address == f"127.0.0.1:{port}"
            assert len(dialler._connections) == 1, "of the other try nothing is left"

    asyncio.run(main())


def test_who_shares_an_attempt_and_gives_up_early_takes_it_from_nobody() -> None:
    async def main() -> None:
        listener, dialler = node("a", Events()), node("b", Events())
        async with closing(dialler, listener):
            sock = listening("127.0.0.1", 0, what="a test", flag="port")
            host, port = sock.getsockname()

            def connect(timeout_s: float) -> Coroutine[Any, Any, Any]:
                return dialler.connect(host, port, expect=leader("a"), timeout_s=timeout_s)

            patient = [asyncio.create_task(connect(DEADLINE_S)) for _ in range(2)]
            with pytest.raises(BootstrapTimeout):
                await connect(0.02)
            listener._listen_on(sock, host, port)  # nobody was let in before
            sessions = await asyncio.gather(*patient)
            assert sessions[0] is sessions[1]
            assert dialler.stats.opened == 1

    asyncio.run(main())


@in_loop
async def test_an_attempt_that_was_given_up_takes_no_later_one_to_the_same_place_with_it() -> None:
    mute, dialler = listening("127.0.0.1", 0, what="a test", flag="port"), node("b", Events())
    address = mute.getsockname()
    async with closing(dialler):
        with pytest.raises(BootstrapTimeout):
            await dialler.connect(*address, timeout_s=0.001)
        later = [asyncio.create_task(dialler.connect(*address, timeout_s=DEADLINE_S))]
        for _ in range(5):  # in which the first one ends
            await asyncio.sleep(0)
        later.append(asyncio.create_task(dialler.connect(*address, timeout_s=DEADLINE_S)))
        await asyncio.sleep(0)
        [dial] = dialler._dials.values()
        assert dial.waiters == 2, "they share an attempt, which a close of the node ends"
    errors = await asyncio.gather(*later, return_exceptions=True)
    assert [type(error) for error in errors] == [Draining] * 2
    mute.close()


def test_an_attempt_whose_caller_leaves_as_it_fails_is_not_a_failure_that_nobody_saw() -> None:
    unseen: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        dialler = node("b", Events())
        async with closing(dialler):
            caller = asyncio.create_task(dialler.connect("127.0.0.1", 1, timeout_s=DEADLINE_S))
            await asyncio.sleep(0)
            (dial,) = dialler._dials.values()
            dial.task.add_done_callback(lambda _: caller.cancel())
            with pytest.raises(asyncio.CancelledError):
                await caller

    asyncio.run(main())
    gc.collect()
    assert unseen == []


class Relay:
    """A TCP relay that can fall silent without closing: the network between two hosts breaks."""

    def __init__(self) -> None:
        self.silent = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, host: str, port: int) -> tuple[str, int]:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, port)
            self._writers += [writer, far_writer]
            for source, sink in ((reader, far_writer), (far_reader, writer)):
                task = asyncio.create_task(self._copy(source, sink))
                self._tasks.add(task)

        self._server = await asyncio.start_server(connected, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[:2]

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if not self.silent:
                sink.write(data)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@pytest.mark.parametrize(("mine", "theirs"), [("a", "b"), ("b", "a")])
@in_loop
async def test_a_session_that_only_one_side_still_believes_in_is_replaced(mine: str, theirs: str) -> None:
    here, there = Events(), Events()
    listener, dialler = node(mine, here), node(theirs, there)
    relay = Relay()
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        old = await dialler.connect(*await relay.start(*address), timeout_s=DEADLINE_S)
        await here.wait("opened")
        relay.silent = True
        old.close()
        await there.wait("closed")
        assert not here.of("closed")
        new = await dialler.connect(*address, expect=leader(mine), timeout_s=DEADLINE_S)
        assert new is not old
        new.send(Note(5))
        await here.wait("received")
        assert [what for what, _ in here.log] == ["opened", "closed", "opened", "received"]
        assert isinstance(here.of("closed")[0], PeerLost)
        await relay.close()


@pytest.mark.parametrize(
    ("mine", "theirs"), [(SECRET, b"another secret of length"), (SECRET, None), (None, SECRET)]
)
@in_loop
async def test_a_wrong_or_missing_secret_is_unauthorized_and_opens_nothing(
    mine: bytes | None, theirs: bytes | None
) -> None:
    here, there = Events(), Events()
    listener, dialler = node("a", here, secret=mine), node("b", there, secret=theirs)
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        with pytest.raises(Unauthorized, match="secret"):
            await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert not here.log + there.log
        assert not here.peers + there.peers


def test_without_a_secret_only_loopback_is_talked_to() -> None:
    async def main() -> None:
        lonely = node("a", Events(), secret=None)
        async with closing(lonely):
            with pytest.raises(ConfigError, match="secret"):
                await lonely.listen("0.0.0.0", 0)
            with pytest.raises(Unauthorized, match="secret"):
                # An address of the documentation range: refused before a packet leaves.
                await lonely.connect("192.0.2.1", 9, timeout_s=DEADLINE_S)
            await lonely.listen("127.0.0.1", 0)

    asyncio.run(main())
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:10.0.0.1")
    assert not is_loopback("")


@in_loop
async def test_a_short_secret_and_impossible_timers_are_configuration_errors() -> None:
    for secret in (b"short", b"", b"x" * 15):
        with pytest.raises(ConfigError, match="at least 16"):
            node("a", Events(), secret=secret)
    await node("a", Events(), secret=b"x" * 16).close()
    with pytest.raises(ConfigError, match="keepalive_s"):
        node("a", Events(), limits=Limits(keepalive_s=10.0, peer_silence_s=10.0))


@in_loop
async def test_a_port_in_use_is_one_clear_sentence() -> None:
    first, second = node("a", Events()), node("b", Events())
    async with closing(first, second):
        host, port = await first.listen("127.0.0.1", 0)
        with pytest.raises(ConfigError, match=f"port {port} at {host} is in use"):
            await second.listen(host, port)
        with pytest.raises(ConfigError, match=f"already listens at {host}:{port}"):
            await first.listen(host, 0)


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ((6, 9), (3, 5), "speaks versions 6 to 9.*speaks versions 3 to 5"),
        ((3, 5), (6, 9), "speaks versions 3 to 5.*speaks versions 6 to 9"),
        ((7, 7), (6, 6), "speaks version 7,.*speaks version 6"),
    ],
)
@on_each_loop
async def test_sides_without_a_common_version_are_refused_with_both_ranges(
    mine: tuple[int, int], theirs: tuple[int, int], text: str
) -> None:
    here = Events()
    listener = node("a", here, protocol=Versions(*theirs))
    dialler = node("b", Events(), protocol=Versions(*mine))
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        with pytest.raises(PeerRefused, match=text):
            await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert not here.log


@pytest.mark.parametrize(
    ("mine", "theirs", "version"), [((3, 5), (4, 9), 5), ((4, 9), (3, 5), 5), ((3, 9), (5, 5), 5)]
)
@on_each_loop
async def test_two_sides_use_the_highest_version_that_both_speak(
    mine: tuple[int, int], theirs: tuple[int, int], version: int
) -> None:
    listener = node("a", Events(), protocol=Versions(*theirs))
    dialler = node("b", Events(), protocol=Versions(*mine))
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        session = await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert session.handshake.version == version


@in_loop
async def test_the_owners_refusal_reaches_the_dialler_unchanged() -> None:
    reason = LayoutMismatch("page size 16 and 24", phase="join", origin="prefill", room=9, retryable=True)
    here, there = Events(refuse=reason), Events()
    listener, dialler = node("a", here), node("b", there)
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        with pytest.raises(LayoutMismatch) as refused:
            await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert refused.value.info == reason.info
        assert not here.log + there.log
        assert listener.stats.refused == 1


def test_a_listener_warns_once_of_a_peer_that_is_refused_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warned() -> list[str]:
        lines = [record for record in caplog.records if record.levelname == "WARNING"]
        return [record.getMessage() for record in lines if "no session with" in record.getMessage()]

    async def main() -> None:
        here, there = Events(), Events(refuse=LayoutMismatch("give both --this"))
        listener, dialler = node("a", here), node("b", there)
        async with closing(dialler, listener):
            address = await listener.listen("127.0.0.1", 0)
            for _ in range(3):
                with pytest.raises(LayoutMismatch):
                    await dialler.connect(*address, timeout_s=DEADLINE_S)
            there.refuse = LayoutMismatch("give both --that")
            with pytest.raises(LayoutMismatch):
                await dialler.connect(*address, timeout_s=DEADLINE_S)
            there.refuse = None
            session = await dialler.connect(*address, timeout_s=DEADLINE_S)
            assert [text.rpartition("both ")[2] for text in warned()] == ["--this", "--that"]
            session.close()
            await here.wait("closed")
            there.refuse = LayoutMismatch("give both --that")
            with pytest.raises(LayoutMismatch):
                await dialler.connect(*address, timeout_s=DEADLINE_S)
            for _ in range(2):
                with pytest.raises(LayoutMismatch):
                    await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert len(warned()) == 3, "once more after a session"

    caplog.set_level("INFO", logger="segue.kv.session")
    asyncio.run(main())


@in_loop
async def test_the_dialler_may_refuse_too_and_an_owners_bug_is_a_refusal() -> None:
    here, there = Events(), Events(refuse=LayoutMismatch("no"))
    listener, dialler = node("a", here), node("b", there)
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        with pytest.raises(LayoutMismatch):
            await dialler.connect(*address, timeout_s=DEADLINE_S)
        there.refuse = None
        here.refuse = KeyError("a bug")  # type: ignore[assignment]
        with pytest.raises(Exception, match="failed to judge"):
            await dialler.connect(*address, timeout_s=DEADLINE_S)
        here.refuse = None
        await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert len(here.of("opened")) == len(there.of("opened")) == 1


@in_loop
async def test_nobody_there_and_nobody_answering_are_different_errors() -> None:
    dialler = node("b", Events())
    mute = socket.socket()
    mute.bind(("127.0.0.1", 0))
    address = mute.getsockname()
    async with closing(dialler):
        many = [dialler.connect(*address, timeout_s=DEADLINE_S) for _ in range(3)]
        errors = await asyncio.gather(*many, return_exceptions=True)
        assert [type(error) for error in errors] == [BootstrapUnreachable] * 3
        assert len(set(map(id, errors))) == 3, "each caller's has a traceback of its own"
        mute.listen()
        with pytest.raises(BootstrapTimeout):
            await dialler.connect(*address, timeout_s=0.05)
        with pytest.raises(BootstrapUnreachable, match="cannot be found"):
            await dialler.connect("no such host", 1, timeout_s=DEADLINE_S)
    mute.close()


@in_loop
async def test_a_node_does_not_connect_to_itself() -> None:
    alone = node("a", Events())
    async with closing(alone):
        with pytest.raises(PeerRefused, match="itself"):
            await alone.connect(*await alone.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)


@pytest.mark.parametrize(("mine", "theirs"), [(5000, 9000), (9000, 5000)])
@in_loop
async def test_a_message_larger_than_either_side_takes_is_the_senders_error_alone(
    mine: int, theirs: int
) -> None:
    here = Events()
    listener, dialler = (
        node(letter, events, limits=msgspec.structs.replace(PATIENT, max_frame_bytes=most))
        for letter, events, most in (("a", here, theirs), ("b", Events(), mine))
    )
    longest = b"x" * (5000 - len(msgspec.msgpack.encode(Note(1, b"x" * 1000))) + 1000)
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        with pytest.raises(RequestTooLarge, match="5000"):
            session.send(Note(1, longest + b"x"))
        session.send(Note(2, longest))
        assert await here.wait("received") == [Note(2, longest)]


@in_loop
async def test_a_handler_that_fails_ends_neither_session_nor_process() -> None:
    here = Events()

    def fail(session: object, message: object) -> None:
        if message == Note(1):
            raise KeyError("a bug in one request")

    here.on_message = fail
    listener, dialler = node("a", here), node("b", Events())
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        session.send(Note(1))
        session.send(Note(2))
        assert await here.wait("received", 2) == [Note(1), Note(2)]
        assert listener.stats.handler_errors == 1
        assert not here.of("closed")


@pytest.mark.parametrize("fails", ["opened", "closed"])
@in_loop
async def test_a_handler_that_fails_as_a_session_begins_or_ends_changes_neither(fails: str) -> None:
    class Failing(Events):
        def _add(self, what: str, value: object) -> None:
            super()._add(what, value)
            if what == fails:
                raise KeyError("a bug")

    here, there = Failing(), Events()
    listener, dialler = node("a", here), node("b", there)
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        await here.wait("opened")
        session.send(Note(1))
        here.sessions[0].send(Note(2))
        assert (await here.wait("received"), await there.wait("received")) == ([Note(1)], [Note(2)])
        session.close(Draining("enough"))
        assert [type(error) for error in await here.wait("closed")] == [Draining]
        assert not listener.sessions
        assert listener.stats.handler_errors == 1


@pytest.mark.parametrize(("mine", "theirs"), [("a", "b"), ("b", "a")])
@in_loop
async def test_what_a_side_says_of_itself_is_one_thing_in_a_session_whatever_comes_meanwhile(
    mine: str, theirs: str
) -> None:
    class Changing(Events):
        asked = 0

        def hello(self) -> bytes:
            self.asked += 1
            return b"%d" % self.asked

    here, there = Changing(), Changing()
    listener, dialler = node(mine, here), node(theirs, there)
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        for _ in range(2):
            session = await dialler.connect(*address, timeout_s=DEADLINE_S)
            await here.wait("opened", len(there.of("opened")))
            assert session.peer.sent == here.sessions[-1].peer.hello
            assert session.peer.hello == here.sessions[-1].peer.sent
            session.close()
            await here.wait("closed", len(there.of("opened")))
    assert (here.asked, there.asked) == (2, 2)


@in_loop
async def test_a_session_outlives_the_time_for_its_handshake() -> None:
    here, limits = Events(), Limits(keepalive_s=1e5, peer_silence_s=1e6, handshake_s=60.0)
    listener, dialler = node("a", here, limits=limits), node("b", Events(), limits=limits)
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        await here.wait("opened")
        Jumps().over(1000.0)
        await asyncio.sleep(0)
        session.send(Note(1))
        async with asyncio.timeout(DEADLINE_S):
            assert await here.wait("received") == [Note(1)]
        assert not here.of("closed")
        assert listener.stats.handshakes_late == dialler.stats.handshakes_late == 0


@on_each_loop
async def test_the_reason_of_a_close_reaches_both_sides_once() -> None:
    here, there = Events(), Events()
    listener, dialler = node("a", here), node("b", there)
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        await here.wait("opened")
        reason = InvalidRequest("enough", phase="test", room=4)
        session.send(Note(1))
        session.close(reason)
        session.close(Draining("again"))
        session.send(Note(2))  # after the end: dropped
        assert not there.of("closed")  # never inside the caller's own call
        assert [e.info for e in await there.wait("closed")] == [reason.info]
        assert [e.info for e in await here.wait("closed")] == [reason.info]
        assert here.of("received") == [Note(1)]


@in_loop
async def test_sessions_beyond_the_limit_are_refused_as_out_of_capacity() -> None:
    here = Events()
    listener = node("a", here, limits=Limits(max_sessions=2))
    diallers = [node(letter, Events()) for letter in "bcd"]
    async with closing(*diallers, listener):
        address = await listener.listen("127.0.0.1", 0)
        for dialler in diallers[:2]:
            await dialler.connect(*address, timeout_s=DEADLINE_S)
        with pytest.raises(OutOfCapacity):
            await diallers[2].connect(*address, timeout_s=DEADLINE_S)
        await diallers[0].close()
        await here.wait("closed")
        await diallers[2].connect(*address, timeout_s=DEADLINE_S)


@in_loop
async def test_a_session_that_has_ended_and_lingers_takes_nobodys_place() -> None:
    here = Events()
    listener = node("a", here, limits=msgspec.structs.replace(PATIENT, max_sessions=1))
    dialler = node("c", Events())
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        raw = await RawPeer.dial(*address)
        await raw.open("b")
        await here.wait("opened")
        here.sessions[0].close()  # of which the other side takes no note
        await dialler.connect(*address, timeout_s=DEADLINE_S)
        await raw.close()


@in_loop
async def test_a_broken_connection_is_a_lost_peer() -> None:
    here = Events()
    listener = node("a", here)
    async with closing(listener):
        raw = await RawPeer.dial(*await listener.listen("127.0.0.1", 0))
        await raw.open("b")
        await here.wait("opened")
        await raw.close()
        assert isinstance((await here.wait("closed"))[0], PeerLost)
        assert not listener.sessions


@in_loop
async def test_lesson_09_a_restart_at_the_same_address_ends_the_old_session_and_the_next_one_works() -> None:
    here = Events()
    prefill = node("a", here)
    async with closing(prefill):
        address = await prefill.listen("127.0.0.1", 0)
        # The old decode vanished without a word: its connection stays, nothing comes from it.
        vanished = await RawPeer.dial(*address)
        reborn = node("c", Events(), role=Role.DECODE)
        other = node("d", Events(), role=Role.DECODE, me=leader("d", 1))
        async with closing(reborn, other):
            at = await reborn.listen("127.0.0.1", 0)
            await vanished.open("b", advertised=f"{at[0]}:{at[1]}")
            await other.listen("127.0.0.1", 0)
            await other.connect(*address, timeout_s=DEADLINE_S)
            await here.wait("opened", 2)
            session = await reborn.connect(*address, timeout_s=DEADLINE_S)
            session.send(Note(1))
            await here.wait("received")
            assert [what for what, _ in here.log] == ["opened", "opened", "closed", "opened", "received"]
            assert isinstance(here.of("closed")[0], PeerRestarted)
            assert set(prefill.sessions) == {leader("c"), leader("d", 1)}
            # And from our side: we still expect the old one at that address.
            with pytest.raises(PeerRestarted, match="restarted"):
                await prefill.connect(*at, expect=leader("b"), timeout_s=DEADLINE_S)
            assert leader("c") in prefill.sessions
        await vanished.close()


@in_loop
async def test_lesson_09_dialling_a_restarted_peer_ends_its_old_session_and_the_next_connect_succeeds() -> (
    None
):
    here = Events()
    prefill = node("a", here)
    reborn = node("c", Events(), role=Role.DECODE)
    async with closing(prefill, reborn):
        at = await reborn.listen("127.0.0.1", 0)
        vanished = await RawPeer.dial(*await prefill.listen("127.0.0.1", 0))
        await vanished.open("b", advertised=f"{at[0]}:{at[1]}")
        await here.wait("opened")
        # expect another incarnation: the old one's session must end although nothing opens.
        with pytest.raises(PeerRestarted):
            await prefill.connect(*at, expect=leader("e"), timeout_s=DEADLINE_S)
        assert isinstance((await here.wait("closed"))[0], PeerRestarted)
        session = await prefill.connect(*at, expect=leader("c"), timeout_s=DEADLINE_S)
        assert session.peer.leader == leader("c")
        await vanished.close()


@in_loop
async def test_an_instance_that_comes_back_in_another_role_ends_its_old_session() -> None:
    here = Events()
    front = node("a", here, role=Role.FRONTEND)
    prefill, decode = node("b", Events()), node("c", Events(), role=Role.DECODE)
    async with closing(front, decode):
        address = await prefill.listen("127.0.0.1", 0)
        await front.connect(*address, expect=leader("b"), timeout_s=DEADLINE_S)
        await prefill._listener.close()  # its socket is another's from now on; nobody is told
        prefill._socket.close()  # type: ignore[union-attr]
        await decode.listen(*address)
        await front.connect(*address, expect=leader("c"), timeout_s=DEADLINE_S)
        assert isinstance((await here.wait("closed"))[0], PeerRestarted)
        assert set(front.sessions) == {leader("c")}
        await prefill.close()


@in_loop
async def test_two_that_name_the_same_listener_behind_one_address_translator_are_two() -> None:
    async def forward(
        to: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, onward = await asyncio.open_connection(*to)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, onward), pump(there, writer))

    here = Events()
    front = node("a", here, role=Role.FRONTEND)
    first, second = node("b", Events()), node("c", Events())
    async with closing(front, first, second):
        one = await first.listen("127.0.0.2", 0)
        other = await second.listen("127.0.0.3", one[1])
        for letter, to in (("b", one), ("c", other)):
            gate = await asyncio.start_server(partial(forward, to), "127.0.0.1", 0)
            host, port = gate.sockets[0].getsockname()
            await front.connect(host, port, expect=leader(letter), timeout_s=DEADLINE_S)
            gate.close()
        # Both say that they listen at this port, and both are seen at 127.0.0.1.
        assert set(front.sessions) == {leader("b"), leader("c")}
        assert not here.of("closed")


@on_each_loop
async def test_close_leaves_no_task_no_socket_and_no_session() -> None:
    before = len(asyncio.all_tasks())
    here = Events()
    listener = node("a", here)
    diallers = [node(letter, Events()) for letter in "bcdef"]
    address = await listener.listen("127.0.0.1", 0)
    await asyncio.gather(*(d.connect(*address, timeout_s=DEADLINE_S) for d in diallers))
    strangers = [await RawPeer.dial(*address) for _ in range(5)]
    await here.wait("opened", 5)
    await listener.close()
    assert not listener._connections
    assert not listener.pending
    assert not listener._open
    assert not listener._places
    assert not listener._arrivals
    for stranger in strangers:
        assert await stranger.ended() in (b"", encode_preamble(SESSION_VERSIONS)), "it is told of nobody"
        await stranger.close()
    for dialler in diallers:
        await dialler.close()
        assert [type(e) for e in dialler._handlers[Role.PREFILL].of("closed")] == [Draining]  # type: ignore[attr-defined]
    with pytest.raises(Draining):
        await diallers[0].connect(*address, timeout_s=DEADLINE_S)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before


@in_loop
async def test_each_role_has_its_handler_and_a_peer_of_another_role_is_refused_by_name() -> None:
    leaders, frontends = Events(payload=b"for leaders"), Events(payload=b"for frontends")
    here = node("a", Events(), handlers={Role.DECODE: leaders, Role.FRONTEND: frontends})
    d, f = node("b", Events(), role=Role.DECODE), node("c", Events(), role=Role.FRONTEND)
    u = node("d", Events(), role=Role.UNIFIED)
    async with closing(u, f, d, here):
        address = await here.listen("127.0.0.1", 0)
        of_d = await d.connect(*address, timeout_s=DEADLINE_S)
        of_f = await f.connect(*address, timeout_s=DEADLINE_S)
        assert (of_d.peer.hello, of_f.peer.hello) == (b"for leaders", b"for frontends")
        of_d.send(Note(1))
        of_f.send(Note(2))
        assert await leaders.wait("received") == [Note(1)]
        assert await frontends.wait("received") == [Note(2)]
        with pytest.raises(PeerRefused, match="prefill instance has no sessions with a unified"):
            await u.connect(*address, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("closes", ["here", "there", "before anybody waits"])
@in_loop
async def test_whoever_waits_for_the_end_of_a_session_is_woken(closes: str) -> None:
    here = Events()
    listener, dialler = node("a", here), node("b", Events())
    async with closing(dialler, listener):
        session = await dialler.connect(*await listener.listen("127.0.0.1", 0), timeout_s=DEADLINE_S)
        await here.wait("opened")
        waiting = [] if closes == "before anybody waits" else [asyncio.create_task(session.ended())]
        await asyncio.sleep(0)
        (here.sessions[0] if closes == "there" else session).close()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(session.ended(), *waiting)
