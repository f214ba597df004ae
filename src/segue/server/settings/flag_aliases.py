"""Words that people bring along: what Kubernetes puts into every pod, and flags that other servers have.

Pure tables and rules; `server.settings.layers` and the command line ask them.
"""

from __future__ import annotations

import re

_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
#: Kubernetes tells every pod of a Service `a-b` with A_B_SERVICE_HOST, A_B_SERVICE_PORT[_NAME], A_B_PORT=tcp://…,
#: A_B_PORT_80_TCP=tcp://… and A_B_PORT_80_TCP_PROTO, _PORT and _ADDR.
_LINK_NAME = re.compile(
    r"([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT = re.compile(r"([A-Z0-9_]+_)?PORT")


def is_service_link(name: str, value: str) -> bool:
    """Whether the variable `name` (without `SEGUE_`) with `value` is one that Kubernetes makes of a Service
    whose name begins with `segue`. No setting's variable looks like one, unless its value does."""
    if _LINK_NAME.fullmatch(name):
        return True
    return _LINK_PORT.fullmatch(name) is not None and _LINK_VALUE.match(value) is not None


#: Settings that are planned and do nothing yet, by key.
LATER = {
    "decode_cp": "decode computes single rows, which are not in this version shared out; give --decode-tp or "
    "--decode-pp, or start more instances",
}

#: Settings that had another name, by the old key. Flag, variable and key in a file still work under it.
OLD_NAMES = {"integrity": "kv_checksum"}

_LENGTH = "a sequence may be as long as the model's context and the pool allow; --kv-gib sizes the pool"
_ONE_HOST = "not here, because the ranks of an instance are on one host; start more instances"
_EXPERTS = "--enable-expert-parallel, which shares experts out over the --dp ranks of an instance"
_TP = "--tp of segue prefill and decode, --prefill-tp and --decode-tp of segue serve"
_PP = "--pp of segue prefill and decode, --prefill-pp and --decode-pp of segue serve"
_DP = "--dp of segue prefill and segue decode, or --prefill-dp and --decode-dp of segue serve"
_NO_GPU = "not here, because this version computes on CPUs"
_SPLIT = "the role is the command: segue prefill, segue decode or segue unified"
_QUANT = "not here, because KV and weights have one type, which --dtype names"
_PARSER = "not here, because the marks of tool calls are found by the model's own chat template"
_REASONING = "not here, because reasoning is not told apart from the answer: it is part of content"
_PREFIXES = "prefixes are always kept and used again, unless the model keeps a state beside its KV"
_METRICS = "metrics are always at /metrics"
_CODE = "not here, because code that comes with a model is never run"
_SEED = "each request has its own seed"
_LOG_REQUESTS = (
    "each request is one line without its text; --log-level warning leaves out those that end well"
)

#: Names in vLLM, SGLang and others: the name here, or why there is none.
FLAG_ALIASES = {
    # the model
    "model_path": "--model",
    "model_name_or_path": "--model",
    "tokenizer_path": "the tokenizer is the model's own; --model names both",
    "tokenizer": "the tokenizer is the model's own; --model names both",
    "tokenizer_mode": "the tokenizer is the model's own; --model names both",
    "served_model": "--served-model-name",
    "model_name": "--served-model-name",
    "alias": "--served-model-name",
    "download_dir": "--cache for conversions, HF_HOME for what is fetched from the Hub",
    "hf_token": "the variable HF_TOKEN",
    "code_revision": _CODE,
    "tokenizer_revision": "--revision names model and tokenizer",
    "trust_remote_code": _CODE,
    "load_format": "not here, because safetensors are preferred and .bin is taken where there are none",
    "quantization": _QUANT,
    "kv_cache_dtype": _QUANT,
    "chat_template": "not here, because the chat template is the model's own",
    "lora_modules": "not here, because this version has no LoRA",
    "enable_lora": "not here, because this version has no LoRA",
    "speculative_config": "not here, because this version has no speculative decoding",
    # lengths and memory
    "max_model_len": _LENGTH,
    "context_length": _LENGTH,
    "ctx_size": _LENGTH,
    "gpu_memory_utilization": "--kv-gib",
    "mem_fraction_static": "--kv-gib",
    "kv_cache_memory_bytes": "--kv-gib",
    "cpu_offload_gb": _NO_GPU,
    "swap_space": "not here: a sequence that must wait keeps its KV in host memory by itself",
    "block_size": "--page-tokens",
    "page_size": "--page-tokens",
    "max_num_seqs": "--max-batch",
    "max_running_requests": "--max-batch",
    "max_num_batched_tokens": "--chunk-tokens",
    "chunked_prefill_size": "--chunk-tokens",
    "max_prefill_tokens": "--chunk-tokens",
    "enable_chunked_prefill": "prompts are always computed in chunks; --chunk-tokens sets their size",
    "enable_prefix_caching": _PREFIXES,
    "no_enable_prefix_caching": f"not here: {_PREFIXES}",
    "disable_radix_cache": f"not here: {_PREFIXES}",
    "enforce_eager": _NO_GPU,
    "disable_cuda_graph": _NO_GPU,
    "device": _NO_GPU,
    "num_gpus": _NO_GPU,
    "attention_backend": _NO_GPU,
    # ranks and roles
    "tensor_parallel_size": _TP,
    "tp_size": _TP,
    "pipeline_parallel_size": _PP,
    "pp_size": _PP,
    "data_parallel_size": _DP,
    "dp_size": _DP,
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "dist_init_addr": "instances find each other by --registry",
    "master_addr": "instances find each other by --registry",
    "enable_dp_attention": _EXPERTS,
    "ep_size": _EXPERTS,
    "expert_parallel_size": _EXPERTS,
    "disaggregation_mode": _SPLIT,
    "disaggregation_bootstrap_port": "--bootstrap-port",
    "disaggregation_transfer_backend": "--transport",
    "disaggregation_ib_device": "no flag: --transport nixl takes RDMA devices as UCX finds them; "
    "the variable UCX_NET_DEVICES names them",
    "kv_transfer_config": f"--transport; {_SPLIT}",
    "kv_events_config": "--kv-events-port, --kv-events-replay-port, --kv-events-host and --kv-events-topic",
    "load_balance_method": "--load-balance of segue prefill, or --policy of segue frontend and segue serve",
    # the door
    "ssl_keyfile": "--https-key (--tls-key is between the parts)",
    "ssl_certfile": "--https-cert (--tls-cert is between the parts)",
    "uvicorn_log_level": "--log-level",
    "disable_log_requests": _LOG_REQUESTS,
    "enable_log_requests": _LOG_REQUESTS,
    "log_requests": _LOG_REQUESTS,
    "generation_config": "--sampling-defaults",
    "enable_auto_tool_choice": _PARSER,
    "tool_call_parser": _PARSER,
    "reasoning_parser": _REASONING,
    "guided_decoding_backend": "not here, because grammars always run on llguidance",
    "seed": _SEED,
    "random_seed": _SEED,
    "root_path": "not here: let the proxy before the door take the path away",
    "workers": "--prefill and --decode",
    "otlp_traces_endpoint": "the variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "json_output": "--log-format json",
    "log_config_file": "not here: each event is one line on standard error; --log-level, --log-format",
    "max_log_len": _LOG_REQUESTS,
    "disable_log_stats": _METRICS,
    "enable_metrics": _METRICS,
    "cors_allow_origins": "--allowed-origins",
    "allow_credentials": "not here: clients send their API key in a header; --allowed-origins",
    "ssl_ca_certs": "not here: clients show an API key (--api-key-file); --tls-ca is between the parts",
    "response_role": "not here: the role of an answer is assistant",
    "stream_interval": "not here: each token is sent as it comes",
    "max_logprobs": "not here: a request may ask for up to 20",
    "max_queued_requests": "--max-queue",
    "schedule_policy": "not here: prompts wait by priority, in turns of tenants, then by arrival",
    "watchdog_timeout": "--request-budget-s bounds requests, --peer-silence-s silent peers",
    "dist_timeout": "--peer-silence-s",
    "num_gpu_blocks_override": "--kv-gib",
    "max_total_tokens": "--kv-gib",
    "max_batch_total_tokens": "--kv-gib",
    "max_input_length": _LENGTH,
    "num_shard": _TP,
    "master_port": "instances find each other by --registry",
    "hostname": "--host",
    "api_server_count": "start segue frontend several times with the same --registry",
    "n_gpu_layers": _NO_GPU,
    "cuda_graph_max_bs": _NO_GPU,
    "compilation_config": _NO_GPU,
    "max_lora_rank": "not here, because this version has no LoRA",
}

#: Settings of one instance that `segue serve` has by another name, by key.
IN_SERVE = {
    "tp": "--prefill-tp and --decode-tp",
    "pp": "--prefill-pp and --decode-pp",
    "cp": "--prefill-cp",
    "dp": "--prefill-dp and --decode-dp",
    "load_balance": "--policy",
    "http_port": "--instance-doors",
    "registry": "its own registry, on --bootstrap-port",
}


def explain(name: str) -> str:
    """A hint for `name` (a flag, a key or a variable, in any spelling) if other servers or later versions use
    it; else an empty text."""
    key = name.lstrip("-").removeprefix("SEGUE_").replace("-", "_").lower()
    if key in LATER:
        return f": {LATER[key]}"
    if key in FLAG_ALIASES:
        return f": {FLAG_ALIASES[key]}"
    return ""
