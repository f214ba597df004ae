"""The control stream of a staged path: who says what of one piece of a write.

    writer → Want (a slot for so many bytes of an epoch)
    reader → SlotGranted (write there, by the inner transport, under this inner epoch) | PieceRefused
    writer → Filled (the bytes are in the slot, and belong here) | GivenUp (nothing is written there any more)
    reader → PieceCopied (every byte is in its place) | PieceRefused

Each piece has a number of its writer's choice. Messages are framed as those of `library_wire`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from segue.kv.layout.blocks import CopyBlock

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
#: Blocks of one piece; about 40 bytes each on the wire.
MAX_BLOCKS = 16384


class Want(msgspec.Struct, frozen=True, tag=True):
    """Writer: a slot for piece `number` of a write of `epoch`."""

    number: _Number
    epoch: int
    nbytes: _Bytes


class SlotGranted(msgspec.Struct, frozen=True, tag=True):
    """Reader: `offset` in its staging pool, to be written under `inner_epoch`."""

    number: _Number
    inner_epoch: int
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**56)]


class Filled(msgspec.Struct, frozen=True, tag=True):
    """Writer: the piece is in its slot. `blocks` lead from offsets in the slot to offsets in the reader's
    memory."""

    number: _Number
    blocks: Annotated[list[CopyBlock], msgspec.Meta(max_length=MAX_BLOCKS)]


class GivenUp(msgspec.Struct, frozen=True, tag=True):
    """Writer: nothing is written into the slot of this piece any more, or ever will be."""

    number: _Number


class PieceCopied(msgspec.Struct, frozen=True, tag=True):
    """Reader: every byte of the piece is in the reader's memory."""

    number: _Number


class PieceRefused(msgspec.Struct, frozen=True, tag=True):
    """Reader: the epoch is not granted (any more); nothing of the piece was or will be copied."""

    number: _Number


FromStagedReader = SlotGranted | PieceCopied | PieceRefused
FromStagedWriter = Want | Filled | GivenUp
StagedMessage = FromStagedReader | FromStagedWriter
