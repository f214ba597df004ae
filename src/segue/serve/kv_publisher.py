"""KV events over ZMQ as vLLM publishes them, so that other people's routers can subscribe.

A PUB socket sends `(topic, number, batch)`, the number in 8 bytes, big end first. A ROUTER socket answers a
number with `(number, batch)` of that one and all later ones that are kept, and at the end with number -1 and
nothing. ZMQ drops what a slow subscriber does not take; it sees that by a gap in the numbers.

A second after a batch, and then each second until the next one, a batch without events is sent, always with
the same number. By that a subscriber that comes late, or comes back after this process has restarted, sees
that it has missed something, and need not wait for the next event. (An XPUB socket would tell of each
subscription, but it keeps without a limit what strangers send it.)
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from socket import getaddrinfo
from typing import Any

import msgspec

from segue.core.addresses import bracket
from segue.core.errors import ConfigError
from segue.core.kv_events import AllBlocksCleared, KVEvent, KVEventBatch
from segue.core.kv_events_config import KVEventsConfig

log = logging.getLogger("segue.instance")

#: Batches that are kept for replay, and bytes of them.
KEPT_BATCHES, KEPT_BYTES = 10_000, 64 * 2**20
#: Batches that wait for our own thread, or for a subscriber.
_MAX_WAITING = 10_000
#: How long after a batch the one without events follows, and its repeats.
BEAT_S = 1.0
END = (-1).to_bytes(8, "big", signed=True)


class KVPublisher:
    """Sockets at `host`, and the thread that serves them; ends with `close`. ConfigError if pyzmq is missing
    or a port is taken. `clock` gives seconds since 1970."""

    def __init__(
        self, config: KVEventsConfig, host: str, dp_rank: int, clock: Callable[[], float] = time.time
    ) -> None:
        try:
            zmq: Any = importlib.import_module("zmq")
        except ImportError as error:
            raise ConfigError("--kv-events-port needs the zmq extra: pip install 'segue[zmq]'") from error
        assert config.kv_events_port is not None
        self._zmq = zmq
        self._clock = clock
        self._dp_rank = dp_rank
        self._topic = config.kv_events_topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        # Above all numbers of an earlier process at this address, of which a subscriber may have seen many:
        # it takes lower ones for what it knows already, and would keep the pages of that process for ever.
        self._next = int(clock() * 1000)
        self._dropped = 0
        #: The batch that was sent last, the newest that is kept, has no events.
        self._empty = False
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.Context()
        self._context.set(zmq.IPV6, ":" in host)
        self._pub = self._bound(zmq.PUB, host, config.kv_events_port + dp_rank, "--kv-events-port")
        self._replay: Any = None
        if (replay := config.kv_events_replay_port) is not None:
            self._replay = self._bound(zmq.ROUTER, host, replay + dp_rank, "--kv-events-replay-port")
        log.info("event=kv_events at=%s:%d dp_rank=%d", host, config.kv_events_port + dp_rank, dp_rank)
        # What `publish` says goes through here: a socket belongs to one thread.
        self._inner, self._outer = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._inner, self._outer):
            socket.set_hwm(_MAX_WAITING)
        self._inner.bind("inproc://events")
        self._outer.connect("inproc://events")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        # Whoever followed an earlier process at this address has nothing of what it knows.
        self.publish([AllBlocksCleared()])

    def _bound(self, kind: int, host: str, port: int, flag: str) -> Any:
        socket = self._context.socket(kind)
        # A whole replay and its end, twice: of what a reader has taken ZMQ hears by halves of that.
        socket.set_hwm(_MAX_WAITING if kind == self._zmq.PUB else 2 * (KEPT_BATCHES + 1))
        socket.setsockopt(self._zmq.LINGER, 0)
        try:
            address = getaddrinfo(host, port)[0][4][0]  # ZMQ binds to no name
            socket.bind(f"tcp://{bracket(str(address))}:{port}")
        except (OSError, self._zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{flag} {port} at {host} cannot be used: {error}") from error
        return socket

    def publish(self, events: list[KVEvent]) -> None:
        """Send `events` as one batch; from one thread at a time, and never blocks."""
        try:
            before = self._dropped.to_bytes(8, "big")
            self._outer.send_multipart((before, self._payload(events)), self._zmq.NOBLOCK)
            self._dropped = 0
        except self._zmq.Again:
            self._dropped += 1  # the next one leaves so many numbers out: subscribers see the gap
            log.warning("event=kv_events_dropped events=%d", len(events))

    def close(self) -> None:
        """Send what waits, and end. Idempotent."""
        if not self._outer.closed:
            self._outer.send(b"")
            self._outer.close()
            self._thread.join()
            self._context.destroy(linger=0)

    def _payload(self, events: list[KVEvent]) -> bytes:
        return self._encoder.encode(KVEventBatch(self._clock(), events, self._dp_rank))

    # ---- its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for socket in filter(None, (self._inner, self._replay)):
            poller.register(socket, self._zmq.POLLIN)
        beat_at = math.inf  # before there is a batch
        while True:
            left_s = beat_at - time.monotonic()
            ready = dict(poller.poll(None if left_s == math.inf else max(0, math.ceil(left_s * 1e3))))
            if self._inner in ready:
                frames = self._inner.recv_multipart()
                if len(frames) == 1:
                    return
                self._next += int.from_bytes(frames[0], "big")
                self._send(frames[1])
                self._empty, beat_at = False, time.monotonic() + BEAT_S
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay.recv_multipart())
            if time.monotonic() >= beat_at:
                self._beat()
                beat_at = time.monotonic() + BEAT_S

    def _beat(self) -> None:
        """Send the batch without events."""
        if self._empty:
            number, payload = self._kept[-1]
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        else:
            self._send(self._payload([]))
            self._empty = True

    def _send(self, payload: bytes) -> None:
        number, self._next = self._next, self._next + 1
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._keep(number, payload)

    def _keep(self, number: int, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, frames: list[bytes]) -> None:
        """To one who asks for what it missed; a ROUTER drops what it cannot deliver."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        who, start = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= start:
                self._replay.send_multipart((who, b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((who, b"", END, b""))
