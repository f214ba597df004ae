"""DP ranks that share out the experts of a model: tokens, unequal load, and one end for all."""

import json
import random
import threading

import pytest
import torch
from dp_threads import DpThreads
from engine_models import VOCAB, GreedySampler, later, references, serve

from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.models.model_registry import check_experts
from segue.engine.request import SamplingParams
from segue.kv.errors import ConfigError, ErrorCode, PeerLost, RankDivergence
from segue.kv.limits import Limits

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(3, VOCAB) for _ in range(n)] for n in (40, 3, 27, 90)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


def serving(prompts):
    return lambda engine: serve(engine, prompts, 8, chunk=16)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return references(tmp_path_factory, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("mixtral", 2),
        later("mixtral", 3),  # 4 experts: 1, 1 and 2
        later("qwen3-moe", 2),  # a layer without experts between two that have some
        later("deepseek-v3", 2),  # experts that every token has, and groups
        later("deepseek-v2", 3),
        later("qwen3-next", 2),  # a state on each rank, an expert with a gate that every token has
        later("deepseek-v2-groups-yarn", 4),
    ],
)
def test_tokens_equal_generate_on_every_rank_whatever_each_computes(alone, family, size):
    folder, wanted = alone(family)
    with DpThreads(folder, size, GreedySampler) as ranks:
        # Each rank has other prompts, and the last one none at first.
        shares = [list(range(index, len(PROMPTS), size - 1)) for index in range(size - 1)]
        busy = [
            rank.do(serving([PROMPTS[i] for i in share])) for rank, share in zip(ranks, shares, strict=False)
        ]
        assert [one.get(timeout=60) for one in busy] == [[wanted[i] for i in share] for share in shares]
        assert ranks[-1].steps_along > 0
        # Then that rank alone.
        assert ranks[-1].do(serving(PROMPTS)).get(timeout=60) == wanted
        # A long prompt on one rank, chunk by chunk, while another one decodes.
        both = [rank.do(serving([PROMPTS[i]])) for rank, i in ((ranks[0], 3), (ranks[1], 1))]
        assert [one.get(timeout=60) for one in both] == [[wanted[3]], [wanted[1]]]
        assert [rank.lost for rank in ranks] == [[]] * size


def test_each_rank_holds_its_experts_alone(alone):
    folder, _ = alone("mixtral")
    with DpThreads(folder, 2, GreedySampler) as ranks:
        held = [[experts.held for experts in rank.own.experts] for rank in ranks]
        assert held == [[range(2)] * 3, [range(2, 4)] * 3]
        layer = ranks[1].own.loaded.model.model.layers[0]
        assert layer.feed_forward.mixture.experts._experts.gate_up_proj.shape[0] == 2


@pytest.fixture
def group(alone):
    """Ranks of mixtral, and what makes a step on one of them."""
    made = []

    def make(size=2, **options):
        made.append(DpThreads(alone("mixtral")[0], size, GreedySampler, **options))
        return made[0].ranks

    yield make
    if made:
        made[0].__exit__()


def step(rank):
    """One step with a prompt, or the error that it ends with."""

    def job(engine):
        engine.open(1, PROMPTS[1], SamplingParams(temperature=0.0))
        try:
            return run_step(engine, [SequenceStep(1, PROMPTS[1], 0, [0], True)])
        finally:
            engine.close(1)

    return rank.do(job)


def codes(ranks):
    """Why the group is over, as each rank was told; it is told once."""
    for rank in ranks:
        assert rank.ended.wait(60)
    return [[error.code for error in rank.lost] for rank in ranks]


def test_a_bug_on_one_rank_of_four_ends_the_group_and_is_named_on_all_at_once(group):
    """With four ranks some are no neighbours in Gloo's exchanges: they would wait for the deadline."""
    ranks = group(4)

    def broken(*_):
        raise ZeroDivisionError("a bug")

    ranks[2].own.experts[1]._of_held = broken
    error = step(ranks[0]).get(timeout=60)
    assert error.code is ErrorCode.INTERNAL
    assert "a bug" in str(error)
    assert codes(ranks) == [[ErrorCode.INTERNAL]] * 4
    assert step(ranks[1]).get(timeout=60).code is ErrorCode.INTERNAL, "nothing is computed any more"


def test_a_rank_with_another_history_is_found_at_its_step_on_all(group):
    ranks = group()
    assert step(ranks[0]).get(timeout=60)[0].error is None
    ranks[1].group._digest = b"changed!"
    error = step(ranks[0]).get(timeout=60)
    assert error.code is ErrorCode.RANK_DIVERGENCE
    assert "at step 2" in str(error)
    assert codes(ranks) == [[ErrorCode.RANK_DIVERGENCE]] * 2


def test_ranks_that_have_loaded_different_models_do_not_start(alone):
    with pytest.raises(RankDivergence, match="another model"):
        DpThreads(alone("mixtral")[0], 2, GreedySampler, identity=lambda rank, own: f"model {rank}")


def test_the_end_of_a_rank_is_heard_by_all_while_nobody_computes(group):
    ranks = group(3)
    ranks[2].group.close()
    for rank in ranks[:2]:
        assert rank.ended.wait(60)
        assert [error.code for error in rank.lost] == [ErrorCode.PEER_LOST]
        assert "DP rank 2" in str(rank.lost[0])
    assert step(ranks[1]).get(timeout=60).code is ErrorCode.PEER_LOST


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_group_at_the_deadline(group):
    ranks = group(exchange_s=2.0)
    goes_on = threading.Event()
    ranks[1].do(lambda _: goes_on.wait(60))
    error = step(ranks[0]).get(timeout=60)
    assert error.code is ErrorCode.PEER_LOST
    goes_on.set()
    assert codes(ranks) == [[ErrorCode.PEER_LOST]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_stands_still_is_lost_after_its_silence_though_nobody_computes(group, silent):
    ranks = group(3, limits=Limits(keepalive_s=0.1, peer_silence_s=3.0))
    goes_on = threading.Event()
    ranks[silent].group._io.post(goes_on.wait, 60)  # as if its process were stopped
    others = [rank for rank in ranks if rank is not ranks[silent]]
    assert codes(others) == [[ErrorCode.PEER_LOST]] * 2
    for rank in others:
        assert f"DP rank {silent} of this instance has said nothing for 3." in str(rank.lost[0])
    goes_on.set()
    assert codes(ranks) == [[ErrorCode.PEER_LOST]] * 3


def test_ranks_leave_together(group):
    ranks = group(3)
    assert not ranks[1].do(lambda _: ranks[1].group.done()).get(timeout=60)
    assert ranks[0].leaves.wait(60)
    assert ranks[2].leaves.wait(60)
    assert step(ranks[0]).get(timeout=60)[0].error is None, "who is done computes for the others"
    for rank in (ranks[0], ranks[2]):
        rank.do(lambda _, rank=rank: rank.group.done()).get(timeout=60)
    for rank in ranks:
        while not rank.do(lambda _, rank=rank: rank.group.done()).get(timeout=60):
            pass
    for rank in ranks:
        rank.group.close()
    assert [rank.lost for rank in ranks] == [[]] * 3


def heard_anew(rank):
    """The events that a new listener gets at once in the place of the one before."""
    told = []
    rank.group.listen(lambda: told.append("wake"), lambda: told.append("leave"), told.append)
    return told


def test_who_listens_anew_is_told_what_was_said_before(group):
    ranks = group(3)
    assert heard_anew(ranks[1]) == ["wake"]
    ranks[1].do(lambda _: ranks[1].group.done()).get(timeout=60)
    assert ranks[2].leaves.wait(60)
    assert heard_anew(ranks[2]) == ["leave", "wake"]
    ranks[1].group.close()
    assert ranks[0].ended.wait(60)
    assert [type(word) for word in heard_anew(ranks[0])] == [PeerLost, str]


def test_a_listener_that_fails_fails_its_step_and_no_rank(group):
    ranks = group()

    def stored(_):
        raise RankDivergence("of a test")

    def job(engine):
        engine.open(1, PROMPTS[1], SamplingParams(temperature=0.0))
        return run_step(engine, [SequenceStep(1, PROMPTS[1], 0, [0], True)], stored)

    assert "of a test" in str(ranks[0].do(job).get(timeout=60))
    assert step(ranks[1]).get(timeout=60)[0].error is None
    assert [rank.lost for rank in ranks] == [[], []]


def test_a_model_without_enough_experts_is_refused_with_what_to_do(alone, tmp_path):
    folder, _ = alone("mixtral")
    check_experts(folder, 4)
    with pytest.raises(ConfigError, match="4 experts over 5 DP ranks; give at most --dp 4"):
        check_experts(folder, 5)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    del config["num_local_experts"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="of type llama has none; drop it"):
        check_experts(tmp_path, 2)
