"""One closed set of errors, one exception tree, one HTTP status each.

    SegueError
    ├── BootstrapUnreachable   503   the registry, or the peer it names, cannot be reached
    ├── BootstrapTimeout       504   the registry or the peer did not answer in time
    ├── PeerRefused            503   the peer declined the session, with its reason
    ├── LayoutMismatch         503   the two KV layouts cannot be joined
    ├── DpRankConflict         409   the request pins another DP rank than the instance declares
    ├── DpRankOutOfRange       400   no such DP rank
    ├── PeerLost               503   the session to the peer ended
    ├── PeerRestarted          503   the peer is a new incarnation
    ├── TransferFailed         503   the transport could not move the bytes
    ├── ChecksumMismatch       500   the bytes that landed are not the bytes that were sent
    ├── MetadataMismatch       500   the metadata belongs to another transfer
    ├── RankDivergence         500   ranks of a replica disagree
    ├── OutOfCapacity          429   no memory, slot or credit in time
    ├── DeadlineExceeded       504   the request's deadline passed
    ├── AbortedByClient        499   the client closed the connection
    ├── InvalidRequest         400   the request is wrong; the text says what to change
    ├── NotFound               404   no such model or object
    ├── RequestTooLarge        413   the body is larger than the limit
    ├── RequestTimeout         408   the client did not send its request in time
    ├── Unauthorized           401   no or a wrong secret
    ├── Starting               503   nobody could serve yet; the text says what is waited for
    ├── Draining               503   the instance is leaving
    ├── ConfigError             -    a setting is wrong; exit status 2
    └── Internal               500   a bug; never a substitute for one of the others

The same record, `ErrorInfo`, goes to the peer, the client, the log, the metric and the trace.
Pure: no socket, thread, clock, torch or HTTP module.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final

import msgspec

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
    """One failure as it travels: what, in which phase, where it began, and whether to try again.

    `origin` names the instance and rank at which the failure began (`prefill 3fa94c01 dp0`),
    `peer` the other side, `elapsed_s` the time since the request entered `origin`, in seconds.
    """

    code: ErrorCode
    text: str
    phase: str = ""
    origin: str = ""
    peer: str = ""
    room: int = 0
    retryable: bool = False
    elapsed_s: float = 0.0

    def exception(self) -> SegueError:
        """The exception of this record's class, carrying this record unchanged."""
        return _CLASSES[self.code].from_info(self)


class SegueError(Exception):
    """Base of all errors that segue raises on purpose."""

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
        super().__init__(text)
        self.info = ErrorInfo(
            code=self.code,
            text=text[:MAX_ERROR_TEXT],
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
    code, status, retryable = ErrorCode.BOOTSTRAP_UNREACHABLE, 503, True


class BootstrapTimeout(SegueError):
    code, status, retryable = ErrorCode.BOOTSTRAP_TIMEOUT, 504, True


class PeerRefused(SegueError):
    code, status = ErrorCode.PEER_REFUSED, 503


class LayoutMismatch(SegueError):
    code, status = ErrorCode.LAYOUT_MISMATCH, 503


class DpRankConflict(SegueError):
    code, status = ErrorCode.DP_RANK_CONFLICT, 409


class DpRankOutOfRange(SegueError):
    code, status = ErrorCode.DP_RANK_OUT_OF_RANGE, 400


class PeerLost(SegueError):
    code, status, retryable = ErrorCode.PEER_LOST, 503, True


class PeerRestarted(SegueError):
    code, status, retryable = ErrorCode.PEER_RESTARTED, 503, True


class TransferFailed(SegueError):
    code, status, retryable = ErrorCode.TRANSFER_FAILED, 503, True


class ChecksumMismatch(SegueError):
    code, status, retryable = ErrorCode.CHECKSUM_MISMATCH, 500, True


class MetadataMismatch(SegueError):
    code, status, retryable = ErrorCode.METADATA_MISMATCH, 500, True


class RankDivergence(SegueError):
    code, status = ErrorCode.RANK_DIVERGENCE, 500


class OutOfCapacity(SegueError):
    code, status, retryable = ErrorCode.OUT_OF_CAPACITY, 429, True


class DeadlineExceeded(SegueError):
    code, status = ErrorCode.DEADLINE_EXCEEDED, 504


class AbortedByClient(SegueError):
    code, status = ErrorCode.ABORTED_BY_CLIENT, 499


class InvalidRequest(SegueError):
    code, status = ErrorCode.INVALID_REQUEST, 400


class NotFound(SegueError):
    code, status = ErrorCode.NOT_FOUND, 404


class RequestTooLarge(SegueError):
    code, status = ErrorCode.REQUEST_TOO_LARGE, 413


class RequestTimeout(SegueError):
    code, status, retryable = ErrorCode.REQUEST_TIMEOUT, 408, True


class Starting(SegueError):
    code, status, retryable = ErrorCode.STARTING, 503, True


class Unauthorized(SegueError):
    code, status = ErrorCode.UNAUTHORIZED, 401


class Draining(SegueError):
    code, status, retryable = ErrorCode.DRAINING, 503, True


class ConfigError(SegueError):
    code, status = ErrorCode.CONFIG, 500


class Internal(SegueError):
    code, status = ErrorCode.INTERNAL, 500


_CLASSES: dict[ErrorCode, type[SegueError]] = {c.code: c for c in SegueError.__subclasses__()}


def status_of(code: ErrorCode) -> int:
    """The HTTP status that `code` is answered with."""
    return _CLASSES[code].status
