"""One closed set of errors: one code, one exception class and one HTTP status each.

The same record, `ErrorInfo`, goes to the peer, the client, the log, the metric and the trace.
Pure: no socket, thread, clock, torch or HTTP module.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final

import msgspec

#: Characters of an error's text; more are cut.
MAX_ERROR_TEXT = 2000

#: Everything that msgspec raises on bytes that are not what they should be. Deep nesting shows as
#: RecursionError, invalid UTF-8 as UnicodeDecodeError (a ValueError). A decoder of bytes from outside
#: catches all of them.
DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)


class ErrorCode(enum.StrEnum):
    """The closed set of reasons for which a request or a hand-off can fail."""

    BOOTSTRAP_UNREACHABLE = "BOOTSTRAP_UNREACHABLE"
    BOOTSTRAP_TIMEOUT = "BOOTSTRAP_TIMEOUT"
    PEER_REFUSED = "PEER_REFUSED"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    DP_RANK_CONFLICT = "DP_RANK_CONFLICT"
    DP_RANK_OUT_OF_RANGE = "DP_RANK_OUT_OF_RANGE"
    PEER_LOST = "PEER_LOST"
    PEER_RESTARTED = "PEER_RESTARTED"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    METADATA_MISMATCH = "METADATA_MISMATCH"
    RANK_DIVERGENCE = "RANK_DIVERGENCE"
    OUT_OF_CAPACITY = "OUT_OF_CAPACITY"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    ABORTED_BY_CLIENT = "ABORTED_BY_CLIENT"
    INVALID_REQUEST = "INVALID_REQUEST"
    NOT_FOUND = "NOT_FOUND"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    REQUEST_TIMEOUT = "REQUEST_TIMEOUT"
    UNAUTHORIZED = "UNAUTHORIZED"
    STARTING = "STARTING"
    DRAINING = "DRAINING"
    CONFIG = "CONFIG"
    INTERNAL = "INTERNAL"


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one failure, equal on both sides of a hand-off.

    `code` is the reason, `text` a sentence, `phase` the phase of the hand-off in which it failed, `room` the
    request. `retryable`: a new attempt can succeed. `origin` names the instance and rank at which the failure
    began (`prefill 3fa94c01 dp0`), `peer` the other side, `elapsed_s` the time since the request entered
    `origin`, in seconds. All four texts are cut after `MAX_ERROR_TEXT` characters.
    """

    code: ErrorCode
    text: str
    phase: str = ""
    origin: str = ""
    peer: str = ""
    room: int = 0
    retryable: bool = False
    elapsed_s: float = 0.0

    def __post_init__(self) -> None:
        # Also of what a peer says: records are kept, shown and said again.
        for field in ("text", "phase", "origin", "peer"):
            if len(value := getattr(self, field)) > MAX_ERROR_TEXT:
                msgspec.structs.force_setattr(self, field, value[:MAX_ERROR_TEXT])

    def exception(self) -> SegueError:
        """The exception of this record's class, carrying this record unchanged."""
        return _CLASSES[self.code].from_info(self)


class SegueError(Exception):
    """Base of all errors that segue raises on purpose.

    `info` is the record that travels. `code`, `status` (HTTP) and `retryable` are those of the class.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    #: Whole seconds after which a client that got it with 429 or 503 may try again.
    retry_after_s: int = 1

    def __init__(
        self,
        text: str,
        *,
        phase: str = "",
        origin: str = "",
        peer: str = "",
        room: int = 0,
        retryable: bool | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        """`text` says what failed and what to change. `phase`, `origin`, `peer`, `room`, `retryable` and
        `elapsed_s` are fields of the record."""
        super().__init__(text)
        self.info = ErrorInfo(
            code=self.code,
            text=text,
            phase=phase,
            origin=origin,
            peer=peer,
            room=room,
            retryable=type(self).retryable if retryable is None else retryable,
            elapsed_s=elapsed_s,
        )

    @classmethod
    def from_info(cls, info: ErrorInfo) -> SegueError:
        """Rebuild the exception that `info` describes; `info` itself is kept."""
        error = cls(info.text)
        error.info = info
        return error

    def at(self, **where: object) -> SegueError:
        """The same error with empty fields of its record (phase, origin, …) filled in."""
        blank = {k: v for k, v in where.items() if not getattr(self.info, k)}
        self.info = msgspec.structs.replace(self.info, **blank)
        return self


class BootstrapUnreachable(SegueError):
    """The registry, or the peer that it names, cannot be reached."""

    code, status, retryable = ErrorCode.BOOTSTRAP_UNREACHABLE, 503, True


class BootstrapTimeout(SegueError):
    """The registry or the peer did not answer in time; prefill's half: decode gave no destination."""

    code, status, retryable = ErrorCode.BOOTSTRAP_TIMEOUT, 504, True


class PeerRefused(SegueError):
    """The peer declined the session; the text has its reason."""

    code, status = ErrorCode.PEER_REFUSED, 503


class LayoutMismatch(SegueError):
    """Two KV layouts cannot be joined, or one contradicts itself; the text names the field."""

    code, status = ErrorCode.LAYOUT_MISMATCH, 503


class DpRankConflict(SegueError):
    """The request names another DP rank than the instance declares."""

    code, status = ErrorCode.DP_RANK_CONFLICT, 409


class DpRankOutOfRange(SegueError):
    """The instance has no such DP rank."""

    code, status = ErrorCode.DP_RANK_OUT_OF_RANGE, 400


class PeerLost(SegueError):
    """The session to the peer ended: its process died, or it was silent for `Limits.peer_silence_s`."""

    code, status, retryable = ErrorCode.PEER_LOST, 503, True


class PeerRestarted(SegueError):
    """The peer is a new incarnation: what was agreed with the old one is void."""

    code, status, retryable = ErrorCode.PEER_RESTARTED, 503, True


class TransferFailed(SegueError):
    """The transport could not move the bytes, or the two sides disagree about the hand-off."""

    code, status, retryable = ErrorCode.TRANSFER_FAILED, 503, True


class ChecksumMismatch(SegueError):
    """The bytes that landed are not the bytes that were sent."""

    code, status, retryable = ErrorCode.CHECKSUM_MISMATCH, 500, True


class MetadataMismatch(SegueError):
    """The metadata belongs to another hand-off."""

    code, status, retryable = ErrorCode.METADATA_MISMATCH, 500, True


class RankDivergence(SegueError):
    """The ranks of a replica disagree."""

    code, status = ErrorCode.RANK_DIVERGENCE, 500


class OutOfCapacity(SegueError):
    """No memory, slot or credit was free in time."""

    code, status, retryable = ErrorCode.OUT_OF_CAPACITY, 429, True


class DeadlineExceeded(SegueError):
    """The deadline passed."""

    code, status = ErrorCode.DEADLINE_EXCEEDED, 504


class AbortedByClient(SegueError):
    """The client closed the connection, or the engine called `abort` without a reason."""

    code, status = ErrorCode.ABORTED_BY_CLIENT, 499


class InvalidRequest(SegueError):
    """The request is wrong; the text says what to change."""

    code, status = ErrorCode.INVALID_REQUEST, 400


class NotFound(SegueError):
    """No such model or object."""

    code, status = ErrorCode.NOT_FOUND, 404


class RequestTooLarge(SegueError):
    """The body or message is larger than the limit."""

    code, status = ErrorCode.REQUEST_TOO_LARGE, 413


class RequestTimeout(SegueError):
    """The client did not send its request in time."""

    code, status, retryable = ErrorCode.REQUEST_TIMEOUT, 408, True


class Starting(SegueError):
    """No instance can serve yet; the text says which one is missing."""

    code, status, retryable = ErrorCode.STARTING, 503, True


class Unauthorized(SegueError):
    """The secret, API key or certificate is missing or wrong."""

    code, status = ErrorCode.UNAUTHORIZED, 401


class Draining(SegueError):
    """The instance is leaving."""

    code, status, retryable = ErrorCode.DRAINING, 503, True


class ConfigError(SegueError):
    """A setting is wrong or does not work here; a command ends with exit status 2."""

    code, status = ErrorCode.CONFIG, 500


class Internal(SegueError):
    """A bug in segue or a call of the engine that breaks the protocol's order; never a substitute for another
    error."""

    code, status = ErrorCode.INTERNAL, 500


_CLASSES: dict[ErrorCode, type[SegueError]] = {c.code: c for c in SegueError.__subclasses__()}


def meaning_of(code: ErrorCode) -> str:
    """The meaning of `code`, in a sentence or two."""
    return " ".join((_CLASSES[code].__doc__ or "").replace("`", "").split())


def status_of(code: ErrorCode) -> int:
    """The HTTP status that `code` is answered with."""
    return _CLASSES[code].status
