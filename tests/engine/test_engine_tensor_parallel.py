"""Each rank computes its heads and its part of the MLP; together they are the model."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_models import FAMILY_CONFIGS, VOCAB, GreedySampler, save_model, serve
from torch.distributed import HashStore

from segue.core.errors import ConfigError
from segue.core.parallel import ParallelSize
from segue.engine.cpu_engine import make_engine
from segue.engine.cpu_forward import load_forward
from segue.engine.group import Place, join
from segue.engine.slicing import heads_of

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(3, VOCAB) for _ in range(n)] for n in (40, 3, 27)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


def together(folder, size, act, timeout_s=30.0):
    """What `act` returns for the forward of each rank; the ranks are threads of this process."""
    store = HashStore()

    def run(rank):
        place = join(size, rank, store, timeout_s)
        return act(load_forward(folder, dtype="float32", pool_bytes=2**24, place=place))

    with ThreadPoolExecutor(size.ranks) as pool:
        return list(pool.map(run, range(size.ranks)))


def tokens(folder, size):
    """What each rank would draw of the rows that it has in common with all others."""

    def act(forward):
        return serve(make_engine(folder, forward, forward, GreedySampler()), PROMPTS, 8, chunk=16)

    return together(folder, size, act)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            folder = save_model(tmp_path_factory.mktemp(family), family)
            made[family] = folder, tokens(folder, ParallelSize())[0]
        return made[family]

    return make


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("llama", 2),  # 3 KV heads: one rank has 1, the other 2
        pytest.param("llama", 3, marks=pytest.mark.slow),
        # biases, of which only one rank adds those of sums
        pytest.param("llama-mha-yarn", 2, marks=pytest.mark.slow),
        ("qwen2", 3),  # 1 KV head on 3 ranks
        ("gemma3", 2),  # norms after the sums
        ("mixtral", 2),
        ("deepseek-v3", 2),  # one latent on both ranks; experts, and one that all tokens share
        pytest.param("deepseek-v2-groups-yarn", 3, marks=pytest.mark.slow),
        pytest.param("deepseek-v3-dense-yarn", 6, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", 2, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_of_several_ranks_are_those_of_one(family, tp, alone):
    folder, wanted = alone(family)
    assert tokens(folder, ParallelSize(tp=tp)) == [wanted] * tp


def test_pools_of_uneven_ranks_have_equally_many_pages_and_share_out_the_memory(alone):
    folder, _ = alone("llama")
    one, two = together(folder, ParallelSize(tp=2), lambda forward: forward.pool.spec)
    assert (one.head_start, one.head_count, two.head_start, two.head_count) == (0, 1, 1, 2)
    assert one.shape == two.shape
    assert one.pages == two.pages
    assert 2**24 - one.page_bytes - two.page_bytes < one.nbytes + two.nbytes <= 2**24
    assert (one.coord.tp, two.coord.tp) == (0, 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1), (6, 2), (12, 4), (5, 5), (32, 8)])
def test_every_query_head_is_computed_once_beside_its_own_kv_head(heads, kv_heads):
    for size in range(1, heads + 1):
        if size > kv_heads and (size % kv_heads or heads // kv_heads % (size // kv_heads)):
            continue
        parts = [heads_of(heads, kv_heads, rank, size) for rank in range(size)]
        assert [head for part in parts for head in part.query] == list(range(heads))
        for part in parts:
            group = heads // kv_heads
            assert part.kv == range(part.query[0] // group, part.query[-1] // group + 1)
            assert len(part.query) % len(part.kv) == 0


@pytest.mark.parametrize(
    ("size", "text"), [(ParallelSize(tp=4), "--tp may be 1, 2, 3, 9"), (ParallelSize(tp=10), "--tp 10")]
)
def test_a_size_that_cannot_be_is_refused_with_those_that_can(size, text, alone):
    folder, _ = alone("llama")
    assert FAMILY_CONFIGS["llama"].num_key_value_heads == 3
    with pytest.raises(ConfigError, match=text):
        load_forward(folder, dtype="float32", pool_bytes=2**24, place=Place(size, 0))
