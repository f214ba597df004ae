"""No registry: a list of addresses, or a name that resolves to them; the instances send their records.

A session with each address is kept open. It proves the secret on both sides, and its handshake carries the
record of the rank that listens there. An address that does not answer is tried again every `AGAIN_S`, and a
name is resolved as often. No process keeps rooms.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import msgspec

from segue.kv import (
    DECODE_ERRORS,
    ConfigError,
    Incarnation,
    InvalidRequest,
    LeaderId,
    Limits,
    PeerRefused,
    Role,
    SegueError,
    new_incarnation,
)
from segue.kv.session import PeerInfo, Session, SessionHandler, SessionNode, Tls
from segue.server.messages.operate import OperatorMessage
from segue.server.registry.backends import RegistryBackend
from segue.server.registry.listed import FollowedList
from segue.server.registry.registry_records import (
    SERVING,
    DrainFlag,
    InstanceList,
    InstanceRecord,
    Registered,
    RoomRecord,
)
from segue.server.settings.registry_address import registry_places

log = logging.getLogger(__name__)

AGAIN_S = 2.0
MAX_ADDRESSES = 512

Address = tuple[str, int]


def operator_node(
    handler: SessionHandler, secret: bytes | None, limits: Limits, tls: Tls | None
) -> SessionNode:
    """A node that dials serving instances as an operator."""
    return SessionNode(
        me=LeaderId(new_incarnation()),
        role=Role.OPERATOR,
        secret=secret,
        handlers=dict.fromkeys(SERVING, handler),
        message_type=OperatorMessage,
        limits=limits,
        tls=tls,
    )


class AddressBackend(RegistryBackend):
    """The instances at the addresses of `url`, `static://…` or `dns://…`; it also handles the sessions."""

    def __init__(self, url: str, secret: bytes | None, limits: Limits, tls: Tls | None) -> None:
        self._places = registry_places(url)
        self._by_name = url.startswith("dns:")
        if len(self._places) > MAX_ADDRESSES:
            raise ConfigError(f"--registry names {len(self._places)} addresses; {MAX_ADDRESSES} are the most")
        self._patience_s = limits.connect_s + limits.handshake_s
        self._list = FollowedList(self._follow, "the sessions with the addresses of --registry")
        self._sessions: dict[Address, Session] = {}
        self._records: dict[LeaderId, InstanceRecord] = {}
        #: instances all of whose ranks have been there
        self._complete: set[Incarnation] = set()
        #: each address was asked once: a list from before would lack those who are slower
        self._asked = False
        #: why an address does not answer, said once
        self._said: dict[Address, str] = {}
        self._node = operator_node(self, secret, limits, tls)

    # ---- SessionHandler -------------------------------------------------------------------------

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None:
        _record(peer)

    def opened(self, session: Session) -> None:
        self._records[session.peer.leader] = _record(session.peer)
        self._show()

    def received(self, session: Session, message: object) -> None:
        """Nobody was asked anything."""

    def closed(self, session: Session, error: SegueError) -> None:
        self._sessions = {at: one for at, one in self._sessions.items() if one is not session}
        self._records.pop(session.peer.leader, None)
        self._show()

    # ---- the addresses --------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            addresses = await self._addresses()
            for address in [address for address in self._sessions if address not in addresses]:
                self._sessions[address].close()
            await asyncio.gather(*(self._dial(at) for at in addresses if at not in self._sessions))
            self._asked = True
            self._show()
            await asyncio.sleep(AGAIN_S)

    async def _addresses(self) -> list[Address]:
        if not self._by_name:
            return self._places
        [(name, port)] = self._places
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            # A service without instances has no name in DNS. A name server that is away can give the same
            # error, and those with a session are there.
            self._say((name, port), str(error))
            return list(self._sessions)
        return sorted({(str(where[0]), port) for *_, where in found})[:MAX_ADDRESSES]

    async def _dial(self, address: Address) -> None:
        try:
            session = await self._node.connect(*address, timeout_s=self._patience_s)
            # A session that has ended before this point had its `closed` already, and would never be dialled
            # again.
            if self._node.sessions.get(session.peer.leader) is session:
                self._sessions[address] = session
            self._said.pop(address, None)
        except SegueError as error:
            self._say(address, str(error))

    def _say(self, address: Address, text: str) -> None:
        if self._said.get(address) != text:
            if len(self._said) >= 2 * MAX_ADDRESSES:
                self._said.clear()
            self._said[address] = text
            log.info("event=nobody_answers address=%s:%d reason=%r", *address, text)

    def _show(self) -> None:
        if not self._asked:
            return
        self._complete &= {leader.incarnation for leader in self._records}
        shown = self._list.show(
            msgspec.structs.replace(record, complete=leader.incarnation in self._complete)
            for leader, record in self._records.items()
        )
        self._complete |= {record.incarnation for record in shown if record.complete}

    # ---- RegistryBackend ------------------------------------------------------------------------

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        return await self._list.instances(role, version, wait_s)

    async def put_rank(self, record: InstanceRecord) -> Registered:
        """Nothing to register: the instance itself reports its record."""
        return Registered(version=0, epoch="", complete=record.dp_size == 1)

    async def put_draining(self, incarnation: Incarnation, flag: DrainFlag) -> None:
        """Nothing to do: the instance itself informs its frontends."""

    async def delete(self, leader: LeaderId) -> None:
        """Its sessions end."""

    async def put_room(self, room: int, record: RoomRecord) -> None:
        raise _no_rooms(room)

    async def room(self, room: int, wait_s: float) -> LeaderId | None:
        raise _no_rooms(room)

    async def close(self) -> None:
        self._list.close()
        self._asked = False
        await self._node.close()


def _record(peer: PeerInfo) -> InstanceRecord:
    """The record that the peer sends. Raises PeerRefused if it does not match the peer's proven identity."""
    try:
        record = msgspec.msgpack.decode(peer.hello, type=InstanceRecord)
    except DECODE_ERRORS as error:
        raise PeerRefused(f"{peer.leader} does not say what it is; is it an older version?") from error
    ranks = [LeaderId(record.incarnation, where.dp_rank) for where in record.replicas]
    if ranks != [peer.leader] or record.role is not peer.role:
        raise PeerRefused(f"{peer.leader} has the record of somebody else")
    return record


def _no_rooms(room: int) -> SegueError:
    return InvalidRequest(
        "which DP rank of prefill has a room is asked of a registry, and dns:// and static:// are none: name "
        "the rank, or start prefill with --load-balance follow_bootstrap_room",
        room=room,
    )
