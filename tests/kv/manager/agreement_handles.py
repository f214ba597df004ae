"""Halves of hand-offs in any phase, as the protocol would have left them."""

from __future__ import annotations

from segue.kv.clock import VirtualClock
from segue.kv.errors import ErrorInfo
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import Incarnation, KVPoll, LeaderId, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Metadata

PREFILL, DECODE = LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("b" * 32))


class Owner:
    clock = VirtualClock()

    def post(self, *batch: events.Event) -> None: ...

    def forget(self, transfer: TransferId) -> None: ...


def receiver(room: int, phase: KVPoll, error: ErrorInfo | None = None, metadata: bool = True) -> KVReceiver:
    transfer = TransferId(room, 0, PREFILL, DECODE)
    handle = KVReceiver(Owner(), transfer)
    told = Metadata(transfer=transfer, prompt_tokens=1, first_token=7) if metadata else None
    handle.apply(events.Phase(transfer, phase, error, metadata=told))
    return handle


def sender(room: int, phase: KVPoll) -> KVSender:
    transfer = TransferId(room, 0, PREFILL, DECODE)
    handle = KVSender(Owner(), transfer)
    handle.apply(events.Phase(transfer, phase))
    return handle
