"""Functions that `shm`, `tcp` and `fake` share: checks of blocks against both memories, and cutting them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from segue.kv.errors import TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.memory.pool_memory import Memory

MAX_ROWS = 1 << 22  # rows of one write; bounds what a transport builds to move it


def check(blocks: Sequence[CopyBlock], source_bytes: int, target_bytes: int) -> int:
    """The bytes of `blocks`, all inside a source and a target memory of these sizes.

    Raises TransferFailed when one is not, when destination rows overlap each other, or when
    there are more than MAX_ROWS rows.
    """
    total = rows_seen = 0
    for b in blocks:
        if min(msgspec.structs.astuple(b)) < 0:
            raise TransferFailed(f"a block with a negative field: {b}", retryable=False)
        rows, groups, length = b.rows, b.groups, b.row_bytes
        nbytes = groups * rows * length
        if nbytes == 0:
            continue
        src_last = b.src_offset + (groups - 1) * b.src_group_stride + (rows - 1) * b.src_stride
        if src_last + length > source_bytes:
            raise TransferFailed(
                f"{b} reads outside the source memory of {source_bytes} bytes", retryable=False
            )
        group_bytes = (rows - 1) * b.dst_stride + length
        if b.dst_offset + (groups - 1) * b.dst_group_stride + group_bytes > target_bytes:
            raise TransferFailed(
                f"{b} writes outside the peer's memory of {target_bytes} bytes", retryable=False
            )
        if (rows > 1 and b.dst_stride < length) or (groups > 1 and b.dst_group_stride < group_bytes):
            raise TransferFailed(f"rows of {b} overlap at the destination", retryable=False)
        rows_seen += groups * rows
        total += nbytes
    if rows_seen > MAX_ROWS:
        raise TransferFailed(f"a write of {rows_seen} rows; the limit is {MAX_ROWS}", retryable=False)
    return total


def check_memory(blocks: Sequence[CopyBlock], source: Memory, target_bytes: int) -> int:
    """`check`, and that no row reads between two regions of `source`, or across their ends."""
    total = check(blocks, source.nbytes, target_bytes)
    for b in blocks:
        if not _held(b, b.src_offset, b.src_stride, b.src_group_stride, source):
            raise TransferFailed(f"{b} reads outside the regions of the source memory", retryable=False)
    return total


def check_target(blocks: Sequence[CopyBlock], target: Memory) -> None:
    """The same of where checked blocks write, when the regions of the peer's memory are known."""
    for b in blocks:
        if not _held(b, b.dst_offset, b.dst_stride, b.dst_group_stride, target):
            raise TransferFailed(f"{b} writes outside the regions of the peer's memory", retryable=False)


def _held(b: CopyBlock, offset: int, stride: int, group_stride: int, memory: Memory) -> bool:
    if len(memory.regions) == 1 or b.nbytes == 0:
        return True
    rows, groups = np.arange(b.rows, dtype=np.uint64), np.arange(b.groups, dtype=np.uint64)
    offsets = (offset + np.add.outer(group_stride * groups, stride * rows)).ravel()
    return memory.holds(offsets, np.full(len(offsets), b.row_bytes, np.uint64))


def pieces(blocks: Sequence[CopyBlock], limit_bytes: int) -> Iterator[CopyBlock]:
    """The same bytes in blocks of at most `limit_bytes` each, whole groups or rows where they fit."""
    for b in blocks:
        if b.nbytes == 0:
            continue
        if b.nbytes <= limit_bytes:
            yield b
        elif b.groups > 1:
            step = max(1, limit_bytes // (b.rows * b.row_bytes))
            for first in range(0, b.groups, step):
                part = msgspec.structs.replace(
                    b,
                    src_offset=b.src_offset + first * b.src_group_stride,
                    dst_offset=b.dst_offset + first * b.dst_group_stride,
                    groups=min(step, b.groups - first),
                )
                yield from pieces([part], limit_bytes)
        elif b.row_bytes <= limit_bytes:
            step = limit_bytes // b.row_bytes
            for first in range(0, b.rows, step):
                yield CopyBlock(
                    b.src_offset + first * b.src_stride,
                    b.dst_offset + first * b.dst_stride,
                    min(step, b.rows - first),
                    b.row_bytes,
                    b.src_stride,
                    b.dst_stride,
                )
        else:
            for row in range(b.rows):
                source, target = b.src_offset + row * b.src_stride, b.dst_offset + row * b.dst_stride
                for start in range(0, b.row_bytes, limit_bytes):
                    yield CopyBlock(source + start, target + start, 1, min(limit_bytes, b.row_bytes - start))
