"""vLLM: a KV connector over `segue.kv` (docs/vllm.md). vLLM loads it by `kv_connector_module_path`.

`vllm_connector` is the class that vLLM makes; it and `vllm_stats` import vLLM. The scheduler side is pure:
`vllm_settings` checks what vLLM was started with, `vllm_params` reads and writes `kv_transfer_params`,
`vllm_request` is a request as the tables see it, `vllm_orders` has what travels between the two sides,
`vllm_pins` keeps blocks from being used again. `vllm_table` has what both roles share; `vllm_prefill_table`
and `vllm_decode_table` decide. The worker side is `vllm_worker` over the memory of `vllm_memory` and
`vllm_shared_pool`; `vllm_rank` has the workers of tensor parallelism, `vllm_query` how the concurrent flow
finds a worker. `vllm_facts` reads vLLM's objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.integrations.vllm.vllm_connector import SegueConnector as SegueConnector

__all__ = ["SegueConnector"]


def __getattr__(name: str) -> object:
    # The tables are used without vLLM, too.
    if name != "SegueConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from segue.integrations.vllm.vllm_connector import SegueConnector

    return SegueConnector
