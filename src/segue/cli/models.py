"""From a model's name to a local folder, with a progress bar while it is fetched or converted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from segue.core.config import DEFAULT_MODEL
from segue.core.pool_size import ModelSize
from segue.engine.deepseek import latent_items
from segue.engine.hybrid import kv_layers, state_tensors


def located(model: str) -> str:
    """`model` as an absolute path if it is one that exists here, so that what is left is a name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if model != DEFAULT_MODEL and path.exists() else model


def resolve(model: str, cache: str | None, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of `model`. Raises ConfigError for an unknown or broken one. Without `weights` a
    folder may lack them, and of a model of the Hub its tokenizer alone is fetched."""
    from segue.engine.store import resolve_model

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(model, total=None, visible=False)
        said = ""

        def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
            nonlocal said
            text = f"{stage} {Path(model).name}"
            bar.update(task, description=text, completed=done_bytes, total=total_bytes or None, visible=True)
            if stage != said and not console.is_terminal:
                print(f"segue: {text}", file=sys.stderr, flush=True)
            said = stage

        folder = Path(cache) if cache else None
        return Path(resolve_model(model, cache=folder, revision=revision, weights=weights, progress=progress))


def model_size(path: Path, dtype: str = "bfloat16") -> ModelSize | None:
    """What the model in the folder `path` needs with KV in `dtype`, from its description; None if that does
    not say."""
    try:
        config = json.loads((path / "config.json").read_bytes())
        config = config.get("text_config", config)
        items = latent_items(config)
        if items is None:
            heads = config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // heads
            items = 2 * (config.get("num_key_value_heads") or heads) * head_dim
        item_bytes = 4 if dtype == "float32" else 2
        token_bytes = item_bytes * kv_layers(config) * items
        state_bytes = sum(tensor.nbytes for tensor in state_tensors(config, dtype, item_bytes))
        weight_bytes = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        return ModelSize(weight_bytes, token_bytes, config["max_position_embeddings"], state_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
