"""One prefill leader and what its decode leaders say, without a decode side: for the rules of rooms.

After each event the tables are checked, and so is the promise of `Gone`, `Moved` and `Drained`: no write of
that hand-off is in flight, and none begins.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from handoff_world import pool_spec

from segue.kv.errors import ErrorCode, ErrorInfo, PeerLost
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, RoomKey, Span, TransferId
from segue.kv.layout.planner import plan_pair
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import (
    Destination,
    Drained,
    Failed,
    Gone,
    HandoffMessage,
    Moved,
)
from segue.kv.protocol.room_ranks import DpRanks

PROMPT = 10
PAGES = (4, 5, 6)
CLAIM = b"the prompt and the weights"
ME, ONE, TWO, THREE = (LeaderId(Incarnation(letter * 32)) for letter in "abcd")
SPEC = pool_spec(24, 4)
PLAN = plan_pair([SPEC], [SPEC])
ROOM = RoomKey(7)
#: What ends a hand-off for good: nothing is written after it was said.
_LAST_WORDS = (Gone, Moved, Drained)


def transfer(attempt: int = 0, decode: LeaderId = ONE, room: RoomKey = ROOM) -> TransferId:
    return TransferId(room.room, attempt, ME, decode, room.generation, room.ordinal)


def destination(
    attempt: int = 0, decode: LeaderId = ONE, *, room: RoomKey = ROOM, prefix: int = 0, **changes: Any
) -> Destination:
    """A legal destination, each of its own epoch, with `changes`."""
    pages = list(range(prefix // 4, 3))
    good = Destination(
        transfer=transfer(attempt, decode, room),
        epoch=1 + attempt + 100 * room.ordinal + 1000 * room.generation + 10_000 * room.room,
        budget_s=60.0,
        prompt_tokens=PROMPT,
        prefix_tokens=prefix,
        pages=pages,
        transport="fake",
        plan_hash=PLAN.hash(PROMPT, prefix, len(pages)),
        claim=CLAIM,
    )
    return msgspec.structs.replace(good, **changes)


class Bench:
    """See the module's text. `writes` are in flight, by hand-off; `fences` wait for their answer."""

    def __init__(self, *peers: LeaderId, limits: Limits | None = None, dp: DpRanks | None = None) -> None:
        self.exchange = Exchange(
            Role.PREFILL, ME, "prefill here", limits or Limits(), "fake", dp=dp or DpRanks()
        )
        self.now = 0.0
        self.writes: list[events.PostWrite] = []
        self.fences: list[events.Fence] = []
        self.silent: set[TransferId] = set()
        self.phases: dict[RoomKey, list[events.Phase]] = {}
        self.releases: Counter[RoomKey] = Counter()
        for peer in peers or (ONE, TWO, THREE):
            self.up(peer)

    def tell(self, event: events.Event) -> list[events.Effect]:
        effects = self.exchange.handle(event, self.now)
        for effect in effects:
            self._look(effect)
        self.exchange.check_integrity()
        return effects

    def _look(self, effect: events.Effect) -> None:
        match effect:
            case events.PostWrite():
                assert effect.transfer not in self.silent, "written after it was said that nothing is"
                self.writes.append(effect)
            case events.Fence():
                self.fences.append(effect)
            case events.Send(message=message) if isinstance(message, _LAST_WORDS):
                running = [w for w in self.writes if w.transfer == message.transfer]
                assert not running, f"{type(message).__name__} was said while writes were in flight"
                self.silent.add(message.transfer)
            case events.Phase():
                before = self.phases.setdefault(effect.key, [])
                assert not before or not before[-1].phase.terminal, "a phase after the last one"
                before.append(effect)
            case events.Release():
                assert self.phases[effect.key][-1].phase.terminal, "released before its end"
                self.releases[effect.key] += 1
                assert self.releases[effect.key] == 1, "released twice"

    # ---- the engine ------------------------------------------------------------------------------

    def expect(self, room: RoomKey = ROOM, *, budget_s: float = 60.0, **options: Any) -> list[events.Effect]:
        options = {"claim": CLAIM, **options}
        deadline = self.now + budget_s
        return self.tell(events.ExpectRoom(key=room, prompt_tokens=PROMPT, deadline=deadline, **options))

    def send(
        self,
        start: int = 0,
        end: int = PROMPT,
        *,
        room: RoomKey = ROOM,
        layers: int | None = None,
        pages: tuple[int, ...] = PAGES,
    ) -> list[events.Effect]:
        return self.tell(events.SendChunk(room, Span(start, end), pages, layers=layers))

    def finish(self, content: bytes = b"7", room: RoomKey = ROOM) -> list[events.Effect]:
        return self.tell(events.SendMetadata(room, content))

    def end(
        self, error: ErrorInfo, room: RoomKey = ROOM, *, unbound_s: float | None = None
    ) -> list[events.Effect]:
        return self.tell(events.EndRoom(room, error, unbound_s))

    def phase(self, room: RoomKey = ROOM) -> KVPoll:
        return self.phases[room][-1].phase

    def error(self, room: RoomKey = ROOM) -> ErrorInfo:
        error = self.phases[room][-1].error
        assert error is not None
        return error

    # ---- decode, sessions and ranks --------------------------------------------------------------

    def hear(self, message: HandoffMessage) -> list[events.Effect]:
        return self.tell(events.Received(message.transfer.decode, message))

    def up(self, peer: LeaderId) -> list[events.Effect]:
        return self.tell(events.PeerUp(peer, PLAN))

    def down(self, peer: LeaderId, *, dead: bool = False) -> list[events.Effect]:
        return self.tell(events.PeerDown(peer, PeerLost("cut").info, dead=dead))

    def land(self, transfer: TransferId | None = None) -> list[events.Effect]:
        """All writes (of `transfer`) land."""
        found = []
        for write in [w for w in self.writes if transfer in (None, w.transfer)]:
            self.writes.remove(write)
            found += self.tell(events.WriteLanded(write.transfer, write.rank, write.tag, 0.1))
        return found

    def fence(self, transfer: TransferId | None = None) -> list[events.Effect]:
        """The rank answers its fences (those of `transfer`): no write of these hand-offs is in flight."""
        found = []
        for fence in [f for f in self.fences if transfer in (None, f.transfer)]:
            self.fences.remove(fence)
            self.writes = [w for w in self.writes if w.transfer != fence.transfer]
            found += self.tell(events.FenceDone(fence.transfer, fence.rank, fence.partner, False))
        return found

    def at(self, now: float) -> list[events.Effect]:
        self.now = now
        return self.tell(events.Tick())


def opened(**options: Any) -> Bench:
    """A room that nobody has bound."""
    b = Bench(limits=options.pop("limits", None))
    b.expect(**options)
    return b


def bound(**options: Any) -> Bench:
    """A room that attempt 0 of `ONE` has bound."""
    b = opened(**options)
    assert words(b.hear(destination())) == ["Accepted"]
    return b


def writing(**options: Any) -> Bench:
    """The same, with the whole prompt on its way."""
    b = bound(**options)
    b.send()
    assert b.writes
    return b


def all_sent(**options: Any) -> Bench:
    """Everything has landed and was announced: decode may have committed."""
    b = writing(**options)
    b.finish()
    b.land()
    return b


def said(effects: list[events.Effect], peer: LeaderId = ONE) -> list[HandoffMessage]:
    """The messages to `peer`."""
    return [e.message for e in effects if isinstance(e, events.Send) and e.peer == peer]


def words(effects: list[events.Effect], peer: LeaderId = ONE) -> list[str]:
    return [type(message).__name__ for message in said(effects, peer)]


def refusal(effects: list[events.Effect], peer: LeaderId = ONE) -> ErrorInfo:
    """Why a destination was refused: `Failed` and `Gone` are all that is said to `peer`."""
    failed, gone = said(effects, peer)
    assert isinstance(failed, Failed)
    assert isinstance(gone, Gone)
    assert failed.transfer == gone.transfer
    return failed.error


def refused(effects: list[events.Effect], peer: LeaderId = ONE) -> tuple[ErrorCode, bool]:
    """As `refusal`: its code, and whether another try may help."""
    error = refusal(effects, peer)
    return error.code, error.retryable
