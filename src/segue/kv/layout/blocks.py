"""The result of planning: strided byte ranges that a transport moves without thinking."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class CopyBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`groups` groups of `rows` byte ranges of `row_bytes` each, equally spaced on both sides.

    Row `i` of group `g` is copied from `src_offset + g * src_group_stride + i * src_stride` to
    `dst_offset + g * dst_group_stride + i * dst_stride`; offsets are bytes from the start of the source's and
    the destination's registered memory. At the destination a group ends before the next one begins. One run
    of tokens in a layer-major pool is one block: one row per (layer, K or V), or a group of one row per token
    where only some heads are copied. A contiguous range is a block of one row.
    """

    src_offset: int
    dst_offset: int
    rows: int
    row_bytes: int
    src_stride: int = 0
    dst_stride: int = 0
    groups: int = 1
    src_group_stride: int = 0
    dst_group_stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.groups * self.rows * self.row_bytes

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Each row as (source offset, destination offset, bytes)."""
        for group in range(self.groups):
            src = self.src_offset + group * self.src_group_stride
            dst = self.dst_offset + group * self.dst_group_stride
            for row in range(self.rows):
                yield src + row * self.src_stride, dst + row * self.dst_stride, self.row_bytes
