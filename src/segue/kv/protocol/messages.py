"""The messages of a hand-off between a prefill leader (P) and a decode leader (D).

They travel over one authenticated, ordered session per pair of leaders (`kv.session`), whose
own frames (handshake, keepalive) are not here. Every message is frozen, tagged and versioned by
`HANDOFF_VERSION`, which is compared when the session opens.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from segue.kv.errors import ErrorInfo
from segue.kv.ids import Span, TransferId
from segue.kv.layout.spec import PoolSpec

HANDOFF_VERSION = 5


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural log-probability `logprob` of one chosen `token` (its id), and the most likely alternatives
    `top` as pairs of both, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class LeaderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader says of its replica when a session opens; the payload of `SessionHello` / `Welcome`.

    `model` is a fingerprint of configuration and weights: KV of another model is never accepted.
    `ranks` are the pools in rank order, `endpoints` maps a transport's name to one opaque
    endpoint per rank. `scratch` has of each rank the offset and the size of memory that nothing is kept in; a
    side that gives none takes no part in a probe.
    """

    protocol: int
    model: str
    dp_size: int
    ranks: list[PoolSpec]
    endpoints: dict[str, list[bytes]]
    max_transfers: int
    scratch: list[tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=2)]]] = []


class Destination(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """D→P: where to write. `pages` holds tokens `[prefix_tokens // page_tokens * page_tokens,
    prompt_tokens)` of the prompt in order; the bytes before `prefix_tokens` are already right. `slot` is for
    the state that the model keeps of a sequence beside its KV, if it keeps one; `prefix_tokens` is 0 then.

    `epoch` was chosen by decode for this hand-off alone and every write carries it. `plan_hash`
    is what decode computed from both layouts; prefill must compute the same. `inferred`: decode was not told
    the DP rank of prefill by who placed the request; it may be another, and that is to be answered.
    """

    transfer: TransferId
    epoch: int
    budget_s: float
    prompt_tokens: int
    prefix_tokens: int
    pages: list[int]
    transport: str
    plan_hash: int
    inferred: bool = False
    slot: int | None = None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """P→D: the sender exists and has the destination."""

    transfer: TransferId


class Moved(msgspec.Struct, frozen=True, tag=True):
    """P→D: another DP rank of this instance owns the room. Answers a `Destination` that is `inferred`; the
    rank that says so has written nothing and never will."""

    transfer: TransferId
    dp_rank: int


class ChunkPosted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """P→D: a chunk has landed at the destination, for one (source rank, destination rank) pair.

    `span` is the whole chunk's, in tokens of the prompt; the source has sent its share of it
    (`PairPlan.share`), of which `nbytes` and `checksum` are. `final` marks the pair's last chunk, which has
    the sequence's state as well, if there is one. `checksum` is the XXH3-64 of the share's content as prefill
    holds it, in the canonical order of `kv.layout.content`, over one layer in `every` (1: all); None where
    checksums are off or the share is empty. Decode verifies whatever it is given. `wire_s` is the time the
    transport took for it.
    """

    transfer: TransferId
    source: int
    target: int
    sequence: int
    span: Span
    nbytes: int
    final: bool
    checksum: int | None = None
    every: int = 1
    wire_s: float = 0.0


class Metadata(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """P→D: what decode needs besides KV. `transfer` must be the receiver's own, `prompt_tokens` its `init`'s.

    `first_token` is the id of the first generated token, `first_logprob` its log-probability and
    `prompt_logprobs` those of the prompt's tokens, where a request asked for them. `prompt_hash` is over the
    prompt's tokens, for decode's engine to compare: two requests under one room must not become one answer.
    The others are for statistics: prompt tokens from prefill's cache (`prefill_cached`) and `computed`,
    `chunks` sent, and prefill's durations in seconds (`timeline`: `queue`, `bootstrap`, `prefill`).
    """

    transfer: TransferId
    prompt_tokens: int
    first_token: int
    prompt_hash: int = 0
    first_logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prefill_cached: int = 0
    computed: int = 0
    chunks: int = 0
    timeline: dict[str, float] = {}


class Committed(msgspec.Struct, frozen=True, tag=True):
    """D→P: every byte and the metadata are here; prefill may release."""

    transfer: TransferId


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Both ways: the hand-off has failed. Always sent: failure is never one-way."""

    transfer: TransferId
    error: ErrorInfo


class Abort(msgspec.Struct, frozen=True, tag=True):
    """D→P: stop writing and prove it with `Drained`. Follows `Failed` where a proof is needed."""

    transfer: TransferId


class Drained(msgspec.Struct, frozen=True, tag=True):
    """P→D: no write of this hand-off is in flight and none will start."""

    transfer: TransferId


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Both ways: this side does not know the transfer (any more). Proves what `Drained` proves."""

    transfer: TransferId


class ProbeReady(msgspec.Struct, frozen=True, tag=True):
    """D→P, where both give scratch, and before anything else: P may write into it under `epoch`, over each
    transport that the pair could use."""

    epoch: int


class PathChosen(msgspec.Struct, frozen=True, tag=True):
    """P→D: the transport of this session. P decides, for it is the one that writes, and so the one that
    measures; nothing of a probe is written any more."""

    transport: str


#: The messages between two leaders that choose a transport.
PathMessage = ProbeReady | PathChosen

#: The messages of hand-offs between two leaders.
HandoffMessage = (
    Destination | Accepted | Moved | ChunkPosted | Metadata | Committed | Failed | Abort | Drained | Gone
)
