"""Source pages that SGLang frees while a rank may still read them: kept from it until the proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PinnedPages:
    """Takes the place of `free` and `free_page_ids` of one allocator of SGLang. `unproven` names the pages
    that a rank may still read. Used from the scheduler's thread alone.
    """

    def __init__(self, allocator: Any, unproven: Callable[[], frozenset[int]]) -> None:
        self._allocator = allocator
        self._unproven = unproven
        self._free: Callable[[torch.Tensor], None] = allocator.free
        self._free_page_ids: Callable[[torch.Tensor], None] = allocator.free_page_ids
        allocator.free = self.free
        allocator.free_page_ids = self.free_page_ids
        #: freed by SGLang and not given to its allocator
        self.pages: set[int] = set()

    def free(self, tokens: torch.Tensor) -> None:
        """Free the pages of token slots."""
        self._free(tokens[self._proven(tokens // self._allocator.page_size)])

    def free_page_ids(self, pages: torch.Tensor) -> None:
        """Free pages."""
        self._free_page_ids(pages[self._proven(pages)])

    def give_back(self) -> None:
        """Free the pages that nothing reads any more."""
        if self.pages:
            proven = self.pages - self._unproven()
            self.pages -= proven
            self._free_page_ids(self._tensor(proven))

    def _proven(self, pages: torch.Tensor) -> torch.Tensor | slice:
        """The mask of pages that may be free; the others are kept."""
        unproven = self._unproven()
        if not unproven:
            return slice(None)
        kept = torch.isin(pages, self._tensor(unproven))
        self.pages.update(pages[kept].tolist())
        return ~kept

    def _tensor(self, pages: set[int] | frozenset[int]) -> torch.Tensor:
        return torch.tensor(sorted(pages), dtype=torch.int64, device=self._allocator.device)
