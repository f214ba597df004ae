"""The content of a hand-off's `Metadata`: what the prefill role sends the decode role with the KV."""

from __future__ import annotations

import msgspec

from segue.engine.request import TokenLogprob
from segue.kv import DECODE_ERRORS, MetadataMismatch


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """The first token and what goes with it. `prefill_cached` and `computed` count prompt tokens; `timeline`
    holds prefill's durations in seconds (`queue`, `bootstrap`, `prefill`)."""

    first_token: int
    first_logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prefill_cached: int = 0
    computed: int = 0
    timeline: dict[str, float] = {}

    def encode(self) -> bytes:
        """The result as msgpack."""
        return msgspec.msgpack.encode(self)


_DECODER = msgspec.msgpack.Decoder(PrefillResult)


def decode_result(content: bytes) -> PrefillResult:
    """The reverse of `PrefillResult.encode`. Raises MetadataMismatch for anything else."""
    try:
        return _DECODER.decode(content)
    except DECODE_ERRORS as error:
        raise MetadataMismatch(f"prefill's result cannot be read: {error}") from None
