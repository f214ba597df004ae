"""The frames of `tcp` and the vectors of addresses that its sockets read from and write into.

After the handshake the writer sends parts, the receiver answers each with one ack:

    part:  magic u32 | kind u8, 3 zero bytes | rows u32 | checksum u32 | epoch u64 | part u64 | nbytes u64
           rows x (destination offset u64, length u64), then nbytes bytes of data in row order
    ack:   magic u32 | status u8, 3 zero bytes | part u64 | checksum u32

All little-endian. The checksums cover what says where bytes land and what has landed: a bit that
flips on the way must not write into the pages of another request. The data itself is verified by the
hand-off, which knows what should have arrived. A row on the wire is a `struct iovec` once the pool's
address is added, so both ends handle thousands of rows with a few vector operations, and the kernel
copies straight between the socket and the pool.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from segue.kv.errors import Internal, TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.transport.memory.ranges import pieces

IOV_MAX = 1024
MAX_PART_ROWS = 16384
MAX_PART_BYTES = 64 * 2**20
ROW_BYTES = 16
MAGIC = 0x54554753
KIND_WRITE = 1
LANDED, REFUSED = 0, 1
HEADER = struct.Struct("<IB3xIIQQQ")
ACK = struct.Struct("<IB3xQI")

Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a part, before its rows and bytes."""

    rows: int
    epoch: int
    part: int
    nbytes: int
    checksum: int


def _mark(seed: int, *fields: int, rows: bytes | bytearray = b"") -> int:
    head = b"".join(field.to_bytes(8, "little") for field in fields)
    return xxhash.xxh3_64_intdigest(rows, xxhash.xxh3_64_intdigest(head, seed)) & 0xFFFFFFFF


def pack_header(epoch: int, part: int, nbytes: int, rows: bytes, kind: int = KIND_WRITE) -> bytes:
    """The head of a part: its header and its rows."""
    count = len(rows) // ROW_BYTES
    mark = _mark(kind, epoch, part, nbytes, rows=rows)
    return HEADER.pack(MAGIC, kind, count, mark, epoch, part, nbytes) + rows


def pack_ack(status: int, part: int) -> bytes:
    """The answer to a part."""
    return ACK.pack(MAGIC, status, part, _mark(status, part))


def parse_ack(data: bytes | bytearray) -> tuple[int, int]:
    """Status and part of an answer. Raises TransferFailed when it is none."""
    magic, status, part, mark = ACK.unpack_from(data)
    if magic != MAGIC or mark != _mark(status, part) or status not in (LANDED, REFUSED):
        raise TransferFailed("the peer's answer to a write was changed on its way, or is none")
    return status, part


def parse_header(data: bytes | bytearray) -> Header:
    """Raises TransferFailed when it is not the header of a legal part."""
    magic, kind, rows, mark, epoch, part, nbytes = HEADER.unpack(data)
    if magic != MAGIC or kind != KIND_WRITE:
        raise TransferFailed("the peer does not send segue parts")
    if not (0 < rows <= MAX_PART_ROWS and rows <= nbytes <= MAX_PART_BYTES):
        raise TransferFailed(f"a part of {rows} rows and {nbytes} bytes is outside the limits")
    return Header(rows, epoch, part, nbytes, mark)


def parse_rows(data: bytes | bytearray, header: Header) -> Rows:
    """The rows of a part (offset, length). Raises TransferFailed unless header and rows are as they
    were sent, and the lengths are positive and sum up to what the header says."""
    if header.checksum != _mark(KIND_WRITE, header.epoch, header.part, header.nbytes, rows=data):
        raise TransferFailed("the head of a write was changed on its way")
    rows = np.frombuffer(data, "<u8", header.rows * 2).reshape(-1, 2)
    lengths = rows[:, 1]
    if not lengths.all() or int(lengths.max()) > header.nbytes or int(lengths.sum()) != header.nbytes:
        raise TransferFailed("the rows of a part do not sum up to its size")
    return rows.astype(np.uint64)


def ranges_of(area: Content, memory_bytes: int) -> Rows:
    """The byte ranges of `area` as rows (start, end), in order; ranges that touch are one. Raises Internal
    when they are not in a memory of this size."""
    found = area.ranges()
    if not len(found):
        return np.zeros((1, 2), np.uint64)  # a grant without pages, of a prompt that was cached whole
    if int(found[-1, 1]) > memory_bytes:
        raise Internal(f"a grant up to byte {found[-1, 1]} of a memory of {memory_bytes} bytes")
    return found


def inside(rows: Rows, ranges: Rows) -> bool:
    """True when each row (offset, length) lies in one of `ranges`; lengths are at most MAX_PART_BYTES."""
    offsets = rows[:, 0]
    if int(offsets.max()) >= int(ranges[-1, 1]) or int(offsets.min()) < int(ranges[0, 0]):
        return False  # also keeps the sum below from wrapping around
    last = ranges[:, 0].searchsorted(offsets, "right") - 1
    return bool((offsets + rows[:, 1] <= ranges[last, 1]).all())


class Cursor:
    """A position in a vector of (address, length) rows; `MemoryError`-free and bounds-free: the rows
    were checked. Its creator keeps the memory behind the addresses alive."""

    __slots__ = ("_ends", "_first", "_iov", "_rows", "_trimmed", "done", "nbytes")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._iov = rows.copy()
        self._ends = np.cumsum(rows[:, 1].astype(np.int64))
        self._first = 0
        self._trimmed = -1  # the row that the last window showed only in part
        self.done = 0
        self.nbytes = int(self._ends[-1])

    def window(self, limit_bytes: int) -> tuple[int, int]:
        """Address and count of the next iovecs: at most IOV_MAX and at most `limit_bytes` in all."""
        self._restore()
        stop = self.done + limit_bytes
        last = int(self._ends.searchsorted(stop))
        if last < len(self._iov) and last - self._first < IOV_MAX:
            self._iov[last, 1] -= np.uint64(int(self._ends[last]) - stop)
            self._trimmed = last
        count = min(last + 1, len(self._iov), self._first + IOV_MAX) - self._first
        return self._iov.ctypes.data + self._first * ROW_BYTES, count

    def piece(self, limit_bytes: int) -> tuple[int, int]:
        """Address and length of the next contiguous bytes, at most `limit_bytes`; for readers of one
        buffer at a time. Something must be left."""
        self._restore()
        address, length = self._iov[self._first].tolist()
        return address, min(length, limit_bytes)

    def gather(self, address: int, limit_bytes: int) -> int:
        """Copy the next bytes, at most `limit_bytes`, to `address`; how many. Nothing is advanced."""
        self._restore()
        copied = 0
        last = int(self._ends.searchsorted(self.done + limit_bytes))
        for source, length in self._iov[self._first : last + 1].tolist():
            nbytes = min(length, limit_bytes - copied)
            ctypes.memmove(address + copied, source, nbytes)
            copied += nbytes
            if copied == limit_bytes:
                break
        return copied

    def advance(self, nbytes: int) -> None:
        """`nbytes` of the window were moved."""
        self._restore()
        self.done += nbytes
        self._first = int(self._ends.searchsorted(self.done, "right"))
        self._show(self._first)

    def _restore(self) -> None:
        if self._trimmed >= 0:
            self._show(self._trimmed)
            self._trimmed = -1

    def _show(self, row: int) -> None:
        """Make `row` what is left of it."""
        if row < len(self._iov):
            address, length = self._rows[row].tolist()
            moved = max(0, self.done - (int(self._ends[row]) - length))
            self._iov[row] = (address + moved, length - moved)

    @property
    def left(self) -> int:
        """Bytes still to move."""
        return self.nbytes - self.done


class MsgHdr(ctypes.Structure):
    """`struct msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


#: `sendmsg` or `recvmsg`: descriptor, pointer to a `MsgHdr`, flags; -1 with ctypes' errno.
Message = Callable[..., int]


def _libc() -> tuple[Message, Message]:
    libc = ctypes.CDLL(None, use_errno=True)
    for function in (libc.sendmsg, libc.recvmsg):
        function.argtypes = (ctypes.c_int, ctypes.POINTER(MsgHdr), ctypes.c_int)
        function.restype = ctypes.c_ssize_t
    return libc.sendmsg, libc.recvmsg


class Vectors:
    """`sendmsg` and `recvmsg` (of the host, or others) over raw addresses, never blocking and without the
    interpreter's lock.

    Python's own methods take one buffer object per range; making thousands of them costs more
    than moving their bytes.
    """

    def __init__(self, calls: tuple[Message, Message] | None = None) -> None:
        self._send, self._receive = calls or _libc()
        self._header = MsgHdr()
        self._pointer = ctypes.pointer(self._header)

    def send(self, fd: int, cursor: Cursor, limit_bytes: int) -> int:
        """Send from the cursor and advance it. -1: try again later. Raises OSError."""
        self._header.iov, self._header.iovlen = cursor.window(limit_bytes)
        return self._result(self._send(fd, self._pointer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), cursor)

    def receive(self, fd: int, cursor: Cursor, limit_bytes: int) -> int:
        """Receive into the cursor and advance it. -1: try again later; 0: the end. Raises OSError."""
        self._header.iov, self._header.iovlen = cursor.window(limit_bytes)
        return self._result(self._receive(fd, self._pointer, socket.MSG_DONTWAIT), cursor)

    def _result(self, moved: int, cursor: Cursor) -> int:
        if moved > 0:
            cursor.advance(moved)
        elif moved < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR):
                raise OSError(code, os.strerror(code))
        return moved


@dataclass(frozen=True, slots=True)
class PartRows:
    """One part of a write: equal rows at the source and at the destination."""

    source: Rows
    target: Rows
    nbytes: int


def cut(blocks: Sequence[CopyBlock], part_bytes: int, max_rows: int = MAX_PART_ROWS) -> Iterator[PartRows]:
    """The parts of a checked write, each of at most `part_bytes` and `max_rows` rows.

    `source` and `target` hold offsets; the caller adds addresses.
    """
    fields = np.array([msgspec.structs.astuple(b) for b in pieces(blocks, part_bytes)], np.int64)
    if not len(fields):
        return
    rows = fields[:, 2] * fields[:, 6]
    src, dst, per_group, lengths, *strides = np.repeat(fields, rows, axis=0).T
    src_stride, dst_stride, _, src_group_stride, dst_group_stride = strides
    group, row = np.divmod(np.arange(len(src)) - np.repeat(np.cumsum(rows) - rows, rows), per_group)
    source = np.empty((len(src), 2), np.uint64)
    target = np.empty((len(src), 2), np.uint64)
    source[:, 0] = src + group * src_group_stride + row * src_stride
    target[:, 0] = dst + group * dst_group_stride + row * dst_stride
    source[:, 1] = target[:, 1] = lengths
    ends = np.cumsum(lengths)
    first, done = 0, 0
    while first < len(ends):
        last = int(ends.searchsorted(done + part_bytes, "right"))
        last = min(max(last, first + 1), first + max_rows)
        nbytes = int(ends[last - 1]) - done
        yield PartRows(source[first:last], target[first:last], nbytes)
        first, done = last, done + nbytes
