"""One request on one instance: what it is, what it holds, and how far it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

from segue.core.request import Request, SamplingParams, Ticket, TokenLogprob, Usage
from segue.core.types import Incarnation, TransferId

JobKey = tuple[Incarnation, str]


@dataclass(slots=True, eq=False)
class Job:
    """A request of the frontend `origin`. Times are seconds of the instance's monotonic clock.

    `pages` are all pages from token 0 on; the job owns one share of each. The KV of the first
    `computed` tokens is in them. `output` are the tokens generated so far, of which the last
    one's KV is not in the pool yet.
    """

    origin: Incarnation
    request: Request
    ticket: Ticket
    seq_id: int
    entered: float
    deadline: float
    max_tokens: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    timeline: dict[str, float] = field(default_factory=dict)
    phase: str = "queue"
    since: float = 0.0
    ended: bool = False

    @property
    def key(self) -> JobKey:
        return (self.origin, self.request.request_id)

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def tokens(self) -> int:
        """Length of the sequence so far: prompt and output."""
        return len(self.request.prompt) + len(self.output)

    @property
    def transfer(self) -> TransferId:
        """The hand-off's identity (meaningless on a unified instance)."""
        t = self.ticket
        return TransferId(t.room, t.attempt, t.prefill.incarnation, t.decode.incarnation)

    @property
    def prompt_hash(self) -> int:
        """64 bits over the prompt's tokens, the same on every host."""
        # The msgpack encoding of a list of integers is unique.
        digest = hashlib.blake2b(msgspec.msgpack.encode(self.request.prompt), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def enter(self, phase: str, now: float) -> None:
        """Begin `phase`; the time spent in the last one goes into the timeline under its name."""
        self.timeline[self.phase] = self.timeline.get(self.phase, 0.0) + now - (self.since or self.entered)
        self.phase, self.since = phase, now
