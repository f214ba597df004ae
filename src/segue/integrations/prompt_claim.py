"""The claim of one prompt: a digest of everything that its KV depends on. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from segue.kv import InvalidRequest

#: Raise it when a claim covers something else: two sides must make it alike.
CLAIM_VERSION = "segue claim 2"


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
class ClaimedPrompt:
    """A prompt as the engine computes it: its `tokens`, and what else its KV depends on.

    `lora_weights` is a fingerprint of the adapter's weights. `embeds`: the prompt, or a part of it, is given
    as embeddings, not as tokens.
    """

    tokens: Sequence[int]
    cache_salt: str | None = None
    lora_name: str | None = None
    lora_weights: str | None = None
    media: Sequence[Media] = field(default=())
    embeds: bool = False


def claim_of(prompt: ClaimedPrompt, model: ModelFacts) -> bytes:
    """32 bytes that are equal on both sides only if the prompt's KV is.

    Raises InvalidRequest for a request whose KV depends on something that is not known here.
    """
    if prompt.embeds:
        raise InvalidRequest("a prompt of embeddings is not handed over: its tokens do not identify its KV")
    if prompt.lora_name is not None and not prompt.lora_weights:
        raise InvalidRequest(
            f"the weights of LoRA {prompt.lora_name[:100]!r} are not known: they are not in files here, or "
            "were replaced after the engine had loaded them; its KV is not handed over"
        )
    if not prompt.tokens:
        raise InvalidRequest("a request without prompt tokens has no KV to hand over")
    # One array of scalars and arrays has one msgpack encoding.
    fields = (
        CLAIM_VERSION,
        model.weights,
        model.kv_dtype,
        list(prompt.tokens),
        prompt.cache_salt,
        prompt.lora_name,
        prompt.lora_weights,
        [(media.content, media.offset, media.length) for media in prompt.media],
    )
    try:
        content = msgspec.msgpack.encode(fields)
    except UnicodeError as error:
        raise InvalidRequest(
            f"a prompt whose salt or adapter is no text is not handed over: {error}"
        ) from None
    return hashlib.blake2b(content, digest_size=32).digest()
