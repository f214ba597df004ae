"""A device without hardware, as far as staging uses it: memory that torch holds, and copies that run when
somebody waits for them, or not at all.

`LateDevice.patch` puts it in the place of torch in `staged_copies`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from segue.kv.transport.memory.pool_memory import Memory, Region
from segue.kv.transport.staged import staged_copies


@dataclass(frozen=True)
class DeviceName:
    """As `torch.device`."""

    type: str
    index: int


class LateArray:
    """Bytes of a host or of a device, as far as `torch.Tensor` is used for them. A copy is queued."""

    def __init__(self, late: LateDevice, data: np.ndarray, device: DeviceName | None) -> None:
        self._late, self._data, self.device = late, data, device

    def storage_offset(self) -> int:
        """It is a storage of its own."""
        return 0

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> LateArray:
        """A view."""
        view = np.lib.stride_tricks.as_strided(self._data[offset:], shape, strides)
        return LateArray(self._late, view, self.device)

    def copy_(self, source: LateArray, *, non_blocking: bool) -> None:
        """Queue it."""
        assert non_blocking
        self._late.begin(lambda: np.copyto(self._data, source._data))


@dataclass
class LateDevice:
    """`fails_at`: the copies, by number from 1, that raise, after they were queued if `begun`. `dead`: each
    wait raises."""

    fails_at: set[int] = field(default_factory=set)
    begun: bool = False
    dead: bool = False
    copies: int = 0
    queue: list[Callable[[], None]] = field(default_factory=list)
    uint8: Any = np.uint8

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        stream = SimpleNamespace(synchronize=self._synchronize)
        self.late = SimpleNamespace(current_stream=lambda device: stream)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
        """Have staging copy with this device."""
        monkeypatch.setattr(staged_copies, "torch_module", lambda: self)
        monkeypatch.setattr(staged_copies, "flat_tensor", self._flat)
        return self

    def memory(self, nbytes: int) -> tuple[Memory, np.ndarray]:
        """Memory of this device, and what lies there now."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        return Memory([Region(tensor.data_ptr(), nbytes, "late:0", owner=tensor)]), tensor.numpy()

    def frombuffer(self, buffer: Any, *, dtype: Any) -> LateArray:
        """As `torch.frombuffer`."""
        return LateArray(self, np.frombuffer(buffer, dtype), None)

    def begin(self, copy: Callable[[], None]) -> None:
        """Queue a copy. Raises RuntimeError for one of `fails_at`."""
        with self._lock:
            self.copies += 1
            fails = self.copies in self.fails_at
            if not fails or self.begun:
                self.queue.append(copy)
        if fails:
            raise RuntimeError("out of memory")

    def go_on(self) -> None:
        """Run what is queued."""
        with self._lock:
            while self.queue:
                self.queue.pop(0)()

    def _synchronize(self) -> None:
        if self.dead:
            raise RuntimeError("an illegal memory access was encountered")
        self.go_on()

    def _flat(self, region: Region) -> LateArray:
        assert isinstance(region.owner, torch.Tensor)
        return LateArray(self, region.owner.numpy(), DeviceName("late", 0))
