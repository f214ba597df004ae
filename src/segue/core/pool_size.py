"""How large the KV pools of a host are, if nobody says it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from segue.core.errors import ConfigError

#: Pools are resident from the start, so without a word from the user they stay modest.
AUTO_KV_MAX_BYTES = 2 * 2**30
#: Share of the host's free memory that all pools together may take by default.
AUTO_KV_SHARE = 0.4
#: A pool that holds fewer tokens, in whole pages, serves nobody.
LEAST_TOKENS = 64
#: Default batch that the automatic pool has room for, in sequences of the model's full context.
AUTO_KV_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class Host:
    """What this host offers: cores this process may use, and memory that is free, in bytes."""

    cores: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model needs: its weights and the KV of one token over all layers, in bytes, and the
    longest sequence in tokens."""

    weight_bytes: int
    token_bytes: int
    context_tokens: int


def kv_pool_bytes(
    kv_gib: float | None,
    host: Host,
    pools: int,
    size: ModelSize | None,
    page_tokens: int = 16,
    dp: int = 1,
) -> int:
    """Bytes of each of `pools` pools on `host`, of pages of `page_tokens`.

    A given `kv_gib` is for one instance, whose `dp` ranks have equal parts of it. A part whose whole pages
    cannot hold `LEAST_TOKENS` is a ConfigError that names the least that can. Without it: an equal part of a
    share of the memory that is left after the weights, at most what a few sequences of full context need, and
    never more than a modest bound. A pool that could not hold one sequence of full context is still made
    (shorter prompts fit), but one that could not hold `LEAST_TOKENS` is a ConfigError.
    """
    least_tokens = -(-LEAST_TOKENS // page_tokens) * page_tokens
    if kv_gib is not None:
        given = int(kv_gib * 2**30) // dp
        if size and given < least_tokens * size.token_bytes:
            enough = math.ceil(least_tokens * size.token_bytes * dp / 2**30 * 10**5) / 10**5
            raise ConfigError(
                f"--kv-gib {kv_gib:g} holds {given // size.token_bytes} tokens of this model and must hold "
                f"{least_tokens}: give at least {enough:g}"
            )
        return given
    weights = size.weight_bytes * pools if size else 0
    share = int(AUTO_KV_SHARE * max(0, host.free_bytes - weights) / max(1, pools))
    share = min(share, AUTO_KV_MAX_BYTES)
    least = 2**20
    if size:
        sequence = size.token_bytes * size.context_tokens
        share = min(share, max(sequence * AUTO_KV_SEQUENCES, 64 * 2**20))
        least = least_tokens * size.token_bytes
    if share < least:
        raise ConfigError(
            f"{host.free_bytes / 2**30:.2f} GiB of free memory are too little for {pools} KV pools beside "
            "the weights; start fewer instances, or set --kv-gib"
        )
    return share
