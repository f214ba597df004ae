"""Where the two legs of one request meet, which a foreign router posts to a prefill and a decode instance.

This is prefill's side, on its I/O thread. Decode places the request on both leaders and hands the KV over as
any frontend does; all that is settled here is that both legs are there, on which DP rank of this instance the
request belongs, and how it ended for the leg that waits here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from segue.kv import (
    FAIL_ON_CONFLICT,
    AbortedByClient,
    BootstrapTimeout,
    DeadlineExceeded,
    DpRankOutOfRange,
    DpRanks,
    ErrorInfo,
    InvalidRequest,
    OutOfCapacity,
    SegueError,
    dp_rank_conflict,
)
from segue.kv.session import Session
from segue.server.frontend.legs import BAD_TICKET, MAX_BOOTSTRAP_ROOM
from segue.server.messages.control import Done, FindPrefill, PrefillFound

#: How long one leg waits for the other: a router posts both at once.
MEET_S = 30.0


@dataclass(slots=True, eq=False)
class _OpenRoom:
    """What is known of one room: its prefill leg, who asks for it, or why there is none any more."""

    timer: asyncio.TimerHandle
    leg: asyncio.Future[None] | None = None
    routed: int | None = None
    session: Session | None = None
    hint: int | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True)
class _UnusedTicket:
    dp_rank: int
    timer: asyncio.TimerHandle


@dataclass(slots=True)
class PrefillRendezvous:
    """At most `limit` rooms and `limit` tickets. `name` is what errors call this instance, `dp` its DP ranks.

    `abandoned` counts what nobody came for: legs without their other leg, and tickets.
    """

    name: str
    dp: DpRanks
    limit: int
    meet_s: float = MEET_S
    abandoned: int = 0
    _rooms: dict[int, _OpenRoom] = field(default_factory=dict)
    _tickets: dict[int, _UnusedTicket] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Legs that wait here; all zero at rest."""
        return {"legs": sum(room.leg is not None for room in self._rooms.values())}

    @property
    def rooms(self) -> int:
        """Rooms that are known: one leg waits for the other, both have met, or why neither can."""
        return len(self._rooms)

    @property
    def tickets(self) -> int:
        """Tickets that may still be shown."""
        return len(self._tickets)

    def close(self) -> None:
        """Forget everything: whoever waits here is gone, too."""
        timers = [room.timer for room in self._rooms.values()] + [t.timer for t in self._tickets.values()]
        for timer in timers:
            timer.cancel()
        self._rooms.clear()
        self._tickets.clear()

    # ---- the prefill leg (HTTP) -----------------------------------------------------------------

    async def wait(self, number: int, routed: int | None, budget_s: float) -> None:
        """Until prefill has done its part for room `number`. `routed` is the DP rank that the leg asks for.

        Raises what the request failed with; BootstrapTimeout if decode's leg does not come, DpRankOutOfRange
        and DpRankConflict, InvalidRequest for a room that is in use. Whatever ends the wait early ends
        decode's leg as well.
        """
        room = self._rooms.get(number)
        if room is not None and room.leg is not None:
            raise InvalidRequest(f"bootstrap_room {number} is in use; each request needs a room of its own")
        if room is None:
            room = self._open(number, budget_s)
        elif room.error is not None:
            raise room.error.exception()
        room.routed = routed
        room.leg = asyncio.get_running_loop().create_future()
        error: SegueError = AbortedByClient("the client of the prefill leg left", origin=self.name)
        try:
            self._answer(number, room)
            async with asyncio.timeout(budget_s):
                await room.leg
        except TimeoutError:
            error = DeadlineExceeded("the request's deadline passed at the prefill leg", origin=self.name)
            raise error from None
        except SegueError as failure:
            error = failure
            raise
        finally:
            room.leg = None
            if self._rooms.get(number) is room:  # decode does not know of it yet
                self.fail(number, error, budget_s)

    def fail(self, number: int, error: SegueError, budget_s: float) -> None:
        """The prefill leg of room `number` has ended with `error`: decode's leg hears of it, now or when it
        comes."""
        room = self._rooms.get(number)
        if room is None:
            room = self._open(number, budget_s)
        room.error = error.info
        if room.session is not None:
            room.session.send(PrefillFound(room=number, error=error.info))
            self._forget(number)

    # ---- decode's leg (the session of its server) ------------------------------------------------------

    def meet(self, session: Session, message: FindPrefill) -> None:
        """Decode's leg of a room is there, or a ticket is shown."""
        number = message.room
        try:
            if message.ticket:
                session.send(PrefillFound(room=number, dp_rank=self._redeem(number)))
                return
            room = self._rooms.get(number)
            if room is None:
                room = self._open(number, self.meet_s)
            if room.error is not None:
                raise room.error.exception()
            if room.session is not None:
                raise InvalidRequest(f"bootstrap_room {number} is in use by another decode leg")
            room.session, room.hint = session, message.hint
            self._answer(number, room)
        except SegueError as error:
            known = number in self._rooms
            session.send(
                PrefillFound(room=number, error=error.at(origin=self.name).info, elsewhere=not known)
            )
            if known:
                self.over(session, Done(room=number, error=error.info))

    def over(self, session: Session, message: Done) -> None:
        """Prefill's part is done, or decode's leg has failed: the prefill leg is answered, now or when it
        comes."""
        number = message.room
        room = self._rooms.get(number)
        if room is None:
            fine = 1 <= number <= MAX_BOOTSTRAP_ROOM and len(self._rooms) < self.limit
            if message.error is None or not fine:
                return
            room = self._open(number, self.meet_s)
        elif room.session not in (None, session):
            return  # it is another decode leg's
        room.session = None
        if room.leg is None and message.error is not None:
            room.error = room.error or message.error
            return
        self._forget(number)
        if room.leg is not None and not room.leg.done():
            if message.error is None:
                room.leg.set_result(None)
            else:
                room.leg.set_exception(message.error.exception())

    def closed(self, session: Session, error: SegueError) -> None:
        """The session of a decode instance's server has ended: so has what it asked for."""
        for number, room in list(self._rooms.items()):
            if room.session is session:
                self.over(session, Done(room=number, error=error.info))

    # ---- tickets --------------------------------------------------------------------------------

    @contextmanager
    def ticket(self, number: int, dp_rank: int, budget_s: float) -> Iterator[None]:
        """A ticket of this number may be shown once within `budget_s`, unless what is done meanwhile fails.
        Raises OutOfCapacity."""
        if len(self._tickets) >= self.limit:
            raise OutOfCapacity(f"{self.limit} prompts wait here for a decode instance")
        timer = asyncio.get_running_loop().call_later(budget_s, self._expired, number)
        self._tickets[number] = _UnusedTicket(dp_rank, timer)
        try:
            yield
        except BaseException:
            if self._tickets.pop(number, None) is not None:
                timer.cancel()
            raise

    def _redeem(self, number: int) -> int:
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            raise InvalidRequest(BAD_TICKET)
        ticket.timer.cancel()
        return ticket.dp_rank

    def _expired(self, number: int) -> None:
        if self._tickets.pop(number, None) is not None:
            self.abandoned += 1

    # ---- inside ---------------------------------------------------------------------------------

    def _open(self, number: int, budget_s: float) -> _OpenRoom:
        if not 1 <= number <= MAX_BOOTSTRAP_ROOM:
            raise InvalidRequest(f"bootstrap_room: from 1 to 2**63 - 1, not {number}")
        if len(self._rooms) >= self.limit:
            raise OutOfCapacity(f"{self.limit} rooms are open here")
        wait_s = min(budget_s, self.meet_s)
        timer = asyncio.get_running_loop().call_later(wait_s, self._late, number, wait_s)
        room = self._rooms[number] = _OpenRoom(timer)
        return room

    def _answer(self, number: int, room: _OpenRoom) -> None:
        """Tell decode where the request belongs, once both legs are there."""
        if room.leg is None or room.session is None:
            return
        dp_rank = self._rank(number, room.routed, room.hint)
        room.timer.cancel()  # from here on the request's own deadline counts
        room.session.send(PrefillFound(room=number, dp_rank=dp_rank))

    def _rank(self, number: int, routed: int | None, hint: int | None) -> int | None:
        for name, rank in (("routed_dp_rank", routed), ("disagg_prefill_dp_rank", hint)):
            if rank is not None and not 0 <= rank < self.dp.size:
                raise DpRankOutOfRange(f"{name} {rank}: {self.name} has ranks 0 to {self.dp.size - 1}")
        named = self.dp.follows(number) if hint is None else hint
        if routed is None:
            return named
        if named not in (None, routed) and self.dp.on_conflict == FAIL_ON_CONFLICT:
            raise dp_rank_conflict(number, routed, named)
        return routed

    def _late(self, number: int, wait_s: float) -> None:
        """One of the legs did not come in time."""
        room = self._rooms[number]
        here = "decode" if room.leg is not None else "prefill"
        text = f"the {here} leg of bootstrap room {number} did not come within {wait_s:g} s"
        late = BootstrapTimeout(text, origin=self.name, room=number)
        if room.error is None:
            self.abandoned += 1
        if room.session is not None:
            room.session.send(PrefillFound(room=number, error=late.info, elsewhere=room.leg is None))
        if room.leg is not None and not room.leg.done():
            room.leg.set_exception(late)
        self._forget(number)

    def _forget(self, number: int) -> None:
        room = self._rooms.pop(number, None)
        if room is not None:
            room.timer.cancel()
