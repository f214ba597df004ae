"""Received and unread bytes of one connection, cut into frames. No I/O."""

from __future__ import annotations

from segue.kv.session.frames import HANDSHAKE_FRAME_BYTES, HEADER, PREAMBLE, body_check, lead_check

_BASE_BUFFER_BYTES = 2 * (HANDSHAKE_FRAME_BYTES + HEADER.size)
_OPEN_BUFFER_BYTES = 64 * 2**10


class ChangedFrame(Exception):
    """The network changed a frame on its way; the text says which part of it."""


class LongFrame(Exception):
    """The peer announces a frame that is larger than it may be."""


class Inbox:
    """The buffer that a socket is read into. Its memory follows what was received, not what a header
    announces: it grows at most twofold at a time, and shrinks when it is empty."""

    def __init__(self) -> None:
        #: The largest body that the peer may send now.
        self.max_frame_bytes = HANDSHAKE_FRAME_BYTES
        self._base_bytes = _BASE_BUFFER_BYTES
        self._buffer = memoryview(bytearray(self._base_bytes))
        self._start = 0
        self._end = 0

    @property
    def buffer_bytes(self) -> int:
        """The memory it holds."""
        return len(self._buffer)

    def opened(self) -> None:
        """From now on many frames come, so it is worth to read many at once."""
        self._base_bytes = _OPEN_BUFFER_BYTES

    def drop(self) -> None:
        """Nothing will be read any more: give the memory back, but for a little to read the end into."""
        self._buffer = memoryview(bytearray(HEADER.size + 512))
        self._start = self._end = 0

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._end == len(self._buffer):
            self._make_room(self._end - self._start + 1)
        return self._buffer[self._end :]

    def add(self, nbytes: int) -> None:
        """So many bytes were put into `space`."""
        self._end += nbytes

    def preamble(self) -> memoryview | None:
        """The first bytes of all; None as long as they are not complete. Read them once."""
        if self._end < PREAMBLE.size:
            return None
        self._start = PREAMBLE.size
        return self._buffer[: PREAMBLE.size]

    def next_frame(self) -> tuple[int, memoryview] | None:
        """Kind and body of the next frame, valid until more is received; None when it is not complete.
        Raises ChangedFrame or LongFrame, and then nothing more can be read."""
        have = self._end - self._start
        if have < HEADER.size:
            self._settle(HEADER.size)
            return None
        length, kind, lead, mark = HEADER.unpack_from(self._buffer, self._start)
        if lead != lead_check(length, kind):
            raise ChangedFrame("a frame whose header was changed on its way")
        if length > self.max_frame_bytes:
            raise LongFrame(f"a frame of {length} bytes; the limit is {self.max_frame_bytes}")
        need = HEADER.size + length
        if have < need:
            self._settle(need)
            return None
        body = self._buffer[self._start + HEADER.size : self._start + need]
        self._start += need
        if mark != body_check(body):
            raise ChangedFrame("a frame that was changed on its way")
        return kind, body

    def _settle(self, need_bytes: int) -> None:
        """Every whole frame was read: make the buffer fit for what comes."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) != self._base_bytes:
                self._buffer = memoryview(bytearray(self._base_bytes))
        elif self._start + need_bytes > len(self._buffer):
            self._make_room(need_bytes)

    def _make_room(self, need_bytes: int) -> None:
        """Move what is unread to the front of a buffer with room for `need_bytes` in all, in steps."""
        unread = self._end - self._start
        size = len(self._buffer)
        if need_bytes > size:
            fresh = memoryview(bytearray(min(need_bytes, 2 * size) if unread >= size // 2 else size))
            fresh[:unread] = self._buffer[self._start : self._end]
            self._buffer = fresh
        else:
            self._buffer[:unread] = self._buffer[self._start : self._end]
        self._start, self._end = 0, unread
