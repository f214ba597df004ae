"""The words of DP ranks that compute together: no thread, no model, and tensors that a double gathers."""

import socket

import pytest
import torch

from segue.engine.ranks.dp_group import AliveWord, DpDoneWord, DpGroup, LostWord, StepWord, _decoder
from segue.kv.errors import Internal, PeerLost, RankDivergence
from segue.server.supervisor.dp_rank_processes import star


class Gloo:
    """Gathers what a rank brings, and what was prepared of the others."""

    def __init__(self, rank, size):
        self.rank, self.others, self.closed = rank, [None] * size, 0

    def gather(self, own, _sizes):
        return [own if at == self.rank else other for at, other in enumerate(self.others)]

    def close(self):
        self.closed += 1


class Told:
    """The events that a leader got."""

    def __init__(self, group):
        self.words, self.lost = [], []
        group._wake = lambda: self.words.append("wake")
        group._leave = lambda: self.words.append("leave")
        group._on_lost = self.lost.append


@pytest.fixture
def ranks():
    """Three ranks that have met, what each one's leader is told, and their links."""
    links = star(3)
    groups = [DpGroup(rank, 3, links[rank], "a model") for rank in range(3)]
    for group in groups:
        group._gloo = Gloo(group.rank, 3)
    yield groups, [Told(group) for group in groups], links
    for group in groups:
        group.close()


def waiting(link):
    """The words that a link has for who listens there."""
    words = []
    while True:
        try:
            body = link.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return words
        if not body:
            return [*words, "end"]
        words.append(_decoder.decode(body))


def hear(group, link, rank):
    """Take one word that lies there."""
    return group._heard(link, rank)


@pytest.mark.parametrize(
    "word", [StepWord(1), DpDoneWord(1), LostWord(PeerLost("it went").info), AliveWord()]
)
def test_what_one_rank_says_the_first_passes_on_to_the_others_and_not_back(ranks, word):
    (first, second, _), _, links = ranks
    second._say(word)
    assert hear(first, links[0][0], 1)
    onward = [] if isinstance(word, AliveWord) else [word]
    assert waiting(links[2][0])[: len(onward)] == onward
    back = waiting(links[1][0])
    assert back == ([word] if isinstance(word, LostWord) else []), "but that its own group is over now, too"


def test_a_step_that_another_begins_wakes_the_leader_and_an_older_word_takes_nothing_back(ranks):
    (first, second, _), told, links = ranks
    for number in (2, 1):
        second._say(StepWord(number))
        hear(first, links[0][0], 1)
    assert first.behind
    assert told[0].words == ["wake", "wake"]
    begin(first, [0, 0], 0)
    assert first.behind
    begin(first, [0, 0], 0)
    assert not first.behind


def digest_of(group):
    return int.from_bytes(group._digest, signed=True)


def prepare(group, others):
    """In the next exchange of `group` the others bring `others`, and stand where it stands."""
    here, parts = [group._number + 1, digest_of(group)], iter(others)
    group._gloo.others = [
        None if rank == group.rank else torch.tensor([[*here, next(parts)]]) for rank in range(group.size)
    ]


def begin(group, others, rows):
    """A step of `group` with `rows`."""
    prepare(group, others)
    with group.step(rows):
        return group.rows, group.own


def test_who_begins_a_step_says_so_and_who_was_told_of_it_does_not(ranks):
    (first, second, _), _, links = ranks
    assert begin(second, [4, 5], 3) == ([4, 3, 5], slice(4, 7))
    assert waiting(links[0][0]) == [StepWord(1)]
    first._awaited = 1
    assert begin(first, [3, 5], 4) == ([4, 3, 5], slice(0, 4))
    assert waiting(links[2][0]) == []
    assert first._digest == second._digest, "they have computed the same"


@pytest.mark.parametrize("differs", ["rows", "step", "nothing"])
def test_ranks_that_have_computed_other_steps_do_not_compute_another_one(ranks, differs):
    (first, second, _), told, _ = ranks
    begin(first, [3, 5], 4)
    begin(second, [4, 6 if differs == "rows" else 5], 3)
    number = 3 if differs == "step" else 2
    of_second = torch.tensor([[number, digest_of(second), 1]])
    first._gloo.others = [None, of_second, torch.tensor([[2, digest_of(first), 1]])]
    if differs == "nothing":
        with first.step(1):
            assert first.rows == [1, 1, 1]
        return
    with pytest.raises(RankDivergence), first.step(1):
        raise AssertionError("it began")
    assert [type(error) for error in told[0].lost] == [RankDivergence]


def test_why_a_group_is_over_is_told_once_and_nothing_is_computed_after(ranks):
    (first, _, _), told, links = ranks
    first._awaited = 5
    assert first.behind
    prepare(first, [0, 0])
    with pytest.raises(Internal, match="a bug"), first.step(0):
        raise Internal("a bug")
    with pytest.raises(Internal, match="a bug"), first.step(0):
        raise AssertionError("it began")
    assert len(told[0].lost) == 1
    assert first._number == 1
    assert first._gloo.closed, "who waits in an exchange is to see it"
    assert not first.behind, "a leader must not step along for ever"
    assert first.done(), "nor wait for the others to drain"
    assert [type(word) for word in waiting(links[2][0])] == [LostWord, DpDoneWord]


def test_who_drains_is_waited_for_by_nobody_once_all_do(ranks):
    (first, second, third), told, links = ranks
    assert not first.done()
    assert not first.done()
    assert waiting(links[1][0]) == [DpDoneWord(0)], "said once"
    second._say(DpDoneWord(1))
    hear(first, links[0][0], 1)
    assert told[0].words == ["leave", "wake"]
    assert not first.done()
    third._say(DpDoneWord(2))
    hear(first, links[0][1], 2)
    assert first.done()
    third.close()
    assert not hear(first, links[0][1], 2), "there is no other word"
    assert told[0].lost == [], "it has drained, as all have"


def test_what_is_said_while_nobody_listens_is_told_to_who_listens_next(ranks):
    (first, second, _), _, links = ranks
    before, anew = [], []
    first.listen(lambda: before.append("wake"), lambda: before.append("leave"), before.append)
    first.stop_listening()
    second._say(DpDoneWord(1))
    second._say(StepWord(1))
    links[2][0].settimeout(60)
    while _decoder.decode(links[2][0].recv(65536)) != StepWord(1):
        pass  # once it is passed on, the word before was taken
    first.listen(lambda: anew.append("wake"), lambda: anew.append("leave"), anew.append)
    assert {*anew} == {"leave", "wake"}
    assert before == []


@pytest.mark.parametrize("closed", [False, True])
def test_the_end_of_a_rank_that_has_not_drained_is_a_loss_unless_we_leave_ourselves(ranks, closed):
    (first, second, _), told, links = ranks
    if closed:
        first.close()
    second.close()
    assert not hear(first, links[0][0], 1)
    assert [type(error) for error in told[0].lost] == ([] if closed else [PeerLost])
    first._silent(2)
    assert len(told[0].lost) == (0 if closed else 1)


def test_what_cannot_be_read_ends_the_group_for_all(ranks):
    (first, second, _), told, links = ranks
    second._links[0].send(b"\xc1")
    assert hear(first, links[0][0], 1)
    assert [type(error) for error in told[0].lost] == [RankDivergence]
    assert [type(word) for word in waiting(links[2][0])][:1] == [LostWord]
