"""Messages between the two sides of the connector: orders to the worker, reports back. Pure.

`handoff` is a number that the scheduler side gives to each hand-off; it is never used twice.

| order | the worker | then reports |
|---|---|---|
| `ExpectOrder` | `KVManager.expect` | `HandoffEnded`, then `BlocksReleased`, each once |
| `SendOrder` | `KVSender.send`; the KV leaves when it is complete, at the latest with the step that brought the order | |
| `ReceiveOrder` | `KVManager.receive`, then `KVReceiver.publish` | the same two; vLLM gets the request id in `finished_recving` with `HandoffEnded`, once, and in `failed_recving` if it failed |
| `RefuseOrder` | nothing | the id in `finished_recving` and `failed_recving`, once |
| `AbortOrder` | `abort` | nothing by itself: what the hand-off owes |
| `EvictOrder` | `KVSender.evict` | nothing by itself: what the hand-off owes, if no decode has its room |
| `DeclineOrder` | `KVManager.decline` | nothing |

An order for a hand-off that has ended is ignored.
"""  # noqa: E501

from __future__ import annotations

import msgspec

from segue.integrations.vllm.vllm_params import PeerAddress
from segue.kv import ErrorInfo, RoomKey


class ExpectOrder(msgspec.Struct, frozen=True, tag="expect"):
    """Prefill: open a room for `budget_s` seconds."""

    handoff: int
    room: RoomKey
    prompt_tokens: int
    claim: bytes
    budget_s: float
    retain_s: float


class SendOrder(msgspec.Struct, frozen=True, tag="send"):
    """Prefill: send tokens `start` to before `end`. `blocks` hold the prompt from token 0 up to `end`.
    `last`: the prompt ends there, and the (empty) metadata goes with it. `ready`: the KV was complete
    before this step; else it is when this step's forward has ended."""

    handoff: int
    start: int
    end: int
    blocks: list[int]
    last: bool
    ready: bool


class ReceiveOrder(msgspec.Struct, frozen=True, tag="receive"):
    """Decode: take the KV of the prompt from token `prefix_tokens` on into `blocks`, within `budget_s`."""

    handoff: int
    request_id: str
    room: RoomKey
    peer: PeerAddress
    prompt_tokens: int
    prefix_tokens: int
    blocks: list[int]
    claim: bytes
    budget_s: float


class RefuseOrder(msgspec.Struct, frozen=True, tag="refuse"):
    """Decode: fail the load of this request, which vLLM waits for, without asking anybody."""

    request_id: str
    error: ErrorInfo


class AbortOrder(msgspec.Struct, frozen=True, tag="abort"):
    """End the hand-off on both sides."""

    handoff: int
    error: ErrorInfo


class EvictOrder(msgspec.Struct, frozen=True, tag="evict"):
    """Prefill: end the hand-off unless a decode has bound its room."""

    handoff: int
    error: ErrorInfo


class DeclineOrder(msgspec.Struct, frozen=True, tag="decline"):
    """Decode: tell prefill that nobody will take the KV of this room."""

    room: RoomKey
    peer: PeerAddress
    error: ErrorInfo
    claim: bytes


Order = ExpectOrder | SendOrder | ReceiveOrder | RefuseOrder | AbortOrder | EvictOrder | DeclineOrder


class HandoffEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The hand-off succeeded, or failed with `error`. Its blocks may still belong to the peer. `nbytes` of KV
    were moved in `wire_s` seconds."""

    handoff: int
    error: ErrorInfo | None = None
    nbytes: int = 0
    wire_s: float = 0.0


class BlocksReleased(msgspec.Struct, frozen=True, tag="released"):
    """It is proven that no peer reads or writes the blocks of this hand-off any more."""

    handoff: int


Report = HandoffEnded | BlocksReleased

_ORDERS = msgspec.msgpack.Decoder(list[Order])
_REPORTS = msgspec.msgpack.Decoder(list[Report])


def encode(messages: list[Order] | list[Report]) -> bytes:
    """Orders or reports as bytes, so that no pickle of vLLM's carries our classes."""
    return msgspec.msgpack.encode(messages)


def decode_orders(content: bytes) -> list[Order]:
    """The orders in `content`. Raises msgspec.MsgspecError for other bytes."""
    return _ORDERS.decode(content)


def decode_reports(content: bytes) -> list[Report]:
    """The reports in `content`. Raises msgspec.MsgspecError for other bytes."""
    return _REPORTS.decode(content)
