"""The interface of every transport, in six methods. A transport knows epochs and bytes, no protocol.

An *epoch* is a non-zero unsigned 64-bit number that the receiving side chose for one hand-off and
never uses again. All writes of one hand-off carry it. `fence` is the only way to end it.

Threads: the methods may be called from one thread (the owner); they never block longer than a
queue operation, except `connect` and `close`, which have a deadline. Events are delivered by
calling `on_event` from any thread of the transport; the owner makes that thread-safe.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import msgspec

from segue.kv.errors import SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions


class Endpoint(msgspec.Struct, frozen=True):
    """How to reach one registered memory; opaque bytes to everybody but its transport."""

    transport: str
    nbytes: Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
    data: bytes


class Written(msgspec.Struct, frozen=True, tag=True):
    """The write `tag` of `epoch` has landed in the peer's memory, every byte of it.

    `nbytes` moved; `seconds` from the moment the write was given to the transport.
    """

    peer: RankId
    epoch: int
    tag: int
    nbytes: int
    seconds: float


class WriteFailed(msgspec.Struct, frozen=True, tag=True):
    """The write `tag` of `epoch` did not land, or only in part. No further event for it. `refused`: the
    receiver does not grant `epoch` (any more), and nothing else is wrong."""

    peer: RankId
    epoch: int
    tag: int
    error: SegueError
    refused: bool = False


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """The answer to `fence`.

    On the writing side it comes once nothing reads our memory for `epoch` any more and no write of it will
    start: an engine that cannot cancel waits for its own success, or destroys what it writes with. Not
    `proven`: bytes may still be under way to the peer. On the receiving side `proven` says whether the
    transport itself guarantees that no write of `epoch` lands any more; if not, the owner needs the peer's
    word or the peer's death. Where that word would not be enough, because what was sent may still land by our
    own hand, there is no answer before there is a proof.
    """

    peer: RankId
    epoch: int
    proven: bool


class PeerGone(msgspec.Struct, frozen=True, tag=True):
    """The peer's process is dead or its path is closed for good: nothing of it can land any more.

    `proven` is True when the kernel or the transport proves it (a closed unix socket of a dead
    process, a closed TCP stream that we ourselves read); False when it is only unreachable.
    """

    peer: RankId
    proven: bool
    error: SegueError


TransportEvent = Written | WriteFailed | Fenced | PeerGone
EventSink = Callable[[TransportEvent], None]


class Transport(ABC):
    """Moves bytes between the registered memories of ranks. The class describes itself, so that nobody else
    asks for a transport by its name; `kinds` has the list.

    A library that moves bytes on threads of its own and knows no epochs (an RDMA engine) is a `Library`, and
    its transport a `LibraryTransport`.
    """

    #: Its name in settings and for peers.
    name: ClassVar[str]
    #: `auto` lists the lowest one first.
    preference: ClassVar[int]
    #: Kinds of memory that `register` takes.
    memory_kinds: ClassVar[frozenset[MemoryKind]]
    #: `auto` offers it, where it works.
    automatic: ClassVar[bool] = False
    #: The process that receives puts the bytes into its memory itself: once it has ended nothing lands there.
    receiver_writes: ClassVar[bool] = False
    #: False: what lies at the destination is never what was sent, so that checksums mean nothing.
    moves_bytes: ClassVar[bool] = True

    @classmethod
    def unusable(cls) -> str:
        """Why no process can use it on this host, or ""."""
        return "" if sys.platform == "linux" else "needs Linux"

    @classmethod
    def reaches(cls, ours: Endpoint, theirs: Endpoint) -> bool:
        """Whether either rank can write to the other, as far as their endpoints say. Pure, and symmetric."""
        return True

    @abstractmethod
    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        """Made from what its leader was set to. Raises ConfigError."""

    @abstractmethod
    def register(self, memory: Memory) -> Endpoint:
        """Expose all regions of `memory` (once, before any connection) and say how peers reach it. Blocks and
        areas name its bytes by their offsets in `memory`. Raises ConfigError, with what to do, for memory of
        a kind that this transport cannot register."""

    def loaded(self, timeout_s: float) -> None:
        """Wait, at most so long, until what it opens paths with is loaded. It need not be asked."""
        return

    @abstractmethod
    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """Writing side: open the path to `peer`. Idempotent. Raises TransferFailed, PeerRefused
        (wrong key, wrong user, version), BootstrapTimeout, or OutOfCapacity: this process cannot have
        what such a path takes, so another transport should be used. Then nothing of it is left."""

    @abstractmethod
    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        """Receiving side: from now on writes of `epoch` by `peer` may land, inside `area` of our memory.

        Where this side performs the writes (`tcp`), a row outside `area` ends the peer's streams before
        a byte of it lands. Where the peer writes by itself (`shm`), nothing here could stop it: there
        the area is not looked at, and what protects is that only processes of our own user get in."""

    @abstractmethod
    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """Writing side: move `blocks` from our memory into the peer's. Exactly one `Written` or
        `WriteFailed` with `tag` follows, unless `close` comes first. Blocks outside
        either memory are refused before a byte moves."""

    @abstractmethod
    def fence(self, peer: RankId, epoch: int) -> None:
        """Either side: end `epoch`. Queued writes fail, running ones are waited for or cut;
        exactly one `Fenced` follows. Idempotent, also for an unknown epoch or peer."""

    @abstractmethod
    def close(self) -> None:
        """End everything within a bounded time; no event after it returns. Idempotent."""
