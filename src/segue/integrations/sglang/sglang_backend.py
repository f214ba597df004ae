"""The classes that SGLang makes for the transfer backend `segue`: manager, sender, receiver and bootstrap
server.

They translate calls; `sglang_handoffs` decides. The manager keeps SGLang's own way to a prefill: its
bootstrap server, over HTTP, to which each prefill rank tells its leader and the address of its sessions.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender, KVTransferMetric
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel

from segue.integrations.device_memory import device_warning
from segue.integrations.prompt_claim import CLAIM_VERSION, ClaimedPrompt
from segue.integrations.served_weights import AdapterFingerprints
from segue.integrations.sglang.sglang_bootstrap import (
    CLAIMS,
    LEADER,
    BootstrapHosts,
    answer_of,
    guard,
    leader_in,
)
from segue.integrations.sglang.sglang_device import CudaMemory
from segue.integrations.sglang.sglang_facts import served_model
from segue.integrations.sglang.sglang_handoffs import (
    Intake,
    PrefillRow,
    RankHandoffs,
    RankHooks,
    ReceiverHalf,
    SenderHalf,
)
from segue.integrations.sglang.sglang_pinned import PinnedPages
from segue.integrations.sglang.sglang_pool import ADVISED_PAGE_TOKENS, MetadataSlots, page_pool
from segue.integrations.sglang.sglang_settings import (
    SchedulerFacts,
    backend_settings,
    check_scheduler,
    may_contact,
)
from segue.kv import (
    BootstrapUnreachable,
    ConfigError,
    DpRankOutOfRange,
    DpRanks,
    KVConfig,
    LayoutMismatch,
    LeaderId,
    Region,
    Role,
    SegueError,
    Unauthorized,
    load_tls,
    model_identity,
)

log = logging.getLogger("segue.sglang")

_HTTP_S = 5.0
#: Calls to bootstrap servers that wait for the thread that makes them.
_MAX_CALLS = 1024


def scheduler_facts() -> SchedulerFacts:
    """SGLang's configuration in this process."""
    parallel, disagg = get_parallel(), get_disagg()
    return SchedulerFacts(
        device=get_device().device,
        pipeline_stages=parallel.pp_size,
        context_ranks=parallel.attn_cp_size,
        decode_context_ranks=parallel.attn_dcp_size,
        kv_sharding=parallel.enable_kv_cache_sharding,
        allocation_policy=disagg.disaggregation_decode_allocation_policy,
        host_receive=disagg.disaggregation_decode_host_receive_threshold < 1,
        staging_buffer=envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        deferred_release=envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
        rust_server=envs.SGLANG_RUST_SERVER.get(),
        device_metadata=bool(envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get()),
    )


class SegueKVManager(CommonKVManager):
    """The hand-offs of one scheduler rank. Raises ConfigError for a configuration that is not supported,
    which ends SGLang at its start."""

    supports_deferred_decode_kv_release = True

    def __init__(
        self,
        args: Any,
        disaggregation_mode: Any,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        settings = backend_settings(os.environ)
        facts = scheduler_facts()
        check_scheduler(facts, settings.device_memory)
        if facts.device == "cpu":
            # Otherwise SGLang's overlap scheduling records a CUDA event for a prompt whose prefix is cached.
            envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.set(False)
        #: the memory of the KV if it is a GPU's
        self.cuda = CudaMemory(args.gpu_id) if facts.device == "cuda" else None
        if self.cuda:
            log.warning("%s", device_warning(self.cuda.device))
        pool = page_pool(args, mla=bool(is_mla_backend), region=self.cuda.region if self.cuda else Region)
        slots = MetadataSlots(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
        self.secret = _secret(settings.secret_file)
        self.hosts = BootstrapHosts(settings.host_rules)
        guard(conn, self.hosts)
        parallel = get_parallel()
        rank = f"rank {parallel.attn_tp_rank} of {parallel.attn_tp_size}"
        layout = f"{CLAIM_VERSION}, {rank}, slots of {list(args.aux_item_lens)}"
        config = KVConfig(
            role=Role.PREFILL if disaggregation_mode == DisaggregationMode.PREFILL else Role.DECODE,
            model=model_identity(served_model(server_args), f"{args.kv_cache_dtype_str}, {layout}"),
            spec=pool.spec,
            transports=["tcp"],
            host=settings.host,
            advertise=settings.advertise_host or None,
            secret=self.secret or None,
            tls=load_tls(settings.tls_cert, settings.tls_key, settings.tls_ca) if settings.tls_cert else None,
            kv_checksum=settings.kv_checksum,
        )
        self._calls = ThreadPoolExecutor(1, "segue-bootstrap")
        self._waiting = threading.BoundedSemaphore(_MAX_CALLS)
        self._bootstrap_url = ""
        self._rows: dict[tuple[str, int], PrefillRow] = {}
        #: prefills that do not fit or do not answer, by their bootstrap address: why
        self.refused: dict[str, tuple[type[SegueError], str]] = {}
        #: the request whose sender is made now, and the prompt of that whose receiver is made now
        self.intake: Intake | None = None
        self.wanted: ClaimedPrompt | None = None
        self.adapters = AdapterFingerprints()
        #: around prefill's allocator
        self.pinned: PinnedPages | None = None
        self.handoffs = RankHandoffs(
            config,
            pool,
            slots,
            bootstrap_s=float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
            waiting_s=float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
            dp=DpRanks(
                size=parallel.num_dp_ranks,
                load_balance=parallel.load_balance_method,
                force_query=envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get(),
            ),
            dp_rank=parallel.attn_dp_rank if parallel.attn_dp_size > 1 else args.system_dp_rank or 0,
            hooks=RankHooks(self._register_room, self._ask_room, self._name_ranks, self.forget_prefill),
        )
        host, port = self.handoffs.start()
        self._row = {
            "rank_ip": settings.advertise_host or host,
            "rank_port": port,
            LEADER: config.me.incarnation,
            CLAIMS: CLAIM_VERSION,
        }
        if pool.page_tokens < ADVISED_PAGE_TOKENS:
            log.warning(
                "pages of %d tokens are slow to move once they are scattered: start both sides with "
                "--page-size %d",
                pool.page_tokens,
                ADVISED_PAGE_TOKENS,
            )
        log.info("KV hand-off: %s at %s:%d over tcp", config.role.value, host, port)
        try:
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        except BaseException:
            self.teardown()
            raise
        # Messages of other backends: nobody reads them here.
        self.server_socket.close(linger=0)

    def teardown(self) -> None:
        """End all hand-offs."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        self.handoffs.close()

    # ---- prefill ---------------------------------------------------------------------------------

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        self._bootstrap_url = url.removesuffix("/route")
        super()._register_topology_row(url, {**payload, **self._row})

    def pinned_pages(self, allocator: Any) -> PinnedPages:
        """The pages that are kept from prefill's `allocator`."""
        if self.pinned is None:
            self.pinned = PinnedPages(allocator, self.handoffs.unproven_pages)
        return self.pinned

    def _register_room(self, room: int) -> None:
        """Tell the bootstrap server that this DP rank has the room, while the request is computed."""
        body = {"bootstrap_room": room, "dp_rank": self.handoffs.dp_rank}
        self._call(self._post, f"{self._bootstrap_url}/register_dp_rank", body)

    @staticmethod
    def _post(url: str, body: dict[str, Any]) -> None:
        requests.post(url, json=body, timeout=_HTTP_S).raise_for_status()

    # ---- decode ----------------------------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """See `CommonKVManager`. A prefill that does not fit is refused instead of raising, which would end
        the server."""
        try:
            if bootstrap_addr not in self.prefill_info_table:
                self.hosts.resolve(bootstrap_addr)
        except SegueError as error:
            self._refuse(bootstrap_addr, type(error), str(error))
            return False
        try:
            found: bool = super().try_ensure_parallel_info(bootstrap_addr)
            if found:
                sizes = self.prefill_info_table[bootstrap_addr].attn_tp_size, self.attn_tp_size
                if sizes[0] != sizes[1]:
                    raise LayoutMismatch(f"prefill has --tp-size {sizes[0]}, decode {sizes[1]}: use the same")
                self.refused.pop(bootstrap_addr, None)
            else:
                text = f"no prefill answers at the bootstrap server {bootstrap_addr}"
                self._refuse(bootstrap_addr, BootstrapUnreachable, text)
        except (RuntimeError, AssertionError, TypeError, SegueError) as error:
            self.prefill_info_table.pop(bootstrap_addr, None)
            self._refuse(bootstrap_addr, LayoutMismatch, str(error))
            return False
        return found

    def _refuse(self, address: str, kind: type[SegueError], text: str) -> None:
        if self.refused.get(address) != (kind, text):
            log.error("prefill at %s cannot be used: %s", address, text)
        if len(self.refused) >= _MAX_CALLS:
            self.refused.clear()
        self.refused[address] = kind, text

    def prefill_row(self, address: str, dp_rank: int) -> PrefillRow:
        """The prefill rank that this rank receives from. Raises SegueError if there is none, or another
        backend's."""
        row = self._rows.get((address, dp_rank))
        if row is None:
            row = self._rows[address, dp_rank] = self._fetch_row(address, dp_rank)
        return row

    def _fetch_row(self, address: str, dp_rank: int) -> PrefillRow:
        info = self.prefill_info_table.get(address)
        if info is None:
            raise BootstrapUnreachable(f"the prefill at {address} is gone")
        if not 0 <= dp_rank < info.dp_size:
            raise DpRankOutOfRange(f"prefill has DP ranks 0 to {info.dp_size - 1}, not {dp_rank}")
        query = {
            "prefill_dp_rank": dp_rank,
            "prefill_cp_rank": 0,
            "target_tp_rank": self.attn_tp_rank,
            "target_pp_rank": 0,
        }
        try:
            response = self.hosts.session().get(f"http://{address}/route", params=query, timeout=_HTTP_S)
        except requests.RequestException as error:
            raise BootstrapUnreachable(f"the bootstrap server {address} gave no row: {error}") from None
        found = answer_of(response, address)
        leader = leader_in(found, address)
        host, port = str(found["rank_ip"]), int(found["rank_port"])
        if not may_contact(host, self.secret):
            raise Unauthorized(f"{host} is not loopback: give both sides SEGUE_SGLANG_SECRET_FILE")
        return PrefillRow(LeaderId(leader), host, port, dp_rank, info.dp_size)

    def forget_prefill(self, address: str) -> None:
        """Ask the bootstrap server again at the next request: the process there may be another one."""
        self.prefill_info_table.pop(address, None)
        for key in list(self._rows):
            if key[0] == address:
                self._rows.pop(key, None)

    def _ask_room(self, address: str, room: int, answer: Callable[[int], None]) -> None:
        def ask() -> None:
            found = CommonKVReceiver.query_prefill_dp_ranks(address, [room])
            if str(room) in found:
                answer(int(found[str(room)]))

        self._call(ask)

    def _name_ranks(self, address: str, answer: Callable[[PrefillRow], None]) -> None:
        def name() -> None:
            if self.try_ensure_parallel_info(address):
                for rank in range(self.prefill_info_table[address].dp_size):
                    answer(self.prefill_row(address, rank))

        if address not in self.refused:
            self._call(name)

    def _get_prefill_recompute_session(self) -> requests.Session:
        """See `CommonKVManager`."""
        return self.hosts.session()

    def _fail_prefill_recompute(self, kv_receiver: Any, reason: str) -> None:
        """SGLang could not ask prefill to recompute a retracted request. Called on a thread of SGLang."""
        kv_receiver.half.fail(BootstrapUnreachable(reason))

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing can be written into the pages of this failed request any more."""
        return self.handoffs.release_safe(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """The pages have been released; the receiver's `clear` follows."""

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a bootstrap server from a thread of its own."""
        if not self._waiting.acquire(blocking=False):
            log.warning("%d calls to bootstrap servers wait; one more is not made", _MAX_CALLS)
            return
        self._calls.submit(self._called, function, *args)

    def _called(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            log.warning("a call to a bootstrap server failed: %s", error)
        finally:
            self._waiting.release()


class SegueKVSender(BaseKVSender):
    """Prefill's half of one request."""

    def __init__(
        self,
        mgr: SegueKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        #: set by SGLang before it sends pages that are still computed
        self._early_send_wait_event: Any = None
        self.half = SenderHalf(mgr.handoffs, bootstrap_room, mgr.intake)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """See `SenderHalf.init`."""
        self.half.init(num_kv_indices, aux_index)

    def send(
        self,
        kv_indices: Sequence[int],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """See `SenderHalf.send`."""
        event, self._early_send_wait_event = self._early_send_wait_event, None
        self.half.send([int(page) for page in kv_indices], self.kv_mgr.cuda or event)

    def mark_prefill_complete(self) -> None:
        """Nothing: decode allocates early."""

    def pop_decode_prefix_len(self) -> int:
        """0: SGLang gives all pages of the prompt, and those that decode has are not sent."""
        return 0

    def get_max_transfer_tokens(self) -> int | None:
        """No limit."""
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Whether there is anything to send."""
        return num_pages > 0

    def get_transfer_metric(self) -> KVTransferMetric:
        """Seconds and bytes on the wire."""
        seconds, nbytes = self.half.metric()
        return KVTransferMetric(transfer_latency_s=seconds or None, transfer_total_bytes=nbytes)

    def poll(self) -> int:
        """See `SenderHalf.poll`."""
        return int(self.half.poll())

    def poll_pp_consensus(self) -> int:
        """One stage agrees with itself."""
        return self.poll()

    def failure_exception(self) -> None:
        """Raises KVTransferError with the reason."""
        _raise(self.bootstrap_room, self.half)

    def clear(self) -> None:
        """See `SenderHalf.clear`."""
        self.half.clear()

    def abort(self) -> None:
        """See `SenderHalf.abort`."""
        self.half.abort()


class SegueKVReceiver(BaseKVReceiver):
    """Decode's half of one request."""

    require_staging = False

    def __init__(self, mgr: SegueKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        #: SGLang counts them; the proof does not depend on their number
        self.bootstrap_infos: list[dict[str, Any]] = []
        self.half = ReceiverHalf(mgr.handoffs, bootstrap_addr, bootstrap_room, mgr.wanted)
        try:
            mgr.hosts.check(bootstrap_addr)
        except SegueError as error:
            self.half.fail(error)

    @property
    def conclude_state(self) -> int | None:
        """Failed or Success, once SGLang was told."""
        return self.half.conclude_state

    @property
    def abort_notified(self) -> bool:
        """Whether SGLang holds the pages after a failure."""
        return self.half.abort_notified

    def init(self, prefill_dp_rank: int) -> None:
        """The DP rank of prefill is known. The first request to a prefill rank asks the bootstrap server."""
        try:
            self.half.init(self.kv_mgr.prefill_row(self.bootstrap_addr, prefill_dp_rank))
        except SegueError as error:
            self.half.fail(error)
        except Exception as exc:
            log.exception("room %s", self.bootstrap_room)
            self.half.fail(BootstrapUnreachable(f"{type(exc).__name__}: {exc}"))

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
    ) -> None:
        """See `ReceiverHalf.send_metadata`."""
        self.half.send_metadata([int(page) for page in kv_indices], aux_index, decode_prefix_len)

    def poll(self) -> int:
        """See `ReceiverHalf.poll`."""
        return int(self.half.poll())

    def failure_exception(self) -> None:
        """Raises KVTransferError with the reason."""
        _raise(self.bootstrap_room or 0, self.half)

    def clear(self) -> None:
        """See `ReceiverHalf.clear`."""
        self.half.clear()

    def abort(self) -> None:
        """SGLang ends the request, also because its prefill was refused or cannot be found."""
        refused = self.kv_mgr.refused.get(self.bootstrap_addr)
        if self.half.leader is None and refused is not None:
            kind, text = refused
            self.half.fail(kind(text))
        self.half.abort()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """See `ReceiverHalf.ensure_abort_notified`."""
        self.half.ensure_abort_notified()


class SegueKVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's bootstrap server; the row of a rank also has its segue leader."""

    def __init__(self, host: str, port: int) -> None:
        #: our part of each row, by the DP, CP, TP and PP rank
        self._leaders: dict[tuple[int, int, int, int], dict[str, Any]] = {}
        super().__init__(host, port)

    async def _handle_route_put(self, request: Any) -> Any:
        response = await super()._handle_route_put(request)
        row = await request.json()
        if response.status == 200 and isinstance(row.get(LEADER), str):
            dp_rank = row["attn_dp_rank"] if row["system_dp_size"] == 1 else row["system_dp_rank"]
            at = (dp_rank, row["attn_cp_rank"], row["attn_tp_rank"], row["pp_rank"])
            self._leaders[at] = {LEADER: row[LEADER], CLAIMS: row.get(CLAIMS)}
        return response

    async def _handle_route_get(self, request: Any) -> Any:
        response = await super()._handle_route_get(request)
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        if response.status != 200 or not isinstance(response.body, bytes):
            return response
        dp_rank, cp_rank, tp_rank, pp_rank = (int(request.query[name]) for name in names)
        leader = self._leaders.get((dp_rank, cp_rank, tp_rank, pp_rank))
        if leader is None:  # all ranks, or one of another backend
            return response
        response.body = json.dumps({**json.loads(response.body), **leader}).encode()
        return response


def _raise(room: int, half: SenderHalf | ReceiverHalf) -> None:
    failure = half.failure()
    raise KVTransferError(room, failure.text, failure.from_another_rank)


def _secret(path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"SEGUE_SGLANG_SECRET_FILE: {path}: {error.strerror}") from None
