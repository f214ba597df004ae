"""W3C trace context of a request: what a client says of the span that its request belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The spans of a request as `traceparent`s. `parent` is the client's, `span` the HTTP request's. `child`
    goes to the workers: the inference's span below `span`, or `parent` in a process that exports no spans,
    where `span` is empty. All three are empty for a request without a trace."""

    parent: str = ""
    child: str = ""
    span: str = ""


#: Nobody follows this request.
NO_TRACE = TraceContext()


def passed_on(parent: str) -> TraceContext:
    """The client's span for the workers, in a process that exports no spans."""
    return TraceContext(parent, parent) if parent else NO_TRACE


def traceparent_of(scope: Mapping[str, Any]) -> str:
    """The client's `traceparent`, as version 00; empty if there is none, or one that is not legal."""
    for name, value in scope["headers"]:
        if name == b"traceparent":
            legal = _TRACEPARENT.fullmatch(value) and (not value.startswith(b"00") or len(value) == 55)
            return "00" + value[2:55].decode() if legal else ""
    return ""
