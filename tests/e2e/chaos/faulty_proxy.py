"""A TCP proxy that can be told to misbehave, for connections that run and for new ones."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import struct

from ports import HeldPort
from segue.kv.io import IoThread

CHUNK_BYTES = 64 * 1024
#: Enough of a connection's first bytes to see who calls.
SNIFF_BYTES = 160
DELAY_S = 0.03
_RESET = struct.pack("ii", 1, 0)


class Mode(enum.StrEnum):
    """The fault of bytes on their way."""

    NONE = "none"
    DELAY = "delay"  # each piece comes late, in order
    CUT = "cut"  # a reset in the middle of a piece
    CORRUPT = "corrupt"  # one bit of each piece is flipped
    HALF_OPEN = "half-open"  # one direction is swallowed, for ever, and nobody is told


class _Pipe:
    """One connection through the proxy."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
    ) -> None:
        self.near = (reader, writer)
        self.caller = b""  # its first bytes
        self.deaf_from_caller = rng.random() < 0.5
        self.swallowing = False
        self.writers = [writer]

    def reset(self) -> None:
        """End both sockets with RST."""
        for writer in self.writers:
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class FaultyProxy:
    """Forwards `port` to `target` of this host. `caller` limits a fault to connections whose first bytes
    contain it (a session says its role first), so that one listener's peers can be told apart."""

    def __init__(self, io: IoThread, target: int, seed: int = 1) -> None:
        self._held = HeldPort()
        self.port = self._held.port
        self.target = target
        self.mode, self.caller = Mode.NONE, b""
        self.faults = 0
        self._io = io
        self._changed = asyncio.Condition()
        self._rng = random.Random(seed)
        self._pipes: dict[_Pipe, asyncio.Task[None]] = {}
        self._server = io.call(asyncio.start_server(self._serve, "127.0.0.1", self.port), 60)

    def break_(self, mode: Mode, caller: str = "") -> None:
        """From now on, also for connections that run."""
        self._io.call(self._set(mode, caller.encode()), 60)

    def mend(self) -> None:
        """New connections are fine again. What was cut stays cut, what swallows goes on swallowing."""
        self._io.call(self._set(Mode.NONE, b""), 60)

    def close(self) -> None:
        """End everything."""
        self._io.call(self._close(), 60)

    async def struck(self, count: int, within_s: float) -> None:
        """Wait until the fault has met `count` pieces (in the caller's loop). TimeoutError if not."""
        future = asyncio.run_coroutine_threadsafe(self._struck(count), self._io.loop)
        await asyncio.wait_for(asyncio.wrap_future(future), within_s)

    async def _struck(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.faults >= count)

    async def _strike(self) -> None:
        async with self._changed:
            self.faults += 1
            self._changed.notify_all()

    async def _set(self, mode: Mode, caller: bytes) -> None:
        self.mode, self.caller, self.faults = mode, caller, 0
        if mode is Mode.CUT:
            for pipe in [p for p in self._pipes if caller in p.caller]:
                pipe.reset()
                await self._strike()

    async def _close(self) -> None:
        self._server.close()
        tasks = list(self._pipes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pipe = _Pipe(reader, writer, self._rng)
        task = asyncio.current_task()
        assert task is not None
        self._pipes[pipe] = task
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            pipe.writers.append(far_writer)
            there = asyncio.create_task(self._forward(pipe, reader, far_writer, from_caller=True))
            back = asyncio.create_task(self._forward(pipe, far_reader, writer, from_caller=False))
            try:
                await asyncio.gather(there, back)
            finally:
                for half in (there, back):
                    half.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # one end has gone; the other is told below
        finally:
            del self._pipes[pipe]
            for end in pipe.writers:
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _forward(
        self, pipe: _Pipe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_caller: bool
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if from_caller and len(pipe.caller) < SNIFF_BYTES:
                pipe.caller += data[:SNIFF_BYTES]
            mode = self.mode if self.caller in pipe.caller else Mode.NONE
            if mode is not Mode.NONE:
                await self._strike()
            if pipe.swallowing or mode is Mode.HALF_OPEN:
                pipe.swallowing = True
                if from_caller == pipe.deaf_from_caller:
                    continue
            elif mode is Mode.DELAY:
                await asyncio.sleep(DELAY_S)
            elif mode is Mode.CUT:
                writer.write(data[: len(data) // 2])
                await writer.drain()
                pipe.reset()
                return
            elif mode is Mode.CORRUPT:
                broken = bytearray(data)
                broken[self._rng.randrange(len(broken))] ^= 1 << self._rng.randrange(8)
                data = bytes(broken)
            writer.write(data)
            await writer.drain()
        if not pipe.swallowing and not writer.transport.is_closing():
            writer.write_eof()
