"""Memory of requests: from the first byte of a body to the last one of the answer, over all connections.

A request counts what it keeps at the time: its body while that arrives, body and decoded values until its
prompt's token ids are known, then the ids and what it has of its answer. Beyond the budget the request that
needs more is refused (429), and no other.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Final

from segue.kv import OutOfCapacity
from segue.kv.errors import RequestTooLarge

#: Bytes of an id in a list, with the integer that it is.
TOKEN_BYTES: Final = 40
#: Bytes of a sample besides its prompt: its request, its detokenizer, its tables in the fleet.
SAMPLE_BYTES: Final = 8192
#: Bytes of one log-probability and its token, as JSON.
LOGPROB_BYTES: Final = 60
#: Bytes of a list or an object that is decoded, besides those of its values.
_CONTAINER_BYTES: Final = 200
_SLICE: Final = 64 * 2**10

#: Bytes of large bodies that are received in a second, after `BURST_BYTES` at once. A MiB costs 2 to 3 ms of
#: CPU until it is decoded, most of it with the interpreter's lock.
LARGE_BYTES_PER_S: Final = 32 * 2**20
BURST_BYTES: Final = 4 * 2**20

#: The least that a server's requests may keep.
MIN_BUDGET: Final = 256 * 2**20
#: A request that keeps no more than this is small, and an eighth of the budget is for small ones alone:
#: otherwise a client with a few large bodies could have everybody's ordinary requests refused.
SMALL_BYTES: Final = 64 * 2**10


class MemoryBudget:
    """Bytes that requests keep at one time, and the pace at which large bodies arrive."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        #: Bodies whose last piece is not counted yet: bytes to come, a number, bytes of the piece, its turn.
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._paced_until_s = 0.0

    async def turn(self, nbytes: int, left_bytes: int) -> None:
        """Until a body that has `left_bytes` to come is to be read on after a piece of `nbytes`.

        In one round of the event loop one large body gets one piece, and all of them together
        `LARGE_BYTES_PER_S`: tokens of streams wait for that piece alone. The body that has the least to come
        goes first: a client with many bodies of the greatest size holds up nobody else's, and one of them is
        whole before the others take memory.
        """
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (left_bytes, next(self._numbers), nbytes, turn))
        if len(self._waiting) == 1:
            self._schedule(loop)
        await turn

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_at(self._paced_until_s - BURST_BYTES / LARGE_BYTES_PER_S, self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        *_, nbytes, turn = heapq.heappop(self._waiting)
        if not turn.done():
            self._paced_until_s = max(loop.time(), self._paced_until_s) + nbytes / LARGE_BYTES_PER_S
            turn.set_result(None)
        if self._waiting:
            self._schedule(loop)

    def take(self, nbytes: int, *, small: bool) -> None:
        """Count `nbytes` more. Raises OutOfCapacity if they do not fit."""
        limit_bytes = self.limit_bytes if small else self.limit_bytes - self.limit_bytes // 8
        if nbytes > 0 and self.used_bytes + nbytes > limit_bytes:
            raise OutOfCapacity(
                f"requests keep {self.used_bytes} of {limit_bytes} bytes, and this one needs {nbytes} "
                "more; try again later"
            )
        self.used_bytes += nbytes


class RequestMemory:
    """The part of a `budget` that one request uses."""

    __slots__ = ("_budget", "nbytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """Keep `nbytes` more. Raises OutOfCapacity."""
        self._budget.take(nbytes, small=self.nbytes + nbytes <= SMALL_BYTES)
        self.nbytes += nbytes

    async def turn(self, nbytes: int, left_bytes: int) -> None:
        """Like `MemoryBudget.turn`."""
        await self._budget.turn(nbytes, left_bytes)

    def set(self, nbytes: int) -> None:
        """Keep `nbytes` in all from now on. Raises OutOfCapacity."""
        self.add(nbytes - self.nbytes)


def decoded_bytes(raw: bytes, most_bytes: int) -> int:
    """About what the values of a JSON text take in memory; it is not decoded for that. RequestTooLarge above
    `most_bytes`: while msgspec decodes, nothing else of the process runs, in whichever thread that is.

    A number that is no integer takes as long as a list, and counts as one. Signs within texts count as well:
    a text with so many is longer than a context.
    """
    values = _count(raw, b":", b",")
    containers = _count(raw, b"[", b"{") + min(values, _count(raw, b".", b"e", b"E"))
    # A text with one sign beyond Latin-1 takes two to four bytes for each of its letters.
    # Searching one byte is much faster than searching two.
    wide = 1 if raw.isascii() and (b"\\" not in raw or b"\\u" not in raw) else 4
    found = wide * len(raw) + TOKEN_BYTES * values + _CONTAINER_BYTES * containers
    if found > most_bytes:
        raise RequestTooLarge(
            f"the body takes about {found} bytes when it is decoded, of at most {most_bytes}; send fewer "
            "prompts, messages or tools in one request"
        )
    return found


def _count(raw: bytes, *signs: bytes) -> int:
    """In slices: a thread that does it lets the event loop run between them."""
    return sum(raw.count(sign, at, at + _SLICE) for at in range(0, len(raw), _SLICE) for sign in signs)
