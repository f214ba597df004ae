"""A device's memory as tensors of torch, which is imported when a device is met."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from segue.kv.errors import ConfigError, Internal
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, Region


def torch_module() -> ModuleType:
    """Torch. Raises ConfigError where it cannot be imported."""
    try:
        import torch
    except ImportError as exc:
        raise ConfigError(f"memory of a device needs PyTorch: {exc}") from exc
    return torch


def why_no_tensors(memory: Memory) -> str:
    """Why memory of a device in `memory` cannot be had as tensors in this process, or ""."""
    devices = [region for region in memory.regions if region.kind is MemoryKind.DEVICE]
    if not devices:
        return ""
    try:
        torch_module()
    except ConfigError as error:
        return error.info.text
    if any(_tensor_of(region) is None for region in devices):
        return f"memory of {devices[0].device} has no tensor of torch as its owner"
    return ""


def flat_tensor(region: Region) -> Any:
    """The bytes of a device's region, one after the other. Raises Internal where its tensor does not hold
    them."""
    torch, tensor = torch_module(), _tensor_of(region)
    if tensor is None:
        raise Internal(f"{region} has no tensor of torch as its owner")
    storage = tensor.untyped_storage()
    start = region.address - storage.data_ptr()
    if start < 0 or start + region.nbytes > storage.nbytes():
        raise Internal(f"{region} does not lie in the storage of its tensor")
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, start, (region.nbytes,), (1,))


def _tensor_of(region: Region) -> Any:
    """A tensor in whose storage the region lies."""
    owners: Sequence[object] = [region.owner]
    tensor_type = torch_module().Tensor
    while owners:
        owner, *owners = owners
        if isinstance(owner, tuple):  # regions that were joined
            owners = [*owner, *owners]
        elif isinstance(owner, tensor_type):
            return owner
    return None
