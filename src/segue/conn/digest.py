"""Hashes ranges of our own pool for the protocol: small ones at once, others on one thread of their own.

The hash takes no longer than reading the memory, but 46 MB are some milliseconds, in which the I/O
thread would serve no session. The thread holds the interpreter's lock for microseconds at a time (see
`layout.content.PIECE_BYTES`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from segue.core.errors import ErrorInfo, Internal, OutOfCapacity, SegueError
from segue.handoff import events
from segue.layout.content import checksum
from segue.transport.memory import Memory

#: Content up to this size is hashed where it is asked for: 1.3 ms in which the I/O thread does nothing else,
#: but two threads that take the interpreter's lock from one another cost the first token more (512 tokens
#: of SmolLM2 over shm on two cores: overhead 2.9 instead of 3.3 to 3.6 ms).
INLINE_BYTES = 16 * 2**20


class Digests(Protocol):
    """What a manager asks of a `Digester`."""

    def start(self) -> None: ...
    def submit(self, effect: events.ComputeChecksum) -> None: ...
    def close(self) -> None: ...


class DigestQueue:
    """What is hashed at once, what waits for the thread, and what either answers.

    No thread or lock is in here: one thread adds, and another one takes.
    """

    def __init__(self, memory: Memory, max_waiting: int, inline_bytes: int) -> None:
        self._memory = memory
        self._max_waiting = max_waiting
        self._inline_bytes = inline_bytes
        self._waiting: deque[events.ComputeChecksum] = deque()
        self._closed = False

    def submit(self, effect: events.ComputeChecksum) -> events.ChecksumReady | None:
        """The answer, where there is one at once: hashed here, or none can wait any more. None: it waits
        until it is taken, or nobody wants to know it (closed)."""
        if self._closed:
            return None
        if effect.content.nbytes <= self._inline_bytes:
            return self.hash(effect)
        if len(self._waiting) >= self._max_waiting:
            return _failed(effect, OutOfCapacity(f"{self._max_waiting} chunks wait for their checksum"))
        self._waiting.append(effect)
        return None

    def take(self) -> events.ComputeChecksum | None:
        """The one that has waited longest; None if none does, or nobody wants to know it any more."""
        return self._waiting.popleft() if self._waiting and not self._closed else None

    def hash(self, effect: events.ComputeChecksum) -> events.ChecksumReady:
        """The checksum of what `effect` names, or why there is none. Raises nothing."""
        try:
            with memoryview(self._memory.buffer) as memory:
                return events.ChecksumReady(effect.transfer, effect.tag, checksum(memory, effect.content))
        except SegueError as error:
            return _failed(effect, error)
        except Exception as error:  # one hand-off fails, the thread lives on (lesson 22)
            return _failed(effect, Internal(f"hashing failed: {type(error).__name__}: {error}"))

    def close(self) -> None:
        """Nobody wants to know any more."""
        self._closed = True


class Digester:
    """Answers each `ComputeChecksum` with one `ChecksumReady`, through `answer`, until it is closed.

    `submit` never blocks; at most `max_waiting` wait, more fail with OUT_OF_CAPACITY. `answer` is called on
    the submitting thread or on this object's own.
    """

    def __init__(
        self, memory: Memory, answer: Callable[[events.ChecksumReady], None], max_waiting: int
    ) -> None:
        self._queue = DigestQueue(memory, max_waiting, INLINE_BYTES)
        self._answer = answer
        # As often as one waits, and once more at the end.
        self._wake = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="segue-digest", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, effect: events.ComputeChecksum) -> None:
        """Hash what `effect` names, now or soon; ignored once closed."""
        answer = self._queue.submit(effect)
        if answer is not None:
            self._answer(answer)
        else:
            self._wake.release()

    def close(self) -> None:
        """End the thread after the range it is reading: the memory may be unmapped then. Idempotent."""
        self._queue.close()
        self._wake.release()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        while self._wake.acquire() and (effect := self._queue.take()) is not None:
            self._answer(self._queue.hash(effect))


def _failed(effect: events.ComputeChecksum, error: SegueError) -> events.ChecksumReady:
    info: ErrorInfo = error.info
    return events.ChecksumReady(effect.transfer, effect.tag, 0, error=info)
