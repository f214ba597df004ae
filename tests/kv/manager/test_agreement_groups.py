"""Symmetric ranks that agree over real Gloo groups: equal, diverging, missing, stopped and killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from segue.kv.errors import PeerLost
from segue.kv.torch_group import TorchGroup

PROCESS = Path(__file__).with_name("agreement_process.py")
#: For what must not run out, and for what must.
LONG_S, SHORT_S = 60.0, 2.0


class Ranks:
    """Processes that form groups by name, each rank told what to do by lines."""

    def __init__(self, folder: Path, size: int, ended: ExitStack) -> None:
        command = [sys.executable, str(PROCESS), str(folder / "store")]
        self.processes = [
            subprocess.Popen([*command, str(rank), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for rank in range(size)
        ]
        for process in self.processes:
            ended.enter_context(process)
            ended.callback(process.kill)
        self._listeners = ended.enter_context(ThreadPoolExecutor(size))
        assert [self.answer(rank) for rank in range(size)] == ["ready"] * size

    def tell(self, rank: int, **what: object) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(what).encode() + b"\n")
        stdin.flush()

    def answer(self, rank: int) -> Any:
        """The next line of `rank`, which must come before the test's own deadline."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return json.loads(self._listeners.submit(stdout.readline).result(90))

    def form(self, name: str, timeout_s: float = LONG_S, ranks: Sequence[int] | None = None) -> None:
        members = list(range(len(self.processes))) if ranks is None else ranks
        for rank in members:
            self.tell(rank, group=name, timeout_s=timeout_s, ranks=members)
        assert [self.answer(rank) for rank in members] == ["made"] * len(members)

    def hurry(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """An exchange of this group may take no longer than `SHORT_S`; to meet it had more."""
        members = list(range(len(self.processes))) if ranks is None else ranks
        for rank in members:
            self.tell(rank, group=name, timeout_s=SHORT_S)
        assert [self.answer(rank) for rank in members] == ["hurried"] * len(members)

    def poll(self, name: str, held: dict[int, list[tuple[int, str, str]]]) -> dict[int, Any]:
        """The result of each rank of `held` when they poll these rooms together."""
        for rank, rooms in held.items():
            self.tell(rank, group=name, rooms=rooms)
        return {rank: self.answer(rank) for rank in held}


@contextmanager
def ranks_of(folder: Path, size: int) -> Iterator[Ranks]:
    with ExitStack() as ended:
        yield Ranks(folder, size, ended)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks that outlive a test. Each test forms a group of its own, and may ruin that."""
    with ranks_of(tmp_path_factory.mktemp("ranks"), request.param) as made:
        yield made


@pytest.mark.slow
def test_500_rooms_in_other_orders_on_every_rank_are_folded_by_room(ranks: Ranks) -> None:
    ranks.form("orders")
    size, draw = len(ranks.processes), random.Random(1)
    rooms = [draw.randrange(1, 2**64) for _ in range(500)]
    phases = {room: draw.choices(["BOOTSTRAPPING", "TRANSFERRING", "SUCCESS"], k=size) for room in rooms}
    slowest = ["BOOTSTRAPPING", "TRANSFERRING", "SUCCESS"].index
    wanted = {str(room): [min(of, key=slowest), ""] for room, of in phases.items()}
    held = {rank: [(r, phases[r][rank], "") for r in draw.sample(rooms, 500)] for rank in range(size)}
    assert list(ranks.poll("orders", held).values()) == [wanted] * size


def test_a_divergence_is_told_to_every_rank_and_the_group_goes_on(ranks: Ranks) -> None:
    ranks.form("diverging")
    size = len(ranks.processes)
    common = [(room, "SUCCESS", "") for room in range(1, 101)]
    mine = {rank: [*common, (1000 + rank, "SUCCESS", "")] for rank in range(size)}
    heard = ranks.poll("diverging", {**mine, 0: common})
    assert {answer["error"] for answer in heard.values()} == {"RANK_DIVERGENCE"}
    (text,) = {answer["text"] for answer in heard.values()}
    assert "100 are common, beside them: rank 0 none (of 100); rank 1 1001 (of 101)" in text
    again = ranks.poll("diverging", {rank: [] for rank in range(size)})
    assert list(again.values()) == [{}] * size


def test_the_reason_of_a_failed_rank_reaches_all(ranks: Ranks) -> None:
    ranks.form("failing")
    size = len(ranks.processes)
    held = {rank: [(5, "SUCCESS", ""), (6, "TRANSFERRING", "")] for rank in range(size)}
    held[size - 1] = [(6, "FAILED", "the cable of the last rank"), (5, "SUCCESS", "")]
    wanted = {"5": ["SUCCESS", ""], "6": ["FAILED", "the cable of the last rank"]}
    assert list(ranks.poll("failing", held).values()) == [wanted] * size


def assert_lost(answers: dict[int, Any]) -> None:
    assert {answer.get("error") for answer in answers.values()} == {"PEER_LOST"}


@pytest.mark.slow
def test_a_rank_that_polls_too_late_costs_the_others_an_error_by_the_deadline(ranks: Ranks) -> None:
    ranks.form("late")
    ranks.hurry("late")
    rooms = [(5, "SUCCESS", "")]
    others = dict.fromkeys(range(1, len(ranks.processes)), rooms)
    assert_lost(ranks.poll("late", others))
    assert_lost(ranks.poll("late", {0: rooms}))
    # Nobody agrees on anything here any more, and says so without waiting.
    assert_lost(ranks.poll("late", dict.fromkeys(range(len(ranks.processes)), rooms)))
    assert "no exchange of this group is possible any more" in ranks.poll("late", others)[1]["text"]


@pytest.mark.slow
def test_a_stopped_rank_costs_the_others_an_error_by_the_deadline(ranks: Ranks) -> None:
    ranks.form("stopped")
    rooms = [(5, "SUCCESS", "")]
    stopped = ranks.processes[0]
    ranks.tell(0, group="stopped", rooms=rooms)
    assert list(ranks.poll("stopped", dict.fromkeys(range(1, len(ranks.processes)), rooms)).values())
    assert ranks.answer(0) == {"5": ["SUCCESS", ""]}
    ranks.hurry("stopped")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        ranks.tell(0, group="stopped", rooms=rooms)
        assert_lost(ranks.poll("stopped", dict.fromkeys(range(1, len(ranks.processes)), rooms)))
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert ranks.answer(0)["error"] == "PEER_LOST"


def test_a_group_that_was_left_is_of_no_use() -> None:
    group = TorchGroup(HashStore(), "one", 0, 1, timeout_s=10)
    assert group.gather([3, 4]) == [[3, 4]]
    group.close()
    group.close()
    with pytest.raises(PeerLost, match="rank 0 of 1 has left its group"):
        group.gather([3, 4])


def test_a_group_whose_exchange_was_interrupted_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal's exception: how far the others came is not known."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    group = TorchGroup(HashStore(), "one", 0, 1, timeout_s=10)
    monkeypatch.setattr(group, "_gloo", SimpleNamespace(allreduce=interrupted))
    with pytest.raises(KeyboardInterrupt):
        group.least([3])
    with pytest.raises(PeerLost, match="was interrupted"):
        group.least([3])


def test_an_exchange_that_fails_leaves_the_group_and_its_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connections end at once, or who waits for this rank would wait until its own time is over."""

    def broken(*_: object) -> None:
        raise RuntimeError("connection reset")

    group = TorchGroup(HashStore(), "one", 0, 1, timeout_s=10)
    monkeypatch.setattr(group, "_gloo", SimpleNamespace(allreduce=broken))
    for _ in range(2):
        with pytest.raises(PeerLost, match="connection reset"):
            group.least([3])
        assert group._gloo is None
        group.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_others_of_a_killed_rank_are_told_at_once(tmp_path: Path, size: int) -> None:
    with ranks_of(tmp_path, size) as ranks:
        ranks.form("killed", 3600.0)
        rooms = [(5, "SUCCESS", "")]
        others = range(1, size)
        for rank in others:
            ranks.tell(rank, group="killed", rooms=rooms)
        ranks.processes[0].kill()
        assert_lost({rank: ranks.answer(rank) for rank in others})
        assert_lost(ranks.poll("killed", dict.fromkeys(others, rooms)))


@pytest.mark.slow
def test_two_groups_of_two_ranks_know_nothing_of_each_other(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 4) as ranks:
        ranks.form("first", ranks=[0, 1])
        ranks.hurry("first", ranks=[0, 1])
        ranks.form("second", LONG_S, ranks=[2, 3])
        rooms = [(5, "SUCCESS", "")]
        assert_lost(ranks.poll("first", {0: rooms}))
        assert ranks.poll("second", {2: rooms, 3: rooms}) == {rank: {"5": ["SUCCESS", ""]} for rank in (2, 3)}
