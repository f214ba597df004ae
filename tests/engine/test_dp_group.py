"""The messages of DP ranks that compute together: no model, and tensors that a double gathers."""

import contextlib
import queue

import pytest
import torch

from segue.engine.ranks.dp_group import DpGroup, DpMessage, GroupLost, RankDrained, StepBegins
from segue.kv.errors import Internal, PeerLost, RankDivergence
from segue.kv.limits import Limits
from segue.kv.process_link import ProcessLink
from segue.server.supervisor.dp_rank_processes import star


class Gloo:
    """Gathers what a rank brings, and what was prepared of the others."""

    def __init__(self, rank, size):
        self.rank, self.others, self.closed = rank, [None] * size, 0

    def gather(self, own, _sizes):
        return [own if at == self.rank else other for at, other in enumerate(self.others)]

    def close(self):
        self.closed += 1


class Peer:
    """The other end of a link of the rank that is tested."""

    def __init__(self, sock):
        self.heard = queue.SimpleQueue()
        name = "the rank that is tested"
        self.link = ProcessLink(sock, name, DpMessage, received=self.heard.put, ended=self._ended)

    def _ended(self, _reason, over):
        if over:
            self.heard.put("end")

    def next(self):
        return self.heard.get(timeout=60)


class Rank:
    """The rank that is tested, of three, what its leader is told, and its peers by their rank."""

    def __init__(self, rank, limits=None):
        links = star(3)
        self.group = DpGroup(rank, 3, links[rank], "a model", limits=limits)
        self.group._gloo = Gloo(rank, 3)
        others = {1: links[1][0], 2: links[2][0]} if rank == 0 else {0: links[0][rank - 1]}
        self.peers = {peer: Peer(sock) for peer, sock in others.items()}
        for sock in {sock for of_rank in links for sock in of_rank} - {*links[rank], *others.values()}:
            sock.close()
        self.told = queue.SimpleQueue()

    def listen(self):
        self.group.listen(lambda: self.told.put("wake"), lambda: self.told.put("leave"), self.told.put)
        assert self.next() == "wake", "there may be something to do already"

    def next(self):
        return self.told.get(timeout=60)

    def close(self):
        self.group.close()
        for peer in self.peers.values():
            peer.link.close()


@pytest.fixture
def first():
    with contextlib.closing(Rank(0)) as rank:
        rank.listen()
        yield rank


@pytest.fixture
def second():
    with contextlib.closing(Rank(1)) as rank:
        rank.listen()
        yield rank


@pytest.mark.parametrize("message", [StepBegins(1), RankDrained(1), GroupLost(PeerLost("it went").info)])
def test_what_one_rank_says_the_first_passes_on_to_the_others_and_not_back(first, message):
    first.peers[1].link.post(message)
    assert first.peers[2].next() == message
    first.group.done()
    answer = message if isinstance(message, GroupLost) else RankDrained(0)
    assert first.peers[1].next() == answer, "but that its own group is over now, too"


def test_a_step_that_another_begins_wakes_the_leader_and_an_older_message_takes_nothing_back(first):
    for number in (2, 1):
        first.peers[1].link.post(StepBegins(number))
        assert first.next() == "wake"
    assert first.group.behind
    begin(first.group, [0, 0], 0)
    assert first.group.behind
    begin(first.group, [0, 0], 0)
    assert not first.group.behind


def digest_of(group):
    return int.from_bytes(group._digest, signed=True)


def begin(group, others, rows):
    """A step of `group` with `rows`; the others bring `others`, and stand where it stands."""
    here, parts = [group._number + 1, digest_of(group)], iter(others)
    group._gloo.others = [
        None if rank == group.rank else torch.tensor([[*here, next(parts)]]) for rank in range(group.size)
    ]
    with group.step(rows):
        return group.rows, group.own


def test_who_begins_a_step_says_so_and_who_was_told_of_it_does_not(first, second):
    assert begin(second.group, [4, 5], 3) == ([4, 3, 5], slice(4, 7))
    assert second.peers[0].next() == StepBegins(1)
    first.peers[1].link.post(StepBegins(1))
    assert first.next() == "wake"
    assert begin(first.group, [3, 5], 4) == ([4, 3, 5], slice(0, 4))
    first.group.done()
    assert [first.peers[2].next() for _ in range(2)] == [StepBegins(1), RankDrained(0)]
    assert first.peers[1].next() == RankDrained(0)
    assert first.group._digest == second.group._digest, "they have computed the same"


@pytest.mark.parametrize("differs", ["rows", "step", "nothing"])
def test_ranks_that_have_computed_other_steps_do_not_compute_another_one(first, second, differs):
    begin(first.group, [3, 5], 4)
    begin(second.group, [4, 6 if differs == "rows" else 5], 3)
    number = 3 if differs == "step" else 2
    of_second = torch.tensor([[number, digest_of(second.group), 1]])
    of_third = torch.tensor([[2, digest_of(first.group), 1]])
    first.group._gloo.others = [None, of_second, of_third]
    if differs == "nothing":
        with first.group.step(1):
            assert first.group.rows == [1, 1, 1]
        return
    with pytest.raises(RankDivergence), first.group.step(1):
        raise AssertionError("it began")
    assert isinstance(first.next(), RankDivergence)


def test_why_a_group_is_over_is_told_once_and_nothing_is_computed_after(first):
    first.peers[1].link.post(StepBegins(5))
    assert first.next() == "wake"
    group = first.group
    begin(group, [0, 0], 0)
    group._gloo.others = [None, *[torch.tensor([[2, digest_of(group), 0]])] * 2]
    with pytest.raises(Internal, match="a bug"), group.step(0):
        raise Internal("a bug")
    with pytest.raises(Internal, match="a bug"), group.step(0):
        raise AssertionError("it began")
    assert isinstance(first.next(), Internal)
    assert first.told.empty()
    assert group._gloo.closed, "who waits in an exchange is to see it"
    assert not group.behind, "a leader must not step along for ever"
    assert group.done(), "nor wait for the others to drain"
    assert [type(first.peers[2].next()) for _ in range(3)] == [StepBegins, GroupLost, RankDrained]


def test_who_drains_is_waited_for_by_nobody_once_all_do(first):
    assert not first.group.done()
    assert not first.group.done()
    first.peers[1].link.post(RankDrained(1))
    assert [first.next(), first.next()] == ["leave", "wake"]
    assert not first.group.done()
    first.peers[2].link.post(RankDrained(2))
    assert [first.next(), first.next()] == ["leave", "wake"]
    assert first.group.done()
    first.peers[2].link.close()
    first.group.close()
    assert first.told.empty(), "it has drained, as all have"
    heard = [first.peers[1].next() for _ in range(3)]
    assert heard == [RankDrained(0), RankDrained(2), "end"], "each said once"


def test_what_is_said_while_nobody_listens_is_told_to_who_listens_next(first):
    first.group.stop_listening()
    first.peers[1].link.post(RankDrained(1))
    first.peers[1].link.post(StepBegins(1))
    assert [first.peers[2].next() for _ in range(2)] == [RankDrained(1), StepBegins(1)]
    assert first.told.empty()
    first.group.listen(lambda: first.told.put("wake"), lambda: first.told.put("leave"), first.told.put)
    assert {first.next(), first.next()} == {"leave", "wake"}


@pytest.mark.parametrize("ends", ["closes", "is silent", "says nonsense", "closed before we listened"])
def test_the_loss_of_a_rank_that_has_not_drained_ends_the_group_for_all(ends):
    with contextlib.closing(Rank(0, Limits(keepalive_s=0.1, peer_silence_s=0.3))) as first:
        peer = first.peers[1].link
        if ends == "closed before we listened":
            peer.close()
            assert isinstance(first.peers[2].next(), GroupLost)
            first.group.listen(lambda: None, lambda: None, first.told.put)
        else:
            first.listen()
        if ends == "closes":
            peer.close()
        elif ends == "is silent":
            peer.io.post(peer._transport.pause_reading)
        elif ends == "says nonsense":
            peer.io.post(peer.send_frame, b"\0\0\0\1\xc1")
        assert isinstance(first.next(), PeerLost)
        if ends != "closed before we listened":
            assert isinstance(first.peers[2].next(), GroupLost)


def test_who_leaves_itself_loses_nobody(first):
    first.group.close()
    assert [first.peers[1].next(), first.peers[2].next()] == ["end", "end"]
    assert first.told.empty()


def test_a_rank_that_ends_while_it_loads_is_named():
    with contextlib.closing(Rank(0)) as first:
        first.peers[2].link.close()
        with pytest.raises(PeerLost, match="DP rank 2 of this instance has ended"):
            first.group.meet(60)
