"""The sequences of one step and where each one's state lies; what layers do with it.

A slot holds the state after the tokens before the step, or zeros before the first one; each layer replaces
its part of it by the state after the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from segue.engine.kvpool import KVPool
from segue.engine.packing import Packed


class StepState:
    """The sequences of one row each, which are computed together, and the others.

    `rows` and `slots` (int64) are those of the sequences of one row, or None without such; `long` has the
    first row, the number of rows and the slot of each of the others.
    """

    def __init__(self, packed: Packed, pool: KVPool) -> None:
        single: list[tuple[int, int]] = []
        self.long: list[tuple[int, int, int]] = []
        fresh: list[int] = []
        for segment in packed.segments if pool.states else ():
            slot = segment.step.slot
            assert slot is not None  # `packing.check`
            if segment.start == 0:
                fresh.append(slot)
            if segment.rows == 1:
                single.append((segment.row, slot))
            else:
                self.long.append((segment.row, segment.rows, slot))
        self.rows: Tensor | None = None
        self.slots: Tensor | None = None
        if single:
            self.rows, self.slots = torch.tensor(single, dtype=torch.int64).unbind(1)
        self._tensors = pool.states
        pool.clear(fresh)

    def tensor(self, which: int, layer: int) -> Tensor:
        """Tensor `which` of the state in one layer, of all slots: `[slots, …]`, to be read and written."""
        return self._tensors[which][:, layer]

    def convolve(self, past: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The causal convolution of each channel, `[rows, channels]` in float32.

        `inputs` are `[rows, channels]`, `weight` `[width, channels]` in float32; `past` (`[slots, width - 1,
        channels]`) has the inputs before, and is moved on."""
        out = torch.empty(inputs.shape, dtype=torch.float32)
        if self.rows is not None and self.slots is not None:
            seen = torch.cat((past[self.slots], inputs[self.rows].unsqueeze(1)), 1)
            out[self.rows] = (seen.float() * weight).sum(1)
            past[self.slots] = seen[:, 1:]
        for row, rows, slot in self.long:
            seen = torch.cat((past[slot], inputs[row : row + rows]))
            sums = out[row : row + rows]
            torch.mul(seen[:rows], weight[0], out=sums)
            for at in range(1, len(weight)):
                sums.addcmul_(seen[at : at + rows].float(), weight[at])
            past[slot] = seen[rows:]
        return out if bias is None else out.add_(bias)

    def recur(
        self, past: Tensor, rule: Callable[..., tuple[Tensor, Tensor]], value: Tensor, *others: Tensor
    ) -> Tensor:
        """Apply `rule` to all rows in float32; the result is shaped as `value`, and `past` (`[slots, …]`)
        advances. `rule(past, value, *others)` gets sequences with equal numbers of rows: `[sequences, …]` of
        `past`, `[sequences, rows, …]` of the rest. It returns its output for the rows and the new `past`."""
        out = torch.empty(value.shape, dtype=torch.float32)
        inputs = (value, *others)
        if self.rows is not None and self.slots is not None:
            made, past[self.slots] = rule(
                past[self.slots], *(part[self.rows].unsqueeze(1) for part in inputs)
            )
            out[self.rows] = made.squeeze(1)
        for row, rows, slot in self.long:
            parts = (part[None, row : row + rows] for part in inputs)
            made, past[slot : slot + 1] = rule(past[slot : slot + 1], *parts)
            out[row : row + rows] = made[0]
        return out
