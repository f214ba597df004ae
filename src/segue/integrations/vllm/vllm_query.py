"""`GET /query` of the concurrent flow, in the form of vLLM's MooncakeConnector: routers ask prefill for the
`engine_id` that they then give to decode, and decode asks for the port of prefill's sessions."""

from __future__ import annotations

import asyncio

import msgspec

from segue.integrations.vllm.vllm_orders import SessionAddress
from segue.integrations.vllm.vllm_params import engine_id
from segue.kv import BootstrapUnreachable, ConfigError, InvalidRequest, LeaderId, PeerRestarted

_MAX_REQUEST_BYTES = 8192
_MAX_ANSWER_BYTES = 65536
_MAX_CONNECTIONS = 64
_REQUEST_S = 5.0


class _DpRankEntry(msgspec.Struct, frozen=True):
    """One DP rank: its `engine_id`, and for each TP and PP rank the address of its worker."""

    engine_id: str
    worker_addr: dict[int, dict[int, str]]


_ANSWER = msgspec.json.Decoder(dict[int, _DpRankEntry])


def query_answer(address: SessionAddress) -> bytes:
    """The body that a prefill leader at `address` answers with."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    entry = _DpRankEntry(engine_id(address.leader), {0: {0: f"{host}:{address.port}"}})
    return msgspec.json.encode({address.dp_rank: entry})


async def serve_query(host: str, port: int, answer: bytes) -> asyncio.Server:
    """Answer `GET /query` with `answer` until the server is closed. Raises ConfigError for a port in use."""
    open_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            if open_connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(head.split(b"\r\n", 1)[0], answer))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that left, is late or sends no HTTP costs nobody anything
        finally:
            open_connections -= 1
            writer.close()

    try:
        return await asyncio.start_server(serve, host, port, limit=_MAX_REQUEST_BYTES)
    except OSError as error:
        raise ConfigError(f"query_port {port}: {error.strerror}") from None


def _response(request_line: bytes, answer: bytes) -> bytes:
    status, body = b"200 OK", answer
    method, _, rest = request_line.partition(b" ")
    if method != b"GET" or rest.split(b" ")[0].split(b"?")[0] != b"/query":
        status, body = b"404 Not Found", b'{"detail":"only GET /query is served here"}'
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        % (status, len(body), body)
    )


async def session_port(host: str, port: int, leader: LeaderId, within_s: float) -> int:
    """The port of the sessions of `leader`, whose `GET /query` is at `host`:`port`.

    Raises BootstrapUnreachable if nobody answers, PeerRestarted if another process does, InvalidRequest for
    an answer of another form.
    """
    try:
        async with asyncio.timeout(within_s):
            body = await _get(host, port)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise BootstrapUnreachable(f"GET http://{host}:{port}/query: {error or 'no answer'}") from None
    try:
        entries = _ANSWER.decode(body)
        entry = entries.get(leader.dp_rank)
        found = 0 if entry is None else int(entry.worker_addr[0][0].rpartition(":")[2])
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise InvalidRequest(f"http://{host}:{port}/query is no segue connector's: {error}") from None
    if entry is None or entry.engine_id != engine_id(leader):
        raise PeerRestarted(f"http://{host}:{port}/query has no engine {engine_id(leader)} any more")
    if not 0 < found < 2**16:
        raise InvalidRequest(f"http://{host}:{port}/query names the port {found}")
    return found


async def _get(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, limit=_MAX_ANSWER_BYTES)
    try:
        writer.write(b"GET /query HTTP/1.1\r\nhost: segue\r\nconnection: close\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            return b""
        body = bytearray()
        while len(body) <= _MAX_ANSWER_BYTES and (more := await reader.read(_MAX_ANSWER_BYTES)):
            body += more
        return bytes(body)
    finally:
        writer.close()
