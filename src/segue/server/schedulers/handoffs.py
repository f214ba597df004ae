"""The hand-offs of a role: which request each belongs to, until its pages are its own again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from segue.kv import InvalidRequest, KVReceiver, KVSender, TransferId
from segue.server.schedulers.request_state import RequestState


class Handoffs(Protocol):
    """Makes handles: the `KVManager` in production."""

    def sender(self, transfer: TransferId) -> KVSender: ...
    def receiver(self, transfer: TransferId) -> KVReceiver: ...


HandleT = TypeVar("HandleT", KVSender, KVReceiver)


@dataclass(slots=True)
class RoleTransfer(Generic[HandleT]):
    """A hand-off and its request. The request may have ended; the entry lives until `Release`."""

    state: RequestState
    handle: HandleT
    quarantined: bool = False


def check_free(table: Mapping[TransferId, RoleTransfer[HandleT]], state: RequestState) -> None:
    """Raises InvalidRequest if another request has this very room, attempt and pair."""
    if state.transfer in table:
        raise InvalidRequest(
            f"room {state.ticket.room}, attempt {state.ticket.attempt} is in use; "
            "each request needs a room of its own",
            room=state.ticket.room,
        )
