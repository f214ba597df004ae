"""The connections that the listener of all socket transports accepts and closes."""

from __future__ import annotations

import contextlib
import errno
import queue
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_transport_tcp_books import Loops

from ranks import make_tcp, rank
from segue.kv.errors import PeerRefused
from segue.kv.ids import RankId
from segue.kv.transport.base import Endpoint, PeerGone, TransportEvent
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.listener import REST_S, AuthenticatedListener
from segue.kv.transport.net.stream import Channel, PlainChannel
from segue.kv.transport.tcp.tcp_sockets import TcpAddress
from segue.kv.transport.tcp.tcp_transport import TcpTransport
from tls_files import Authority

ROGUE = rank("rogue")


class Listens:
    """A `tcp` with its memory, and hand-made clients of it."""

    def __init__(
        self, before_register: Callable[[TcpTransport], None] = lambda _transport: None, **fields: Any
    ) -> None:
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.memory = allocate(4096)
        self.transport: TcpTransport = make_tcp(
            self.events.put, rank("here"), host="0.0.0.0", advertise="127.0.0.1", **fields
        )
        before_register(self.transport)
        endpoint = self.transport.register(self.memory)
        self.address = msgspec.msgpack.decode(endpoint.data, type=TcpAddress)
        self.socks: list[socket.socket] = []

    def comes(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection from `source` that has its challenge, and says nothing yet."""
        sock = socket.create_connection(("127.0.0.1", self.address.port), 60, (source, 0))
        self.socks.append(sock)
        return sock

    def proof(self, sock: socket.socket, me: RankId = ROGUE) -> tuple[handshake.WriterProof, bytes]:
        proof = handshake.WriterProof(self.address.key, me)
        return proof, proof.respond(exactly(sock, handshake.CHALLENGE_BYTES))

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        self.transport.close()
        self.memory.close()


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    return sock.recv(nbytes, socket.MSG_WAITALL)


def ended(sock: socket.socket) -> bool:
    """Whether the other end has closed it, with nothing more to say."""
    return bool(select.select([sock], [], [], 0)[0]) and sock.recv(1) == b""


@pytest.fixture
def few() -> Iterator[Listens]:
    made = Listens(max_pending=6, handshake_s=3600.0, max_streams=2)
    yield made
    made.close()


def test_a_flood_from_one_address_closes_its_own_oldest_and_nobody_elses(few: Listens) -> None:
    quiet = [few.comes("127.0.0.2") for _ in range(3)]
    answers = [few.proof(sock) for sock in quiet]
    flood = [few.comes("127.0.0.3") for _ in range(20)]
    for sock in flood:  # each is asked who it is before a later one takes its place
        exactly(sock, handshake.CHALLENGE_BYTES)
    for sock in flood[:-3]:
        assert sock.recv(1) == b"", "the oldest of the fullest address goes"
    assert not any(ended(sock) for sock in flood[-3:])
    for sock, (proof, answer) in list(zip(quiet, answers, strict=True))[:2]:
        sock.sendall(answer)
        proof.finish(exactly(sock, handshake.VERDICT_BYTES))


def test_a_crowd_of_many_addresses_closes_the_oldest_of_the_fullest(few: Listens) -> None:
    first = [few.comes("127.0.0.2") for _ in range(2)]
    others = [few.comes(f"127.0.0.{n}") for n in range(3, 7)]
    for sock in (*first, *others):
        exactly(sock, handshake.CHALLENGE_BYTES)
    late = few.comes("127.0.0.9")
    exactly(late, handshake.CHALLENGE_BYTES)
    assert first[0].recv(1) == b""
    assert not any(ended(sock) for sock in (first[1], *others, late))


def test_an_answer_may_come_in_pieces(few: Listens) -> None:
    sock = few.comes()
    proof, answer = few.proof(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(answer), 11):
        sock.sendall(answer[at : at + 11])
    proof.finish(exactly(sock, handshake.VERDICT_BYTES))


def test_an_answer_with_a_byte_too_many_is_refused(few: Listens) -> None:
    sock = few.comes()
    proof, answer = few.proof(sock)
    sock.sendall(answer + b"x")
    with pytest.raises(PeerRefused, match="not a segue stream"):
        proof.finish(exactly(sock, handshake.VERDICT_BYTES))
    assert few.events.empty()


def test_streams_that_have_proven_themselves_are_bounded_and_a_place_is_free_again(few: Listens) -> None:
    inside = []
    for number in range(2):
        sock = few.comes()
        proof, answer = few.proof(sock, rank("rogue", number=number))
        sock.sendall(answer)
        proof.finish(exactly(sock, handshake.VERDICT_BYTES))
        inside.append(sock)
    assert few.comes().recv(1) == b"", "it is closed without a word"
    for sock in inside:
        sock.close()
    gone = few.events.get(timeout=60)
    assert isinstance(gone, PeerGone)
    assert gone.peer in (rank("rogue"), rank("rogue", number=1))
    few.proof(few.comes())


def test_a_listener_that_cannot_be_watched_at_first_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    refusals = [OSError(errno.ENOSPC, "No space left on device")]

    def spoil(transport: TcpTransport) -> None:
        watch = transport._loop.watch

        def refused_once(*args: Any) -> None:
            if refusals:
                raise refusals.pop()
            watch(*args)

        transport._loop.watch = refused_once  # type: ignore[method-assign]

    made = Listens(before_register=spoil)
    proof, answer = made.proof(sock := made.comes())
    sock.sendall(answer)
    proof.finish(exactly(sock, handshake.VERDICT_BYTES))
    assert "tcp cannot accept connections: No space left on device" in caplog.text
    made.close()


def test_who_has_not_proven_itself_is_closed_with_the_transport() -> None:
    made = Listens(handshake_s=3600.0)
    sock = made.comes()
    exactly(sock, handshake.CHALLENGE_BYTES)
    made.transport.close()
    assert sock.recv(1) == b""
    made.close()


# ---- turned by hand ---------------------------------------------------------------------------------


class Turned:
    """A listener on a loop that the test turns; who comes next, the test says."""

    def __init__(self, *, handshake_s: float = 5.0, max_pending: int = 4) -> None:
        self.loop = Loops()
        self.next: list[tuple[socket.socket, Any] | OSError] = []
        self.admitted: list[Channel] = []
        self.refuses: Exception | None = None
        self.clients: list[socket.socket] = []
        self.listener = AuthenticatedListener(
            self.loop,  # type: ignore[arg-type]
            SimpleNamespace(fileno=lambda: 5, accept=self._accept, close=lambda: None),  # type: ignore[arg-type]
            KEY,
            lambda sock: PlainChannel(sock),
            self._admit,
            name="x",
            handshake_s=handshake_s,
            max_pending=max_pending,
        )
        self.listener.open()

    def _accept(self) -> tuple[socket.socket, Any]:
        coming = self.next.pop()
        if isinstance(coming, OSError):
            raise coming
        return coming

    def _admit(self, channel: Channel, peer: RankId, verdict: bytes) -> None:
        if self.refuses is not None:
            raise self.refuses
        assert peer == ROGUE
        self.admitted.append(channel)
        self.loop.watch(channel.fileno(), select.EPOLLIN, lambda _events: None)
        channel.send(verdict)

    def comes(self, where: Any = ("10.0.0.1", 1)) -> tuple[socket.socket, int]:
        """Somebody from an address, and the number of our end."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.clients.append(theirs)
        self.next.append((ours, where))
        self.loop.of[5](select.EPOLLIN)
        return theirs, ours.fileno()

    def proves(self, sock: socket.socket, fd: int) -> handshake.WriterProof:
        proof = handshake.WriterProof(KEY, ROGUE)
        sock.send(proof.respond(sock.recv(1000)))
        self.loop.of[fd](select.EPOLLIN)
        return proof

    def inside(self, sock: socket.socket) -> bool:
        """Whether our end is open."""
        try:
            while sock.recv(1000):
                pass
        except BlockingIOError:
            return True
        return False


KEY = bytes(16)


@pytest.fixture
def turned() -> Iterator[Turned]:
    made = Turned()
    yield made
    made.listener.close()
    for end in (*made.clients, *made.admitted):
        end.close()


def test_the_deadline_of_a_handshake_ends_who_has_not_passed_it_and_nobody_else(turned: Turned) -> None:
    inside, late = turned.comes(), turned.comes()
    turned.proves(*inside).finish(inside[0].recv(1000))
    turned.loop.wait(4.9)
    assert turned.inside(late[0])
    turned.loop.wait(100.0)
    assert not turned.inside(late[0])
    assert turned.inside(inside[0]), "it proved itself long ago, and may be in the middle of a write"
    assert len(turned.admitted) == 1


@pytest.mark.parametrize(
    "code", ["EAGAIN", "EINTR", "ECONNABORTED", "EPROTO", "ENETDOWN", "ENETUNREACH", "EHOSTUNREACH"]
)
def test_who_has_gone_again_before_it_was_accepted_costs_nobody_anything(turned: Turned, code: str) -> None:
    waiting, _ = turned.comes()
    turned.next.append(OSError(getattr(errno, code), code))
    turned.loop.of[5](select.EPOLLIN)
    assert 5 in turned.loop.of, "the next one is let in at once"
    assert turned.inside(waiting)


@pytest.mark.parametrize("code", ["EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"])
def test_without_a_descriptor_the_oldest_stranger_gives_its_own_back_and_accepting_rests(
    turned: Turned, code: str
) -> None:
    oldest, younger = turned.comes()[0], turned.comes()[0]
    turned.next.append(OSError(getattr(errno, code), code))
    turned.loop.of[5](select.EPOLLIN)
    assert (turned.inside(oldest), turned.inside(younger)) == (False, True)
    assert 5 not in turned.loop.of, "it would be called again at once, and for nothing"
    turned.loop.wait(REST_S)
    assert 5 in turned.loop.of, "long before any deadline"


def test_all_ports_of_an_address_are_one_address(turned: Turned) -> None:
    other = turned.comes(("10.0.0.2", 9))[0]
    flood = [turned.comes(("10.0.0.1", port))[0] for port in range(1, 6)]
    assert [turned.inside(sock) for sock in flood] == [False, False, False, True, True]
    assert turned.inside(other)


@pytest.mark.parametrize(
    "refuses", [PeerRefused("too many of them"), OSError(errno.ENOSPC, "no room")], ids=["refused", "failed"]
)
def test_who_is_not_let_in_after_all_is_closed_and_hears_the_reason_if_there_is_one(
    turned: Turned, refuses: Exception
) -> None:
    turned.refuses = refuses
    sock, fd = turned.comes()
    proof = turned.proves(sock, fd)
    if isinstance(refuses, PeerRefused):
        with pytest.raises(PeerRefused, match="too many of them"):
            proof.finish(sock.recv(1000))
    assert not turned.inside(sock)
    assert fd not in turned.loop.of
    assert len(turned.listener._pending) == 0


def test_a_handshake_is_waited_for_as_it_asks_and_then_an_answer(turned: Turned) -> None:
    class Asks(PlainChannel):
        buffered = True

        def handshake(self) -> int:
            return steps.pop(0)

    steps = [select.EPOLLIN, select.EPOLLOUT, 0]
    turned.listener._open_channel = lambda sock: Asks(sock)
    sock, fd = turned.comes()
    asked = [turned.loop.asked[fd]]
    for events in (select.EPOLLIN, select.EPOLLOUT):
        turned.loop.of[fd](events)
        asked.append(turned.loop.asked[fd])
    assert asked == [select.EPOLLIN, select.EPOLLOUT, select.EPOLLIN]
    turned.proves(sock, fd).finish(sock.recv(1000))


# ---- under TLS --------------------------------------------------------------------------------------


def test_the_deadline_of_a_handshake_holds_for_who_never_begins_tls(tmp_path: Path) -> None:
    made = Listens(tls=Authority(tmp_path).issue().load(), handshake_s=0.2)
    assert made.comes().recv(1) == b""
    made.close()


def test_connections_that_fail_alike_are_one_line_of_the_log_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With TLS, or by a wrong key."""
    for tls in (Authority(tmp_path).issue().load(), None):
        caplog.clear()
        made = Listens(tls=tls, handshake_s=3600.0)
        for _ in range(5):
            with contextlib.suppress(ConnectionResetError), made.comes() as sock:
                sock.sendall(bytes(handshake.RESPONSE_BYTES))
                while sock.recv(100):
                    pass
        made.close()
        assert len([line for line in caplog.messages if "connection was refused" in line]) == 1


def test_plain_bytes_and_a_stranger_s_certificate_end_a_connection_before_any_challenge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    made = Listens(tls=ours.issue().load(), handshake_s=3600.0)
    with contextlib.suppress(ConnectionResetError), made.comes() as plain:
        plain.sendall(bytes(100))
        while plain.recv(100):
            pass  # an alert of TLS
    other, challenge = theirs.issue(trust=ours).load().client, b""
    with contextlib.suppress(OSError), other.wrap_socket(made.comes(), server_hostname="127.0.0.1") as sock:
        challenge = sock.recv(handshake.CHALLENGE_BYTES)
    assert challenge == b""
    good, plain_writer = (
        make_tcp(made.events.put, ROGUE, tls=ours.issue().load()),
        make_tcp(made.events.put, ROGUE),
    )
    memory = allocate(4096)
    good.register(memory)
    plain_writer.register(memory)
    with pytest.raises(PeerRefused, match="only one of this side and"):
        plain_writer.connect(rank("here"), Endpoint("tcp", 4096, msgspec.msgpack.encode(made.address)), 60)
    plain_writer.close()
    good.connect(rank("here"), Endpoint("tcp", 4096, msgspec.msgpack.encode(made.address)), 60)
    # A peer reads its alert before the loop has logged why; whoever came later was let in after that.
    refused = [record.message for record in caplog.records if "connection was refused" in record.message]
    assert len(refused) == 2
    good.close()
    memory.close()
    made.close()
