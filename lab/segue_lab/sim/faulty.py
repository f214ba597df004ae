"""A peer with a bug: now and then it says something else than its half of a hand-off has decided.

A message is changed where it arrives: what the half that hears it holds at that moment is known then.
The hand-off must end on both sides, or go on where the message could be told apart; no other one is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from segue.kv.errors import TransferFailed
from segue.kv.ids import Role, Span, TransferId
from segue.kv.protocol.messages import (
    Abort,
    Accepted,
    ChunkPosted,
    Committed,
    Destination,
    Failed,
    Gone,
    HandoffMessage,
    Metadata,
    Moved,
)
from segue_lab.sim.node_views import KVView

#: Messages that are heard instead of one.
Heard = list[HandoffMessage]
Change = Callable[[KVView, Any], Heard]


def _with(**fields: Any) -> Change:
    """These fields are wrong."""
    return lambda _node, message: [structs.replace(message, **fields)]


def _off(field: str, by: int) -> Change:
    """A number is wrong."""
    return lambda _node, message: [structs.replace(message, **{field: getattr(message, field) + by})]


def _again(_node: KVView, message: Any) -> Heard:
    """The message arrives twice, which changes nothing."""
    return [message, message]


def _again_with(field: str, by: int) -> Change:
    """The message arrives twice, the second time with another number."""
    return lambda _n, message: [message, structs.replace(message, **{field: getattr(message, field) + by})]


def _span(shift: int, longer: int) -> Change:
    def change(_node: KVView, message: Any) -> Heard:
        span = message.span
        return [structs.replace(message, span=Span(span.start + shift, span.end + shift + longer))]

    return change


def _empty(_node: KVView, message: ChunkPosted) -> Heard:
    start = message.span.start
    return [structs.replace(message, span=Span(start, start), final=False)]


def _other_end(_node: KVView, message: ChunkPosted) -> Heard:
    return [structs.replace(message, final=not message.final)]


def _checksum(node: KVView, message: ChunkPosted) -> Heard:
    if not message.nbytes:  # nothing was sent with it, so nothing is compared
        return _again(node, message)
    # It must be noticed, as a bit that has changed is.
    node.state.flipped.add(message.transfer)
    return [structs.replace(message, checksum=(message.checksum or 0) ^ 1)]


def _other_source(node: KVView, message: ChunkPosted) -> Heard:
    """The source is another rank that may send there: then its bytes have another checksum."""
    node.state.flipped.add(message.transfer)
    return [structs.replace(message, source=message.source + 1)]


def _moved(_node: KVView, message: ChunkPosted) -> Heard:
    return [Moved(message.transfer, 7), message]


def _pages(change: Callable[[list[int]], list[int]]) -> Change:
    return lambda _node, message: [structs.replace(message, pages=change(list(message.pages)))]


def _used_epoch(node: KVView, message: Destination) -> Heard:
    """The epoch of another hand-off that is open with the same peer."""
    exchange, transfer = node.exchange, message.transfer
    others = [
        epoch
        for (peer, epoch), machine in exchange._epochs.items()
        if peer == transfer.decode and machine.transfer != transfer
    ]
    waits = transfer in exchange.machines
    return [structs.replace(message, epoch=others[0] if others and waits else 0)]


def _early_end(_node: KVView, message: Destination) -> Heard:
    return [message, Committed(message.transfer)]


def _unknown(node: KVView, transfer: TransferId) -> TransferId:
    """A hand-off that nobody asked for."""
    return structs.replace(transfer, room=node.rng.getrandbits(63) or 1)


def _invented(node: KVView, message: Destination) -> Heard:
    """Destinations of hand-offs that nobody asked for, which end in each way; and words about others."""
    error = TransferFailed("injected: it was never asked for").info
    heard: Heard = [message]
    for end in (Committed, Gone, Abort, None):
        one = _unknown(node, message.transfer)
        heard.append(structs.replace(message, transfer=one))
        heard.append(Failed(one, error) if end is None else end(one))
    heard += [Abort(_unknown(node, message.transfer)), Failed(_unknown(node, message.transfer), error)]
    return heard


def _astray(_node: KVView, message: Any) -> Heard:
    """Words that this side is never told, and one about a hand-off of others."""
    transfer = message.transfer
    wrong: HandoffMessage = Accepted(transfer) if isinstance(message, Destination) else Committed(transfer)
    others = structs.replace(transfer, prefill=transfer.decode, decode=transfer.prefill)
    return [message, wrong, structs.replace(message, transfer=others)]


CHUNK: tuple[Change, ...] = (
    _other_source,
    _off("sequence", 1),
    _off("sequence", -1),
    _off("nbytes", 1),
    _with(every=0),
    _span(1, 0),
    _span(0, 4096),
    _empty,
    _other_end,
    _checksum,
    _moved,
    _again,
    _again_with("nbytes", 1),
)
DESTINATION: tuple[Change, ...] = (
    _with(transport="another"),
    _with(budget_s=float("inf")),
    _with(prefix_tokens=4096),
    _with(prefix_tokens=-1),
    _off("plan_hash", 1),
    _off("prompt_tokens", 1),
    _pages(lambda pages: [*pages, 0]),
    _pages(lambda pages: [-1] * len(pages)),
    _pages(lambda pages: pages[:1] * len(pages)),
    _used_epoch,
    _used_epoch,
    _early_end,
    _invented,
    _astray,
    _again,
)
METADATA: tuple[Change, ...] = (_again_with("prompt_tokens", 1), _again, _astray)
#: Kinds of messages that are changed, and the changes.
KINDS: tuple[tuple[type[HandoffMessage], Change], ...] = (
    *((ChunkPosted, change) for change in CHUNK),
    *((Destination, change) for change in DESTINATION),
    *((Metadata, change) for change in METADATA),
)


class Hearing:
    """The messages that one node gets instead of its peers' messages."""

    def __init__(self, node: KVView) -> None:
        self._node = node
        self._waiting: list[int] = []

    def arm(self, amount: int) -> None:
        """Change the next message of a kind that this node is told at all."""
        prefill = self._node.spec.role is Role.PREFILL
        fitting = [at for at, (kind, _) in enumerate(KINDS) if (kind is Destination) == prefill]
        self._waiting.append(fitting[amount % len(fitting)])

    def heard(self, message: HandoffMessage) -> Heard:
        """`message`, or what comes instead."""
        at = next((at for at in self._waiting if isinstance(message, KINDS[at][0])), None)
        if at is None:
            return [message]
        self._waiting.remove(at)
        node = self._node
        heard = KINDS[at][1](node, message)
        node.state.misheard.add(message.transfer.room)
        node.state.counts["wrong messages"] += 1
        node.world.note(node.name, f"hears instead of room {message.transfer.room:x}: {heard}")
        return heard


__all__ = ["KINDS", "Hearing"]
