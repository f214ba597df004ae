"""Hashes ranges of our own pool for the protocol: small ones at once, others on one thread of their own.

The hash takes no longer than reading the memory, but 46 MB are some milliseconds, in which the I/O
thread would serve no session. The thread holds the interpreter's lock for microseconds at a time (see
`layout.content.PIECE_BYTES`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from segue.core.errors import ErrorInfo, Internal, OutOfCapacity, SegueError
from segue.handoff import api
from segue.layout.content import checksum
from segue.transport.memory import Memory

#: Content up to this size is hashed where it is asked for: 1.3 ms in which the I/O thread does nothing else,
#: but two threads that take the interpreter's lock from one another cost the first token more (512 tokens
#: of SmolLM2 over shm on two cores: overhead 2.9 instead of 3.3 to 3.6 ms).
INLINE_BYTES = 16 * 2**20


class Digests(Protocol):
    """What a manager asks of a `Digester`."""

    def start(self) -> None: ...
    def submit(self, effect: api.Digest) -> None: ...
    def close(self) -> None: ...


class Digester:
    """Answers each `Digest` with one `Digested`, through `answer`, until it is closed.

    `submit` never blocks; at most `max_waiting` wait, more fail with OUT_OF_CAPACITY. `answer` is called on
    the submitting thread or on this object's own.
    """

    def __init__(self, memory: Memory, answer: Callable[[api.Digested], None], max_waiting: int) -> None:
        self._memory = memory
        self._answer = answer
        self._waiting: queue.Queue[api.Digest | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name="segue-digest", daemon=True)
        self._closed = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, effect: api.Digest) -> None:
        """Hash what `effect` names, now or soon; ignored once closed."""
        if self._closed:
            return
        if effect.content.nbytes <= INLINE_BYTES:
            self._answer(self._hash(effect))
            return
        try:
            self._waiting.put_nowait(effect)
        except queue.Full:
            error = OutOfCapacity(f"{self._waiting.maxsize} chunks wait for their checksum")
            self._answer(_failed(effect, error))

    def close(self) -> None:
        """End the thread after the range it is reading: the memory may be unmapped then. Idempotent."""
        self._closed = True
        if not self._thread.is_alive():
            return
        while True:
            try:
                self._waiting.put_nowait(None)
                break
            except queue.Full:
                self._drop_one()
        self._thread.join(10)

    def _drop_one(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            return  # the thread was faster

    def _run(self) -> None:
        while (effect := self._waiting.get()) is not None:
            if not self._closed:
                self._answer(self._hash(effect))

    def _hash(self, effect: api.Digest) -> api.Digested:
        try:
            with memoryview(self._memory.buffer) as memory:
                return api.Digested(effect.transfer, effect.tag, checksum(memory, effect.content))
        except SegueError as error:
            return _failed(effect, error)
        except Exception as error:  # one hand-off fails, the thread lives on (lesson 22)
            return _failed(effect, Internal(f"hashing failed: {type(error).__name__}: {error}"))


def _failed(effect: api.Digest, error: SegueError) -> api.Digested:
    info: ErrorInfo = error.info
    return api.Digested(effect.transfer, effect.tag, 0, error=info)
