"""Leaders who come to an instance and cannot hand KV over with it, or say what a leader must not.

They prove themselves (they know the secret); what is wrong is what they say of themselves, or say then.
Each is told why, at once, and the instance goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from segue.kv.errors import AbortedByClient, ErrorCode, SegueError, TransferFailed
from segue.kv.ids import Role, Span, TransferId
from segue.kv.protocol.messages import Abort, ChunkPosted, Committed, Failed, Gone, LeaderInfo, Metadata
from segue.kv.session.node import SessionNode
from segue.kv.transport.tcp.tcp_transport import TcpTransport
from segue.lab.sim.sim_node import KVNode
from segue.lab.sim.visitor import Visitor
from segue.server.instance.kv_settings import LeaderMessage
from segue.server.messages.control import Cancel

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment
    from segue.lab.sim.sim_leader import LeaderNode

Say = Callable[[LeaderInfo], LeaderInfo | bytes]


def _with(**fields: Any) -> Say:
    return lambda info: structs.replace(info, **fields)


def _endpoints(data: bytes) -> Say:
    return lambda info: structs.replace(info, endpoints={name: [data] for name in info.endpoints})


def _layers(info: LeaderInfo) -> LeaderInfo:
    rank = info.ranks[0]
    shape = structs.replace(rank.shape, layers=rank.shape.layers + 1)
    return structs.replace(info, ranks=[structs.replace(rank, shape=shape, layer_count=shape.layers)])


_NEGATIVE = msgspec.msgpack.encode({"transport": TcpTransport.name, "nbytes": -1, "data": b""})
#: An endpoint that only the transport itself can tell to be none: nobody can write there.
_OPAQUE = msgspec.msgpack.encode({"transport": TcpTransport.name, "nbytes": 64, "data": b"\xc1"})

#: What is wrong with what they say of themselves, and how they are refused.
REFUSED: dict[str, tuple[Say, tuple[ErrorCode, ...]]] = {
    "unreadable": (lambda _info: b"\x93abc", (ErrorCode.PEER_REFUSED,)),
    "another hand-off protocol": (_with(protocol=99), (ErrorCode.PEER_REFUSED,)),
    "another model": (_with(model="of somebody"), (ErrorCode.PEER_REFUSED,)),
    "another transport": (_with(endpoints={}), (ErrorCode.PEER_REFUSED,)),
    "other layers": (_layers, (ErrorCode.LAYOUT_MISMATCH,)),
    "no ranks": (_with(ranks=[]), (ErrorCode.LAYOUT_MISMATCH,)),
    "unreadable endpoint": (_endpoints(b"\xc1"), (ErrorCode.LAYOUT_MISMATCH,)),
    "endpoint without bytes": (_endpoints(_NEGATIVE), (ErrorCode.LAYOUT_MISMATCH,)),
}
MISFIT_KINDS = (*REFUSED, "same role", "control message", "words about others")


class Misfit(Visitor):
    """A leader of the other role, as its instance would see it."""

    WHAT = "misfit"

    def __init__(self, deployment: Deployment, target: LeaderNode, name: str, kind: str) -> None:
        super().__init__(deployment, target, name, kind)
        self.role = Role.DECODE if target.spec.role is Role.PREFILL else Role.PREFILL
        if kind == "same role":
            self.role = target.spec.role

    def hello(self) -> bytes:
        """What is said of a leader that is like the target, but for what is wrong."""
        if not isinstance(self.target, KVNode):
            return b""
        info: LeaderInfo | bytes = self._like(self.target)
        assert isinstance(info, LeaderInfo)
        if self.kind in REFUSED:
            info = REFUSED[self.kind][0](info)
        elif self.role is Role.DECODE:
            info = structs.replace(info, endpoints={"tcp": [_OPAQUE] * len(info.ranks)})
        return info if isinstance(info, bytes) else msgspec.msgpack.encode(info)

    def _like(self, target: KVNode) -> LeaderInfo:
        """What a leader of our role would say that the target could work with."""
        info = target.manager.compatibility.info
        ranks = self.deployment.scenario.splits.of(self.role).ranks(target.engine.spec)
        endpoints = {name: of_ranks[:1] * len(ranks) for name, of_ranks in info.endpoints.items()}
        return structs.replace(info, ranks=ranks, endpoints=endpoints)

    def leader(self) -> SessionNode:
        """Production's node, of a leader."""
        return self.node(role=self.role, message_type=LeaderMessage)

    async def visits(self) -> None:
        """Come, and be refused or end in the way that is due."""
        if not isinstance(self.target, KVNode):
            await self.dials(self.leader(), ErrorCode.PEER_REFUSED)
        elif self.kind in REFUSED:
            await self.dials(self.leader(), *REFUSED[self.kind][1])
        elif self.kind == "same role" or not (
            self.role is Role.PREFILL or "tcp" in self.target.deployment.transports
        ):
            await self.dials(self.leader(), ErrorCode.PEER_REFUSED)
        else:
            await self._joins()

    async def _joins(self) -> None:
        node = self.leader()
        session = await self.dials(node)
        if session is None:
            return
        if self.kind == "control message":
            session.send(Cancel("a request", AbortedByClient("it left").info))
        else:
            self._talks(session)
        if self.kind == "control message" or self.role is Role.DECODE:
            await self.is_ended(ErrorCode.TRANSFER_FAILED, ErrorCode.PEER_REFUSED)
        await node.close()

    def _talks(self, session: Any) -> None:
        """About hand-offs that nobody has, in the name of others and of itself."""
        target = self.target.me
        prefill, decode = (self.me, target) if self.role is Role.PREFILL else (target, self.me)
        error: SegueError = TransferFailed("injected: nobody asked")
        for pair in ((prefill, decode), (decode, prefill), (target, target)):
            transfer = TransferId(self.rng.getrandbits(63) or 1, 0, *pair)
            for message in (
                Committed(transfer),
                Gone(transfer),
                Abort(transfer),
                Failed(transfer, error.info),
                Metadata(transfer=transfer, prompt_tokens=1, first_token=0),
                ChunkPosted(
                    transfer=transfer, source=0, target=0, sequence=0, span=Span(0, 1), nbytes=1, final=True
                ),
            ):
                session.send(message)


__all__ = ["MISFIT_KINDS", "Misfit"]
