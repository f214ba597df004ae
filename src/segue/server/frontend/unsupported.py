"""Fields that would change the answer and are not built: refused by name, never passed over.

From OpenAI's API, vLLM's and SGLang's extra parameters and a few samplers of others. Each stands with the
values that ask for nothing: clients and routers send those (null always is one). A field that is in none of
these tables and not in `openai_types` changes no answer, and is ignored. docs/http.md lists all three kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from segue.server.frontend.problems import BadParam

#: Fields by name, with the values that ask for nothing.
Refused = Mapping[str, tuple[object, ...]]

_OFF: Final[tuple[object, ...]] = (False, 0, "", [], {})

#: Refused in both endpoints.
REFUSED: Final[dict[str, tuple[object, ...]]] = {
    # OpenAI
    "audio": _OFF,
    "function_call": ("none", "auto"),
    "functions": _OFF,
    "modalities": ([], ["text"]),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "allowed_token_ids": _OFF,
    "bad_words": _OFF,
    "chat_template": (),
    "detokenize": (True,),
    "documents": _OFF,
    "guided_whitespace_pattern": (),
    "logits_processors": _OFF,
    "logprob_token_ids": _OFF,
    "prompt_embeds": _OFF,
    "prompt_logprobs": (),
    "repetition_detection": _OFF,
    "return_prompt_text": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "spaces_between_special_tokens": (True,),
    "structural_tag": _OFF,
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": _OFF,
    "vllm_xargs": _OFF,
    "watermarking": _OFF,
    # SGLang
    "custom_logit_processor": _OFF,
    "custom_params": _OFF,
    "ebnf": _OFF,
    "extra_key": _OFF,
    "input_ids": _OFF,
    "lora_path": _OFF,
    "no_stop_trim": _OFF,
    "return_cached_tokens_details": _OFF,
    "return_hidden_states": _OFF,
    "return_logprob": _OFF,
    "return_routed_experts": _OFF,
    "sampling_seed": (),
    "session_params": _OFF,
    "stop_regex": _OFF,
    # others
    "dry_multiplier": _OFF,
    "dynatemp_range": _OFF,
    "grammar": _OFF,
    "mirostat_mode": _OFF,
    "no_repeat_ngram_size": _OFF,
    "num_beams": (1,),
    "repeat_penalty": (1,),
    "smoothing_factor": _OFF,
    "top_a": _OFF,
    "top_n_sigma": (0, -1),
    "typical_p": (1,),
    "xtc_probability": _OFF,
}

#: Refused in chat alone: the other endpoint has them.
REFUSED_IN_CHAT: Final[dict[str, tuple[object, ...]]] = {
    "add_special_tokens": _OFF,
    "best_of": (1,),
    "echo": _OFF,
    "suffix": _OFF,
}

#: Refused in text completions alone.
REFUSED_IN_COMPLETIONS: Final[dict[str, tuple[object, ...]]] = {
    "include_reasoning": (True,),
    "reasoning_effort": ("none", "medium"),
    "tools": _OFF,
    "top_logprobs": (),
}

#: Fields of chat and text completions that change no token, and of which no answer says anything.
IGNORED: Final = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels", "early_stopping"),
        *("ec_transfer_params", "guided_decoding_backend", "images_config", "kv_transfer_params"),
        *("length_penalty", "media_io_kwargs", "metadata", "mm_processor_kwargs", "ngram_corpus_id"),
        *("prediction", "prompt_cache_key", "prompt_cache_retention", "request_id", "rid"),
        *("routed_experts_start_len", "safety_identifier", "service_tier", "session_id", "store"),
        *("stream_reasoning", "truncation_side"),
    }
)

#: Refused in `/tokenize`.
REFUSED_IN_TOKENIZE: Final[Refused] = {"return_token_strs": _OFF}

#: Refused in `stream_options`.
REFUSED_IN_STREAM_OPTIONS: Final[Refused] = {"include_obfuscation": (False,)}

#: Refused in `structured_outputs`.
REFUSED_IN_STRUCTURED_OUTPUTS: Final[Refused] = {
    "disable_additional_properties": _OFF,
    "disable_any_whitespace": _OFF,
    "structural_tag": _OFF,
    "whitespace_pattern": (),
}


def with_refused(kind: type[msgspec.Struct], refused: Refused) -> type[msgspec.Struct]:
    """`kind` with the fields of `refused`, of any value, so that a decoder keeps them for `refuse`."""
    return msgspec.defstruct(
        kind.__name__, [(name, Any, None) for name in refused], bases=(kind,), frozen=True, kw_only=True
    )


def refuse(found: msgspec.Struct | None, refused: Refused, within: str = "") -> None:
    """Raises BadParam for the first field of `refused` that asks for something. `within` is the object that
    `found` is, with a dot; null has no fields."""
    if found is None:
        return
    for name, neutral in refused.items():
        value = getattr(found, name)
        if value is not None and value not in neutral:
            raise BadParam(f"{within}{name}: not supported; leave it out", within + name)
