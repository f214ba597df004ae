"""A run that breaks an invariant, through the command: its status, story, smallest version and replay."""

from __future__ import annotations

import re
import shlex

import pytest

from segue.kv.ids import RankId
from segue.kv.protocol.tally import Fences
from segue_lab.commands import sim
from segue_lab.sim.run import load

#: A seed in which the sabotage below does harm.
SEED = 23


@pytest.fixture
def sabotaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Production takes the answer to a fence for a proof, whatever it says (one of `make mutants`)."""

    normal = Fences.answer

    def answer(self: Fences, rank: int, partner: RankId, proven: bool) -> bool:
        return normal(self, rank, partner, True)

    monkeypatch.setattr(Fences, "answer", answer)
    monkeypatch.setattr(sim, "SHRINK_RUNS", 60)


@pytest.mark.slow
@pytest.mark.parametrize("every", ["8", "1"])
def test_a_failing_seed_tells_its_story_and_its_replay_fails_alike(
    sabotaged: None, every: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim.main(["--seed", str(SEED), "--check-every", every]) == 1
    said = capsys.readouterr().out
    broken = re.search(rf"^seed {SEED} broke invariant (\[4\] .*)$", said, re.MULTILINE)
    assert broken, said
    assert "1 seeds broke an invariant" in said

    # The timeline: time, who, what; of the room that was harmed, from its first effect on.
    lines = [line for line in said.splitlines() if re.match(r"\s+\d+\.\d{3} ms  \S+", line)]
    assert any("← Destination" in line for line in lines)
    assert any("Phase" in line and "FAILED" in line for line in lines)
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)

    # The smallest version: fewer requests and faults than the seed has, each of them shown.
    [command] = re.findall(r"^replay: (.*)$", said, re.MULTILINE)
    words = shlex.split(command)
    assert words[:2] == ["segue", "sim"]
    whole, names = load(SEED).names, words[words.index("--only") + 1].split(",")
    assert 0 < len(names) < len(whole) // 4
    assert set(names) <= set(whole)
    for name in names:
        assert re.search(rf"^  (fault|request) .*name='{name}'", said, re.MULTILINE)

    assert sim.main(words[2:]) == 1
    again = re.search(rf"^seed {SEED} broke invariant (\[4\] .*)$", capsys.readouterr().out, re.MULTILINE)
    assert again
    assert again[1] == broken[1]


@pytest.mark.slow
def test_the_same_command_holds_without_the_sabotage(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim.main(["--seed", str(SEED)]) == 0
    assert "replay:" not in capsys.readouterr().out
