"""mistral and mixtral (Mistral AI): one sliding window in all layers; mixtral has experts in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.engine.models.model_registry import ExpertOptions, ModelFamily


class Mistral(ModelFamily):
    """See the module's text."""

    mapped = True

    def windows(self, config: Any, attentions: Sequence[Any]) -> Sequence[int | None]:
        """See `ModelFamily.windows`."""
        return [config.sliding_window] * len(attentions)


class Mixtral(Mistral):
    """See the module's text."""

    mapped = False
    experts = ExpertOptions("num_local_experts", "intermediate_size")


FAMILIES = {"mistral": Mistral(), "mixtral": Mixtral()}
