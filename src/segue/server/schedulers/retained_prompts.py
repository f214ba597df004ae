"""Prompts that were computed for a placed request whose hand-off failed: the attempt that follows needs no
forward. A room of direct mode keeps its pages itself.

The whole pages of such a prompt are in the prefix tree, where pressure may evict them. Here is the rest:
the tail page, copied to host memory, and the metadata with the first token. Bounded in entries, bytes and
time; nothing here holds a page of the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from msgspec.structs import replace

from segue.engine.engine_api import HostPages
from segue.engine.request import Request
from segue.server.schedulers.prefill_result import PrefillResult
from segue.server.schedulers.request_state import RequestState, claim_of

MAX_ENTRIES = 256
MAX_BYTES = 64 * 2**20
#: Bytes that a token of a remembered prompt may take here.
_TOKEN_BYTES = 36


@dataclass(frozen=True, slots=True)
class Retained:
    """One prompt. `tail` is None where the prompt fills its pages. `until` is the request's own
    deadline, after which nobody can ask for it again."""

    request: Request
    result: PrefillResult
    tail: HostPages | None
    until: float

    @property
    def nbytes(self) -> int:
        tokens = len(self.request.prompt) + len(self.request.output)
        return tokens * _TOKEN_BYTES + (self.tail.nbytes if self.tail is not None else 0)


class RetainedPrompts:
    """At most `max_entries` prompts in at most `max_bytes`; the oldest go first."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[bytes, int], Retained] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, state: RequestState, result: PrefillResult, tail: HostPages | None) -> None:
        """Remember what `state` had computed; what was kept under its key is replaced."""
        self._pop(_key(state))
        retained = Retained(state.request, result, tail, state.deadline)
        if retained.nbytes > self._max_bytes:
            return
        self._entries[_key(state)] = retained
        self.nbytes += retained.nbytes
        while self.nbytes > self._max_bytes or len(self._entries) > self._max_entries:
            self._pop(next(iter(self._entries)))

    def take(self, state: RequestState) -> Retained | None:
        """Remove and return the KV that was kept for exactly this prompt, output and sampling."""
        retained = self._entries.get(_key(state))
        if retained is None or not _same(retained.request, state.request):
            return None
        return self._pop(_key(state))

    def next_end(self) -> float | None:
        """When `expire` has something to forget next, or None."""
        return min((retained.until for retained in self._entries.values()), default=None)

    def expire(self, now: float) -> None:
        """Forget what nobody can ask for any more."""
        for key in [key for key, retained in self._entries.items() if retained.until <= now]:
            self._pop(key)

    def _pop(self, key: tuple[bytes, int]) -> Retained | None:
        retained = self._entries.pop(key, None)
        if retained is not None:
            self.nbytes -= retained.nbytes
        return retained

    def check_integrity(self) -> None:
        """Raise AssertionError if the count of bytes is wrong or a bound is exceeded."""
        held = sum(retained.nbytes for retained in self._entries.values())
        assert held == self.nbytes <= self._max_bytes, f"{held} bytes are kept, {self.nbytes} counted"
        assert len(self._entries) <= self._max_entries, f"{len(self._entries)} prompts are kept"


def _key(state: RequestState) -> tuple[bytes, int]:
    return (claim_of(state.request), state.sampling.seed)


def _same(retained: Request, asked: Request) -> bool:
    """Compared token by token: a hash alone never decides whose KV is whose."""
    return (
        retained.cache_salt == asked.cache_salt
        and retained.prompt == asked.prompt
        and retained.output == asked.output
        # How long the answer may be does not change its first token.
        and replace(retained.sampling, max_tokens=asked.sampling.max_tokens) == asked.sampling
    )
