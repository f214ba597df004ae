"""`KVAgent`: an engine's calls of a manager that runs in a process of its own, its agent.

A hand-off's threads and the engine's share one interpreter otherwise, and wait for each other's turn.

The pool is the engine's, a memfd that the agent maps. So it outlives an agent that dies, and the rules for
its pages are those of `kv.protocol.machine`: the end of the process proves that the agent reads, hashes and
writes no more. It proves nothing about a peer that writes by itself into published pages (`shm`): no later
agent can ask that peer for a proof, and such pages stay in quarantine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from msgspec import structs

from segue.kv.agent import agent_wire as wire
from segue.kv.config import KVConfig
from segue.kv.errors import BootstrapTimeout, ConfigError, Internal, InvalidRequest, PeerLost, SegueError
from segue.kv.handles import Handles, OnChange
from segue.kv.ids import KVPoll, LeaderId, RoomKey
from segue.kv.io import IoThread, MonotonicClock
from segue.kv.peers import PathSpeed
from segue.kv.process_link import ProcessLink
from segue.kv.protocol import events
from segue.kv.ready import ReadyEvent
from segue.kv.session.tasks import typed
from segue.kv.threads import start_thread
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind

log = logging.getLogger("segue.kv")

#: For the process to import what it needs and to map the pool; 0.6 s on a host with a free core.
START_S = 60.0
#: For the process to end by itself after `close`, beyond what its manager may take.
END_S = 10.0
#: Variables of the engine's that the agent does not get: libraries that are loaded into every process (vLLM
#: preloads an allocator and an OpenMP).
NOT_PASSED_ON = ("LD_PRELOAD",)


@dataclass(slots=True)
class _OpenHalf:
    """A half whose pages are not back yet. `published`: how many pages a peer may write into."""

    published: int = 0
    ended: KVPoll | None = None
    quarantined: bool = False


class KVAgent(Handles):
    """A `KVManager` in a process of its own, with the calls of one: `expect`, `receive`, `decline`, `ready`,
    `add_peer`, `remove_peer` and those of the handles. `config`, `on_change` and `on_rank_lost` are a
    manager's; both are called on a thread of this class. One rank; no registry.

    `pool` is memory from `allocate` (or tensors in it): the agent maps it. `environment` is the agent's, by
    default this process's without `LD_PRELOAD` and with one thread for numpy.

    An agent that ends, or says nothing for `limits.peer_silence_s` (it is killed then), counts as lost: all
    hand-offs fail with PEER_LOST at once, on both sides, `on_rank_lost` is called once, and later hand-offs
    fail at once. Pages come back (`Release`) when the process has ended, except published ones that a peer
    writes into by itself (`shm`, libraries): they stay in quarantine, and no later agent may use them. An
    agent whose engine ends, ends too. Interrupts (SIGINT, SIGTERM, SIGHUP) are the engine's.

    Raises ConfigError for memory that cannot be mapped, and for `config.tls` that is not from `load_tls`.
    """

    def __init__(
        self,
        config: KVConfig,
        pool: Memory,
        on_change: OnChange | None = None,
        *,
        on_rank_lost: Callable[[SegueError], None] = lambda _: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(MonotonicClock())
        self.config = config
        self.pool = pool
        self.io = IoThread()
        self.io.on_end = self._io_lost
        self._on_change = on_change
        self._on_rank_lost = on_rank_lost
        self._environment = agent_environment() if environment is None else dict(environment)
        self._files = _pool_files(pool)
        if config.tls is not None and config.tls.files is None:
            raise ConfigError("tls: an agent reads the files again, so it must be made by load_tls")
        names = KINDS.for_memory(config.transports, pool)
        #: peers write into the pool by themselves, over one of the transports that are offered
        self._peers_write = not all(KINDS.kind(name).receiver_writes for name in names)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: ProcessLink | None = None
        self._started: Future[tuple[str, int]] = Future()
        self._halves: dict[RoomKey, _OpenHalf] = {}
        self._numbers_of_counts = count(1)
        self._counts: dict[int, asyncio.Future[wire.CountAnswer]] = {}
        self._lost: SegueError | None = None
        self._closed = False
        #: held while the process is made, and while it ends: who closes second waits for the end, too
        self._life = threading.RLock()

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> tuple[str, int]:
        """Start the process and its manager; returns the `(host, port)` at which peers open sessions. Call
        once, before all other calls.

        Raises what a manager's constructor and `start` do, PeerLost if the process ends or this agent is
        closed meanwhile, and BootstrapTimeout after 60 s; the agent is closed then.
        """
        try:
            return self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> tuple[str, int]:
        with self._life:
            if self._closed:
                raise _closed()
            link = self._start_process()
        try:
            address = self.io.wait(self._started, START_S)
        except TimeoutError:
            raise BootstrapTimeout(f"the agent was not ready within {START_S:g} s") from None
        self.io.post(partial(link.attach, self._received, self._ended, ping=True))
        return address

    def _start_process(self) -> ProcessLink:
        config = self.config
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "segue.kv.agent.agent_process", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), *(file.fd for file in self._files)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._environment,
            )
        except OSError as error:
            ours.close()
            raise ConfigError(f"the agent {sys.executable!r} cannot be started: {error}") from error
        finally:
            theirs.close()
        self.io.start()
        link = ProcessLink(ours, "the agent", wire.AgentAnswer, limits=config.limits, io=self.io)
        self._link = link
        tls = None if config.tls is None else config.tls.files
        level = logging.getLogger("segue").getEffectiveLevel()
        plain = replace(config, tls=None, messages=None)
        self.io.post(link.attach, self._received, self._ended)
        link.post(wire.SetUpCommand(plain, tls, self._files, os.getpid(), level))
        return link

    def close(self) -> None:
        """End the process, and wait for that. Open hand-offs fail on the peer's side; on this side nothing is
        reported any more, and calls do nothing.

        Idempotent; call it from outside the agent's thread. Free the pool's memory only after it returns.
        """
        with self._life:
            if self._closed:
                return
            self._closed = True
            try:
                if self._link is not None:
                    self.io.post(self._part, self._link)
                    self._link.post(wire.CloseCommand())
                if self._process is not None:
                    self._end(self._process)
                if self._link is not None:  # not before: what the agent still says would meet a closed link
                    self._link.close()
            finally:
                self.io.stop()

    def _part(self, link: ProcessLink) -> None:
        link.detach()
        if not self._started.done():
            self._started.set_exception(_closed())

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if self._started.done() and self._started.exception() is None:
            try:
                process.wait(END_S + 2 * self.config.limits.connect_s)
                return
            except subprocess.TimeoutExpired:
                log.error("the agent did not end by itself, and is killed")
        process.kill()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise Internal(f"the agent (process {process.pid}) cannot be killed; keep the pool") from None

    @property
    def pid(self) -> int:
        """The id of the process; 0 before `start`."""
        return 0 if self._process is None else self._process.pid

    # ---- the engine's side -------------------------------------------------------------------

    def post(self, *batch: events.EngineEvent) -> None:
        """See `Handles.post`. Raises InvalidRequest before `start` has returned."""
        self._check_started()
        self.io.post(self._handle_all, batch)

    def add_peer(self, leader: LeaderId, host: str, port: int) -> None:
        """See `KVManager.add_peer`."""
        self._say(wire.AddPeerCommand(leader, host, port))

    def remove_peer(self, leader: LeaderId) -> None:
        """See `KVManager.remove_peer`."""
        self._say(wire.RemovePeerCommand(leader))

    def sizes(self) -> dict[str, int]:
        """See `KVManager.sizes`. It asks the agent, at most `limits.connect_s`. Raises PeerLost."""
        return {**self._counted().sizes, "handles": len(self.handles), "halves": len(self._halves)}

    def problems(self) -> list[str]:
        """See `KVManager.problems`; asks as `sizes` does, from any thread but the agent's."""
        return self._counted().problems

    def paths(self) -> dict[str, PathSpeed]:
        """See `KVManager.paths`; asks as `sizes` does."""
        return self._counted().paths

    def _counted(self) -> wire.CountAnswer:
        if self._closed:
            raise _closed()
        within_s = self.config.limits.connect_s
        try:
            return self.io.call(self._count(), within_s)
        except TimeoutError:
            raise PeerLost(f"the agent has not answered within {within_s:g} s") from None

    async def _count(self) -> wire.CountAnswer:
        if self._lost is not None:
            raise self._lost.info.exception()
        number = next(self._numbers_of_counts)
        answer: asyncio.Future[wire.CountAnswer] = asyncio.get_running_loop().create_future()
        self._counts[number] = answer
        try:
            self._say(wire.CountCommand(number))
            return await answer
        finally:
            del self._counts[number]

    def _say(self, command: wire.AgentCommand) -> None:
        self._check_started()
        assert self._link is not None
        self._link.post(command)

    def _check_started(self) -> None:
        # Nor during `start`: the agent does not hear what comes before it serves.
        if not self._started.done():
            raise InvalidRequest("start the agent before its other calls")

    # ---- on the link's thread ----------------------------------------------------------------

    def _handle_all(self, batch: tuple[events.EngineEvent, ...]) -> None:
        for event in batch:
            if not self._closed:
                self._handle(event)

    def _handle(self, event: events.EngineEvent) -> None:
        assert self._link is not None
        if isinstance(event, events.ExpectRoom | events.OpenReceiver):
            error = self._refused(event)
            if error is None:
                try:
                    frame = wire.frame_of(event)
                except SegueError as exc:
                    error = exc
            if error is not None:
                self._report(events.Phase(event.key, KVPoll.FAILED, error=error.info))
                if event.key not in self._halves:  # else the pages that are out are still to come back
                    self._report(events.Release(event.key))
                return
            self._halves[event.key] = _OpenHalf()  # before it is sent: that may find that the agent is lost
            self._link.send_frame(frame)
            return
        if isinstance(event, events.Publish) and (half := self._halves.get(event.key)) is not None:
            half.published = max(1, len(event.pages))
        try:
            self._link.send_frame(wire.frame_of(event))
        except SegueError as exc:
            self._link.send(events.EndRoom(event.key, exc.info))
            return
        if isinstance(event, events.SendChunk) and (ready := event.ready) is not None:
            ready.then(partial(self.io.post, self._moment_is_over, ready))

    def _refused(self, event: events.ExpectRoom | events.OpenReceiver) -> SegueError | None:
        if self._lost is not None:
            return self._lost
        if event.key in self._halves:
            return InvalidRequest(f"room {event.key} is in use: its pages are not back", room=event.key.room)
        return None

    def _moment_is_over(self, ready: ReadyEvent) -> None:
        assert self._link is not None
        error = None if ready.error is None else ready.error.info
        self._link.send(wire.MomentCommand(ready.number, error))

    def _tell(self, change: events.Change) -> None:
        half = self._halves.get(change.key)
        match change:
            case events.Phase(phase=phase) if half is not None and phase.terminal:
                half.ended = phase
            case events.Quarantined() if half is not None:
                half.quarantined = True
            case events.Release():
                self._halves.pop(change.key, None)
        self._report(change)

    def _report(self, change: events.Change) -> None:
        self.apply(change)
        if self._on_change is None:
            return
        try:
            self._on_change(change)
        except Exception as exc:  # as in a manager: it ends this hand-off, and no other one
            error = typed(exc, f"telling the engine of {type(change).__name__}")
            log.warning("%s was not taken: %s", type(change).__name__, error)
            assert self._link is not None
            self._link.send(events.EndRoom(change.key, error.info))

    def _received(self, answer: wire.AgentAnswer) -> None:
        match answer:
            case events.Phase() | events.Release() | events.Quarantined():
                self._tell(answer)
            case wire.CountAnswer():
                waiting = self._counts.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            case wire.LogAnswer():
                logging.getLogger(answer.name).log(answer.level, "%s", answer.text)
            case wire.ServesAnswer(host, port):
                self._started.set_result((host, port))
            case wire.CannotAnswer(error):
                self._started.set_exception(error.exception())

    def _ended(self, reason: SegueError, over: bool) -> None:
        """Nothing is heard of the agent any more; `over`: its process has ended, or is about to."""
        if not self._started.done():
            self._started.set_exception(reason.info.exception())
        if self._started.exception() is not None or self._lost is not None:
            return  # `start` raises it, or it is known
        self._lost = reason
        log.error("the agent is lost: %s", reason)
        for waiting in self._counts.values():
            if not waiting.done():
                waiting.set_exception(reason.info.exception())
        for key, half in list(self._halves.items()):
            self._fail(key, half, reason, over)
        # The end of the link is no proof: this end may have broken it. That of the process is.
        assert self._process is not None
        self._process.kill()
        start_thread("segue-agent-end", partial(self._prove_end, self._process))
        self._on_rank_lost(reason)

    def _io_lost(self, error: SegueError) -> None:
        """The thread of the link has ended: nothing is heard of the agent any more, and it is killed."""
        if not self._closed:
            self.ended = error
            self._ended(error, False)

    def _prove_end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.error("the agent (process %d) does not end: its pages stay out of use", process.pid)
        else:
            self.io.post(self._release_proven)

    def _release_proven(self) -> None:
        """The agent's process has ended: it does nothing more for the pool."""
        if self._closed:
            return
        for key in [key for key, half in self._halves.items() if not self._unproven(half)]:
            self._tell(events.Release(key))

    def _fail(self, key: RoomKey, half: _OpenHalf, reason: SegueError, over: bool) -> None:
        if half.ended is None:
            error = structs.replace(reason.info, room=key.room)
            self._tell(events.Phase(key, KVPoll.FAILED, error=error))
        waits = not over or self._unproven(half)
        if half.published and half.ended is KVPoll.FAILED and waits and not half.quarantined:
            self._tell(events.Quarantined(key, half.published))

    def _unproven(self, half: _OpenHalf) -> bool:
        """Whether a peer may still write into its pages after the agent's end."""
        return half.published > 0 and half.ended is not KVPoll.SUCCESS and self._peers_write


def _closed() -> PeerLost:
    return PeerLost("the agent is closed")


def _pool_files(pool: Memory) -> list[wire.PoolFile]:
    files = [wire.PoolFile(region.fd, region.nbytes) for region in pool.regions if region.fd is not None]
    if len(files) < len(pool.regions) or any(region.kind is not MemoryKind.SHARED for region in pool.regions):
        raise ConfigError("an agent maps the pool, so it must be memory from allocate, or tensors in it")
    return files


def agent_environment() -> dict[str, str]:
    """The environment of an agent: this process's without `LD_PRELOAD`, with one thread for numpy's linear
    algebra, which an agent does not use, and with the place that segue was imported from."""
    found = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    here = str(Path(__file__).parents[3])
    path = [here, *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
    return found | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }
