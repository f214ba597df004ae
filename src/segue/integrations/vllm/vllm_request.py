"""A vLLM request as the connector's tables see it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.integrations.prompt_claim import ClaimedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest(ClaimedPrompt):
    """A prompt with its request: `params` are its `kv_transfer_params`, `max_tokens` is the number of tokens
    to generate."""

    request_id: str
    params: Mapping[str, object] | None = None
    max_tokens: int = 1
