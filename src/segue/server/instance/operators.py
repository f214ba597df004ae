"""The sessions of an instance with operators: command lines that look at it and steer it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from segue import __version__
from segue.kv import Change, Incarnation, KVManager, KVPoll, LeaderId, PathSpeed, Phase, Role, SegueError
from segue.kv.session import PeerInfo, Session
from segue.server.instance.frontend_sessions import FrontendSessions
from segue.server.messages.control import Explain, Explained, Load
from segue.server.messages.operate import (
    GetStatus,
    OperationRefused,
    PairStatus,
    SetDraining,
    State,
    Status,
    Switch,
)
from segue.server.messages.records import RequestRecord
from segue.server.observe.integrity_report import busy
from segue.server.registry.registry_records import InstanceRecord
from segue.server.schedulers.request_figures import FAST_S, Buckets

log = logging.getLogger("segue.instance")


class OperatorSessions:
    """A `SessionHandler`. Used on the I/O thread only.

    `ask` has the leader say its load, on its own thread, and calls back here: one that stands still answers
    nobody. `sight` says what the instance is doing, `steer` carries an order out or raises a SegueError.
    `find` has the leader look for a request's records. An operator asks `frontends` for their records through
    us. `record` is what a registry is told.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[Load], None]], None],
        sight: Callable[[Load], Status],
        steer: Callable[[SetDraining | Switch], None],
        find: Callable[[str, Callable[[list[RequestRecord]], None]], None],
        frontends: FrontendSessions,
        record: Callable[[], InstanceRecord],
    ) -> None:
        self._find = find
        self._record = record
        self._frontends = frontends
        self._frontends.on_explained = self.on_explained
        self._ask = ask
        self._sight = sight
        self._steer = steer
        self._sessions: dict[LeaderId, Session] = {}
        #: sessions that wait for a change of the state, with the last state that each got
        self._watching: dict[LeaderId, tuple[Session, State]] = {}

    def hello(self) -> bytes:
        """Our identity, for operators that have our address without a registry."""
        return msgspec.msgpack.encode(self._record())

    def accept(self, peer: PeerInfo) -> None:
        """Everybody who knows the secret is welcome."""

    def opened(self, session: Session) -> None:
        """Nothing is said unasked."""
        self._sessions[session.peer.leader] = session

    def closed(self, session: Session, error: SegueError) -> None:
        """Nobody is left to be told."""
        self._watching.pop(session.peer.leader, None)
        if self._sessions.get(session.peer.leader) is session:
            del self._sessions[session.peer.leader]

    def received(self, session: Session, message: object) -> None:
        """A question, or an order."""
        match message:
            case GetStatus():
                self._ask(lambda load: session.send(self._sight(load)))
            case SetDraining() | Switch():
                log.info("event=steered order=%s by=%s", message, session.peer.address)
                try:
                    self._steer(message)
                except SegueError as error:
                    session.send(OperationRefused(error.info))
                else:
                    self._ask(partial(self._watch, session))
            case Explain(request_id, None):
                self._find(request_id, partial(self._explained, session, request_id))
            case Explain(request_id, str() as frontend):
                if (asked := self._frontends.sessions.get(Incarnation(frontend))) is not None:
                    asked.send(Explain(request_id, asker=session.peer.leader))
            case _:
                log.warning("an operator sent a %s", type(message).__name__)

    def _explained(self, session: Session, request_id: str, records: list[RequestRecord]) -> None:
        session.send(Explained(records, frontends=sorted(self._frontends.sessions), request_id=request_id))

    def on_explained(self, frontend: Incarnation, answer: Explained) -> None:
        """Pass a frontend's answer on to the operator, which may be gone."""
        if answer.asker is not None and (session := self._sessions.get(answer.asker)) is not None:
            session.send(msgspec.structs.replace(answer, frontends=[frontend]))

    def _watch(self, session: Session, load: Load) -> None:
        sight = self._sight(load)
        if not session.closing:
            self._watching[session.peer.leader] = session, sight.state
            session.send(sight)

    def report(self, load: Load) -> None:
        """The load has changed, and with it perhaps the state."""
        for session, state in list(self._watching.values()):
            if self._sight(load).state != state:
                self._watch(session, load)

    @property
    def watched(self) -> bool:
        """Somebody waits for a change of the state."""
        return bool(self._watching)


class HandoffTotals:
    """The hand-offs of an instance that have ended: how many, by error code (`ok`: well), and of those that
    ended well the bytes of KV and the seconds of their transfer."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.nbytes = 0
        self.transfer = Buckets(FAST_S)

    def add(self, phase: Phase) -> None:
        """Count the terminal `phase` of one."""
        self.ended["ok" if phase.error is None else phase.error.code.value] += 1
        if phase.error is None:
            self.nbytes += phase.nbytes
            self.transfer.observe(phase.wire_s)


class StatusReporter:
    """The status of an instance. Used on the I/O thread only. `limit` bounds how many peers' hand-offs are
    counted; those with the latest are."""

    def __init__(self, role: Role, frontends: FrontendSessions, limit: int) -> None:
        #: None for a unified instance
        self.manager: KVManager | None = None
        #: resources of requests in the direct-mode server
        self.door: Callable[[], Mapping[str, int]] = dict
        self._role = role
        self._frontends = frontends
        self._limit = limit
        self._began = time.monotonic()
        self._counts: dict[str, Counter[KVPoll]] = {}
        self.handoffs = HandoffTotals()

    def changed(self, change: Change) -> None:
        """A hand-off has changed: the ends are counted."""
        if isinstance(change, Phase) and change.phase.terminal:
            peer = "" if change.peer is None else str(change.peer)
            counts = self._counts[peer] = self._counts.pop(peer, Counter())
            counts[change.phase] += 1
            self.handoffs.add(change)
            if len(self._counts) > self._limit:
                del self._counts[next(iter(self._counts))]

    @property
    def held(self) -> bool:
        """A hand-off still holds something below the role, or the direct-mode server has a client."""
        tables = {} if self.manager is None else self.manager.sizes()
        return bool(busy(tables) or busy(self.door()))

    def of(self, load: Load) -> Status:
        """The status while `load` is the leader's."""
        paths = {} if self.manager is None else self.manager.paths()
        drained = load.drained and not self.held
        return Status(
            role=self._role,
            state="drained" if drained else "draining" if load.draining else "serving",
            version=__version__,
            uptime_s=time.monotonic() - self._began,
            load=load,
            pairs=[self._pair(peer, path) for peer, path in paths.items()],
            frontends=sorted(self._frontends.sessions),
        )

    def _pair(self, peer: str, path: PathSpeed) -> PairStatus:
        counts = self._counts.get(peer) or Counter[KVPoll]()
        return PairStatus(
            peer=peer,
            transport=path.transport,
            bytes_per_s=path.bytes_per_s,
            nbytes=path.nbytes,
            succeeded=counts[KVPoll.SUCCESS],
            failed=counts[KVPoll.FAILED],
        )
