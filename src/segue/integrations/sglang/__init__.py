"""SGLang: a transfer backend of its prefill-decode disaggregation over `segue.kv`.

`sglang_plugin` is the way in, and `sglang_backend` the classes that SGLang makes: the one module that imports
SGLang at its top. `sglang_handoffs` decides: the senders and receivers of one scheduler rank. `sglang_pool`
describes SGLang's memory and `sglang_device` that of a GPU; `sglang_pinned` keeps pages from SGLang's
allocator that may still be read. `sglang_facts` reads SGLang's objects, `sglang_bootstrap` asks its bootstrap
servers. `sglang_phases` maps phases to those that its queues accept, and `sglang_settings` refuses what is
not supported.
"""
