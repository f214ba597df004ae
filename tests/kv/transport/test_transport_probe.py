"""The writes of a probe, the speed that follows from its times, and the chosen transport."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count

import pytest

from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.path_figures import PathCandidate, PathChoice, PathFigures
from segue.kv.transport import probe
from segue.kv.transport.probe import (
    Effort,
    HostSpeed,
    Measurement,
    PageShape,
    Scratch,
    decide,
    memory_speed,
    page_shape,
    page_writes,
    slow,
)

SHAPE = PageShape(60, 12 * 1024)
SOURCE, TARGET = Scratch(2**20, 4 * 2**20), Scratch(3 * 2**20, 2**20)


def candidate(name: str, gb_per_s: float, page_us: float = 100.0) -> PathCandidate:
    return PathCandidate(
        transport=name, figures=PathFigures(page_s=page_us / 1e6, bytes_per_s=gb_per_s * 1e9)
    )


@pytest.mark.parametrize("shape", [SHAPE, PageShape(4, 32), PageShape(2, 8 * 2**20)])
@pytest.mark.parametrize("pages", [1, 7, 32])
def test_a_probe_writes_only_into_scratch_and_no_row_touches_another(shape: PageShape, pages: int) -> None:
    blocks = page_writes(SOURCE, TARGET, shape)(pages)
    assert sum(block.rows for block in blocks) == shape.rows * pages
    for block in blocks:
        assert block.row_bytes == min(shape.row_bytes, TARGET.nbytes // 2)
        assert block.src_stride == block.dst_stride == 2 * block.row_bytes
        for start, scratch in ((block.src_offset, SOURCE), (block.dst_offset, TARGET)):
            end = start + (block.rows - 1) * block.src_stride + block.row_bytes
            assert scratch.offset <= start
            assert end <= scratch.offset + scratch.nbytes


def test_a_slow_path_is_measured_with_few_writes_and_a_fast_one_with_large_ones() -> None:
    def measured(byte_s: float) -> tuple[PathFigures, list[int]]:
        sizes, measurement = [], Measurement(page_writes(SOURCE, TARGET, SHAPE))
        while (figures := measurement.figures) is None:
            sizes.append(sum(block.nbytes for block in measurement.write))
            measurement.took(sizes[-1] * byte_s)
        return figures, sizes

    page = SHAPE.rows * SHAPE.row_bytes
    figures, sizes = measured(1e-6)
    assert sizes == [page, page, page]
    assert figures.bytes_per_s == pytest.approx(1e6)
    figures, sizes = measured(1e-10)
    assert max(sizes) == Effort().bulk_bytes // page * page
    assert figures.page_s == pytest.approx(page * 1e-10)


def test_of_several_turns_the_best_counts_and_the_cold_one_not_at_all() -> None:
    """Other load of the host while a deployment starts says nothing about a path."""
    measurement, page = Measurement(page_writes(SOURCE, TARGET, SHAPE), Effort(enough_s=0.1)), 60 * 12 * 1024
    measurement.took(5.0)  # cold, and slower than all that is wanted to know
    pages = iter([0.004, 0.001, 0.096, 0.5])
    bulks = iter([0.05, 0.02, 0.04])
    many = []
    while measurement.figures is None:
        nbytes = sum(block.nbytes for block in measurement.write)
        many += [nbytes // page] * (nbytes > page)
        measurement.took(next(bulks if nbytes > page else pages))
    most = Effort().bulk_bytes // page
    assert many == [most] * 3
    assert list(pages) == [0.5], "enough was known of single pages"
    assert measurement.figures.page_s == 0.001
    assert measurement.figures.bytes_per_s == pytest.approx(most * page / 0.02)


def test_a_clock_that_did_not_move_is_no_speed_without_an_end() -> None:
    measurement = Measurement(page_writes(SOURCE, TARGET, SHAPE))
    while measurement.figures is None:
        measurement.took(0.0)
    assert measurement.figures.page_s > 0
    assert 0 < measurement.figures.bytes_per_s < float("inf")


def test_the_page_that_is_measured_is_about_what_two_ranks_share() -> None:
    """The rows of the one with fewer, as long as those of the one with shorter ones, in either direction."""

    def spec(layers: int, heads: int, page_tokens: int) -> PoolSpec:
        shape = KVShape(layers=8, kv_heads=8, k_dim=16, v_dim=16, dtype="bfloat16", item_bytes=2)
        return PoolSpec(shape=shape, pages=4, page_tokens=page_tokens, layer_count=layers, head_count=heads)

    few_long, many_short = spec(2, 8, 16), spec(8, 2, 16)
    wanted = PageShape(2 * 2, 16 * 2 * 16 * 2)
    assert page_shape(few_long, many_short) == page_shape(many_short, few_long) == wanted
    assert page_shape(few_long, spec(2, 8, 4)) == PageShape(2 * 2, 4 * 8 * 16 * 2)


def test_a_preferred_transport_stays_unless_another_is_clearly_faster() -> None:
    assert decide([candidate("shm", 5), candidate("tcp", 2)], SHAPE) == "shm"
    assert decide([candidate("shm", 5), candidate("tcp", 6)], SHAPE) == "shm", "noise"
    assert decide([candidate("shm", 5), candidate("tcp", 5), candidate("nixl", 12)], SHAPE) == "nixl"
    assert decide([candidate("tcp", 5, page_us=90_000), candidate("nixl", 5)], SHAPE) == "nixl", "latency"


def test_what_was_not_measured_is_taken_only_where_nothing_was() -> None:
    failed = PathCandidate(transport="shm", why_not="no memory")
    late = PathCandidate(transport="tcp", why_not="was not measured in time", late=True)
    assert decide([failed, late, candidate("nixl", 0.001)], SHAPE) == "nixl"
    assert decide([failed, late], SHAPE) == "tcp", "the other one has failed"
    assert decide([failed], SHAPE) == "shm", "its error is told when it is opened"


def test_a_path_is_compared_with_what_the_host_does_in_memory_or_over_a_socket() -> None:
    host = HostSpeed(memory_bytes_per_s=10e9, socket_bytes_per_s=1e9)
    figures = PathFigures(page_s=1e-4, bytes_per_s=0.1e9)
    assert "a copy in memory has 10.00 GB/s" in slow(figures, host, in_memory=True)
    assert slow(figures, host, in_memory=False) == ""
    assert memory_speed() > 0


def test_what_this_host_can_do_is_the_best_of_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured once, while a deployment starts, and kept."""
    turns = iter([1e9, 3e9, 2e9])
    monkeypatch.setattr(probe, "socket_speed", lambda: next(turns))
    monkeypatch.setattr(probe, "memory_speed", lambda: 9e9)
    assert probe._host_speed.__wrapped__().socket_bytes_per_s == 3e9


def test_pairs_that_ask_at_once_what_this_host_can_do_measure_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two measurements at the same time would each see half of it."""
    second, turns = threading.Event(), count(1)

    def counted() -> float:
        if (turn := next(turns)) == 1:
            second.wait(0.1)
        else:
            second.set()
        return turn * 1e9

    monkeypatch.setattr(probe, "memory_speed", counted)
    monkeypatch.setattr(probe, "socket_speed", lambda: 1e9)
    monkeypatch.setattr(probe, "_host_speed", cache(probe._host_speed.__wrapped__))
    with ThreadPoolExecutor(2) as pool:
        found = [asked.result(30) for asked in [pool.submit(probe.host_speed) for _ in range(2)]]
    assert not second.is_set()
    assert {speed.memory_bytes_per_s for speed in found} == {1e9}


def test_a_choice_is_one_line() -> None:
    left_out = PathCandidate(transport="nixl", why_not="is not offered by both")
    choice = PathChoice(transport="tcp", candidates=[candidate("shm", 1), candidate("tcp", 2), left_out])
    assert choice.describe() == (
        "tcp 2.00 GB/s, 100 us a page; shm 1.00 GB/s, 100 us a page; nixl is not offered by both"
    )


def test_a_path_that_is_just_so_much_faster_does_not_displace_one_that_is_preferred() -> None:
    def whole_s(needed_s: float) -> PathFigures:
        return PathFigures(page_s=needed_s, bytes_per_s=float("inf"))

    first = PathCandidate(transport="first", figures=whole_s(3.0))
    for needed_s, taken in ((2.0, "first"), (1.99, "second")):
        second = PathCandidate(transport="second", figures=whole_s(needed_s))
        assert decide([first, second], SHAPE) == taken
