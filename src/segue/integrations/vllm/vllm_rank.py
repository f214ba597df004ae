"""Tensor parallelism: the workers of one vLLM engine as ranks of one leader.

The worker of rank 0 leads: it alone carries out orders and reports (`vllm_worker`). The others hand their own
KV heads over when it asks them to, and say when the forward of a step has ended on them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import msgspec

from segue.integrations.vllm.vllm_memory import CachePool
from segue.integrations.vllm.vllm_orders import Order, Report, SendOrder
from segue.integrations.vllm.vllm_settings import ConnectorSettings
from segue.kv import (
    HOST,
    KINDS,
    USABLE,
    BootstrapTimeout,
    ConfigError,
    ErrorInfo,
    Incarnation,
    Internal,
    KVConfig,
    LeaderId,
    MemoryKind,
    Rank,
    RankLink,
    RankListener,
    RankWorker,
    Role,
    SegueError,
    TransferFailed,
    WorkerRank,
    connect_rank,
    load_tls,
    local_rank,
    new_incarnation,
    threads_on,
)
from segue.kv.printable import printable

log = logging.getLogger("segue.vllm")

#: vLLM's workers reach this point within moments of each other: all have allocated their KV cache.
_MEET_S = 60.0

#: Gives the value of rank 0 to all ranks, as vLLM's `broadcast_object` does; others call it with None. The
#: value: the leader's incarnation and its invitation; or no incarnation, and the record of an error.
Share = Callable[[tuple[str, bytes] | None], tuple[str, bytes]]

#: Called when the forward of a step has been launched on a device: gives a function that blocks until the
#: device has computed it.
Computed = Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The numbers of one worker: among the data-parallel ranks of an instance on this host, each of which is
    a leader of its own, and among the tensor-parallel ranks of its engine."""

    data_rank: int = 0
    tensor_rank: int = 0
    tensor_ranks: int = 1


@dataclass(slots=True)
class StepResults:
    """Results of one step for vLLM: request ids, and reports for the scheduler side."""

    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    reports: list[Report] = field(default_factory=list)


def worker_config(
    role: Role,
    settings: ConnectorSettings,
    secret: bytes,
    model: str,
    pool: CachePool,
    place: WorkerPlace,
    me: LeaderId,
) -> KVConfig:
    """The configuration of the leader `me`, as the worker at `place` has it. Each worker listens at its
    number above the ports that the settings name. Raises ConfigError for settings or a `pool` that do not
    work here."""
    on_device = on_a_device(pool)
    names = KINDS.names(",".join(settings.transport) or ("tcp" if on_device else "auto"))
    offered = KINDS.offered(",".join(KINDS.for_memory(names, pool.memory)), pool.memory)
    usable = [name for name, reason in offered.items() if reason == USABLE]
    if not usable:
        raise ConfigError(f"no transport can be used: {offered}")
    tls = None
    if settings.tls_cert:
        tls = load_tls(settings.tls_cert, settings.tls_key, settings.tls_ca)
    number = place.data_rank * place.tensor_ranks + place.tensor_rank
    ports = 2 if on_device else 1  # `staged_tcp` listens at two
    return KVConfig(
        role=role,
        me=me,
        model=model,
        spec=pool.spec,
        transports=usable,
        host=settings.host,
        port=settings.port and settings.port + place.data_rank,
        advertise=settings.advertise_host or None,
        transport_port=settings.transport_port and settings.transport_port + number * ports,
        secret=secret or None,
        tls=tls,
        kv_checksum=settings.kv_checksum,
    )


@contextmanager
def before_ranks_meet(share: Share, place: WorkerPlace) -> Iterator[None]:
    """The work of each rank before `lead` and `RankSide`: if it fails on rank 0, the others raise the same
    error instead of waiting."""
    try:
        yield
    except Exception as error:
        if place.tensor_ranks > 1 and not place.tensor_rank:
            known = error if isinstance(error, SegueError) else Internal(f"rank 0 has failed: {error!r}")
            _share(share, ("", msgspec.json.encode(known.info)))
        raise


def _share(share: Share, value: tuple[str, bytes] | None) -> tuple[str, bytes]:
    """Call `share`, to which vLLM gives no deadline, on a thread that may wait for ever."""
    done: Future[tuple[str, bytes]] = Future()

    def call() -> None:
        try:
            done.set_result(share(value))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, name="segue-meet", daemon=True).start()
    try:
        return done.result(_MEET_S)
    except TimeoutError:
        raise BootstrapTimeout(f"the ranks of this engine did not meet within {_MEET_S:g} s") from None


def lead(share: Share, place: WorkerPlace, cpus: Sequence[int] = ()) -> tuple[LeaderId, list[Rank]]:
    """Meet the other ranks of this engine, on rank 0; `cpus` as in `cpus_of_parent`. Raises BootstrapTimeout,
    which names those that did not come."""
    me = LeaderId(new_incarnation())
    if place.tensor_ranks == 1:
        return me, []
    with before_ranks_meet(share, place):
        listener = RankListener()
    try:
        _share(share, (me.incarnation, listener.invitation))
        socks = listener.accept(range(1, place.tensor_ranks), _MEET_S)
    finally:
        listener.close()
    with cpus_of_parent(cpus):
        return me, [WorkerRank(i, RankLink(sock, f"rank {i}")) for i, sock in sorted(socks.items())]


class RankSide:
    """The worker of a rank above 0: it has KV heads, and decides nothing. `computed` as in `WorkerSide`.
    Raises what `worker_config` does, the error of rank 0 if that has failed, and BootstrapTimeout if it is
    not there."""

    def __init__(
        self,
        role: Role,
        settings: ConnectorSettings,
        secret: bytes,
        model: str,
        pool: CachePool,
        place: WorkerPlace,
        share: Share,
        computed: Computed | None = None,
    ) -> None:
        incarnation, invitation = _share(share, None)
        if not incarnation:
            raise msgspec.json.decode(invitation, type=ErrorInfo).exception()
        me = LeaderId(Incarnation(incarnation))
        config = worker_config(role, settings, secret, model, pool, place, me)
        self._lost: SegueError | None = None
        self._computed = computed
        self._on_device = on_a_device(pool)
        #: the leader numbers the steps that send chunks in this order, too
        self._steps = 0
        self._sends = self._in_step = False
        with cpus_of_parent(settings.cpus):
            rank = local_rank(config, pool.memory, HOST, place.tensor_rank)
            sock = connect_rank(invitation, place.tensor_rank, _MEET_S)
            self._link = RankLink(sock, "rank 0", limits=config.limits)
            self._worker = RankWorker(rank, self._link, self._on_lost)
            self._worker.start()

    def begin_step(self, orders: Iterable[Order]) -> None:
        """See `WorkerSide.begin_step`."""
        if self._in_step:
            self.end_forward(Internal("before wait_for_save"))
        if self._lost is not None:
            raise self._lost
        if not self._link.io.running:
            raise Internal("the thread of the KV hand-off has ended; start this vLLM again")
        self._in_step = True
        self._sends = sends_chunks(orders, self._on_device)
        self._steps += self._sends

    def end_forward(self, raised: BaseException | None = None) -> None:
        """See `WorkerSide.end_forward`."""
        sends, self._sends, self._in_step = self._sends, False, False
        if raised is not None:
            self._lost = step_raised(raised)
            self._worker.fail(self._lost)
        elif sends:
            self._worker.signal(self._steps, self._computed and self._computed())

    def take_results(self) -> StepResults:
        """Nothing: rank 0 reports for all."""
        return StepResults()

    def sizes(self) -> dict[str, int]:
        """See `WorkerSide.sizes`."""
        return {}

    def close(self) -> None:
        """End the link and its thread."""
        self._worker.close()

    def _on_lost(self, error: SegueError) -> None:
        self._lost = error


def step_raised(error: BaseException) -> TransferFailed:
    """Why nothing is sent any more."""
    return TransferFailed(f"a step of prefill or decode raised {printable(repr(error))}")


def on_a_device(pool: CachePool) -> bool:
    """Whether the KV lies in the memory of a device."""
    return any(region.kind is MemoryKind.DEVICE for region in pool.memory.regions)


def sends_chunks(orders: Iterable[Order], on_device: bool) -> bool:
    """Whether KV leaves when the forward of this step has ended: each rank says so, by the step's number. A
    device may still compute the KV of steps before this one."""
    return any(isinstance(order, SendOrder) and (on_device or not order.ready) for order in orders)


def cpus_of_parent(cpus: Sequence[int]) -> AbstractContextManager[None]:
    """Threads that are started within it run on `cpus`, or on all CPUs of the parent process: vLLM binds a
    worker's threads to cores that its forward needs."""
    return threads_on(cpus or os.sched_getaffinity(os.getppid()))
