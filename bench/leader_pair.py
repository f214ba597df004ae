"""One prefill and one decode leader in two processes, joined by a real session and transport; no engine.

Each plays its part of every hand-off as events come. The process that made the `Pair` has the decode leader,
its child the prefill leader; the child gets orders on standard input and says on standard output what came.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from segue.kv.config import KVConfig
from segue.kv.errors import AbortedByClient
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, RoomKey, Span
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.protocol import events
from segue.kv.transport.memory.pool_memory import allocate


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-offs of this pair: sizes in tokens, and the time between two chunks.

    Rooms from `held_from` on are held open: prefill does not send, and each has one page of its own.
    """

    transport: str = "shm"
    layers: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    pages: int = 256
    page_tokens: int = 16
    prompt_tokens: int = 512
    chunk_tokens: int = 64
    forward_s: float = 0.002
    held_from: int = 2**32
    budget_s: float = 30.0

    @property
    def spec(self) -> PoolSpec:
        """The pool of each side."""
        dim = self.head_dim
        shape = KVShape(
            layers=self.layers, kv_heads=self.kv_heads, k_dim=dim, v_dim=dim, dtype="float16", item_bytes=2
        )
        return PoolSpec(
            shape=shape,
            page_tokens=self.page_tokens,
            pages=self.pages,
            layer_count=self.layers,
            head_count=self.kv_heads,
        )

    def tokens(self, room: int) -> int:
        """The prompt of `room`."""
        return self.page_tokens if room >= self.held_from else self.prompt_tokens

    def pages_of(self, room: int) -> Sequence[int]:
        """Where decode has the prompt of `room`."""
        used = self.prompt_tokens // self.page_tokens
        own = (room - self.held_from) % (self.pages - used)
        return [used + own] if room >= self.held_from else range(used)


class Say(msgspec.Struct, frozen=True):
    """A line between the two processes: `kind` of thing that happened to `room`; `at` in seconds."""

    kind: str
    room: int = 0
    at: float = 0.0
    words: list[str] = []


def leader(incarnation: str) -> LeaderId:
    """The only leader of its instance."""
    return LeaderId(Incarnation(incarnation))


class Half:
    """One leader. It plays its part of each hand-off as events come, and tells every end."""

    def __init__(self, role: Role, work: Work, tell: Callable[[Say], None]) -> None:
        self.role = role
        self.work = work
        self.tell = tell
        self.memory = allocate(work.spec.nbytes)
        config = KVConfig(
            role=role,
            model="m",
            spec=work.spec,
            transports=[work.transport],
            limits=Limits(max_transfers=2**14),
        )
        self.me = config.me
        self.manager = KVManager(config, self.memory, self._changed)

    def open(self, room: int, peer: LeaderId) -> None:
        """Begin this side's half."""
        key, tokens, budget_s = RoomKey(room), self.work.tokens(room), self.work.budget_s
        if self.role is Role.PREFILL:
            self.manager.expect(key, tokens, budget_s, decode=peer)
        else:
            self.manager.receive(key, peer, tokens, budget_s)

    def abort(self, room: int) -> float:
        """End it; when that was asked for."""
        at = time.monotonic()
        handle = self.manager.handles.get(RoomKey(room))
        if handle is not None:
            handle.abort(AbortedByClient("left", room=room).info)
        return at

    def _changed(self, change: events.Change) -> None:
        """On the I/O thread: the next step of this half."""
        handle = self.manager.handles.get(change.key)
        if handle is None:
            return
        room = change.key.room
        match change:
            case events.Phase(phase=KVPoll.WAITING_FOR_INPUT) if isinstance(handle, KVReceiver):
                handle.publish(self.work.pages_of(room))
            case events.Phase(phase=KVPoll.WAITING_FOR_INPUT) if isinstance(handle, KVSender):
                if room < self.work.held_from:
                    self._send(handle, 0)
                else:
                    self.tell(Say("held", room))
            case events.Phase(phase=KVPoll.FAILED | KVPoll.SUCCESS as phase):
                self.tell(Say(phase.name, room, time.monotonic()))
            case events.Release():
                handle.clear()
                self.tell(Say("released", room, time.monotonic()))
            case _:
                pass

    def _send(self, handle: KVSender, start: int) -> None:
        """A chunk, and the next one a forward later."""
        work = self.work
        end = start + work.chunk_tokens
        last = end == work.prompt_tokens
        if handle.poll().terminal:
            return
        handle.send(Span(start, end), range(work.pages), b"1" if last else None)
        if not last:
            self.manager.io.loop.call_later(work.forward_s, self._send, handle, end)

    def close(self) -> None:
        """End the leader and give its pool back."""
        self.manager.close()
        self.memory.close()


def child(work: Work) -> None:
    """The prefill process."""
    lock = threading.Lock()

    def tell(say: Say) -> None:
        with lock:
            sys.stdout.buffer.write(msgspec.json.encode(say) + b"\n")
            sys.stdout.buffer.flush()

    half = Half(Role.PREFILL, work, tell)
    host, port = half.manager.start()
    tell(Say("hello", words=[half.me.incarnation, host, str(port)]))
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Say)
        match order.kind:
            case "end":
                break
            case "cost":
                tell(Say("cost", order.room, time.process_time(), [str(resident_bytes())]))
            case kind:
                if kind == "open":
                    half.open(order.room, leader(order.words[0]))
                else:
                    tell(Say("aborted", order.room, half.abort(order.room)))
    half.close()


def resident_bytes() -> int:
    """Private memory of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in rollup[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) * 1024


class Pair:
    """The decode leader, in this process, and what is known of both."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.news: dict[tuple[str, str, int], Say] = {}
        self.changed = threading.Condition()
        command = [sys.executable, __file__, msgspec.json.encode(work).decode()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._listen, daemon=True).start()
        self.decode = Half(Role.DECODE, work, lambda say: self.note("decode", say))
        self.decode.manager.start()
        incarnation, host, port = self.wait("prefill", "hello", 0).words
        self.prefill = leader(incarnation)
        self.decode.manager.add_peer(self.prefill, host, int(port))

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.note("prefill", msgspec.json.decode(line, type=Say))

    def note(self, side: str, say: Say) -> None:
        """Remember what happened, and wake whoever waits for it."""
        with self.changed:
            self.news[side, say.kind, say.room] = say
            self.changed.notify_all()

    def wait(self, side: str, kind: str, room: int, timeout_s: float = 60.0) -> Say:
        """Wait for this message of `side`."""
        with self.changed:
            key = side, kind, room
            assert self.changed.wait_for(lambda: key in self.news, timeout_s), (
                f"no {key} in {timeout_s} s, but {[known for known in self.news if known[2] == room]}"
            )
            return self.news[key]

    def order(self, kind: str, room: int = 0) -> None:
        """Have the prefill process do this."""
        assert self.process.stdin is not None
        said = Say(kind, room, words=[self.decode.me.incarnation])
        self.process.stdin.write(msgspec.json.encode(said) + b"\n")
        self.process.stdin.flush()

    def open(self, room: int) -> None:
        """Begin a hand-off on both sides."""
        self.order("open", room)
        self.decode.open(room, self.prefill)

    def close(self) -> None:
        """End both processes' leaders."""
        self.order("end")
        self.decode.close()
        self.process.wait(30)


if __name__ == "__main__":
    child(msgspec.json.decode(sys.argv[1], type=Work))
