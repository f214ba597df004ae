"""The facts that the backend reads from SGLang's objects, by their attributes alone: nothing of SGLang is
imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from segue.integrations.prompt_claim import ClaimedPrompt, Media
from segue.integrations.served_weights import AdapterFingerprints, model_path, served_weights
from segue.kv import ConfigError, model_fingerprint


def served_model(args: Any) -> str:
    """The identity of the model that a `ServerArgs` names: its configuration and weights, those of a draft
    model, and what changes the model when it is loaded. Raises ConfigError for files that cannot be read."""
    path = model_path(args.model_path, args.revision)
    file = None if path is None else (path if path.is_dir() else path.parent) / "config.json"
    try:
        configuration = json.loads(file.read_bytes()) if file is not None and file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    models = [(args.model_path, args.revision)]
    draft = args.speculative_draft_model_path
    if draft and draft != args.model_path:
        models.append((draft, args.speculative_draft_model_revision))
    weights = [served_weights(*model, str(args.load_format), args.random_seed) for model in models]
    changes = (str(args.quantization), args.json_model_override_args)
    # With longrope the rotary factors depend on the longest sequence that is served.
    longest = args.context_length if "longrope" in json.dumps(configuration) else 0
    return model_fingerprint(configuration, *weights, *changes, longest)


def prompt_of(queue: Any, req: Any, tokens: Sequence[int], adapters: AdapterFingerprints) -> ClaimedPrompt:
    """The prompt of `tokens` of a `Req` in one of SGLang's queues, with what else its KV depends on."""
    name = weights = None
    if req.lora_id is not None:
        loaded = queue.scheduler.tp_worker.model_runner.lora_manager.lora_refs.get(req.lora_id)
        name = str(loaded.lora_name if loaded is not None else req.lora_id)
        folder = loaded.lora_path if loaded is not None else None
        weights = adapters.of(req.lora_id, str(folder)) if folder else None
    items = req.multimodal_inputs.mm_items if req.multimodal_inputs is not None else ()
    return ClaimedPrompt(
        tokens=tokens,
        cache_salt=req.cache_salt,
        lora_name=name,
        lora_weights=weights,
        media=tuple(
            Media(f"{item.modality} {item.hash}", start, end - start)
            for item in items
            for start, end in item.offsets or ((0, -1),)
        ),
        embeds=req.input_embeds is not None or req.positional_embed_overrides is not None,
    )
