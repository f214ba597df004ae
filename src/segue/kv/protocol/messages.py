"""The messages of a hand-off between a prefill leader (P) and a decode leader (D).

They travel over one authenticated, ordered session per pair of leaders (`kv.session`), whose
own frames (handshake, keepalive) are not here. Every message is frozen, tagged and versioned by
`HANDOFF_VERSIONS`, which are compared when the session opens.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from segue.kv.errors import ErrorInfo
from segue.kv.ids import ChecksumKind, Span, TransferId
from segue.kv.layout.spec import PoolSpec
from segue.kv.versions import Versions

#: The versions of these messages that are spoken here. Raise the newest one whenever a message changes its
#: meaning, and the oldest one when its meaning is not understood any more.
HANDOFF_VERSIONS = Versions(8, 8)

#: bytes of the digest of what must be equal on both sides
MAX_CLAIM_BYTES = 64
Claim = Annotated[bytes, msgspec.Meta(max_length=MAX_CLAIM_BYTES)]


class LeaderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's description of its replica when a session opens; the payload of `SessionHello` / `Welcome`.

    `versions` are those of the hand-off's messages that it speaks; both sides use the highest common one.
    `model` is a fingerprint of configuration and weights: KV of another model is never accepted.
    `ranks` are the pools in rank order, `endpoints` maps a transport's name to one opaque
    endpoint per rank, in the order in which prefill tries them. `checksums` are the kinds that all ranks can
    compute; `unchecked`: hand-offs without one are wanted here.
    """

    versions: Versions
    model: str
    dp_size: int
    ranks: list[PoolSpec]
    endpoints: dict[str, list[bytes]]
    max_transfers: int
    checksums: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=16)
    ] = (ChecksumKind.XXH3,)
    unchecked: bool = False


class Destination(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """D→P: where to write. `pages` holds tokens `[prefix_tokens // page_tokens * page_tokens,
    prompt_tokens)` of the prompt in order; the bytes before `prefix_tokens` are already right. `slot` is for
    the state that the model keeps of a sequence beside its KV, if it keeps one; `prefix_tokens` is 0 then.

    `epoch` was chosen by decode for this hand-off alone and every write carries it. `plan_hash`
    is what decode computed from both layouts; prefill must compute the same. `claim` must be that of
    prefill's room. `inferred`: decode was not told the DP rank of prefill by the placer of the request; the
    room may be on another one, and prefill says so.
    """

    transfer: TransferId
    epoch: int
    budget_s: float
    prompt_tokens: int
    prefix_tokens: int
    pages: list[int]
    transport: Annotated[str, msgspec.Meta(max_length=64)]
    plan_hash: int
    claim: Claim = b""
    inferred: bool = False
    slot: int | None = None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """P→D: the room is bound to this hand-off."""

    transfer: TransferId


class Moved(msgspec.Struct, frozen=True, tag=True):
    """P→D, in place of `Accepted`: another DP rank of this instance owns the room. Answers a `Destination`
    that is `inferred`; the rank that says so has written nothing and never will. With an `error` decode does
    not go there: both halves end with it (`--dp-rank-conflict fail`)."""

    transfer: TransferId
    dp_rank: int
    error: ErrorInfo | None = None


class Declined(msgspec.Struct, frozen=True, tag=True):
    """D→P: decode will not publish a destination for this room, or its half failed before it did. Obeyed
    while nothing is bound, with the room's claim, from the decode leader that the room was placed for (from
    any, if none was named)."""

    transfer: TransferId
    error: ErrorInfo
    claim: Claim = b""


class ChunkPosted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """P→D: a chunk has landed at the destination, for one (source rank, destination rank) pair.

    `span` is the whole chunk's, in tokens of the prompt; the source has sent its share of it
    (`PairPlan.share`), of which `nbytes` and `checksum` are. `final` marks the pair's last chunk, which has
    the sequence's state as well, if there is one. `checksum` is that of the share's content as prefill holds
    it, of the kind that both sides agreed on (`PeerLink.checksum`), in the canonical order of
    `kv.layout.content`, over one layer in `every` (1: all); None where checksums are off or the share is
    empty. Decode verifies whatever it is given. `wire_s` is the time the transport took for it.
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
    """P→D: the engine's own bytes for decode, at most `Limits.max_metadata_bytes`. `transfer` must be the
    receiver's own."""

    transfer: TransferId
    prompt_tokens: int
    content: bytes


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


class PathChosen(msgspec.Struct, frozen=True, tag=True):
    """P→D, once for each session and before anything else: its `transport`. P decides, because it writes."""

    transport: Annotated[str, msgspec.Meta(max_length=64)]


#: The messages of hand-offs between two leaders.
HandoffMessage = (
    Destination
    | Accepted
    | Moved
    | Declined
    | ChunkPosted
    | Metadata
    | Committed
    | Failed
    | Abort
    | Drained
    | Gone
)
