"""One vLLM engine in this process, driven by lines of JSON: `python vllm_side.py '{"model": …}'`.

Reads requests from stdin (`{"id", "tokens", "max_tokens", "params", "lora"}`, `{"abort": id}`,
`{"count": true}`, `{"flip": n}`: a byte of each of the next n chunks changes in memory before it is hashed)
and writes events to stdout, a line each: `ready`, `done`, `failed`, `counts`. It steps while vLLM has work
and waits for a line when it has none. vLLM's own log goes to stderr.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
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
    from vllm.lora.request import LoRARequest

    llm = LLM(**json.loads(sys.argv[1]))
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    outcomes = count_outcomes(core.scheduler.connector)
    stamps = Stamps(core.scheduler.connector)
    say(event="ready", version=vllm.__version__)
    ids: dict[str, str] = {}
    flips, preempted = Flips(), count_preempted(core.scheduler)
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
        elif "flip" in line:
            flips.left = line["flip"]
        elif "count" in line:
            say(event="counts", outcomes=dict(outcomes), preempted=preempted(), **counts(core))
        elif line:
            params = SamplingParams(
                temperature=0,
                max_tokens=line["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": line["params"]} if line.get("params") else None,
            )
            lora = LoRARequest(*line["lora"]) if line.get("lora") else None
            prompt = {"prompt_token_ids": line["tokens"]}
            ids[engine.add_request(line["id"], prompt, params, lora_request=lora)] = line["id"]
        if core.scheduler.has_requests():
            for output in engine.step():
                if output.finished:
                    said = output.outputs[0]
                    internal = next((key for key, name in ids.items() if name == output.request_id), "")
                    ids.pop(internal, None)
                    say(
                        event="done",
                        id=output.request_id,
                        tokens=list(said.token_ids),
                        reason=said.finish_reason,
                        params=output.kv_transfer_params,
                        **stamps.take(internal),
                    )
            if not core.scheduler.running:
                time.sleep(0.001)  # as vLLM's own loop does
    core.shutdown()


class Stamps:
    """When each request's first step was scheduled (`began`), and when the KV of its last step was complete
    (`computed`), in seconds of the system's monotonic clock: taken inside a connector's calls."""

    def __init__(self, scheduler_side: Any) -> None:
        self._step: list[str] = []
        self._times: dict[str, dict[str, float]] = {}
        if scheduler_side is None:
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker_side = get_kv_transfer_group()
        build, save = scheduler_side.build_connector_meta, worker_side.wait_for_save

        def built(output: Any) -> Any:
            self._step = list(output.num_scheduled_tokens)
            for name in self._step:
                self._times.setdefault(name, {"began": time.monotonic()})
            return build(output)

        def saved() -> Any:
            for name in self._step:
                if name in self._times:
                    self._times[name]["computed"] = time.monotonic()
            self._step = []
            return save()

        scheduler_side.build_connector_meta, worker_side.wait_for_save = built, saved

    def take(self, name: str) -> dict[str, float]:
        """Those of a request that has ended."""
        return self._times.pop(name, {})


class Flips:
    """Changes a byte of a chunk where it lies, between its landing and its checksum."""

    def __init__(self) -> None:
        from segue.kv.ranks import checksums

        self.left = 0
        self._checksum = checksums.checksum
        checksums.checksum = self._flipped

    def _flipped(self, regions: Any, content: Any) -> int:
        if self.left:
            self.left -= 1
            regions[0][int(content.ranges()[0, 0]) + 5] ^= 0x10
        return self._checksum(regions, content)


def count_outcomes(connector: Any) -> Counter[str]:
    """How many hand-offs have ended with each error code, from now on."""
    outcomes: Counter[str] = Counter()
    if connector is not None:
        stats = connector.get_kv_connector_stats

        def counted() -> Any:
            found = stats()
            mine = found.data.get("SegueConnector", found) if found is not None else None
            outcomes.update(mine.data.get("outcomes", {}) if mine is not None else {})
            return found

        connector.get_kv_connector_stats = counted
    return outcomes


def count_preempted(scheduler: Any) -> Callable[[], int]:
    """How often the scheduler has taken blocks of a running request, from now on."""
    preempt, taken = scheduler._preempt_request, 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal taken
        taken += 1
        return preempt(*arguments, **more)

    scheduler._preempt_request = counted
    return lambda: taken


def counts(core: Any) -> dict[str, Any]:
    """What is held at this moment: blocks, entries of the connector's tables, descriptors, threads."""
    pool = core.scheduler.kv_cache_manager.block_pool
    held: dict[str, int] = {}
    if core.scheduler.connector is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for side in (core.scheduler.connector, get_kv_transfer_group()):
            for part in getattr(side, "sub_connectors", [side]):
                for name, count in part.sizes().items() if hasattr(part, "sizes") else ():
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
