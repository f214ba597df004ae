"""The control channel between a frontend and a replica's leader: typed messages, no addresses.

The frontend sends `Submit` to both leaders of a ticket at once; decode answers `Outputs`; prefill
answers only `Outputs` with an error, so that a failure is known at once on either leg.
"""

from __future__ import annotations

import msgspec

from segue.core.errors import ErrorInfo
from segue.core.request import Output, Request, Ticket


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Frontend → leader: run `request` as `ticket` says."""

    request: Request
    ticket: Ticket


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Frontend → leader: end the request now. Unknown ids are ignored."""

    request_id: str
    reason: ErrorInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Leader → frontend: the results of one engine step, for all of this frontend's requests."""

    outputs: list[Output]


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Leader → frontend, whenever it changed, at most every 100 ms: what placement needs."""

    dp_rank: int
    running: int
    waiting: int
    tokens: int
    pages_free: int
    pages_total: int
    pages_quarantined: int = 0
    draining: bool = False


ControlMessage = Submit | Cancel | Outputs | Load
