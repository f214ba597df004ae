"""The facts that the connector reads from vLLM's objects, by their attributes alone: nothing of vLLM is
imported."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from segue.integrations.vllm.vllm_claim import EngineRequest, Media
from segue.integrations.vllm.vllm_memory import CacheFacts
from segue.integrations.vllm.vllm_settings import PLAIN_DTYPES, EngineFacts
from segue.integrations.vllm.vllm_table import RequestEnd, ScheduledChunk
from segue.kv import ConfigError

log = logging.getLogger("segue.vllm")

#: vLLM's class of a KV cache whose manager keeps all blocks of a prompt; others put block 0 for some.
_WHOLE_CACHE = "FullAttentionSpec"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
#: The adapters that were used last.
_MAX_ADAPTERS = 1024
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
#: So many samples of so many bytes of each file of weights are hashed, evenly spread: to read all of a large
#: model would cost minutes at each start.
_SAMPLES = 64
_SAMPLE_BYTES = 4096


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


def weights_fingerprint(model: Any, load_format: str) -> str:
    """A digest of a `ModelConfig`: the model's configuration, and samples of each file of its weights.

    Weights that are not in files here are identified by the name, revision and seed that vLLM loads them by.
    """
    digest = hashlib.blake2b(b"segue vllm weights 1\0", digest_size=16)

    def add(*fields: object) -> None:
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())

    configuration = dict(model.hf_config.to_dict())
    # The same weights may lie in another folder on the other host, and other releases add their version.
    for name in ("_name_or_path", "transformers_version"):
        configuration.pop(name, None)
    # With longrope vLLM chooses the rotary factors by the longest sequence that it serves.
    longest = model.max_model_len if "longrope" in json.dumps(configuration, default=str) else 0
    add(configuration, str(model.quantization), longest)
    if model.multimodal_config is not None:
        # vLLM's hash of an image has the processor's arguments of its request, not those of the server.
        media, pruning = model.multimodal_config, ("video_pruning_rate", "video_pruning_method")
        add(media.mm_processor_kwargs or {}, *(getattr(media, name, None) for name in pruning))
    folder = None if load_format == "dummy" else _folder(model)
    files = [] if folder is None else sorted(p for kind in _WEIGHT_FILES for p in folder.glob(kind))
    if not files:
        if load_format != "dummy":
            log.warning("no files with weights of %s were found: its name stands for them", model.model)
        add(str(model.model), str(model.revision), load_format, model.seed)
    for file in files:
        add(file.name, file.stat().st_size)
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _folder(model: Any) -> Path | None:
    if os.path.isdir(model.model):
        return Path(model.model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except ValueError:
        return None  # no name of the hub: an address of a bucket, for example
    return Path(found).parent if isinstance(found, str) else None


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as content:
        for i in range(_SAMPLES):
            content.seek(max(0, (size - _SAMPLE_BYTES) * i // (_SAMPLES - 1)))
            yield content.read(_SAMPLE_BYTES)


class AdapterFingerprints:
    """Digests of LoRA adapters: their configuration, and samples of their weights, as of the model's.

    Files are read once for each adapter that vLLM has loaded (`lora_int_id`). An adapter has no digest if it
    is not in files here, if vLLM loads it again under the same number (`load_inplace`), or if its files have
    changed since they were read: it is not known then which weights vLLM computes with.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[int, str], tuple[list[object], str]] = OrderedDict()

    def of(self, lora: Any) -> str | None:
        """The digest of a vLLM `LoRARequest`'s adapter, or None."""
        if lora.load_inplace:
            return None
        files = sorted(p for kind in _ADAPTER_FILES for p in Path(lora.lora_path).glob(kind))
        if len(files) < 2:  # the configuration and weights
            return None
        try:
            state: list[object] = [
                (p.name, s.st_size, s.st_mtime_ns, s.st_ino) for p in files for s in [p.stat()]
            ]
            key = (int(lora.lora_int_id), str(lora.lora_path))
            known = self._found.pop(key, None) or (state, _adapter_digest(files))
        except OSError:
            return None
        self._found[key] = known
        if len(self._found) > _MAX_ADAPTERS:
            self._found.popitem(last=False)
        return known[1] if known[0] == state else None


def _adapter_digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(b"segue vllm adapter 1\0", digest_size=16)
    for file in files:
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def request_of(request: Any, adapters: AdapterFingerprints) -> EngineRequest:
    """A vLLM `Request` as the tables see it."""
    lora = request.lora_request
    return EngineRequest(
        request_id=request.request_id,
        tokens=list(request.prompt_token_ids or ()),
        params=request.kv_transfer_params,
        cache_salt=request.cache_salt,
        lora_name=None if lora is None else str(lora.lora_name),
        lora_weights=None if lora is None else adapters.of(lora),
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
