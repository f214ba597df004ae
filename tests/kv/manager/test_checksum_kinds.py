"""Checksums by kind of memory: equal on hosts and devices, agreed on by a pair, and refused without one."""

from __future__ import annotations

import queue
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_conn_joining import joined
from test_conn_paths import info

from layouts import laid_out
from segue.kv.errors import ConfigError, ErrorCode, Internal, PeerRefused
from segue.kv.ids import ChecksumKind, LeaderId, Span, TransferId, new_incarnation
from segue.kv.layout.content import Content, LayerSample, canonical_content, part_of
from segue.kv.layout.spec import KVShape, PoolSpec, StateTensor
from segue.kv.protocol import events
from segue.kv.ranks import word_checksum
from segue.kv.ranks.checksums import Digester, checksum_kinds
from segue.kv.ranks.word_checksum import WordChecksum
from segue.kv.transport.memory.pool_memory import Memory, Region, host_region

XXH3, WORDS = ChecksumKind.XXH3, ChecksumKind.WORDS
MASK = 2**64 - 1


def reference(data: bytes, unit: int) -> int:
    """The definition, word by word."""

    def mixed(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = ((x ^ x >> 33) * factor) & MASK
        return x ^ x >> 33

    total = len(data) * 0x9E3779B97F4A7C15
    for number, at in enumerate(range(0, len(data), unit), 1):
        word = int.from_bytes(data[at : at + unit], "little")
        total += mixed(word ^ (number * 0x9E3779B97F4A7C15 & MASK))
    return mixed(total & MASK)


def pool(order: str = "", *, dim: int = 8, size: int = 4, pages: int = 40, item: int = 2) -> PoolSpec:
    shape = KVShape(layers=3, kv_heads=2, k_dim=dim, v_dim=dim, dtype="x", item_bytes=item)
    spec = PoolSpec(shape=shape, page_tokens=size, pages=pages, layer_count=3, head_count=2)
    return laid_out(spec, order)


def device(tensor: torch.Tensor, name: str = "cpu:0") -> Memory:
    """Memory of the host that is declared as a device's: nobody may read it by its address."""
    return Memory([Region(tensor.data_ptr(), tensor.nbytes, name, owner=tensor)])


def content_of(spec: PoolSpec, pages: Sequence[int], span: Span, every: int = 1) -> Content:
    return canonical_content(spec, part_of(spec), span, pages, 0, LayerSample(every, 1), "test")


def bytes_of(data: np.ndarray, content: Content) -> bytes:
    """The canonical bytes, gathered head by head."""
    found = b""
    for plane in content.planes:
        for slot, tokens in content.runs:
            for token in range(slot, slot + tokens):
                for head in range(plane.heads):
                    at = plane.at(token, content.page_tokens) + head * plane.head_stride
                    found += data[at : at + plane.head_bytes].tobytes()
    return found


@pytest.mark.parametrize("order", ["", "LKNHB", "NLKBH", "LNKBH"])
@pytest.mark.parametrize(("dim", "item", "unit"), [(8, 2, 8), (6, 2, 4), (3, 2, 2), (3, 1, 1), (12, 4, 8)])
def test_host_and_device_come_to_the_number_of_the_definition(
    order: str, dim: int, item: int, unit: int
) -> None:
    spec = pool(order, dim=dim, item=item)
    data = np.random.default_rng(dim).integers(0, 256, spec.nbytes, np.uint8)
    pages = random.Random(dim).sample(range(40), 12)
    for span, every in ((Span(0, 45), 1), (Span(17, 18), 1), (Span(3, 41), 2)):
        content = content_of(spec, pages, span, every)
        due = reference(bytes_of(data, content), unit)
        assert WordChecksum(Memory([host_region(data)])).checksum(content) == due
        assert WordChecksum(device(torch.from_numpy(data))).checksum(content) == due


def test_pieces_and_page_sizes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair compares the same content in other pages of another size and order."""
    rng, found = np.random.default_rng(7), set()
    tokens = rng.integers(0, 256, (3, 2, 45, 2, 16), np.uint8)  # layer, K or V, token, head, byte
    for order, size in (("", 4), ("LNKHB", 16), ("NLKBH", 1)):
        spec = pool(order, size=size, pages=200 // size)
        pages = random.Random(size).sample(range(spec.pages), -(-45 // size))
        data = np.zeros(spec.nbytes, np.uint8)
        for layer, value, token, head in np.ndindex(3, 2, 45, 2):
            plane = spec.plane(layer, bool(value))
            at = plane.at(pages[token // size] * size + token % size, size) + head * plane.head_stride
            data[at : at + 16] = tokens[layer, value, token, head]
        content = content_of(spec, pages, Span(0, 45))
        for nbytes in (1, 100, 2**18):
            monkeypatch.setattr(word_checksum, "HOST_PIECE_BYTES", nbytes)
            monkeypatch.setattr(word_checksum, "DEVICE_PIECE_BYTES", nbytes)
            found.add(WordChecksum(Memory([host_region(data)])).checksum(content))
            found.add(WordChecksum(device(torch.from_numpy(data))).checksum(content))
    assert len(found) == 1


def test_each_bit_each_exchange_and_each_shift_of_words_changes_it() -> None:
    spec = pool(pages=2)
    data = np.random.default_rng(1).integers(0, 256, spec.nbytes, np.uint8)
    words = data.view(np.uint64)
    memory, content = Memory([host_region(data)]), content_of(spec, [0, 1], Span(0, 8))
    right = WordChecksum(memory).checksum(content)
    found = []
    for at in range(0, spec.nbytes, 5):
        for bit in (0, 7):
            data[at] ^= 1 << bit
            found.append(WordChecksum(memory).checksum(content))
            data[at] ^= 1 << bit
    for one, other in pairwise(random.Random(3).sample(range(len(words)), 30)):
        words[[one, other]] = words[[other, one]]
        found.append(WordChecksum(memory).checksum(content))
        words[[one, other]] = words[[other, one]]
    for shift in (1, 2, 8):
        words[:] = np.roll(words, shift)
        found.append(WordChecksum(memory).checksum(content))
        words[:] = np.roll(words, -shift)
    assert WordChecksum(memory).checksum(content) == right
    assert right not in found
    assert len(set(found)) == len(found)
    zeros = np.zeros(spec.nbytes, np.uint8)
    empty = Memory([host_region(zeros)])
    lengths = {WordChecksum(empty).checksum(content_of(spec, [0, 1], Span(0, n))) for n in range(1, 9)}
    assert len(lengths) == 8, "zeros count, too"


def test_a_state_and_several_regions_are_covered() -> None:
    state = (StateTensor(name="s", layers=1, shape=(9,), dtype="x", item_bytes=2),)
    shape = KVShape(layers=2, kv_heads=1, k_dim=4, v_dim=4, dtype="x", item_bytes=2, state=state)
    spec = PoolSpec(shape=shape, page_tokens=4, pages=3, layer_count=2, head_count=1, slots=2)
    data = np.random.default_rng(2).integers(0, 256, spec.nbytes, np.uint8)
    content = canonical_content(spec, part_of(spec), Span(0, 5), [2, 0], 0, LayerSample(), "test", 1)
    at, nbytes = content.state or (0, 0)
    due = reference(bytes_of(data, content) + data[at : at + nbytes].tobytes(), 8)
    assert WordChecksum(Memory([host_region(data)])).checksum(content) == due
    assert WordChecksum(device(torch.from_numpy(data))).checksum(content) == due

    layers = [np.random.default_rng(n).integers(0, 256, (2, 3, 4, 1, 8), np.uint8) for n in range(2)]
    from segue.kv import pool_of

    shape = KVShape(layers=2, kv_heads=1, k_dim=8, v_dim=8, dtype="x", item_bytes=1)
    on_host, host = pool_of(shape, [(t[0], t[1]) for t in layers])
    content = content_of(on_host, [2, 0], Span(0, 5))
    mixed = Memory(
        [
            host.regions[0],
            *(
                Region(r.address, r.nbytes, "cpu:0", owner=torch.from_numpy(layers[n // 2]))
                for n, r in list(enumerate(host.regions))[1:]
            ),
        ]
    )
    assert WordChecksum(mixed).checksum(content) == WordChecksum(host).checksum(content)


def test_no_value_of_a_device_is_looked_at_before_the_end() -> None:
    """The device `meta` has shapes and no values: whatever asks for one raises."""
    spec = pool("NLKBH", size=4, pages=60)
    tensor = torch.empty(spec.nbytes, dtype=torch.uint8, device="meta")
    memory = Memory([Region(0, spec.nbytes, "meta", owner=tensor)])
    words = WordChecksum(memory)
    pages = random.Random(4).sample(range(60), 50)
    (sums,) = words.sums(content_of(spec, pages, Span(3, 200))).values()
    assert (sums.device.type, sums.dtype, sums.shape) == ("meta", torch.int64, (1,))
    with pytest.raises(RuntimeError, match="meta"):
        words.checksum(content_of(spec, pages, Span(3, 200)))


def test_a_content_outside_its_region_is_no_checksum() -> None:
    spec = pool()
    content = content_of(spec, list(range(40)), Span(0, 160))
    short = np.zeros(spec.nbytes - 1, np.uint8)
    for memory in (Memory([host_region(short)]), device(torch.from_numpy(short))):
        with pytest.raises(Internal, match="outside"):
            WordChecksum(memory).checksum(content)
        whole = Content((), (), 1, (0, len(short) - 7))
        assert WordChecksum(memory).checksum(whole) == reference(short[:-7].tobytes(), 8)
        with pytest.raises(Internal, match="outside"):
            WordChecksum(memory).checksum(Content((), (), 1, (8, len(short) - 7)))


# ---- who computes what -------------------------------------------------------------------------------


def test_the_kinds_follow_from_the_memory() -> None:
    data = np.zeros(64, np.uint8)
    assert checksum_kinds(Memory([host_region(data)])) == ("xxh3-64", "words-64")
    assert checksum_kinds(device(torch.from_numpy(data))) == ("words-64",)
    unknown = Memory([Region(4096, 64, "cuda:0", owner=object())])
    assert checksum_kinds(unknown) == ()
    with pytest.raises(ConfigError, match="no tensor of torch"):
        WordChecksum(unknown)


def test_a_hash_of_a_device_is_computed_on_the_thread_that_may_wait() -> None:
    data = np.random.default_rng(9).integers(0, 256, pool().nbytes, np.uint8)
    content = content_of(pool(), [3, 1], Span(0, 8))
    leader = LeaderId(new_incarnation())
    answers: queue.Queue[events.ChecksumReady] = queue.Queue()
    digester = Digester(device(torch.from_numpy(data)), answers.put, 4)
    transfer = TransferId(5, 0, leader, leader)
    digester.submit(events.ComputeChecksum(transfer, 0, 1, content, WORDS))
    assert answers.empty(), "it waits for its thread"
    digester.start()
    assert answers.get(timeout=60).checksum == reference(bytes_of(data, content), 8)
    digester.submit(events.ComputeChecksum(transfer, 0, 2, content, XXH3))
    error = answers.get(timeout=60).error
    assert error is not None
    assert error.code is ErrorCode.CONFIG
    digester.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "kind"),
    [
        ([XXH3, WORDS], [XXH3, WORDS], XXH3),
        ([WORDS, XXH3], [WORDS, XXH3], XXH3),
        ([WORDS], [XXH3, WORDS], WORDS),
        ([XXH3, WORDS], [WORDS, "a later one"], WORDS),
    ],
)
def test_a_pair_takes_the_kind_that_both_compute(
    prefill: list[str], decode: list[str], kind: ChecksumKind
) -> None:
    assert joined(info(checksums=tuple(prefill)), info(checksums=tuple(decode))).checksum is kind


def test_a_pair_without_a_common_kind_is_refused_unless_both_want_none() -> None:
    for prefill, decode in ((False, False), (True, False), (False, True)):
        with pytest.raises(PeerRefused, match="off on both sides"):
            joined(info(checksums=(), unchecked=prefill), info(unchecked=decode))
    assert joined(info(checksums=(), unchecked=True), info(unchecked=True)).checksum is None
