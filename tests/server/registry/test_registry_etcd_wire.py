"""Requests to etcd's JSON gateway and the parsing of its answers; a transport in the place of sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ConfigError,
    OutOfCapacity,
    PeerRefused,
    Unauthorized,
)
from segue.kv.limits import Limits
from segue.server.registry import backends
from segue.server.registry import etcd as module
from segue.server.registry.etcd import Compacted, Etcd, Kv, NoLease
from segue.server.settings.registry_address import EtcdUser

PLACES = [("10.0.0.1", 1), ("10.0.0.2", 2), ("fd00::1", 3)]
DEADLINE_S = 60.0
Answer = Callable[[str, str, Any], httpx.Response]


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def client(
    answer: Answer, places: int = 1, limits: Limits | None = None
) -> tuple[Etcd, list[tuple[str, str, Any]]]:
    """A client of so many members whose answers are those of `answer` (host, method, body); and what it
    asked."""
    asked: list[tuple[str, str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, request.url.path.removeprefix("/v3/"), json.loads(request.content)))
        return answer(*asked[-1])

    return Etcd(PLACES[:places], limits or Limits(), None, httpx.MockTransport(handle)), asked


def said(**body: Any) -> Answer:
    return lambda *_: httpx.Response(200, json=body)


def refused(code: int, status: int = 400) -> Answer:
    return lambda *_: httpx.Response(status, json={"error": "because", "code": code})


async def test_a_write_is_one_that_nobody_came_before_and_keeps_its_lease_unless_it_has_another() -> None:
    etcd, asked = client(said(succeeded=True))
    assert await etcd.put(Kv(b"k", mod_revision=7), b"v", 12)
    assert await etcd.put(Kv(b"k"), b"v", None)
    same = {"target": "MOD", "result": "EQUAL", "key": b64("k"), "mod_revision": "7"}
    write = {"key": b64("k"), "value": b64("v"), "lease": "12"}
    assert asked[0][1:] == ("kv/txn", {"compare": [same], "success": [{"request_put": write}]})
    del write["lease"]
    assert asked[1][2]["success"] == [{"request_put": {**write, "ignore_lease": True}}]
    etcd, _ = client(said())
    assert not await etcd.put(Kv(b"k"), b"v", 12), "what is false is left out of an answer"


async def test_keys_are_read_with_numbers_that_are_texts_and_the_oldest_first() -> None:
    def kv(key: str, created: int) -> dict[str, str]:
        return {
            "key": b64(key),
            "value": b64("v"),
            "create_revision": str(created),
            "mod_revision": "9",
            "lease": "5",
        }

    etcd, asked = client(said(header={"revision": "20"}, kvs=[kv("p/a", 8), kv("p/b", 3)]))
    read = await etcd.read(b"p/")
    assert [(one.key, one.create_revision, one.lease) for one in read.kvs] == [
        (b"p/b", 3, 5),
        (b"p/a", 8, 5),
    ]
    assert read.revision == 20
    assert asked[0][2] == {"key": b64("p/"), "range_end": b64("p0"), "limit": module.PAGE_KEYS}
    assert await etcd.get(b"p/a") == (read.kvs[1], 20)
    etcd, _ = client(said(header={"revision": "20"}))
    assert await etcd.get(b"p/a") == (Kv(b"p/a"), 20)
    etcd, asked = client(said(header={}, more=True))
    with pytest.raises(OutOfCapacity):
        await etcd.read(b"p/")
    assert len(asked) == 1, "a page without a key has no next one"


def test_many_keys_are_read_in_pages_of_one_revision_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [f"p/{number:04}" for number in range(30)]

    def answer(_host: str, _method: str, body: Any) -> httpx.Response:
        left = [key for key in keys if key.encode() >= base64.b64decode(body["key"])]
        kvs = [{"key": b64(key), "create_revision": "3"} for key in left[: body["limit"]]]
        return httpx.Response(
            200, json={"header": {"revision": "20"}, "kvs": kvs, "more": len(left) > len(kvs)}
        )

    async def main() -> None:
        etcd, asked = client(answer)
        read = await etcd.read(b"p/")
        assert ([kv.key.decode() for kv in read.kvs], read.revision) == (keys, 20)
        assert [body.get("revision") for *_, body in asked] == [None, "20", "20", "20"]
        assert {body["range_end"] for *_, body in asked} == {b64("p0")}
        for name, most in (("MAX_KEYS", 16), ("MAX_READ", 600)):
            with monkeypatch.context() as less:
                less.setattr(module, name, most)
                etcd, asked = client(answer)
                with pytest.raises(OutOfCapacity):
                    await etcd.read(b"p/")
                assert len(asked) == 2, name

    monkeypatch.setattr(module, "PAGE_KEYS", 8)
    asyncio.run(main())


async def test_a_lease_is_granted_kept_found_ended_and_revoked_also_if_it_has_ended() -> None:
    etcd, asked = client(said(ID="77", TTL="3"))
    assert await etcd.grant(3) == 77
    assert asked[0][1:] == ("lease/grant", {"TTL": 3})
    etcd, asked = client(said(result={"ID": "77", "TTL": "3"}))
    assert await etcd.keep_alive(77)
    assert asked[0][2] == {"ID": "77"}
    etcd, _ = client(said(result={"ID": "77"}))
    assert not await etcd.keep_alive(77)
    etcd, asked = client(refused(5))
    await etcd.revoke(77)
    assert asked[0][1:] == ("lease/revoke", {"ID": "77"})
    with pytest.raises(NoLease):
        await etcd.put(Kv(b"k"), b"v", 77)


@pytest.mark.parametrize("code", [3, 7, 16])
async def test_what_no_other_member_would_answer_otherwise_is_asked_of_one(code: int) -> None:
    etcd, asked = client(refused(code), places=3)
    with pytest.raises(Unauthorized, match="because"):
        await etcd.grant(1)
    assert [host for host, *_ in asked] == ["10.0.0.1"]


def gone(*_: object) -> httpx.Response:
    raise httpx.ConnectError("no route")


def slow(*_: object) -> httpx.Response:
    raise httpx.ReadTimeout("")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (gone, BootstrapUnreachable),
        (slow, BootstrapTimeout),
        (refused(14, 503), BootstrapUnreachable),
        (lambda *_: httpx.Response(502, text="<html>"), BootstrapUnreachable),
    ],
    ids=["gone", "slow", "no leader", "a proxy"],
)
async def test_a_member_that_cannot_answer_is_passed_over_and_each_is_asked_once(
    answer: Answer, error: type[Exception]
) -> None:
    etcd, asked = client(answer, places=3)
    with pytest.raises(error):
        await etcd.grant(1)
    assert [host for host, *_ in asked] == ["10.0.0.1", "10.0.0.2", "fd00::1"]
    with pytest.raises(error):
        await etcd.grant(1)
    assert len(asked) == 6
    etcd, asked = client(
        lambda host, *_: answer() if host == "10.0.0.1" else httpx.Response(200, json={"ID": "5"}), 2
    )
    for _ in range(2):
        assert await etcd.grant(1) == 5
    assert [host for host, *_ in asked] == ["10.0.0.1", "10.0.0.2", "10.0.0.2"], "it stays with that one"


async def test_a_user_logs_in_once_and_again_where_the_token_is_not_known_any_more(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("word\n")
    shown: list[str | None] = []
    tokens = ["old", "new", "newest"]
    logins: list[Any] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v3/auth/authenticate":
            logins.append(json.loads(request.content))
            assert "authorization" not in request.headers
            return httpx.Response(200, json={"token": tokens.pop(0)})
        shown.append(request.headers.get("authorization"))
        if shown[-1] == "old":
            return httpx.Response(401, json={"error": "etcdserver: invalid auth token", "code": 16})
        if request.url.path == "/v3/lease/keepalive":
            return httpx.Response(400, json={"error": "revision of auth store is old", "code": 3})
        return httpx.Response(200, json={"ID": "7", "TTL": "9"})

    user = EtcdUser("me", str(tmp_path / "password"))
    etcd = Etcd(PLACES, Limits(), None, httpx.MockTransport(handle), user)
    assert await asyncio.gather(etcd.grant(9), etcd.grant(9)) == [7, 7]
    assert await etcd.grant(9) == 7
    assert logins == [{"name": "me", "password": "word"}] * 2
    assert shown[0] == "old"
    assert shown.count("new") == 3
    # A fresh token that is refused is not tried for ever.
    with pytest.raises(BootstrapUnreachable, match="that it has just given"):
        await etcd.keep_alive(7)
    (tmp_path / "password").write_text("\n")
    with pytest.raises(ConfigError, match="must hold one line"):
        await etcd._login("newest")
    await etcd.close()


async def test_what_is_no_etcd_is_said_and_not_tried_again() -> None:
    for answer in (
        lambda *_: httpx.Response(404, text="not here"),
        lambda *_: httpx.Response(200, text="hello"),
    ):
        etcd, asked = client(answer, places=2)
        with pytest.raises(PeerRefused):
            await etcd.grant(1)
        assert len(asked) == 1


# ---- watches -----------------------------------------------------------------------------------------


class Lines(httpx.AsyncByteStream):
    """An answer that comes in these pieces, and ends, or raises."""

    def __init__(self, *pieces: bytes, error: Exception | None = None) -> None:
        self.pieces, self.error = pieces, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.error is not None:
            raise self.error


async def watched(answer: httpx.Response) -> tuple[list[list[tuple[bytes, bool]]], Any]:
    """The events of a watch (key, gone), and its request."""
    etcd, asked = client(lambda *_: answer)
    heard = etcd.watch(b"p/", 5, 1.0, prefix=True)
    return [[(event.kv.key, event.gone) for event in events] async for events in heard], asked


def event(key: str, gone: bool = False) -> dict[str, Any]:
    return {"kv": {"key": b64(key)}, **({"type": "DELETE"} if gone else {})}


def line(**result: Any) -> bytes:
    return json.dumps({"result": result}).encode() + b"\n"


async def test_a_watch_tells_changes_as_they_come_and_ends_with_the_silence() -> None:
    whole = line(created=True) + line(events=[event("a"), event("b", True)]) + line(events=[event("c")])
    for size in (1, 7, len(whole)):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        stream = Lines(*pieces, error=httpx.ReadTimeout(""))
        heard, asked = await watched(httpx.Response(200, stream=stream))
        assert heard == [[(b"a", False), (b"b", True)], [(b"c", False)]], size
    create = {"key": b64("p/"), "range_end": b64("p0"), "start_revision": "5"}
    assert asked[0][1:] == ("watch", {"create_request": create})


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: httpx.Response(200, stream=Lines(line(canceled=True, compact_revision="9"))), Compacted),
        (lambda: httpx.Response(200, stream=Lines(line(canceled=True))), BootstrapUnreachable),
        (lambda: httpx.Response(200, stream=Lines(b'{"error": {"code": 1}}\n')), BootstrapUnreachable),
        (lambda: httpx.Response(200, stream=Lines(line(created=True))), BootstrapUnreachable),
        (lambda: httpx.Response(200, stream=Lines(error=httpx.ReadError("reset"))), BootstrapUnreachable),
        (lambda: httpx.Response(200, stream=Lines(b"nonsense\n")), PeerRefused),
        (lambda: httpx.Response(200, stream=Lines(b"x" * 50, b"x" * 51)), PeerRefused),
        (lambda: httpx.Response(400, json={"error": "no", "code": 16}), Unauthorized),
        (lambda: httpx.Response(503, json={"error": "no leader", "code": 14}), BootstrapUnreachable),
    ],
    ids=["compacted", "cancelled", "error", "ended", "broken", "nonsense", "endless", "refused", "no leader"],
)
async def test_a_watch_that_cannot_go_on_says_why(
    answer: Callable[[], httpx.Response], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 100)

    with pytest.raises(error):
        await watched(answer())


async def test_a_question_ends_in_time_and_a_watch_with_the_silence_that_is_too_long() -> None:
    """Nobody says that a machine is gone."""

    times: list[dict[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        times.append(request.extensions["timeout"])
        return httpx.Response(200, json={"ID": "5"})

    etcd = Etcd(PLACES[:1], Limits(connect_s=3.0), None, httpx.MockTransport(answer))
    await etcd.grant(1)
    with pytest.raises(BootstrapUnreachable):
        async for _ in etcd.watch(b"p/", 5, 7.0):
            pass
    assert [(one["connect"], one["read"]) for one in times] == [(3.0, 3.0), (3.0, 7.0)]


class Endless(httpx.AsyncByteStream):
    """An answer of `piece` again and again; after `count` of them nothing comes any more, and it does not
    end."""

    def __init__(self, piece: bytes, count: int) -> None:
        self.piece, self.count, self.sent, self.closed = piece, count, 0, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.count):
            self.sent += len(self.piece)
            yield self.piece
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.closed = True


async def ask(etcd: Etcd, how: str) -> None:
    if how == "watch":
        async for _ in etcd.watch(b"p/", 5, 0.05):
            pass
    elif how == "read":
        await etcd.read(b"p/")
    else:
        await etcd.put(Kv(b"k"), b"v", 1)


@pytest.mark.parametrize("how", ["watch", "read", "put"])
@pytest.mark.parametrize("status", [200, 400, 503])
async def test_an_answer_of_any_kind_is_read_up_to_a_bound(
    how: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "MAX_ANSWER", 2**20)
    monkeypatch.setattr(module, "MAX_LINE", 2**20)

    body = Endless(b"x" * 2**16, 100)
    etcd, _ = client(lambda *_: httpx.Response(status, stream=body))
    with pytest.raises(PeerRefused, match=r"more than 1048576 bytes|longer than 1048576 bytes"):
        await asyncio.wait_for(ask(etcd, how), DEADLINE_S)
    assert (body.sent, body.closed) == (2**20 + 2**16, True)


@pytest.mark.parametrize(
    ("how", "error"), [("watch", None), ("read", BootstrapTimeout), ("put", BootstrapTimeout)]
)
async def test_an_answer_that_comes_in_part_has_one_deadline(how: str, error: type[Exception] | None) -> None:
    """Each read has a limit of its own; a peer that sends a byte now and then was within it for ever."""

    body = Endless(b" ", 3)
    etcd, _ = client(lambda *_: httpx.Response(200, stream=body), limits=Limits(connect_s=0.05))
    with pytest.raises(error) if error is not None else contextlib.nullcontext():
        await asyncio.wait_for(ask(etcd, how), DEADLINE_S)
    assert (body.sent, body.closed) == (3, True)


@pytest.mark.parametrize("how", ["watch", "read"])
async def test_an_answer_that_is_compressed_although_nobody_asked_for_that_is_not_read(how: str) -> None:
    """64 KiB of it could be 64 MiB."""
    body = zlib.compress(b"[" * 2**20)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Accept-Encoding"])
        return httpx.Response(200, stream=Lines(body), headers={"Content-Encoding": "deflate"})

    etcd = Etcd(PLACES[:1], Limits(), None, httpx.MockTransport(answer))
    with pytest.raises(PeerRefused, match="Content-Encoding"):
        await ask(etcd, how)
    assert asked == ["identity"]
