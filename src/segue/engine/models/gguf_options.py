"""Options of a GGUF file that transformers' conversion leaves out: the scaling of the rotary embedding, and
the tokens that end a turn."""

from __future__ import annotations

import math
from typing import Any, Final

from segue.kv import ConfigError

#: Tensors that belong to the rotary embedding; they are options, not weights.
ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Texts of tokens at which llama.cpp ends an answer, whatever the file's header says.
_ENDS: Final = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<|return|>", "<|call|>"),
    }
)
#: Llama 3's own constants: GGUF files have the divisors that follow from them.
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ORIGINAL: Final = 8192
#: YaRN's constants where a file has none.
_BETAS: Final = {"beta_fast": 32.0, "beta_slow": 1.0}
#: Options with the value that changes nothing.
_NEUTRAL: Final = {
    "scaling.alpha": 0.0,
    "scaling.yarn_ext_factor": 1.0,
    "scaling.yarn_log_multiplier": 0.0,
}


def end_tokens(reader: Any) -> list[int]:
    """The ids of all tokens that end an answer: those that the header of the GGUF file names, and those that
    llama.cpp knows by their text."""
    named = (_value(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    tokens = _value(reader, "tokenizer.ggml.tokens") or []
    by_text = (i for i, text in enumerate(tokens) if text in _ENDS)
    return sorted({int(i) for i in named if i is not None} | set(by_text))


def apply_rope(reader: Any, config: Any) -> None:
    """Give the configuration that transformers made of a GGUF file the rotary embedding that the file asks
    for. Raises ConfigError for one that the configuration cannot express."""
    prefix = f"{_value(reader, 'general.architecture')}.rope."
    asked = {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }
    layers = config.rope_parameters
    by_kind = "sliding_attention" in layers
    full = layers["full_attention"] if by_kind else layers
    theta = float(asked.pop("freq_base", 10000.0))
    local = asked.pop("freq_base_swa", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if by_kind:
        layers["sliding_attention"]["rope_theta"] = 10000.0 if local is None else float(local)
    elif local not in (None, theta):
        raise _refused("freq_base_swa", local)
    for name in ("dimension_count", "dimension_count_swa"):
        if (rotated := asked.pop(name, head_dim)) != head_dim:
            raise _refused(name, f"{rotated} of {head_dim} items of a head")
    full |= {"rope_theta": theta} | _scaling(asked, _divisors(reader), theta, config.max_position_embeddings)


def _scaling(asked: dict[str, Any], divisors: list[float], theta: float, context: int) -> dict[str, Any]:
    """The scaling in transformers' terms; takes out of `asked` what it understands."""
    kind = asked.pop("scaling.type", "linear")
    factor = float(asked.pop("scaling.factor", 0) or asked.pop("scale_linear", 0) or 1.0)
    original = asked.pop("scaling.original_context_length", None)
    attention = float(asked.pop("scaling.attn_factor", 1.0)) * float(
        asked.pop("scaling.yarn_attn_factor", 1.0)
    )
    betas = {name: float(asked.pop(f"scaling.yarn_{name}", default)) for name, default in _BETAS.items()}
    asked.pop("scaling.finetuned", None)  # changes nothing that is computed
    asked.pop("scale_linear", None)
    for name, value in asked.items():
        if value != _NEUTRAL.get(name):
            raise _refused(name, value)
    if kind not in ("none", "linear", "yarn"):
        raise _refused("scaling.type", kind)
    if kind == "none" or (factor == 1.0 and kind == "linear"):
        if attention != 1.0:
            raise _refused("scaling.attn_factor", attention)
        return _llama3(divisors, theta, original) if divisors else {"rope_type": "default"}
    if divisors:
        raise _refused("scaling.type", f"{kind} beside the tensor {ROPE_TENSORS[0]}")
    if kind == "linear":
        if attention != 1.0:
            raise _refused("scaling.attn_factor", attention)
        return {"rope_type": "linear", "factor": factor}
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original or context),
        **betas,
    }
    if attention != 1.0:
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return scaling


def _divisors(reader: Any) -> list[float]:
    """By what each frequency is divided; empty if none is changed."""
    by_name = {tensor.name: tensor for tensor in reader.tensors if tensor.name in ROPE_TENSORS}
    for name in ROPE_TENSORS[1:]:
        if name in by_name:
            raise _refused("scaling.type", f"longrope, in the tensor {name}")
    if ROPE_TENSORS[0] not in by_name:
        return []
    found: list[float] = by_name[ROPE_TENSORS[0]].data.astype("float64").ravel().tolist()
    return found if any(value != 1.0 for value in found) else []


def _llama3(divisors: list[float], theta: float, original: int | None) -> dict[str, Any]:
    """The options of rope type `llama3` of which these divisors are made."""
    options = {
        "rope_type": "llama3",
        "factor": float(f"{max(divisors):.6g}"),
        "original_max_position_embeddings": int(original or _LLAMA3_ORIGINAL),
        **_LLAMA3,
    }
    for i, divisor in enumerate(divisors):
        wanted = _llama3_divisor(theta ** (-i / len(divisors)), options)
        if not math.isclose(divisor, wanted, rel_tol=1e-4):
            raise _refused(ROPE_TENSORS[0], "divisors of frequencies that are not Llama 3's")
    return options


def _llama3_divisor(frequency: float, options: dict[str, Any]) -> float:
    """By what Llama 3.1's scaling divides a frequency (transformers' `modeling_rope_utils`)."""
    turns = options["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = options["low_freq_factor"], options["high_freq_factor"], options["factor"]
    if turns > high:
        return 1.0
    if turns < low:
        return float(factor)
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _refused(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"the file's rotary embedding (rope) cannot be converted: {name} is {value}; take the model as a "
        "Hugging Face folder"
    )
