"""The way into SGLang: the entry point `sglang.srt.plugins`, which SGLang calls in each of its processes.

It adds `segue` to the transfer backends. A version of SGLang that was not tried gets one line in the log and
no backend; `--disaggregation-transfer-backend segue` is then refused by SGLang itself.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
from enum import Enum
from functools import cache
from typing import Any

from segue.integrations.engine_log import log_into
from segue.integrations.sglang.sglang_facts import prompt_of
from segue.integrations.sglang.sglang_handoffs import Intake
from segue.integrations.sglang.sglang_settings import version_refusal

log = logging.getLogger("segue.sglang")

BACKEND = "segue"
_UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Add the backend to SGLang's choices."""
    refusal = version_refusal(importlib.metadata.version("sglang"))
    if refusal is not None:
        log.warning(refusal)
        return
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    members = {member.name: member.value for member in TransferBackend}
    extended = Enum("TransferBackend", {**members, "SEGUE": BACKEND}, module=_UTILS)  # type: ignore[misc]
    add_disagg_transfer_backend_choices([BACKEND])
    HookRegistry.register(f"{_UTILS}.TransferBackend", extended, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", kv_class, HookType.AROUND)


def kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Around `get_kv_class`: our classes for our backend."""
    kind = class_type.value
    if transfer_backend.value != BACKEND or kind == "kvargs":
        return original(transfer_backend, class_type)
    from segue.integrations.sglang import sglang_backend

    if kind == "manager":
        log_into(logging.getLogger())
        _hook_queues()
    return {
        "manager": sglang_backend.SegueKVManager,
        "sender": sglang_backend.SegueKVSender,
        "receiver": sglang_backend.SegueKVReceiver,
        "bootstrap_server": sglang_backend.SegueKVBootstrapServer,
    }[kind]


@cache
def _hook_queues() -> None:
    """Once in a scheduler that uses the backend; not with another one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    queues = "sglang.srt.disaggregation"
    HookRegistry.register(
        f"{queues}.prefill.PrefillBootstrapQueue.create_sender", create_sender, HookType.AROUND
    )
    HookRegistry.register(
        f"{queues}.prefill.PrefillBootstrapQueue.pop_bootstrapped", give_back, HookType.BEFORE
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.is_fully_idle", is_fully_idle, HookType.AROUND
    )
    HookRegistry.register(
        f"{queues}.decode.DecodeTransferQueue._defer_release", keep_until_proof, HookType.AFTER
    )
    receivers = f"{queues}.decode.DecodePreallocQueue"
    HookRegistry.register(f"{receivers}._create_receiver_and_enqueue", create_receiver, HookType.AROUND)
    HookRegistry.register(f"{receivers}._init_receiver", keep_rank, HookType.BEFORE)
    HookRegistry.apply_hooks()


def create_sender(original: Any, queue: Any, req: Any, num_kv_heads: int) -> Any:
    """Around `create_sender`: the sender learns the prompt, which SGLang does not give it."""
    manager = queue.kv_manager
    prompt = prompt_of(queue, req, req.origin_input_ids, manager.adapters)
    manager.intake = Intake(prompt, req.disagg_prefill_dp_rank)
    try:
        return original(queue, req, num_kv_heads)
    finally:
        manager.intake = None


def create_receiver(original: Any, queue: Any, req: Any, is_rebootstrap: bool = False) -> Any:
    """Around `_create_receiver_and_enqueue`: the receiver learns the tokens whose KV it waits for."""
    manager, tokens = queue.kv_manager, req.origin_input_ids
    wanted = [*tokens, *req.output_ids] if is_rebootstrap else tokens
    manager.wanted = prompt_of(queue, req, wanted, manager.adapters)
    try:
        return original(queue, req, is_rebootstrap=is_rebootstrap)
    finally:
        manager.wanted = None


def keep_rank(queue: Any, decode_req: Any, prefill_dp_rank: int) -> None:
    """Before `_init_receiver`: a request that is computed again goes to the DP rank of prefill that it had.
    SGLang would let it go to any, and look for it on this one."""
    prefill = queue.kv_manager.prefill_info_table.get(decode_req.kv_receiver.bootstrap_addr)
    if prefill is not None and prefill.dp_size > 1:
        decode_req.req.disagg_prefill_dp_rank = prefill_dp_rank


def give_back(queue: Any) -> None:
    """Before `pop_bootstrapped`, in each turn of prefill's scheduler: the allocator keeps unproven pages from
    the first turn on, and gets back those with a proof."""
    queue.kv_manager.pinned_pages(queue.scheduler.token_to_kv_pool_allocator).give_back()


def is_fully_idle(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Around `is_fully_idle`: not while pages are kept from the allocator. SGLang would take them for lost,
    and a flush of its cache would give them away."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    pinned = queue.kv_manager.pinned if queue is not None else None
    return bool(original(scheduler, *args, **kwargs)) and not (pinned and pinned.pages)


def keep_until_proof(result: Any, queue: Any, decode_req: Any) -> None:
    """After `_defer_release`: pages of a failed request are not given away after 30 s, but after the proof
    that nobody writes into them."""
    request, start, _, slot, acks = queue._deferred_releases[-1]
    queue._deferred_releases[-1] = (request, start, math.inf, slot, acks)
