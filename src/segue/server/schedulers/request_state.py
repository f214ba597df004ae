"""One request on one instance: what it is, what it holds, how far it is, and its hand-off."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from segue.engine.request import FinishReason, Output, Request, SamplingParams, TokenLogprob, Usage
from segue.kv import ErrorInfo, Incarnation, InvalidRequest, KVReceiver, KVSender, RoomKey
from segue.server.messages.records import Path, RequestRecord
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.prefill_result import PrefillResult

RequestKey = tuple[Incarnation, str]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request of the frontend `origin`. Times are seconds of the instance's monotonic clock.

    `prompt` are the tokens whose KV the next one needs: the request's prompt and, in a continuation,
    what it has given already. `output` are the tokens generated here, of which the last one's KV is not
    in the pool yet. `pages` are all pages from token 0 on; the request owns one share of each. The KV of
    the first `computed` tokens is in them; `slot` holds the state after these tokens, if the model keeps one.
    `result` is what prefill sends with its last chunk.
    """

    origin: Incarnation
    request: Request
    ticket: Ticket
    seq_id: int
    entered: float
    deadline: float
    max_tokens: int
    prompt: list[int] = field(init=False)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    cached: int = 0
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    timeline: dict[str, float] = field(default_factory=dict)
    result: PrefillResult | None = None
    phase: str = "queue"
    since: float = 0.0
    ended: bool = False
    path: Path = field(init=False)
    handed_bytes: int = 0
    #: when its last token was known
    token_at: float | None = None

    def __post_init__(self) -> None:
        self.path = Path(self.entered)
        self.path.enter(self.phase, self.entered)
        request = self.request
        self.prompt = request.prompt + request.output if request.output else request.prompt

    @property
    def key(self) -> RequestKey:
        return (self.origin, self.request.request_id)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def tokens(self) -> int:
        """Length of the sequence so far: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def produced(self) -> int:
        """Tokens of the whole output so far, here and before."""
        return len(self.request.output) + len(self.output)

    @property
    def sent_as(self) -> RoomKey:
        """Prefill's half of the hand-off."""
        return RoomKey(self.ticket.room, ordinal=self.ticket.ordinal or 0)

    @property
    def received_as(self) -> RoomKey:
        """Decode's half of the hand-off."""
        return RoomKey(self.ticket.room, ordinal=self.ticket.ordinal or 0, attempt=self.ticket.attempt)

    @property
    def direct(self) -> bool:
        """A router has given us one half of the request, and somebody else the other one."""
        return self.ticket.ordinal is not None

    def enter(self, phase: str, now: float, text: str = "") -> None:
        """Begin `phase`, of which there is `text` to say; the time spent in the last one goes into the
        timeline under its name."""
        self.timeline[self.phase] = self.timeline.get(self.phase, 0.0) + now - (self.since or self.entered)
        self.phase, self.since = phase, now
        self.path.enter(phase, now, text)

    def record(self, where: str, role: str, now: float, error: ErrorInfo | None) -> RequestRecord:
        """The record for `segue explain`, so far. `handed_bytes` are the KV bytes that its hand-off has
        moved."""
        t = self.ticket
        return RequestRecord(
            request_id=self.request.request_id,
            where=where,
            role=role,
            began=self.entered,
            seconds=now - self.entered,
            steps=self.path.steps(),
            omitted=self.path.omitted,
            room=t.room,
            attempt=t.attempt,
            pair=f"{t.prefill} > {t.decode}",
            facts={
                "prompt_tokens": len(self.prompt),
                "cached_tokens": self.cached,
                "computed_tokens": self.computed,
                "pages": len(self.pages),
                "handed_bytes": self.handed_bytes,
                "output_tokens": len(self.output),
            },
            error=error,
            ended=self.ended,
            traceparent=self.request.traceparent,
        )

    def add_token(self, token: int, logprob: TokenLogprob | None, eos: Collection[int]) -> Output:
        """Append a token that was drawn; returns what the frontend is told: the first time all that is known
        of the prompt, the last time why it ends and what it has cost. `eos` end a generation."""
        first, position = not self.output, self.produced
        self.output.append(token)
        finish, stop_token = self._finish(token, eos)
        usage = self.usage if first else None
        if finish is not None:
            usage = msgspec.structs.replace(self.usage, output_tokens=self.produced)
        return Output(
            request_id=self.request.request_id,
            position=position,
            token_ids=[token],
            logprobs=[logprob] if logprob is not None else [],
            prompt_logprobs=(self.prompt_logprobs or None) if first else None,
            finish=finish,
            stop_token=stop_token,
            usage=usage,
            timeline=dict(self.timeline) if first else {},
        )

    def _finish(self, token: int, eos: Collection[int]) -> tuple[FinishReason | None, int | None]:
        sampling = self.sampling
        if self.produced > sampling.min_tokens:
            if token in eos and not sampling.ignore_eos:
                return FinishReason.STOP, token
            if token in sampling.stop_token_ids:
                return FinishReason.STOP, token
        if self.produced >= self.max_tokens:
            return FinishReason.LENGTH, None
        return None, None


def first_usage(prompt_tokens: int, decode_cached: int, prefill_cached: int) -> Usage:
    """The sources of the KV of a prompt of `prompt_tokens`. A prefix that both sides had cached counts as
    decode's. In a continuation the counts go beyond the prompt; a cached prefix begins with it."""
    shared = min(decode_cached, prefill_cached, prompt_tokens)
    cached = min(prefill_cached, prompt_tokens) - shared
    return Usage(
        prompt_tokens=prompt_tokens,
        decode_cached=shared,
        prefill_cached=cached,
        computed=prompt_tokens - shared - cached,
    )


def claim_of(request: Request) -> bytes:
    """16 bytes over all that must be equal where the KV is computed and where it is used: the tokens of
    prompt and given output, and the salt of the prefix cache. The same on every host."""
    # The msgpack encoding of these is unique.
    content = msgspec.msgpack.encode((request.prompt, request.output, request.cache_salt))
    return hashlib.blake2b(content, digest_size=16).digest()


HandleT = TypeVar("HandleT", KVSender, KVReceiver)


@dataclass(slots=True)
class RoleTransfer(Generic[HandleT]):
    """A hand-off and its request. The request may have ended; the entry lives until `Release`."""

    state: RequestState
    handle: HandleT
    quarantined: bool = False


def check_free(table: Mapping[RoomKey, RoleTransfer[HandleT]], key: RoomKey, state: RequestState) -> None:
    """Raises InvalidRequest if another request has this very room."""
    if key in table:
        raise InvalidRequest(
            f"room {state.ticket.room}, attempt {state.ticket.attempt} is in use; "
            "each request needs a room of its own",
            room=state.ticket.room,
        )
