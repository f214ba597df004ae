"""KV events over ZMQ as vLLM publishes them, so that other people's routers can subscribe.

The first port is a PUB socket: it sends `(topic, number, batch)`, the number in 8 bytes, big end first. The
second is a ROUTER socket: it answers a number with `(number, batch)` of that one and all later ones that are
kept, and at the end with number -1 and nothing. A subscriber that reads too slowly misses batches, and sees
that by a gap in the numbers.

A second after a batch, and then each second until the next one, a batch without events is sent, always with
the same number. By that a subscriber that comes late, or comes back after this process has restarted, sees
that it has missed something, and need not wait for the next event.

Nobody is authenticated there, so everything that a client costs has a limit:

| | limit |
|---|---|
| batches that are kept | `KEPT_BATCHES`, `KEPT_BYTES`; all clients read the same ones |
| bytes that wait for one client | `CHUNK`, in its connection's buffer, and as many in the kernel |
| connections of each port in their handshake | `MAX_PENDING`, each for `HANDSHAKE_S`; the oldest makes room |
| connections of each port after it | `MAX_CLIENTS`, fewer where the process may open few files |
| connections of one address | a newcomer takes the place of one whose address has at least two more |
| a client that does not read | its connection ends after `STALL_S` |
| what one client says | `HEARD_FRAMES` frames, then `HEARD_FRAMES_S` a second; the rest is read later |
| replays | one at a time for each connection, all together `REPLAY_BYTES_S`, by turns |
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from segue.engine.kv_events import AllBlocksCleared, BlockStored, KVEvent, KVEventBatch
from segue.kv import IoThread, OutOfCapacity, PeerRefused, SegueError
from segue.kv.session import Deadline, GuardedListener, is_loopback, listening
from segue.server.kv_events import zmtp
from segue.server.settings.kv_events_config import KVEventsConfig

log = logging.getLogger("segue.instance")

#: Batches that are kept for replay and for slow subscribers, and bytes of them.
KEPT_BATCHES, KEPT_BYTES = 10_000, 64 * 2**20
#: Batches, and bytes of them, that wait for our own thread.
MAX_WAITING, MAX_WAITING_BYTES = 10_000, 64 * 2**20
#: Tokens after which the events of one call go on in another batch.
BATCH_TOKENS = 2**18
#: How long after a batch the one without events follows, and its repeats.
BEAT_S = 1.0
MAX_PENDING, MAX_CLIENTS = 32, 64
HANDSHAKE_S = 5.0
STALL_S = 30.0
HEARD_FRAMES, HEARD_FRAMES_S = 64, 32.0
CHUNK = 2**16
#: Bytes of replays in a second, and what each batch costs besides its bytes.
REPLAY_BYTES_S, BATCH_COST = 16 * 2**20, 1024
#: How long clients may take to read the rest when we end.
CLOSE_S = 1.0
END = (-1).to_bytes(8, "big", signed=True)
#: Subscribers of ZMQ, and askers; by the type of our socket.
_PEERS = {b"PUB": (b"SUB", b"XSUB"), b"ROUTER": (b"REQ", b"DEALER", b"ROUTER")}


class KVPublisher:
    """Listens at `--kv-events-host`, and serves in a thread of its own; ends with `close`. ConfigError if a
    port is taken. `clock` gives seconds since 1970."""

    def __init__(self, config: KVEventsConfig, dp_rank: int, clock: Callable[[], float] = time.time) -> None:
        assert config.kv_events_port is not None
        self._clock = clock
        self._dp_rank = dp_rank
        self._encoder = msgspec.msgpack.Encoder()
        self._dropped = 0
        #: Batches from `publish` that our thread has not taken, each with how many numbers to leave out
        #: before it.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._closed = False
        host, port = config.kv_events_host, config.kv_events_port + dp_rank
        sockets = [(b"PUB", listening(host, port, what="KV events", flag="--kv-events-port"))]
        if (replay := config.kv_events_replay_port) is not None:
            try:
                flag = "--kv-events-replay-port"
                sockets.append((b"ROUTER", listening(host, replay + dp_rank, what="KV events", flag=flag)))
            except SegueError:
                sockets[0][1].close()
                raise
        if not is_loopback(host):
            log.warning(
                "--kv-events-host %s: every host that can reach port %d reads the tokens of all prompts, "
                "without a key",
                host,
                port,
            )
        log.info("event=kv_events at=%s:%d dp_rank=%d", host, port, dp_rank)
        self._io = IoThread()
        # Above all numbers of an earlier process at this address, of which a subscriber may have seen many:
        # it takes lower ones for what it knows already, and would keep the pages of that process for ever.
        self.first_number = int(clock() * 1000)
        topic = config.kv_events_topic.encode()
        self._server = _Server(self.first_number, topic, lambda: self._payload([]))
        self._io.start()
        self._io.post(self._server.open, sockets)
        # Knowledge from an earlier process at this address is wrong for this one.
        self.publish([AllBlocksCleared()])

    def publish(self, events: list[KVEvent]) -> None:
        """Send `events` in their order; from one thread at a time, and never waits for a subscriber."""
        for some in _batches(events):
            payload = self._payload(some)
            with self._lock:
                full = (
                    len(self._waiting) >= MAX_WAITING
                    or self._waiting_bytes + len(payload) > MAX_WAITING_BYTES
                )
                if not full:
                    self._waiting.append((self._dropped, payload))
                    self._waiting_bytes += len(payload)
            if full:
                self._dropped += 1  # the next one leaves so many numbers out: subscribers see the gap
                log.warning("event=kv_events_dropped events=%d", len(some))
                continue
            self._dropped = 0
            self._io.post(self._take)

    def close(self) -> None:
        """Send what waits, to those who read it within `CLOSE_S`, and end. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._io.call(self._server.close(), 4 * CLOSE_S)
            except TimeoutError:
                log.warning(
                    "event=kv_events_cut reason='the clients of --kv-events-port did not end in time'"
                )
            self._io.stop()

    def _take(self) -> None:
        """In our thread: one batch."""
        with self._lock:
            left_out, payload = self._waiting.popleft()
            self._waiting_bytes -= len(payload)
        self._server.send(payload, left_out)

    def _payload(self, events: list[KVEvent]) -> bytes:
        return self._encoder.encode(KVEventBatch(self._clock(), events, self._dp_rank))


def _batches(events: list[KVEvent]) -> Iterator[list[KVEvent]]:
    """The same events in lists of about `BATCH_TOKENS` tokens, so that no batch is too large to be kept."""
    some, tokens = list[KVEvent](), 0
    for event in events:
        some.append(event)
        tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if tokens >= BATCH_TOKENS:
            yield some
            some, tokens = [], 0
    if some:
        yield some


class _Server:
    """The batches that are kept, and those who read them. Runs on one loop."""

    def __init__(self, first: int, topic: bytes, nothing: Callable[[], bytes]) -> None:
        self.topic = topic
        self._next = first
        self._nothing = nothing
        #: number and bytes of each batch that is kept, by its place; places have no gaps
        self.kept: dict[int, tuple[int, bytes]] = {}
        self.first = self.end = 0
        self._kept_bytes = 0
        #: The newest batch that is kept has no events.
        self._empty = False
        self._ports: dict[bytes, _Port] = {}
        self._beat: asyncio.TimerHandle | None = None
        self._askers: deque[_Client] = deque()
        self._budget, self._budget_at = float(CHUNK), 0.0
        self._turn: asyncio.TimerHandle | None = None

    def open(self, sockets: list[tuple[bytes, socket.socket]]) -> None:
        """Accept clients."""
        most = max(4, min(MAX_CLIENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
        for kind, sock in sockets:
            self._ports[kind] = _Port(self, kind, sock, most)

    async def close(self) -> None:
        """End within `CLOSE_S`."""
        for timer in filter(None, (self._beat, self._turn)):
            timer.cancel()
        self._askers.clear()
        await asyncio.gather(*(port.close() for port in self._ports.values()))

    # ---- batches --------------------------------------------------------------------------------

    def send(self, payload: bytes, left_out: int) -> None:
        """A new batch, after so many numbers that are left out."""
        self._next += left_out
        self._add(payload)
        self._empty = False
        self._beat_later()

    def _beat_later(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._say_nothing)

    def _say_nothing(self) -> None:
        """Send the batch without events, or send it again to those who have it."""
        if self._empty and self.kept:
            for client in self.subscribers():
                if client.at == self.end:
                    client.at -= 1
                client.more()
        else:
            self._add(self._nothing())
            self._empty = True
        self._beat_later()

    def _add(self, payload: bytes) -> None:
        self.kept[self.end] = self._next, payload
        self.end += 1
        self._next += 1
        self._kept_bytes += len(payload)
        while self.end - self.first > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self.kept.pop(self.first)[1])
            self.first += 1
        for client in self.subscribers():
            client.more()

    def subscribers(self) -> list[_Client]:
        """The clients that get every new batch."""
        port = self._ports.get(b"PUB")
        return [client for client in port.clients if client.topics] if port is not None else []

    def place_of(self, number: int) -> int:
        """The place of the first kept batch from `number` on."""
        places = range(self.first, self.end)
        return self.first + bisect_left(places, number, key=lambda place: self.kept[place][0])

    # ---- replays --------------------------------------------------------------------------------

    def ask(self, client: _Client) -> None:
        """`client` reads batches that were sent before: it has its next turn after those who wait already."""
        self._askers.append(client)
        self._next_turn()

    def _next_turn(self) -> None:
        if self._turn is None and self._askers:
            wait_s = max(0.0, -self._budget / REPLAY_BYTES_S)
            self._turn = asyncio.get_running_loop().call_later(wait_s, self._turns)

    def _turns(self) -> None:
        self._turn, now = None, asyncio.get_running_loop().time()
        self._budget = min(CHUNK, self._budget + (now - self._budget_at) * REPLAY_BYTES_S)
        self._budget_at = now
        while self._askers and self._budget > 0:
            self._budget -= self._askers.popleft().read_on()
        self._next_turn()


class _Port:
    """One listening socket and its clients."""

    def __init__(self, server: _Server, kind: bytes, sock: socket.socket, most: int) -> None:
        self.server = server
        self.kind = kind
        self.clients: dict[_Client, None] = {}
        self._most = most
        self._gone = asyncio.Event()
        self._sock = sock
        # Accepted connections inherit it; otherwise the kernel lets megabytes wait for each.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK)
        self.listener = GuardedListener(
            lambda: _Client(self),
            server_tls=None,
            handshake_s=HANDSHAKE_S,
            count=lambda what: log.debug("event=kv_events_client what=%s", what),
            max_pending=MAX_PENDING,
            make_room=self._make_room,
        )
        self.listener.open(sock)

    def admit(self, client: _Client) -> None:
        """The handshake of `client` is done. Raises OutOfCapacity."""
        if len(self.clients) >= self._most and not self._make_room() and not self._make_fair(client):
            raise OutOfCapacity(f"{self._most} clients are connected already")
        self.listener.authenticated(client)
        self.clients[client] = None

    def left(self, client: _Client) -> None:
        """`client` is gone."""
        self.clients.pop(client, None)
        if not self.clients:
            self._gone.set()

    async def close(self) -> None:
        """Accept nobody any more, and end once all have read what was sent, at most `CLOSE_S`."""
        await self.listener.close()
        self._sock.close()
        for pending in self.listener.pending:
            pending.cut(PeerRefused("this process ends"))
        self._gone.clear()
        for client in list(self.clients):
            client.finish()
        try:
            async with asyncio.timeout(CLOSE_S if self.clients else None):
                while self.clients:
                    await self._gone.wait()
        except TimeoutError:
            for client in list(self.clients):
                client.cut(PeerRefused("this process ends"))

    def _make_room(self) -> bool:
        """End the client that has asked for nothing for longest."""
        for client in self.clients:
            if not client.busy:
                client.cut(OutOfCapacity("others need its place"))
                self.left(client)
                return True
        return False

    def _make_fair(self, newcomer: _Client) -> bool:
        """End a client of the address that has most, unless the newcomer's would then have more than that."""
        counts = Counter(client.address for client in self.clients)
        [(address, most)] = counts.most_common(1)
        if most < counts[newcomer.address] + 2:
            return False
        victim = next(client for client in self.clients if client.address == address)
        victim.cut(OutOfCapacity("others need its place, and its address has most"))
        self.left(victim)
        return True


class _Client(asyncio.Protocol):
    """One connection; a `PendingProtocol`. It reads batches from `at` up to `until`, or all new ones."""

    def __init__(self, port: _Port) -> None:
        self._port, self._server = port, port.server
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._frames = zmtp.FrameReader()
        self._message: list[bytes] = []
        self._ready = self._held = self._gone = False
        self._listening = True
        self._deadline = Deadline(self._loop, self._too_late)
        self.address = ""
        #: prefixes of the topic that it has subscribed to
        self.topics: set[bytes] = set()
        self.at = 0
        self._until: int | None = None
        #: the unwritten rest of the current batch
        self._rest = memoryview(b"")
        #: frames that may be heard now, and since when
        self._hears, self._hears_at = float(HEARD_FRAMES), self._loop.time()
        self._quiet: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether the client has subscribed, or is being answered."""
        return bool(self.topics) or self._asking()

    def _asking(self) -> bool:
        """Whether the client is being answered."""
        return self._until is not None

    def _may_write(self) -> bool:
        return not self._held and not self._gone

    def _may_hear(self) -> bool:
        """Whether its next frame may be looked at."""
        return self._hears >= 1 and not self._asking() and self._may_write()

    # ---- PendingProtocol -------------------------------------------------------------------------

    def refuse_when_made(self, error: SegueError) -> None:
        """See `PendingProtocol`; nobody is refused with words here."""

    def cut(self, error: SegueError) -> None:
        """See `PendingProtocol`."""
        log.debug("event=kv_events_client_cut reason=%r", str(error))
        self._end()
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        if self._gone:  # it was cut while it was made
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(CHUNK)
        self._deadline.set(self._loop.time() + HANDSHAKE_S)
        self._transport.write(zmtp.GREETING + zmtp.ready(self._port.kind))

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        self._read()

    def pause_writing(self) -> None:
        self._held = True
        # A client that reads nothing must not make us answer.
        self._listen(False)
        self._deadline.set(self._loop.time() + STALL_S)

    def resume_writing(self) -> None:
        self._held = False
        self._deadline.lift()
        if self._until is not None:
            self._server.ask(self)
        else:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._port.listener.closed(self)
        self._port.left(self)

    def _end(self) -> None:
        self._gone = True
        self._deadline.close()
        if self._quiet is not None:
            self._quiet.cancel()

    def finish(self) -> None:
        """Close once what was written is read."""
        self._gone = True
        self._transport.close()

    def _too_late(self) -> None:
        text = "it has read nothing" if self._ready else "its handshake has not ended"
        self.cut(OutOfCapacity(f"{text} in time"))

    # ---- what it says ---------------------------------------------------------------------------

    def _read(self) -> None:
        """Read received frames up to one query; the next one is read after its answer."""
        try:
            now = self._loop.time()
            more_s, self._hears_at = now - self._hears_at, now
            self._hears = min(HEARD_FRAMES, self._hears + more_s * HEARD_FRAMES_S)
            if self._may_hear():
                for is_command, more, frame in self._frames.frames():
                    self._hears -= 1
                    if is_command:
                        self._command(frame)
                    else:
                        self._part(frame, more)
                    if not self._may_hear():
                        break
        except SegueError as error:
            log.info("event=kv_events_client_refused port=%s reason=%r", self._port.kind.decode(), str(error))
            self.cut(error)
            return
        if not self._may_hear():
            self._listen(False)
        if self._hears < 1 and self._quiet is None and not self._gone:
            self._quiet = self._loop.call_later(HEARD_FRAMES / 2 / HEARD_FRAMES_S, self._hear_again)

    def _hear_again(self) -> None:
        self._quiet = None
        if self._may_write() and not self._asking():
            self._go_on()

    def _go_on(self) -> None:
        """Nothing is in the way of reading any more."""
        self._listen(True)
        self._read()
        self.more()

    def _listen(self, on: bool) -> None:
        if on != self._listening and not self._gone and not self._transport.is_closing():
            self._listening = on
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def _command(self, frame: bytes) -> None:
        name, data = frame[1 : 1 + frame[0]] if frame else b"", frame[1 + frame[0] :] if frame else b""
        if not self._ready:
            if name != b"READY" or not any(b"\0\0\0" + bytes((len(k),)) + k in data for k in self._peers()):
                expected = " or ".join(kind.decode() for kind in self._peers())
                raise PeerRefused(f"it is no {expected} socket")
            self._port.admit(self)
            self._ready = True
            self._deadline.lift()
        elif name == b"PING":
            self._transport.write(zmtp.command(b"PONG", data[2:18]))
        elif self._port.kind == b"PUB" and name in (b"SUBSCRIBE", b"CANCEL"):
            self._subscribe(data, name == b"SUBSCRIBE")

    def _peers(self) -> tuple[bytes, ...]:
        return _PEERS[self._port.kind]

    def _part(self, frame: bytes, more: bool) -> None:
        if not self._ready:
            raise PeerRefused("it sends messages before its handshake has ended")
        self._message.append(frame)
        if len(self._message) > zmtp.MAX_FRAMES:
            raise PeerRefused(f"it sends a message of more than {zmtp.MAX_FRAMES} frames")
        if more:
            return
        message, self._message = self._message, []
        if self._port.kind == b"PUB":
            if len(message) == 1 and frame[:1] in (b"\0", b"\1"):
                self._subscribe(frame[1:], frame[0] == 1)
        elif len(message) == 2 and not message[0] and len(frame) == 8:
            self.at, self._until = self._server.place_of(int.from_bytes(frame, "big")), self._server.end
            self._server.ask(self)

    def _subscribe(self, topic: bytes, on: bool) -> None:
        if not self._server.topic.startswith(topic):
            return  # nothing that is sent here begins so
        if not self.topics:
            self.at = self._server.end
        (self.topics.add if on else self.topics.discard)(topic)

    # ---- what it reads --------------------------------------------------------------------------

    def more(self) -> None:
        """Write what a subscriber has not got, as far as it reads it."""
        while self.topics and self._may_write() and (self._rest or self.at < self._server.end):
            self._write_some()

    def read_on(self) -> int:
        """Write the next piece of an answer; returns what it cost."""
        if self._until is None or not self._may_write():
            return 0
        cost = 0
        while cost < CHUNK and (self._rest or self.at < self._until):
            cost += self._write_some()
            if not self._may_write():
                return cost  # `resume_writing` asks again
        if self._rest or self.at < self._until:
            self._server.ask(self)
            return cost
        self._until = None
        self._transport.write(self._head(END, 0))
        if self._may_write():
            self._go_on()
        return cost + BATCH_COST

    def _write_some(self) -> int:
        """The next at most `CHUNK` bytes; returns what they cost."""
        cost = 0
        if not self._rest:
            self.at = max(self.at, self._server.first)  # skips batches that are not kept any more
            if self.at >= (self._server.end if self._until is None else self._until):
                return 0
            number, payload = self._server.kept[self.at]
            self.at += 1
            self._rest = memoryview(payload)
            start, cost = self._head(number.to_bytes(8, "big"), len(payload)), BATCH_COST
            if len(payload) <= CHUNK:
                self._rest = memoryview(b"")
                self._transport.write(start + payload)
                return cost + len(payload)
            self._transport.write(start)
            if not self._may_write():
                return cost
        piece, self._rest = self._rest[:CHUNK], self._rest[CHUNK:]
        self._transport.write(piece)
        return cost + len(piece)

    def _head(self, number: bytes, size: int) -> bytes:
        """The frames before a batch of `size` bytes."""
        first = self._server.topic if self._port.kind == b"PUB" else b""
        start = zmtp.head(len(first), more=True) + first + zmtp.head(8, more=True) + number
        return start + zmtp.head(size, more=False)
