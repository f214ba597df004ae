"""The face of the protocol: what goes into an `Exchange` and what comes out.

`Exchange` (in `exchange.py`) holds every hand-off of one leader: `handle(event, now) -> effects`.
It does no I/O. `kv.manager` carries out the effects in production, the simulator in tests.
A `rank` is always one of our own replica: an index into `LeaderInfo.ranks`. Each effect that names one is
for that rank alone, and only its answer counts. Times are absolute seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from segue.kv.errors import ErrorInfo
from segue.kv.ids import KVPoll, LeaderId, RankId, Span, TransferId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.planner import PairPlan
from segue.kv.protocol.messages import HandoffMessage, Metadata

# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSender:
    """Engine: a prefill half begins (BOOTSTRAPPING) and waits for its destination."""

    transfer: TransferId
    prompt_tokens: int
    deadline: float


@dataclass(frozen=True, slots=True)
class OpenReceiver:
    """Engine: a decode half begins. It is WAITING_FOR_INPUT once the session to
    `transfer.prefill` is up (`PeerUp` seen, before or after this). `inferred` as in `Destination`.

    Of an open transfer (`LeaderId.is_open`), which no `Exchange` knows, `hint` is the rank that the request
    names, and with `force_query` the registry is asked where the rank could be inferred.
    """

    transfer: TransferId
    prompt_tokens: int
    deadline: float
    inferred: bool = False
    hint: int | None = None
    force_query: bool = False


@dataclass(frozen=True, slots=True)
class AnnounceRoom:
    """Engine: decode was not told that this hand-off is ours, and cannot infer it. Register the room, for
    `ttl_s` seconds. For the caller of an `Exchange`, like `OpenReceiver` of an open transfer."""

    transfer: TransferId
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Publish:
    """Engine: the receiver's pages. From here on a peer may write into them.

    `pages` and `slot` as in `Destination`; pages after those of the prompt are not published. Legal in
    WAITING_FOR_INPUT only.
    """

    transfer: TransferId
    pages: tuple[int, ...]
    prefix_tokens: int
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Engine: the KV of `span` is complete in the source pool and stays there.

    `pages` are the source pages of the prompt from token 0 on, at least up to `span.end`. Spans
    come in order without gaps from token 0; what lies before the destination's
    prefix is skipped by the protocol. The chunk with `span.end == prompt_tokens` is the final one: the state
    in `slot`, if the model keeps one, is complete, too.

    With `layers` only the KV of the model's first so many layers is complete. What follows is the same chunk
    with more layers, and at last without a number.
    """

    transfer: TransferId
    span: Span
    pages: tuple[int, ...]
    slot: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class SendMetadata:
    """Engine: the first token and what goes with it."""

    transfer: TransferId
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """End this hand-off with `error`; a no-op after a terminal phase. The engine's event, and what the
    `Exchange` makes of an error in a handler."""

    transfer: TransferId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Session: a peer leader is connected and compatible: `plan` is how the pools of the pair are copied.

    `transport` is the one chosen for this peer; empty means the one the `Exchange` was made with.
    """

    peer: LeaderId
    plan: PairPlan
    transport: str = ""


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Session: the session to this leader has ended; fails exactly its transfers.

    `dead` is True when the kernel or a transport proved that nothing of it lands any more. Of a transport
    that is `over` its own path: another one may still carry bytes.
    """

    peer: LeaderId
    error: ErrorInfo
    dead: bool = False
    over: str | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """Session: a message of this peer."""

    peer: LeaderId
    message: HandoffMessage


@dataclass(frozen=True, slots=True)
class Granted:
    """Transport: our rank `rank` has carried out its `Grant`; writes may land there from now on."""

    transfer: TransferId
    rank: int


@dataclass(frozen=True, slots=True)
class WriteLanded:
    """Transport: the write `tag` of our rank `rank` (see `PostWrite`, `Relay`) has landed at the
    destination."""

    transfer: TransferId
    rank: int
    tag: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WriteBroken:
    """Transport: the write `tag` of our rank `rank` did not land. `refused`, on prefill: decode did not grant
    its epoch (any more), so decode ended this hand-off, and the reason is under way."""

    transfer: TransferId
    rank: int
    tag: int
    error: ErrorInfo
    refused: bool = False


@dataclass(frozen=True, slots=True)
class ChecksumReady:
    """Hashing: our rank's answer to its `ComputeChecksum` with this `tag`. `error` says why there is no
    checksum."""

    transfer: TransferId
    rank: int
    tag: int
    checksum: int
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class FenceDone:
    """Transport: the answer of our rank `rank` to the `Fence` for `partner`; `proven` as in
    `kv.transport.base.Fenced`."""

    transfer: TransferId
    rank: int
    partner: RankId
    proven: bool


@dataclass(frozen=True, slots=True)
class RoomFound:
    """Registry: the answer to `AskRoom`; the room of this transfer is on `dp_rank` of our instance."""

    transfer: TransferId
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Clock: `now` has reached `Exchange.next_deadline()`. For a machine: its deadline has passed."""


Event = (
    AnnounceRoom
    | OpenSender
    | OpenReceiver
    | Publish
    | SendChunk
    | SendMetadata
    | AbortTransfer
    | PeerUp
    | PeerDown
    | Received
    | Granted
    | WriteLanded
    | WriteBroken
    | ChecksumReady
    | FenceDone
    | RoomFound
    | Tick
)

# ---- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Give `message` to the session of `peer`; if there is none any more, drop it."""

    peer: LeaderId
    message: HandoffMessage


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Prefill: have our rank `rank` write to the peer's rank `target`."""

    transfer: TransferId
    rank: int
    epoch: int
    tag: int
    target: int
    blocks: tuple[CopyBlock, ...]


@dataclass(frozen=True, slots=True)
class Relay:
    """Decode: have our rank `rank` write what has landed at it to our rank `target`, which holds the same."""

    transfer: TransferId
    rank: int
    epoch: int
    tag: int
    target: int
    blocks: tuple[CopyBlock, ...]


@dataclass(frozen=True, slots=True)
class ComputeChecksum:
    """Either side: hash `content` in the pool of our rank `rank` (`layout.content.checksum`).

    Answered by exactly one `ChecksumReady`. Prefill hashes what it sends, decode what has landed. The
    pages are read until the answer, so `Release` does not come before it.
    """

    transfer: TransferId
    rank: int
    tag: int
    content: Content


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode: writes of `epoch` by `transfer.prefill`, and by those of our own ranks that pass on to it, may
    land in `pages` and in `slot` of our rank `rank`; answered by its `Granted`."""

    transfer: TransferId
    rank: int
    epoch: int
    pages: tuple[int, ...]
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Fence:
    """Either side: our rank `rank` ends `epoch` in its transport for `partner`, a rank of the peer or of our
    own that it exchanges bytes with. Answered by its `FenceDone`."""

    transfer: TransferId
    rank: int
    partner: RankId
    epoch: int


@dataclass(frozen=True, slots=True)
class Phase:
    """The hand-off `transfer` entered `phase`. A terminal phase comes exactly once, as the last.

    `error` comes with FAILED, `metadata` with the receiver's SUCCESS; `wire_s` comes
    with SUCCESS: on the sender the time from the first write given to the transport to the last
    landed one, on the receiver the time that the transport took for the slowest last chunk. `nbytes` are the
    bytes of KV that landed, with SUCCESS too.
    """

    transfer: TransferId
    phase: KVPoll
    error: ErrorInfo | None = None
    metadata: Metadata | None = None
    wire_s: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """The pages of the hand-off `transfer` belong to the engine again; comes exactly once, and is proven: no
    write of the peer can land in them, no read of them is under way.

    On the sender: source pages may be reused. On the receiver after FAILED: published pages
    may be reused; until then they are quarantined. On the receiver after SUCCESS it comes at once.
    """

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The hand-off `transfer` has failed, and its published pages (`pages` of them) wait for the proof that
    nothing is written into them any more; `Release` follows."""

    transfer: TransferId
    pages: int


@dataclass(frozen=True, slots=True)
class AskRoom:
    """Prefill: decode has inferred that this hand-off is ours, and we have no such request (yet). Ask the
    registry whose room it is, until it answers (`RoomFound`), `timeout_s` have passed or `RoomSettled`."""

    transfer: TransferId
    timeout_s: float


@dataclass(frozen=True, slots=True)
class RoomSettled:
    """Prefill: the answer to `AskRoom` is not needed any more."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Redirected:
    """Decode: this hand-off ends because its room is on `dp_rank` of that instance. Comes before its
    `Phase`."""

    transfer: TransferId
    dp_rank: int


RoomEffect = AskRoom | RoomSettled | Redirected
Effect = (
    Send | PostWrite | Relay | ComputeChecksum | Grant | Fence | Phase | Release | Quarantined | RoomEffect
)


class Turn:
    """One call of `Exchange.handle`: when it is, and what follows from it, in order. The exchange and all
    its machines share one."""

    __slots__ = ("effects", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        """Have `effect` carried out after those before it."""
        self.effects.append(effect)


def refusal(event: Event, error: ErrorInfo) -> list[Effect]:
    """What to report when `Exchange.handle` refused `event`: a half that was not opened has failed.

    Handles hear of it like of any other end; without it their engine would wait for a hand-off that
    does not exist. Raises `error` again for every other event: only opening can be refused.
    """
    if not isinstance(event, OpenSender | OpenReceiver):
        raise error.exception()
    return [Phase(event.transfer, KVPoll.FAILED, error=error), Release(event.transfer)]
