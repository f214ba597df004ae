"""How soon the peer learns of an abort: `python bench/abort.py [--aborts 600] [--transport shm]`.

One prefill and one decode leader in two processes, joined by a real session and transport. Each
hand-off is aborted at a random moment of its life, by a random side; measured is the time from the
abort to the other side's terminal event, both on CLOCK_MONOTONIC of this host. A hand-off that had
already ended when the abort came is not counted. Then the same through HTTP: a client leaves in
the middle of its stream, and the time is until both instances hold nothing of it (asked again and
again, so it is an upper bound).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from recorded import commit, quantile
from segue.conn.config import KVConfig
from segue.conn.handles import Change, KVReceiver, KVSender
from segue.conn.manager import KVManager
from segue.core.errors import AbortedByClient
from segue.core.limits import Limits
from segue.core.types import Incarnation, KVPoll, LeaderId, Role, Span, TransferId
from segue.handoff import events
from segue.handoff.messages import Metadata
from segue.layout.spec import KVShape, PoolSpec
from segue.transport.memory import allocate

ROOT = Path(__file__).resolve().parent.parent
SHAPE = KVShape(layers=8, kv_heads=4, k_dim=64, v_dim=64, dtype="float16", item_bytes=2)
PAGES, PAGE_TOKENS, PROMPT_TOKENS, CHUNK_TOKENS = 256, 16, 512, 64


def leader(incarnation: str) -> LeaderId:
    """The only leader of its instance."""
    return LeaderId(Incarnation(incarnation))


class Say(msgspec.Struct, frozen=True, tag_field="what"):
    """A line between the two processes: `what` happened to `room` at `at` seconds."""

    kind: str
    room: int = 0
    at: float = 0.0
    words: list[str] = []


class Half:
    """One leader. It plays its part of each hand-off as events come, and tells every end."""

    def __init__(self, role: Role, transport: str, tell: Any) -> None:
        self.role = role
        self.tell = tell
        self.spec = PoolSpec(
            shape=SHAPE,
            page_tokens=PAGE_TOKENS,
            pages=PAGES,
            layer_count=SHAPE.layers,
            head_count=SHAPE.kv_heads,
        )
        self.memory = allocate(self.spec.nbytes)
        config = KVConfig(role=role, model="m", spec=self.spec, transports=[transport], limits=Limits())
        self.me = config.me
        self.manager = KVManager(config, self.memory, self._changed)
        self.handles: dict[TransferId, KVSender | KVReceiver] = {}

    def open(self, transfer: TransferId) -> None:
        make = self.manager.sender if self.role is Role.PREFILL else self.manager.receiver
        handle = self.handles[transfer] = make(transfer)
        handle.init(PROMPT_TOKENS, 30.0)

    def abort(self, transfer: TransferId) -> float:
        at = time.monotonic()
        handle = self.handles.get(transfer)
        if handle is not None:
            handle.abort(AbortedByClient("left", room=transfer.room).info)
        return at

    def _changed(self, change: Change) -> None:
        """On the I/O thread: the next step of this half."""
        handle = self.handles.get(change.transfer)
        if handle is None:
            return
        match change:
            case events.Phase(phase=KVPoll.WAITING_FOR_INPUT) if isinstance(handle, KVReceiver):
                handle.send_metadata(range(PROMPT_TOKENS // PAGE_TOKENS))
            case events.Phase(phase=KVPoll.WAITING_FOR_INPUT) if isinstance(handle, KVSender):
                self._send(handle, 0)
            case events.Phase(phase=KVPoll.FAILED | KVPoll.SUCCESS as phase):
                self.tell(Say(phase.name, change.transfer.room, time.monotonic()))
            case events.Release():
                handle.clear()
                self.handles.pop(change.transfer, None)
                self.tell(Say("released", change.transfer.room, time.monotonic()))
            case _:
                pass

    def _send(self, handle: KVSender, start: int) -> None:
        """A chunk, and the next one a forward later: 8 chunks of 2 ms each."""
        end = start + CHUNK_TOKENS
        last = end == PROMPT_TOKENS
        metadata = Metadata(transfer=handle.transfer, prompt_tokens=PROMPT_TOKENS, first_token=1)
        if handle.poll().terminal:
            return
        handle.send(Span(start, end), range(PAGES), metadata if last else None)
        if not last:
            self.manager.io.loop.call_later(0.002, self._send, handle, end)

    def close(self) -> None:
        self.manager.close()
        self.memory.close()


def child(transport: str) -> None:
    """The prefill process: orders come on standard input, news go to standard output."""
    lock = threading.Lock()

    def tell(say: Say) -> None:
        with lock:
            sys.stdout.buffer.write(msgspec.json.encode(say) + b"\n")
            sys.stdout.buffer.flush()

    half = Half(Role.PREFILL, transport, tell)
    host, port = half.manager.start()
    tell(Say("hello", words=[half.me.incarnation, host, str(port)]))
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Say)
        if order.kind == "end":
            break
        transfer = TransferId(order.room, 0, half.me, leader(order.words[0]))
        if order.kind == "open":
            half.open(transfer)
        else:
            tell(Say("aborted", order.room, half.abort(transfer)))
    half.close()


class Bench:
    """The decode process, which leads."""

    def __init__(self, transport: str) -> None:
        self.news: dict[tuple[str, str, int], float] = {}
        self.changed = threading.Condition()
        command = [sys.executable, __file__, "--child", "--transport", transport]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.hello: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.decode = Half(Role.DECODE, transport, lambda say: self._note("decode", say))
        self.decode.manager.start()
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.hello), 30)
        self.prefill = leader(self.hello[0])
        self.decode.manager.add_peer(self.prefill, self.hello[1], int(self.hello[2]))

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note("prefill", msgspec.json.decode(line, type=Say))

    def _note(self, side: str, say: Say) -> None:
        with self.changed:
            if say.kind == "hello":
                self.hello = say.words
            self.news[side, say.kind, say.room] = say.at
            self.changed.notify_all()

    def order(self, kind: str, room: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            msgspec.json.encode(Say(kind, room, words=[self.decode.me.incarnation])) + b"\n"
        )
        self.process.stdin.flush()

    def one(self, room: int, side: str, after_s: float) -> float | None:
        """Seconds until the other side learned of the abort; None if it came too late to matter."""
        transfer = TransferId(room, 0, self.prefill, self.decode.me)
        self.order("open", room)
        self.decode.open(transfer)
        with self.changed:  # wait, but wake up early if the hand-off ends by itself
            self.changed.wait_for(lambda: ("decode", "SUCCESS", room) in self.news, after_s)
        if side == "decode":
            self._note("decode", Say("aborted", room, self.decode.abort(transfer)))
        else:
            self.order("abort", room)
        other = "prefill" if side == "decode" else "decode"
        with self.changed:
            assert self.changed.wait_for(
                lambda: all((s, "released", room) in self.news for s in ("prefill", "decode")), 30
            ), f"room {room} was not released: {[k for k in self.news if k[2] == room]}"
            assert self.changed.wait_for(lambda: (side, "aborted", room) in self.news, 30)
        aborted, learned = self.news[side, "aborted", room], self.news.get((other, "FAILED", room))
        own = self.news.get((side, "FAILED", room))
        if learned is None or own is None or learned < aborted:
            return None
        return learned - aborted

    def close(self) -> None:
        self.order("end", 0)
        self.decode.close()
        self.process.wait(30)


def between_leaders(aborts: int, transport: str) -> dict[str, list[float]]:
    rng, bench = random.Random(1), Bench(transport)
    times: dict[str, list[float]] = {"from prefill": [], "from decode": []}
    room = 0
    while sum(map(len, times.values())) < aborts:
        room += 1
        side = rng.choice(["prefill", "decode"])
        seconds = bench.one(room, side, rng.uniform(0, 0.025))
        if seconds is not None:
            times[f"from {side}"].append(seconds * 1e3)
    bench.close()
    return times


def through_http(count: int) -> list[float]:
    sys.path.insert(0, str(ROOT / "tests" / "e2e"))
    import tiny_model
    import traffic
    from cluster import MODEL, Cluster

    folder = tiny_model.save(Path(tempfile.mkdtemp()))
    asks = traffic.asks(5, count, vocab=200, longest=1500, max_tokens=2000)
    rng, times = random.Random(2), []

    async def leave(url: str, ask: traffic.Ask, after_s: float) -> None:
        task = asyncio.create_task(traffic.stream(url, MODEL, ask))
        await asyncio.wait({task}, timeout=after_s)
        task.cancel()
        await asyncio.wait({task})

    with Cluster(folder) as cluster, httpx.Client() as client:
        doors = [part.door for name, part in cluster.parts.items() if name != "frontend"]
        for ask in asks:
            asyncio.run(leave(cluster.url, ask, rng.uniform(0.01, 0.3)))
            at = time.monotonic()
            while not all(client.get(f"{door}/integrity").json()["at_rest"] for door in doors):
                assert time.monotonic() - at < 30
            times.append((time.monotonic() - at) * 1e3)
    return times


def summary(values: list[float]) -> dict[str, float]:
    return {
        "n": len(values),
        "p50_ms": round(quantile(values, 0.5), 3),
        "p99_ms": round(quantile(values, 0.99), 3),
        "max_ms": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aborts", type=int, default=600)
    parser.add_argument("--http", type=int, default=100, help="clients that leave")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        child(args.transport)
        return
    raw = between_leaders(args.aborts, args.transport)
    if args.http:
        raw["client leaves"] = through_http(args.http)
    rows = {name: summary(values) for name, values in raw.items()}
    rows["between leaders"] = summary(raw["from prefill"] + raw["from decode"])
    for name, row in rows.items():
        print(f"{name:>16}  " + "   ".join(f"{key} {value:9.3f}" for key, value in row.items()))
    if args.json:
        result = {"command": sys.argv, "commit": commit(), "rows": rows, "raw_ms": raw}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
