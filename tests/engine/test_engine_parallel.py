"""Each rank computes its heads, its layers or its rows; together they are the model."""

import contextlib
import copy
import random

import pytest
import torch
from engine_models import FAMILY_CONFIGS, VOCAB, GreedySampler, later, references, save_model, serve
from rank_threads import RankThreads, load_ranks

from segue.engine.cpu.cpu_forward import load_forward
from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.models.model_loading import load_model
from segue.engine.parallel import ParallelSize
from segue.engine.ranks.collectives import Place
from segue.engine.ranks.slicing import check_size, cut, heads_of, keep_columns, part_of
from segue.engine.request import SamplingParams
from segue.kv.errors import ConfigError
from segue.kv.ids import RankCoord
from segue.kv.layout.sides import boxes_of
from segue.kv.layout.spec import KVShape, PoolSpec

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(3, VOCAB) for _ in range(n)] for n in (40, 3, 27)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


def tokens(folder, size):
    with RankThreads(folder, size, GreedySampler()) as made:
        found = serve(made.engine, PROMPTS, 8, chunk=16)
        assert made.lost == []
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return references(tmp_path_factory, PROMPTS)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama", ParallelSize(tp=2)),  # 3 KV heads: one rank has 1, the other 2
        later("llama", ParallelSize(tp=3)),
        # biases, of which only one rank adds those of sums
        later("llama-mha-yarn", ParallelSize(tp=2)),
        later("qwen2", ParallelSize(tp=3)),  # 1 KV head on 3 ranks
        ("gemma3", ParallelSize(tp=2)),  # norms after the sums
        ("mixtral", ParallelSize(tp=2)),
        later("qwen3-moe", ParallelSize(tp=2)),
        ("llama", ParallelSize(pp=2)),  # 3 layers: 1 and 2
        later("llama-mha-yarn", ParallelSize(pp=3)),
        ("gemma3", ParallelSize(pp=2)),  # layers of two kinds
        later("mixtral", ParallelSize(pp=2)),
        later("llama", ParallelSize(tp=2, pp=2)),
        ("llama", ParallelSize(cp=2)),
        later("llama", ParallelSize(cp=3)),
        ("gemma3", ParallelSize(cp=2)),  # windows that begin in rows of another rank
        later("mistral", ParallelSize(cp=2)),
        later("qwen3-moe", ParallelSize(cp=2)),
        later("llama", ParallelSize(tp=2, pp=2, cp=2)),
        # one latent on both ranks; experts, and one that all tokens share
        ("deepseek-v3", ParallelSize(tp=2)),
        later("deepseek-v2-groups-yarn", ParallelSize(tp=3)),
        later("deepseek-v3-dense-yarn", ParallelSize(tp=6)),
        later("deepseek-v3", ParallelSize(pp=2, cp=2)),
    ],
    ids=str,
)
def test_the_tokens_of_several_ranks_are_those_of_transformers(family, size, alone):
    folder, wanted = alone(family)
    assert tokens(folder, size) == wanted


def test_context_parallel_ranks_hold_the_same_kv_and_each_computes_its_share(alone):
    folder, _ = alone("llama")
    prompt, computed = PROMPTS[0], []
    with RankThreads(folder, ParallelSize(cp=2), GreedySampler()) as made:
        for forward in made.forwards:
            layers = forward._layers

            def counted(packed, *rest, layers=layers, **rows):
                computed.append(packed.rows)
                return layers(packed, *rest, **rows)

            forward._layers = counted
        made.engine.open(1, prompt, SamplingParams(temperature=0.0))
        (result,) = run_step(made.engine, [SequenceStep(1, prompt, 0, [4, 2, 7], True)])
        one, two = (forward.pool.by_page[:, :, [4, 2, 7]] for forward in made.forwards)
        assert torch.equal(one, two)
        assert computed == [len(prompt) // 2] * 2
        run_step(made.engine, [SequenceStep(1, [result.token], len(prompt), [4, 2, 7], True)])
        assert computed[2:] == [1, 1], "a row that cannot be shared out is computed by every rank"
        assert torch.equal(one, two)


def test_a_pipeline_stage_holds_its_layers_alone(alone):
    folder, _ = alone("llama")
    one, two = load_ranks(folder, ParallelSize(pp=2))
    assert [f.pool.spec.layer_start for f in (one, two)] == [0, 1]
    assert [f.pool.spec.layer_count for f in (one, two)] == [1, 2]
    weights = [sum(p.numel() for p in f.loaded.model.model.parameters()) for f in (one, two)]
    assert weights == [VOCAB * 54, 0], "the layers are fused; what else is left is the leader's embedding"
    assert (one.head is None, two.head is None) == (False, True)


def test_pools_of_uneven_ranks_have_equally_many_pages_and_share_out_the_memory(alone):
    folder, _ = alone("llama")
    one, two = (forward.pool.spec for forward in load_ranks(folder, ParallelSize(tp=2)))
    assert (one.head_start, one.head_count, two.head_start, two.head_count) == (0, 1, 1, 2)
    assert one.shape == two.shape
    assert one.pages == two.pages
    assert 2**23 - one.page_bytes - two.page_bytes < one.nbytes + two.nbytes <= 2**23
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


def test_no_two_ranks_of_any_legal_sizes_hold_partly_the_same():
    """No sizes that an instance accepts give a layout that a plan refuses (`kv.layout.sides`)."""
    for kv_heads in (1, 2, 3, 5, 8):
        shape = KVShape(layers=7, kv_heads=kv_heads, k_dim=2, v_dim=2, dtype="float32", item_bytes=4)
        for size in (ParallelSize(tp=tp, pp=pp) for tp in range(1, 25) for pp in range(1, 8)):
            with contextlib.suppress(ConfigError):
                check_size(shape, 24 * kv_heads, size)
                places = [RankCoord(tp=tp, pp=pp) for pp in range(size.pp) for tp in range(size.tp)]
                parts = [part_of(shape, 24 * kv_heads, size, place) for place in places]
                ranks = [
                    PoolSpec(
                        shape=shape,
                        coord=place,
                        page_tokens=1,
                        pages=1,
                        layer_start=part.layer_start,
                        layer_count=part.layers,
                        head_start=part.head_start,
                        head_count=part.heads,
                    )
                    for place, part in zip(places, parts, strict=True)
                ]
                assert len(boxes_of("prefill", ranks)) == size.pp * min(size.tp, kv_heads)


@pytest.mark.parametrize(
    ("size", "text"), [(ParallelSize(tp=4), "--tp may be 1, 2, 3, 9"), (ParallelSize(tp=10), "--tp 10")]
)
def test_a_size_that_cannot_be_is_refused_with_those_that_can(size, text, alone):
    folder, _ = alone("llama")
    assert FAMILY_CONFIGS["llama"].num_key_value_heads == 3
    with pytest.raises(ConfigError, match=text):
        load_forward(folder, dtype="float32", pool_bytes=2**24, place=Place(size, 0))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", later("qwen3"), later("gemma3")])
def test_a_rank_that_converts_its_part_alone_has_what_a_conversion_of_the_whole_leaves_of_it(
    family: str, tmp_path
) -> None:
    folder, size = save_model(tmp_path, family), ParallelSize(tp=2, pp=2)
    held = []
    with torch.inference_mode():
        for in_parts in (False, True):
            whole = load_model(folder, "bfloat16", in_parts=in_parts)
            as_stored = in_parts and family != "gemma3"
            assert whole.model.dtype == (torch.float32 if as_stored else torch.bfloat16)
            model = cut(whole, size, RankCoord(pp=1, tp=1)).model
            held.append(dict(model.named_parameters()) | dict(model.named_buffers()))
    assert held[0].keys() == held[1].keys()
    for name, tensor in held[0].items():
        assert tensor.dtype == held[1][name].dtype, name
        assert torch.equal(tensor, held[1][name]), name


def test_a_bias_behind_a_layer_that_is_summed_counts_once():
    whole, rows = torch.nn.Linear(6, 4), torch.randn(3, 6)
    parts = []
    for tp, columns in enumerate((slice(0, 2), slice(2, 6))):
        part = copy.deepcopy(whole)
        keep_columns(part, columns, tp)
        parts.append(part(rows[:, columns]))
    torch.testing.assert_close(sum(parts), whole(rows))
