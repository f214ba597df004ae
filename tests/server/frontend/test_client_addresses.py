"""No address that a client sends is contacted (lesson 19): the registry alone names hosts."""

from __future__ import annotations

import ast
import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from frontend_rig import Wire, cycle_over

import segue
from segue.engine.request import Request, SamplingParams
from segue.kv.limits import Limits
from segue.server.frontend.app import OpenAIServer, OpenAIServerSettings, build_app
from segue.server.frontend.request_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.http.http_exchange import EXCHANGE, HttpExchange
from segue.server.messages.ticket import Ticket
from segue.server.observe.metrics import Metrics

#: Addresses and pins that routers put into bodies and headers.
FIELDS: dict[str, Any] = {
    "bootstrap_host": "127.0.0.1",
    "bootstrap_room": 77,
    "room": 77,
    "routed_dp_rank": 0,
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 0,
    "prefill_url": "http://127.0.0.1:{port}",
    "registry": "http://127.0.0.1:{port}",
}
HEADERS = {
    "x-data-parallel-rank": "0",
    "x-forwarded-host": "127.0.0.1:{port}",
    "x-forwarded-for": "127.0.0.1",
    "forwarded": "host=127.0.0.1:{port}",
    "x-prefill-host": "127.0.0.1:{port}",
}


class Trap:
    """A host that nobody registered; counts who comes."""

    def __init__(self) -> None:
        self.visits = 0
        self.server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Trap:
        async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.visits += 1
            writer.close()

        self.server = await asyncio.start_server(visited, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self.server is not None
        self.server.close()
        await self.server.wait_closed()


def bodies(port: int) -> dict[str, dict[str, Any]]:
    fields = {k: v.format(port=port) if isinstance(v, str) else v for k, v in FIELDS.items()}
    remote = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_engine_id": "x",
    }
    extra = fields | {"bootstrap_port": port, "kv_transfer_params": remote}
    image = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/x.png"}}
    message = {"role": "user", "content": "hello"}
    return {
        "/v1/completions": {"prompt": "hello", "max_tokens": 2, **extra},
        "/v1/chat/completions": {"messages": [message], "max_tokens": 2, **extra},
        "/v1/chat/completions?": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}],
            **extra,
        },
        "/tokenize": {"prompt": "hello", **extra},
        "/detokenize": {"tokens": [5], **extra},
    }


def without_sockets(app: Any) -> Any:
    """`app`, called as our HTTP server does, with ASGI's messages for a client of this process."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        wire = Wire()
        scope[EXCHANGE] = lambda: HttpExchange(cycle_over(wire))
        await app(scope, receive, send)
        if wire.said:
            head, _, body = wire.said.partition(b"\r\n\r\n")
            await send({"type": "http.response.start", "status": int(head.split()[1]), "headers": []})
            await send({"type": "http.response.body", "body": body})

    return call


def test_lesson_19_no_field_and_no_header_of_a_client_makes_the_frontend_contact_a_host(
    backend: Any, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    contacted: list[object] = []
    settings = OpenAIServerSettings(model="tiny", context_tokens=512, vocab_size=330, limits=Limits())
    app = without_sockets(build_app(OpenAIServer(backend, tokenizer, settings, Metrics())))

    def watch() -> None:
        for name in ("connect", "connect_ex", "sendto"):
            monkeypatch.setattr(socket.socket, name, lambda *words: contacted.append(words[1:]))
        monkeypatch.setattr(socket, "create_connection", lambda *words, **_more: contacted.append(words))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **_more: contacted.append(words))

    async def main() -> None:
        async with Trap() as trap:
            watch()
            headers = {k: v.format(port=trap.port) for k, v in HEADERS.items()}
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
                for path, body in bodies(trap.port).items():
                    answer = await client.post(path, json=body, headers=headers)
                    assert answer.status_code in (200, 400), answer.text
                for path in ("/v1/models", "/health", "/metrics"):
                    assert (await client.get(path, headers=headers)).status_code == 200
            assert trap.visits == 0

    asyncio.run(main())
    assert contacted == []


def test_lesson_19_what_reaches_a_leader_has_no_room_for_an_address() -> None:
    """The types of what a client says and of what a leader is told: no host, no port, no URL in them."""
    for kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, Request, SamplingParams, Ticket):
        words = {word for name in kind.__struct_fields__ for word in name.split("_")}
        assert not words & {"host", "port", "url", "address", "addr", "endpoint", "ip", "bootstrap"}, kind


@pytest.mark.slow
def test_lesson_19_connections_are_opened_only_where_the_registry_is_read() -> None:
    """Every call that opens a connection, by file: a new one has to be looked at, and added here."""
    opening = {
        "create_connection",
        "open_connection",
        "AsyncClient",
        "BoundedClient",
        "Client",
        "urlopen",
        "connect",
        "sock_connect",
    }
    found: dict[str, set[str]] = {}
    source = Path(segue.__file__).parent
    for file in source.rglob("*.py"):
        for item in ast.walk(ast.parse(file.read_text())):
            if isinstance(item, ast.Call):
                name = (
                    item.func.attr if isinstance(item.func, ast.Attribute) else getattr(item.func, "id", "")
                )
                if name in opening:
                    found.setdefault(str(file.relative_to(source)), set()).add(name)
    allowed = {
        "server/registry/backends.py",  # the registry itself, from a setting
        "server/registry/address_backend.py",  # instances, from a setting
        "server/http/pass_through.py",  # the frontend process of this actor; a request names the path alone
        "integrations/ray/ray_actors.py",  # the health of the process of this actor
        "server/registry/etcd.py",  # etcd, from a setting
        "kv/session/node.py",  # opens what it is told to, by the next two
        "server/fleet/membership.py",  # leaders, from the registry
        "server/fleet/operator.py",  # the same, for a command line
        "kv/control_plane.py",  # prefill leaders, from the registry
        "kv/manager.py",  # what the next ones are told
        "kv/transport_negotiation.py",
        "kv/ranks/rank_group.py",  # endpoints, from their leaders' sessions
        "kv/ranks/local_rank.py",
        "kv/ranks/rank_listener.py",  # a unix socket of this host
        "kv/ranks/rank_worker.py",  # what its leader tells it
        "kv/process_link.py",  # a socket that is connected already
        "kv/transport/host_speed.py",  # a process of this host that it has started
        "kv/transport/tcp/tcp_sockets.py",
        "kv/transport/tcp/tcp_net.py",  # what it is told to, by the one before
        "kv/transport/shm/shm_out.py",
        "kv/transport/staged/staged_transport.py",  # what it is told to, by the ones before
        "integrations/vllm/vllm_query.py",  # hosts that `peers` or a signature allows (vllm_params)
        "server/kv_events/kv_publisher.py",  # two sockets of its own process with one another
    }
    inner = {name for name in found if not name.startswith(("cli/", "lab/", "engine/models/model_store"))}
    assert inner <= allowed, inner - allowed
    assert {
        "server/registry/backends.py",
        "kv/session/node.py",
        "server/fleet/membership.py",
        "kv/transport/host_speed.py",  # a process of this host that it has started
        "kv/transport/tcp/tcp_sockets.py",
    } <= inner
