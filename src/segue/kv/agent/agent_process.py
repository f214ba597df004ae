"""The process of a `KVAgent`: `python -m segue.kv.agent.agent_process LINK_FD`.

It maps the pool of the engine that started it and runs a `KVManager` over it, until that engine closes it
or ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from segue.kv.agent import agent_wire as wire
from segue.kv.config import KVConfig
from segue.kv.errors import MAX_ERROR_TEXT, ErrorInfo, OutOfCapacity, PeerLost, SegueError
from segue.kv.manager import KVManager
from segue.kv.process_link import HEAD, MAX_BYTES, Frames, ProcessLink, encode
from segue.kv.protocol.messages import HandoffMessage, PathChosen
from segue.kv.ready import ReadyEvent
from segue.kv.session.tasks import typed
from segue.kv.session.tls import load_tls
from segue.kv.transport.memory.pool_memory import Memory, Region, host_region, map_shared

#: For the engine to send its first message.
SET_UP_S = 60.0


class _EngineLog(logging.Handler):
    """Sends log lines to the engine's process."""

    def __init__(self, link: ProcessLink) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        text = self.format(record)[:MAX_ERROR_TEXT]
        self._link.post(wire.LogAnswer(record.levelno, record.name, text))


class Agent:
    """A manager over the engine's pool, and its end of the link over `sock`. `closed` is set when the engine
    closes it; when the engine dies, so does this process."""

    def __init__(self, sock: socket.socket, order: wire.SetUpCommand) -> None:
        self.closed = threading.Event()
        #: the moments that chunks wait for
        self._moments: WeakValueDictionary[int, ReadyEvent] = WeakValueDictionary()
        config = config_of(order)
        self._manager = KVManager(
            config,
            map_pool(order.pool),
            lambda change: self._link.send(change),
            on_rank_lost=lambda _: self._engine_died(),  # as then: the end of the process is the proof
        )
        host, port = self._manager.start()
        try:
            limits, io = config.limits, self._manager.io
            self._link = ProcessLink(sock, "the engine", wire.AgentCommand, limits=limits, io=io)
            self._link.ready_event = self._moment
            io.post(self._serve, wire.ServesAnswer(host, port), order.engine)
        except BaseException:
            self._manager.close()
            raise

    def close(self) -> None:
        """End the link, which the engine does not listen to any more, and then the manager. The engine waits
        for the end of the process."""
        self._link.close()
        self._manager.close()

    # ---- on the manager's thread ---------------------------------------------------------------

    def _serve(self, answer: wire.ServesAnswer, engine: int) -> None:
        logging.getLogger("segue").addHandler(_EngineLog(self._link))
        self._link.attach(self._received, lambda _reason, _over: self._engine_died())
        self._link.send(answer)
        # A child of the engine may have inherited its end of the link by a fork, and outlive it.
        try:
            watched = os.pidfd_open(engine)
        except ProcessLookupError:
            self._engine_died()
        except OSError:
            pass  # a sandbox without pidfds: the link alone says when the engine has ended
        else:
            self._manager.io.loop.add_reader(watched, self._engine_died)
            if os.getppid() != engine:  # it had ended before, and its number is another's now
                self._engine_died()

    def _engine_died(self) -> None:
        """As with a manager in the engine's process: the peers hear it from the kernel, which also proves to
        them that nothing of this leader writes any more."""
        if not self.closed.is_set():
            os._exit(1)

    def _received(self, command: wire.AgentCommand) -> None:
        manager = self._manager
        match command:
            case wire.MomentCommand(number, error):
                self._moment_is_over(number, error)
            case wire.AddPeerCommand(leader, host, port):
                manager.add_peer(leader, host, port)
            case wire.RemovePeerCommand(leader):
                manager.remove_peer(leader)
            case wire.CountCommand(number):
                sizes, problems, paths = manager.sizes(), manager.problems(), manager.paths()
                sizes["moments"] = len(self._moments)
                self._link.send(wire.CountAnswer(number, sizes, problems, paths))
            case wire.CloseCommand():
                self.closed.set()
            case wire.SetUpCommand():
                pass  # once is enough
            case _:
                manager.post(command)

    def _moment(self, number: int) -> ReadyEvent:
        moment = self._moments.get(number)
        if moment is None:
            moment = self._moments[number] = self._manager.ready()
        return moment

    def _moment_is_over(self, number: int, error: ErrorInfo | None) -> None:
        moment = self._moments.get(number)
        if moment is not None:  # else all that waited for it has ended
            moment.end(None if error is None else error.exception())


def config_of(order: wire.SetUpCommand) -> KVConfig:
    """The engine's configuration, with what cannot be sent."""
    tls = None if order.tls is None else load_tls(*order.tls)
    return replace(order.config, tls=tls, messages=HandoffMessage | PathChosen)


def map_pool(files: Sequence[wire.PoolFile]) -> Memory:
    """The engine's pool as memory of this process. Raises OutOfCapacity."""
    regions = []
    for file in files:
        try:
            mapping: mmap.mmap = map_shared(file.fd, file.nbytes)
        except (OSError, ValueError) as error:
            raise OutOfCapacity(f"the agent cannot map {file.nbytes} bytes of the pool: {error}") from error
        regions.append(Region(host_region(mapping).address, file.nbytes, fd=file.fd, owner=mapping))
    return Memory(regions)


def _first_order(sock: socket.socket) -> wire.SetUpCommand:
    sock.settimeout(SET_UP_S)
    head = _exactly(sock, HEAD.size)
    body = _exactly(sock, min(HEAD.unpack(head)[0], MAX_BYTES))
    [order] = Frames(wire.AgentCommand).feed(head + body)
    sock.settimeout(None)
    assert isinstance(order, wire.SetUpCommand)
    return order


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        if not (more := sock.recv(nbytes - len(data))):
            raise PeerLost("the engine ended before its first message")
        data += more
    return bytes(data)


def main(link_fd: int) -> int:
    """Serve until the engine leaves; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine's; this process ends after it
    sock = socket.socket(fileno=link_fd)
    order = _first_order(sock)
    logging.getLogger("segue").setLevel(order.log_level)
    try:
        agent = Agent(sock, order)
    except Exception as exc:
        error: SegueError = typed(exc, "starting the agent")
        sock.sendall(encode(wire.CannotAnswer(error.info)))
        return 1
    agent.closed.wait()
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
