"""vLLM's KV cache in a memfd, so that `shm` can map it: vLLM allocates it in a context that the connector
gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from segue.kv import Memory, allocate


class SharedPoolMode(TorchFunctionMode):
    """Within it, one `torch.zeros(nbytes, dtype=int8)` on the CPU, which is how vLLM allocates the KV of all
    layers, lies in a memfd. `memory` is that memory afterwards; None where vLLM did not ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Memory | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See TorchFunctionMode."""
        kwargs = kwargs or {}
        wanted = func is torch.zeros and len(args) == 1 and isinstance(args[0], int)
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if not (wanted and on_cpu and kwargs.get("dtype") is torch.int8) or self.memory is not None:
            return func(*args, **kwargs)
        self.memory = allocate(args[0], "segue-vllm-kv")
        return torch.frombuffer(self.memory.buffer, dtype=torch.int8)[: args[0]]
