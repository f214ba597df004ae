"""An operator: queries the instances that a registry lists, and controls them (`segue ps`, `segue drain`, …).

Each leader is queried over its own session, which proves the deployment's secret on both sides, and has
`ASK_S` to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from segue.kv import (
    BootstrapTimeout,
    DeadlineExceeded,
    Incarnation,
    InvalidRequest,
    LeaderId,
    Limits,
    PeerLost,
    Role,
    SegueError,
)
from segue.kv.errors import NotFound
from segue.kv.ids import successor
from segue.kv.session import PeerInfo, Session, Tls
from segue.server.fleet.life import Life, life_of
from segue.server.messages.control import Explain, Explained
from segue.server.messages.operate import (
    GetStatus,
    OperationRefused,
    OperatorMessage,
    PairStatus,
    SetDraining,
    State,
    Status,
    Switch,
)
from segue.server.messages.records import check_name
from segue.server.registry.address_backend import operator_node
from segue.server.registry.backends import RegistryBackend
from segue.server.registry.client import open_backend
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord

#: Time of a leader to open a session and to answer; it answers between two forwards.
ASK_S = 5.0
#: Digits of an incarnation that name an instance, at least.
NAME_DIGITS = 4
#: Digits of it that are shown.
DIGITS = 8

T = TypeVar("T")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One leader: its registered record, and its own answer or the reason why there is none."""

    instance: str
    dp_rank: int
    role: Role
    served_model: str
    address: str
    draining: bool
    sight: Status | None = None
    trouble: str = ""


class Operator:
    """One command's view of a fleet. Made by `operator`."""

    def __init__(
        self, registry: RegistryBackend, secret: bytes | None, limits: Limits, tls: Tls | None
    ) -> None:
        self._registry = registry
        self._limits = limits
        #: by leader: the queries that wait for its answer
        self._inboxes: dict[LeaderId, list[asyncio.Queue[OperatorMessage | SegueError]]] = {}
        self.node = operator_node(self, secret, limits, tls)

    # ---- SessionHandler -------------------------------------------------------------------------

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None:
        """Accepts every peer: the registry names those that we dial."""

    def opened(self, session: Session) -> None:
        """Nothing to do: the caller of `dial` continues."""

    def received(self, session: Session, message: object) -> None:
        if isinstance(message, OperatorMessage):
            self._put(session, message)

    def closed(self, session: Session, error: SegueError) -> None:
        self._put(session, error)

    def _put(self, session: Session, item: OperatorMessage | SegueError) -> None:
        # Without a limit, but each leader answers what it was asked, and tells a change of its state.
        for inbox in self._inboxes.get(session.peer.leader, ()):
            inbox.put_nowait(item)

    # ---- questions ------------------------------------------------------------------------------

    async def instances(self) -> list[InstanceRecord]:
        """The instances that the registry lists. Raises the errors of the registry's client."""
        return (await self._registry.instances(None, None, 0.0)).instances

    async def named(self, name: str) -> InstanceRecord:
        """The instance whose incarnation begins with `name`. Raises NotFound, also if several do."""
        records = await self.instances()
        found = [r for r in records if len(name) >= NAME_DIGITS and r.incarnation.startswith(name.lower())]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFound(f"{len(found)} instances begin with {name}; give more digits of its name")
        there = ", ".join(r.incarnation[:8] for r in records) or "none"
        raise NotFound(f"no instance {name[:64]!r} is registered; registered are: {there}")

    async def ps(self) -> list[Row]:
        """All leaders. A leader that does not answer gets a row that says so."""
        records = await self.instances()
        leaders = [(record, where) for record in records for _, where in record.leaders()]
        return await asyncio.gather(*(self._row(record, where) for record, where in leaders))

    async def _row(self, record: InstanceRecord, where: ReplicaRecord) -> Row:
        row = Row(
            instance=record.incarnation,
            dp_rank=where.dp_rank,
            role=record.role,
            served_model=record.served_model,
            address=f"{where.host}:{where.port}",
            draining=where.draining,
        )
        try:
            sight = await self.ask(record, where, GetStatus(), _sight, ASK_S)
        except SegueError as error:
            return msgspec.structs.replace(row, trouble=error.info.text)
        return msgspec.structs.replace(row, sight=sight)

    async def steer(
        self,
        record: InstanceRecord,
        *,
        draining: bool,
        timeout_s: float,
        say: Callable[[ReplicaRecord, Status], object] = lambda _where, _sight: None,
    ) -> None:
        """Drain every leader of an instance, or have it take requests again; returns once each is drained, or
        serves. `say` hears each answer. Raises DeadlineExceeded after `timeout_s`; what was ordered stays."""
        wanted: State = "drained" if draining else "serving"
        await self.order_each(record, SetDraining(draining), wanted, timeout_s, say)

    async def switch(
        self,
        record: InstanceRecord,
        role: Role,
        *,
        timeout_s: float,
        say: Callable[[ReplicaRecord, Status], object] = lambda _where, _sight: None,
    ) -> InstanceRecord:
        """Drain an instance and have it come back as `role`; returns it once the registry lists all of its
        leaders. Raises what `steer` does, InvalidRequest if it cannot have that role, with nothing done, and
        PeerLost if one leaves again meanwhile.
        """
        ends_at = asyncio.get_running_loop().time() + timeout_s
        await self.order_each(record, Switch(role), "drained", timeout_s, say)

        def stays(answer: OperatorMessage) -> State | None:
            sight = _sight(answer)
            return None if sight is None or sight.state == "drained" else sight.state

        async def turn(where: ReplicaRecord) -> None:
            while True:
                try:
                    state = await self.ask(record, where, Switch(role, turn=True), stays, timeout_s)
                except PeerLost:
                    return  # it has left, to come back
                if state == "serving":
                    who = f"{record.role} {LeaderId(record.incarnation, where.dp_rank)}"
                    raise InvalidRequest(f"{who} takes requests again: somebody has resumed it")
                # A late word of a peer came after it had drained: once that has ended, it is told again.
                alone = msgspec.structs.replace(record, replicas=[where])
                await self.order_each(alone, Switch(role), "drained", timeout_s, say)

        try:
            async with asyncio.timeout_at(ends_at):
                await _all(turn(where) for where in record.replicas)
                return await self._listed(successor(record.incarnation, role))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{record.role} {record.incarnation[:8]} has drained, but is not back as {role} after "
                f"{timeout_s:g} s; see its log, and segue ps"
            ) from None

    async def _listed(self, incarnation: Incarnation) -> InstanceRecord:
        """The instance, once all of its leaders have registered. The caller bounds the wait. Raises PeerLost
        when one that had registered is gone: then the others leave, too, and it never has all."""
        version: int | None = None
        seen: dict[int, InstanceRecord] = {}
        while True:
            answer = await self._registry.instances(None, version, ASK_S)
            version = answer.version
            found = next((r for r in answer.instances if r.incarnation == incarnation), None)
            if found is not None and found.ready:
                return found
            there = {} if found is None else {where.dp_rank: found for where in found.replicas}
            for rank in seen.keys() - there.keys():
                await self._still_there(seen[rank], rank)
            seen |= there

    async def _still_there(self, record: InstanceRecord, rank: int) -> None:
        """The registry lists it no more. A registry lists nobody for a while after its start, so ask the
        instance itself."""
        [where] = [where for where in record.replicas if where.dp_rank == rank]
        try:
            await self.ask(record, where, GetStatus(), _sight, ASK_S)
        except SegueError as error:
            raise PeerLost(
                f"{record.role} {LeaderId(record.incarnation, rank)} has left again before all of its DP "
                f"ranks were back: {error}; see its log, and segue ps"
            ) from error

    async def order_each(
        self,
        record: InstanceRecord,
        order: SetDraining | Switch,
        wanted: State,
        timeout_s: float,
        say: Callable[[ReplicaRecord, Status], object],
    ) -> None:
        """Send an order to every leader, and wait until each reports the state `wanted`."""

        async def one(where: ReplicaRecord) -> None:
            last: Status | None = None

            def done(answer: OperatorMessage) -> Status | None:
                nonlocal last
                if (sight := _sight(answer)) is None:
                    return None
                last = sight
                say(where, sight)
                return sight if sight.state == wanted else None

            try:
                await self.ask(record, where, order, done, timeout_s)
            except DeadlineExceeded as error:
                if last is None:
                    raise
                who = f"{record.role} {LeaderId(record.incarnation, where.dp_rank)}"
                raise DeadlineExceeded(_late(who, last, timeout_s)) from error

        await _all(one(where) for where in record.replicas)

    async def explain(self, request_id: str) -> Life:
        """The records that all leaders and frontends have of a request; a frontend is queried through a
        leader. Raises InvalidRequest for a name that is too long."""
        check_name(request_id)
        places = [(record, where) for record in await self.instances() for _, where in record.leaders()]
        names = [f"{record.role} {LeaderId(record.incarnation, where.dp_rank)}" for record, where in places]
        answers = await asyncio.gather(*(self._explained(request_id, None, *place) for place in places))
        through: dict[Incarnation, tuple[InstanceRecord, ReplicaRecord]] = {}
        for place, answer in zip(places, answers, strict=True):
            for frontend in answer.frontends if isinstance(answer, Explained) else []:
                through.setdefault(frontend, place)
        names += [f"frontend {frontend[:8]}" for frontend in through]
        answers += await asyncio.gather(
            *(self._explained(request_id, frontend, *place) for frontend, place in through.items())
        )
        known = [answer.records for answer in answers if isinstance(answer, Explained)]
        pairs = zip(names, answers, strict=True)
        silent = [f"{name}: {answer}" for name, answer in pairs if isinstance(answer, SegueError)]
        return life_of(request_id, known, silent)

    async def _explained(
        self, request_id: str, frontend: Incarnation | None, record: InstanceRecord, where: ReplicaRecord
    ) -> Explained | SegueError:
        def done(answer: OperatorMessage) -> Explained | None:
            # A frontend's answer names its asker: us. We may have asked for another request, too.
            if not isinstance(answer, Explained) or (answer.asker is None) != (frontend is None):
                return None
            if answer.request_id not in ("", request_id):
                return None
            return answer if frontend in (None, *answer.frontends) else None

        try:
            return await self.ask(record, where, Explain(request_id, frontend), done, ASK_S)
        except SegueError as error:
            return error

    async def ask(
        self,
        record: InstanceRecord,
        where: ReplicaRecord,
        question: OperatorMessage,
        done: Callable[[OperatorMessage], T | None],
        timeout_s: float,
    ) -> T:
        """Query one leader; the first value that `done` returns for one of its answers, within `timeout_s`
        seconds. Raises DeadlineExceeded, and PeerLost if the leader leaves."""
        leader = LeaderId(record.incarnation, where.dp_rank)
        inbox: asyncio.Queue[OperatorMessage | SegueError] = asyncio.Queue()
        self._inboxes.setdefault(leader, []).append(inbox)
        try:
            async with asyncio.timeout(timeout_s):
                session = await self.node.connect(
                    where.host, where.port, expect=leader, timeout_s=min(timeout_s, ASK_S)
                )
                session.send(question)
                while True:
                    answer = await inbox.get()
                    if isinstance(answer, OperationRefused):
                        raise answer.error.exception()
                    if isinstance(answer, SegueError):
                        raise PeerLost(f"{record.role} {leader} left: {answer}") from answer
                    if (found := done(answer)) is not None:
                        return found
        except TimeoutError:
            text = f"{record.role} {leader} did not answer within {timeout_s:g} s"
            raise DeadlineExceeded(text) from None
        except BootstrapTimeout as error:
            raise DeadlineExceeded(f"{record.role} {leader} does not answer: {error}") from error
        finally:
            self._inboxes[leader].remove(inbox)


def pairs(rows: Sequence[Row]) -> dict[tuple[str, str], PairStatus]:
    """The pairs of a prefill and a decode leader. Prefill's word is taken: it has measured what it wrote."""
    found: dict[tuple[str, str], PairStatus] = {}
    for row in sorted(rows, key=lambda row: row.role is Role.PREFILL):
        me = f"{row.instance[:DIGITS]} dp{row.dp_rank}"
        for pair in row.sight.pairs if row.sight is not None else []:
            found[(me, pair.peer) if row.role is Role.PREFILL else (pair.peer, me)] = pair
    return found


async def _all(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Raises the first error once all have ended."""
    for end in await asyncio.gather(*works, return_exceptions=True):
        if end is not None:
            raise end


def _sight(answer: OperatorMessage) -> Status | None:
    return answer if isinstance(answer, Status) else None


def _late(name: str, sight: Status, timeout_s: float) -> str:
    load = sight.load
    return (
        f"{name} is {sight.state} after {timeout_s:g} s: {load.running + load.waiting} requests are left and "
        f"{load.pages_quarantined} pages in quarantine; it goes on draining"
    )


@asynccontextmanager
async def operator(
    url: str, *, secret: bytes | None, limits: Limits, tls: Tls | None
) -> AsyncIterator[Operator]:
    """An operator of the fleet whose registry is at `url`. Raises ConfigError."""
    registry = open_backend(url, secret, limits, tls)
    try:
        one = Operator(registry, secret, limits, tls)
        try:
            yield one
        finally:
            await one.node.close()
    finally:
        await registry.close()
