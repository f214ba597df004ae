"""The cost of prompts for the sequences that decode generates, measured on an engine."""

from __future__ import annotations

import pytest

from segue.engine.pages import PagePool
from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.instance.local_cost import measure_pauses
from segue.server.schedulers.kv_cache import KVCache
from segue.server.settings.commands import InstanceConfig
from segue.server.settings.shared_config import ModelConfig
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec


@pytest.mark.parametrize(("pages", "chunk_tokens", "lengths"), [(64, 100, [4, 16, 64]), (8, 512, [4, 16])])
@pytest.mark.parametrize("slots", [0, 1])
def test_prompts_up_to_a_chunk_or_the_pool_are_measured_and_nothing_is_kept(
    pages: int, chunk_tokens: int, lengths: list[int], slots: int
) -> None:
    engine = LineageEngine(lineage_spec(pages, slots=slots), vocab_size=1000)
    cache = KVCache(PagePool(pages, 4), slots)
    pauses = measure_pauses(engine, cache, chunk_tokens)
    assert [tokens for tokens, _ in pauses] == lengths
    assert all(pause_s >= 0 for _, pause_s in pauses)
    cache.check_integrity(at_rest=True)
    assert engine.sizes()["sequences"] == 0


def test_dp_ranks_that_step_together_measure_nothing() -> None:
    with pytest.raises(ConfigError, match="--max-local-prefill-length -1"):
        InstanceConfig(
            model="m",
            role=Role.DECODE,
            registry="http://127.0.0.1:1",
            dp=2,
            enable_expert_parallel=True,
            engine=ModelConfig(max_local_prefill_length=-1),
        )
