"""Hashes ranges of our own pool for the protocol: small ones at once, others on one thread of their own.

The hash takes no longer than reading the memory, but 46 MB are some milliseconds, in which the I/O
thread would serve no session. The thread holds the interpreter's lock for microseconds at a time (see
`kv.layout.content.PIECE_BYTES`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from segue.kv.errors import ErrorInfo, Internal, OutOfCapacity, SegueError
from segue.kv.ids import ChecksumKind
from segue.kv.layout.content import checksum
from segue.kv.protocol import events
from segue.kv.ranks.word_checksum import WordChecksum
from segue.kv.threads import Wakeable, WorkerThread
from segue.kv.transport.memory.device_tensors import why_no_tensors
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind

#: Content up to this size is hashed where it is asked for: 1.3 ms in which the I/O thread does nothing else,
#: but two threads that take the interpreter's lock from one another cost the first token more (512 tokens
#: of SmolLM2 over shm on two cores: overhead 2.9 instead of 3.3 to 3.6 ms).
INLINE_BYTES = 16 * 2**20


def checksum_kinds(memory: Memory) -> tuple[str, ...]:
    """The kinds of checksums that can be computed of `memory` in this process."""
    kinds = [ChecksumKind.XXH3] if all(r.kind is not MemoryKind.DEVICE for r in memory.regions) else []
    return (*map(str, kinds), *(() if why_no_tensors(memory) else (str(ChecksumKind.WORDS),)))


class Digester:
    """Answers each `ComputeChecksum` with one `ChecksumReady`, through `answer`, until it is closed.

    `submit` never blocks; at most `max_waiting` wait, more fail with OUT_OF_CAPACITY. `answer` is called on
    the submitting thread or by the worker, which `worker` makes.
    """

    def __init__(
        self,
        memory: Memory,
        answer: Callable[[events.ChecksumReady], None],
        max_waiting: int,
        *,
        inline_bytes: int | None = None,
        worker: Callable[[Callable[[], object], str], Wakeable] = WorkerThread,
    ) -> None:
        self._memory = memory
        self._answer = answer
        self._max_waiting = max_waiting
        self._inline_bytes = INLINE_BYTES if inline_bytes is None else inline_bytes
        #: one thread adds, another one takes
        self._waiting: deque[events.ComputeChecksum] = deque()
        self._worker = worker(self._answer_next, "segue-digest")
        self._closed = False

    def start(self) -> None:
        """Start the worker."""
        self._worker.start()

    def submit(self, effect: events.ComputeChecksum) -> None:
        """Hash what `effect` names, now or soon; ignored once closed."""
        if self._closed:
            return
        if effect.content.nbytes <= self._inline_bytes and effect.kind is ChecksumKind.XXH3:
            self._answer(self.hash(effect))
        elif len(self._waiting) >= self._max_waiting:
            full = OutOfCapacity(f"{self._max_waiting} chunks wait for their checksum")
            self._answer(_failed(effect, full))
        else:
            self._waiting.append(effect)
            self._worker.wake()

    def hash(self, effect: events.ComputeChecksum) -> events.ChecksumReady:
        """The checksum of what `effect` names, or why there is none. Raises nothing."""
        try:
            found = self._checksum(effect)
            return events.ChecksumReady(effect.transfer, effect.rank, effect.tag, found)
        except SegueError as error:
            return _failed(effect, error)
        except Exception as error:  # one hand-off fails, the thread lives on (lesson 22)
            return _failed(effect, Internal(f"hashing failed: {type(error).__name__}: {error}"))

    def _checksum(self, effect: events.ComputeChecksum) -> int:
        if effect.kind is ChecksumKind.WORDS:
            return WordChecksum(self._memory).checksum(effect.content)
        with ExitStack() as reading:
            regions = [reading.enter_context(memoryview(bytes_)) for bytes_ in self._memory.buffers]
            return checksum(regions, effect.content)

    def close(self) -> None:
        """Wait for the range that is being read: the memory may be unmapped then. Idempotent."""
        self._closed = True
        self._worker.end()

    def _answer_next(self) -> None:
        """The one that has waited longest."""
        self._answer(self.hash(self._waiting.popleft()))


def _failed(effect: events.ComputeChecksum, error: SegueError) -> events.ChecksumReady:
    info: ErrorInfo = error.info
    return events.ChecksumReady(effect.transfer, effect.rank, effect.tag, 0, error=info)
