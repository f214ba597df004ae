"""vLLM as `SegueConnector` meets it, without vLLM: stand-ins for the modules that it imports, and for
vLLM's configuration; an engine of the model (`vllm_model`) that calls a connector in vLLM's order."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import ModuleType
from types import SimpleNamespace as Double
from typing import Any

import pytest
import torch
from vllm_bench import MODEL
from vllm_model import ModelEngine, ModelPool, ModelWorker, Step
from vllm_pair import BLOCKS, DIM, HEADS, DeviceTensor, kv_of, make_caches, write

from segue.integrations.vllm.vllm_orders import Report, decode_orders, decode_reports, encode
from segue.integrations.vllm.vllm_request import EngineRequest
from segue.integrations.vllm.vllm_settings import LoadFailurePolicy
from segue.integrations.vllm.vllm_table import PassedIds, RequestEnd, ScheduledChunk

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_OURS = ("segue.integrations.vllm.vllm_connector", "segue.integrations.vllm.vllm_stats")


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata


class _Empty:
    pass


#: A spec whose backend keeps one dense row for each head and token.
PLAIN = {"num_head_slots": None, "state_content_bytes": None, "kv_quant_mode": 0, "tokens_per_state": 1}


class FullAttentionSpec(Double):
    """A KV cache that keeps all blocks of a prompt."""


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        self.per_engine_labelvalues = per_engine_labelvalues


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vllm_connector`, imported over the stand-ins; gone after the test, with its changes to segue's log."""
    log = logging.getLogger("segue")
    monkeypatch.setattr(log, "handlers", log.handlers[:])
    monkeypatch.setattr(log, "propagate", log.propagate)
    monkeypatch.setattr(log, "level", log.level)
    parts = BASE.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    ranks = Double(rank_in_group=0, world_size=1, broadcast_object=lambda value: value)
    parallel = ModuleType("vllm.distributed.parallel_state")
    parallel.get_tp_group = lambda: ranks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, parallel.__name__, parallel)
    sys.modules[BASE.rpartition(".kv_connector")[0]].get_kv_transfer_group = lambda: None  # type: ignore[attr-defined]
    base, metrics = ModuleType(BASE), ModuleType(METRICS)
    for name in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata"):
        setattr(base, name, type(name, (_Empty,), {}))
    for kind in (KVConnectorBase_V1, KVConnectorRole, KVConnectorTransferResults):
        setattr(base, kind.__name__, kind)
    for kind in (KVConnectorPromMetrics, KVConnectorStats):
        setattr(metrics, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, BASE, base)
    monkeypatch.setitem(sys.modules, METRICS, metrics)
    for name in _OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    from importlib import import_module

    found = import_module(_OURS[0])
    for name in _OURS:  # so that the test's end takes them out
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return found


def vllm_config(role: str, policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE, **extra: Any) -> Any:
    """vLLM's configuration of an engine on CPUs, with the pool of `vllm_pair`."""
    layer = Double(get_attn_backend=lambda: Double(get_name=lambda: "CPU_ATTN"), isa="vec")
    return Double(
        kv_transfer_config=Double(
            kv_role=role, kv_connector_extra_config=extra, kv_load_failure_policy=str(policy)
        ),
        cache_config=Double(cache_dtype="auto"),
        device_config=Double(device_type="cpu"),
        parallel_config=Double(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        speculative_config=None,
        weight_transfer_config=None,
        load_config=Double(load_format="dummy"),
        model_config=Double(
            enable_sleep_mode=False,
            hf_config=Double(to_dict=lambda: {"hidden_size": DIM}),
            model=MODEL.weights,
            revision=None,
            quantization=None,
            seed=0,
            max_model_len=2048,
            multimodal_config=None,
            get_total_num_kv_heads=lambda: HEADS,
        ),
        compilation_config=Double(static_forward_context={"layers.0.attn": layer}),
    )


def kv_cache_config(block: int = 4) -> Any:
    """vLLM's one KV cache group."""
    spec = FullAttentionSpec(block_size=block, head_size=DIM, dtype="torch.float32", **PLAIN)
    return Double(kv_cache_groups=[Double(kv_cache_spec=spec)], num_blocks=BLOCKS)


class ConnectorTable:
    """The scheduler's object of a connector, called as `ModelEngine` calls a table."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.requests: dict[str, Any] = {}
        self.metadata: Any = None
        self.stats: list[Any] = []

    def new_request(self, spec: EngineRequest) -> None:
        self.requests[spec.request_id] = request = Double(
            request_id=spec.request_id,
            prompt_token_ids=list(spec.tokens),
            kv_transfer_params=spec.params,
            cache_salt=spec.cache_salt,
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
            max_tokens=spec.max_tokens,
            num_computed_tokens=0,
        )
        self.connector.on_new_request(request)

    def matched(self, name: str, computed: int) -> tuple[int, bool]:
        found: tuple[int, bool] = self.connector.get_num_new_matched_tokens(self.requests[name], computed)
        return found

    def allocated(self, name: str, blocks: Sequence[int], external: int) -> None:
        if external:
            assert self.connector.get_loaded_kv_cache_group_ids(self.requests[name]) == (0,)
        allocated = Double(get_block_ids=lambda: (list(blocks),))
        self.connector.update_state_after_alloc(self.requests[name], allocated, external)

    def step(self, told: Sequence[ScheduledChunk], preempted: Iterable[str] = ()) -> None:
        cached = Double(
            req_ids=[chunk.request_id for chunk in told],
            new_block_ids=[(list(chunk.blocks),) if chunk.blocks else None for chunk in told],
            num_computed_tokens=[chunk.computed for chunk in told],
        )
        output = Double(
            num_scheduled_tokens={chunk.request_id: chunk.scheduled for chunk in told},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            preempted_req_ids=set(preempted) or None,
        )
        self.metadata = self.connector.build_connector_meta(output)

    def take_orders(self) -> Any:
        return decode_orders(self.metadata.orders)

    def results(
        self,
        reports: Sequence[Report],
        recving: Iterable[str],
        failed: Iterable[str],
    ) -> PassedIds:
        module = sys.modules[type(self.connector).__module__]
        named = sorted({*recving})
        worker_meta = module.SegueReports(encode(list(reports)), named) if reports or named else None  # type: ignore[attr-defined]
        # Of another connector in a MultiConnector, which may send requests that ours loads.
        sent = {*recving, "another's"}
        output = Double(
            kv_connector_worker_meta=worker_meta,
            finished_sending=set(sent),
            finished_recving=set(recving) or None,
            failed_recving=set(failed) or None,
        )
        self.connector.update_connector_output(output)
        assert output.finished_sending == sent
        if (stats := self.connector.get_kv_connector_stats()) is not None:
            self.stats.append(stats)
        return PassedIds(output.finished_recving, output.failed_recving)

    def finished(self, name: str, blocks: list[int], computed: int, end: RequestEnd) -> Any:
        request = self.requests.pop(name)
        request.num_computed_tokens, request.get_finished_reason = computed, lambda: str(end)
        return self.connector.request_finished(request, blocks)

    def has_work(self) -> bool:
        found: bool = self.connector.has_pending_push_work()
        return found

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = self.connector.sizes()
        return found


class ConnectorWorker(ModelWorker):
    """The worker's object of a connector, called in the order of a step of vLLM."""

    def __init__(self, pool: ModelPool, connector: Any, caches: Any) -> None:
        super().__init__(pool)
        self.connector, self.caches = connector, caches
        self.kv: dict[str, torch.Tensor] = {}
        #: what each forward raises
        self.raises: Exception | None = None

    def run(self, step: Step) -> None:
        module = sys.modules[type(self.connector).__module__]
        self.connector.bind_connector_metadata(module.SegueMetadata(step.orders))  # type: ignore[attr-defined]
        for request, start, end, _, blocks in step.chunks:
            for position in range(start, end):
                write(
                    self.caches, request.spec.tokens[position], position, blocks[position // self.pool.block]
                )
            for name in self.caches:
                self.connector.wait_for_layer_load(name)
                self.connector.save_kv_layer(name, None, None)
            if end == request.tokens:
                self.kv[request.spec.request_id] = kv_of(self.caches, blocks, end)
        with suppress(RuntimeError):  # of `raises`: it ends vLLM, and here the engine goes on
            try:
                if step.chunks and self.raises is not None:
                    raise self.raises
            finally:
                self.connector.start_load_kv(None)
                self.connector.wait_for_save()

    def take(self) -> Any:
        found = self.connector.get_transfer_results(set())
        meta = self.connector.build_connector_worker_meta()
        reports = [] if meta is None else decode_reports(meta.reports)
        return reports, found.finished_recving or set(), found.failed_recving or set()


def connector_engine(
    stack: ExitStack,
    module: Any,
    role: str,
    policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
    *,
    on_gpu: bool = False,
    **extra: Any,
) -> ModelEngine:
    """An engine with both objects of a connector, made in vLLM's order. With `on_gpu` its KV is declared as a
    device's."""
    config, caches_config = vllm_config(role, policy, **extra), kv_cache_config()
    config.device_config.device_type = "cuda" if on_gpu else "cpu"
    scheduler = module.SegueConnector(config, KVConnectorRole.SCHEDULER, caches_config)
    worker = module.SegueConnector(config, KVConnectorRole.WORKER, caches_config)
    stack.callback(worker.shutdown)
    stack.callback(scheduler.shutdown)
    context = worker.get_mem_pool_context()
    caches, _ = make_caches(context is not None, context)
    kind = DeviceTensor if on_gpu else torch.Tensor
    worker.register_kv_caches({name: cache.as_subclass(kind) for name, cache in caches.items()})
    pool = ModelPool(BLOCKS)
    scheduler.bind_gpu_block_pool(pool)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    engine = ModelEngine(ConnectorTable(scheduler), pool, policy)  # type: ignore[arg-type]
    engine.worker = ConnectorWorker(pool, worker, caches)
    return engine
