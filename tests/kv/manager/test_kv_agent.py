"""A manager in a process of its own: hand-offs between agents, and what is left when an agent or its engine
dies, stands still, or is told nonsense."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from kv_sides import (
    DEADLINE_S,
    LIMITS,
    PAGE,
    PAGES,
    AgentSide,
    Side,
    assert_at_rest,
    assert_handed_over,
    begin,
    published,
    spec,
)

from segue.kv.agent import kv_agent
from segue.kv.agent.kv_agent import KVAgent, agent_environment
from segue.kv.config import KVConfig
from segue.kv.errors import (
    ConfigError,
    ErrorCode,
    Internal,
    InvalidRequest,
    PeerLost,
    SegueError,
    Unauthorized,
)
from segue.kv.handles import Change, KVReceiver, KVSender
from segue.kv.ids import KVPoll, LeaderId, Role, RoomKey, Span, new_incarnation, new_room
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.threads import threads_on
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory.pool_memory import Memory, Region, allocate, host_region
from tls_files import Authority

TOKENS = 8 * PAGE
ENGINE = Path(__file__).with_name("agent_engine.py")
#: A silent agent is given up soon.
SOON = Limits(keepalive_s=0.2, peer_silence_s=2.0, handshake_s=DEADLINE_S, connect_s=10.0)


def start(stack: ExitStack, role: Role, transport: str, **options: Any) -> tuple[Any, tuple[str, int]]:
    """A side, and where it listens; `plain` has its manager in this process."""
    kind = Side if options.pop("plain", False) else AgentSide
    side = kind(role, transport=transport, **options)
    stack.callback(side.close)
    return side, side.manager.start()


@contextmanager
def agents(transport: str, plain: Role | None = None, **options: Any) -> Iterator[tuple[Any, Any]]:
    with ExitStack() as stack:
        decode, _ = start(stack, Role.DECODE, transport, plain=plain is Role.DECODE, **options)
        prefill, address = start(stack, Role.PREFILL, transport, plain=plain is Role.PREFILL, **options)
        decode.manager.add_peer(prefill.me, *address)
        yield prefill, decode


def half_sent(prefill: Any, decode: Any) -> tuple[KVSender, KVReceiver, Any]:
    """A hand-off whose first chunk is written, and whose second one is not complete."""
    _, sender, receiver = published(prefill, decode, TOKENS, 2)
    sender.send(Span(0, 2 * PAGE), range(PAGES))
    decode.wait(receiver, KVPoll.TRANSFERRING)
    ready = prefill.manager.ready()
    sender.send(Span(2 * PAGE, TOKENS), range(PAGES), b"7", ready=ready)
    return sender, receiver, ready


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(what: Any) -> None:
    until = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("plain", [None, *map(Role, ("prefill", "decode"))])
def test_bytes_arrive_and_at_rest_nothing_is_left(transport: str, plain: Role | None) -> None:
    """Between two agents, and between an agent and a manager."""
    with agents(transport, plain) as (prefill, decode):
        for chunk, prefix in ((10, 0), (64, 0), (8, 16)):
            assert_handed_over(prefill, decode, 33, chunk, prefix)
        for side in (prefill, decode):
            assert_at_rest(side)
            if side is prefill:
                [path] = side.manager.paths().values()
                assert (path.transport, path.nbytes > 0) == (transport, True)
            assert side.lost.empty()


@pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning")  # the link, as when a loop breaks
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_end_of_the_links_thread_fails_every_half_at_once_and_ends_the_agent(role: Role) -> None:
    with agents("tcp") as (prefill, decode):
        sender, receiver, _ready = half_sent(prefill, decode)
        dead, alive = (prefill, decode) if role is Role.PREFILL else (decode, prefill)
        mine, other = (sender, receiver) if role is Role.PREFILL else (receiver, sender)
        dead.manager.io.post(sys.exit)  # as a bug of the loop would end it
        for side, handle in ((dead, mine), (alive, other)):
            while not handle.poll().terminal:
                side.next(events.Phase)
        assert mine.error is not None
        assert mine.error.code is ErrorCode.INTERNAL
        assert other.error is not None
        assert other.error.code is ErrorCode.PEER_LOST
        assert isinstance(dead.lost.get(timeout=DEADLINE_S), Internal)
        with pytest.raises(Internal):
            dead.manager.expect(RoomKey(new_room()), 8, DEADLINE_S)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_agent_that_is_killed_is_heard_at_once_and_no_page_comes_back_without_a_proof(
    transport: str, role: Role
) -> None:
    with agents(transport) as (prefill, decode):
        sender, receiver, _ready = half_sent(prefill, decode)
        dead, alive = (prefill, decode) if role is Role.PREFILL else (decode, prefill)
        mine, other = (sender, receiver) if role is Role.PREFILL else (receiver, sender)
        began = time.monotonic()
        os.kill(dead.manager.pid, signal.SIGKILL)
        for side, handle in ((dead, mine), (alive, other)):
            phase = side.next(events.Phase)
            while not phase.phase.terminal:
                phase = side.next(events.Phase)
            assert (phase.key, phase.phase) == (handle.key, KVPoll.FAILED)
            assert phase.error.code in (ErrorCode.PEER_LOST, ErrorCode.TRANSFER_FAILED)
            assert handle.poll() is KVPoll.FAILED
        assert mine.error is not None
        assert mine.error.code is ErrorCode.PEER_LOST
        assert mine.error.room == mine.key.room
        assert time.monotonic() - began < LIMITS.peer_silence_s / 4, "not by a silence"
        assert isinstance(dead.lost.get(timeout=DEADLINE_S), PeerLost)
        # The survivor's pages, by its own rules.
        assert alive.next(events.Release).key == other.key
        # Those of the dead agent's engine: over shm the peer may still write into published ones.
        if (transport, role) == ("shm", Role.DECODE):
            assert dead.next(events.Quarantined) == events.Quarantined(mine.key, TOKENS // PAGE)
            alive.manager.close()  # not even then: nobody of this side would know
            time.sleep(0.2)
            assert not mine.released
            assert dead.changes.empty()
        else:
            assert dead.next(events.Release).key == mine.key
            assert mine.released
        mine.clear()
        # Nothing begins any more, and says so at once.
        key = RoomKey(new_room())
        late: Any = (
            dead.manager.expect(key, 8, DEADLINE_S)
            if role is Role.PREFILL
            else dead.manager.receive(key, prefill.me, 8, DEADLINE_S)
        )
        assert dead.next(events.Release).key == key
        assert late.error.code is ErrorCode.PEER_LOST
        with pytest.raises(PeerLost):
            dead.manager.sizes()
        assert dead.lost.empty(), "it is told once"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pages_that_nobody_was_shown_come_back_when_the_agent_is_killed(transport: str) -> None:
    with agents(transport) as (prefill, decode):
        _, _sender, waiting = begin(prefill, decode, TOKENS)
        done = begin(prefill, decode, TOKENS)
        done[2].publish(range(TOKENS // PAGE))
        done[1].send(Span(0, TOKENS), range(PAGES), b"")
        decode.wait(done[2], KVPoll.SUCCESS)
        decode.next(events.Release)
        os.kill(decode.manager.pid, signal.SIGKILL)
        assert decode.next(events.Release).key == waiting.key
        assert waiting.poll() is KVPoll.FAILED
        assert done[2].poll() is KVPoll.SUCCESS, "an outcome is final"
        decode.lost.get(timeout=DEADLINE_S)
        assert decode.changes.empty()


def beside_an_engine(
    stack: ExitStack, transport: str, **options: Any
) -> tuple[Any, subprocess.Popen[str], int, KVSender]:
    """Prefill, and decode's engine in a process of its own, which has published; its agent's pid, and
    prefill's half."""
    prefill, (host, port) = start(stack, Role.PREFILL, transport, **options)
    command, pipe = [sys.executable, str(ENGINE), transport], subprocess.PIPE
    engine = stack.enter_context(
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    )
    stack.callback(os.killpg, engine.pid, signal.SIGKILL)  # and the child
    assert engine.stdin is not None
    assert engine.stdout is not None
    agent = int(engine.stdout.readline())
    key = RoomKey(new_room())
    sender = prefill.manager.expect(key, TOKENS, DEADLINE_S)
    print(prefill.me.incarnation, host, port, key.room, TOKENS, file=engine.stdin, flush=True)
    prefill.wait(sender, KVPoll.WAITING_FOR_INPUT)
    return prefill, engine, agent, sender


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_engine_that_is_killed_takes_its_agent_with_it(transport: str) -> None:
    """Also where a child that it forked still has its end of the link; and the peer hears so."""
    with ExitStack() as stack:
        prefill, engine, agent, sender = beside_an_engine(stack, transport)
        assert not gone(agent)
        began = time.monotonic()
        engine.kill()
        wait_until(lambda: gone(agent))
        assert prefill.next(events.Release).key == sender.key
        assert time.monotonic() - began < LIMITS.peer_silence_s / 4
        assert sender.error is not None
        assert sender.error.code is ErrorCode.PEER_LOST


@pytest.mark.slow
def test_an_engine_that_stands_still_gets_its_kv_meanwhile() -> None:
    with ExitStack() as stack:
        prefill, engine, _agent, sender = beside_an_engine(stack, "tcp", limits=SOON)
        engine.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * SOON.peer_silence_s)
        sender.send(Span(0, TOKENS), range(PAGES), b"7")
        prefill.wait(sender, KVPoll.SUCCESS)
        engine.send_signal(signal.SIGCONT)
        assert engine.stdout.readline() == "SUCCESS\n"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_agent_that_stands_still_is_killed_after_the_silence_and_its_pages_wait_for_that(
    transport: str,
) -> None:
    with agents(transport, limits=SOON) as (prefill, decode):
        sender, receiver, _ready = half_sent(prefill, decode)
        os.kill(decode.manager.pid, signal.SIGSTOP)
        assert decode.next(events.Quarantined).key == receiver.key
        assert receiver.error is not None
        assert receiver.error.code is ErrorCode.PEER_LOST
        assert "said nothing" in receiver.error.text
        wait_until(lambda: gone(decode.manager.pid))
        if transport == "tcp":
            assert decode.next(events.Release).key == receiver.key
        wait_until(lambda: sender.poll() is KVPoll.FAILED)
        assert prefill.next(events.Release).key == sender.key
        decode.manager.close()
        assert receiver.released is (transport == "tcp")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_agent_over_the_same_pool_takes_the_place_of_a_lost_one(transport: str) -> None:
    with ExitStack() as stack:
        prefill, address = start(stack, Role.PREFILL, transport)
        memory = allocate(spec().nbytes)
        for _ in range(3):
            decode = AgentSide(Role.DECODE, transport=transport, memory=memory)
            stack.callback(decode.manager.close)
            decode.manager.start()
            decode.manager.add_peer(prefill.me, *address)
            assert_handed_over(prefill, decode, 33, 10)
            os.kill(decode.manager.pid, signal.SIGKILL)
            decode.lost.get(timeout=DEADLINE_S)
            decode.manager.close()
        stack.callback(memory.close)


@pytest.mark.slow
def test_what_waits_for_an_agent_that_does_not_read_is_bounded() -> None:
    """Long before it counts as silent."""
    limits = Limits(max_session_backlog_bytes=2**20, peer_silence_s=DEADLINE_S)
    with agents("tcp", limits=limits) as (prefill, decode):
        _, sender, receiver = begin(prefill, decode, TOKENS)
        os.kill(prefill.manager.pid, signal.SIGSTOP)
        for _ in range(8):
            sender.finish(bytes(2**20))
        assert "does not read" in str(prefill.lost.get(timeout=DEADLINE_S))
        assert prefill.next(events.Release).key == sender.key, "it was killed"
        wait_until(lambda: receiver.poll() is KVPoll.FAILED)


def test_a_hand_off_that_finds_that_the_agent_does_not_read_fails_with_the_others() -> None:
    limits = Limits(max_session_backlog_bytes=2**16, peer_silence_s=DEADLINE_S)
    with ExitStack() as stack:
        side, _ = start(stack, Role.PREFILL, "tcp", limits=limits)
        os.kill(side.manager.pid, signal.SIGSTOP)
        senders = [side.manager.expect(RoomKey(new_room()), 8, 2 * DEADLINE_S) for _ in range(8000)]
        assert "does not read" in str(side.lost.get(timeout=DEADLINE_S))
        wait_until(lambda: all(sender.released for sender in senders))
        assert {sender.poll() for sender in senders} == {KVPoll.FAILED}


def test_an_agent_that_stands_still_is_asked_for_a_bounded_time() -> None:
    with ExitStack() as stack:
        side, _ = start(stack, Role.PREFILL, "tcp")
        os.kill(side.manager.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, side.manager.pid, os.WSTOPPED | os.WNOWAIT)  # else it may still answer
        config = side.manager.config
        soon = msgspec.structs.replace(config.limits, connect_s=0.1)
        side.manager.config = replace(config, limits=soon)
        with pytest.raises(PeerLost, match="has not answered within"):
            side.manager.sizes()
        os.kill(side.manager.pid, signal.SIGCONT)


@pytest.mark.slow
def test_the_end_of_the_link_is_no_proof_that_the_agent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that stands still hears nothing of it, and could go on to write."""
    kept: list[socket.socket] = []
    pair = socket.socketpair

    def socketpair(*arguments: Any) -> Any:
        ours, theirs = pair(*arguments)
        kept.append(ours.dup())
        return ours, theirs

    with ExitStack() as stack:
        prefill, address = start(stack, Role.PREFILL, "tcp")
        with monkeypatch.context() as patch:
            patch.setattr(kv_agent.socket, "socketpair", socketpair)
            decode, _ = start(stack, Role.DECODE, "tcp")
        decode.manager.add_peer(prefill.me, *address)
        _, receiver, _ready = half_sent(prefill, decode)
        os.kill(decode.manager.pid, signal.SIGSTOP)
        for end in kept:
            with end:
                end.shutdown(socket.SHUT_RDWR)
        assert decode.next(events.Release).key == receiver.key
        assert gone(decode.manager.pid)
        assert isinstance(decode.lost.get(timeout=DEADLINE_S), PeerLost)


@pytest.mark.slow
def test_pages_wait_until_the_process_that_is_lost_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it was killed proves nothing while the kernel has not ended it."""
    with agents("tcp") as (prefill, decode):
        _, receiver, _ready = half_sent(prefill, decode)
        asked, ended, wait = threading.Event(), threading.Event(), subprocess.Popen.wait

        def slow(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
            asked.set()
            assert ended.wait(DEADLINE_S)
            return wait(process, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", slow)
        try:
            os.kill(decode.manager.pid, signal.SIGKILL)
            wait_until(lambda: receiver.poll() is KVPoll.FAILED)
            assert asked.wait(DEADLINE_S), "nobody has asked for the end"
            with pytest.raises(PeerLost):
                decode.manager.sizes()  # the thread of the agent had its turn
            assert not receiver.released
        finally:
            ended.set()
        wait_until(lambda: receiver.released)


def test_pages_stay_out_of_use_while_the_process_that_was_killed_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does that the kernel cannot end: a device's driver holds it."""
    said, lives = threading.Event(), threading.Event()

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert timeout is not None
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(
        kv_agent.log, "error", lambda text, *_: said.set() if "does not end" in text else None
    )
    side = AgentSide(Role.PREFILL, transport="tcp")
    try:
        side.manager.start()
        sender = side.manager.expect(RoomKey(new_room()), 8, DEADLINE_S)
        side.manager.sizes()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "wait", wait)
            os.kill(side.manager.pid, signal.SIGKILL)
            assert said.wait(DEADLINE_S)
            side.manager.io.post(lives.set)
            assert lives.wait(DEADLINE_S), "the thread of the agent had its turn"
            assert (sender.poll(), sender.released) == (KVPoll.FAILED, False)
    finally:
        side.close()


def test_pages_come_back_also_to_an_engine_that_raises_when_it_hears_of_the_loss() -> None:
    side = AgentSide(Role.PREFILL, transport="tcp")

    def raises(_: SegueError) -> None:
        raise LookupError("the engine's own")

    side.manager = KVAgent(side.manager.config, side.memory, side.changes.put, on_rank_lost=raises)
    try:
        side.manager.start()
        sender = side.manager.expect(RoomKey(new_room()), 8, DEADLINE_S)
        side.manager.sizes()
        os.kill(side.manager.pid, signal.SIGKILL)
        assert side.next(events.Release).key == sender.key
    finally:
        side.close()


@pytest.mark.slow
def test_signals_of_the_terminal_and_of_a_supervisor_are_the_engines() -> None:
    with agents("shm") as (prefill, decode):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(prefill.manager.pid, number)
            os.kill(decode.manager.pid, number)
        assert_handed_over(prefill, decode, 33, 10)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["claim", "hint", "tokens", "pages", "metadata"])
def test_an_argument_of_a_wrong_type_or_size_ends_its_own_hand_off(call: str) -> None:
    with agents("shm") as (prefill, decode):
        wrong: Any
        key = RoomKey(new_room())
        if call in ("claim", "hint", "tokens"):
            options = {"claim": {"claim": "text"}, "hint": {"prefill_dp_rank": "one"}}.get(call, {})
            tokens = 2**70 if call == "tokens" else TOKENS
            wrong = decode.manager.receive(key, prefill.me, tokens, DEADLINE_S, **options)
            side = decode
        else:
            side = prefill
            wrong = prefill.manager.expect(key, TOKENS, DEADLINE_S)
            if call == "pages":
                wrong.send(Span(0, TOKENS), [2**70] * PAGES)
            else:
                wrong.finish("text")
        assert side.next(events.Release).key == key
        assert wrong.error.code is ErrorCode.INVALID_REQUEST
        wrong.clear()
        assert_handed_over(prefill, decode, 33, 10)
        assert side.lost.empty()


def test_a_number_in_place_of_a_ready_event_ends_its_own_hand_off() -> None:
    """It would be the number of another chunk's event, and this one would leave with that."""
    with agents("shm") as (prefill, decode):
        _, sender, receiver = published(prefill, decode, TOKENS)
        ready: Any = prefill.manager.ready().number
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        assert prefill.next(events.Release).key == sender.key
        assert sender.error is not None
        assert sender.error.code is ErrorCode.INVALID_REQUEST
        wait_until(lambda: receiver.released)


@pytest.mark.parametrize("plain", [None, *map(Role, ("prefill", "decode"))])
def test_an_engine_that_raises_on_a_change_ends_that_hand_off_alone(plain: Role | None) -> None:
    def taken(change: Change) -> None:
        if change.key == broken and isinstance(change, events.Phase) and not change.phase.terminal:
            raise LookupError("the engine's own")
        decode.changes.put(change)

    broken: RoomKey | None = None
    with agents("tcp", plain) as (prefill, decode):
        decode.manager._on_change = taken
        other = begin(prefill, decode, TOKENS)
        decode.wait(other[2], KVPoll.WAITING_FOR_INPUT)
        broken = RoomKey(new_room())
        receiver = decode.manager.receive(broken, prefill.me, TOKENS, DEADLINE_S)
        wait_until(lambda: receiver.released)
        assert receiver.error.code is ErrorCode.INTERNAL
        assert "LookupError" in receiver.error.text
        other[2].publish(range(TOKENS // PAGE))
        other[1].send(Span(0, TOKENS), range(PAGES), b"")
        decode.wait(other[2], KVPoll.SUCCESS)


@pytest.mark.parametrize("plain", [None, Role.DECODE])
def test_a_room_that_is_opened_again_gives_no_page_back_before_its_time(plain: Role | None) -> None:
    with agents("tcp", plain) as (prefill, decode):
        _, receiver, _ready = half_sent(prefill, decode)
        os.kill(prefill.manager.pid, signal.SIGSTOP)
        receiver.clear()
        again = decode.manager.receive(receiver.key, prefill.me, TOKENS, DEADLINE_S)
        wait_until(lambda: again.error is not None and again.released)
        told = [decode.changes.get() for _ in range(decode.changes.qsize())]
        assert [one for one in told if isinstance(one, events.Release)] == [told[-1]], told
        os.kill(prefill.manager.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_room_whose_pages_are_not_back_is_refused() -> None:
    with agents("tcp") as (prefill, decode):
        sender, receiver, _ready = half_sent(prefill, decode)
        with pytest.raises(InvalidRequest):
            decode.manager.receive(receiver.key, prefill.me, TOKENS, DEADLINE_S)
        os.kill(prefill.manager.pid, signal.SIGSTOP)  # it gives no proof, and over tcp none is needed
        receiver.clear()
        again = decode.manager.receive(receiver.key, prefill.me, TOKENS, DEADLINE_S)
        wait_until(lambda: again.poll() is KVPoll.FAILED)
        os.kill(prefill.manager.pid, signal.SIGCONT)
        wait_until(lambda: sender.poll() is KVPoll.FAILED)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_agent_that_is_closed_takes_leave_of_its_peers(transport: str) -> None:
    with agents(transport) as (prefill, decode):
        sender, _receiver, _ready = half_sent(prefill, decode)
        decode.manager.close()
        wait_until(lambda: sender.poll() is KVPoll.FAILED)
        assert sender.error is not None
        assert sender.error.code is ErrorCode.DRAINING
        assert prefill.next(events.Release).key == sender.key
        while not decode.changes.empty():
            change = decode.changes.get()
            assert isinstance(change, events.Phase)
            assert not change.phase.terminal, "nothing is reported any more"


@pytest.mark.slow
def test_an_agent_that_stands_still_when_it_is_closed_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_agent, "END_S", 1.0)
    before = children()
    side, _ = start_alone(Role.PREFILL, limits=Limits(connect_s=0.5))
    os.kill(side.manager.pid, signal.SIGSTOP)
    side.close()
    assert children() == before


@pytest.mark.slow
def test_who_closes_second_waits_for_the_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool may be freed when any call has returned."""
    monkeypatch.setattr(kv_agent, "END_S", 1.0)
    side, _ = start_alone(Role.PREFILL, limits=Limits(connect_s=0.5))
    pid = side.manager.pid
    os.kill(pid, signal.SIGSTOP)
    first = threading.Thread(target=side.manager.close)
    first.start()
    time.sleep(0.2)
    side.close()
    assert gone(pid)
    first.join(DEADLINE_S)


def test_calls_during_the_start_are_refused() -> None:
    """The agent would not hear them, and the hand-off would have no end."""
    side = AgentSide(Role.DECODE, transport="tcp")
    starting = threading.Thread(target=side.manager.start)
    starting.start()
    try:
        wait_until(lambda: side.manager.pid)
        with pytest.raises(InvalidRequest, match="start the agent"):
            side.manager.add_peer(LeaderId(new_incarnation()), "127.0.0.1", 1)
        starting.join(DEADLINE_S)
        side.manager.add_peer(LeaderId(new_incarnation()), "127.0.0.1", 1)
    finally:
        side.close()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1])
def test_a_close_ends_a_start_that_goes_on(after_s: float) -> None:
    before = children()
    side = AgentSide(Role.DECODE, transport="tcp")
    said: queue.SimpleQueue[object] = queue.SimpleQueue()

    def begins() -> None:
        try:
            said.put(side.manager.start())
        except SegueError as error:
            said.put(error)

    threading.Thread(target=begins, daemon=True).start()
    time.sleep(after_s)
    side.manager.close()
    assert isinstance(said.get(timeout=DEADLINE_S / 4), PeerLost | tuple)
    side.close()
    assert children() == before


# ---- the start and the end ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_agent_has_no_torch_nothing_that_is_preloaded_and_only_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is started beside an engine with torch."""
    import torch

    assert torch.zeros(1).item() == 0
    library = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )
    monkeypatch.setenv("LD_PRELOAD", library)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with agents("shm") as (prefill, decode):
        assert_handed_over(prefill, decode, 33, 10)
        process = psutil.Process(prefill.manager.pid)
        environment = process.environ()
        assert "LD_PRELOAD" not in environment
        assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
        assert environment["PATH"] == os.environ["PATH"]
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps
        assert "_multiarray_umath" in maps, "the maps are read"
        assert process.memory_info().rss < 100 * 2**20
        links = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert sum("memfd:segue-kv" in link for link in links) == 3, (
            "its pool, that mapped, and its peer's mapped"
        )
        assert not any("pytest" in link for link in links)


@pytest.mark.slow
def test_an_environment_of_ones_own_is_all_that_it_gets() -> None:
    with agents("tcp", environment={**agent_environment(), "SEGUE_TEST": "1"}) as (prefill, _):
        assert psutil.Process(prefill.manager.pid).environ()["SEGUE_TEST"] == "1"


@pytest.mark.slow
def test_all_threads_of_the_agent_run_where_it_was_started() -> None:
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("one CPU: every thread runs there")
    with threads_on({max(own)}), ExitStack() as stack:
        made = [start(stack, role, "shm") for role in (Role.PREFILL, Role.DECODE)]
        stack_of_made = stack.pop_all()
    with stack_of_made:
        (prefill, address), (decode, _) = made
        decode.manager.add_peer(prefill.me, *address)
        assert_handed_over(prefill, decode, 33, 10)
        for side in (prefill, decode):
            threads = [int(name) for name in os.listdir(f"/proc/{side.manager.pid}/task")]
            assert len(threads) >= 3
            assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({max(own)})}
        assert os.sched_getaffinity(0) == own


@pytest.mark.slow
def test_its_log_lines_are_the_engines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "segue"), agents("shm") as (prefill, decode):
        assert_handed_over(prefill, decode, 8, 8)
    joined = [record for record in caplog.records if record.getMessage().startswith("peer joined")]
    assert {record.name for record in joined} == {"segue.kv"}
    assert len(joined) == 2


@pytest.mark.slow
def test_agents_with_tls_and_a_secret(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.issue("127.0.0.1").load()
    with agents("tcp", tls=tls, secret=b"a secret of 16 bytes") as (prefill, decode):
        assert_handed_over(prefill, decode, 33, 10)
        for side in (prefill, decode):
            said = Path(f"/proc/{side.manager.pid}/environ").read_bytes()
            said += Path(f"/proc/{side.manager.pid}/cmdline").read_bytes()
            assert b"a secret" not in said
        other, address = start_alone(Role.PREFILL, secret=b"another one, 16 bytes", tls=tls)
        try:
            decode.manager.add_peer(other.me, *address)
            receiver = decode.manager.receive(RoomKey(new_room()), other.me, 8, DEADLINE_S)
            wait_until(lambda: receiver.poll() is KVPoll.FAILED)
            assert receiver.error is not None
            assert receiver.error.code is Unauthorized.code
        finally:
            other.close()


def start_alone(role: Role, **options: Any) -> tuple[AgentSide, tuple[str, int]]:
    side = AgentSide(role, transport="tcp", **options)
    return side, side.manager.start()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.slow
def test_an_agent_that_cannot_start_says_why_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    small = allocate(4096)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options, error, text in (
            ({"port": port}, ConfigError, str(port)),
            ({"host": "0.0.0.0"}, ConfigError, "secret"),
            ({"memory": small}, ConfigError, "the pool needs"),
            ({"transports": ["mori"]}, ConfigError, "mori"),
        ):
            side = AgentSide(Role.PREFILL, transport="tcp", **options)  # type: ignore[arg-type]
            with pytest.raises(error, match=text):
                side.manager.start()
            side.close()
            assert side.lost.empty(), "it had not been there"
    for executable, error in (("/bin/false", PeerLost), ("/nonexistent", ConfigError)):
        monkeypatch.setattr(sys, "executable", executable)
        side = AgentSide(Role.PREFILL, transport="tcp")
        with pytest.raises(error):
            side.manager.start()
        side.close()
    assert children() == before


def test_over_these_transports_alone_no_peer_writes_into_the_pool_by_itself() -> None:
    """Of all others published pages stay in quarantine when the agent is dead."""
    own = {name for name in KINDS.known if KINDS.kind(name).receiver_writes}
    assert own == {"fake", "tcp", "staged_tcp", "staged_shm"}


def test_memory_that_it_cannot_map_is_refused() -> None:
    ours = np.zeros(spec().nbytes, np.uint8)
    config = KVConfig(role=Role.PREFILL, model="m", spec=spec(), transports=["tcp"])
    for memory in (
        Memory([host_region(ours)]),
        Memory([Region(ours.ctypes.data, ours.nbytes, "cuda:0", owner=ours)]),
    ):
        with pytest.raises(ConfigError, match="allocate"):
            KVAgent(config, memory)
    with pytest.raises(ConfigError, match="unknown transport"):
        KVAgent(
            KVConfig(role=Role.PREFILL, model="m", spec=spec(), transports=["no"]), allocate(spec().nbytes)
        )


def test_calls_before_the_start_are_refused_and_after_the_end_do_nothing() -> None:
    before = children()
    with ExitStack() as stack:
        side = AgentSide(Role.DECODE, transport="tcp")
        stack.callback(side.close)
        peer = LeaderId(new_incarnation())
        assert side.manager.pid == 0
        with pytest.raises(InvalidRequest, match="start the agent"):
            side.manager.add_peer(peer, "127.0.0.1", 1)
        with pytest.raises(InvalidRequest, match="start the agent"):
            side.manager.decline(RoomKey(1), peer, InvalidRequest("").info)
        side.manager.start()
        receiver = side.manager.receive(RoomKey(new_room()), peer, 8, DEADLINE_S)
        side.manager.close()
        side.manager.close()
        assert children() == before
        receiver.abort()
        receiver.clear()
        side.manager.receive(RoomKey(new_room()), peer, 8, DEADLINE_S)
        side.manager.add_peer(peer, "127.0.0.1", 1)
        with pytest.raises(PeerLost):
            side.manager.sizes()
        assert side.changes.empty()
        assert side.lost.empty()
