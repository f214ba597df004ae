"""One vLLM engine in this process, driven by lines of JSON: `python vllm_side.py '{"model": …}'`.

Reads requests from stdin (`{"id", "tokens", "max_tokens", "params"}`, `{"abort": id}`, `{"count": true}`) and
writes events to stdout, a line each: `ready`, `done`, `failed`, `counts`. It steps while vLLM has work and
waits for a line when it has none. vLLM's own log goes to stderr.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def say(**event: Any) -> None:
    out.write(json.dumps(event) + "\n")


def read_lines(lines: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        lines.put(json.loads(line))
    lines.put(None)


def main() -> None:
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    outcomes = count_outcomes(core.scheduler.connector)
    say(event="ready", version=vllm.__version__)
    ids: dict[str, str] = {}
    while True:
        busy = core.scheduler.has_requests()
        try:
            line = lines.get(block=not busy)
        except queue.Empty:
            line = {}
        if line is None:
            break
        if "abort" in line:
            if found := [key for key, name in ids.items() if name == line["abort"]]:
                engine.abort_request(found, internal=True)
        elif "count" in line:
            say(event="counts", outcomes=dict(outcomes), **counts(core))
        elif line:
            params = SamplingParams(
                temperature=0,
                max_tokens=line["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": line["params"]} if line.get("params") else None,
            )
            ids[engine.add_request(line["id"], {"prompt_token_ids": line["tokens"]}, params)] = line["id"]
        if core.scheduler.has_requests():
            for output in engine.step():
                if output.finished:
                    said = output.outputs[0]
                    say(
                        event="done",
                        id=output.request_id,
                        tokens=list(said.token_ids),
                        reason=said.finish_reason,
                        params=output.kv_transfer_params,
                    )
            if not core.scheduler.running:
                time.sleep(0.001)  # as vLLM's own loop does
    core.shutdown()


def count_outcomes(connector: Any) -> Counter[str]:
    """How many hand-offs have ended with each error code, from now on."""
    outcomes: Counter[str] = Counter()
    if connector is not None:
        stats = connector.get_kv_connector_stats

        def counted() -> Any:
            found = stats()
            outcomes.update(found.data["outcomes"] if found is not None else {})
            return found

        connector.get_kv_connector_stats = counted
    return outcomes


def counts(core: Any) -> dict[str, Any]:
    """What is held at this moment: blocks, entries of the connector's tables, descriptors, threads."""
    pool = core.scheduler.kv_cache_manager.block_pool
    held: dict[str, int] = {}
    if core.scheduler.connector is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for side in (core.scheduler.connector, get_kv_transfer_group()):
            for name, count in side.sizes().items():
                held[name] = held.get(name, 0) + count
    return {
        "free_blocks": pool.get_num_free_blocks(),
        "requests": len(core.scheduler.requests),
        "held": held,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "rss_mib": int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20,
    }


if __name__ == "__main__":
    main()
