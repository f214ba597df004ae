"""Experts that data-parallel ranks share out: each rank attends over its own requests and holds some experts.

In every layer with experts the ranks exchange the rows that they all compute, each applies its own experts to
all of them, and a sum gives every rank its rows back. Which experts a row goes to, and with what weight, is
decided once, by the rank that has the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from segue.engine.models.model_loading import LoadedModel
from segue.engine.parallel import share
from segue.engine.ranks.dp_group import DpGroup
from segue.engine.ranks.slicing import parameter


class SharedExperts(nn.Module):
    """In place of the experts of one layer, which transformers calls the same way: those of rank `index` of
    `size`, and what the others compute for us."""

    def __init__(self, experts: Any, index: int, size: int, top_k: int) -> None:
        super().__init__()
        self.held = share(experts.num_experts, index, size)
        kept = slice(self.held.start, self.held.stop)
        experts.gate_up_proj = parameter(experts.gate_up_proj[kept])
        experts.down_proj = parameter(experts.down_proj[kept])
        experts.num_experts = len(self.held)
        self._experts = experts
        self._top_k = top_k
        self.group: DpGroup | None = None

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what the `chosen` experts (`[rows, top_k]`) make of each row of `hidden`."""
        assert self.group is not None
        parts = (hidden, chosen.int(), weights.float())
        widths = [part.shape[1] * part.element_size() for part in parts]
        packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        gathered = torch.split(torch.cat(self.group.gather(packed)), widths, 1)
        rows, chosen, weights = (
            whole.contiguous().view(part.dtype) for whole, part in zip(gathered, parts, strict=True)
        )
        made = self.group.sum(self._of_held(rows, chosen, weights))
        return made[self.group.own].to(hidden.dtype)

    __call__ = forward  # no hooks are ever registered: spare the dispatch

    def _of_held(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The share of the experts that are here, in float32."""
        made = torch.zeros(rows.shape, dtype=torch.float32)
        at, column = torch.where((chosen >= self.held.start) & (chosen < self.held.stop))
        if len(at):
            which = chosen[at, column, None].long() - self.held.start
            each = self._experts(rows[at], which, rows.new_ones(len(at), 1))
            made.index_add_(0, at, each.float().mul_(weights[at, column, None]))
        return made

    def along(self) -> None:
        """Compute for the others, without a row of our own."""
        weight = self._experts.gate_up_proj
        self(
            weight.new_empty(0, weight.shape[-1]),
            torch.empty(0, self._top_k, dtype=torch.int32),
            torch.empty(0, self._top_k),
        )


def share_experts(loaded: LoadedModel, index: int, size: int) -> list[SharedExperts]:
    """Leave of the experts of `loaded` those of rank `index` of `size`, in place; one for each layer that has
    experts."""
    made = []
    for layer in loaded.model.model.layers:
        if "experts" in dict(layer.mlp.named_children()):
            layer.mlp.experts = SharedExperts(
                layer.mlp.experts, index, size, loaded.config.num_experts_per_tok
            )
            made.append(layer.mlp.experts)
    return made
