"""Ranks of a peer die one after the other while fences are asked and answered, in any order: what the last
death proves is found out, and nothing is believed before it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from decode_rig import PLAN, PREFILL, Line, Rig

from segue.kv.errors import Internal, PeerLost
from segue.kv.ids import LeaderId, RankId, TransferId, new_incarnation
from segue.kv.protocol import events
from segue.kv.transport.base import Fenced, PeerGone

TRANSPORT = "fake"
#: What prefill's ranks 0 and 1 write, and what a rank of decode passes on.
PAIRS, RELAYS = ((0, 0), (1, 0)), ((0, 0, 1),)
#: A rank of prefill whose path was never opened: nobody will say that it has died.
SILENT = RankId(PREFILL, 2)


class OneSided:
    """The answers of two decode ranks over a transport that knows only who may still write. What is under way
    to the manager arrives in any order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.writers = [RankId(PREFILL, 0), RankId(PREFILL, 1)]
        self.under_way: list[tuple[int, Fenced | PeerGone]] = []

    def rank(self, index: int) -> Any:
        def fence(_transport: str, peer: RankId, epoch: int) -> None:
            proven = peer.leader == PREFILL and peer not in self.writers
            self.under_way.append((index, Fenced(peer, epoch, proven)))

        return SimpleNamespace(fence=fence, grant=lambda *_: True, close=lambda: None)

    def happens(self) -> tuple[int, Fenced | PeerGone] | None:
        """A writer dies, or what is answered next."""
        if self.writers and self._rng.random() < 0.2:
            dead = self.writers.pop(self._rng.randrange(len(self.writers)))
            self.under_way.append((0, PeerGone(dead, True, PeerLost("it has ended"))))
        if not self.under_way:
            return None
        return self.under_way.pop(self._rng.randrange(len(self.under_way)))


def aborted(rig: Rig, room: int) -> TransferId:
    """A hand-off that has said where to write, and has failed."""
    transfer = rig.opened(room)
    rig.manager._handle(events.EndRoom(transfer.received_as, Internal("a test").info))
    assert rig.of(transfer, events.Quarantined)
    return transfer


@pytest.fixture
def decode() -> Iterator[Rig]:
    made = Rig()
    ranks = made.manager._ranks._ranks
    yield made
    made.manager._ranks._ranks = ranks  # what is to be closed
    made.close()


@pytest.mark.parametrize("now_over", [TRANSPORT, "another"])
@pytest.mark.parametrize("silent", [False, True], ids=["all write", "one path was never opened"])
@pytest.mark.parametrize("relays", [(), RELAYS], ids=["no relays", "relays"])
def test_pages_come_back_once_all_who_may_write_are_dead_and_not_before(
    decode: Rig, now_over: str, silent: bool, relays: Any
) -> None:
    manager = decode.manager
    pairs = (*PAIRS, (SILENT.rank, 0)) if silent else PAIRS
    for seed in range(40):
        manager._ranks.choose(PREFILL, TRANSPORT, pairs, (), relays)
        manager._handle(events.PeerUp(PREFILL, replace(PLAN, pairs=pairs, relays=relays), TRANSPORT))
        transport = OneSided(random.Random(seed))
        manager._ranks._ranks = [transport.rank(0), transport.rank(1)]
        transfer = aborted(decode, 100 + seed)
        manager._ranks.choose(PREFILL, now_over, pairs, (), relays)
        while transport.writers or transport.under_way:
            if (happened := transport.happens()) is not None:
                manager._moved(happened[0], TRANSPORT, happened[1])
            assert not (transport.writers and decode.of(transfer, events.Release)), (
                f"{seed}: one may still write"
            )
        assert decode.of(transfer, events.Release), f"{seed}: the pages never came back"
        assert manager.sizes()["unanswered"] == 0


def test_the_death_of_one_rank_frees_no_page_however_many_peers_have_come_since(decode: Rig) -> None:
    """How a peer was reached must be known as long as a hand-off with it holds pages."""
    manager = decode.manager
    manager._ranks.choose(PREFILL, TRANSPORT, PAIRS, ())
    manager._ranks._max_peers = 2
    transport = OneSided(random.Random(0))
    manager._handle(events.PeerUp(PREFILL, replace(PLAN, pairs=PAIRS), TRANSPORT))
    manager._ranks._ranks = [transport.rank(0)]
    transfer = aborted(decode, 100)
    for rank, answer in transport.under_way:
        manager._moved(rank, TRANSPORT, answer)
    line: Any = decode.line
    manager.closed(line, PeerLost("broken"))
    for _ in range(4):
        line = Line(LeaderId(new_incarnation()), manager.hello())
        manager.opened(line)
        manager.closed(line, PeerLost("gone again"))
    manager._moved(0, TRANSPORT, PeerGone(transport.writers.pop(), True, PeerLost("it has ended")))
    assert not decode.of(transfer, events.Release), "the other rank may still write"
    manager._moved(0, TRANSPORT, PeerGone(transport.writers.pop(), True, PeerLost("it has ended")))
    assert decode.of(transfer, events.Release)
    assert len(manager._ranks._routes) == 2
