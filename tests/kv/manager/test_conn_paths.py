"""Paths to peers that cannot be opened: their own peer's trouble, typed and visible, and nobody else's."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_manager import LIMITS, Side, ask, assert_handed_over, receive, spec

from segue.kv.config import KVConfig, LeaderRuntime
from segue.kv.errors import ErrorCode, Internal, LayoutMismatch, PeerRefused, SegueError
from segue.kv.ids import (
    Incarnation,
    KVPoll,
    LeaderId,
    RankId,
    Role,
    TransferId,
    new_incarnation,
    new_room,
)
from segue.kv.peers import join
from segue.kv.protocol.messages import HANDOFF_VERSIONS, LeaderInfo
from segue.kv.ranks.local_rank import local_rank
from segue.kv.ranks.rank_group import Ranks
from segue.kv.session.api import PeerInfo
from segue.kv.session.dialer import Dialer
from segue.kv.transport.base import Endpoint, EventSink, Transport
from segue.kv.transport.kinds import TransportKinds
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.options import TransportOptions

#: What numbers a faulty peer, or a changed byte, may put where a size is due.
HOSTILE = st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])


def endpoint_bytes(nbytes: int, name: str = "tcp", data: bytes = b"") -> bytes:
    return msgspec.msgpack.encode({"transport": name, "nbytes": nbytes, "data": data})


def info(**changes: Any) -> LeaderInfo:
    fields: dict[str, Any] = {
        "versions": HANDOFF_VERSIONS,
        "model": "m",
        "dp_size": 1,
        "ranks": [spec()],
        "endpoints": {"tcp": [endpoint_bytes(100)]},
        "max_transfers": 8,
    }
    return LeaderInfo(**(fields | changes))


@pytest.mark.parametrize("nbytes", [-1, 0, 2**63, 2**64 - 1])
def test_an_endpoint_of_an_impossible_size_is_refused_when_it_is_read(nbytes: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(endpoint_bytes(nbytes), type=Endpoint)
    peer = PeerInfo(
        LeaderId(new_incarnation()),
        Role.DECODE,
        "here",
        msgspec.msgpack.encode(info(endpoints={"tcp": [endpoint_bytes(nbytes)]})),
    )
    with pytest.raises(LayoutMismatch, match="endpoint"):
        join(Role.PREFILL, info(), peer)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(["protocol", "dp_size", "max_transfers", "nbytes", "ranks"]), HOSTILE))
def test_no_number_of_a_peer_makes_joining_fail_but_typed(numbers: dict[str, int]) -> None:
    nbytes = numbers.pop("nbytes", 100)
    ranks = numbers.pop("ranks", 1) % 4
    changes: dict[str, Any] = {
        **numbers,
        "endpoints": {"tcp": [endpoint_bytes(nbytes)]},
        "ranks": [spec()] * ranks,
    }
    hello = msgspec.msgpack.encode(msgspec.to_builtins(info()) | msgspec.to_builtins(changes))
    try:
        joined = join(Role.PREFILL, info(), PeerInfo(LeaderId(new_incarnation()), Role.DECODE, "here", hello))
    except (PeerRefused, LayoutMismatch):
        return
    assert joined.transport == "tcp"
    assert nbytes > 0


@contextmanager
def joined_with(prefill: Side, endpoints: dict[str, list[bytes]]) -> Iterator[Side]:
    """A decode side that says these endpoints of itself, with a session to `prefill`."""
    decode = Side(Role.DECODE, transport="tcp")
    manager = decode.manager
    manager.compatibility.hello = msgspec.msgpack.encode(
        msgspec.structs.replace(manager.compatibility.info, endpoints=endpoints)
    )
    try:
        manager.start()
        manager.add_peer(prefill.me, *prefill.manager.plane.address)
        yield decode
    finally:
        decode.close()


@pytest.mark.parametrize("bug", [ValueError("negative"), OverflowError("too large"), KeyError("x")])
def test_a_bug_while_a_path_is_opened_ends_that_session_typed_and_no_other(bug: Exception) -> None:
    prefill, decode, good = Side(Role.PREFILL), Side(Role.DECODE), Side(Role.DECODE)
    ended = threading.Event()
    errors: list[SegueError] = []
    try:
        connect = prefill.manager._ranks._ranks[0]._by_name["shm"].connect

        def broken(peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
            if peer == RankId(decode.me):
                raise bug
            connect(peer, endpoint, timeout_s)

        prefill.manager._ranks._ranks[0]._by_name["shm"].connect = broken  # type: ignore[method-assign]
        closed = decode.manager.closed

        def note(session: Any, error: SegueError) -> None:
            errors.append(error)
            closed(session, error)
            ended.set()

        decode.manager.closed = note  # type: ignore[method-assign]
        for side in (prefill, decode, good):
            side.manager.start()
        decode.manager.add_peer(prefill.me, *prefill.manager.plane.address)
        good.manager.add_peer(prefill.me, *prefill.manager.plane.address)
        assert ended.wait(60)
        assert errors[0].info.code is ErrorCode.INTERNAL
        assert repr(bug)[:12] in errors[0].info.text
        assert_handed_over(prefill, good, 8, 8)
    finally:
        for side in (decode, good, prefill):
            side.close()


# ---- data ports that swallow packets -----------------------------------------------------------


@contextmanager
def swallowing() -> Iterator[int]:
    """A port of loopback at which connects hang: its backlog is full, and nobody accepts."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port


def test_peers_whose_data_ports_swallow_packets_keep_no_other_from_joining() -> None:
    limits = msgspec.structs.replace(LIMITS, connect_s=60.0)
    prefill = Side(Role.PREFILL, transport="tcp", limits=limits)
    good = Side(Role.DECODE, transport="tcp")
    bad = [Side(Role.DECODE, transport="tcp") for _ in range(8)]
    began = threading.Semaphore(0)
    ended: list[RankId] = []
    try:
        with swallowing() as port:
            tcp: Any = prefill.manager._ranks._ranks[0]._by_name["tcp"]
            connect = tcp.connect

            def noted(peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
                began.release()
                try:
                    connect(peer, endpoint, timeout_s)
                finally:
                    ended.append(peer)

            tcp.connect = noted
            prefill.manager.start()
            for side in bad:
                own = msgspec.msgpack.decode(
                    side.manager.compatibility.info.endpoints["tcp"][0], type=Endpoint
                )
                address = msgspec.msgpack.decode(own.data)
                address["port"] = port
                lie = msgspec.structs.replace(own, data=msgspec.msgpack.encode(address))
                endpoints = {"tcp": [msgspec.msgpack.encode(lie)]}
                side.manager.compatibility.hello = msgspec.msgpack.encode(
                    msgspec.structs.replace(side.manager.compatibility.info, endpoints=endpoints)
                )
                side.manager.start()
                side.manager.add_peer(prefill.me, *prefill.manager.plane.address)
            for _ in bad:
                assert began.acquire(timeout=60), "a peer's connect waits for another's"
            assert not ended, "the port swallows nothing"
            good.manager.start()
            good.manager.add_peer(prefill.me, *prefill.manager.plane.address)
            assert_handed_over(prefill, good, 8, 8)
            assert ended == [RankId(good.me)]
    finally:
        for side in (*bad, good, prefill):
            side.close()


class Only(TransportKinds):
    """One transport, whatever is asked for."""

    def __init__(self, transport: Any) -> None:
        super().__init__({})
        self._transport = transport

    def create(self, name: str, on_event: EventSink, options: TransportOptions) -> Transport:
        return self._transport


class Slow:
    """A transport whose connects hang until they are let go."""

    def __init__(self) -> None:
        self.running: dict[RankId, int] = {}
        self.most = 0
        self.let_go = threading.Event()
        self.began = threading.Semaphore(0)
        self._lock = threading.Lock()

    def register(self, memory: object) -> Endpoint:
        return Endpoint("tcp", 1, b"")

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        with self._lock:
            self.running[peer] = self.running.get(peer, 0) + 1
            self.most = max(self.most, self.running[peer])
        self.began.release()
        self.let_go.wait(60)
        with self._lock:
            self.running[peer] -= 1


def test_one_peer_that_comes_again_and_again_has_one_connect_under_way() -> None:
    slow = Slow()
    config = KVConfig(role=Role.PREFILL, model="m", spec=spec(), transports=["tcp"])
    memory = allocate(spec().nbytes)
    rank = local_rank(config, memory, LeaderRuntime(transports=Only(slow)))  # type: ignore[arg-type, return-value]
    transports = Ranks([rank], config.me, Role.PREFILL, 8)
    peer, other = LeaderId(new_incarnation()), LeaderId(new_incarnation())

    async def main() -> None:
        for each in (peer, other):
            transports.choose(each, "tcp", ((0, 0),), ())
        for _ in range(5):  # its session opens and ends, as often as it likes
            task = asyncio.ensure_future(transports.connect(peer, info(), 60.0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        last = asyncio.ensure_future(transports.connect(peer, info(), 60.0))
        others = asyncio.ensure_future(transports.connect(other, info(), 60.0))
        await asyncio.to_thread(slow.began.acquire)
        await asyncio.to_thread(slow.began.acquire)
        assert slow.running == {RankId(peer): 1, RankId(other): 1}
        slow.let_go.set()
        await asyncio.gather(last, others)
        assert slow.most == 1
        assert not transports._connecting

    asyncio.run(main())
    memory.close()


# ---- who dials ---------------------------------------------------------------------------------


def test_a_bug_does_not_end_the_dialling_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [KeyError("a bug"), OverflowError("port must be 0-65535")]
    told: list[SegueError] = []

    async def main() -> None:
        there = asyncio.Event()

        async def connect() -> Any:
            if outcomes:
                raise outcomes.pop(0)
            there.set()
            await asyncio.Event().wait()

        monkeypatch.setattr("segue.kv.session.tasks.FIRST_PAUSE_S", 0.001)
        dialer = Dialer(connect, "here", refused=told.append, patience_s=5.0)
        dialer.start(asyncio.get_running_loop())
        await asyncio.wait_for(there.wait(), 60)
        dialer.stop()

    asyncio.run(main())
    assert [type(error) for error in told] == [Internal, Internal]


@pytest.mark.parametrize("port", [-1, 0, 65536, 2**31, 2**63])
def test_a_port_that_is_none_is_a_typed_refusal_of_what_waits_for_that_peer(port: int) -> None:
    decode = Side(Role.DECODE)
    absent = LeaderId(Incarnation("e" * 32))
    try:
        decode.manager.start()
        decode.manager.add_peer(absent, "127.0.0.1", port)
        transfer = TransferId(new_room(), 0, absent, decode.me)
        ask(decode, lambda: decode.manager.plane._dialers[absent])._patience_s = 0.0
        receiver = receive(decode.manager, transfer, 8, 120)
        while receiver.poll() is not KVPoll.FAILED:
            decode.changes.get(timeout=60)
        assert receiver.error is not None
        assert receiver.error.code is ErrorCode.BOOTSTRAP_UNREACHABLE
    finally:
        decode.close()
