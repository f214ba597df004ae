"""What is read from vLLM's objects, with doubles that have the same attributes."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Double
from typing import Any

import pytest
from vllm_doubles import PLAIN, FullAttentionSpec

from segue.integrations.prompt_claim import Media
from segue.integrations.served_weights import AdapterFingerprints
from segue.integrations.vllm.vllm_facts import (
    cache_facts,
    chunks_of,
    end_of,
    engine_facts,
    lora_weights,
    request_of,
    weights_fingerprint,
)
from segue.integrations.vllm.vllm_memory import CacheFacts
from segue.integrations.vllm.vllm_settings import (
    ConnectorSettings,
    EngineFacts,
    check_engine,
    parse_settings,
)
from segue.integrations.vllm.vllm_table import RequestEnd, ScheduledChunk
from segue.kv import ConfigError, Role


def model_config(kv_heads: int, *, sleep: bool = False) -> Double:
    return Double(enable_sleep_mode=sleep, get_total_num_kv_heads=lambda: kv_heads)


def engine_config(**changes: Any) -> Double:
    parallel = {
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    parallel |= {name: changes.pop(name) for name in list(changes) if name in parallel}
    config = Double(
        kv_transfer_config=Double(kv_role="kv_producer"),
        cache_config=Double(cache_dtype="auto"),
        device_config=Double(device_type="cpu"),
        parallel_config=Double(**parallel),
        speculative_config=None,
        weight_transfer_config=None,
        model_config=model_config(4),
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def groups(*specs: type) -> Double:
    return Double(kv_cache_groups=[Double(kv_cache_spec=spec()) for spec in specs])


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    pass


ONE_GROUP = groups(FullAttentionSpec)


def test_a_plain_engine_is_supported() -> None:
    facts = engine_facts(engine_config(), ONE_GROUP)
    assert facts == EngineFacts(kv_role="kv_producer", kv_heads=4)
    assert check_engine(facts, ConnectorSettings()) is Role.PREFILL
    assert (
        check_engine(engine_facts(engine_config(tensor_parallel_size=2), ONE_GROUP), ConnectorSettings())
        is Role.PREFILL
    )
    ngram = engine_config(speculative_config=Double(method="ngram"))
    ngram.kv_transfer_config.kv_role = "kv_consumer"
    assert check_engine(engine_facts(ngram, ONE_GROUP), ConnectorSettings()) is Role.DECODE


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_transfer_config": Double(kv_role="kv_both")}, "kv_both is not supported"),
        ({"kv_transfer_config": Double(kv_role="other")}, "not 'other'"),
        ({"cache_config": Double(cache_dtype="fp8_e4m3")}, "--kv-cache-dtype fp8_e4m3"),
        ({"cache_config": Double(cache_dtype="int8_per_token_head")}, "--kv-cache-dtype int8_per_token_head"),
        (
            {"cache_config": Double(cache_dtype="nvfp4")},
            "--kv-cache-dtype nvfp4: its scales are not in the KV",
        ),
        ({"device_config": Double(device_type="cuda")}, 'a GPU without device_memory "unverified"'),
        ({"device_config": Double(device_type="xpu")}, "the device xpu, only cpu and cuda"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"tensor_parallel_size": 8}, "--tensor-parallel-size 8 for 4 KV heads"),
        ({"tensor_parallel_size": 2, "model_config": model_config(1)}, "--tensor-parallel-size 2"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"speculative_config": Double(method="eagle3")}, "speculative decoding by eagle3"),
        ({"speculative_config": Double(method="draft_model")}, "speculative decoding by draft_model"),
        ({"weight_transfer_config": object()}, "weight updates"),
        ({"model_config": model_config(4, sleep=True)}, "--enable-sleep-mode"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_engine(engine_facts(engine_config(**changes), ONE_GROUP), ConnectorSettings())


def test_hybrid_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        check_engine(
            engine_facts(engine_config(), groups(FullAttentionSpec, FullAttentionSpec)), ConnectorSettings()
        )


def test_a_kv_cache_without_the_whole_prompt_is_refused() -> None:
    """vLLM gives the blocks outside of a sliding window to others, and names block 0 in their place."""
    with pytest.raises(ConfigError, match="a KV cache of SlidingWindowSpec"):
        check_engine(engine_facts(engine_config(), groups(SlidingWindowSpec)), ConnectorSettings())
    latents = engine_facts(engine_config(), groups(MLAAttentionSpec))
    assert check_engine(latents, ConnectorSettings()) is Role.PREFILL


def test_an_agent_serves_one_rank_of_a_cpu() -> None:
    facts, settings = EngineFacts(kv_role="kv_producer"), ConnectorSettings(agent=True)
    assert check_engine(facts, settings) is Role.PREFILL
    with pytest.raises(ConfigError, match="agent with --tensor-parallel-size 2"):
        check_engine(replace(facts, tensor_ranks=2, kv_heads=2), settings)
    with pytest.raises(ConfigError, match="agent with the memory of a GPU"):
        check_engine(replace(facts, device="cuda"), ConnectorSettings(agent=True, device_memory="unverified"))


def test_the_memory_of_a_gpu_needs_the_setting() -> None:
    facts = EngineFacts(kv_role="kv_producer", device="cuda")
    assert check_engine(facts, parse_settings({"device_memory": "unverified"})) is Role.PREFILL
    with pytest.raises(ConfigError, match="device_memory"):
        parse_settings({"device_memory": "yes"})


def test_the_cache_as_its_layers_describe_it() -> None:
    spec = Double(block_size=32, head_size=64, dtype="torch.float32", **PLAIN)
    caches = Double(kv_cache_groups=[Double(kv_cache_spec=spec)], num_blocks=100)
    layer = Double(get_attn_backend=lambda: Double(get_name=lambda: "CPU_ATTN"), isa="vec")
    config = engine_config(compilation_config=Double(static_forward_context={"l0": layer}))
    wanted = CacheFacts(
        backend="CPU_ATTN", blocks=100, block_size=32, head_size=64, dtype="float32", isa="vec"
    )
    assert cache_facts(config, caches, "l0") == wanted
    second = replace(wanted, tensor_rank=1, tensor_ranks=2)
    config.parallel_config.tensor_parallel_size = 2
    assert cache_facts(config, caches, "l0", 1) == second
    spec.dtype = "torch.float8_e4m3fn"
    with pytest.raises(ConfigError, match="a KV cache of float8_e4m3fn"):
        cache_facts(config, caches, "l0")
    del layer.isa
    with pytest.raises(ConfigError, match="how it packs"):
        cache_facts(config, caches, "l0")


def model(folder: Path | str, longest: int = 2048, **configuration: Any) -> Double:
    return Double(
        max_model_len=longest,
        multimodal_config=None,
        hf_config=Double(to_dict=lambda: {"hidden_size": 8, "_name_or_path": str(folder), **configuration}),
        model=str(folder),
        revision=None,
        quantization=None,
        seed=0,
    )


def written(folder: Path, content: bytes) -> Double:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return model(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # ROCm's shuffled cache: [blocks, 2, block_size, heads * head_size]; token rows if it has two heads
        ({"num_head_slots": 2, "state_content_bytes": 256}, "num_head_slots 2, state_content_bytes 256"),
        ({"state_content_bytes": 1000}, "state_content_bytes 1000"),
        ({"kv_quant_mode": 3}, "kv_quant_mode 3"),
        ({"tokens_per_state": 4}, "tokens_per_state 4"),
    ],
)
def test_a_cache_that_its_spec_calls_packed_is_refused_whatever_its_shape(
    changes: dict[str, int], named: str
) -> None:
    layer = Double(get_attn_backend=lambda: Double(get_name=lambda: "FLASH_ATTN"))
    spec = Double(block_size=16, head_size=64, dtype="torch.bfloat16", **{**PLAIN, **changes})
    caches = Double(kv_cache_groups=[Double(kv_cache_spec=spec)], num_blocks=8)
    config = Double(compilation_config=Double(static_forward_context={"l0": layer}))
    with pytest.raises(ConfigError, match=named):
        cache_facts(config, caches, "l0")


def test_equal_weights_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    content = os.urandom(500_000)
    one, other = written(tmp_path / "a", content), written(tmp_path / "b", content)
    assert weights_fingerprint(one, "auto") == weights_fingerprint(other, "auto")


def test_other_weights_or_configurations_have_another(tmp_path: Path) -> None:
    content = os.urandom(500_000)
    fingerprints = {
        weights_fingerprint(written(tmp_path / "a", content), "auto"),
        weights_fingerprint(written(tmp_path / "b", bytes(x ^ 1 for x in content)), "auto"),
        weights_fingerprint(written(tmp_path / "c", content[:-1] + b"?"), "auto"),
        weights_fingerprint(written(tmp_path / "d", content + b"more"), "auto"),
        weights_fingerprint(model(tmp_path / "a", rope_theta=5), "auto"),
    }
    assert len(fingerprints) == 5


def test_a_draft_models_weights_are_a_part_of_the_fingerprint(tmp_path: Path) -> None:
    served, content = written(tmp_path / "a", os.urandom(5000)), os.urandom(5000)
    drafts = [written(tmp_path / name, one) for name, one in (("b", content), ("c", content + b"?"))]
    alone = weights_fingerprint(served, "auto")
    assert weights_fingerprint(served, "auto", served) == alone, "vLLM names it for n-grams"
    assert len({alone, *(weights_fingerprint(served, "auto", draft) for draft in drafts)}) == 3


def test_with_longrope_the_longest_sequence_is_a_part_of_the_fingerprint(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", os.urandom(5000)).model
    rope = {"rope_parameters": {"rope_type": "longrope"}}
    assert weights_fingerprint(model(folder, 2048), "auto") == weights_fingerprint(
        model(folder, 4096), "auto"
    )
    one, other = (weights_fingerprint(model(folder, longest, **rope), "auto") for longest in (2048, 8192))
    assert one != other


@pytest.mark.parametrize(
    "other",
    [
        {"mm_processor_kwargs": {"do_resize": False}},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
    ],
)
def test_what_the_server_does_to_images_is_a_part_of_the_fingerprint(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """vLLM's hash of an image has the arguments of its request alone."""
    plain = {"mm_processor_kwargs": None, "video_pruning_rate": None, "video_pruning_method": "evs"}
    served = written(tmp_path / "a", os.urandom(5000))
    served.multimodal_config = Double(**plain)
    fingerprint = weights_fingerprint(served, "auto")
    assert weights_fingerprint(served, "auto") == fingerprint
    served.multimodal_config = Double(**(plain | other))
    assert weights_fingerprint(served, "auto") != fingerprint


def test_weights_without_files_are_known_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert weights_fingerprint(model("dummy"), "dummy") != weights_fingerprint(model("other"), "dummy")
        assert not caplog.messages
        weights_fingerprint(model("s3://nobody/model"), "runai_streamer")
    assert caplog.messages == [
        "no files with weights of s3://nobody/model were found: its name stands for them"
    ]


def adapter(folder: Path, content: bytes, number: int = 1, *, inplace: bool = False) -> Double:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return Double(lora_name="a", lora_int_id=number, lora_path=str(folder), load_inplace=inplace)


def test_adapters_are_known_by_their_weights(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    prefill, decode = AdapterFingerprints(), AdapterFingerprints()
    one, same = adapter(tmp_path / "a", content), adapter(tmp_path / "b", content, number=7)
    other = adapter(tmp_path / "c", content[:-1] + b"?")
    assert lora_weights(one, prefill) == lora_weights(one, prefill) == lora_weights(same, decode) is not None
    assert lora_weights(other, decode) not in (None, lora_weights(one, prefill))


def test_an_adapter_whose_weights_are_not_known(tmp_path: Path) -> None:
    """Nobody knows which of its weights vLLM has: its prompts are not handed over."""
    found = AdapterFingerprints()
    assert lora_weights(adapter(tmp_path / "inplace", b"x" * 5000, inplace=True), found) is None
    assert (
        lora_weights(Double(lora_name="a", lora_int_id=2, lora_path="owner/a", load_inplace=False), found)
        is None
    )
    changed = adapter(tmp_path / "changed", b"x" * 5000)
    assert lora_weights(changed, found) is not None
    adapter(tmp_path / "changed", b"y" * 5001)
    assert lora_weights(changed, found) is None
    assert lora_weights(adapter(tmp_path / "changed", b"z" * 5002, number=3), found) is not None, (
        "vLLM has loaded it anew"
    )


def vllm_request(**changes: Any) -> Double:
    fields = {
        "request_id": "r1",
        "prompt_token_ids": [1, 2, 3],
        "kv_transfer_params": {"do_remote_decode": True},
        "cache_salt": "salt",
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "max_tokens": 1,
    }
    return Double(**{**fields, **changes})


def test_a_request_with_all_that_its_kv_depends_on() -> None:
    found = request_of(vllm_request(), AdapterFingerprints())
    assert (found.request_id, found.tokens, found.cache_salt, found.max_tokens) == (
        "r1",
        [1, 2, 3],
        "salt",
        1,
    )
    assert found.params == {"do_remote_decode": True}
    image = Double(identifier="hash", mm_position=Double(offset=1, length=2))
    lora = Double(lora_name="a", lora_int_id=1, lora_path="nowhere", load_inplace=False)
    full = request_of(
        vllm_request(lora_request=lora, mm_features=[image], prompt_embeds=object()), AdapterFingerprints()
    )
    assert (full.lora_name, full.lora_weights, full.media, full.embeds) == (
        "a",
        None,
        (Media("hash", 1, 2),),
        True,
    )


def test_the_chunks_of_a_step() -> None:
    output = Double(
        num_scheduled_tokens={"new": 5, "old": 1, "other": 2},
        scheduled_new_reqs=[Double(req_id="new", num_computed_tokens=4, block_ids=([7, 8],))],
        scheduled_cached_reqs=Double(
            req_ids=["old", "other"], new_block_ids=[None, ([9],)], num_computed_tokens=[3, 6]
        ),
    )
    assert chunks_of(output) == [
        ScheduledChunk("new", 4, 5, [7, 8]),
        ScheduledChunk("old", 3, 1, []),
        ScheduledChunk("other", 6, 2, [9]),
    ]


@pytest.mark.parametrize(
    ("reason", "end"),
    [("stop", "stop"), ("repetition", "stop"), ("length", "length"), ("abort", "abort"), ("error", "error")],
)
def test_the_end_of_a_request(reason: str, end: str) -> None:
    assert end_of(Double(get_finished_reason=lambda: reason)) is RequestEnd(end)
