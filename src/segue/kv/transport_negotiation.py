"""From a session to the paths behind it: which transport a pair takes, and what is opened for it.

Prefill writes, so prefill decides: it opens the paths over the first transport of its list that both sides
offer; where that fails, over the next. It tells decode which one with `PathChosen`. The choice is for the
whole session: a path that ends later ends its hand-offs, and the next session begins the list again.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from segue.kv.errors import OutOfCapacity, PeerLost, SegueError, TransferFailed
from segue.kv.ids import Role
from segue.kv.limits import Limits
from segue.kv.peers import Compatibility, Peer
from segue.kv.protocol.messages import PathChosen
from segue.kv.ranks.rank_group import Ranks

log = logging.getLogger("segue.kv")

#: To map a pool: 1 GiB takes 0.1 to 0.4 s, and a mapping has no deadline of its own.
MAPPING_S = 60.0


class TransportNegotiation:
    """Opens the paths of new sessions of one leader, on its loop."""

    def __init__(self, role: Role, limits: Limits, compatibility: Compatibility, ranks: Ranks) -> None:
        self._role = role
        self._limits = limits
        self._compatibility = compatibility
        self._ranks = ranks

    async def open(self, peer: Peer) -> None:
        """Choose the transport, and connect what our ranks write over (it may block). Raises what the session
        is to be closed with."""
        if self._role is Role.PREFILL:
            await self._choose(peer)
            peer.session.send(PathChosen(peer.transport))
        else:
            await self._follow(peer)

    async def _choose(self, peer: Peer) -> None:
        """Open the paths over the first transport that works. Raises the error of the last one."""
        leader = peer.session.peer.leader
        *others, last = peer.names
        for name in others:
            try:
                await self._connect(peer, name)
                return
            except SegueError as error:
                log.warning("no path peer=%s transport=%s, the next is tried: %s", leader, name, error)
        await self._connect(peer, last)

    async def _follow(self, peer: Peer) -> None:
        """Hear what prefill has chosen, and open any paths between our own ranks over it."""
        leader = peer.session.peer.leader
        patience_s = MAPPING_S + len(peer.names) * self._limits.connect_s
        try:
            async with asyncio.timeout(patience_s):
                chosen = await peer.chosen
        except TimeoutError:
            raise PeerLost(f"{leader} has chosen no transport in {patience_s:g} s") from None
        if chosen not in peer.names:
            raise TransferFailed(f"{leader} has chosen {chosen!r}, which is not one of {peer.names}")
        try:
            await self._connect(peer, chosen)
        except OutOfCapacity as error:
            raise self.withdraw(chosen, error) from error

    async def _connect(self, peer: Peer, name: str) -> None:
        leader = peer.session.peer.leader
        peer.take(name)
        self._ranks.change(leader, name)
        if self._ranks.writes_for(leader):
            await self._ranks.connect(leader, peer.info, self._limits.connect_s)

    def withdraw(self, name: str, error: SegueError) -> SegueError:
        """This process cannot have what a path of the transport `name` takes: the pair meets anew without
        it, if there is another. Returns the error to end the session with."""
        info = self._compatibility.info
        if self._ranks.withdraw(name):
            self._compatibility.say(msgspec.structs.replace(info, endpoints=self._ranks.endpoints))
            rest = ", ".join(self._ranks.endpoints)
            log.warning("%s is not offered any more, only %s: %s", name, rest, error)
        elif name in info.endpoints:
            return error
        return PeerLost(f"the session begins anew without {name}: {error}")
