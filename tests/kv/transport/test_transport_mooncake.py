"""`mooncake` over an engine that does what it is told; `tests/kv/conformance` has the real one."""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from ranks import options, rank
from segue.kv.errors import ConfigError, PeerRefused, TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport import mooncake
from segue.kv.transport.library.library_out import pieces
from segue.kv.transport.memory.pool_memory import Memory, host_region

PEER = rank("aaaa")
ENGINES = mooncake._engines


class Engine:
    """Mooncake's, as far as it is used: a piece runs until `end` says how it ended."""

    made: ClassVar[list[Engine]] = []
    answers: ClassVar[bool] = True
    starts: ClassVar[int] = 0
    registers: ClassVar[int] = 0
    listens: ClassVar[int] = 2

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        weakref.finalize(self, close_all, self.sockets)
        self.started: tuple[str, ...] = ()
        self.registered: list[tuple[int, int]] = []
        self.running: deque[int] = deque()
        self.ends: dict[int, int] = {}
        self.most = self._last = 0
        self.taken: list[tuple[int, int, int]] = []
        self.takes = True
        Engine.made.append(self)

    def initialize(self, *how: str) -> int:
        self.started = how
        self.sockets += [socket.create_server(("", 0)) for _ in range(self.listens)]
        return self.starts

    def get_rpc_port(self) -> int:
        return self.ports[0]

    @property
    def ports(self) -> list[int]:
        return [sock.getsockname()[1] for sock in self.sockets]

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        self.registered += zip(addresses, lengths, strict=True)
        return self.registers

    def send_probe(self, name: str) -> int:
        return 0 if self.answers else -102

    def batch_transfer_sync_write(self, name: str, *lists: list[int]) -> int:
        assert lists == ([], [], [])
        return 0

    def transfer_submit_write(self, name: str, source: int, target: int, nbytes: int) -> int:
        if not self.takes:
            return 0
        self._last += 1
        self.running.append(self._last)
        self.taken.append((source, target, nbytes))
        self.most = max(self.most, len(self.running))
        return self._last

    def transfer_check_status(self, number: int) -> int:
        """Frees what has ended: a second question would be about memory of somebody else."""
        assert number in self.running or number in self.ends, "asked again"
        return self.ends.pop(number, 0)

    def end(self, status: int = 1, count: int = 1) -> None:
        for _ in range(count):
            self.ends[self.running.popleft()] = status


def close_all(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mooncake, "_engines", lambda: Engine)
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)
    Engine.made, Engine.answers, Engine.starts, Engine.registers, Engine.listens = [], True, 0, 0, 2
    monkeypatch.setattr(mooncake, "HELD", held := [])
    yield
    Engine.made.clear()
    close_all(held)


def library() -> mooncake.MooncakeLibrary:
    made = mooncake.MooncakeLibrary("10.0.0.1")
    made.load()
    return made


def memories(nbytes: int) -> tuple[Memory, Memory]:
    a, b = (Memory([host_region(np.zeros(nbytes, np.uint8))]) for _ in range(2))
    return a, b


def writing(nbytes: int = 1 << 20) -> tuple[Any, Engine, Memory, Memory]:
    source, target = memories(nbytes)
    end = library().writing(PEER, source, target, b"10.0.0.2:15001")
    return end, Engine.made[-1], source, target


def rows(count: int, nbytes: int = 8) -> Any:
    [made] = pieces([CopyBlock(0, 0, count, nbytes, 2 * nbytes, 2 * nbytes)], 1 << 20, 5000)
    return made


def test_an_engine_has_few_pieces_at_once_and_a_post_is_done_when_the_last_has_landed() -> None:
    end, engine, source, target = writing()
    post = end.post(rows(1000))
    while not end.done(post):
        assert engine.running
        engine.end(count=min(100, len(engine.running)))
    assert engine.most == 256
    starts = source.regions[0].address, target.regions[0].address
    assert engine.taken == [(starts[0] + 16 * i, starts[1] + 16 * i, 8) for i in range(1000)]


def test_a_post_of_which_nothing_has_begun_is_not_done() -> None:
    end, engine, *_ = writing()
    first, second = end.post(rows(256)), end.post(rows(3))
    assert len(engine.running) == 256, "the first one has all the room"
    assert not end.done(second)
    engine.end(count=256)
    assert end.done(first)
    assert not end.done(second)
    engine.end(count=3)
    assert end.done(second)


@pytest.mark.parametrize("status", [-1, -2])
def test_a_piece_that_did_not_succeed_ends_the_path_and_is_not_asked_for_again(status: int) -> None:
    end, engine, *_ = writing()
    post = end.post(rows(3))
    engine.end()
    engine.end(status)
    with pytest.raises(TransferFailed, match=str(status)):
        end.done(post)
    del engine
    Engine.made.clear()
    assert end.close()


def test_a_piece_that_is_not_taken_ends_the_path() -> None:
    end, engine, *_ = writing()
    engine.takes = False
    with pytest.raises(TransferFailed, match="does not take"):
        end.post(rows(3))


@pytest.mark.parametrize("blob", [b"", b"host", b"host:", b"host\n:1", b"\xff:1", b"host:x"])
def test_what_is_no_address_of_an_engine_is_refused(blob: bytes) -> None:
    with pytest.raises(PeerRefused, match="address of its engine"):
        library().writing(PEER, *memories(64), blob)


def test_an_engine_that_does_not_answer_makes_no_path() -> None:
    Engine.answers = False
    with pytest.raises(TransferFailed, match=r"10\.0\.0\.2:15001 does not answer"):
        writing()


def test_over_tcp_only_the_receiver_registers_and_its_end_is_a_proof() -> None:
    _, engine, _, target = writing()
    assert engine.registered == []
    end = library().receiving(PEER, target, b"")
    region = target.regions[0]
    assert Engine.made[-1].registered == [(region.address, region.nbytes)]
    assert Engine.made[-1].started == ("10.0.0.1", "P2PHANDSHAKE", "tcp", "")
    assert end.blob == b"10.0.0.1:%d" % Engine.made[-1].get_rpc_port()
    lives = weakref.ref(Engine.made.pop())
    assert end.close()
    assert lives() is None, "with it the engine ends, which is the proof"


def refused(port: int) -> bool:
    """Nobody can listen at the port, however he tries, and who connects there is refused."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for family, at in ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        for shared in (0, 1):
            with socket.socket(family) as sock, contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
                sock.bind((at, port))
                sock.listen()
                return False
    return True


@pytest.mark.parametrize("engine", ["double", "real"])
def test_the_ports_of_an_end_whose_close_is_a_proof_are_nobody_s_afterwards(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that stood still goes on and connects to them: a later engine there would take its bytes."""
    if engine == "real":
        monkeypatch.setattr(mooncake, "_engines", ENGINES)
        if why := mooncake.MooncakeTransport.unusable():
            pytest.skip(why)
    before = {port for _, port in mooncake._listeners()}
    end = mooncake.MooncakeLibrary("127.0.0.1")
    end.load()
    closing = end.receiving(PEER, memories(4096)[0], b"")
    ports = {port for _, port in mooncake._listeners()} - before
    assert len(ports) == 2
    port = int(closing.blob.rpartition(b":")[2])
    with socket.create_connection(("127.0.0.1", port)):  # lingers when the engine has ended
        Engine.made.clear()
        assert closing.close()
    assert all(refused(port) for port in ports)


def taken(take: Any, other: socket.socket, port: int) -> Any:
    """`take`, before which `other` takes `port`."""

    def late(wanted: int) -> socket.socket:
        if wanted == port:
            other.bind(("", port))
        return take(wanted)

    return late


@pytest.mark.parametrize("why", ["taken", "unknown", "too many"])
def test_an_end_whose_ports_cannot_be_held_proves_nothing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "too many":
        monkeypatch.setattr(mooncake, "_MAX_HELD", 1)
    Engine.listens = 1 if why == "unknown" else 2
    end = library().receiving(PEER, memories(64)[0], b"")
    ports = Engine.made.pop().ports
    with socket.socket() as other:
        if why == "taken":  # by who was faster than we
            monkeypatch.setattr(mooncake, "_taken", taken(mooncake._taken, other, ports[0]))
        assert not end.close()


def test_an_end_of_which_nothing_was_left_to_write_needs_no_port() -> None:
    end = library().receiving(PEER, memories(64)[0], b"")
    ports = Engine.made.pop().ports
    end.unsettled = False
    assert end.close()
    for port in ports:
        socket.create_server(("", port)).close()


def test_an_engine_that_somebody_else_holds_too_lives_on_and_its_end_is_no_proof() -> None:
    end = library().receiving(PEER, memories(64)[0], b"")
    assert Engine.made
    assert not end.close()
    end, _engine, *_ = writing()
    end.post(rows(3))
    assert not end.close()


def test_over_another_protocol_both_register_and_no_end_is_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("MOONCAKE_DEVICE", "mlx5_0")
    end, engine, source, target = writing()
    assert [nbytes for _, nbytes in engine.registered] == [source.nbytes]
    assert engine.started[2:] == ("rdma", "mlx5_0")
    end.post(rows(3))
    assert not end.close()
    assert not library().receiving(PEER, target, b"").close()


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize(
    "how", ["runs", "has landed", "is said to have failed", "timed out", "was not taken"]
)
def test_dropping_an_engine_ends_its_reading_over_tcp_or_where_all_has_landed(
    protocol: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", protocol)
    end, engine, *_ = writing()
    engine.takes = how != "was not taken"
    with contextlib.suppress(TransferFailed):
        post = end.post(rows(1))
        engine.end({"runs": 0, "has landed": 1, "is said to have failed": -1, "timed out": -2}[how])
        end.done(post)
    del engine
    Engine.made.clear()
    assert end.close() is (protocol == "tcp" or how == "has landed")


@pytest.mark.parametrize("status", [-1, 1])
def test_an_engine_that_does_not_start_or_takes_no_memory_makes_no_end(status: int) -> None:
    memory, _ = memories(64)
    Engine.registers = status
    with pytest.raises(TransferFailed, match="cannot register") as caught:
        library().receiving(PEER, memory, b"")
    assert not caught.value.info.retryable
    Engine.starts = status
    for make in (lambda: library().receiving(PEER, memory, b""), writing):
        with pytest.raises(TransferFailed, match="cannot start an engine"):
            make()


def test_peers_are_told_the_address_that_is_advertised() -> None:
    made = mooncake.MooncakeTransport(
        lambda _event: None, options(PEER, host="0.0.0.0", advertise="10.0.0.7")
    )
    made._library.load()
    assert made._library.receiving(PEER, memories(64)[0], b"").blob.startswith(b"10.0.0.7:")
    made.close()


def test_only_the_engine_s_listener_looks_up_more_often_and_no_other_socket_is_touched() -> None:
    """Its number is all that is known of it; all descriptors of the process are gone through."""

    def waits(sock: socket.socket) -> bytes:
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)

    with socket.create_server(("127.0.0.1", 0)) as engines, socket.create_server(("127.0.0.1", 0)) as other:
        port = engines.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as peer, engines.accept()[0] as accepted:
            mooncake._set_up(port, set())
            gc.collect()
            assert waits(engines) == struct.pack("ll", 0, 20_000)
            assert [waits(sock) for sock in (other, peer, accepted)] == [bytes(16)] * 3
            peer.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_a_socket_whose_option_cannot_be_set_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is somebody else's, who may have closed it meanwhile, and its number may be another one's by now."""

    class Stubborn(socket.socket):
        def setsockopt(self, *option: Any) -> None:
            raise OSError("closed meanwhile")

    with socket.create_server(("127.0.0.1", 0)) as engines:
        port = engines.getsockname()[1]
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", Stubborn)
            with pytest.raises(OSError, match="closed meanwhile"):
                mooncake._set_up(port, set())
        gc.collect()
        socket.create_connection(("127.0.0.1", port)).close()


def test_an_address_of_version_6_is_refused() -> None:
    with pytest.raises(ConfigError, match="IPv4"):
        mooncake.MooncakeTransport(lambda _event: None, options(PEER, host="::1"))


def test_a_protocol_that_says_written_too_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConfigError, match="unset it"):
        mooncake.MooncakeTransport(lambda _event: None, options(PEER))


def test_a_host_without_the_package_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(mooncake, "_engines", missing)
    assert mooncake.MooncakeTransport.unusable() == (
        "Mooncake cannot be loaded (libibverbs.so.1: cannot open shared object file); pip install "
        "'segue[mooncake]', which needs libibverbs, libnuma and libcurl of the system"
    )
