"""The `gen_ai.*` attributes of an answer's span, by OpenTelemetry's semantic conventions."""

from __future__ import annotations

from segue.server.frontend.plan import Plan
from segue.server.messages.records import Attribute

PROVIDER = "segue"
#: Endpoints that take a text and no messages.
_TEXT = frozenset({"completions", "generate"})


def operation_of(endpoint: str) -> str:
    """The `gen_ai.operation.name` of an endpoint that generates."""
    return "text_completion" if endpoint in _TEXT else "chat"


def inference_attributes(operation: str, plan: Plan, planned_at: float) -> dict[str, Attribute]:
    """The request's settings and the answer's counts so far. `planned_at` is the end of planning, on the
    clock of the samples' `first_at`. Values that mean "off" are left out."""
    answer, samples = plan.answer, plan.samples
    asked, usage = samples[0].request.sampling, answer.usage()
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": answer.shape.model,
        "gen_ai.response.model": answer.shape.model,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
    if plan.stream:
        found["gen_ai.request.stream"] = True
        if begun := [sample.first_at for sample in samples if sample.first_at]:
            found["gen_ai.response.time_to_first_chunk"] = min(begun) - planned_at
    if len(samples) > 1:
        found["gen_ai.request.choice.count"] = len(samples)
    if asked.top_k:
        found["gen_ai.request.top_k"] = float(asked.top_k)
    if asked.frequency_penalty:
        found["gen_ai.request.frequency_penalty"] = asked.frequency_penalty
    if asked.presence_penalty:
        found["gen_ai.request.presence_penalty"] = asked.presence_penalty
    if reasoning := usage.get("completion_tokens_details"):
        found["gen_ai.usage.reasoning.output_tokens"] = reasoning["reasoning_tokens"]
    if finished := [sample.finish.value for sample in samples if sample.finish is not None]:
        found["gen_ai.response.finish_reasons"] = finished
    return found
