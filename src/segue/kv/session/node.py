"""`SessionNode`: all sessions of one process, incoming and outgoing. Lives on one event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from segue.kv.addresses import is_loopback
from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ConfigError,
    Draining,
    OutOfCapacity,
    PeerLost,
    PeerRefused,
    PeerRestarted,
    SegueError,
    Unauthorized,
)
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.pending import MAX_PENDING, Refusals
from segue.kv.session.api import Session, SessionHandler
from segue.kv.session.connection import Connection, State
from segue.kv.session.frames import NONCE_BYTES, SESSION_VERSIONS, SessionHello
from segue.kv.session.guarded_listener import GuardedListener
from segue.kv.session.listen import listening
from segue.kv.session.session_handshake import Handshake, session_key
from segue.kv.session.tasks import awaited
from segue.kv.session.tls import Tls, explain_tls, not_tls
from segue.kv.versions import Versions

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SessionStats:
    """Counters of one node since its start."""

    opened: int = 0
    ended: int = 0
    refused: int = 0
    bad_frames: int = 0
    handler_errors: int = 0
    handshakes_late: int = 0
    pending_dropped: int = 0


@dataclass(slots=True)
class _Dial:
    task: asyncio.Task[Connection]
    waiters: int = 0


class SessionNode:
    """Opens, accepts and keeps the sessions of the leader `me` with `role`. See `handshake` for the rules of
    opening. Used on one asyncio loop.

    `handlers` has the handler of the sessions with peers of each role; a peer of another role is refused.
    `secret` is the deployment's shared secret; without one only loopback is talked to, in both directions.
    `limits` bounds times and sizes, `max_half_open` connections that have not authenticated. `message_type`
    is the union of msgspec structs that sessions carry. `tls` puts TLS under the sessions, in both
    directions. `advertise` and `advertise_port` are where peers reach the listener, if not where it listens:
    by that address a restarted peer is recognized. `protocol` is for tests of version differences,
    `random_bytes` and `sockets` (see `listening`) for a simulator.
    """

    def __init__(
        self,
        *,
        me: LeaderId,
        role: Role,
        secret: bytes | None,
        handlers: Mapping[Role, SessionHandler],
        message_type: Any,
        limits: Limits,
        tls: Tls | None = None,
        advertise: str | None = None,
        advertise_port: int | None = None,
        max_half_open: int = MAX_PENDING,
        protocol: Versions = SESSION_VERSIONS,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        sockets: Any = socket,
    ) -> None:
        if secret is not None and len(secret) < 16:
            raise ConfigError(f"the shared secret has {len(secret)} bytes; it needs at least 16")
        if limits.keepalive_s >= limits.peer_silence_s:
            raise ConfigError(
                f"keepalive_s ({limits.keepalive_s}) must be smaller than peer_silence_s "
                f"({limits.peer_silence_s})"
            )
        self.me = me
        self.role = role
        self._handlers = handlers
        self.limits = limits
        self.protocol = protocol
        self._random_bytes = random_bytes
        self._sockets = sockets
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(message_type)
        self.stats = SessionStats()
        self._key = session_key(secret)
        self._tls = tls
        self._listener = GuardedListener(
            self._incoming,
            server_tls=tls.server if tls is not None else None,
            handshake_s=limits.handshake_s,
            count=self.count,
            max_pending=max_half_open,
        )
        self._strangers = Refusals()
        self._advertise = advertise
        self._advertise_port = advertise_port
        self._listen = ""
        self._socket: socket.socket | None = None
        self._connections: dict[Connection, None] = {}
        self._open: dict[LeaderId, Connection] = {}
        #: the sessions whose `opened` a handler has heard and whose `closed` it has not
        self._told: dict[LeaderId, Connection] = {}
        self._places: dict[str, Connection] = {}
        self._arrivals: dict[LeaderId, list[asyncio.Future[None]]] = {}
        self._dials: dict[tuple[str, int, LeaderId | None], _Dial] = {}
        self._refusals: dict[LeaderId, str] = {}
        self._quiet: asyncio.Future[None] | None = None
        self._turns = 0
        self._batch_depth = 0
        self._batch: list[Connection] = []
        self._gathering = False
        self._closed = False

    # ---- the face -------------------------------------------------------------------------------

    @property
    def sessions(self) -> Mapping[LeaderId, Session]:
        """The open sessions by their peer; a live view."""
        return MappingProxyType(self._open)

    @property
    def address(self) -> str:
        """`host:port` of the listener, empty without one."""
        return self._listen

    def gather(self) -> None:
        """Join all messages until the loop's next turn into one write per session."""
        if not self._gathering:
            self._gathering = True
            self.batch_begin()
            asyncio.get_running_loop().call_soon(self._gathered)

    def _gathered(self) -> None:
        self._gathering = False
        self.batch_end()

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listen at `host` and `port` (0: any free one); returns what was bound. ConfigError if
        the port is taken, the host is not ours, or it is not loopback and there is no secret."""
        if self._socket is not None or self._closed:
            raise ConfigError(f"this node already listens at {self._listen or 'nothing: it is closed'}")
        sock = listening(host, port, what="this process", flag="port", sockets=self._sockets)
        bound_host, bound_port = sock.getsockname()[:2]
        if self._key is None and not is_loopback(str(bound_host)):
            sock.close()
            raise ConfigError(
                f"listening at {host} would let other machines in and there is no shared secret: "
                "give one (--secret-file; in a KVConfig, secret), or listen at 127.0.0.1"
            )
        self._listen_on(sock, str(bound_host), int(bound_port))
        return str(bound_host), int(bound_port)

    def _listen_on(self, listener: socket.socket, host: str, port: int) -> None:
        """Let peers in that come to a socket which listens at `host` and `port`."""
        self._socket = listener
        self._listen = f"{host}:{port}"
        self._listener.open(listener)

    async def connect(
        self, host: str, port: int, *, expect: LeaderId | None = None, timeout_s: float
    ) -> Session:
        """An open session with whoever listens at `host` and `port`, which must be `expect` if
        that is given. Returns the session that already exists with that leader, if any;
        callers that connect to the same place at the same time share one attempt.

        BootstrapUnreachable: nobody is there, or it went away. BootstrapTimeout: no session within
        `timeout_s`. Unauthorized: no or another secret. PeerRestarted: another incarnation than
        that of `expect` answers. PeerRefused: another of its ranks does. Any other SegueError: the
        peer's own refusal, unchanged.
        """
        if self._closed:
            raise Draining("this node is closed")
        if expect is not None and (session := self._open.get(expect)) is not None:
            return session
        key = (host, port, expect)
        dial = self._dials.get(key)
        if dial is None:
            task = awaited(self._dial(host, port, expect))
            dial = self._dials[key] = _Dial(task)
            task.add_done_callback(lambda _, dial=dial: self._dialled(key, dial))  # type: ignore[misc]
        dial.waiters += 1
        try:
            await asyncio.wait({dial.task}, timeout=timeout_s)
        finally:
            dial.waiters -= 1
            if dial.waiters == 0 and not dial.task.done():
                dial.task.cancel()
                if self._dials.get(key) is dial:
                    del self._dials[key]
        if not dial.task.done() or dial.task.cancelled():
            if self._closed:
                raise Draining("this node was closed")
            raise BootstrapTimeout(f"no session with {host}:{port} within {timeout_s} s")
        error = dial.task.exception()
        if isinstance(error, SegueError):
            # A fresh exception for each caller: they would otherwise share one traceback.
            raise error.info.exception() from error
        return dial.task.result()

    def _dialled(self, key: tuple[str, int, LeaderId | None], dial: _Dial) -> None:
        if self._dials.get(key) is dial:  # else it was given up, and another may be under way
            del self._dials[key]
        if not dial.task.cancelled():
            dial.task.exception()  # seen: who waited may have gone at this very moment

    async def close(self, error: SegueError | None = None) -> None:
        """Stop listening and end every session with `error` (default Draining). Returns when all
        sockets are gone; one that does not take its last frame is cut within a second."""
        self._closed = True
        reason = error or Draining(f"{self.role} {self.me} is leaving")
        await self._listener.close()
        tasks = [dial.task for dial in self._dials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for connection in list(self._connections):
            # An unauthenticated peer is not told why, and its connection does not linger.
            connection.end(reason, tell=connection.handshake.authenticated)
        if self._connections:
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet

    # ---- listening ------------------------------------------------------------------------------

    def _incoming(self) -> Connection:
        connection = Connection(self, dialling=False, loop=asyncio.get_running_loop())
        self._connections[connection] = None
        return connection

    # ---- dialling -------------------------------------------------------------------------------

    async def _dial(self, host: str, port: int, expect: LeaderId | None) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError, OverflowError) as error:  # the latter: what no resolver takes
            why = error.strerror if isinstance(error, OSError) else error
            raise BootstrapUnreachable(f"{host[:64]}:{port} cannot be found: {why or error}") from error
        failure: SegueError = BootstrapUnreachable(f"{host} has no address")
        for info in infos:
            address = str(info[4][0])
            self.check_address(address)
            connection = Connection(self, dialling=True, loop=loop)
            connection.expect = expect
            try:
                return await self._dial_address(connection, host, address, port)
            except OverflowError as error:
                raise BootstrapUnreachable(f"{host[:64]}:{port} is no address: {error}") from error
            except OSError as error:
                failure = self._dial_failure(host, port, error)
            finally:
                if connection.state is not State.OPEN:
                    connection.end(BootstrapTimeout("the caller gave up"), tell=False)
        raise failure

    async def _dial_address(self, connection: Connection, host: str, address: str, port: int) -> Connection:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {
                "ssl": self._tls.client,
                "server_hostname": host,
                "ssl_handshake_timeout": self.limits.handshake_s,
            }
        self._connections[connection] = None
        connection.over_tls = bool(options)
        try:
            await loop.create_connection(lambda: connection, address, port, **options)
        except BaseException:
            self.lost(connection)
            raise
        assert connection.outcome is not None
        if await connection.outcome:
            return connection
        # The other side keeps another session with us; it may still be on its way to us.
        assert connection.handshake.peer is not None
        return await self._arrival(connection.handshake.peer.leader)

    async def _arrival(self, leader: LeaderId) -> Connection:
        """The session with `leader`, once it is open; the caller bounds the wait."""
        while (session := self._open.get(leader)) is None:
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = self._arrivals.setdefault(leader, [])
            waiting.append(arrival)
            try:
                await arrival
            finally:
                waiting.remove(arrival)
                if not waiting and self._arrivals.get(leader) is waiting:
                    del self._arrivals[leader]
        return session

    def _dial_failure(self, host: str, port: int, error: OSError) -> SegueError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unauthorized(f"the certificate of {host}:{port} is not valid: {error.verify_message}")
        if isinstance(error, ssl.SSLError) and not_tls(error):
            return PeerRefused(f"{host}:{port} is no TLS peer: {explain_tls(error)}")
        if isinstance(error, ssl.SSLError):
            return BootstrapUnreachable(f"TLS with {host}:{port} failed: {error.reason or error}")
        return BootstrapUnreachable(f"{host}:{port} cannot be reached: {error.strerror or error}")

    # ---- what connections ask (`ConnectionOwner`) ----------------------------------------------------

    def new_handshake(self, dialling: bool) -> Handshake:
        """The handshake of a new connection."""
        me = SessionHello(
            incarnation=self.me.incarnation,
            role=self.role,
            dp_rank=self.me.dp_rank,
            advertised=self._advertised(),
            nonce=self._random_bytes(NONCE_BYTES),
            keyed=self._key is not None,
            # An int would be encoded differently by us and by the peer that decoded a float.
            keepalive_s=float(self.limits.keepalive_s),
        )
        return Handshake(me, dialling=dialling, key=self._key, versions=self.protocol)

    def _advertised(self) -> str:
        host, _, port = self._listen.rpartition(":")
        host = self._advertise or host
        # A listener everywhere is no address: others say the same of theirs.
        return "" if host in ("", "0.0.0.0", "::") else f"{host}:{self._advertise_port or port}"

    def check_address(self, host: str) -> None:
        """Raises Unauthorized for another host without a secret."""
        if self._key is None and not is_loopback(host):
            raise Unauthorized(
                f"{host} is another machine and there is no shared secret: give both sides the same one "
                "(--secret-file; in a KVConfig, secret)"
            )

    def authenticated(self, connection: Connection) -> SessionHandler:
        """The handler of a peer that has proven itself; raises a SegueError to refuse it."""
        self._listener.authenticated(connection)
        hello = connection.handshake.peer
        assert hello is not None
        self._end_predecessor(connection, hello)
        expect = connection.expect
        if expect is not None and hello.leader != expect:
            answers = f"{connection.describe()} answers where {expect}"
            if hello.incarnation == expect.incarnation:
                raise PeerRefused(f"{answers} was expected: an instance has registered the wrong ports")
            raise PeerRestarted(f"{answers} was expected: the peer was restarted")
        if self._closed:
            raise Draining(f"{self.role} {self.me} is leaving")
        # Lingering ends and pending connections have their own bounds and are not counted here.
        proven = sum(1 for c in self._connections if c.handshake.authenticated and c.state is not State.ENDED)
        if proven > self.limits.max_sessions:
            raise OutOfCapacity(f"{self.role} {self.me} already has {self.limits.max_sessions} sessions")
        handler = self._handlers.get(hello.role)
        if handler is None:
            raise PeerRefused(f"a {self.role} instance has no sessions with a {hello.role} instance")
        return handler

    def _end_predecessor(self, connection: Connection, hello: SessionHello) -> None:
        """Another leader where an old one was reached proves that the old one is gone: two
        cannot hold one listening address. Its sessions end now, not after a silence."""
        if connection.dialling:
            # Not what it says of itself: this is where it was reached.
            connection.place = connection.wire.address
        else:
            # Not where it comes from, nor where it listens: behind one address translator, or in two
            # networks with the same addresses, others share both.
            connection.place = _place(hello.advertised, connection.wire.host)
        old = self._places.get(connection.place)
        if old is not None and old.peer.leader != hello.leader:
            old.end(PeerRestarted(f"{old.describe()} was restarted and is now {hello.leader}"), tell=True)

    def next_turn(self) -> int:
        """A number larger than all before, to tell which of two connections came first."""
        self._turns += 1
        return self._turns

    def others(self, connection: Connection) -> list[bytes]:
        """Ids of the other live connections with the same peer."""
        mine = connection.handshake
        assert mine.peer is not None
        return [
            other.handshake.id
            for other in self._connections
            if other is not connection
            and other.state is not State.ENDED
            and other.handshake.authenticated
            and other.handshake.peer is not None
            and other.handshake.peer.leader == mine.peer.leader
        ][:64]

    def decide(self, connection: Connection) -> bool:
        """True to open `connection`, False if another session with its peer stays."""
        old = self._open.get(connection.peer.leader)
        if old is None:
            return True
        # A list from before `old` opened cannot name it: both sides have dialled at the same time.
        fresh = old.opened_at < connection.began_at
        return fresh and old.handshake.id not in connection.handshake.others

    def opened(self, connection: Connection) -> None:
        """The session is open: it replaces an older one, and the handler hears of it."""
        leader = connection.peer.leader
        old = self._open.get(leader)
        if old is not None:
            old.end(PeerLost(f"{old.describe()} gave this session up and opened another"), tell=False)
        told = self._told.get(leader)
        if told is not None:
            # It has ended in this very turn, and its `closed` waits for the next one.
            told.deliver_closed()
        self._refusals.pop(leader, None)
        self._open[leader] = connection
        self._told[leader] = connection
        if connection.place:
            self._places[connection.place] = connection
        self.stats.opened += 1
        for arrival in self._arrivals.pop(leader, []):
            if not arrival.done():
                arrival.set_result(None)
        try:
            connection.handler.opened(connection)
        except Exception:
            # As for `received`: the handler's bug is the handler's; the session itself is sound.
            self.stats.handler_errors += 1
            log.exception("the handler failed on the new session with %s", connection.describe())

    def ended(self, connection: Connection) -> None:
        """The connection has ended; its socket may still be open."""
        hello = connection.handshake.peer
        if hello is not None and self._open.get(hello.leader) is connection:
            del self._open[hello.leader]
            self.stats.ended += 1
            log.info("session ended: %s", connection.error)
        elif not connection.dialling:
            self._not_opened(connection)
        if self._places.get(connection.place) is connection:
            del self._places[connection.place]

    def _not_opened(self, connection: Connection) -> None:
        """Log why a dialling peer has no session: of strangers as `Refusals` has it. Incompatible peers dial
        again for ever: the reason of an authenticated one is a warning once, until it changes."""
        hello, error = connection.handshake.peer, connection.error
        if error is None or error.info.retryable or hello is None or not connection.handshake.authenticated:
            known = hello is not None and connection.handshake.authenticated
            reason = str(error) if known else type(error).__name__
            now = asyncio.get_running_loop().time()
            if line := self._strangers.line(f"no session: {error}", reason, now):
                log.info("%s", line)
            return
        if self._refusals.get(hello.leader) != str(error):
            if len(self._refusals) >= self.limits.max_sessions:
                self._refusals.clear()
            self._refusals[hello.leader] = str(error)
            log.warning("no session with %s: %s", connection.describe(), error)

    def closed(self, connection: Connection, error: SegueError) -> None:
        """Tell the handler of the end of a session that was open."""
        hello = connection.handshake.peer
        if hello is not None and self._told.get(hello.leader) is connection:
            del self._told[hello.leader]
        try:
            connection.handler.closed(connection, error)
        except Exception:
            self.stats.handler_errors += 1
            log.exception("the handler failed on the end of the session with %s", connection.describe())

    def lost(self, connection: Connection) -> None:
        """The socket of `connection` is closed."""
        self._connections.pop(connection, None)
        self._listener.closed(connection)
        if not self._connections and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def batch_begin(self) -> None:
        """Keep what is sent until `batch_end`."""
        self._batch_depth += 1

    def batch_end(self) -> None:
        """Send what was kept, in one write for each session."""
        self._batch_depth -= 1
        if self._batch_depth == 0 and self._batch:
            batch, self._batch = self._batch, []
            for connection in batch:
                connection.wire.flush()

    def batching(self, connection: Connection) -> bool:
        """True while a batch is open; `connection` is flushed at its end."""
        if self._batch_depth == 0:
            return False
        self._batch.append(connection)
        return True

    @property
    def pending(self) -> int:
        """Unauthenticated connections that still hold a socket."""
        return len(self._listener.pending)

    def count(self, what: str) -> None:
        """Add one to a counter of `stats`."""
        setattr(self.stats, what, getattr(self.stats, what) + 1)


def _place(advertised: str, remote_host: str) -> str:
    """The advertised address if it means the same host for everybody: a loopback address does so only for
    peers on this host."""
    host = advertised.rpartition(":")[0]
    return "" if is_loopback(host) and not is_loopback(remote_host) else advertised
