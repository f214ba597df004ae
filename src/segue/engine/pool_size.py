"""How large the KV pools of a host are, if nobody says it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from segue.kv import ConfigError

#: Pools are resident from the start, so without a word from the user they stay modest.
AUTO_KV_MAX_BYTES = 2 * 2**30
#: Share of the host's free memory that all pools together may take by default.
AUTO_KV_SHARE = 0.4
#: A pool that holds fewer tokens, in whole pages, serves nobody.
LEAST_TOKENS = 64
#: Default batch that the automatic pool has room for, in sequences of the model's full context.
AUTO_KV_SEQUENCES = 8
#: Slots of state that a pool has at most, and the part of its bytes that they take at most (but for one).
MAX_STATE_SLOTS = 256
STATE_PART = 4
#: Bytes that rounding takes of a pool with slots, at most.
_ROUNDING_BYTES = 128


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of this host: cores this process may use, and free memory in bytes."""

    cores: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model: its weights, the KV of one token over all layers and the state of one sequence,
    in bytes, and the longest sequence in tokens."""

    weight_bytes: int
    token_bytes: int
    context_tokens: int
    state_bytes: int = 0


def state_slots(pool_bytes: int, state_bytes: int) -> int:
    """The number of state slots in a pool, one per sequence; 0 if sequences have no state."""
    if not state_bytes:
        return 0
    return max(1, min(MAX_STATE_SLOTS, pool_bytes // STATE_PART // state_bytes))


def _least_bytes(size: ModelSize, least_tokens: int) -> int:
    """The smallest pool with so many tokens beside its slots."""
    tokens_bytes = least_tokens * size.token_bytes
    if not size.state_bytes:
        return tokens_bytes
    return tokens_bytes + max(tokens_bytes // (STATE_PART - 1), size.state_bytes) + _ROUNDING_BYTES


def check_memory(kv_gib: float | None, instances: int, host: Host) -> None:
    """Raise ConfigError if the pools of so many instances, each with the given `kv_gib`, are larger than the
    free memory of `host`."""
    if kv_gib is None or int(kv_gib * 2**30) * instances <= host.free_bytes:
        return
    asked = f"--kv-gib {kv_gib:g}"
    if instances > 1:
        asked += f" for each of {instances} instances, {kv_gib * instances:g} GiB in all,"
    most = math.floor(host.free_bytes / instances / 2**30 * 100) / 100
    raise ConfigError(
        f"{asked} is more than the {host.free_bytes / 2**30:.2f} GiB of memory that are free here, limits of "
        f"control groups included; give at most {most:g} (weights need room, too), or leave --kv-gib out"
    )


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
        if size and given < (least := _least_bytes(size, least_tokens)):
            enough = math.ceil(least * dp / 2**30 * 10**5) / 10**5
            slots_bytes = state_slots(given, size.state_bytes) * size.state_bytes
            raise ConfigError(
                f"--kv-gib {kv_gib:g} holds {max(0, given - slots_bytes) // size.token_bytes} tokens of this "
                f"model and must hold {least_tokens}: give at least {enough:g}"
            )
        return given
    weights = size.weight_bytes * pools if size else 0
    share = int(AUTO_KV_SHARE * max(0, host.free_bytes - weights) / max(1, pools))
    share = min(share, AUTO_KV_MAX_BYTES)
    least = 2**20
    if size:
        sequence = size.token_bytes * size.context_tokens
        share = min(share, max(sequence * AUTO_KV_SEQUENCES, 64 * 2**20))
        least = _least_bytes(size, least_tokens)
    if share < least:
        raise ConfigError(
            f"{host.free_bytes / 2**30:.2f} GiB of free memory are too little for {pools} KV pools beside "
            "the weights; start fewer instances, give --dtype bfloat16 where float32 is chosen (its weights "
            "take twice as much), or set --kv-gib"
        )
    return share
