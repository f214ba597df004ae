"""The model families that the engine runs, and how one is loaded from a safetensors folder.

A family is on the list when a test compares its tokens with `transformers` generate. Anything else,
and any option of a family that the paged attention would not honour, is refused at start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from segue.engine.kvpool import DTYPES
from segue.engine.models.families.deepseek import DEEPSEEK_FAMILIES, latent_items
from segue.engine.models.families.qwen_hybrid import reshape_qwen
from segue.engine.models.hybrid import HYBRID_FAMILIES, QWEN_FAMILIES, state_tensors
from segue.engine.models.model_registry import refuse_options, refuse_unsupported
from segue.engine.models.progress import counted
from segue.kv import ConfigError, Internal, KVShape, Part

#: What transformers' models are told to call for attention.
ATTENTION_NAME = "segue_paged"

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
#: Families whose files have each weight as transformers' layers do: nothing is merged when they are loaded,
#: and nothing but the weights depends on their dtype.
_MAPPED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
#: Dtypes as safetensors names them.
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, or the part of it that one rank computes. `shape` is of the whole model; `part`
    says which layers and KV heads of it are here, `heads` counts the query heads of each layer here (the same
    in all), and `windows` has the sliding window of each layer here in tokens, or None. Layers with a state
    instead of KV do not count as layers in any of these."""

    model: Any
    config: Any
    shape: KVShape
    part: Part
    heads: int
    windows: tuple[int | None, ...]
    context_tokens: int
    eos_token_ids: frozenset[int]


def read_config(folder: Path) -> Any:
    """The transformers configuration in `folder`. Raises ConfigError for a folder that is no model
    or a family that is not supported; reads no weights."""
    refuse_unsupported(folder)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _refuse_options(config)
    return config


def _refuse_options(config: Any) -> None:
    """Refuse every option of a supported family that would change results without being honoured."""
    values = config.to_dict()
    refuse_options(values)
    rope = values.get("rope_parameters") or {}
    for params in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        kind = params.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise ConfigError(
                f"the model's rope_type {kind!r} is not supported: it makes a token's KV depend on "
                f"the length of its batch; supported are {', '.join(sorted(_ROPE_TYPES))}"
            )
    other = set(values.get("layer_types") or ()) - _LAYER_TYPES
    if other and config.model_type not in HYBRID_FAMILIES:
        raise ConfigError(f"the model has layers of type {sorted(other)}, which are not supported")


def _not_fused(module: Any, *_args: Any, **_options: Any) -> Any:
    raise Internal(f"{type(module).__name__} was left as transformers made it: segue replaces every layer")


def load_model(folder: Path, dtype: str, *, in_parts: bool = False) -> LoadedModel:
    """Load the model in `folder` in `dtype`, its attention bound to the paged pool.

    Weights of that dtype are mapped from their files and read when they are used. With `in_parts` the others
    are, too, if the family allows it; `slicing.cut` converts what a rank keeps.

    Raises ConfigError with what to change when the folder, family or dtype is not supported.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    config = read_config(folder)
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    AttentionInterface.register(ATTENTION_NAME, _not_fused)
    logging.disable_progress_bar()
    before = logging.set_tqdm_hook(_told)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=(in_parts and _stored_dtype(folder, config.model_type)) or DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"the model in {folder} cannot be loaded: {exc}") from exc
    finally:
        logging.set_tqdm_hook(before)
    model.eval().requires_grad_(False)
    if config.model_type == "lfm2":
        _rename_lfm2(model.model)
    if config.model_type in QWEN_FAMILIES:
        reshape_qwen(model.model)
    shape = _kv_shape(model, config, dtype)
    return LoadedModel(
        model=model,
        config=config,
        shape=shape,
        part=Part(0, shape.layers, 0, shape.kv_heads),
        heads=int(config.num_attention_heads),
        windows=_windows(model, config),
        context_tokens=int(config.max_position_embeddings),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _told(factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What transformers counts the weights with: lines of our log in place of a bar."""
    if options.get("desc") != "Loading weights" or not args:
        return factory(*args, **options)
    return counted("weights_loading", args[0], len(args[0]))


def _stored_dtype(folder: Path, model_type: str) -> torch.dtype | None:
    """The one dtype of all weights in `folder`; None if they have several, or are not mapped as they are."""
    files = sorted(folder.glob("*.safetensors"))
    if model_type not in _MAPPED or not files:
        return None
    found: set[str] = set()
    for path in files:
        with safe_open(path, "pt") as file:
            found.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    return _STORED.get(found.pop()) if len(found) == 1 else None


def convert(model: Any, dtype: str) -> None:
    """Give every weight of `model` this dtype, one after the other."""
    for weight in model.parameters():
        weight.data = weight.data.to(DTYPES[dtype])


def has_attention(layer: Any) -> bool:
    """Whether a layer has KV; else it has a state."""
    return "self_attn" in dict(layer.named_children())


def _attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers if has_attention(layer)]


def _rename_lfm2(body: Any) -> None:
    """Give the modules of lfm2 the names that they have in other families."""
    for layer in body.layers:
        layer.input_layernorm, layer.post_attention_layernorm = layer.operator_norm, layer.ffn_norm
        mlp = layer.mlp = layer.feed_forward
        mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn = mlp.w1, mlp.w3, mlp.w2, torch.nn.SiLU()
        del layer.operator_norm, layer.ffn_norm, layer.feed_forward, mlp.w1, mlp.w2, mlp.w3
        if has_attention(layer):
            attn = layer.self_attn
            attn.q_norm, attn.k_norm, attn.o_proj = attn.q_layernorm, attn.k_layernorm, attn.out_proj
            del attn.q_layernorm, attn.k_layernorm, attn.out_proj
    body.norm = body.embedding_norm


def _kv_shape(model: Any, config: Any, dtype: str) -> KVShape:
    """The KV of each layer, read off the modules; equal in all layers or refused."""
    item_bytes = torch.empty((), dtype=DTYPES[dtype]).element_size()
    latent = latent_items(config.to_dict())
    if latent is not None:
        return KVShape(
            kind="mla",
            layers=len(_attentions(model)),
            kv_heads=1,
            k_dim=latent,
            v_dim=0,
            dtype=dtype,
            item_bytes=item_bytes,
        )
    kinds = {
        (attn.k_proj.out_features, attn.v_proj.out_features, attn.head_dim) for attn in _attentions(model)
    }
    if len(kinds) != 1:
        raise ConfigError(f"the model's layers have KV of different sizes ({sorted(kinds)}): not supported")
    ((k_items, v_items, head_dim),) = kinds
    if k_items != v_items or k_items % head_dim:
        raise ConfigError(f"K of {k_items} and V of {v_items} items per token are not supported")
    return KVShape(
        layers=len(_attentions(model)),
        kv_heads=k_items // head_dim,
        k_dim=head_dim,
        v_dim=head_dim,
        dtype=dtype,
        item_bytes=item_bytes,
        state=state_tensors(config.to_dict(), dtype, item_bytes),
    )


def _windows(model: Any, config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer, as its attention will pass it on."""
    windows: list[int | None]
    if config.model_type in ("mistral", "mixtral"):
        windows = [config.sliding_window] * config.num_hidden_layers
    elif config.model_type in ("llama", *DEEPSEEK_FAMILIES, *HYBRID_FAMILIES):
        windows = [None] * len(_attentions(model))
    else:
        windows = [attn.sliding_window for attn in _attentions(model)]
    return tuple(windows)


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    found: set[int] = set()
    path = folder / "generation_config.json"
    generation: dict[str, Any] = {}
    if path.exists():
        try:
            generation = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path} cannot be read: {exc}") from exc
    for ids in (generation.get("eos_token_id"), config.eos_token_id):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
