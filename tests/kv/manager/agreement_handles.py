"""Halves of hand-offs in any phase, as the protocol would have left them."""

from __future__ import annotations

from segue.kv.clock import VirtualClock
from segue.kv.errors import ErrorInfo
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import KVPoll, RoomKey
from segue.kv.protocol import events


class Owner:
    clock = VirtualClock()

    def post(self, *batch: events.Event) -> None: ...

    def forget(self, key: RoomKey) -> None: ...


def receiver(room: int, phase: KVPoll, error: ErrorInfo | None = None, metadata: bool = True) -> KVReceiver:
    handle = KVReceiver(Owner(), RoomKey(room))
    told = b"7" if metadata else None
    handle.apply(events.Phase(RoomKey(room), phase, error, metadata=told))
    return handle


def sender(room: int, phase: KVPoll) -> KVSender:
    handle = KVSender(Owner(), RoomKey(room))
    handle.apply(events.Phase(RoomKey(room), phase))
    return handle
