"""W3C trace context of a request: what a client says of the span that its request belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`parent` is what the client sent, `child` what the workers are told: the same, or the inference's span,
    which is below `span`, the HTTP request's. `span` is empty in a process that exports no spans, all three
    where nobody follows the request."""

    parent: str = ""
    child: str = ""
    span: str = ""


#: Nobody follows this request.
NO_TRACE = TraceContext()


def passed_on(parent: str) -> TraceContext:
    """Without spans of our own the workers are told what the client said."""
    return TraceContext(parent, parent) if parent else NO_TRACE


def traceparent_of(scope: Mapping[str, Any]) -> str:
    """The client's `traceparent`, as version 00; empty if there is none, or one that is not legal."""
    for name, value in scope["headers"]:
        if name == b"traceparent":
            legal = _TRACEPARENT.fullmatch(value) and (not value.startswith(b"00") or len(value) == 55)
            return "00" + value[2:55].decode() if legal else ""
    return ""
