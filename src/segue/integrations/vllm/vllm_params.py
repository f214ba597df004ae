"""`kv_transfer_params` of both flows: from routers to prefill and decode, and prefill's answer. Pure.

Sequential: prefill answers with a `segue` object that names the room, and the router gives the answer to
decode unchanged. Concurrent: the router gives both sides one `transfer_id` at once, and decode the address of
prefill's `GET /query`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from segue.kv import MAX_ROOM, Incarnation, InvalidRequest, LeaderId, Unauthorized

#: Fields that other connectors, routers and vLLM itself use (vLLM adds `remote_prefill_cached_tokens` to each
#: answer of prefill). Decode does not need them; their values are ignored.
IGNORED = frozenset(
    {
        "remote_block_ids",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
        "remote_prefill_cached_tokens",
        "prompt_token_ids",
    }
)
_ROOM_DOMAIN = b"segue vllm room 1"
_SIGN_DOMAIN = b"segue vllm params 1\0"
_INCARNATION = re.compile(r"[0-9a-f]{32}")
_HTTP_ADDRESS = re.compile(
    r"(?:http://)?(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9._-]{1,255})):([0-9]{1,5})/?"
)

_Port = Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]*$")]


class RoomAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `segue` object in prefill's answer: the room, and the leader that has it.

    `room` is decimal text, because JSON libraries round large integers. `tokens` is the prompt's length.
    `signature` is an HMAC-SHA256 in hex over the other fields under the deployment's secret (empty without
    one).
    """

    room: Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,19}$")]
    incarnation: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
    dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0
    host: _Host
    port: _Port
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    signature: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}$")] = ""


class PeerAddress(msgspec.Struct, frozen=True):
    """A prefill leader and where it is reached. `query`: `host`:`port` answers `GET /query`, which names the
    address of the session; else it is that address."""

    leader: LeaderId
    host: str
    port: int
    query: bool = False


@dataclass(frozen=True, slots=True)
class SendParams:
    """A request to prefill: compute the prompt and hand its KV over. `room` is 0 in the sequential flow."""

    room: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveParams:
    """A request to decode: take the prompt's KV from prefill. `tokens` is 0 where prefill did not say it,
    `signed`: the signature was verified."""

    room: int
    peer: PeerAddress
    tokens: int = 0
    signed: bool = False


class _TransferParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    remote_engine_id: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    remote_bootstrap_addr: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    segue: RoomAddress | None = None


def parse_params(
    params: Mapping[str, object] | None, secret: bytes = b""
) -> SendParams | ReceiveParams | None:
    """The hand-off that `kv_transfer_params` ask for; None: none.

    Raises InvalidRequest that names an unknown or wrong field, Unauthorized for a wrong signature.
    """
    if params is None:
        return None
    try:
        wire = msgspec.convert({k: v for k, v in params.items() if k not in IGNORED}, _TransferParams)
    except (msgspec.ValidationError, TypeError, AttributeError, UnicodeError) as error:
        raise InvalidRequest(f"kv_transfer_params: {str(error)[:500]}") from None
    if wire.do_remote_decode and wire.do_remote_prefill:
        raise InvalidRequest("kv_transfer_params: do_remote_decode and do_remote_prefill cannot both be true")
    if wire.do_remote_decode:
        return SendParams(room_of(wire.transfer_id) if wire.transfer_id else 0)
    if not wire.do_remote_prefill:
        return None
    if wire.segue is not None:
        return _from_answer(wire.segue, secret)
    if wire.transfer_id is None:
        raise InvalidRequest(
            "kv_transfer_params: do_remote_prefill needs the object segue of prefill's answer, or "
            "transfer_id with remote_bootstrap_addr and remote_engine_id"
        )
    return ReceiveParams(room_of(wire.transfer_id), _query_address(wire))


def room_of(transfer_id: str) -> int:
    """The room of a router's `transfer_id`: the same number on both sides."""
    digest = hashlib.blake2b(transfer_id.encode("utf-8", "surrogatepass"), digest_size=8, key=_ROOM_DOMAIN)
    return int.from_bytes(digest.digest(), "big") or 1


def answer_params(room: int, me: PeerAddress, tokens: int, secret: bytes) -> dict[str, object]:
    """The `kv_transfer_params` of prefill's answer, for decode. The names of NIXL's connector are there
    because some routers look for them."""
    address = RoomAddress(
        room=str(room),
        incarnation=me.leader.incarnation,
        dp_rank=me.leader.dp_rank,
        host=me.host,
        port=me.port,
        tokens=tokens,
    )
    address = msgspec.structs.replace(address, signature=_signature(address, secret))
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": me.leader.incarnation,
        "remote_block_ids": None,
        "remote_host": me.host,
        "remote_port": me.port,
        "segue": msgspec.to_builtins(address),
    }


def engine_id(leader: LeaderId) -> str:
    """The `engine_id` of a prefill leader in `GET /query`, which routers pass on as `remote_engine_id`."""
    return f"{leader.incarnation}_dp{leader.dp_rank}"


def _from_answer(address: RoomAddress, secret: bytes) -> ReceiveParams:
    signed = bool(secret and address.signature)
    if signed and not hmac.compare_digest(address.signature.encode(), _signature(address, secret).encode()):
        raise Unauthorized(
            "kv_transfer_params.segue has a wrong signature: pass prefill's answer on unchanged, and give "
            "prefill and decode the same secret_file"
        )
    if (room := int(address.room)) > MAX_ROOM:
        raise InvalidRequest(f"kv_transfer_params.segue.room must be below 2**64, not {room}")
    leader = LeaderId(Incarnation(address.incarnation), address.dp_rank)
    return ReceiveParams(room, PeerAddress(leader, address.host, address.port), address.tokens, signed)


def _query_address(wire: _TransferParams) -> PeerAddress:
    if not wire.remote_bootstrap_addr or not wire.remote_engine_id:
        raise InvalidRequest(
            "kv_transfer_params: transfer_id needs remote_bootstrap_addr and remote_engine_id, which "
            "GET /query on prefill answers"
        )
    incarnation, _, rank = wire.remote_engine_id.partition("_dp")
    if not _INCARNATION.fullmatch(incarnation) or not re.fullmatch(r"[0-9]{0,9}", rank):
        raise InvalidRequest(
            "kv_transfer_params.remote_engine_id is not an engine_id that prefill's GET /query answers"
        )
    found = _HTTP_ADDRESS.fullmatch(wire.remote_bootstrap_addr)
    host, port = (found[1] or found[2], int(found[3])) if found else ("", 0)
    if not 0 < port < 2**16:
        raise InvalidRequest("kv_transfer_params.remote_bootstrap_addr must be http://HOST:PORT")
    return PeerAddress(LeaderId(Incarnation(incarnation), int(rank or 0)), host, port, query=True)


def _signature(address: RoomAddress, secret: bytes) -> str:
    if not secret:
        return ""
    fields = [getattr(address, name) for name in address.__struct_fields__ if name != "signature"]
    return hmac.new(secret, _SIGN_DOMAIN + msgspec.msgpack.encode(fields), hashlib.sha256).hexdigest()
