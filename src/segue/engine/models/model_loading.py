"""Loads a model of a supported family from a folder, its attention bound to the paged pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from segue.engine.kvpool import DTYPES
from segue.engine.models.folders import check_loaded, of_layers
from segue.engine.models.model_registry import ModelFamily, refuse_unsupported, supported_family
from segue.engine.models.progress import counted
from segue.kv import ConfigError, Internal, KVShape
from segue.kv.layout.content import Part

#: The attention that transformers' models are told to call.
ATTENTION_NAME = "segue_paged"

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
#: Dtypes as safetensors names them.
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of `family` ready to run, or the part of it that one rank computes. `shape` is of the whole
    model; `part` says which layers and KV heads of it are here, `heads` counts the query heads of each layer
    here (the same in all), and `windows` has the sliding window of each layer here in tokens, or None. Layers
    with a state instead of KV do not count as layers in any of these."""

    model: Any
    config: Any
    family: ModelFamily
    shape: KVShape
    part: Part
    heads: int
    windows: tuple[int | None, ...]
    context_tokens: int


def read_config(folder: Path) -> tuple[Any, ModelFamily]:
    """The transformers configuration in `folder`, and its family. Raises ConfigError for a folder that is no
    model, a family that is not supported, and every option that would change results without being honoured;
    reads no weights."""
    refuse_unsupported(folder)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    values = config.to_dict()
    family = supported_family(values)  # once more, with transformers' defaults
    rope = values.get("rope_parameters") or {}
    for params in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        kind = params.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise ConfigError(
                f"the model's rope_type {kind!r} is not supported: it makes a token's KV depend on "
                f"the length of its batch; supported are {', '.join(sorted(_ROPE_TYPES))}"
            )
    return config, family


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
    config, family = read_config(folder)
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    AttentionInterface.register(ATTENTION_NAME, _not_fused)
    logging.disable_progress_bar()
    before = logging.set_tqdm_hook(_told)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=(in_parts and family.mapped and _stored_dtype(folder)) or DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"the model in {folder} cannot be loaded: {exc}") from exc
    finally:
        logging.set_tqdm_hook(before)
    check_loaded(folder, found, of_layers(model, found["unexpected_keys"]))
    model.eval().requires_grad_(False)
    family.reshape(model.model)
    attentions = [layer.self_attn for layer in model.model.layers if has_attention(layer)]
    item_bytes = DTYPES[dtype].itemsize
    shape = family.kv_shape(attentions, config.to_dict(), dtype, item_bytes)
    return LoadedModel(
        model=model,
        config=config,
        family=family,
        shape=shape,
        part=Part(0, shape.layers, 0, shape.kv_heads),
        heads=int(config.num_attention_heads),
        windows=tuple(family.windows(config, attentions)),
        context_tokens=family.context_tokens(config.to_dict()),
    )


def _told(factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A progress counter for transformers: lines of our log in place of a bar."""
    if options.get("desc") != "Loading weights" or not args:
        return factory(*args, **options)
    return counted("weights_loading", args[0], len(args[0]))


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """The one dtype of all weights in `folder`; None if they have several, or are no safetensors."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
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
