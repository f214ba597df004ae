"""One SGLang engine: `python sglang_side.py MODE MODEL PORT BOOTSTRAP_PORT OPTIONS` reads jobs as JSON lines
and answers each with a line, in any order. MODE is prefill, decode, or null for an engine that does both.
OPTIONS are those of SGLang's `Engine`, as JSON. With `http` it is SGLang's server, which is asked at PORT.
With `mla` its attention over torch computes MLA.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any


async def serve(engine: Any, mode: str, bootstrap: int, answers: Any) -> None:
    """Answer jobs until standard input ends."""
    loop = asyncio.get_running_loop()
    tasks = set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        if "abort" in job:
            for name in list(engine.tokenizer_manager.rid_to_state):
                if name.startswith(f"{job['abort']}-"):
                    engine.tokenizer_manager.abort_request(name)
            continue
        tasks.add(loop.create_task(_answer(engine, mode, bootstrap, job, answers)))
        tasks = {task for task in tasks if not task.done()}


async def _answer(engine: Any, mode: str, bootstrap: int, job: dict[str, Any], answers: Any) -> None:
    count = len(job["prompts"])
    more = dict(job.get("more", {}))
    if mode != "null":
        more |= {
            "bootstrap_host": ["127.0.0.1"] * count,
            "bootstrap_port": [bootstrap] * count,
            "bootstrap_room": job["rooms"],
        }
    sampling = {"temperature": 0, "max_new_tokens": job["tokens"]}
    try:
        found = await engine.async_generate(
            job["prompts"],
            sampling,
            return_logprob=job.get("logprobs", False),
            top_logprobs_num=2 if job.get("logprobs") else None,
            rid=[f"{job['id']}-{number:04d}" for number in range(count)],
            **more,
        )
        answer = {
            "texts": [one["text"] for one in found],
            "ids": [one["output_ids"] for one in found],
            "ends": [str(one["meta_info"]["finish_reason"]) for one in found],
        }
        if job.get("logprobs"):
            answer["leads"] = [
                [top[0][0] - top[1][0] for top in one["meta_info"]["output_top_logprobs"]] for one in found
            ]
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": job["id"], **answer}), file=answers)


def main() -> None:
    mode, model, port, bootstrap, more = sys.argv[1:6]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # SGLang spawns its processes, each of which then imports for 20 s; these are forked after the imports.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]
    importlib.import_module("sglang.srt.managers.scheduler")
    from sglang.srt.entrypoints.engine import Engine

    if "SGLANG_PROBE" in os.environ:
        import sglang_probe

        sglang_probe.install(Path(os.environ["SGLANG_PROBE"]))
    options = {
        "model_path": model,
        "device": "cpu",
        "attention_backend": "torch_native",
        "page_size": 16,
        "chunked_prefill_size": 64,
        "disable_overlap_schedule": True,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "host": "127.0.0.1",
        "port": int(port),
        "log_level": "warning",
        "skip_server_warmup": True,
        # Otherwise an idle scheduler keeps one of two cores busy.
        "sleep_on_idle": True,
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
    options |= json.loads(more)
    if options.pop("mla", False):
        # Otherwise SGLang computes a prompt in the form of MHA, whose keys `torch_native` does not find.
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

        handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    if options.pop("http", False):
        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.server_args import ServerArgs

        return launch_server(
            ServerArgs(**options), launch_callback=lambda: print(json.dumps({"id": "ready"}), file=answers)
        )
    engine = Engine(**options)
    print(json.dumps({"id": "ready"}), file=answers)
    return engine.loop.run_until_complete(serve(engine, mode, int(bootstrap), answers))


if __name__ == "__main__":
    main()
