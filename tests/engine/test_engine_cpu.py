"""The runner itself: what it refuses, what it isolates, and what it keeps out of reach."""

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from engine_models import (
    CONTEXT_TOKENS,
    VOCAB,
    GreedySampler,
    engine_for,
    generate,
    page_lists,
    save_model,
    serve,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from segue.engine.cpu.cpu_forward import load_engine
from segue.engine.cpu.cpu_products import Head, PlainProduct
from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.models.model_fingerprint import fingerprint
from segue.engine.request import SamplingParams
from segue.kv.errors import ChecksumMismatch, ConfigError, Internal, InvalidRequest
from segue.kv.transport.memory.pool_memory import allocate

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 9, 33, 7, 21, 60, 2, 2, 90, 11, 45, 46, 47, 3, 8, 19, 20, 70, 71, 72]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def shared(folder):
    return engine_for(folder, GreedySampler())


@pytest.fixture
def engine(shared):
    """An engine with sequences 1 … 4 open and a pool full of poison: reading a page that was
    never written gives NaN."""
    shared.pool.kv.fill_(float("nan"))
    for seq_id in (1, 2, 3, 4):
        shared.open(seq_id, PROMPT, GREEDY)
    yield shared
    for seq_id in (1, 2, 3, 4):
        shared.close(seq_id)


def whole(seq_id, pages, tokens=PROMPT, start=0):
    return SequenceStep(seq_id, tokens, start, pages, True)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (whole(2, [40]), "need 2 pages"),
        (whole(2, [40, -1]), "outside the pool"),
        (whole(2, [40, 10**6]), "outside the pool"),
        (whole(2, [40, 40]), "given twice"),
        (whole(2, [40, 41], tokens=[]), "needs tokens"),
        (whole(2, [40, 41], start=-1), "from 0"),
        (whole(2, [40, 41], tokens=[VOCAB]), "outside the vocabulary"),
        (whole(2, [40, 41], tokens=[-1]), "outside the vocabulary"),
        (whole(2, list(range(40, 300)), start=4090), "exceed the model's context of 4096"),
        (whole(99, [40, 41]), "not open"),
        (whole(2, [40, 0]), "page 0 is written"),
    ],
)
def test_lesson_20_a_wrong_sequence_fails_alone(engine, folder, step, text):
    good, clash = whole(1, [4, 5]), whole(3, [0, 1])
    results = {r.seq_id: r for r in run_step(engine, [good, step, clash])}
    assert text in results[step.seq_id].error
    assert results[step.seq_id].token is None
    assert results[1].error is None
    assert [results[1].token] == generate(folder, [PROMPT], 1)[0]


def test_kv_is_announced_once_for_what_is_computed_and_before_a_token_is_drawn(engine):
    told = []
    bad = whole(2, [40])
    drawn = len(engine.sampler.logits)

    def stored(seq_ids):
        written = torch.isfinite(engine.pool.by_page[:, :, [4, 5]].flatten(2, 3)[:, :, : len(PROMPT)])
        told.append((list(seq_ids), bool(written.all()), len(engine.sampler.logits) - drawn))

    run_step(engine, [whole(1, [4, 5]), bad, whole(3, [20, 21])], stored)
    assert told == [([1, 3], True, 0)]
    run_step(engine, [bad], stored)
    assert len(told) == 1, "nothing was computed"


def test_layers_are_announced_when_their_kv_is_there_and_before_the_next_layer_has_any(engine):
    engine.pool.kv.fill_(float("nan"))
    told = []

    def stored(seq_ids, layers=None):
        kv = engine.pool.by_page[:, :, [4, 5]].flatten(2, 3)[:, :, : len(PROMPT)].clone()
        told.append((list(seq_ids), layers, kv))

    count = engine.spec.shape.layers
    moments = tuple((layers, 40 + layers) for layers in range(1, count + 1))
    run_step(engine, [replace(whole(1, [4, 5]), ready=moments)], stored)
    assert [(ids, layers) for ids, layers, _ in told] == [([1], n) for n in [*range(1, count), None]]
    last = told[-1][2]
    for _, layers, kv in told[:-1]:
        assert torch.equal(kv[:layers], last[:layers])
        assert kv[layers:].isnan().all(), "the next layer's KV was waited for"


def test_other_sequences_come_and_go_while_a_forward_runs(engine, folder):
    stored, go_on = threading.Event(), threading.Event()

    def in_the_middle(_seq_ids):
        stored.set()
        assert go_on.wait(30)

    ended = threading.Event()
    handle = engine.launch([whole(1, [4, 5])], in_the_middle, ended.set)
    assert stored.wait(30)
    engine.open(9, PROMPT, GREEDY)
    engine.append(9, 5)
    engine.close(9)
    engine.copy_in(engine.copy_out([60]), [61])
    assert not handle.ready
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(30)
    assert handle.ready
    (result,) = engine.collect(handle)
    assert [[result.token]] == generate(folder, [PROMPT], 1)


def test_a_listener_that_fails_fails_the_step_and_leaves_the_engine_in_order(engine, folder):
    def stored(seq_ids):
        raise Internal("a bug in the listener")

    with pytest.raises(Internal, match="in the listener"):
        run_step(engine, [whole(1, [4, 5])], stored)
    (result,) = run_step(engine, [whole(2, [6, 7])])
    assert [result.token] == generate(folder, [PROMPT], 1)[0]


def test_a_sequence_twice_in_a_step_fails_and_the_rest_runs(engine):
    results = run_step(engine, [whole(1, [4, 5]), whole(2, [6, 7]), whole(2, [8, 9])])
    assert {r.seq_id: r.error is None for r in results} == {1: True, 2: False}


def test_lesson_07_a_page_being_written_is_never_read_by_another(engine):
    """Sequence 2 would read page 4 as its prefix while sequence 1 writes it."""
    reader = SequenceStep(2, PROMPT[16:], 16, [4, 9], True)
    results = {r.seq_id: r for r in run_step(engine, [whole(1, [4, 5]), reader, whole(3, [20, 21])])}
    assert "page 4" in results[1].error
    assert "page 4" in results[2].error
    assert results[3].error is None


def test_sequences_may_share_a_prefix_that_nobody_writes(engine, folder):
    run_step(engine, [SequenceStep(1, PROMPT[:16], 0, [4], False)])
    steps = [SequenceStep(i, PROMPT[16:], 16, [4, 10 + 2 * i], True) for i in (1, 2, 3)]
    (wanted,) = generate(folder, [PROMPT], 1)
    assert [r.token for r in run_step(engine, steps)] == wanted * 3


def test_only_the_pages_given_are_read_and_written(engine):
    """The rest of the pool stays poison, and poison reaches no result."""
    pages = [[50, 52, 54, 56, 58], [60, 61, 62]]
    run_step(
        engine, [SequenceStep(1, PROMPT * 3, 0, pages[0], True), SequenceStep(2, PROMPT, 0, pages[1], True)]
    )
    run_step(
        engine, [SequenceStep(1, PROMPT[:1], 60, pages[0], True), SequenceStep(2, PROMPT, 20, pages[1], True)]
    )
    assert all(torch.isfinite(row).all() for row in engine.sampler.logits)
    written = torch.isfinite(engine.pool.by_page).flatten(3).all(3).all(0).all(0)
    touched = torch.isfinite(engine.pool.by_page).any(3).all(0).all(0)
    assert touched.nonzero().flatten().tolist() == sorted(pages[0][:4] + pages[1])
    assert written.nonzero().flatten().tolist() == [50, 52, 54, 60, 61]


def test_the_pool_lies_in_memory_as_the_spec_says(engine):
    """A transport reads by `PoolSpec.offset`; the engine must have written there."""
    run_step(engine, [whole(1, [9, 3])])
    spec = engine.spec
    for layer in range(spec.layer_count):
        for value in (False, True):
            for token, slot in ((0, 9 * 16), (15, 9 * 16 + 15), (16, 3 * 16), (19, 3 * 16 + 3)):
                size = spec.v_token_bytes if value else spec.k_token_bytes
                at = spec.offset(layer, value, slot)
                raw = bytearray(engine.memory.buffer[at : at + size])
                there = torch.frombuffer(raw, dtype=torch.float32)
                assert torch.equal(there, engine.pool.kv[layer, int(value), slot].flatten()), (layer, token)
                assert torch.isfinite(there).all()


@pytest.mark.parametrize("scatter_seed", [None, 1, 2, 3])
def test_logits_do_not_depend_on_chunks_pages_or_company(folder, scatter_seed):
    prompts = [PROMPT * 5, PROMPT[:3], PROMPT * 2, PROMPT[5:6]]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = [model(torch.tensor([p])).logits[0, -1] for p in prompts]
    for chunk in (7, 16, 1000):
        engine = engine_for(folder, sampler := GreedySampler(), page_tokens=4)
        serve(engine, prompts, 1, chunk=chunk, scatter_seed=scatter_seed)
        for row in wanted:
            assert min((row - got).abs().max() for got in sampler.logits) < 2e-4


def test_retracted_pages_come_back_elsewhere(engine, folder):
    run_step(engine, [SequenceStep(1, PROMPT[:19], 0, [4, 5], False)])
    host = engine.copy_out([4, 5])
    assert host.nbytes == 2 * engine.spec.page_bytes
    engine.pool.kv.fill_(float("nan"))
    engine.copy_in(host, [30, 12])
    (result,) = run_step(engine, [SequenceStep(1, PROMPT[19:], 19, [30, 12], True)])
    assert [result.token] == generate(folder, [PROMPT], 1)[0]


def test_a_copy_of_which_a_bit_has_changed_does_not_come_back(engine):
    host = engine.copy_out([4, 5])
    host.data.view(torch.uint8).view(-1)[7] ^= 1
    before = engine.pool.kv.clone()
    with pytest.raises(ChecksumMismatch, match="host memory"):
        engine.copy_in(host, [30, 12])
    assert torch.equal(engine.pool.kv.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("pages", [[0], [0, 0], [0, -1], [0, 10**6]])
def test_copies_of_wrong_pages_are_refused(engine, pages):
    host = engine.copy_out([4, 5])
    with pytest.raises(InvalidRequest):
        engine.copy_in(host, pages)
    with pytest.raises(Internal):
        engine.copy_in(object(), [1, 2])


def test_the_last_layer_computes_after_its_attention_only_rows_that_are_sampled(folder, monkeypatch):
    engine = engine_for(folder, GreedySampler())
    last, rows = engine._forward.loaded.model.model.layers[-1], []
    rest = last._rest
    monkeypatch.setattr(last, "_rest", lambda *given: rows.append(given[2]) or rest(*given))
    wanted = generate(folder, [PROMPT], 2)[0]
    for seq_id in (1, 2):
        engine.open(seq_id, PROMPT, GREEDY)
    assert run_step(engine, [SequenceStep(1, PROMPT[:8], 0, [4, 5], False)]) == []
    assert rows == []
    (first,) = run_step(engine, [SequenceStep(1, PROMPT[8:], 8, [4, 5], True)])
    (second,) = run_step(engine, [SequenceStep(1, wanted[:1], 20, [4, 5], True)])
    assert rows == [1, 1]
    assert [first.token, second.token] == wanted
    beside = run_step(engine, [SequenceStep(1, wanted[1:], 21, [4, 5], True), whole(2, [6, 7])])
    assert rows == [1, 1, 2]
    assert beside[1].token == wanted[0]


@pytest.mark.parametrize("chunk", [1, 6, 100])
def test_prompt_logprobs_are_those_of_the_whole_prompt(folder, chunk):
    engine = engine_for(folder, GreedySampler())
    engine.open(1, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
    entries = []
    for at in range(0, len(PROMPT), chunk):
        part = PROMPT[at : at + chunk]
        (result,) = run_step(engine, [SequenceStep(1, part, at, [3, 4], at + chunk >= len(PROMPT))])
        entries += result.prompt_logprobs
    (after,) = run_step(engine, [SequenceStep(1, [result.token], 20, [3, 4], True)])
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], -1)
    assert entries[0] is None
    assert [e.token for e in entries[1:]] == PROMPT[1:]
    assert [e.logprob for e in entries[1:]] == pytest.approx(
        [float(rows[i, t]) for i, t in enumerate(PROMPT[1:])], abs=1e-4
    )
    assert after.prompt_logprobs is None
    assert after.token is not None


def test_prompt_logprobs_after_a_prefix_hit_are_an_error_not_a_guess(engine):
    engine.open(7, PROMPT, SamplingParams(prompt_logprobs=0))
    run_step(engine, [SequenceStep(1, PROMPT[:16], 0, [4], False)])
    results = {
        r.seq_id: r
        for r in run_step(engine, [SequenceStep(7, PROMPT[16:], 16, [4, 5], True), whole(2, [20, 21])])
    }
    assert "prefix" in results[7].error
    assert results[7].token is None
    assert results[2].token is not None
    engine.close(7)


def test_open_twice_is_refused_and_close_is_forgiving(engine):
    with pytest.raises(InvalidRequest):
        engine.open(1, PROMPT, GREEDY)
    engine.close(12345)


def test_memory_given_is_used_and_checked(folder):
    memory = allocate(2**20)
    engine = load_engine(folder, dtype="float32", pool_bytes=2**30, memory=memory, sampler=GreedySampler())
    assert engine.memory is memory
    assert 2**20 - engine.spec.page_bytes < engine.spec.nbytes <= 2**20
    with pytest.raises(ConfigError, match="kv-gib"):
        load_engine(folder, dtype="float32", pool_bytes=100, sampler=GreedySampler())


def test_model_info_says_what_the_folder_says(shared, folder):
    info = shared.info
    assert (info.vocab_size, info.context_tokens, info.dtype) == (VOCAB, CONTEXT_TOKENS, "float32")
    assert info.eos_token_ids == {2}
    assert info.fingerprint == fingerprint(folder)


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"dtype": "float32", "threads": 0}])
def test_wrong_settings_are_configuration_errors(folder, settings):
    with pytest.raises(ConfigError):
        load_engine(folder, pool_bytes=2**20, sampler=GreedySampler(), **settings)


def test_fingerprint_tells_models_apart(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(folder)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint(copy) != fingerprint(folder)
    (copy / "config.json").write_text(json.dumps({**config, "_name_or_path": "elsewhere"}))
    assert fingerprint(copy) == fingerprint(folder)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(copy) != fingerprint(folder)


def test_a_broken_weights_file_is_a_configuration_error(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors has \d+ bytes .* copy it again"):
        load_engine(copy, dtype="float32", pool_bytes=2**20, sampler=GreedySampler())
    whole = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    name = next(name for name, entry in header.items() if entry.get("data_offsets", [0])[0] > 0)
    header[name]["data_offsets"].reverse()
    raw = json.dumps(header).encode()
    weights.write_bytes(len(raw).to_bytes(8, "little") + raw + whole[end:])
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor .* no bytes of the file"):
        load_engine(copy, dtype="float32", pool_bytes=2**20, sampler=GreedySampler())
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        fingerprint(copy)
    weights.unlink()
    with pytest.raises(ConfigError, match="no weights"):
        fingerprint(copy)
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x02" * 64)
    with pytest.raises(ConfigError, match="save the model as safetensors"):
        fingerprint(copy)


def test_a_model_in_pytorchs_own_format_answers_the_same(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, copy / "pytorch_model.bin")
    engine = load_engine(copy, dtype="float32", pool_bytes=2**20, sampler=GreedySampler())
    prompt = list(range(5, 30))
    assert serve(engine, [prompt], 8) == generate(folder, [prompt], 8)
    same = engine.info.fingerprint
    assert fingerprint(shutil.copytree(copy, tmp_path / "again")) == same
    name = next(iter(weights))
    torch.save(weights | {name: weights[name] + 1}, copy / "pytorch_model.bin")
    assert fingerprint(copy) != same


def test_tokens_that_tie_in_bfloat16_are_told_apart():
    """Two logits near 25 that bfloat16 rounds to one value: the better one must win."""
    weight = torch.full((50, 8), -1.0, dtype=torch.bfloat16)
    weight[20], weight[30] = 3.125, 3.125
    weight[30, 0] = 3.140625
    hidden = torch.ones(2, 8, dtype=torch.bfloat16)
    product = PlainProduct(weight, None, None)
    rounded = product(hidden)
    assert rounded[0, 20] == rounded[0, 30]
    logits = Head(weight, product, None).logits(hidden)
    assert logits.dtype == torch.float32
    assert logits.argmax(-1).tolist() == [30, 30]
    assert logits[0, 30] - logits[0, 20] == 0.015625


def test_page_lists_of_the_driver_really_scatter():
    engine_like = type("E", (), {"spec": type("S", (), {"page_tokens": 16})})
    lists = page_lists(engine_like, [300, 300], 16)
    assert all(pages != list(range(pages[0], pages[0] + len(pages))) for pages in lists)
