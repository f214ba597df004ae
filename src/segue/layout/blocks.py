"""The result of planning: two-dimensional byte ranges that a transport moves without thinking."""

from __future__ import annotations

import msgspec


class CopyBlock(msgspec.Struct, frozen=True, array_like=True):
    """`rows` byte ranges of `row_bytes` each, equally spaced on both sides.

    Row `i` is copied from `src_offset + i * src_stride` to `dst_offset + i * dst_stride`; offsets
    are bytes from the start of the source's and the destination's registered memory. One run of
    tokens in a layer-major pool is one block: one row per (layer, K or V). A contiguous range
    is a block of one row.
    """

    src_offset: int
    dst_offset: int
    rows: int
    row_bytes: int
    src_stride: int = 0
    dst_stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes
