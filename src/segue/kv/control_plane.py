"""The sessions of one leader: where they run, who talks on them, and which of them are kept open."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from segue.kv.config import HOST, LeaderRuntime, SessionConfig
from segue.kv.errors import InvalidRequest, PeerLost, SegueError
from segue.kv.ids import LeaderId, Role
from segue.kv.session.api import Session, SessionHandler
from segue.kv.session.dialer import Dialer
from segue.kv.session.tasks import background

#: Leaders that are dialled by `meet` at once.
MAX_MEETINGS = 64

log = logging.getLogger("segue.kv")


class ControlPlane:
    """The sessions of one leader without hand-offs: an I/O thread, the session node on it, and one of
    `handlers` for each role that a peer may have. `config` says who we are, `runtime` is another one in
    tests.

    A peer of any other role is refused. Handlers are called on the I/O thread. The public methods may be
    called from any other thread, those of sessions (`keep_session`, `meet`, `drop_session`, `sessions`) on it
    only.
    """

    def __init__(
        self, config: SessionConfig, handlers: Mapping[Role, SessionHandler], runtime: LeaderRuntime = HOST
    ) -> None:
        self.config = config
        self.io = runtime.io(_loop_error)
        self.io.on_end = self._io_ended
        #: called on the I/O thread when that has ended, and not by `close`
        self.on_lost: Callable[[SegueError], None] = lambda _: None
        #: Where it listens; port 0 before `start`.
        self.address: tuple[str, int] = (config.host, 0)
        self.node = runtime.node(
            me=config.me,
            role=config.role,
            secret=config.secret,
            handlers=handlers,
            message_type=config.messages,
            limits=config.limits,
            tls=config.tls,
            advertise=config.advertise,
            advertise_port=config.advertise_port,
        )
        self._uniform = runtime.uniform
        self._dialers: dict[LeaderId, Dialer] = {}
        self._meetings: dict[LeaderId, asyncio.Task[None]] = {}
        self._started = self._closed = self._ended = False
        #: held by `start` and `close`: each of their steps has a deadline, so whoever waits has one, too
        self._life = threading.RLock()

    def start(
        self, before: Coroutine[Any, Any, None] | None = None, then: Callable[[], None] = lambda: None
    ) -> tuple[str, int]:
        """Start the I/O thread, do what is to be done on it `before`, and listen for sessions; returns the
        address peers connect to.

        Raises ConfigError when the port is in use or a secret is missing beyond loopback; it is closed then,
        with `then` as in `close`. Raises InvalidRequest when it was started or closed before.
        """
        config = self.config
        with self._life:
            if self._started or self._ended:
                if before is not None:
                    before.close()
                raise InvalidRequest("it was started or closed before; make another one")
            self._started = True
            self.io.start()
            try:
                if before is not None:
                    self.io.call(before, config.limits.connect_s)
                listening = self.node.listen(config.host, config.port)
                self.address = self.io.call(listening, config.limits.connect_s)
            except BaseException:
                self.close(then)
                raise
            return self.address

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """End all sessions, do `then`, and end the thread. Idempotent: each call returns when that is done,
        also one from another thread, and one during `start` when that has ended. Not to be called on the
        I/O thread."""
        with self._life:
            if self._ended:
                return
            self._closed = self._ended = True
            try:
                if self.io.running:
                    self.io.call(self.close_sessions(), self.config.limits.connect_s)
            finally:
                try:
                    then()
                finally:
                    self.io.stop()

    def _io_ended(self, error: SegueError) -> None:
        if self._closed:
            return
        self.on_lost(error)
        try:
            self.io.loop.run_until_complete(self.node.close(PeerLost(error.info.text)))
        except BaseException as exc:  # the system closes them with the process
            log.error("sessions were not closed: %r", exc)

    async def close_sessions(self) -> None:
        """Listen no more, dial nobody any more, and end all sessions."""
        self._closed = True
        for leader in list(self._dialers):
            self.drop_session(leader)
        for task in self._meetings.values():
            task.cancel()
        await self.node.close()

    # ---- on the I/O thread -------------------------------------------------------------------------

    @property
    def sessions(self) -> Mapping[LeaderId, Session]:
        """The open sessions, whoever has opened them; a live view."""
        return self.node.sessions

    def keep_session(
        self, leader: LeaderId, host: str, port: int, refused: Callable[[SegueError], None]
    ) -> None:
        """Keep a session to `leader` from now on; a lost one is dialled again. Idempotent. `refused` as
        `Dialer` says; it is patient for `connect_s`."""
        if leader in self._dialers or self._closed:
            return
        limit_s = self.config.limits.connect_s

        async def connect() -> Session:
            return await self.node.connect(host, port, expect=leader, timeout_s=limit_s)

        dialer = Dialer(connect, f"{host}:{port}", refused=refused, patience_s=limit_s, uniform=self._uniform)
        self._dialers[leader] = dialer
        dialer.start(self.io.loop)

    def meet(self, leader: LeaderId, host: str, port: int, refused: Callable[[SegueError], None]) -> None:
        """Dial `leader` once, unless a session with it is open or kept, or `MAX_MEETINGS` others are dialled.
        `refused` is called with a refusal that another try will not mend."""
        known = leader in self._dialers or leader in self._meetings or leader in self.sessions
        if known or self._closed or len(self._meetings) >= MAX_MEETINGS:
            return

        def failed(error: SegueError) -> None:
            log.info("cannot meet %s at %s:%d: %s", leader, host, port, error)
            if not error.info.retryable:
                refused(error)

        connecting = self.node.connect(host, port, expect=leader, timeout_s=self.config.limits.connect_s)
        task = background(connecting, name=f"meeting {leader}", failed=failed, loop=self.io.loop)
        self._meetings[leader] = task
        task.add_done_callback(lambda _: self._meetings.pop(leader))

    def drop_session(self, leader: LeaderId) -> None:
        """Do not dial `leader` any more. An open session goes on."""
        if (dialer := self._dialers.pop(leader, None)) is not None:
            dialer.stop()


def _loop_error(context: dict[str, object]) -> None:
    log.error("error in the I/O loop: %s", context.get("message"), exc_info=context.get("exception"))  # type: ignore[arg-type]
