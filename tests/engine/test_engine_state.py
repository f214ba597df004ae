"""Models whose sequences keep a state: what the engine refuses; how a slot leaves the pool and comes back."""

from dataclasses import replace

import pytest
import torch
from engine_models import (
    CONV,
    DELTA,
    FULL,
    HYBRIDS,
    GreedySampler,
    engine_for,
    generate,
    page_lists,
    save_model,
)
from test_engine_families import prompts_of
from transformers import Qwen3_5TextConfig

from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.models.model_registry import family_of, supported_family
from segue.engine.parallel import ParallelSize
from segue.engine.pool_size import MAX_STATE_SLOTS, ModelSize, kv_pool_bytes, state_slots
from segue.engine.ranks.slicing import check_size
from segue.engine.request import SamplingParams
from segue.kv.errors import ChecksumMismatch, ConfigError, InvalidRequest

GREEDY = SamplingParams(temperature=0.0)
(PROMPT,) = prompts_of([40])


@pytest.fixture(scope="module", params=sorted(HYBRIDS))
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def engine(folder):
    made = engine_for(folder, GreedySampler())
    for seq_id in (1, 2, 3):
        made.open(seq_id, PROMPT, GREEDY)
    return made


def step(seq_id, pages, slot, tokens=PROMPT, start=0):
    return SequenceStep(seq_id, tokens, start, pages, True, slot)


def test_a_wrong_slot_fails_its_own_sequence_alone(engine, folder):
    slots = engine.spec.slots
    (token,) = generate(folder, [PROMPT], 1)[0]
    for wrong in (None, -1, slots):
        results = {r.seq_id: r for r in run_step(engine, [step(1, [0, 1, 2], 0), step(2, [3, 4, 5], wrong)])}
        assert f"slot {wrong} in a pool of {slots}" in results[2].error
        assert results[1].token == token
    shared = [step(1, [0, 1, 2], 5), step(2, [3, 4, 5], 5), step(3, [6, 7, 8], 6)]
    results = {r.seq_id: r for r in run_step(engine, shared)}
    assert "slot 5 is used by two" in results[1].error
    assert "slot 5 is used by two" in results[2].error
    assert results[3].token == token


def test_a_retracted_sequence_continues_in_another_slot(engine, folder):
    wanted = generate(folder, [PROMPT], 5)[0]
    (pages,) = page_lists(engine, [len(PROMPT) + 5])
    (first,) = run_step(engine, [step(1, pages, 2)])
    (second,) = run_step(engine, [step(1, pages, 2, [first.token], 40)])
    host = engine.copy_out(pages, 2)
    assert host.nbytes == len(pages) * engine.spec.page_bytes + engine.spec.shape.state_bytes
    engine.pool.kv.fill_(float("nan"))
    engine.pool.by_slot.fill_(255)
    elsewhere = [page + 20 for page in pages]
    engine.copy_in(host, elsewhere, 7)
    found = [first.token, second.token]
    for at in range(41, 44):
        (result,) = run_step(engine, [step(1, elsewhere, 7, [found[-1]], at)])
        found.append(result.token)
    assert found == wanted
    host.state[0, 3] ^= 1
    with pytest.raises(ChecksumMismatch):
        engine.copy_in(host, elsewhere, 7)
    with pytest.raises(InvalidRequest, match="slot None in a pool"):
        engine.copy_out(pages)


def test_a_step_that_only_continues_computes_what_one_pass_does(engine):
    """Chunks of every size after one another, down to single tokens, leave the state of one pass."""
    run_step(engine, [step(1, [0, 1, 2], 0)])
    at = 0
    for tokens in (1, 2, 1, 7, 1, 1, 20, 7):
        run_step(engine, [step(2, [3, 4, 5], 1, PROMPT[at : at + tokens], at)])
        at += tokens
    assert at == len(PROMPT)
    for tensor in engine.pool.states:
        assert tensor[0].abs().max() > 0
        torch.testing.assert_close(tensor[0].float(), tensor[1].float(), rtol=1e-4, atol=1e-4)


def test_a_prompt_that_begins_with_one_token_finds_nothing_of_the_slot_s_last_owner(engine):
    run_step(engine, [step(1, [0, 1, 2], 0)])
    one = [step(seq_id, [page], slot, PROMPT[:1]) for seq_id, page, slot in ((2, 3, 0), (3, 4, 1))]
    for each in one:
        run_step(engine, [each])
    for tensor in engine.pool.states:
        assert torch.equal(tensor[0], tensor[1])


def test_layers_that_leave_before_the_others_are_fewer_than_all_whatever_kind_the_last_one_is(engine):
    count, told = engine.spec.shape.layers, []
    moments = tuple((layers, 40 + layers) for layers in range(1, count + 1))
    each = replace(step(1, [0, 1, 2], 0), ready=moments)
    run_step(engine, [each], lambda _seq_ids, layers=None: told.append(layers))
    assert told == [*range(1, count), None]


def test_a_state_is_not_shared_out_over_ranks(engine):
    for size in (ParallelSize(tp=2), ParallelSize(pp=2), ParallelSize(cp=2)):
        with pytest.raises(ConfigError, match="--tp 1 --pp 1 --cp 1"):
            check_size(engine.spec.shape, 6, size)


@pytest.mark.parametrize(
    ("family", "values", "text"),
    [
        ("lfm2", {"layer_types": [CONV, CONV], "conv_L_cache": 3}, "no layer of full attention"),
        ("lfm2", {"layer_types": [CONV, FULL], "conv_L_cache": 1}, "conv_L_cache = 1"),
        ("lfm2", {"layer_types": [DELTA, FULL], "conv_L_cache": 3}, "layers of type .'linear_attention'"),
        ("qwen3_next", {"num_hidden_layers": 3}, "no layer of full attention"),
        (
            "qwen3_next",
            {"layer_types": [DELTA, FULL], "linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim = 1",
        ),
        (
            "qwen3_5_text",
            {"layer_types": [DELTA, FULL], "attn_output_gate": False},
            "attn_output_gate = False",
        ),
        ("qwen3_5_text", {"layer_types": [DELTA, FULL], "mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ],
)
def test_what_is_not_computed_is_refused(family, values, text):
    with pytest.raises(ConfigError, match=text):
        supported_family({"model_type": family, **values})


def test_a_configuration_that_names_no_layers_has_attention_in_every_fourth():
    values = {"model_type": "qwen3_5_text", "num_hidden_layers": 9}
    family = family_of(values)
    kinds = family.layer_types(values)
    assert kinds == Qwen3_5TextConfig(num_hidden_layers=9).layer_types
    assert (kinds.count(DELTA), family.kv_layers(values)) == (7, 2)
    assert family.layer_types({**values, "full_attention_interval": 3})[2::3] == [FULL] * 3


def test_the_sums_of_the_delta_rule_are_float32_in_a_model_of_half_precision():
    values = Qwen3_5TextConfig(num_hidden_layers=4).to_dict()
    conv, delta = family_of(values).state(values, "bfloat16", 2)
    assert (conv.layers, conv.shape, conv.dtype) == (3, (3, 2 * 16 * 128 + 32 * 128), "bfloat16")
    assert (delta.layers, delta.shape, delta.dtype) == (3, (32, 128, 128), "float32")
    assert delta.nbytes == 3 * 32 * 128 * 128 * 4


def test_a_pool_has_slots_for_a_quarter_of_its_bytes_and_room_for_tokens():
    assert state_slots(2**20, 0) == 0
    assert state_slots(2**20, 2**12) == 64
    assert state_slots(2**30, 2**12) == MAX_STATE_SLOTS
    assert state_slots(2**20, 2**25) == 1
    size = ModelSize(weight_bytes=0, token_bytes=1000, context_tokens=100, state_bytes=500_000)
    with pytest.raises(
        ConfigError, match=r"holds 0 tokens of this model and must hold 64: give at least 0.0005"
    ):
        kv_pool_bytes(0.0004, None, 1, size)
    given = kv_pool_bytes(0.00053, None, 1, size)
    assert given - state_slots(given, size.state_bytes) * size.state_bytes >= 64 * 1000
