"""For every target a hypothesis strategy of messages of the right types, with each of their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import fuzz_endpoints
import fuzz_http
import fuzz_peers
import fuzz_wire
import msgspec
import numpy as np
from fuzz_changes import SEPARATOR
from fuzz_types import ANYTHING, TEXTS, Types
from hypothesis import strategies as st
from targets import TARGETS

from segue.cli.flags import KNOWN
from segue.kv.errors import ErrorInfo
from segue.kv.ids import RankId, TransferId
from segue.kv.layout.spec import PoolSpec
from segue.kv.protocol.messages import HandoffMessage, LeaderInfo
from segue.kv.session import frames
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.shm.shm_wire import ShmAddress
from segue.kv.transport.staged.staged_wire import FromStagedReader, FromStagedWriter, StagedMessage
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_sockets import TcpAddress
from segue.server.frontend.request_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from segue.server.instance.kv_settings import LeaderMessage
from segue.server.messages.control import ControlMessage, Outputs
from segue.server.messages.ticket import Ticket
from segue.server.registry.registry_records import DrainFlag, InstanceList, InstanceRecord, RoomRecord
from segue.server.supervisor.lifeline import CannotStart, Ready

Bytes = st.SearchStrategy[bytes]


def several(one: Bytes, most: int = 3) -> Bytes:
    return st.lists(one, min_size=1, max_size=most).map(SEPARATOR.join)


def some_of(parts: Iterable[st.SearchStrategy[str]], most: int = 8) -> Bytes:
    """Texts after one another."""
    return st.lists(st.one_of(*parts), max_size=most).map(lambda found: "".join(found).encode())


# ---- behind and before a session ------------------------------------------------------------------

_transfer = st.sampled_from(
    [
        list(msgspec.to_builtins(each))
        for each in (fuzz_peers.TRANSFER, fuzz_peers.TRANSFER, fuzz_peers.SECOND)
    ]
)
#: Mostly of the hand-off that is open: what is for another one is dropped at the door.
_OURS = _transfer | _transfer | _transfer | Types().of(TransferId)
_CLAIMS = st.just(fuzz_peers.CLAIM) | st.just(b"") | st.binary(max_size=70)
PEERS = Types(known={TransferId: _OURS}, fields={"claim": _CLAIMS})
FRAMES = Types()

_specs = st.sampled_from(
    [
        msgspec.to_builtins(msgspec.structs.replace(fuzz_peers.SPEC, **change))
        for change in ({}, {"pages": 64}, {"page_tokens": 8}, {"pages": 2**40})
    ]
)
_endpoint = st.sampled_from([msgspec.msgpack.encode(e) for e in ({}, [], "x")]) | st.just(
    fuzz_peers.info().endpoints["fake"][0]
)
JOIN = Types(
    known={PoolSpec: _specs | _specs | Types().of(PoolSpec)},
    fields={
        "versions": st.just(msgspec.to_builtins(fuzz_peers.HANDOFF_VERSIONS))
        | st.lists(st.integers(0, 9), max_size=3),
        "model": st.just("lineage-1") | TEXTS,
        "endpoints": st.dictionaries(
            st.sampled_from(("fake", "shm", "tcp")), st.lists(_endpoint, max_size=2), max_size=2
        ),
    },
)

#: Nothing that would have to be looked up: a fuzzer asks no resolver.
HOSTS = st.sampled_from(("127.0.0.1", "::1", "localhost", "", "a\0b", "é" * 100, "256.1.1.1", "127.1"))


def _handshake(peer: RankId) -> bytes:
    listener = handshake.ListenerProof(fuzz_wire.KEY)
    listener._nonce = b"n" * 16
    return handshake.WriterProof(fuzz_wire.KEY, peer).respond(listener.challenge())


_handshakes = st.builds(_handshake, st.binary(min_size=24, max_size=24).map(handshake.unpack_rank))


def _answers(reason: str | None) -> bytes:
    listener = handshake.ListenerProof(fuzz_wire.KEY)
    said = listener.challenge()
    if reason is not None:
        return said + listener.refuse(reason)
    return said + listener.accept(handshake.WriterProof(fuzz_wire.KEY, fuzz_wire._GOOD).respond(said))[1]


U64 = st.integers(0, 2**64 - 1) | st.sampled_from((0, 1, 28, 4096, 65536, 2**63, 2**64 - 100))


def _part(epoch: int, part: int, rows: list[tuple[int, int]], nbytes: int | None) -> bytes:
    """A part of `nbytes`, or of as many as its rows have."""
    nbytes = sum(length for _, length in rows) % 2**64 if nbytes is None else nbytes
    return tcp_wire.pack_header(epoch, part, nbytes, np.array(rows, "<u8").reshape(-1, 2).tobytes())


_rows = st.lists(st.tuples(U64 | st.integers(0, 70000), U64 | st.integers(1, 300)), max_size=3)
_parts = st.builds(_part, U64, st.integers(0, 2**32 - 1), _rows, st.none() | U64)

STAGED = Types(
    fields={
        "number": st.integers(0, 9),
        "epoch": st.sampled_from((7, 7, 7, 8)),
        "nbytes": st.sampled_from((1, 16, 64, 65)),
        "inner_epoch": st.integers(0, 3),
        "rows": st.sampled_from((1, 2, 8)),
        "row_bytes": st.sampled_from((1, 8, 16)),
        "src_offset": st.sampled_from((0, 8, 56, 2**40)),
        "dst_offset": st.sampled_from((0, 100, 1000, 4095, 2**40)),
    }
)

# ---- the doors ------------------------------------------------------------------------------------

JSON = Types(text_only=True)
_METHODS = ("GET", "PUT", "DELETE", "POST", "HEAD", "")
_PATHS = (
    f"v1/instances/{fuzz_endpoints.RECORD.incarnation}/ranks/0",
    f"v1/instances/{fuzz_endpoints.RECORD.incarnation}/draining",
    f"v1/instances/{fuzz_endpoints.RECORD.incarnation}",
    "v1/instances?role=decode&version=1",
    "v1/rooms/5",
    "v1/rooms/18446744073709551616",
    "v1/health",
    "v1/instances/%00/ranks/-1",
)
_queries = st.builds(
    lambda method, path, body: f"{method} {path}\n".encode() + body,
    st.sampled_from(_METHODS),
    st.sampled_from(_PATHS),
    st.one_of(*map(JSON.encoded, (InstanceRecord, RoomRecord, DrainFlag))),
)
_listed = JSON.encoded(InstanceList) | JSON.of(ErrorInfo).map(lambda e: msgspec.json.encode({"error": e}))

_talks = st.builds(
    lambda pieces, pause, said: bytes((pieces, pause)) + b"".join(said),
    st.integers(0, 7),
    st.integers(0, 5),
    st.lists(st.sampled_from(fuzz_http.SAID) | st.binary(max_size=40), min_size=1, max_size=6),
)

_TOOLS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "\n",
    " ",
    "[",
    "]",
    ", ",
)
_calls = st.fixed_dictionaries({"name": TEXTS | ANYTHING, "arguments": ANYTHING}).map(
    lambda call: msgspec.json.encode(call).decode()
)

_keys = st.sampled_from([*KNOWN["serve"], *KNOWN["prefill"], "nothing"])
_values = st.sampled_from(
    ("1", "0", "-1", "1.5", "1e9", "nan", "true", "yes", "auto", "debug", "tcp", "", "a,b")
)
_toml_values = _values.map(lambda v: f'"{v}"') | st.sampled_from(
    ("1", "1.5", "true", "inf", "[1]", "{a = 1}")
)
_lines = st.lists(
    st.builds("{} = {}".format, _keys, _toml_values) | st.sampled_from(("[serve]", "[decode]", "[x.y]")),
    max_size=6,
)


def _settings(line: Callable[[str, str], str]) -> Bytes:
    one = st.builds(line, _keys, _values)
    return st.lists(one, max_size=5).map(lambda lines: "\n".join(lines).encode())


TYPED: dict[str, Bytes] = {
    "session_bytes": st.lists(FRAMES.encoded(frames.SessionFrame), min_size=1, max_size=3).map(
        lambda bodies: b"".join(fuzz_wire._frame(frames.KIND_SESSION, body) for body in bodies)
    ),
    "session_stranger": several(FRAMES.encoded(frames.SessionFrame)),
    "session_proven": several(FRAMES.encoded(frames.SessionFrame)),
    "session_open": several(PEERS.encoded(LeaderMessage)),
    "transport_listener": _handshakes,
    "transport_writer": st.builds(_answers, st.none() | TEXTS),
    "tcp_part": _parts,
    "tcp_raw_part": _parts,
    "tcp_ack": st.builds(tcp_wire.pack_ack, st.integers(0, 255), st.integers(0, 2**32 - 1)),
    "tcp_endpoint": Types(fields={"host": HOSTS, "version": st.sampled_from((1, 1, 2))}).encoded(TcpAddress),
    "shm_endpoint": Types(fields={"version": st.sampled_from((1, 1, 2))}).encoded(ShmAddress),
    "shm_verdict": st.lists(st.sampled_from((0, 1, 2, 2, 3, 4, 128, 130, 255)), max_size=6).map(bytes),
    "staged_message": STAGED.encoded(StagedMessage),
    "staged_reader": several(STAGED.encoded(FromStagedWriter), 24),
    "staged_writer": several(STAGED.encoded(FromStagedReader), 24),
    "report": JSON.encoded(Ready | CannotStart),
    "join": JOIN.encoded(LeaderInfo),
    "handoff_prefill": several(PEERS.encoded(HandoffMessage)),
    "handoff_rooms": several(PEERS.encoded(HandoffMessage)),
    "handoff_decode": several(PEERS.encoded(HandoffMessage)),
    "submit": PEERS.encoded(ControlMessage),
    "ticket": Types().encoded(Ticket) | JSON.encoded(Ticket),
    "outputs": Types(fields={"request_id": st.just("r0"), "position": st.integers(0, 3)}).encoded(Outputs),
    "public_http": _talks,
    "registry_query": _queries,
    "registry_answer": st.builds(lambda status, body: bytes([status]) + body, st.integers(0, 5), _listed),
    "openai_chat": JSON.encoded(ChatBody),
    "openai_completion": JSON.encoded(CompletionBody),
    "openai_tokenize": JSON.encoded(TokenizeBody) | JSON.encoded(DetokenizeBody),
    "tool_calls": some_of((st.sampled_from(_TOOLS), _calls, TEXTS)),
    "settings_file": _lines.map(lambda lines: "\n".join(lines).encode()),
    "settings_environ": _settings(lambda key, value: f"SEGUE_{key.upper()}={value}"),
    "settings_words": _settings(lambda key, value: f"--{key.replace('_', '-')}\n{value}"),
}

assert set(TYPED) == set(TARGETS), set(TYPED) ^ set(TARGETS)
