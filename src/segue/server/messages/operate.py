"""Queries of a command line to a leader, and the answers: typed messages of an operator's session.

The session proves the deployment's secret on both sides, as every other one does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.kv import ErrorInfo, Incarnation, Role
from segue.server.messages.control import Explain, Explained, Load

State = Literal["serving", "draining", "drained"]


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Operator → leader: how are you? The answer is one `Status`."""


class SetDraining(msgspec.Struct, frozen=True, tag=True):
    """Operator → leader: take nothing new from now on, or take it again. The answer is a `Status` now and
    after each change of the state, for as long as the session is open."""

    draining: bool


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Operator → leader: drain as for a `SetDraining`, which has the same answers. Once all leaders of the
    instance have, `turn` has each leave and come back as `role`, in the incarnation that `successor`
    says; one that is not drained then stays, and answers what it is."""

    role: Role
    turn: bool = False


class PairStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of a leader: the transport between them, what it has carried since their session was opened,
    and how many hand-offs with it have succeeded and failed since this leader started."""

    peer: str
    transport: str
    bytes_per_s: float = 0.0
    nbytes: int = 0
    succeeded: int = 0
    failed: int = 0


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Leader → operator: what it is doing. `drained`: it takes nothing new, its tables are empty and no page
    is in quarantine, so that its process may be ended. `frontends` have a session with it."""

    role: Role
    state: State
    version: str
    uptime_s: float
    load: Load
    pairs: list[PairStatus] = []
    frontends: list[Incarnation] = []


class OperationRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """Leader → operator: it does not do what was asked."""

    error: ErrorInfo


OperatorMessage = GetStatus | SetDraining | Switch | Status | OperationRefused | Explain | Explained
