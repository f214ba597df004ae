"""Production's sessions in virtual time: over a network that delays, splits, breaks, blocks and flips."""

import inspect

import pytest

from segue.kv.errors import SegueError
from segue.kv.ids import Role
from segue.kv.limits import Limits
from segue.server.messages.control import ControlMessage, Load
from segue_lab.sim.loop import SimLoop
from segue_lab.sim.network import Network
from segue_lab.sim.runtime import PORT, SimSessionNode
from segue_lab.sim.timing import Timing
from segue_lab.sim.world import Process, SkewedClock, World, new_leader

PEERS = []


@pytest.fixture(autouse=True)
def ended():
    """Waiting tasks in the loops of a test's processes end with it."""
    yield
    while PEERS:
        peer = PEERS.pop()
        peer.kill()
        peer.loop.die()


class Peer(Process):
    """A process with a session node, which remembers what its sessions told it."""

    def __init__(self, world, network, name, host, rate=1.0):
        super().__init__(world, name)
        self.loop = SimLoop(self, SkewedClock(world, 1000.0, rate), network, host)
        PEERS.append(self)
        self.me = new_leader(world.rng(name))
        self.got, self.ends, self.opened_with = [], [], []
        self.node = SimSessionNode(
            loop=self.loop,
            me=self.me,
            role=Role.FRONTEND,
            secret=b"a secret of the tests",
            handlers=dict.fromkeys(Role, self),
            message_type=ControlMessage,
            limits=Limits(keepalive_s=0.5, peer_silence_s=2.0),
        )

    def hello(self):
        return b""

    def accept(self, peer):
        pass

    def opened(self, session):
        self.opened_with.append(session.peer.leader)

    def received(self, session, message):
        self.got.append(message)

    def closed(self, session, error):
        self.ends.append(error)

    def session(self, other):
        return self.node.sessions.get(other.me)


def load(number):
    return Load(dp_rank=0, running=0, waiting=number, tokens=0, pages_free=0, pages_total=0)


class Pair:
    def __init__(self, seed=0, rate=1.0):
        self.world = World(seed)
        self.network = Network(self.world, Timing())
        self.a = Peer(self.world, self.network, "a", "10.0.0.1")
        self.b = Peer(self.world, self.network, "b", "10.0.0.2", rate)
        for peer in (self.a, self.b):
            listening = peer.node.listen(peer.loop.host, PORT)
            with pytest.raises(StopIteration):
                peer.loop.enter(listening.send, None)
        self.outcomes = []

    def dial(self, a=None, b=None, expect=None):
        a, b = a or self.a, b or self.b

        async def go():
            try:
                await a.node.connect(b.loop.host, PORT, expect=expect, timeout_s=3.0)
                self.outcomes.append(None)
            except SegueError as error:
                self.outcomes.append(error)

        self.world.after(0.0, a, lambda: a.loop.enter(a.loop.create_task, go()))

    def run(self, seconds):
        end = self.world.now + seconds
        while self.world.next_at is not None and self.world.next_at <= end:
            self.world.step()
        self.world.now = end


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_whole_and_in_order(seed):
    pair = Pair(seed)
    pair.dial()
    pair.run(1.0)
    assert pair.outcomes == [None]
    for number in range(50):
        pair.world.after(0.001 * number, pair.a, pair.a.session(pair.b).send, load(number))
    pair.run(1.0)
    assert [message.waiting for message in pair.b.got] == list(range(50))
    pair.run(60.0)  # nothing but keepalive for a minute
    assert pair.a.session(pair.b) is not None
    assert not pair.a.ends + pair.b.ends


def test_both_dial_at_once_and_one_session_stays():
    for seed in range(300):
        pair = Pair(seed)
        pair.dial()
        pair.dial(pair.b, pair.a)
        pair.run(3.0)
        assert pair.outcomes == [None, None], seed
        pair.a.session(pair.b).send(load(1))
        pair.b.session(pair.a).send(load(2))
        pair.run(1.0)
        assert [m.waiting for m in pair.b.got] == [1]
        assert [m.waiting for m in pair.a.got] == [2]


@pytest.mark.parametrize("rate", [0.98, 1.0, 1.02])
def test_one_blocked_direction_is_found_by_keepalive_on_both_sides(rate):
    pair = Pair(3, rate)
    pair.dial()
    pair.run(1.0)
    pair.network.block(pair.a, pair.b)
    pair.run(4.0)
    assert len(pair.b.ends) == 1  # it heard nothing
    assert "silent" in str(pair.b.ends[0])
    assert len(pair.a.ends) == 1  # and said so: that direction is open
    pair.network.heal(pair.a, pair.b)
    pair.dial()
    pair.run(3.0)
    assert pair.outcomes[-1] is None


def test_a_killed_peer_is_noticed_and_its_next_life_is_another_incarnation():
    pair = Pair(5)
    pair.dial(expect=pair.b.me)
    pair.run(1.0)
    pair.b.kill()
    pair.network.died(pair.b)
    pair.run(1.0)
    assert len(pair.a.ends) == 1
    old, pair.b = pair.b, Peer(pair.world, pair.network, "b#1", "10.0.0.2")
    with pytest.raises(StopIteration):
        pair.b.loop.enter(pair.b.node.listen("10.0.0.2", PORT).send, None)
    pair.dial(expect=old.me)
    pair.run(1.0)
    assert "restarted" in str(pair.outcomes[-1])


def test_a_paused_peer_is_given_up_and_finds_out_when_it_goes_on():
    pair = Pair(7)
    pair.dial()
    pair.run(1.0)
    pair.b.pause()
    pair.run(10.0)
    assert len(pair.a.ends) == 1
    assert pair.b.ends == []
    pair.b.resume()
    pair.run(1.0)
    assert len(pair.b.ends) == 1
    assert pair.b.session(pair.a) is None


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_bit_ends_the_session_and_is_never_delivered(seed):
    pair = Pair(seed)
    pair.dial()
    pair.run(1.0)
    pair.network.flips[pair.b] = 1
    pair.a.session(pair.b).send(load(12345))
    pair.run(1.0)
    assert pair.b.got == []
    assert len(pair.a.ends) == len(pair.b.ends) == 1
    pair.dial()
    pair.run(2.0)
    pair.a.session(pair.b).send(load(9))
    pair.run(1.0)
    assert [m.waiting for m in pair.b.got] == [9]


def test_a_process_that_is_killed_in_the_midst_of_a_callback_runs_none_of_the_tasks_that_it_then_starts():
    """The callback goes on after a fault in it has killed the process."""
    world = World(0)
    peer = Peer(world, Network(world, Timing()), "a", "10.0.0.1")
    begun = []

    async def work():
        begun.append(1)

    started = []

    def callback():
        peer.kill()
        peer.loop.die()
        coroutine = work()
        started.append(coroutine)
        peer.loop.create_task(coroutine)

    peer.loop.call_soon(callback)
    while world.step():
        pass
    assert not begun
    assert inspect.getcoroutinestate(started[0]) == inspect.CORO_CLOSED
