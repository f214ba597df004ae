"""The form of errors and the end of a stream in each API, found by a request's path."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.kv import SegueError
from segue.server.frontend.problems import body_of

_encode = msgspec.json.Encoder().encode


def named_event(event: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), _encode(event))


class Dialect:
    """OpenAI's form; others are derived from it."""

    #: The end of every stream.
    done = b"data: [DONE]\n\n"
    #: Something that clients ignore, for a stream that is quiet.
    comment = b": waiting for tokens\n\n"

    def body(self, error: SegueError, request_id: str) -> dict[str, Any]:
        """The body of an error answer."""
        return body_of(error)

    def event(self, error: SegueError, request_id: str) -> bytes:
        """The event of an error in a stream that has begun, before `done`."""
        return b"data: %b\n\n" % _encode(self.body(error, request_id))


class ResponsesDialect(Dialect):
    """OpenAI's Responses: errors as before, named events."""

    done = b""

    def event(self, error: SegueError, request_id: str) -> bytes:
        found: Any = body_of(error)["error"]
        event = {"type": "error", "sequence_number": 0, **{k: found[k] for k in ("code", "message", "param")}}
        return named_event(event)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesDialect(Dialect):
    """Anthropic's Messages."""

    done = b""
    comment = named_event({"type": "ping"})

    def body(self, error: SegueError, request_id: str) -> dict[str, Any]:
        """See `Dialect.body`."""
        found: Any = body_of(error)["error"]
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        return {
            "type": "error",
            "error": {"type": kind, "message": found["message"]},
            "request_id": request_id,
        }

    def event(self, error: SegueError, request_id: str) -> bytes:
        return named_event(self.body(error, request_id))


_OPENAI, _RESPONSES, _MESSAGES = Dialect(), ResponsesDialect(), MessagesDialect()


def dialect_of(path: str) -> Dialect:
    """The dialect that clients of this path speak."""
    if path.startswith("/v1/messages"):
        return _MESSAGES
    return _RESPONSES if path.startswith("/v1/responses") else _OPENAI
