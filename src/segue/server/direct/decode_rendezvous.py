"""Decode's side of requests that a foreign router has posted in two legs
(`server.direct.prefill_rendezvous` is prefill's).

A meeting finds the prefill instance that has the other leg, among those that the registry lists, and tells it
how the request ended. The request itself is placed on both leaders as a frontend does (`fleet`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import msgspec

from segue.engine.request import Output, Request, Wait
from segue.kv import (
    AbortedByClient,
    BootstrapTimeout,
    BootstrapUnreachable,
    ErrorInfo,
    Incarnation,
    InvalidRequest,
    OutOfCapacity,
    Role,
    SegueError,
)
from segue.kv.session import is_loopback
from segue.server.direct.prefill_rendezvous import MEET_S
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.replica import Replica
from segue.server.frontend.backend import Generation
from segue.server.frontend.legs import Bootstrap, RetainedTicket
from segue.server.messages.control import Done, FindPrefill, PrefillFound

#: How long prefill may take to appear in the registry's list, or to be connected with.
FIND_S = 2.0


class DecodeRendezvous:
    """The meetings of one decode instance; answers of prefill instances reach them
    (`server.fleet.membership.RendezvousHandler`)."""

    def __init__(self, limit: int) -> None:
        #: decode legs whose prefill leg did not come
        self.abandoned = 0
        self._limit = limit
        self._open: dict[int, Meeting] = {}

    def sizes(self) -> dict[str, int]:
        """Meetings that have not ended; zero at rest."""
        return {"meetings": len(self._open)}

    def enter(self, meeting: Meeting) -> None:
        """It hears of its room from now on. Raises InvalidRequest if the room is in use, OutOfCapacity."""
        if meeting.room in self._open:
            raise InvalidRequest(
                f"bootstrap_room {meeting.room} is in use; each request needs a room of its own"
            )
        if len(self._open) >= self._limit:
            raise OutOfCapacity(f"{self._limit} requests are in flight already")
        self._open[meeting.room] = meeting

    def leave(self, meeting: Meeting) -> None:
        """It has ended."""
        if self._open.get(meeting.room) is meeting:
            del self._open[meeting.room]

    def met(self, replica: Replica, message: PrefillFound) -> None:
        """See `RendezvousHandler`."""
        if (meeting := self._open.get(message.room)) is not None:
            meeting.answered(replica, message)

    def lost(self, replica: Replica, error: SegueError) -> None:
        """See `RendezvousHandler`."""
        for meeting in list(self._open.values()):
            meeting.lost(replica, error)


class Meeting:
    """One request's. Enter it, `ask`, `wait`, then generate on it: it is the backend of exactly this request.

    However it is left, prefill's leg hears of it.
    """

    def __init__(
        self,
        meetings: DecodeRendezvous,
        fleet: Fleet,
        legs: Bootstrap | RetainedTicket,
        hint: int | None = None,
        meet_s: float = MEET_S,
    ) -> None:
        self.room = legs.room
        self._meetings = meetings
        self._fleet = fleet
        self._legs = legs
        self._hint = hint
        self._meet_s = meet_s
        #: who was asked and has not answered
        self._asked: list[Replica] = []
        #: who has the prefill leg, and for which of its instance's DP ranks
        self._holder: Replica | None = None
        self._dp_rank: int | None = None
        self._error: SegueError | None = None
        self._news = asyncio.Event()
        self._requests: list[str] = []
        self._begun = 0
        self._samples = 0
        self._over = False

    async def __aenter__(self) -> Meeting:
        try:
            self._meetings.enter(self)
        except OutOfCapacity as error:
            self._asked = self._candidates()
            self._tell(error.info)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meetings.leave(self)
        if error is None:
            self._tell(None)
        elif isinstance(error, SegueError):
            self._tell(error.info)
        else:
            self._tell(AbortedByClient("the decode leg has ended").info)

    # ---- finding prefill ------------------------------------------------------------------------

    async def wait(self, samples: int) -> None:
        """Until prefill's leg is there, of a request with so many samples. Raises what prefill's leg failed
        with, or BootstrapTimeout."""
        self._samples = samples
        try:
            async with asyncio.timeout(self._meet_s):
                while self._holder is None and self._error is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self._meetings.abandoned += 1
            raise BootstrapTimeout(
                f"the prefill leg of bootstrap room {self.room} did not come within {self._meet_s:g} s",
                room=self.room,
            ) from None
        if self._error is not None:
            raise self._error

    async def ask(self) -> None:
        """Ask who has prefill's leg. Raises BootstrapUnreachable if the registry names no such instance."""
        loop = asyncio.get_running_loop()
        until = loop.time() + FIND_S
        message = FindPrefill(room=self.room, hint=self._hint, ticket=isinstance(self._legs, RetainedTicket))
        while not (found := self._candidates()):
            try:
                async with asyncio.timeout_at(until):
                    await self._fleet.changed()
            except TimeoutError:
                # Its leg may wait at one that the body does not name.
                self._asked = self._prefill(lambda _: True)
                raise self._nobody() from None
        self._asked = found
        for replica in found:
            _send(replica, message)

    def _prefill(self, wanted: Callable[[Replica], bool]) -> list[Replica]:
        there = self._fleet.membership.replicas.values()
        return [r for r in there if r.role is Role.PREFILL and r.session is not None and wanted(r)]

    def _candidates(self) -> list[Replica]:
        legs = self._legs
        if isinstance(legs, RetainedTicket):
            return self._prefill(lambda r: r.leader == legs.issuer)
        return self._prefill(
            lambda r: r.record.bootstrap_port == legs.port and _same_host(r.where.host, legs.host)
        )

    def _nobody(self) -> SegueError:
        legs = self._legs
        if isinstance(legs, RetainedTicket):
            text = f"prefill {legs.issuer}, which retained this prompt, is not there any more"
        else:
            text = (
                "no prefill instance in the registry has the bootstrap address "
                f"{legs.host[:200]}:{legs.port} "
                "(its --advertise-host or --host, and its --bootstrap-port)"
            )
        return BootstrapUnreachable(text, phase="placement", origin="decode's door")

    # ---- the answer of prefill ---------------------------------------------------------------

    def answered(self, replica: Replica, message: PrefillFound) -> None:
        """`replica` has the leg, or had it."""
        if self._over or replica not in self._asked:
            return  # once the leg is found its holder alone counts: another may say that it has no room
        if message.error is not None and message.elsewhere:
            self.lost(replica, message.error.exception())
            return
        if message.error is not None:
            self._fail(message.error.exception())
            return
        if self._holder is not None:
            return
        self._holder, self._dp_rank = replica, message.dp_rank
        for other in self._asked:
            if other is not replica:
                _send(other, Done(room=self.room))
        self._asked = [replica]
        self._news.set()

    def lost(self, replica: Replica, error: SegueError) -> None:
        """The session with `replica` has ended, or the leg is not there."""
        if self._over or replica not in self._asked:
            return
        self._asked.remove(replica)
        if not self._asked:
            self._fail(error)

    def _fail(self, error: SegueError) -> None:
        """Prefill's leg has ended before its part was done: so does the request."""
        self._error = self._error or error
        self._asked = []  # nobody waits for our word there
        self._news.set()
        for request_id in self._requests:
            self._fleet.cancel(request_id, error.info)

    def _tell(self, error: ErrorInfo | None) -> None:
        if self._over:
            return
        self._over = True
        if isinstance(self._legs, RetainedTicket):
            return  # no leg waits for its end
        for replica in self._asked:
            _send(replica, Done(room=self.room, error=error))

    # ---- the backend of this request ------------------------------------------------------------

    def submit(self, request: Request, *, budget_s: float) -> Generation:
        """See `server.frontend.backend.Generator`."""
        assert self._holder is not None, "wait first"
        if self._error is not None:
            raise self._error
        ranks = msgspec.structs.replace(
            request.ranks, disagg_prefill_dp_rank=self._dp_rank, force_query_prefill_dp_rank=False
        )
        request = msgspec.structs.replace(request, ranks=ranks)
        self._requests.append(request.request_id)
        incarnation: Incarnation = self._holder.record.incarnation
        return _Watched(self._fleet.submit(request, budget_s=budget_s, prefill=incarnation), self._first)

    def complete(self, request_id: str) -> None:
        """See `server.frontend.backend.Generator`."""
        self._fleet.complete(request_id)

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        """See `server.frontend.backend.Generator`."""
        self._fleet.cancel(request_id, reason)

    def _first(self) -> None:
        """One more sample has its first token; with the last one prefill's part is done."""
        self._begun += 1
        if self._begun == self._samples:
            self._tell(None)


class _Watched:
    """`outputs`, with a call of `first` at the first one that has tokens."""

    def __init__(self, outputs: Generation, first: Callable[[], None]) -> None:
        self._outputs = outputs
        self._first: Callable[[], None] | None = first

    async def deliver(self, take: Callable[[Output], Wait | None]) -> None:
        """See `Generation.deliver`."""

        def seen(output: Output) -> Wait | None:
            if output.token_ids and self._first is not None:
                self._first()
                self._first = None
            return take(output)

        await self._outputs.deliver(seen)


def _send(replica: Replica, message: FindPrefill | Done) -> None:
    if replica.session is not None:
        replica.session.send(message)


def _same_host(registered: str, named: str) -> bool:
    """Compared as they are written: a name that a client sends is never looked up."""
    named = named.strip("[]").lower()
    return registered.lower() == named or (is_loopback(registered) and is_loopback(named))
