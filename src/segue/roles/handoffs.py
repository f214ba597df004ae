"""The hand-offs of a role: which job each belongs to, until its pages are its own again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from segue.conn.handles import KVReceiver, KVSender
from segue.core.errors import Internal, InvalidRequest
from segue.core.types import TransferId
from segue.roles.job import Job


class Handoffs(Protocol):
    """Makes handles: the `KVManager` in production."""

    def sender(self, transfer: TransferId) -> KVSender: ...
    def receiver(self, transfer: TransferId) -> KVReceiver: ...


HandleT = TypeVar("HandleT", KVSender, KVReceiver)


@dataclass(slots=True)
class Entry(Generic[HandleT]):
    """A hand-off and its job. The job may have ended; the entry lives until `Release`."""

    job: Job
    handle: HandleT
    quarantined: bool = False


class HandoffTable(Generic[HandleT]):
    """One table, one key, one removal."""

    def __init__(self) -> None:
        self._entries: dict[TransferId, Entry[HandleT]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def check_free(self, job: Job) -> None:
        """Raises InvalidRequest if another request has this very room, attempt and pair."""
        if job.transfer in self._entries:
            raise InvalidRequest(
                f"room {job.ticket.room}, attempt {job.ticket.attempt} is in use; "
                "each request needs a room of its own",
                room=job.ticket.room,
            )

    def add(self, job: Job, handle: HandleT) -> None:
        """Raises Internal if the transfer is there already."""
        if job.transfer in self._entries:
            raise Internal(f"transfer {job.transfer} is in use", room=job.ticket.room)
        self._entries[job.transfer] = Entry(job, handle)

    def get(self, transfer: TransferId) -> Entry[HandleT] | None:
        return self._entries.get(transfer)

    def remove(self, transfer: TransferId) -> None:
        del self._entries[transfer]
