"""The facts that the connector reads from vLLM's objects, by their attributes alone: nothing of vLLM is
imported."""

from __future__ import annotations

import json
from typing import Any

from segue.integrations.prompt_claim import Media
from segue.integrations.served_weights import AdapterFingerprints, served_weights
from segue.integrations.vllm.vllm_memory import CacheFacts
from segue.integrations.vllm.vllm_request import EngineRequest
from segue.integrations.vllm.vllm_settings import PLAIN_DTYPES, EngineFacts
from segue.integrations.vllm.vllm_table import RequestEnd, ScheduledChunk
from segue.kv import ConfigError, model_fingerprint

#: vLLM's class of a KV cache whose manager keeps all blocks of a prompt; others put block 0 for some.
_WHOLE_CACHE = "FullAttentionSpec"
#: Where a backend packs its KV in another way than one dense row for each head and token, its spec says so.
#: The shape does not: ROCm's shuffled cache of two KV heads has that of token rows.
_PLAIN = {"num_head_slots": None, "state_content_bytes": None, "kv_quant_mode": 0, "tokens_per_state": 1}


def engine_facts(config: Any, caches: Any) -> EngineFacts:
    """The facts for `check_engine`, from vLLM's `VllmConfig` and `KVCacheConfig`."""
    parallel, speculative = config.parallel_config, config.speculative_config
    kinds = [type(group.kv_cache_spec) for group in caches.kv_cache_groups]
    partial = [
        kind.__name__ for kind in kinds if _WHOLE_CACHE not in [base.__name__ for base in kind.__mro__]
    ]
    return EngineFacts(
        kv_role=str(config.kv_transfer_config.kv_role),
        kv_dtype=str(config.cache_config.cache_dtype),
        device=str(config.device_config.device_type),
        kv_cache_groups=len(caches.kv_cache_groups),
        pipeline_stages=parallel.pipeline_parallel_size,
        tensor_ranks=parallel.tensor_parallel_size,
        kv_heads=config.model_config.get_total_num_kv_heads(),
        data_ranks=parallel.data_parallel_size,
        context_ranks=parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        draft_method=str(speculative.method) if speculative is not None else "",
        partial_cache=partial[0] if partial else "",
        weight_updates=config.weight_transfer_config is not None,
        sleep_mode=bool(config.model_config.enable_sleep_mode),
    )


def cache_facts(config: Any, caches: Any, first_layer: str, tensor_rank: int = 0) -> CacheFacts:
    """vLLM's KV cache as it is laid out in the worker of this tensor-parallel rank. Raises ConfigError for a
    layer that does not say how."""
    spec = caches.kv_cache_groups[0].kv_cache_spec
    layer = config.compilation_config.static_forward_context[first_layer]
    backend = str(layer.get_attn_backend().get_name())
    isa = str(getattr(layer, "isa", ""))
    if backend == "CPU_ATTN" and not isa:
        raise ConfigError("CPU_ATTN does not say how it packs the KV: this version of vLLM is not known")
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in PLAIN_DTYPES:  # `auto` is what the model's own configuration says
        raise ConfigError(
            f"the segue connector does not support a KV cache of {dtype}: its scales are not in it"
        )
    packing = {name: getattr(spec, name) for name in _PLAIN if getattr(spec, name) != _PLAIN[name]}
    if packing:
        raise ConfigError(
            f"{backend} packs its KV cache in a way that is not described "
            f"({', '.join(f'{name} {value}' for name, value in packing.items())}): choose another attention "
            "backend, and on ROCm leave VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT unset"
        )
    return CacheFacts(
        backend=backend,
        blocks=caches.num_blocks,
        block_size=spec.block_size,
        head_size=spec.head_size,
        dtype=dtype,
        isa=isa,
        tensor_rank=tensor_rank,
        tensor_ranks=config.parallel_config.tensor_parallel_size,
    )


def weights_fingerprint(model: Any, load_format: str, draft: Any = None) -> str:
    """The identity of a `ModelConfig`, with the weights of the `draft` model that speculates for it, if any.

    Weights that are not in files here are identified by the name, revision and seed that vLLM loads them by.
    """
    configuration = dict(model.hf_config.to_dict())
    configuration.pop("_name_or_path", None)
    # With longrope vLLM chooses the rotary factors by the longest sequence that it serves.
    longest = model.max_model_len if "longrope" in json.dumps(configuration, default=str) else 0
    facts: list[object] = [str(model.quantization), longest]
    if model.multimodal_config is not None:
        # vLLM's hash of an image has the processor's arguments of its request, not those of the server.
        media, pruning = model.multimodal_config, ("video_pruning_rate", "video_pruning_method")
        facts += [media.mm_processor_kwargs or {}, *(getattr(media, name, None) for name in pruning)]
    # Without a draft model of its own vLLM names the model itself.
    for one in [model] if draft is None or draft.model == model.model else [model, draft]:
        facts.append(served_weights(str(one.model), one.revision, load_format, one.seed))
    return model_fingerprint(configuration, *facts)


def lora_weights(lora: Any, adapters: AdapterFingerprints) -> str | None:
    """The digest of a vLLM `LoRARequest`'s adapter; None if it is not known (see `AdapterFingerprints`), also
    if vLLM loads it again under the same number (`load_inplace`)."""
    return None if lora.load_inplace else adapters.of(int(lora.lora_int_id), str(lora.lora_path))


def request_of(request: Any, adapters: AdapterFingerprints) -> EngineRequest:
    """A vLLM `Request` as the tables see it."""
    lora = request.lora_request
    return EngineRequest(
        request_id=request.request_id,
        tokens=list(request.prompt_token_ids or ()),
        params=request.kv_transfer_params,
        cache_salt=request.cache_salt,
        lora_name=None if lora is None else str(lora.lora_name),
        lora_weights=None if lora is None else lora_weights(lora, adapters),
        media=tuple(
            Media(str(item.identifier), item.mm_position.offset, item.mm_position.length)
            for item in request.mm_features or ()
        ),
        embeds=request.prompt_embeds is not None,
        max_tokens=request.max_tokens,
    )


def chunks_of(output: Any) -> list[ScheduledChunk]:
    """The requests of a `SchedulerOutput`, of which each step computes a chunk."""
    scheduled = output.num_scheduled_tokens
    chunks = [
        ScheduledChunk(new.req_id, new.num_computed_tokens, scheduled[new.req_id], list(new.block_ids[0]))
        for new in output.scheduled_new_reqs
    ]
    old = output.scheduled_cached_reqs
    chunks += [
        ScheduledChunk(request_id, computed, scheduled[request_id], list(blocks[0]) if blocks else [])
        for request_id, blocks, computed in zip(
            old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True
        )
    ]
    return chunks


_ENDS = {
    "stop": RequestEnd.STOP,
    "repetition": RequestEnd.STOP,
    "length": RequestEnd.LENGTH,
    "abort": RequestEnd.ABORT,
}


def end_of(request: Any) -> RequestEnd:
    """How a finished `Request` ended."""
    return _ENDS.get(str(request.get_finished_reason()), RequestEnd.ERROR)
