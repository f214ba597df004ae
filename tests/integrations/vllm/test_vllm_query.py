"""`GET /query` of an instance with several data-parallel ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest

from ports import HeldPort
from segue.integrations.vllm.vllm_params import PeerAddress
from segue.integrations.vllm.vllm_query import QueryServer, RankDirectory, announce, session_port
from segue.kv import ConfigError, LeaderId, PeerRestarted, new_incarnation

HOST, WITHIN_S = "127.0.0.1", 10.0
SECRET = b"a secret of the deployment"


def address(port: int) -> PeerAddress:
    return PeerAddress(LeaderId(new_incarnation()), HOST, port)


@contextlib.asynccontextmanager
async def served(first: PeerAddress, secret: bytes = b"") -> AsyncIterator[int]:
    held, ranks = HeldPort(), RankDirectory()
    ranks.add(0, first)
    server = QueryServer(HOST, held.port, ranks, secret)
    await server.open()
    try:
        yield held.port
    finally:
        await server.close()


async def ranks_of(port: int) -> dict[str, dict[str, str]]:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET /query HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    writer.close()
    found: dict[str, dict[str, str]] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


async def until(port: int, condition: Callable[[dict[str, dict[str, str]]], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition(await ranks_of(port)):
            pass  # asking is the wait


async def scenario_of_a_second_rank(secret: bytes) -> None:
    first, second = address(1001), address(1002)
    async with served(first, secret) as port:
        telling = asyncio.create_task(announce(HOST, port, 1, second, secret))
        await until(port, lambda found: set(found) == {"0", "1"})
        for one in (first, second):
            assert await session_port(HOST, port, one.leader, WITHIN_S) == one.port
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await until(port, lambda found: set(found) == {"0"})
        with pytest.raises(PeerRestarted):
            await session_port(HOST, port, second.leader, WITHIN_S)


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["loopback", "secret"])
def test_a_second_rank_is_named_while_it_lives(secret: bytes) -> None:
    asyncio.run(scenario_of_a_second_rank(secret))


async def scenario_of_a_successor() -> None:
    first, old, new = address(1001), address(1002), address(1003)
    async with served(first) as port:
        telling = []
        for one in (old, new):
            telling.append(asyncio.create_task(announce(HOST, port, 1, one, b"")))
            await until(port, lambda found, one=one: str(one.port) in str(found.get("1")))
        # The old worker says it again: the connection of before had been lost.
        again = asyncio.create_task(announce(HOST, port, 1, old, b""))
        await until(port, lambda found: str(old.port) in str(found.get("1")))
        for task in (telling[0], again):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(port, lambda found: str(new.port) in str(found.get("1")))
        assert await session_port(HOST, port, new.leader, WITHIN_S) == new.port


def test_a_rank_is_named_when_its_predecessor_that_came_back_is_gone() -> None:
    asyncio.run(scenario_of_a_successor())


async def scenario_of_a_stranger() -> None:
    first = address(1001)
    async with served(first, SECRET) as port:
        for rank, secret in ((1, b""), (1, b"another secret, as long"), (0, SECRET)):
            telling = asyncio.create_task(announce(HOST, port, rank, address(1002), secret))
            for _ in range(20):
                assert set(await ranks_of(port)) == {"0"}
                assert await session_port(HOST, port, first.leader, WITHIN_S) == 1001
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)


def test_a_rank_without_the_secret_or_in_place_of_the_first_is_not_named() -> None:
    asyncio.run(scenario_of_a_stranger())


async def scenario_of_garbage(line: str) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    async with served(address(1001), SECRET) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"POST /rank HTTP/1.1\r\n\r\n" + line.encode() + b"\n")
        async with asyncio.timeout(WITHIN_S):
            assert await reader.read() == b""
        writer.close()
        assert set(await ranks_of(port)) == {"0"}
    assert not errors


@pytest.mark.parametrize(
    "line",
    [
        '{"rank": "x"}',
        '{"rank": 1, "entry": {"engine_id": "e", "worker_addr": {}}, "signature": "\u00e9"}',
        '{"more": ' + "[" * 3000 + "]" * 3000 + "}",
    ],
    ids=["no number", "signature", "nested"],
)
def test_a_rank_that_says_something_else_is_cut_off(line: str) -> None:
    asyncio.run(scenario_of_garbage(line))


async def scenario_of_silence() -> None:
    first, second = address(1001), address(1002)
    async with served(first) as port, contextlib.AsyncExitStack() as stack:
        telling = asyncio.create_task(announce(HOST, port, 1, second, b""))
        await until(port, lambda found: set(found) == {"0", "1"})
        for _ in range(200):
            _, writer = await asyncio.open_connection(HOST, port)
            stack.callback(writer.close)
        for one in (first, second):  # a rank that has said where it is gives its place to nobody
            assert await session_port(HOST, port, one.leader, WITHIN_S) == one.port
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


def test_silent_connections_do_not_stop_the_answers() -> None:
    asyncio.run(scenario_of_silence())


def test_a_port_in_use_is_named() -> None:
    async def twice() -> None:
        async with served(address(1)) as port:
            with pytest.raises(ConfigError, match=rf"port {port} .* choose another query_port"):
                QueryServer(HOST, port, RankDirectory())

    asyncio.run(twice())
