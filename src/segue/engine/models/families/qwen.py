"""qwen2, qwen3 and qwen3_moe (Alibaba): some layers have a sliding window, and in qwen3_moe experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segue.engine.models.model_registry import ExpertOptions, ModelFamily

EXPERTS = ExpertOptions("num_experts", "moe_intermediate_size")


def sparse_layers(values: Mapping[str, Any]) -> int:
    """How many layers of a model of Alibaba's have experts."""
    dense, step = set(values.get("mlp_only_layers") or ()), int(values.get("decoder_sparse_step") or 1)
    layers = range(int(values["num_hidden_layers"]))
    return sum(index not in dense and (index + 1) % step == 0 for index in layers)


class Qwen(ModelFamily):
    """See the module's text."""

    mapped = True

    def windows(self, config: Any, attentions: Sequence[Any]) -> Sequence[int | None]:
        """See `ModelFamily.windows`."""
        return [attn.sliding_window for attn in attentions]


class QwenMoe(Qwen):
    """See the module's text."""

    mapped = False
    experts = EXPERTS

    def expert_layers(self, values: Mapping[str, Any]) -> int:
        """See `ModelFamily.expert_layers`."""
        return sparse_layers(values)


FAMILIES = {"qwen2": Qwen(), "qwen3": Qwen(), "qwen3_moe": QwenMoe()}
