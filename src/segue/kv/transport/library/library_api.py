"""The interface of a library that moves bytes on its own threads, for `library.LibraryTransport`.

Epochs, grants, fences, peers that die, and authentication are the transport's. A library registers memory,
makes a receiving and a writing end per peer, posts rows, and says what its ends prove.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from segue.kv.ids import RankId
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.tcp.tcp_wire import PartRows

#: The library's handle of a post, of any type.
Handle = object


class ReceivingEnd(ABC):
    """The endpoint through which one peer writes into our memory."""

    #: Data with which the writer reaches it (addresses, keys); told to this peer alone, over its control
    #: stream.
    blob: bytes
    #: Whether its writer may still write when it is closed: then the close has to be a proof.
    unsettled = True

    @abstractmethod
    def close(self) -> bool:
        """End it. True if that is a proof that nothing of this peer lands any more, whatever it still does,
        and whether it lives or not. May block; called once, on a thread of its own."""


class UnprovenEnd(ReceivingEnd):
    """Nothing is made for one peer alone, and the library revokes nothing: its close proves nothing."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    def close(self) -> bool:
        """See `ReceivingEnd.close`."""
        return False


class WritingEnd(ABC):
    """The endpoint that writes to one peer. All calls come from one thread."""

    @abstractmethod
    def post(self, rows: PartRows) -> Handle:
        """Begin to move `rows`; offsets in the two memories that `Library.writing` was given, all of them
        inside. May block until they are moved. Raises what the library raises, or TransferFailed; then
        nothing is known of these bytes."""

    @abstractmethod
    def done(self, handle: Handle) -> bool:
        """True once every byte of a post is in the peer's memory and no byte of it is to come; False while it
        runs. Never blocks. Raises when the library says anything else, which proves nothing. Not called again
        after True."""

    @abstractmethod
    def close(self) -> bool:
        """End it, whatever runs. True if nothing reads our memory any more when it returns. May block."""


class Library(ABC):
    """One library, for the life of one transport. Its methods may block; none is called on a loop.

    An exception of a method ends the one path that it was called for.
    """

    #: Limits of one post; several may be in flight (`MAX_IN_FLIGHT_BYTES` in `library_out`).
    max_rows: ClassVar[int] = 2000
    post_bytes: ClassVar[int] = 8 * 2**20

    def load(self) -> None:
        """Slow initialisation, before any peer is met. Called once, before any other method."""
        return

    def greeting(self) -> bytes:
        """The description of this process that a receiver gets before it makes an endpoint for it."""
        return b""

    @abstractmethod
    def receiving(self, peer: RankId, memory: Memory, greeting: bytes) -> ReceivingEnd:
        """Make an end with all regions of `memory` registered, for this peer and this time alone."""

    @abstractmethod
    def writing(self, peer: RankId, memory: Memory, target: Memory, blob: bytes) -> WritingEnd:
        """Make an end that writes from `memory` to where `blob` says. `target` is the peer's memory: its
        offsets, and addresses that mean something to the peer alone."""
