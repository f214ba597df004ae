"""How many ranks each side of `segue serve` has: a branch of its settings."""

from __future__ import annotations

from dataclasses import dataclass

from segue.engine.parallel import ParallelSize
from segue.kv import ConfigError, Role
from segue.server.settings.layers import integer, switch

BALANCE_METHODS = (
    "round_robin",
    "follow_bootstrap_room",
    "total_requests",
    "total_tokens",
    "power_of_two",
    "prefix_aware",
)
TP_HELP = "tensor parallelism: processes that split the heads and weights of each layer"
PP_HELP = "pipeline parallelism: processes that split the layers"
CP_HELP = "context parallelism: processes that split the rows of each prompt chunk"
EXPERTS_HELP = (
    "expert parallelism: spread a mixture-of-experts model's experts over the DP ranks of each instance "
    "(needs --dp above 1)"
)
LOCAL_HELP = (
    "decode: compute prompts with at most N uncached tokens without a hand-off, and longer ones if no "
    "prefill instance can; 0: none; -1: measure N at start"
)


def check_expert_parallel(dp: int, size: ParallelSize, *, measures: bool = False) -> None:
    """Raises ConfigError unless `dp` leaders with ranks of `size` can share out experts. `measures`: each is
    to measure steps of its own at start."""
    if dp == 1:
        raise ConfigError(
            "--enable-expert-parallel shares out experts over DP ranks, and there is one; give --dp (of "
            "segue serve --prefill-dp or --decode-dp) of at least 2, or drop it"
        )
    if size.ranks > 1:
        raise ConfigError(
            "--enable-expert-parallel is for DP ranks of one process each; set --tp, --pp and --cp to 1"
        )
    if measures:
        raise ConfigError(
            "with --enable-expert-parallel no DP rank computes a step alone: --max-local-prefill-length -1 "
            "has nothing to measure; give it a number of tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """Each leader has `tp * pp * cp` processes; each instance has `dp` leaders."""

    prefill_tp: int = integer(f"prefill: {TP_HELP}", 1, low=1, high=64)
    prefill_pp: int = integer(f"prefill: {PP_HELP}", 1, low=1, high=64)
    prefill_cp: int = integer(f"prefill: {CP_HELP}", 1, low=1, high=64)
    prefill_dp: int = integer("data-parallel ranks of each prefill instance", 1, low=1, high=64)
    decode_tp: int = integer(f"decode: {TP_HELP}", 1, low=1, high=64)
    decode_pp: int = integer(f"decode: {PP_HELP}", 1, low=1, high=64)
    decode_dp: int = integer("data-parallel ranks of each decode instance", 1, low=1, high=64)
    enable_expert_parallel: bool = switch(EXPERTS_HELP)

    def __post_init__(self) -> None:
        if self.enable_expert_parallel:
            several = [role for role in (Role.PREFILL, Role.DECODE) if self.dp(role) > 1]
            for role in several or [Role.PREFILL]:
                check_expert_parallel(self.dp(role), self.size(role))

    def size(self, role: Role) -> ParallelSize:
        """Ranks of each leader of a role."""
        match role:
            case Role.PREFILL:
                return ParallelSize(self.prefill_tp, self.prefill_pp, self.prefill_cp)
            case Role.DECODE:
                return ParallelSize(self.decode_tp, self.decode_pp)
            case _:
                return ParallelSize()

    def dp(self, role: Role) -> int:
        """Leaders of each instance of a role."""
        return {Role.PREFILL: self.prefill_dp, Role.DECODE: self.decode_dp}.get(role, 1)
