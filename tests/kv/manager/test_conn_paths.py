"""Paths to peers that cannot be opened: their own peer's trouble, typed and visible, and nobody else's."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_sides import Side, assert_handed_over, joined, spec

from segue.kv.errors import ErrorCode, LayoutMismatch, PeerRefused, SegueError
from segue.kv.ids import (
    LeaderId,
    RankId,
    Role,
    new_incarnation,
)
from segue.kv.peers import join
from segue.kv.protocol.messages import HANDOFF_VERSIONS, LeaderInfo
from segue.kv.session.api import PeerInfo
from segue.kv.transport.base import Endpoint

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
@given(st.dictionaries(st.sampled_from(["dp_size", "max_transfers", "nbytes", "ranks"]), HOSTILE))
def test_no_number_of_a_peer_makes_joining_fail_but_typed(numbers: dict[str, int]) -> None:
    nbytes = numbers.pop("nbytes", 100)
    ranks = numbers.pop("ranks", 1) % 4
    told = info(endpoints={"tcp": [endpoint_bytes(nbytes)] * ranks}, ranks=[spec()] * ranks)
    hello = msgspec.msgpack.encode(msgspec.to_builtins(told, builtin_types=(bytes,)) | numbers)
    try:
        joined = join(Role.PREFILL, info(), PeerInfo(LeaderId(new_incarnation()), Role.DECODE, "here", hello))
    except (PeerRefused, LayoutMismatch):
        return
    assert joined.names == ["tcp"]
    assert nbytes > 0


@pytest.mark.parametrize("bug", [ValueError("negative"), OverflowError("too large"), KeyError("x")])
def test_a_bug_while_a_path_is_opened_ends_that_session_typed_and_no_other(bug: Exception) -> None:
    prefill, decode, good = Side(Role.PREFILL), Side(Role.DECODE), Side(Role.DECODE)
    errors: queue.Queue[SegueError] = queue.Queue()
    shm: Any = prefill.manager._ranks[0]._by_name["shm"]
    connect, closed = shm.connect, decode.manager.closed

    def broken(peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        if peer == RankId(decode.me):
            raise bug
        connect(peer, endpoint, timeout_s)

    def note(session: Any, error: SegueError) -> None:
        closed(session, error)
        errors.put(error)

    shm.connect, decode.manager.closed = broken, note
    with joined(prefill, decode, good):
        error = errors.get(timeout=60)
        assert error.info.code is ErrorCode.INTERNAL
        assert repr(bug)[:12] in error.info.text
        assert_handed_over(prefill, good, 8, 8)


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
    prefill, good = Side(Role.PREFILL, transport="tcp"), Side(Role.DECODE, transport="tcp")
    bad = [Side(Role.DECODE, transport="tcp") for _ in range(8)]
    began = threading.Semaphore(0)
    ended: list[RankId] = []
    tcp: Any = prefill.manager._ranks[0]._by_name["tcp"]
    connect = tcp.connect

    def noted(peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        began.release()
        try:
            connect(peer, endpoint, timeout_s)
        finally:
            ended.append(peer)

    tcp.connect = noted
    with swallowing() as port:
        for side in bad:
            said = side.manager.compatibility
            own = msgspec.msgpack.decode(said.info.endpoints["tcp"][0], type=Endpoint)
            address = msgspec.msgpack.decode(own.data) | {"port": port}
            lie = msgspec.structs.replace(own, data=msgspec.msgpack.encode(address))
            said.hello = msgspec.msgpack.encode(
                msgspec.structs.replace(said.info, endpoints={"tcp": [msgspec.msgpack.encode(lie)]})
            )
        with joined(prefill, *bad):
            for _ in bad:
                assert began.acquire(timeout=60), "a peer's connect waits for another's"
            assert not ended, "the port swallows nothing"
            good.manager.start()
            good.manager.add_peer(prefill.me, *prefill.manager.plane.address)
            assert_handed_over(prefill, good, 8, 8)
            assert ended == [RankId(good.me)]
            good.close()
