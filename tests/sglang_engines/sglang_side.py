"""One SGLang engine in a process: `python sglang_side.py MODE MODEL PORT BOOTSTRAP_PORT` reads jobs as JSON
lines and answers each with a line. MODE is prefill, decode, or null for an engine that does both."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    mode, model, port, bootstrap = sys.argv[1:5]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from sglang.srt.entrypoints.engine import Engine

    options = {
        "model_path": model,
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "bfloat16",
        "page_size": 16,
        "chunked_prefill_size": 64,
        "disable_overlap_schedule": True,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "host": "127.0.0.1",
        "port": int(port),
        "log_level": "warning",
        "skip_server_warmup": True,
    }
    if mode != "null":
        options |= {
            "disaggregation_mode": mode,
            "disaggregation_transfer_backend": "segue",
            "disaggregation_bootstrap_port": int(bootstrap),
        }
    if mode == "decode":
        # The default calls CUDA's runtime, also without a GPU.
        options |= {"disaggregation_decode_retraction_backup": "cpu_tensor"}
    engine = Engine(**options)
    print(json.dumps({"ready": mode}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        where = {}
        if mode != "null":
            count = len(job["prompts"])
            where = {
                "bootstrap_host": ["127.0.0.1"] * count,
                "bootstrap_port": [int(bootstrap)] * count,
                "bootstrap_room": job["rooms"],
            }
        sampling = {"temperature": 0, "max_new_tokens": job["tokens"]}
        try:
            found = engine.generate(job["prompts"], sampling_params=sampling, **where)
            answer = {
                "texts": [one["text"] for one in found],
                "ends": [str(one["meta_info"]["finish_reason"]) for one in found],
            }
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
