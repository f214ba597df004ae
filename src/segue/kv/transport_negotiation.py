"""From a session to the paths behind it: which transport a pair takes, and what is opened for it.

A pair that may choose (both sides give scratch) measures first:

    decode  → ProbeReady: prefill may write into decode's scratch, under an epoch of its own
    prefill   maps decode's pool, if it can
    prefill   opens a path over each transport, the preferred one first, and writes over it
    prefill   does so once more, with more time, for those that were not measured in time
    prefill → PathChosen
    decode    fences the epoch

Prefill decides alone, because it writes and so measures; two sides that each decided could differ. A
transport that something goes wrong with, or that is late both times, is only not chosen. Every other pair
goes on meanwhile. Paths that were tried and not chosen stay open, idle.

The choice is for the whole session: no hand-off changes its transport. So nothing is decided by being late
once: a host is busy while a deployment starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from segue.kv.config import LeaderRuntime
from segue.kv.errors import BootstrapTimeout, OutOfCapacity, PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId, Role
from segue.kv.io import Io
from segue.kv.limits import Limits
from segue.kv.path_figures import PathCandidate, PathChoice
from segue.kv.peers import Compatibility, Peer, Probe
from segue.kv.protocol.messages import PathChosen, ProbeReady
from segue.kv.ranks.local_rank import FENCE_AGAIN_S
from segue.kv.ranks.rank_group import Ranks
from segue.kv.session.tasks import background, typed
from segue.kv.transport.probe import decide, slow

log = logging.getLogger("segue.kv")

#: The share of `connect_s` for a probe, from the mapping of a pool until prefill decides.
PROBE_SHARE = 0.6
#: For one transport, the first time. The late ones share what is left after that.
EACH_S = 0.3
#: To map decode's pool before: 1 GiB takes 0.1 to 0.4 s.
OPENING_S = 60.0


class TransportNegotiation:
    """Opens the paths of new sessions of one leader, on its loop. `new_epoch` gives decode's numbers."""

    def __init__(
        self,
        role: Role,
        limits: Limits,
        compatibility: Compatibility,
        ranks: Ranks,
        io: Io,
        runtime: LeaderRuntime,
        new_epoch: Callable[[], int],
    ) -> None:
        self._role = role
        self._limits = limits
        self._compatibility = compatibility
        self._ranks = ranks
        self._io = io
        self._kinds = runtime.transports
        self._host_speed = runtime.host_speed
        self._threads = runtime.connecting("segue-host-speed")
        self._new_epoch = new_epoch

    async def open(self, peer: Peer) -> None:
        """Choose the transport where there is a choice, and connect what our ranks write over (it may block).
        Raises what the session is to be closed with."""
        leader = peer.session.peer.leader
        if peer.probe is not None:
            if self._role is Role.PREFILL:
                peer.take(await self._choose(peer, peer.probe))
                peer.session.send(PathChosen(peer.transport))
                background(self._tell(peer), name="telling of a path", failed=_not_told, loop=self._io.loop)
            else:
                peer.take(await self._follow(peer, peer.probe))
            self._ranks.change(leader, peer.transport)
        if not self._ranks.writes_for(leader):
            return
        try:
            await self._ranks.connect(leader, peer.info, self._limits.connect_s)
        except OutOfCapacity as error:
            raise self.withdraw(peer.transport, error) from error

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

    # ---- prefill -----------------------------------------------------------------------------

    async def _choose(self, peer: Peer, probe: Probe) -> PathChoice:
        """Measure, and decide. The preferred ones come first: to open a path over others may take most of the
        time, and all of this process's."""
        await self._map_pool(peer, probe)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + PROBE_SHARE * self._limits.connect_s
        epoch = await self._admitted(peer, ends_at)
        if epoch is None:
            why_not = "was not measured: decode was not ready for it in time"
            found = {n: PathCandidate(transport=n, why_not=why_not, late=True) for n in probe.names}
        else:
            measured = partial(self._candidate, peer, probe, epoch, ends_at)
            found = {name: await measured(name, loop.time() + EACH_S) for name in probe.names}
            late = [name for name, one in found.items() if one.late]
            for done, name in enumerate(late):
                now = loop.time()
                if now < ends_at:
                    found[name] = await measured(name, now + (ends_at - now) / (len(late) - done))
        candidates = list(found.values())
        return PathChoice(
            transport=decide(candidates, probe.shape), candidates=[*candidates, *probe.left_out]
        )

    async def _map_pool(self, peer: Peer, probe: Probe) -> None:
        """Open the path to a pool that this process maps. That waits for our own kernel, takes the longer the
        larger the pool is, and whatever is measured beside it is too slow: so it is none of the probe's time.
        If it fails, it does so again when it is measured, and that is told."""
        for name in probe.names:
            if self._kinds.kind(name).in_memory:
                opening = self._ranks.try_path(*self._path(peer, probe, name), self._limits.connect_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(OPENING_S):
                        await asyncio.gather(opening, return_exceptions=True)

    async def _admitted(self, peer: Peer, ends_at: float) -> int | None:
        """Under which epoch decode lets us write into its scratch. None if it does not say so in time: what
        it does first is none of a transport's time."""
        assert peer.word is not None
        try:
            async with asyncio.timeout_at(ends_at):
                ready = await asyncio.shield(peer.word)
        except TimeoutError:
            return None
        if not isinstance(ready, ProbeReady):
            leader = peer.session.peer.leader
            raise TransferFailed(f"{leader} said {type(ready).__name__} where it was to say that it is ready")
        return ready.epoch

    async def _candidate(
        self, peer: Peer, probe: Probe, epoch: int, ends_at: float, name: str, until: float
    ) -> PathCandidate:
        """Measure one transport, until then. A path that is not open by then goes on opening: it is waited
        for again, or is not needed."""
        loop = asyncio.get_running_loop()
        until, missing = min(until, ends_at), "its turn did not come"
        path, writer = self._path(peer, probe, name), self._ranks[probe.source]
        try:
            if (left_s := until - loop.time()) <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                missing = "its path did not open"
                await self._ranks.try_path(*path, ends_at - loop.time())
                left_s, missing = until - loop.time(), "its writes did not land"
                figures = await writer.measure(name, path[1], epoch, probe.scratch, probe.shape, left_s)
        except (TimeoutError, BootstrapTimeout):
            why_not = f"was not measured in time: {missing}"
            return PathCandidate(transport=name, why_not=why_not, late=True)
        except Exception as exc:
            return PathCandidate(transport=name, why_not=str(typed(exc, f"measuring {name}")))
        return PathCandidate(transport=name, figures=figures)

    def _path(self, peer: Peer, probe: Probe, name: str) -> tuple[int, RankId, str, bytes]:
        """The path of a transport to measure: source rank, target rank, and the target's address."""
        to = RankId(peer.session.peer.leader, probe.target)
        return probe.source, to, name, peer.info.endpoints[name][probe.target]

    async def _tell(self, peer: Peer) -> None:
        """Compare the choice with the host's own speed, which is measured now if it never was, and say all
        of it in one line."""
        choice = peer.speed.choice
        assert choice is not None
        figures = choice.taken.figures
        if figures is not None:
            loop = asyncio.get_running_loop()
            try:
                host = await loop.run_in_executor(self._threads, self._host_speed)
            except (OSError, RuntimeError) as exc:  # no socket, or no thread
                log.warning("the host's own speed was not measured: %s", exc)
            else:
                in_memory = self._kinds.kind(choice.transport).in_memory
                choice = msgspec.structs.replace(choice, slow=slow(figures, host, in_memory=in_memory))
                peer.speed.choice = choice
        doubtful = choice.slow or any(one.late for one in choice.candidates)
        level = logging.WARNING if figures is None or doubtful else logging.INFO
        said = (peer.session.peer.leader, choice.transport, choice.describe())
        log.log(level, "path chosen peer=%s transport=%s: %s", *said)

    # ---- decode ------------------------------------------------------------------------------

    async def _follow(self, peer: Peer, probe: Probe) -> PathChoice:
        """Let prefill measure, and hear what it has chosen."""
        leader, word = peer.session.peer.leader, peer.word
        assert word is not None
        rank, writer, epoch = self._ranks[probe.target], RankId(leader, probe.source), self._new_epoch()
        patience_s = self._limits.connect_s + OPENING_S
        try:
            try:
                await rank.admit(probe.names, writer, epoch)
            except Exception as exc:
                log.warning("%s cannot measure: %s", leader, typed(exc, "granting scratch"))
            else:
                peer.session.send(ProbeReady(epoch))
            async with asyncio.timeout(patience_s):
                chosen = await word
        except TimeoutError:
            raise PeerLost(f"{leader} has chosen no path in {patience_s:g} s") from None
        finally:
            for name in probe.names:
                self._fence(name, probe.target, writer, epoch)
        if not isinstance(chosen, PathChosen) or chosen.transport not in probe.names:
            raise TransferFailed(f"{leader} has chosen what there is not: {chosen}")
        return PathChoice(transport=chosen.transport, candidates=[])

    def _fence(self, name: str, rank: int, writer: RankId, epoch: int) -> None:
        """Nothing more lands in our scratch, as far as this transport can say so; asked until it is taken."""
        try:
            self._ranks[rank].fence(name, writer, epoch)
        except Exception as exc:
            log.warning("a fence of scratch was not taken: %s", typed(exc, "fencing scratch"))
            self._io.loop.call_later(FENCE_AGAIN_S, partial(self._fence, name, rank, writer, epoch))


def _not_told(error: SegueError) -> None:
    log.warning("a choice of a path was not told: %s", error)
