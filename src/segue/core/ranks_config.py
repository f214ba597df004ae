"""How many ranks each side of `segue serve` has: a branch of its settings."""

from __future__ import annotations

from dataclasses import dataclass

from segue.core.parallel import ParallelSize
from segue.core.settings import integer
from segue.core.types import Role

TP_HELP = "processes that share out each layer's heads and weights"
PP_HELP = "processes that share out the layers"
CP_HELP = "processes that share out the rows of each chunk of a prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """Of each leader `tp * pp * cp` processes compute; of each instance there are `dp` leaders."""

    prefill_tp: int = integer(f"prefill: {TP_HELP}", 1, low=1, high=64)
    prefill_pp: int = integer(f"prefill: {PP_HELP}", 1, low=1, high=64)
    prefill_cp: int = integer(f"prefill: {CP_HELP}", 1, low=1, high=64)
    prefill_dp: int = integer("data-parallel ranks of each prefill instance", 1, low=1, high=64)
    decode_tp: int = integer(f"decode: {TP_HELP}", 1, low=1, high=64)
    decode_pp: int = integer(f"decode: {PP_HELP}", 1, low=1, high=64)
    decode_dp: int = integer("data-parallel ranks of each decode instance", 1, low=1, high=64)

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
