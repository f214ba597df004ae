"""`SegueConnector`: vLLM's connector class of both roles. Beside `vllm_stats` the one module that imports
vLLM.

vLLM makes two objects of it. The scheduler's turns vLLM's calls into a table's (`vllm_table`) and carries its
orders to the worker in each step's metadata; the worker's gives them to a `WorkerSide` and carries its
reports back.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tp_group

from segue.integrations.device_memory import device_warning
from segue.integrations.engine_log import log_into
from segue.integrations.prompt_claim import ModelFacts
from segue.integrations.served_weights import AdapterFingerprints
from segue.integrations.vllm.vllm_decode_table import DecodeTable
from segue.integrations.vllm.vllm_facts import (
    cache_facts,
    chunks_of,
    end_of,
    engine_facts,
    request_of,
    weights_fingerprint,
)
from segue.integrations.vllm.vllm_memory import cache_pool
from segue.integrations.vllm.vllm_orders import Report, decode_orders, decode_reports, encode
from segue.integrations.vllm.vllm_params import PeerAddress
from segue.integrations.vllm.vllm_prefill_table import PrefillTable
from segue.integrations.vllm.vllm_rank import RankSide, WorkerPlace, before_ranks_meet, lead
from segue.integrations.vllm.vllm_settings import LoadFailurePolicy, check_engine, parse_settings
from segue.integrations.vllm.vllm_shared_pool import SharedPoolMode
from segue.integrations.vllm.vllm_stats import SeguePromMetrics, SegueStats, StatsRecorder
from segue.integrations.vllm.vllm_table import SchedulerTable
from segue.integrations.vllm.vllm_worker import WorkerSide
from segue.kv import ConfigError, Incarnation, Internal, LeaderId, Role, model_identity

log = logging.getLogger("segue.vllm")


@dataclass
class SegueMetadata(KVConnectorMetadata):
    """The scheduler side's orders for one step, encoded."""

    orders: bytes


@dataclass
class SegueReports(KVConnectorWorkerMetadata):
    """The worker side's reports of one step, encoded, and the request ids that it named in that step."""

    reports: bytes
    named: list[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """One worker reports; there is nothing to add up."""
        raise Internal("two workers report hand-offs")


@dataclass
class SegueHandshake(KVConnectorHandshakeMetadata):
    """Where decode reaches a worker."""

    incarnation: str
    dp_rank: int
    host: str
    port: int


class SegueConnector(KVConnectorBase_V1):
    """Hands KV from a vLLM with `kv_role` kv_producer to one with kv_consumer. See docs/vllm.md.

    Raises ConfigError at the start for a configuration that is not supported.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_into(logging.getLogger("vllm"))
        transfer = vllm_config.kv_transfer_config
        self._settings = parse_settings(transfer.kv_connector_extra_config)
        self._segue_role = check_engine(engine_facts(vllm_config, kv_cache_config), self._settings)
        self._on_gpu = str(vllm_config.device_config.device_type) != "cpu"
        self._secret = _read_secret(self._settings.secret_file)
        self._weights = weights_fingerprint(
            vllm_config.model_config,
            str(vllm_config.load_config.load_format),
            getattr(vllm_config.speculative_config, "draft_model_config", None),
        )
        self._adapters = AdapterFingerprints()
        self._policy = LoadFailurePolicy(transfer.kv_load_failure_policy)
        self._table: SchedulerTable | None = None
        self._worker: WorkerSide | RankSide | None = None
        self._shared = SharedPoolMode()
        self._recorder = StatsRecorder()
        self._reports: list[Report] = []
        self._named: list[str] = []

    # ---- scheduler side ----------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Make the table: it pins blocks of this pool."""
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        model = ModelFacts(self._weights, str(spec.dtype))
        if self._segue_role is Role.PREFILL:
            self._table = PrefillTable(model, gpu_block_pool, spec.block_size, self._settings, self._secret)
        else:
            self._table = DecodeTable(
                model, gpu_block_pool, spec.block_size, self._settings, self._secret, policy=self._policy
            )

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The worker's address, for prefill's answers."""
        for found in metadata.values():
            if isinstance(found, SegueHandshake) and isinstance(self._table, PrefillTable):
                leader = LeaderId(Incarnation(found.incarnation), found.dp_rank)
                self._table.address = PeerAddress(leader, found.host, found.port)

    def on_new_request(self, request: Any) -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.new_request(request_of(request, self._adapters))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See KVConnectorBase_V1."""
        return self._scheduler.matched(request.request_id, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The only group: none of its blocks may be zeroed while prefill writes into them."""
        return (0,)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The orders for this step."""
        table = self._scheduler
        table.step(chunks_of(scheduler_output), scheduler_output.preempted_req_ids or ())
        for warning in table.take_warnings():
            log.warning("%s", warning)
        return SegueMetadata(encode(table.take_orders()))

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear the worker's reports, and leave in the output only ids that vLLM waits for, and those of other
        connectors."""
        found = connector_output.kv_connector_worker_meta
        reports = decode_reports(found.reports) if isinstance(found, SegueReports) else []
        passed = self._scheduler.results(
            reports,
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            named=found.named if isinstance(found, SegueReports) else (),
        )
        connector_output.finished_recving = passed.finished_recving
        connector_output.failed_recving = passed.failed_recving

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1."""
        return self._scheduler.finished(
            request.request_id, block_ids, request.num_computed_tokens, end_of(request)
        )

    def has_pending_push_work(self) -> bool:
        """Orders and reports travel in steps."""
        return self._scheduler.has_work()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Outcomes of hand-offs since the last step; the worker's object has nothing to add."""
        return None if self._table is None else self._recorder.stats(self._table.take_figures())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """See KVConnectorBase_V1."""
        return SegueStats(data=data) if data else SegueStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """See KVConnectorBase_V1."""
        return SeguePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduler(self) -> SchedulerTable:
        if self._table is None:
            raise Internal("vLLM did not bind its block pool: this version of vLLM is not known")
        return self._table

    # ---- worker side -------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """A context in which the KV cache is allocated where `shm` and an agent can map it."""
        wanted = self._settings.transport
        mapped = not self._on_gpu and (not wanted or "shm" in wanted or self._settings.agent)
        return self._shared if mapped else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start to listen: the memory is known."""
        if not kv_caches:
            raise ConfigError("the model has no KV cache to hand over")
        parallel = self._vllm_config.parallel_config
        group = get_tp_group()
        place = WorkerPlace(int(parallel.data_parallel_index), group.rank_in_group, group.world_size)
        if place.tensor_ranks > 1 and get_kv_transfer_group() is not self:
            raise ConfigError("MultiConnector with --tensor-parallel-size: it waits for reports of each rank")
        with before_ranks_meet(group.broadcast_object, place):
            facts = cache_facts(
                self._vllm_config, self._kv_cache_config, next(iter(kv_caches)), place.tensor_rank
            )
            pool = cache_pool(kv_caches, facts, self._shared.memory)
        if self._on_gpu and not place.tensor_rank:
            log.warning("%s", device_warning(str(next(iter(kv_caches.values())).device)))
        computed = _computed_on_gpu if self._on_gpu else None
        common = (self._segue_role, self._settings, self._secret, model_identity(self._weights, facts.dtype))
        if place.tensor_rank:
            self._worker = RankSide(*common, pool, place, group.broadcast_object, computed)
        else:
            me, others = lead(group.broadcast_object, place, self._settings.cpus)
            self._worker = WorkerSide(*common, pool, place, me, others, computed)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where decode reaches this engine; the worker of rank 0 says it."""
        if isinstance(self._hands, RankSide):
            return None
        address = self._hands.address
        leader = address.leader
        return SegueHandshake(leader.incarnation, leader.dp_rank, address.host, address.port)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Carry out this step's orders, before its forward: vLLM calls `start_load_kv` after it."""
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, SegueMetadata):
            raise Internal(f"metadata of another connector: {type(connector_metadata).__name__}")
        self._hands.begin_step(decode_orders(connector_metadata.orders))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began in `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM computes with KV of a peer only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: chunks are sent in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """The step's KV is complete: send its chunks. vLLM calls this in a `finally`: a step that raised has
        not computed them, and they are not sent."""
        self._hands.end_forward(sys.exception())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See KVConnectorBase_V1."""
        results = self._hands.take_results()
        self._reports, self._named = results.reports, sorted(results.finished_recving)
        return KVConnectorTransferResults(
            finished_recving=results.finished_recving, failed_recving=results.failed_recving
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The reports that belong to the last `get_transfer_results`."""
        reports, named = self._reports, self._named
        self._reports, self._named = [], []
        return SegueReports(encode(reports), named) if reports or named else None

    def get_finished_count(self) -> int | None:
        """One: rank 0 reports for all."""
        return 1

    def sizes(self) -> dict[str, int]:
        """The number of entries of every table of this side, for leak checks: all 0 at rest."""
        held = {} if self._table is None else self._table.sizes()
        return held if self._worker is None else {**held, **self._worker.sizes()}

    def shutdown(self) -> None:
        """End sessions and threads."""
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: the pool is registered once. vLLM asks from 0.33.0 on."""
        return False

    @property
    def _hands(self) -> WorkerSide | RankSide:
        if self._worker is None:
            raise Internal("vLLM did not register its KV cache: this version of vLLM is not known")
        return self._worker


def _read_secret(path: str) -> bytes:
    if not path:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret_file {path}: {error.strerror}") from None
    if not secret:
        raise ConfigError(f"secret_file {path} is empty")
    return secret


def _computed_on_gpu() -> Callable[[], object]:
    """Waits for the work that this thread has given to its stream until now."""
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize  # type: ignore[no-any-return]
