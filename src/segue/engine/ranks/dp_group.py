"""The DP ranks of one instance that share out a model's experts: no rank computes a step without the others.

Each rank is the leader of a process of its own, with its own requests. A rank with something to compute says
so to the others (`StepWord`) and waits for them in the step's first exchange. There each rank tells how many
rows it has, possibly none. Between steps nobody computes or asks: each leader waits for its own requests and
for such a word. The words go in a star around rank 0, which passes them on; the tensors go over Gloo.

Ranks that have counted other steps, or other rows in any of them, find out at the next step. Any error, and
the end or silence of any rank before all have said that they are done, ends the group for all of its ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import torch

from segue.engine.ranks.collectives import TIMEOUT_S, TensorGroup, meeting_point
from segue.kv import (
    DECODE_ERRORS,
    ErrorCode,
    ErrorInfo,
    Internal,
    Limits,
    PeerLost,
    RankDivergence,
    SegueError,
)
from segue.kv.session import typed

#: For a rank to load its part of the model, from when the first one has.
LOAD_S = 600.0
#: How long a rank whose exchange has failed waits for the word of the rank that knows why.
CAUSE_S = 1.0
#: More than any word takes: an error's text is the longest.
MAX_BYTES = 65536


class DpLoadedWord(msgspec.Struct, frozen=True, tag=True):
    """To rank 0: this rank has loaded its part."""


class MeetWord(msgspec.Struct, frozen=True, tag=True):
    """From rank 0: all have loaded, and meet at this port of loopback."""

    port: int


class StepWord(msgspec.Struct, frozen=True, tag=True):
    """The step with this number, counted from 1, is to be computed."""

    number: int


class DpDoneWord(msgspec.Struct, frozen=True, tag=True):
    """This rank drains and will have no rows any more; it still computes for the others."""

    rank: int


class AliveWord(msgspec.Struct, frozen=True, tag=True):
    """Between rank 0 and another, every `keepalive_s`: the process of the sender runs."""


class LostWord(msgspec.Struct, frozen=True, tag=True):
    """The group is over for this reason."""

    error: ErrorInfo


Word = DpLoadedWord | MeetWord | StepWord | DpDoneWord | AliveWord | LostWord
W = TypeVar("W", DpLoadedWord, MeetWord)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


class DpGroup:
    """One rank's end of the group. `identity` tells what it has loaded, and must be equal on all ranks.

    One step at a time. `listen` begins to hear the others, on a thread of its own. A rank that was not heard
    for `peer_silence_s` is lost (a stopped process, say), whether or not there is a step.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Sequence[socket.socket],
        identity: str,
        timeout_s: float = TIMEOUT_S,
        limits: Limits | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        #: the rows of each rank in the running step, and which of them all are ours
        self.rows: list[int] = [0] * size
        self.own = slice(0, 0)
        self._links = list(links)
        self._timeout_s = timeout_s
        self._limits = limits or Limits()
        self._number = 0
        self._awaited = 0
        self._digest = _chained(b"", f"{size} {identity}".encode())
        self._done: set[int] = set()
        self._gloo: TensorGroup | None = None
        self._error: SegueError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._closed = False
        self._wake: Callable[[], None]
        self._leave: Callable[[], None]
        self._on_lost: Callable[[SegueError], None]
        self.stop_listening()
        self._thread = threading.Thread(target=self._hear, name="dp-group", daemon=True)

    # ---- the start -------------------------------------------------------------------------------

    def meet(self, within_s: float = LOAD_S) -> None:
        """Wait until all have loaded, then connect. Raises PeerLost, and RankDivergence if they have
        loaded different models."""
        if self.rank == 0:
            for link in self._links:
                self._expected(link, DpLoadedWord, within_s)
            store = meeting_point(timeout_s=self._timeout_s)
            self._say(MeetWord(store.port))
        else:
            self._say(DpLoadedWord())
            store = meeting_point(self._expected(self._links[0], MeetWord, within_s).port, self._timeout_s)
        self._gloo = TensorGroup(store, "dp", self.rank, self.size, self._timeout_s)
        self._agree(0)

    def listen(
        self, wake: Callable[[], None], leave: Callable[[], None], lost: Callable[[SegueError], None]
    ) -> None:
        """See `ExpertPeers.listen`."""
        with self._lock:
            self._wake, self._leave, self._on_lost = wake, leave, lost
            error = self._error
        if self._thread.ident is None:
            self._thread.start()
            return
        # Said to the listeners before these, who may have been gone.
        if error is not None:
            lost(error)
        elif self._done:
            leave()
        wake()

    def stop_listening(self) -> None:
        """See `ExpertPeers.stop_listening`."""
        with self._lock:
            self._wake, self._leave, self._on_lost = _nothing, _nothing, lambda _: None

    # ---- steps -----------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """See `ExpertPeers.behind`."""
        return self._awaited > self._number and self._error is None

    @contextlib.contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """One step of all ranks, to which this one brings `rows`. An error within it ends the group. Raises
        this error, or the one that ended the group before."""
        try:
            self._begin(rows)
            yield
        except Exception as exc:
            raise self._lose(self._cause(typed(exc, f"step {self._number} of a DP group"))) from exc

    def _begin(self, rows: int) -> None:
        if self._error is not None:
            raise self._error
        self._number += 1
        if self._awaited < self._number:
            self._say(StepWord(self._number))
        self.rows = self._agree(rows)
        first = sum(self.rows[: self.rank])
        self.own = slice(first, first + rows)
        self._digest = _chained(self._digest, repr((self._number, self.rows)).encode())

    def _agree(self, rows: int) -> list[int]:
        """The rows of each rank. Raises RankDivergence on every rank if one is at another step, or has come
        there another way."""
        assert self._gloo is not None
        digest = int.from_bytes(self._digest, signed=True)
        own = torch.tensor([[self._number, digest, rows]])
        found = [part[0].tolist() for part in self._gloo.gather(own, [1] * self.size)]
        for rank, (number, theirs, _) in enumerate(found):
            if (number, theirs) != (self._number, digest):
                raise RankDivergence(
                    f"at step {self._number} of DP rank {self.rank}, rank {rank} is at step {number} and has "
                    f"computed {'the same' if theirs == digest else 'another model or other steps'} before"
                )
        return [count for _, _, count in found]

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of every rank in this step, of which this one has `x`."""
        assert self._gloo is not None
        return self._gloo.gather(x, self.rows)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorGroup.sum`."""
        assert self._gloo is not None
        return self._gloo.sum(x)

    def done(self) -> bool:
        """See `ExpertPeers.done`."""
        if self.rank not in self._done:
            self._done.add(self.rank)
            self._say(DpDoneWord(self.rank))
        return self._error is not None or len(self._done) == self.size

    # ---- words -----------------------------------------------------------------------------------

    def _say(self, word: Word, but: socket.socket | None = None) -> None:
        """Send to every link but `but`. The reading thread notices a lost peer."""
        body = _encoder.encode(word)
        for link in self._links:
            if link is not but:
                with contextlib.suppress(OSError):
                    link.send(body, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _expected(self, link: socket.socket, kind: type[W], within_s: float) -> W:
        link.settimeout(within_s)
        try:
            word = _decoder.decode(link.recv(MAX_BYTES))
        except (OSError, *DECODE_ERRORS) as exc:
            raise PeerLost(f"another DP rank has not started: {exc!r}") from exc
        link.settimeout(None)
        if not isinstance(word, kind):
            raise Internal(f"another DP rank said {word} where a {kind.__name__} was due")
        return word

    def _hear(self) -> None:
        limits, now = self._limits, time.monotonic()
        said, heard = now - limits.keepalive_s, {}  # when we spoke last, and each link that is open
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(self._links, 1 if self.rank == 0 else 0):
                selector.register(link, selectors.EVENT_READ, (link, rank))
                heard[link] = now + self._timeout_s  # so much later at most another one begins to listen
            while heard:
                due = min(said + limits.keepalive_s, min(heard.values()) + limits.peer_silence_s)
                found = selector.select(max(0.0, due - time.monotonic()))
                now = time.monotonic()
                if now - due > limits.keepalive_s:  # we were the one that stood still
                    heard = {link: max(now, at) for link, at in heard.items()}
                for link, rank in [key.data for key, _ in found]:
                    heard[link] = now
                    if not self._heard(link, rank):
                        selector.unregister(link)
                        del heard[link]
                for link, at in list(heard.items()):
                    if now >= at + limits.peer_silence_s:
                        self._silent(selector.get_key(link).data[1])
                        selector.unregister(link)
                        del heard[link]
                if now >= said + limits.keepalive_s:
                    self._say(AliveWord())
                    said = now

    def _silent(self, rank: int) -> None:
        if not self._closed and len(self._done) < self.size:
            text = f"DP rank {rank} of this instance has said nothing for {self._limits.peer_silence_s:g} s"
            self._lose(PeerLost(f"{text}, and its experts are needed in every step"))

    def _heard(self, link: socket.socket, rank: int) -> bool:
        """Take one word; whether there may be another."""
        try:
            body = link.recv(MAX_BYTES)
        except OSError:
            body = b""
        if not body:
            if not self._closed and len(self._done) < self.size:
                self._lose(PeerLost(f"DP rank {rank} of this instance has ended, and its experts with it"))
            return False
        try:
            word = _decoder.decode(body)
        except DECODE_ERRORS as exc:
            word = LostWord(RankDivergence(f"DP rank {rank} said what cannot be read: {exc}").info)
        if self.rank == 0 and not isinstance(word, AliveWord):
            self._say(word, but=link)
        match word:
            case StepWord(number):
                self._awaited = max(self._awaited, number)
                self._wake()
            case DpDoneWord(done):
                self._done.add(done)
                self._leave()
                self._wake()
            case LostWord(error):
                self._lose(error.exception())
        return True

    # ---- the end ---------------------------------------------------------------------------------

    def _cause(self, seen: SegueError) -> SegueError:
        """The reason why the group ended. The error that a rank sees is seldom the cause; a rank that knows
        more sends it."""
        if seen.code is ErrorCode.PEER_LOST and self._thread.is_alive():
            self._ended.wait(CAUSE_S)
        return seen

    def _lose(self, error: SegueError) -> SegueError:
        """The group is over; why. A failure within a step also ends our connections, which wakes the other
        ranks."""
        with self._lock:
            first, told = self._error is None, self._on_lost
            self._error = self._error or error
        if first:
            self._say(LostWord(error.info))
            self._ended.set()
            told(error)
        if self._gloo is not None and threading.current_thread() is not self._thread:
            self._gloo.close()
        return self._error

    def close(self) -> None:
        """Leave; the others hear so. Idempotent."""
        self._closed = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(self._timeout_s)
        for link in self._links:
            link.close()


def _chained(digest: bytes, more: bytes) -> bytes:
    return hashlib.blake2b(digest + more, digest_size=8).digest()


def _nothing() -> None:
    pass
