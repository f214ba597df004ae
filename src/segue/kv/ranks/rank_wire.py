"""Messages about hand-offs between a leader and the process of one of its ranks, over a `RankLink`.

The rank speaks first: `ReadyAnswer`. To a `…Command` it says the `…Answer` of the same name, to a
`WriteCommand` or a `FenceCommand` a `MovedAnswer`, to `ComputeChecksum` (`Rank.checksum`) a `ChecksumReady`
(`RankOwner.hashed`), to those of which `Rank` has coroutines `DoneAnswer`. To a `SignalledAnswer` the leader
says `ForgetCommand`.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from segue.kv.errors import ErrorInfo
from segue.kv.ids import ChecksumKind, RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.spec import PoolSpec
from segue.kv.protocol.events import ChecksumReady, ComputeChecksum
from segue.kv.ready import ReadyEvent
from segue.kv.transport.base import TransportEvent


class ReadyAnswer(msgspec.Struct, frozen=True, tag=True):
    """The rank's pool and how peers reach it: an encoded `Endpoint` for each transport's name; and the
    kinds of checksums that it computes."""

    spec: PoolSpec
    endpoints: dict[str, bytes]
    checksums: tuple[str, ...] = (ChecksumKind.XXH3,)


class ConnectCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.connect`; `number` names the question."""

    number: int
    transport: str
    peer: RankId
    endpoint: bytes
    timeout_s: float


class DoneAnswer(msgspec.Struct, frozen=True, tag=True):
    """The command of this number was done, or failed with `error`."""

    number: int
    error: ErrorInfo | None = None


class WriteCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.write`; `number` is its tag."""

    transport: str
    peer: RankId
    epoch: int
    number: int
    blocks: list[CopyBlock]
    ready: ReadyEvent | None = None


class GrantCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.grant`."""

    transport: str
    peer: RankId
    epoch: int
    pages: list[int]
    slot: int | None


class GrantAnswer(msgspec.Struct, frozen=True, tag=True):
    """Writes of `epoch` by this rank of a peer may land, or why they may not."""

    peer: RankId
    epoch: int
    error: ErrorInfo | None = None


class FenceCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.fence`."""

    transport: str
    peer: RankId
    epoch: int


class MovedAnswer(msgspec.Struct, frozen=True, tag=True):
    """`RankOwner.moved`."""

    transport: str
    event: TransportEvent


class SignalledAnswer(msgspec.Struct, frozen=True, tag=True):
    """The moment `ready` has come at this rank, or never will."""

    ready: int
    error: ErrorInfo | None = None


class ForgetCommand(msgspec.Struct, frozen=True, tag=True):
    """The leader knows that `ready` has come: no later command names it."""

    ready: int


class FailedAnswer(msgspec.Struct, frozen=True, tag=True):
    """The rank could not do what it was asked, and cannot say for which hand-off: it ends."""

    error: ErrorInfo


Command = ConnectCommand | WriteCommand | GrantCommand | FenceCommand | ComputeChecksum | ForgetCommand
Answer = ReadyAnswer | DoneAnswer | MovedAnswer | GrantAnswer | ChecksumReady | SignalledAnswer | FailedAnswer
HandOff = Command | Answer
#: Messages that a link delivers by itself.
HAND_OFF = frozenset(get_args(HandOff))
