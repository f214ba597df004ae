"""`segue.kv.session` (asyncio and uvloop) beside pyzmq DEALER/ROUTER, in one run: which shall carry sessions?

    .venv/bin/pip install pyzmq        # for this comparison only; segue does not depend on it
    python bench/session.py [--rounds 5] [--json bench/results/session.json]

Two processes on loopback TCP. Both ways carry the same `Destination` message (an 11 MiB hand-off: 32 pages),
encoded and decoded with msgspec on both sides:

    round trip   one message there, one back, one at a time
    stream       messages one way as fast as they go, 32 between two turns of the loop, then one answer

The ways take turns within each round. `cpu_us` is user plus system time of both processes for one streamed
message. The zmq ways have no authentication here (CURVE would add to them), the segue ways have theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
import zmq.asyncio

from segue.kv.errors import SegueError
from segue.kv.ids import LeaderId, Role, TransferId, new_incarnation
from segue.kv.limits import Limits
from segue.kv.protocol.messages import Committed, Destination, HandoffMessage
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.node import SessionNode

WAYS = ("segue asyncio", "segue uvloop", "zmq asyncio", "zmq uvloop", "zmq blocking")
SECRET = b"a secret of the benchmark"
BURST = 32
TRANSFER = TransferId(
    room=2**60, attempt=0, prefill=LeaderId(new_incarnation()), decode=LeaderId(new_incarnation())
)
MESSAGE = Destination(
    transfer=TRANSFER,
    epoch=2**40,
    budget_s=30.0,
    prompt_tokens=512,
    prefix_tokens=0,
    pages=list(range(1000, 1032)),
    transport="shm",
    plan_hash=2**62,
)
ENCODE = msgspec.msgpack.Encoder().encode
DECODE = msgspec.msgpack.Decoder(HandoffMessage).decode
DONE = Committed(TRANSFER)


class Events:
    """A session handler: counts what comes, and answers in the server."""

    def __init__(self, on_message: Callable[[Session, object], None]) -> None:
        self.on_message = on_message
        self.session: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None: ...

    def opened(self, session: Session) -> None:
        self.session.set_result(session)

    def received(self, session: Session, message: object) -> None:
        self.on_message(session, message)

    def closed(self, session: Session, error: SegueError) -> None:
        self.over.set()


def segue_node(events: Events, role: Role) -> SessionNode:
    return SessionNode(
        me=LeaderId(new_incarnation()),
        role=role,
        secret=SECRET,
        handlers=dict.fromkeys(Role, events),
        message_type=HandoffMessage,
        limits=Limits(),
    )


class Echo:
    """The server's handling of a message: echo, or count until `total` and answer once."""

    def __init__(self) -> None:
        self.total = 0
        self.seen = 0

    def answer(self, message: object) -> msgspec.Struct | None:
        """None: nothing to answer yet. `Committed` begins a stream; its length is in the room."""
        if isinstance(message, Committed):
            self.total, self.seen = message.transfer.room, 0
            return None
        if self.total == 0:
            return MESSAGE
        self.seen += 1
        if self.seen < self.total:
            return None
        self.total = 0
        return DONE


# ---- the server process -------------------------------------------------------------------------


async def serve_segue() -> None:
    echo = Echo()

    def on_message(session: Session, message: object) -> None:
        answer = echo.answer(message)
        if answer is not None:
            session.send(answer)

    events = Events(on_message)
    node = segue_node(events, Role.PREFILL)
    _, port = await node.listen("127.0.0.1", 0)
    print(port, flush=True)
    await events.over.wait()
    await node.close()


async def serve_zmq() -> None:
    echo, context = Echo(), zmq.asyncio.Context()
    router = _socket(context, zmq.ROUTER)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        who, body = await router.recv_multipart()
        if not body:
            break
        answer = echo.answer(DECODE(body))
        if answer is not None:
            await router.send_multipart([who, ENCODE(answer)])
    context.destroy(linger=0)


def serve_zmq_blocking() -> None:
    echo, context = Echo(), zmq.Context()
    router = _socket(context, zmq.ROUTER)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        who, body = router.recv_multipart()
        if not body:
            break
        answer = echo.answer(DECODE(body))
        if answer is not None:
            router.send_multipart([who, ENCODE(answer)])
    context.destroy(linger=0)


def _socket(context: Any, kind: int) -> Any:
    made = context.socket(kind)
    made.set_hwm(0)
    return made


# ---- the client process -------------------------------------------------------------------------


class Client:
    """One way to talk: `send` now, `receive` the next message, `turn` of the loop, `close`."""

    def __init__(
        self,
        send: Callable[[msgspec.Struct], Any],
        receive: Callable[[], Awaitable[object]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self.send = send
        self.receive = receive
        self.close = close


async def connect_segue(port: int) -> Client:
    arrived: list[object] = []
    waiting: list[asyncio.Future[object]] = []

    def on_message(session: Session, message: object) -> None:
        if waiting:
            waiting.pop().set_result(message)
        else:
            arrived.append(message)

    async def receive() -> object:
        if arrived:
            return arrived.pop(0)
        future = asyncio.get_running_loop().create_future()
        waiting.append(future)
        return await future

    async def send(message: msgspec.Struct) -> None:
        session.send(message)

    node = segue_node(Events(on_message), Role.DECODE)
    session = await node.connect("127.0.0.1", port, expect=None, timeout_s=5)
    return Client(send, receive, node.close)


async def connect_zmq(port: int) -> Client:
    context = zmq.asyncio.Context()
    dealer = _socket(context, zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")

    async def receive() -> object:
        return DECODE(await dealer.recv())

    async def send(message: msgspec.Struct) -> None:
        await dealer.send(ENCODE(message))

    async def close() -> None:
        await dealer.send(b"")
        dealer.close()
        context.term()

    return Client(send, receive, close)


async def connect_zmq_blocking(port: int) -> Client:
    context = zmq.Context()
    dealer = _socket(context, zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")

    async def receive() -> object:
        return DECODE(dealer.recv())

    async def send(message: msgspec.Struct) -> None:
        dealer.send(ENCODE(message))

    async def close() -> None:
        dealer.send(b"")
        dealer.close()
        context.term()

    return Client(send, receive, close)


async def measure(way: str, pid: int, port: int, trips: int, stream: int) -> dict[str, Any]:
    connect = {"segue": connect_segue, "zmq": connect_zmq}[way.split()[0]]
    if way == "zmq blocking":
        connect = connect_zmq_blocking
    client = await connect(port)
    times = []
    for i in range(trips + trips // 5):
        begin = time.perf_counter()
        await client.send(MESSAGE)
        await client.receive()
        if i >= trips // 5:
            times.append((time.perf_counter() - begin) * 1e6)
    cpu = _cpu_s(os.getpid()) + _cpu_s(pid)
    begin = time.perf_counter()
    await client.send(Committed(msgspec.structs.replace(TRANSFER, room=stream)))
    for i in range(stream):
        await client.send(MESSAGE)
        if i % BURST == BURST - 1:
            await asyncio.sleep(0)
    await client.receive()
    wall_s = time.perf_counter() - begin
    cpu = _cpu_s(os.getpid()) + _cpu_s(pid) - cpu
    await client.close()
    return {"round_trips_us": times, "messages_per_s": stream / wall_s, "cpu_us": cpu / stream * 1e6}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- both ---------------------------------------------------------------------------------------


def run(way: str, main: Coroutine[Any, Any, Any]) -> Any:
    return uvloop.run(main) if way.endswith("uvloop") else asyncio.run(main)


def serve(way: str) -> None:
    if way == "zmq blocking":
        serve_zmq_blocking()
    else:
        run(way, serve_segue() if way.startswith("segue") else serve_zmq())


def one_round(way: str, trips: int, stream: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        measured: dict[str, Any] = run(way, measure(way, child.pid, port, trips, stream))
        return measured


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    trips = sorted(t for each in rounds for t in each["round_trips_us"])
    return {
        "round_trip_p50_us": round(statistics.median(trips), 1),
        "round_trip_p99_us": round(trips[int(len(trips) * 0.99)], 1),
        "messages_per_s": round(statistics.median(each["messages_per_s"] for each in rounds)),
        "cpu_us": round(statistics.median(each["cpu_us"] for each in rounds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-trips", type=int, default=3000)
    parser.add_argument("--stream", type=int, default=60_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            results[way].append(one_round(way, options.round_trips, options.stream))
    table = {way: summary(rounds) for way, rounds in results.items()}
    print(f"{'':16}{'round trip p50':>16}{'p99':>12}{'messages/s':>14}{'cpu/message':>14}")
    for way, row in table.items():
        print(
            f"{way:16}{row['round_trip_p50_us']:>13.1f} us{row['round_trip_p99_us']:>9.1f} us"
            f"{row['messages_per_s']:>14,.0f}{row['cpu_us']:>11.2f} us"
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    report = {
        "command": " ".join(sys.argv),
        "commit": commit.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "message_bytes": len(ENCODE(MESSAGE)),
        "load_average": os.getloadavg(),
        "pyzmq": zmq.__version__,
        "uvloop": version("uvloop"),
        "ways": table,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
