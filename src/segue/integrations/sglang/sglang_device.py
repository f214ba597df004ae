"""SGLang's KV in the memory of a GPU, of which it tells a backend the addresses alone. Never run on a GPU."""

from __future__ import annotations

import torch

from segue.kv import Region


class CudaMemory:
    """The memory of one GPU."""

    def __init__(self, gpu: int) -> None:
        self.device = f"cuda:{gpu}"

    def region(self, address: int, nbytes: int) -> Region:
        """A region whose owner is a tensor over these bytes: `segue.kv` copies and checks a device's memory
        by tensors. It does not keep them alive; SGLang's pool does, which outlives the backend."""
        return Region(
            address,
            nbytes,
            self.device,
            owner=torch.as_tensor(_GpuBytes(address, nbytes), device=self.device),
        )

    def synchronize(self) -> None:
        """Wait until the device has computed everything that SGLang has begun on any stream."""
        torch.cuda.synchronize(self.device)


class _GpuBytes:
    """Bytes that torch makes a tensor of without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }
