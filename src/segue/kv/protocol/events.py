"""The face of the protocol: what goes into an `Exchange` and what comes out.

`Exchange` (in `exchange.py`) holds every hand-off of one leader: `handle(event, now) -> effects`.
It does no I/O. `kv.manager` carries out the effects in production, the simulator in tests.
Engines speak of their half of a room (`RoomKey`); peers and ranks of one hand-off (`TransferId`), of which a
room may have several, one after the other.
A `rank` is always one of our own replica: an index into `LeaderInfo.ranks`. Each effect that names one is
for that rank alone, and only its answer counts. Times are absolute seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from segue.kv.errors import ErrorInfo
from segue.kv.ids import ChecksumKind, Incarnation, KVPoll, LeaderId, RankId, RoomKey, Span, TransferId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.planner import PairPlan
from segue.kv.protocol.messages import HandoffMessage
from segue.kv.protocol.room_ranks import PrefillInstance
from segue.kv.ready import ReadyEvent

# ---- events ------------------------------------------------------------------------------------


class ExpectRoom(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Engine, prefill: begin a room (BOOTSTRAPPING) and wait for a destination.

    `claim` are at most 64 bytes that a destination must carry, too: a digest of everything that must be equal
    on both sides. If a leader `decode` is named, it alone may bind the room, and hears of a failure before
    that under `attempt`. Without `retain_s` the room ends with its first binding. Otherwise it outlives
    bindings that fail, and the first success by `retain_s` seconds (0: it ends with that); the engine ends it
    before that with `EndRoom`. With `announce` the registry learns the DP rank of the room.
    """

    key: RoomKey
    prompt_tokens: int
    deadline: float
    claim: bytes = b""
    decode: LeaderId | None = None
    attempt: int = 0
    retain_s: float | None = None
    announce: bool = False


class RefuseRoom(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Engine, prefill: nobody will open this room, so that a destination for it, waiting or late, gets
    `error` at once. It is remembered until `deadline`. A no-op for a room that was opened, which is another
    request's. `announce` as in `ExpectRoom`."""

    key: RoomKey
    error: ErrorInfo
    deadline: float
    announce: bool = False


class OpenReceiver(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Engine, decode: a decode half begins. It is WAITING_FOR_INPUT once the session to the prefill leader is
    up (`PeerUp` seen, before or after this).

    `prefill` may leave the DP rank open (`LeaderId.is_open`): then it is the `hint` of the request, or is
    inferred from what the instance declares, or the registry is asked; with `force_query` always.
    If prefill's room was not `placed` for us, prefill is told with `Declined`
    when this half fails before KV has come: nobody else tells it. A wrong `placed` costs time alone:
    prefill obeys `Declined` by its own rule, and `Failed` only from the decode leader that its room names.
    """

    key: RoomKey
    prefill: LeaderId
    prompt_tokens: int
    deadline: float
    claim: bytes = b""
    hint: int | None = None
    force_query: bool = False
    placed: bool = True


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Engine: the receiver's pages. From here on a peer may write into them.

    `pages` and `slot` as in `Destination`; pages after those of the prompt are not published. Legal in
    WAITING_FOR_INPUT only.
    """

    key: RoomKey
    pages: tuple[int, ...]
    prefix_tokens: int
    slot: int | None = None


class SendChunk(msgspec.Struct, frozen=True, tag=True):
    """Engine: the KV of `span` is complete in the source pool, or will be at `ready`, and stays there until
    `Release`.

    `pages` are the source pages of the prompt from token 0 on, at least up to `span.end`. Spans
    come in order without gaps from token 0, bound or not: the room keeps the list for each binding. A binding
    skips what lies before its destination's prefix. The chunk with `span.end == prompt_tokens` is the final
    one: the state in `slot`, if the model keeps one, is complete, too.

    With `layers` only the KV of the model's first so many layers is complete. The same chunk follows with
    more layers, and at last without a number.
    """

    key: RoomKey
    span: Span
    pages: tuple[int, ...]
    slot: int | None = None
    layers: int | None = None
    ready: ReadyEvent | None = None


class SendMetadata(msgspec.Struct, frozen=True, tag=True):
    """Engine: its own bytes for decode (`Metadata.content`), once for each room."""

    key: RoomKey
    content: bytes


class EndRoom(msgspec.Struct, frozen=True, tag=True):
    """Engine: end this half with `error`; a no-op after a terminal phase. A retained room of prefill that has
    succeeded ends with SUCCESS. With `unbound_s` only a room ends that has had no binding for so many seconds
    and was not committed, so that an engine that lacks memory may take its pages back."""

    key: RoomKey
    error: ErrorInfo
    unbound_s: float | None = None


class PlaceRoom(msgspec.Struct, frozen=True, tag=True):
    """Engine, prefill: the placer of the request gives a retained room to the attempt `attempt` of the leader
    `decode`. Earlier attempts end, whatever they have committed."""

    key: RoomKey
    attempt: int
    decode: LeaderId


class DeclineRoom(msgspec.Struct, frozen=True, tag=True):
    """Engine, decode: no destination will be published for this room. Prefill is told, on its next session if
    it has none now: the DP rank that is named, or all ranks of a listed instance. It obeys where `claim` is
    that of its room, or empty for a room that was placed for no decode leader. A no-op for a room with a
    receiver here, which tells by itself."""

    key: RoomKey
    prefill: LeaderId
    error: ErrorInfo
    claim: bytes = b""


class AbortTransfer(msgspec.Struct, frozen=True):
    """End this hand-off with `error`; a no-op after a terminal phase. The caller of an `Exchange` says so
    where an effect was not carried out, the `Exchange` itself where a handler raised, and rooms."""

    transfer: TransferId
    error: ErrorInfo


class PeerUp(msgspec.Struct, frozen=True):
    """Session: a peer leader is connected and compatible: `plan` is how the pools of the pair are copied.

    `transport` is the one chosen for this peer; empty means the one the `Exchange` was made with. `checksum`
    is the kind that both sides compute, or None.
    """

    peer: LeaderId
    plan: PairPlan
    transport: str = ""
    checksum: ChecksumKind | None = ChecksumKind.XXH3


class PeerDown(msgspec.Struct, frozen=True):
    """Session: the session to this leader has ended; fails exactly its transfers.

    `dead` is True when the kernel or a transport proved that nothing of it lands any more. For a transport
    that is `over` it covers that transport's path alone: another one may still carry bytes.
    """

    peer: LeaderId
    error: ErrorInfo
    dead: bool = False
    over: str | None = None


class Received(msgspec.Struct, frozen=True):
    """Session: a message of this peer."""

    peer: LeaderId
    message: HandoffMessage


class Granted(msgspec.Struct, frozen=True):
    """Transport: our rank `rank` has carried out its `Grant`; writes may land there from now on."""

    transfer: TransferId
    rank: int


class WriteLanded(msgspec.Struct, frozen=True):
    """Transport: the write `tag` of our rank `rank` (see `PostWrite`, `Relay`) has landed at the
    destination."""

    transfer: TransferId
    rank: int
    tag: int
    seconds: float


class WriteBroken(msgspec.Struct, frozen=True):
    """Transport: the write `tag` of our rank `rank` did not land. `refused`, on prefill: decode did not grant
    its epoch (any more), so decode ended this hand-off, and the reason is under way."""

    transfer: TransferId
    rank: int
    tag: int
    error: ErrorInfo
    refused: bool = False


class ChecksumReady(msgspec.Struct, frozen=True, tag=True):
    """Hashing: our rank's answer to its `ComputeChecksum` with this `tag`. `error` says why there is no
    checksum."""

    transfer: TransferId
    rank: int
    tag: int
    checksum: int
    error: ErrorInfo | None = None


class FenceDone(msgspec.Struct, frozen=True):
    """Transport: the answer of our rank `rank` to the `Fence` for `partner`; `proven` as in
    `kv.transport.base.Fenced`."""

    transfer: TransferId
    rank: int
    partner: RankId
    proven: bool


class RoomFound(msgspec.Struct, frozen=True):
    """Registry: the answer to `AskRoom`; `leader` has the room."""

    key: RoomKey
    leader: LeaderId


class RoomUnknown(msgspec.Struct, frozen=True):
    """Registry: the answer to `AskRoom` or `RegisterRoom` is `error`."""

    key: RoomKey
    error: ErrorInfo


class PrefillInstances(msgspec.Struct, frozen=True):
    """Registry: the prefill instances that exist now."""

    instances: Mapping[Incarnation, PrefillInstance]


class Tick(msgspec.Struct, frozen=True):
    """Clock: `now` has reached `Exchange.next_deadline()`. For a machine: its deadline has passed."""


#: The events that handles of an engine post.
EngineEvent = (
    ExpectRoom
    | RefuseRoom
    | OpenReceiver
    | Publish
    | SendChunk
    | SendMetadata
    | EndRoom
    | PlaceRoom
    | DeclineRoom
)
RankEvent = Granted | WriteLanded | WriteBroken | ChecksumReady | FenceDone
Event = (
    EngineEvent
    | RoomFound
    | RoomUnknown
    | RankEvent
    | AbortTransfer
    | PeerUp
    | PeerDown
    | Received
    | PrefillInstances
    | Tick
)

# ---- effects -----------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Give `message` to the session of `peer`; if there is none any more, drop it."""

    peer: LeaderId
    message: HandoffMessage


class PostWrite(msgspec.Struct, frozen=True):
    """Prefill: have our rank `rank` write to the peer's rank `target`, once its KV is `ready`. A `Fence` of
    the epoch ends one that still waits."""

    transfer: TransferId
    rank: int
    epoch: int
    tag: int
    target: int
    blocks: tuple[CopyBlock, ...]
    ready: ReadyEvent | None = None


class Relay(msgspec.Struct, frozen=True):
    """Decode: have our rank `rank` write what has landed at it to our rank `target`, which holds the same."""

    transfer: TransferId
    rank: int
    epoch: int
    tag: int
    target: int
    blocks: tuple[CopyBlock, ...]


class ComputeChecksum(msgspec.Struct, frozen=True, tag=True):
    """Either side: compute the checksum `kind` of `content` in the pool of our rank `rank`.

    Answered by exactly one `ChecksumReady`. Prefill hashes what it sends, decode what has landed. The
    pages are read until the answer, so `Release` does not come before it. If it waits until the KV is
    `ready`, the rank's `Fence` of `epoch` answers it with an error.
    """

    transfer: TransferId
    rank: int
    tag: int
    content: Content
    kind: ChecksumKind = ChecksumKind.XXH3
    epoch: int = 0
    ready: ReadyEvent | None = None


class Grant(msgspec.Struct, frozen=True):
    """Decode: writes of `epoch` by `transfer.prefill`, and by those of our own ranks that pass on to it, may
    land in `pages` and in `slot` of our rank `rank`; answered by its `Granted`."""

    transfer: TransferId
    rank: int
    epoch: int
    pages: tuple[int, ...]
    slot: int | None = None


class Fence(msgspec.Struct, frozen=True):
    """Either side: our rank `rank` ends `epoch` in its transport for `partner`, a rank of the peer or of our
    own that it exchanges bytes with. Answered by its `FenceDone`."""

    transfer: TransferId
    rank: int
    partner: RankId
    epoch: int


class HandoffPhase(msgspec.Struct, frozen=True):
    """One hand-off entered `phase`. Terminal phases come exactly once and last. See `Phase` for the rest."""

    transfer: TransferId
    phase: KVPoll
    error: ErrorInfo | None = None
    metadata: bytes | None = None
    wire_s: float = 0.0
    nbytes: int = 0


class HandoffReleased(msgspec.Struct, frozen=True):
    """Nobody but the engine touches the pages for this hand-off any more; comes exactly once."""

    transfer: TransferId


class HandoffQuarantined(msgspec.Struct, frozen=True):
    """The hand-off has failed, but its published pages (`pages` of them) wait for a fence."""

    transfer: TransferId
    pages: int


class Phase(msgspec.Struct, frozen=True, tag=True):
    """The engine's half `key` of a room entered `phase`. A terminal phase comes exactly once, as the last.

    `error` comes with FAILED, `metadata` (what prefill's engine sent) with the receiver's SUCCESS. `wire_s`
    comes with SUCCESS: on the sender the time from the first write given to the transport to the last
    landed one, on the receiver the time that the transport took for the slowest last chunk. `nbytes` are the
    bytes of KV that landed, with SUCCESS too. `peer` is the other side's leader, where it is known.
    """

    key: RoomKey
    phase: KVPoll
    error: ErrorInfo | None = None
    metadata: bytes | None = None
    wire_s: float = 0.0
    nbytes: int = 0
    peer: LeaderId | None = None


class Release(msgspec.Struct, frozen=True, tag=True):
    """The pages of the half `key` belong to the engine again; comes exactly once, after the terminal phase,
    and is proven: no write of the peer can land in them, no read of them is under way.

    On the sender: source pages may be reused. On the receiver after FAILED: published pages
    may be reused; until then they are quarantined. On the receiver after SUCCESS it comes at once.
    """

    key: RoomKey


class Quarantined(msgspec.Struct, frozen=True, tag=True):
    """The receiver `key` has failed, and its published pages (`pages` of them) wait for the proof that
    nothing is written into them any more; `Release` follows."""

    key: RoomKey
    pages: int


class AskRoom(msgspec.Struct, frozen=True):
    """Ask the registry which leader has the room, until it answers (`RoomFound`, `RoomUnknown`), `timeout_s`
    have passed or `RoomSettled`. Decode cannot infer the DP rank of prefill; or prefill has a destination for
    a room that it does not expect (yet)."""

    key: RoomKey
    timeout_s: float


class RegisterRoom(msgspec.Struct, frozen=True):
    """Prefill: tell the registry that this leader has the room, for `ttl_s` seconds. Answered only if that
    fails (`RoomUnknown`)."""

    key: RoomKey
    ttl_s: float


class RoomSettled(msgspec.Struct, frozen=True):
    """The answer to `AskRoom` is not needed any more."""

    key: RoomKey


class Redirected(msgspec.Struct, frozen=True):
    """Decode: this hand-off ends because its room is on `dp_rank` of that instance. Comes before its
    `HandoffPhase`; the receiver begins another hand-off there once this one is released."""

    transfer: TransferId
    dp_rank: int


#: The argument of `KVManager`'s `on_change`: one step of one half; `change.key` says of which.
Change = Phase | Release | Quarantined
HandoffEffect = HandoffPhase | HandoffReleased | HandoffQuarantined | Redirected
RankEffect = PostWrite | Relay | ComputeChecksum | Grant | Fence
RegistryEffect = AskRoom | RegisterRoom | RoomSettled
Effect = Send | RankEffect | HandoffEffect | Change | RegistryEffect


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


def refusal(event: ExpectRoom | OpenReceiver, error: ErrorInfo, *, held: bool) -> list[Effect]:
    """The effects of an `event` that `Exchange.handle` refused: a half that was not opened has failed.
    Handles get it like any other end; without it their engine would wait for a hand-off that does not exist.
    If pages are `held` under its key, their own `Release` is still to come, and is the only one."""
    failed = Phase(event.key, KVPoll.FAILED, error=error)
    return [failed] if held else [failed, Release(event.key)]
