"""Sessions in any interleaving of what happens within one turn of the loop and between turns.

Per peer an owner hears `opened`, `closed`, `opened`, … and never two of a kind in a row; each `closed` and
each message names the session that was opened last. Nobody is said to have been restarted who lives.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from session_peers import SECRET, Message, Note, leader
from turn_loop import TurnLoop

from segue.kv.errors import Draining, PeerRestarted, SegueError
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.node import SessionNode
from segue.kv.session.wire import LINGER_S

LIMITS = Limits(keepalive_s=0.5, peer_silence_s=2.0)
PORT = 9000
#: What a message asks its receiver to do.
NOTHING, CLOSE, RAISE = range(3)


class Owner:
    """A `SessionHandler` that checks the order of what it is told."""

    def __init__(self) -> None:
        self.open: dict[LeaderId, Session] = {}
        self.ends: list[SegueError] = []
        self.problems: list[str] = []

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None:
        pass

    def opened(self, session: Session) -> None:
        if session.peer.leader in self.open:
            self.problems.append("opened while the last session with this peer is not closed")
        self.open[session.peer.leader] = session

    def received(self, session: Session, message: object) -> None:
        if self.open.get(session.peer.leader) is not session:
            self.problems.append("a message of a session that is not the open one")
        assert isinstance(message, Note)
        if message.number == CLOSE:
            session.close(Draining("as asked"))
        elif message.number == RAISE:
            raise KeyError("a bug in one request")

    def closed(self, session: Session, error: SegueError) -> None:
        if self.open.get(session.peer.leader) is not session:
            self.problems.append("closed names another session than the one that was opened")
        self.open.pop(session.peer.leader, None)
        self.ends.append(error)


class Net:
    """Nodes that listen on a loop of turns."""

    def __init__(self, hosts: dict[str, str], bound: str = "") -> None:
        self.loop = TurnLoop()
        self.nodes: dict[str, SessionNode] = {}
        #: why dials did not end in a session
        self.failed: list[SegueError] = []
        for name, host in hosts.items():
            self.start(name, host, bound)

    def start(self, name: str, host: str, bound: str = "") -> SessionNode:
        """A node that is reached at `host` and listens at `bound`, which no peer can see."""
        node = SessionNode(
            me=leader(name),
            role=Role.PREFILL,
            secret=SECRET,
            handlers=dict.fromkeys(Role, Owner()),
            message_type=Message,
            limits=LIMITS,
            advertise=host if bound else None,
        )
        node.host = host  # type: ignore[attr-defined]
        node._listen = f"{bound or host}:{PORT}"
        self.loop.listeners[host, PORT] = node._listener.connection_from
        self.nodes[name] = node
        return node

    def owner(self, name: str) -> Owner:
        handler = self.nodes[name]._handlers[Role.PREFILL]
        assert isinstance(handler, Owner)
        return handler

    def dial(self, a: str, b: str) -> None:
        self.loop.enter(self.loop.create_task, self._dial(a, b))

    async def _dial(self, a: str, b: str) -> None:
        peer = self.nodes[b]
        try:
            await self.nodes[a].connect(
                peer.host,
                PORT,
                expect=peer.me,
                timeout_s=3.0,  # type: ignore[attr-defined]
            )
        except SegueError as error:
            self.failed.append(error)

    def step(self, what: str, a: int, b: int) -> None:
        names = list(self.nodes)
        one, other = names[a % len(names)], names[b % len(names)]
        session = self.nodes[one].sessions.get(leader(other))
        ends = self.loop.ends
        match what:
            case "turn":
                self.loop.turn()
            case "later":
                self.loop.turn(0.1 * (1 + a % 8))
            case "dial" if one != other:
                self.dial(one, other)
            case "deliver" if ends:
                ends[a % len(ends)].deliver(None if b % 4 else 1 + b)
            case "snap" if ends and a % 4 == 0:
                ends[b % len(ends)].snap()
            case "close" if session is not None:
                self.loop.enter(session.close)
            case "ask" if session is not None:
                self.loop.enter(session.send, Note((NOTHING, CLOSE, CLOSE, RAISE)[a % 4]))
            case _:
                pass

    def timers(self) -> int:
        """How many will still do something."""
        return sum(not timer.cancelled() for *_, timer in self.loop._timers)

    def check(self, seed: int = -1) -> None:
        assert not [problem for name in self.nodes for problem in self.owner(name).problems], seed
        assert not self.loop.errors, seed
        for name, node in self.nodes.items():
            for peer, session in self.owner(name).open.items():
                assert session.closing == (node.sessions.get(peer) is not session), seed

    def rest(self, seed: int = -1) -> None:
        """Nothing new is done; what was begun ends."""
        for _ in range(8):
            self.loop.settle()
            self.loop.turn(0.4)
        self.loop.settle()
        for name, node in self.nodes.items():
            assert self.owner(name).open == dict(node.sessions), f"{seed}: the owner believes something else"
            for peer in node.sessions:
                other = next(n for n in self.nodes.values() if n.me == peer)
                assert node.me in other.sessions, f"{seed}: one side has a session, the other none"
        # Of what has ended nothing is left; a session has one socket and one timer at either end.
        ends = sum(len(node.sessions) for node in self.nodes.values())
        assert len(self.loop.ends) == ends, seed
        assert self.timers() == ends, seed
        for node in self.nodes.values():
            assert len(node._connections) == len(node._told) == len(node.sessions), seed
        self.check(seed)


WHAT = {"turn": 3, "later": 1, "dial": 2, "deliver": 5, "snap": 1, "close": 1, "ask": 1}
HOSTS = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


@pytest.mark.slow
@pytest.mark.parametrize("peers", [2, 3])
def test_per_peer_opened_and_closed_alternate(peers: int) -> None:
    opened = 0
    for seed in range(200):
        rng = random.Random(seed)
        net = Net(dict(list(HOSTS.items())[:peers]))
        for _ in range(150):
            net.step(rng.choices(list(WHAT), WHAT.values())[0], rng.randrange(16), rng.randrange(16))
            net.check(seed)
        net.rest(seed)
        ends = [end for name in net.nodes for end in net.owner(name).ends]
        assert not any(isinstance(end, PeerRestarted) for end in ends), seed
        opened += sum(node.stats.opened for node in net.nodes.values())
    assert opened > 500, f"only {opened} sessions"


@pytest.mark.parametrize("bound", ["0.0.0.0", "172.17.0.2"])
def test_peers_behind_one_address_translator_are_not_each_others_restart(bound: str) -> None:
    """Each is seen as the same host, and names the same listener; what it advertises is its own."""
    for seed in range(50):
        rng = random.Random(seed)
        net = Net(HOSTS, bound)
        net.loop.seen_as = dict.fromkeys(HOSTS.values(), "192.168.0.1")
        net.dial("b", "a")
        net.dial("c", "a")
        for _ in range(60):
            net.step(rng.choices(list(WHAT), WHAT.values())[0], rng.randrange(16), rng.randrange(16))
            net.check(seed)
        net.rest(seed)
        ends = [end for name in net.nodes for end in net.owner(name).ends]
        assert not any(isinstance(end, PeerRestarted) for end in ends), seed


@pytest.mark.parametrize("bound", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_peers_of_two_hosts_that_listen_at_their_own_loopback_are_not_each_others_restart(bound: str) -> None:
    """A frontend on each: both say the same address, and it is another place on each host."""
    net = Net(HOSTS)
    net.loop.seen_as = {host: host for host in HOSTS.values()}
    for name in "bc":
        net.nodes[name]._listen = f"{bound}:{PORT}"
        net.dial(name, "a")
        net.loop.settle()
    assert set(net.nodes["a"].sessions) == {leader("b"), leader("c")}
    assert not net.owner("a").ends
    net.rest()


@pytest.mark.parametrize("bound", ["", "0.0.0.0", "172.17.0.2"])
def test_lesson_09_a_restart_behind_an_address_translator_is_told_as_soon_as_it_has_proven_itself(
    bound: str,
) -> None:
    net = Net(HOSTS, bound)
    net.loop.seen_as = dict.fromkeys(HOSTS.values(), "192.168.0.1")
    net.dial("b", "a")
    net.dial("c", "a")
    net.loop.settle()
    assert len(net.nodes["a"].sessions) == 2
    # b is gone without a word, and something else is at its address.
    gone = net.nodes.pop("b")
    net.loop.ends = [end for end in net.loop.ends if end.protocol._owner is not gone]
    net.start("d", HOSTS["b"], bound)
    net.dial("d", "a")
    net.loop.settle()  # in no time
    assert [type(end) for end in net.owner("a").ends] == [PeerRestarted]
    assert set(net.nodes["a"].sessions) == {leader("c"), leader("d")}


@pytest.mark.parametrize("frame", range(3))
def test_a_new_session_in_the_turn_in_which_the_old_one_is_given_up_is_told_after_its_end(frame: int) -> None:
    """`b` gave its session up, of which `a` has heard nothing yet; `a` gives it up in the very turn in which
    the new one's `frame` comes."""
    net = Net({"a": "10.0.0.1", "b": "10.0.0.2"})
    net.dial("b", "a")
    net.loop.settle()
    old: Any = net.nodes["a"].sessions[leader("b")]
    stale = {end for end in net.loop.ends if end.protocol is old or end.other.protocol is old}
    net.loop.enter(net.nodes["b"].sessions[leader("a")].close)
    net.dial("b", "a")
    came = 0
    for _ in range(40):
        net.loop.turn()
        for end in [end for end in net.loop.ends if end not in stale]:
            if end.protocol._owner is net.nodes["a"] and end.arriving:
                came += 1
                if came == frame + 1:
                    net.loop.enter(old.close)
            end.deliver()
    assert came > frame, "there are fewer frames than this"
    net.rest()
    assert net.nodes["a"].sessions[leader("b")] is not old


def test_of_two_that_dial_each_other_the_first_session_stays_however_the_network_delivers() -> None:
    """What the other side knew when it listed its sessions may be older than the first session: then its list
    cannot name it, and that it does not is no reason to give the session up."""
    crossed = 0
    for seed in range(300):
        rng = random.Random(seed)
        net = Net({"a": "10.0.0.1", "b": "10.0.0.2"})
        net.dial("a", "b")
        net.dial("b", "a")
        for _ in range(80):
            net.step(rng.choice(("turn", "deliver", "deliver")), rng.randrange(16), rng.randrange(16))
        crossed += sum(end.protocol.handshake.authenticated for end in net.loop.ends) > 2
        net.rest(seed)
        assert net.failed == [], f"{seed}: both dials end in the one session, whichever it is"
        opened = [node.stats.opened for node in net.nodes.values()]
        assert opened == [1, 1], f"{seed}: a session was opened and given up for another: {opened}"
        assert not any(net.owner(name).ends for name in net.nodes), seed
    assert crossed > 30


def test_who_does_not_take_the_last_word_is_cut_a_moment_later() -> None:
    """Its machine may be gone; the socket, and who waits for it to close a node, must not wait for it."""
    net = Net({"a": "10.0.0.1", "b": "10.0.0.2"})
    net.dial("b", "a")
    net.loop.settle()
    session: Any = net.nodes["a"].sessions[leader("b")]
    [mine] = [end for end in net.loop.ends if end.protocol is session]
    assert net.timers() == 2
    net.loop.enter(session.close)
    assert net.timers() == 2, "its keepalive has ended, and its cut is to come"
    assert session._inbox.buffer_bytes < 1024, "it lingers without the memory of its largest frame"
    net.loop.turn(LINGER_S - 0.1)
    assert not mine.over
    net.loop.turn(0.2)
    net.loop.turn()
    assert mine not in net.loop.ends
    assert session not in net.nodes["a"]._connections


def test_the_reason_of_an_end_within_a_batch_is_heard() -> None:
    net = Net({"a": "10.0.0.1", "b": "10.0.0.2"})
    net.dial("b", "a")
    net.loop.settle()
    session = net.nodes["b"].sessions[leader("a")]
    net.loop.enter(session.send, Note(CLOSE))
    net.loop.settle()
    for name in net.nodes:
        assert [(type(end), str(end)) for end in net.owner(name).ends] == [(Draining, "as asked")]
    assert (net.timers(), net.loop.ends) == (0, []), "at once"
