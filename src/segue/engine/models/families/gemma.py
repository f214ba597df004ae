"""gemma3_text (Google): norms around attention and feed-forward, and sliding windows in some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segue.engine.models.model_registry import ModelFamily


class Gemma(ModelFamily):
    """See the module's text."""

    one_plus_norms = True

    def context_tokens(self, values: Mapping[str, Any]) -> int:
        """See `ModelFamily.context_tokens`. Here `max_position_embeddings` is the scaled length."""
        return int(values["max_position_embeddings"])

    def windows(self, config: Any, attentions: Sequence[Any]) -> Sequence[int | None]:
        """See `ModelFamily.windows`."""
        return [attn.sliding_window for attn in attentions]

    def activation(self, config: Any) -> str:
        """See `ModelFamily.activation`."""
        return str(config.hidden_activation)


FAMILIES = {"gemma3_text": Gemma()}
