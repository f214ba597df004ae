"""One TCP (or TLS) connection of a session: handshake, messages, backlog, end.

All methods run on the event loop. The `SessionNode`, here seen as `ConnectionOwner`, decides about several
connections: which one replaces another, and how many may be unauthenticated.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from segue.kv.errors import (
    DECODE_ERRORS,
    BootstrapUnreachable,
    Internal,
    PeerLost,
    PeerRefused,
    RequestTooLarge,
    SegueError,
)
from segue.kv.ids import LeaderId
from segue.kv.limits import Limits
from segue.kv.session import tls
from segue.kv.session.api import PeerInfo, SessionHandler
from segue.kv.session.frames import (
    HANDSHAKE_FRAME_BYTES,
    HEADER,
    KIND_MESSAGE,
    KIND_SESSION,
    Bye,
    Duplicate,
    Opened,
    Ping,
    SessionAccepted,
    SessionFrame,
    SessionRefused,
    Welcome,
    decode_frame,
    decode_preamble,
    encode_frame,
    encode_message,
    encode_preamble,
)
from segue.kv.session.inbox import ChangedFrame, Inbox, LongFrame
from segue.kv.session.keepalive import Keepalive
from segue.kv.session.session_handshake import Handshake, Progress
from segue.kv.session.wire import Wire
from segue.kv.versions import Versions

log = logging.getLogger(__name__)

T = TypeVar("T")

_PING = encode_frame(Ping())


class ConnectionOwner(Protocol):
    """The node of a connection.

    - `check_address` and `authenticated` may raise a SegueError to refuse the peer; the latter answers whose
      session it is to be. `next_turn` is a number larger than all before, to tell what came first.
    - `others` are ids of the other connections with the same peer that are still alive here. Where we decide,
      `decide` is True to open, and False if another session with this peer stays.
    - `opened`, `ended` and `lost` (of the socket) hear of a connection; `closed` tells the handler of the end
      of a session that was open.
    - While a batch is open `batching` is True, and `connection.wire.flush` is called at its end.
    """

    limits: Limits
    encoder: msgspec.msgpack.Encoder
    decoder: msgspec.msgpack.Decoder[object]
    protocol: Versions

    def new_handshake(self, dialling: bool) -> Handshake: ...
    def check_address(self, host: str) -> None: ...
    def authenticated(self, connection: Connection) -> SessionHandler: ...
    def next_turn(self) -> int: ...
    def others(self, connection: Connection) -> list[bytes]: ...
    def decide(self, connection: Connection) -> bool: ...
    def opened(self, connection: Connection) -> None: ...
    def ended(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection, error: SegueError) -> None: ...
    def lost(self, connection: Connection) -> None: ...
    def batch_begin(self) -> None: ...
    def batch_end(self) -> None: ...
    def batching(self, connection: Connection) -> bool: ...
    def count(self, what: str) -> None: ...


class State(enum.Enum):
    """The state of a connection. ENDED is final."""

    PREAMBLE = enum.auto()
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()
    ENDED = enum.auto()


class Connection(asyncio.BufferedProtocol):
    """Implements `segue.kv.session.api.Session` once it is open."""

    def __init__(self, owner: ConnectionOwner, *, dialling: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.dialling = dialling
        #: Done when a dialled connection is open (True) or found to be a duplicate (False).
        self.outcome: asyncio.Future[bool] | None = loop.create_future() if dialling else None
        self.state = State.PREAMBLE
        self.handshake = owner.new_handshake(dialling)
        self.handler: SessionHandler  # known once the peer is authenticated
        self.expect: LeaderId | None = None
        #: Where the peer listens, if it does: no two processes hold one address.
        self.place = ""
        self.error: SegueError | None = None
        #: The node's turns at which it was made and opened.
        self.began_at = self.opened_at = 0
        #: TLS lies under this (dialled) connection.
        self.over_tls = False
        self._refuse_with: SegueError | None = None
        self._owner = owner
        self._loop = loop
        self._peer: PeerInfo | None = None
        self._sent_hello: bytes | None = None
        self._end: asyncio.Future[None] | None = None
        self.wire = Wire(loop)
        self._closed_due = False
        self._deadline: asyncio.TimerHandle | None = None
        self._keepalive = Keepalive(loop, owner.limits, lambda: self._write(_PING), self._silent)
        self._inbox = Inbox()
        self._max_out_bytes = HANDSHAKE_FRAME_BYTES

    # ---- the face -------------------------------------------------------------------------------

    @property
    def peer(self) -> PeerInfo:
        """The peer at the other end; known from `accept` on."""
        assert self._peer is not None
        return self._peer

    def send(self, message: msgspec.Struct) -> None:
        """See `Session.send`. Raises RequestTooLarge, and sends nothing, if the encoded message is
        larger than the peer takes; TypeError if it cannot be encoded. The session lives on."""
        if self.state is not State.OPEN:
            return
        frame = encode_message(self._owner.encoder, message)
        if len(frame) - HEADER.size > self._max_out_bytes:
            raise RequestTooLarge(
                f"a {type(message).__name__} of {len(frame) - HEADER.size} bytes is larger than the "
                f"{self._max_out_bytes} bytes that {self.describe()} takes in one message"
            )
        self._write(frame)
        backlog = self.wire.backlog_bytes
        if backlog > self._owner.limits.max_session_backlog_bytes:
            error = PeerLost(
                f"{self.describe()} does not read: {backlog} bytes wait to be sent, the limit is "
                f"{self._owner.limits.max_session_backlog_bytes}"
            )
            self._end_later(error, tell=False)

    @property
    def closing(self) -> bool:
        """See `Session.closing`."""
        return self._closed_due

    def close(self, error: SegueError | None = None) -> None:
        """See `Session.close`. `SessionHandler.closed` follows in the loop's next turn."""
        self._end_later(error or PeerLost(f"the session with {self.describe()} was closed"), tell=True)

    async def ended(self) -> None:
        """See `Session.ended`."""
        if self.state is not State.ENDED:
            if self._end is None:
                self._end = self._loop.create_future()
            await asyncio.shield(self._end)

    def describe(self) -> str:
        """The connection in texts: role, leader and address of the peer."""
        hello = self.handshake.peer
        address = self._peer.address if self._peer else self.wire.address
        return address if hello is None else f"{hello.role} {hello.leader} at {address}"

    # ---- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.wire.made(transport)
        self._keepalive.heard_at = self._keepalive.sent_at = self._loop.time()
        self.began_at = self._owner.next_turn()
        if self.state is State.ENDED:  # cancelled while it was being made
            self.wire.abort()
            return
        self._deadline = self._loop.call_later(self._owner.limits.handshake_s, self._handshake_late)
        if self._refuse_with is not None:
            self._write(encode_preamble(self._owner.protocol))
            self.refuse(self._refuse_with)
            return
        try:
            self._owner.check_address(self.wire.host)
        except SegueError as error:
            self.refuse(error)
            return
        self._write(encode_preamble(self._owner.protocol))
        if self.dialling:
            self._send_frame(self.handshake.me)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.space()

    def buffer_updated(self, nbytes: int) -> None:
        if self.state is State.ENDED:
            return  # lingering: read on only to see the peer's end
        self._keepalive.heard_at = self._loop.time()
        self._inbox.add(nbytes)
        self._owner.batch_begin()
        try:
            self._parse()
        finally:
            self._owner.batch_end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.wire.gone()
        cause = "the peer closed the connection" if exc is None else str(exc) or type(exc).__name__
        if self.state is State.OPEN:
            self.end(PeerLost(f"the session with {self.describe()} broke: {cause}"), tell=False)
        else:
            text = f"{self.describe()} left during the handshake: {cause}"
            if self.over_tls and self.handshake.peer is None:
                # With TLS 1.3 the dialler hears nothing when the listener rejects its certificate.
                text += "; it may not accept our --tls-cert (then its log says why)"
            self.end(BootstrapUnreachable(text), tell=False)
        self._owner.lost(self)

    # ---- reading --------------------------------------------------------------------------------

    def _parse(self) -> None:
        if self.state is State.PREAMBLE and not self._parse_preamble():
            return
        try:
            while self.state is not State.ENDED and (frame := self._inbox.next_frame()) is not None:
                self._on_frame(*frame)
        except ChangedFrame as changed:
            self._changed(str(changed))
        except LongFrame as long:
            self._violation(str(long))

    def _parse_preamble(self) -> bool:
        preamble = self._inbox.preamble()
        if preamble is None:
            return False
        ours = self._owner.protocol
        try:
            theirs = decode_preamble(preamble)
        except ValueError:
            self._owner.count("bad_frames")
            text = f"{self.describe()} does not speak the segue session protocol"
            if preamble[0] == tls.HANDSHAKE_RECORD:
                text = f"{self.describe()} speaks TLS and this side does not; {tls.GIVE_BOTH}"
                log.warning("%s", text)
            self.end(PeerRefused(text), tell=False)
            return False
        if not self.handshake.meet(theirs):
            me, peer = self.handshake.me, self.describe()
            text = f"no session protocol in common: {me.role} {me.leader} speaks {ours}, {peer}"
            self.refuse(PeerRefused(f"{text} speaks {theirs}; run segue versions that meet on both sides"))
            return False
        self.state = State.HANDSHAKE
        if not self.dialling:
            self._send_frame(self.handshake.me)
        return True

    def _on_frame(self, kind: int, body: memoryview) -> None:
        if self.state is State.OPEN and kind == KIND_MESSAGE:
            self._on_message(body)
        elif kind == KIND_SESSION:
            self._on_session_frame(body)
        else:
            self._violation(f"a frame of kind {kind} in state {self.state.name}")

    def _on_session_frame(self, body: memoryview) -> None:
        try:
            frame = decode_frame(body)
        except DECODE_ERRORS as error:
            self._violation(f"a frame that does not decode: {error}")
            return
        if self.state is State.HANDSHAKE:
            self._on_handshake(frame)
        elif isinstance(frame, Bye):
            self.end(frame.error.exception(), tell=False)
        elif not isinstance(frame, Ping):
            self._violation(f"a {type(frame).__name__} on an open session")

    def _on_message(self, body: memoryview) -> None:
        try:
            message = self._owner.decoder.decode(body)
        except DECODE_ERRORS as error:
            self._violation(f"a message that does not decode: {error}")
            return
        try:
            self.handler.received(self, message)
        except Exception:
            # By contract the handler has its own error boundary; one request's bug must not
            # end the session under all the others.
            self._owner.count("handler_errors")
            log.exception("the handler failed on a %s from %s", type(message).__name__, self.describe())

    def _changed(self, what: str) -> None:
        """The network's fault and not the peer's: it may be tried again."""
        self._spoiled(f"from {self.describe()} came {what}", BootstrapUnreachable)

    def _violation(self, what: str) -> None:
        """The peer sent what it may not send: counted, logged once, and only its session ends."""
        # It quotes the peer, who must not be able to write lines of its own into our log.
        what = what[:500].encode("unicode_escape").decode()
        self._spoiled(f"{self.describe()} sent {what}", PeerRefused)

    def _spoiled(self, text: str, before_it_is_open: type[SegueError]) -> None:
        self._owner.count("bad_frames")
        log.warning("%s: the session ends", text)
        self.end((PeerLost if self.state is State.OPEN else before_it_is_open)(text), tell=True)

    # ---- the handshake --------------------------------------------------------------------------

    def _on_handshake(self, frame: SessionFrame) -> None:
        try:
            progress = self.handshake.receive(frame, self._owner.limits.peer_silence_s)
            self._advance(progress)
        except SegueError as error:
            self.refuse(error)

    def _advance(self, progress: Progress) -> None:
        handshake, owner = self.handshake, self._owner
        match progress:
            case Progress.SEND_PROOF:
                self._send_frame(handshake.proof_frame())
            case Progress.AUTHENTICATED:
                self._inbox.max_frame_bytes = owner.limits.max_frame_bytes
                self.handler = owner.authenticated(self)
                if not self.dialling:
                    self._send_frame(handshake.proof_frame())
                    self._send_welcome()
            case Progress.PAYLOAD:
                self._on_payload()
            case Progress.DECIDE:
                self._decide()
            case Progress.OPEN:
                self._open()
            case Progress.DUPLICATE:
                self._duplicate()
            case Progress.REFUSED:
                assert handshake.refusal is not None
                self.end(handshake.refusal.exception(), tell=False)
            case Progress.WAIT:
                pass

    def _introduction(self) -> bytes:
        """Our description for the peer, which does not change within a session."""
        if self._sent_hello is None:
            self._sent_hello = self._ask("introduce itself", self.handler.hello)
        return self._sent_hello

    def _send_welcome(self) -> None:
        payload = self._introduction()
        limit, others = self._owner.limits.max_frame_bytes, self._owner.others(self)
        self._send_frame(Welcome(payload=payload, max_frame_bytes=limit, others=others))

    def _on_payload(self) -> None:
        handshake = self.handshake
        hello, welcome = handshake.peer, handshake.welcome
        assert hello is not None
        assert welcome is not None
        self._max_out_bytes = min(welcome.max_frame_bytes, self._owner.limits.max_frame_bytes)
        self._peer = PeerInfo(
            leader=hello.leader,
            role=hello.role,
            address=self.place or self.wire.address,
            hello=welcome.payload,
            sent=self._introduction(),
        )
        self._ask("judge its peer", self.handler.accept, self._peer)
        if self.dialling:
            self._send_welcome()
        elif handshake.decides:
            self._decide()
        else:
            self._send_frame(SessionAccepted(self._owner.others(self)))

    def _ask(self, what: str, question: Callable[..., T], *about: object) -> T:
        """Ask the handler something. Its refusal is the peer's to hear, and so is its bug, as Internal."""
        try:
            return question(*about)
        except SegueError:
            raise
        except Exception as error:
            self._owner.count("handler_errors")
            log.exception("the handler failed to %s in a session with %s", what, self.describe())
            raise Internal(f"the owner of the session failed to {what}: {error}") from error

    def _decide(self) -> None:
        if self._owner.decide(self):
            self._send_frame(Opened())
            self._open()
        else:
            self._send_frame(Duplicate())
            self._duplicate()

    def _open(self) -> None:
        self.state = State.OPEN
        self.opened_at = self._owner.next_turn()
        if self._deadline is not None:
            self._deadline.cancel()
        self._inbox.opened()
        self._keepalive.start()
        self._owner.opened(self)
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(True)

    def _duplicate(self) -> None:
        """Another session with this peer stays. Not an error; nobody was told that this one began."""
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(False)
        self.end(PeerLost("another session with the same peer is already open"), tell=False, linger=True)

    def _handshake_late(self) -> None:
        limit_s = self._owner.limits.handshake_s
        self._owner.count("handshakes_late")
        text = f"{self.describe()} did not finish the handshake within {limit_s} s"
        self.end(BootstrapUnreachable(text), tell=False)

    # ---- writing --------------------------------------------------------------------------------

    def _send_frame(self, frame: SessionFrame) -> None:
        self._write(encode_frame(frame))

    def _write(self, data: bytes | bytearray) -> None:
        self._keepalive.sent_at = self._loop.time()
        self.wire.write(data, later=self._owner.batching(self))

    # ---- the end --------------------------------------------------------------------------------

    def refuse(self, error: SegueError) -> None:
        """Before the session is open: tell the peer why there will be none."""
        self._owner.count("refused")
        self.end(error, tell=True)

    def end(self, error: SegueError, *, tell: bool, linger: bool = False) -> None:
        """End now; `tell` sends the reason first, and lingers. Also delivers a `closed` that is still due.
        Called from the top of the loop's stack only."""
        self._stop(error, tell=tell, linger=linger or tell)
        self.deliver_closed()

    def _silent(self, silence_s: float) -> None:
        self.end(PeerLost(f"{self.describe()} has been silent for {silence_s:.1f} s"), tell=True)

    def _end_later(self, error: SegueError, *, tell: bool) -> None:
        """Like `end`, but `closed` comes in the loop's next turn: the caller is the handler itself."""
        if self._stop(error, tell=tell, linger=tell):
            self._loop.call_soon(self.deliver_closed)

    def _stop(self, error: SegueError, *, tell: bool, linger: bool) -> bool:
        if self.state is State.ENDED:
            return False
        was_open, self.state, self.error = self.state is State.OPEN, State.ENDED, error
        self._closed_due = was_open
        self._keepalive.stop()
        if self._deadline is not None:
            self._deadline.cancel()
        if tell and not self.wire.lost:
            self._write(encode_frame(Bye(error.info) if was_open else SessionRefused(error.info)))
        if linger:
            self.wire.linger()
        else:
            self.wire.abort()
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # seen: a dialler that gave up does not fetch it
        if self._end is not None:
            self._end.set_result(None)
        self._inbox.drop()
        self._owner.ended(self)
        return True

    def refuse_when_made(self, error: SegueError) -> None:
        """See `PendingProtocol`."""
        self._refuse_with = error

    def cut(self, error: SegueError) -> None:
        """See `PendingProtocol`; also for one that has ended and lingers."""
        self.end(error, tell=False)
        self.wire.abort()
        # uvloop does not call `connection_lost` for a connection that was never quite made.
        self._owner.lost(self)

    def deliver_closed(self) -> None:
        """Tell the owner of the end now, if that is still due."""
        if self._closed_due:
            self._closed_due = False
            assert self.error is not None
            self._owner.closed(self, self.error)
