"""Pages that may still be read, in SGLang's own allocators."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", exc_type=ImportError)

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from segue.integrations.sglang.sglang_pinned import PinnedPages

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("grouped", [False, True])
def test_sglangs_allocator_gets_a_page_back_after_the_proof(page: int, grouped: bool) -> None:
    """By each way in which SGLang frees pages: tokens, a segment, within a group."""
    if page == 1:
        allocator = TokenToKVPoolAllocator(64, torch.bfloat16, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(64 * page, page, torch.bfloat16, "cpu", None, False)
    unproven: set[int] = set()
    pinned = PinnedPages(allocator, lambda: frozenset(unproven))
    tokens = allocator.alloc(8 * page)
    pages = torch.unique(tokens // page).tolist()
    free = allocator.available_size()
    unproven |= {pages[1], pages[6]}
    if grouped:
        allocator.free_group_begin()
    allocator.free(tokens[: 4 * page])
    allocator.free_segment(tokens[4 * page :], start_pos=0)
    if grouped:
        allocator.free_group_end()
    assert allocator.available_size() == free + 6 * page
    assert pinned.pages == unproven
    pinned.give_back()
    assert allocator.available_size() == free + 6 * page
    unproven.remove(pages[1])
    pinned.give_back()
    assert allocator.available_size() == free + 7 * page
    unproven.clear()
    pinned.give_back()
    assert allocator.available_size() == free + 8 * page
    assert len(set(allocator.get_all_free_pages().tolist())) == 64
