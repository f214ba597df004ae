"""From a model's name to a local folder, with a progress bar while it is fetched or converted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

from segue.cli.terminal import progress
from segue.engine.model_names import DEFAULT_MODEL
from segue.engine.models.families.deepseek import latent_items
from segue.engine.models.hybrid import kv_layers, state_tensors
from segue.engine.models.model_fingerprint import weight_count
from segue.engine.pool_size import ModelSize
from segue.kv import ConfigError

#: What a model's description says in whole numbers, of what its KV and its states are computed from.
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "conv_L_cache",
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_MAX_SIZE = 2**40


def located(model: str) -> str:
    """`model` as an absolute path if it is one that exists here, so that what is left is a name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if model != DEFAULT_MODEL and path.exists() else model


def resolve(model: str, cache: str | None, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of `model`. Raises ConfigError for an unknown or broken one. Without `weights` a
    folder may lack them, and of a model of the Hub its tokenizer alone is fetched."""
    from segue.engine.models.model_store import resolve_model

    with progress(BarColumn(), DownloadColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(model, total=None, visible=False)
        said = ""

        def shown(stage: str, done_bytes: int, total_bytes: int) -> None:
            nonlocal said
            text = f"{stage} {Path(model).name}"
            bar.update(task, description=text, completed=done_bytes, total=total_bytes or None, visible=True)
            if stage != said and not bar.console.is_terminal:
                print(f"segue: {text}", file=sys.stderr, flush=True)
            said = stage

        folder = Path(cache) if cache else None
        return Path(resolve_model(model, cache=folder, revision=revision, weights=weights, progress=shown))


def model_size(path: Path, dtype: str) -> ModelSize | None:
    """What the model in the folder `path` needs with weights and KV in `dtype`, from its description; None if
    that does not say. Raises ConfigError for a size there that is none."""
    try:
        config = json.loads((path / "config.json").read_bytes())
        config = config.get("text_config", config)
        _check_sizes(path / "config.json", config)
        items = latent_items(config)
        if items is None:
            heads = config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // heads
            items = 2 * (config.get("num_key_value_heads") or heads) * head_dim
        item_bytes = 4 if dtype == "float32" else 2
        token_bytes = item_bytes * kv_layers(config) * items
        state_bytes = sum(tensor.nbytes for tensor in state_tensors(config, dtype, item_bytes))
        weight_bytes = item_bytes * weight_count(path)
        return ModelSize(weight_bytes, token_bytes, config["max_position_embeddings"], state_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check_sizes(file: Path, config: dict[str, object]) -> None:
    for name in _SIZES:
        value = config.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 1 <= value <= _MAX_SIZE):  # type: ignore[operator]
            raise ConfigError(
                f"{file}: {name} is {str(value)[:40]!r}; it must be a whole number from 1 to {_MAX_SIZE}"
            )
