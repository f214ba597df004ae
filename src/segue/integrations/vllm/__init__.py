"""vLLM: the scheduler side of a KV connector, as pure tables. The worker side does not exist yet: vLLM cannot
load this package as a connector.

`vllm_settings` checks what vLLM was started with, `vllm_params` reads and writes `kv_transfer_params`,
`vllm_claim` digests what must be equal on both sides, `vllm_orders` has what travels between the scheduler
and the worker side, `vllm_pins` keeps blocks from being used again. `vllm_table` has what both roles share;
`vllm_prefill_table` and `vllm_decode_table` decide.
"""
