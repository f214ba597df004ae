"""The hand-offs of a role: which request each belongs to, until its pages are its own again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from segue.conn.handles import KVReceiver, KVSender
from segue.core.errors import Internal, InvalidRequest
from segue.core.types import TransferId
from segue.roles.request_state import RequestState


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


class HandoffTable(Generic[HandleT]):
    """One table, one key, one removal."""

    def __init__(self) -> None:
        self._transfers: dict[TransferId, RoleTransfer[HandleT]] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def check_free(self, state: RequestState) -> None:
        """Raises InvalidRequest if another request has this very room, attempt and pair."""
        if state.transfer in self._transfers:
            raise InvalidRequest(
                f"room {state.ticket.room}, attempt {state.ticket.attempt} is in use; "
                "each request needs a room of its own",
                room=state.ticket.room,
            )

    def add(self, state: RequestState, handle: HandleT) -> None:
        """Raises Internal if the transfer is there already."""
        if state.transfer in self._transfers:
            raise Internal(f"transfer {state.transfer} is in use", room=state.ticket.room)
        self._transfers[state.transfer] = RoleTransfer(state, handle)

    def get(self, transfer: TransferId) -> RoleTransfer[HandleT] | None:
        return self._transfers.get(transfer)

    def remove(self, transfer: TransferId) -> None:
        del self._transfers[transfer]
