"""The description of one leader of an instance in a scenario, and the model that all instances serve."""

from __future__ import annotations

from dataclasses import dataclass

from segue.kv.ids import ChecksumMode, Role
from segue.kv.protocol.room_ranks import REDIRECT_ON_CONFLICT, DpRanks

VOCAB = 1000
CONTEXT_TOKENS = 512
#: Tokens that end a sequence in the seeds that vary how answers end.
EOS = frozenset(range(0, VOCAB, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """The description of one leader of an instance; survives its restarts. Leaders of one instance differ in
    `dp_rank`, and the first gives it its name."""

    name: str
    role: Role
    pages: int
    page_tokens: int
    chunk_tokens: int
    max_batch: int
    model: str = "lineage-1"
    layers: int = 2
    kv_checksum: ChecksumMode = ChecksumMode.FULL
    clock_offset_s: float = 0.0
    clock_rate: float = 1.0
    pace: float = 1.0
    dp_rank: int = 0
    dp_size: int = 1
    load_balance: str = "round_robin"
    force_query: bool = False
    on_conflict: str = REDIRECT_ON_CONFLICT
    #: for decode: the longest prompt in tokens that it computes itself, or None; -1: as measured
    local_tokens: int | None = None
    #: its engine says of each layer that its KV is there, if it says it at all
    send_layers: bool = False

    @property
    def dp(self) -> DpRanks:
        """The DP ranks that the instance declares."""
        return DpRanks(
            size=self.dp_size,
            load_balance=self.load_balance,
            force_query=self.force_query,
            on_conflict=self.on_conflict,
        )

    @property
    def instance(self) -> str:
        """The instance that it is a leader of."""
        return self.name.partition(".")[0]
