"""SGLang: the parts of a transfer backend over `segue.kv` that do not need SGLang itself.

`sglang_pool` describes SGLang's memory, `sglang_phases` maps phases to those that its queues accept,
`sglang_settings` refuses what is not supported, and `sglang_handoffs` has the senders and receivers of one
scheduler rank.
"""
