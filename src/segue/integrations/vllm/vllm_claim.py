"""The claim of one prompt: a digest of everything that its KV depends on. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from segue.kv import InvalidRequest

_VERSION = "segue vllm claim 1"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that the KV of every prompt depends on: a fingerprint of the `weights`, and the KV's
    dtype."""

    weights: str
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class Media:
    """One multimodal input: the hash of its content, and the prompt tokens that it takes."""

    content: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A vLLM request as the tables see it.

    `tokens` are those of the prompt, `params` its `kv_transfer_params`. `lora_weights` is a fingerprint of
    the adapter's weights. `embeds`: the prompt, or a part of it, is given as embeddings, not as tokens.
    `max_tokens` is the number of tokens to generate.
    """

    request_id: str
    tokens: Sequence[int]
    params: Mapping[str, object] | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    lora_weights: str | None = None
    media: Sequence[Media] = field(default=())
    embeds: bool = False
    max_tokens: int = 1


def claim_of(request: EngineRequest, model: ModelFacts) -> bytes:
    """32 bytes that are equal on both sides only if the prompt's KV is.

    Raises InvalidRequest for a request whose KV depends on something that is not known here.
    """
    if request.embeds:
        raise InvalidRequest("a prompt of embeddings is not handed over: its tokens do not identify its KV")
    if request.lora_name is not None and not request.lora_weights:
        raise InvalidRequest(
            f"the weights of LoRA {request.lora_name[:100]!r} are not known: they are not in files here, or "
            "were replaced after vLLM had loaded them; its KV is not handed over"
        )
    if not request.tokens:
        raise InvalidRequest("a request without prompt tokens has no KV to hand over")
    # One array of scalars and arrays has one msgpack encoding.
    fields = (
        _VERSION,
        model.weights,
        model.kv_dtype,
        list(request.tokens),
        request.cache_salt,
        request.lora_name,
        request.lora_weights,
        [(media.content, media.offset, media.length) for media in request.media],
    )
    try:
        content = msgspec.msgpack.encode(fields)
    except UnicodeError as error:
        raise InvalidRequest(
            f"a prompt whose salt or adapter is no text is not handed over: {error}"
        ) from None
    return hashlib.blake2b(content, digest_size=32).digest()
