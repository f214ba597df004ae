"""SGLang's queues, pools and bootstrap server in this process, with ranks of prefill and decode. The model,
the batches and the event loop alone are doubles.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.decode import (
    DecodePreallocQueue,
    DecodeReqToTokenPool,
    DecodeTransferQueue,
    SchedulerDisaggregationDecodeMixin,
)
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue, SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import MetadataBuffers, ReqToMetadataIdxAllocator, TransferBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_parallel, get_server_args, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

PAGE, TOKENS, LAYERS, HEADS, WIDTH, SLOTS = 16, 1024, 2, 2, 8, 64
BOOTSTRAP = 33998
WITHIN_S = 20.0
_NUMBERS = itertools.count()


def publish_configuration(model: str, **options: Any) -> None:
    """The configuration of this process, and its groups of one rank."""
    load_plugins()
    arguments = ServerArgs(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        page_size=PAGE,
        host="127.0.0.1",
        port=BOOTSTRAP - 1,
        disaggregation_mode="prefill",
        disaggregation_transfer_backend="segue",
        disaggregation_bootstrap_port=BOOTSTRAP,
        disaggregation_decode_retraction_backup="cpu_tensor",
        **options,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0))
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = SimpleNamespace(
        cpu_group=dist.group.WORLD, rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True
    )
    get_parallel().override_permanently(
        **{f"{name}_group": group for name in ("tp", "pp", "attn_tp", "attn_cp")}
    )


class _Rank:
    """Attributes of SGLang's scheduler that its queues read."""

    def __init__(self, rows: type, mla: bool) -> None:
        self.pool: Any
        if mla:
            self.pool = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, WIDTH, WIDTH, LAYERS, "cpu", False)
            self.buffers = self.pool.kv_buffer
        else:
            self.pool = MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, HEADS, WIDTH, LAYERS, "cpu", False)
            self.buffers = [*self.pool.k_buffer, *self.pool.v_buffer]
        self.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.bfloat16, "cpu", self.pool, False
        )
        kind = {"pre_alloc_size": SLOTS} if rows is DecodeReqToTokenPool else {}
        self.req_to_token_pool = rows(SLOTS, TOKENS, "cpu", False, **kind)
        self.tree_cache = RadixCache(
            CacheInitParams(True, self.req_to_token_pool, self.token_to_kv_pool_allocator, PAGE)
        )
        self.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(SLOTS)
        self.disagg_metadata_buffers = MetadataBuffers(
            SLOTS, hidden_size=16, hidden_states_dtype=torch.float32, max_sampling_mask_tokens=16
        )
        self.model_config = SimpleNamespace(
            hf_text_config=SimpleNamespace(), num_hidden_layers=LAYERS, get_total_num_kv_heads=lambda: HEADS
        )
        runner = SimpleNamespace(effective_logical_max_total_num_tokens=TOKENS, kv_cache_dtype_str="bfloat16")
        self.tp_worker = SimpleNamespace(model_runner=runner, is_hybrid_swa=False)
        self.server_args = get_server_args()
        self.attn_tp_cpu_group = self.attn_cp_cpu_group = dist.group.WORLD
        self.metrics_reporter = SimpleNamespace(enable_metrics=False)
        self.output_streamer = self
        self.ended: dict[int, str] = {}
        self.kv_shard_widening = 1
        self.rust_server = None
        self.enable_staging = self.enable_hisparse = self.enable_decode_hicache = self.enable_lora = False
        self.enable_overlap = self.enable_priority_scheduling = False
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.running_batch = SimpleNamespace(reqs=[])
        self.last_batch = None
        self.waiting_queue: list[Req] = []
        self.processed_tokens_counter = 0
        self.random_seed = 1
        self.scheduler_stage_metrics = None

    def stream_output(self, reqs: list[Req], *args: Any) -> None:
        """SGLang's answer to clients: the message of a failure, or nothing."""
        for req in reqs:
            self.ended[req.bootstrap_room] = getattr(req.finished_reason, "message", "")

    def _release_aborted_request(self, req: Req) -> None:
        pass

    def at_rest(self) -> bool:
        """Whether all pages, rows and slots are free."""
        return (
            self.token_to_kv_pool_allocator.available_size() == TOKENS
            and self.req_to_metadata_buffer_idx_allocator.available_size() == SLOTS
        )

    def kv(self, req: Req, tokens: int) -> list[torch.Tensor]:
        """The KV of a request in all buffers."""
        at = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
        return [buffer[at].clone() for buffer in self.buffers]


def request(room: int, tokens: int, first: int = 5, **options: Any) -> Req:
    """A request as SGLang's scheduler has it; `first` is the prompt's first token."""
    made = Req(
        rid=f"r{next(_NUMBERS)}",
        origin_input_text="",
        origin_input_ids=array("q", range(first, first + tokens)),
        sampling_params=SamplingParams(max_new_tokens=4),
        bootstrap_room=room,
        **{"bootstrap_host": "127.0.0.1", "bootstrap_port": BOOTSTRAP, **options},
    )
    made.sampling_params.normalize(None)
    return made


class Prefill(_Rank, SchedulerDisaggregationPrefillMixin):
    """Prefill's rank: `turn` is one turn of its loop. A prompt is computed in one step."""

    def __init__(self, dp_rank: int, mla: bool = False) -> None:
        with get_parallel().override(dp_rank=dp_rank):
            self._start(mla)

    def _start(self, mla: bool) -> None:
        super().__init__(ReqToTokenPool, mla)
        self.disagg_prefill_inflight_queue: list[Req] = []
        self.disagg_prefill_pending_chunk_rids: set[str] = set()
        #: the KV of each request of a room, and of the newest one with these tokens
        self.computed_of: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.computed: dict[int, list[list[torch.Tensor]]] = {}
        self.disagg_prefill_bootstrap_queue = PrefillBootstrapQueue(
            self.pool,
            None,
            self.req_to_metadata_buffer_idx_allocator,
            self.disagg_metadata_buffers,
            0,
            BOOTSTRAP,
            TOKENS,
            self,
            self.scheduler_stage_metrics,
            TransferBackend("segue"),
        )
        self.manager = self.disagg_prefill_bootstrap_queue.kv_manager

    def add(self, req: Req) -> Req:
        self.disagg_prefill_bootstrap_queue.add(req, HEADS)
        return req

    def turn(self) -> None:
        for req in self.disagg_prefill_bootstrap_queue.pop_bootstrapped():
            self._compute(req)
        self.process_disagg_prefill_inflight_queue()

    def close(self) -> None:
        self.manager.teardown()

    def _compute(self, req: Req) -> None:
        tokens = len(req.origin_input_ids)
        self.req_to_token_pool.alloc([req])
        slots = self.token_to_kv_pool_allocator.alloc(-(-tokens // PAGE) * PAGE)
        self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(slots)] = slots.int()
        req.kv.kv_committed_len = req.kv.kv_allocated_len = tokens
        req.extend_end = tokens
        for buffer in self.buffers:
            buffer[slots] = torch.randn_like(buffer[slots])
        self.computed_of[tuple(req.origin_input_ids)] = self.kv(req, tokens)
        self.computed.setdefault(req.bootstrap_room, []).append(self.kv(req, tokens))
        req.output_ids.append(4711)
        self.disagg_prefill_inflight_queue.append(req)
        self.send_kv_chunk(req, last_chunk=True)


class Decode(_Rank, SchedulerDisaggregationDecodeMixin):
    """Decode's rank; requests whose KV has come are in `waiting_queue`."""

    def __init__(self, mla: bool = False) -> None:
        super().__init__(DecodeReqToTokenPool, mla)
        self.disagg_decode_transfer_queue = DecodeTransferQueue(
            self.req_to_metadata_buffer_idx_allocator, self.disagg_metadata_buffers, self, self.tree_cache
        )
        self.disagg_decode_prealloc_queue = None
        self.disagg_decode_prealloc_queue = DecodePreallocQueue(
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            None,
            self.req_to_metadata_buffer_idx_allocator,
            self.disagg_metadata_buffers,
            self,
            self.disagg_decode_transfer_queue,
            self.tree_cache,
            0,
            BOOTSTRAP,
            TOKENS,
            16,
            TransferBackend("segue"),
        )
        self.batch_result_processor = SimpleNamespace(_maybe_update_reasoning_tokens=lambda *args: None)
        self.manager = self.disagg_decode_prealloc_queue.kv_manager

    def add(self, req: Req) -> Req:
        self.disagg_decode_prealloc_queue.add(req)
        return req

    def turn(self) -> None:
        self.process_decode_queue()

    def close(self) -> None:
        self.manager.teardown()


def turns(until: Callable[[], bool], *ranks: Prefill | Decode) -> None:
    """Turn the loops until something is reached."""
    end = time.monotonic() + WITHIN_S
    while not until():
        for rank in ranks:
            rank.turn()
        time.sleep(0)  # the I/O threads get the interpreter, as they do when SGLang's loop asks its sockets
        assert time.monotonic() < end, "not reached"
