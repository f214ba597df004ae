"""Hand-overs between pools that engines allocated themselves, through real transports and without a copy."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_sides import LIMITS, Side, begin, joined, spec

from segue.kv.config import KVConfig
from segue.kv.errors import ConfigError, LayoutMismatch
from segue.kv.ids import KVPoll, Role, Span
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.manager import KVManager
from segue.kv.transport import kinds
from segue.kv.transport.memory import copier
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, allocate
from segue.kv.transport.memory.tensors import PointerView, pool_of
from segue.kv.transport.tcp import tcp_in, tcp_out
from segue.kv.transport.tcp.tcp_wire import Cursor, Rows

LAYERS, HEADS, DIM, TOKENS = 5, 3, 8, 45
SHAPE = KVShape(layers=LAYERS, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float16", item_bytes=2)
Pool = tuple[PoolSpec, Memory, list[list[np.ndarray]]]
ROLES = (Role.PREFILL, Role.DECODE)


def layer_of(order: str, pages: int, size: int, whole: np.ndarray | None = None) -> list[np.ndarray]:
    """K and V `[page, token, head, item]` of a tensor with its axes in this order (`N`: pages)."""
    sizes = {"N": pages, "K": 2, "B": size, "H": HEADS}
    if whole is None:
        whole = np.empty([*(sizes[axis] for axis in order), DIM], np.float16)
    whole.view(np.uint16)[:] = 0xDEAD
    axes = [order.index(axis) for axis in "KNBH"]
    return list(whole.transpose(*axes, len(order)))


def engine_pool(order: str, pages: int, size: int) -> Pool:
    """A tensor of its own for each layer, as engines have them; they lie anywhere."""
    layers = [layer_of(order, pages, size) for _ in range(LAYERS)]
    return (*pool_of(SHAPE, layers), layers)


def shared_pool(order: str, pages: int, size: int) -> Pool:
    """The same tensors in one memfd, with some space between them."""
    each = 2 * pages * size * HEADS * DIM
    memory = allocate(LAYERS * (2 * each + 64))
    whole = np.frombuffer(memory.buffer, np.float16)
    shape = [{"N": pages, "K": 2, "B": size, "H": HEADS}[axis] for axis in order]
    parts = [whole[at : at + each].reshape(*shape, DIM) for at in range(32, LAYERS * (each + 32), each + 32)]
    layers = [layer_of(order, pages, size, part) for part in parts]
    spec, _ = pool_of(SHAPE, layers, memory=memory)
    return spec, memory, layers


def our_pool(_: str, pages: int, size: int) -> Pool:
    """The layer-major pool that segue's own engine has."""
    spec = PoolSpec(shape=SHAPE, page_tokens=size, pages=pages, layer_count=LAYERS, head_count=HEADS)
    memory = allocate(spec.nbytes)
    whole = np.frombuffer(memory.buffer, np.float16)[: spec.nbytes // 2]
    return spec, memory, [list(k_v) for k_v in whole.reshape(LAYERS, 2, pages, size, HEADS, DIM)]


def element(layer: int, value: int, token: int) -> np.ndarray:
    """The expected K or V of one token: another 16 bits for every (layer, value, token, head, item)."""
    first = ((layer * 2 + value) * TOKENS + token) * HEADS * DIM
    return np.arange(first, first + HEADS * DIM, dtype=np.uint32).astype(np.uint16).reshape(HEADS, DIM)


class Addresses:
    """Every address that a transport reads from or writes to, of KV."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[int, int]] = []
        self.written: list[tuple[int, int]] = []
        monkeypatch.setattr(tcp_out, "Cursor", self._sends)
        monkeypatch.setattr(tcp_in, "Cursor", self._receives)
        before: Callable[..., None] = copier.copy_block

        def copy_block(source: object, target: object, block: object) -> None:
            view = np.frombuffer(source, np.uint8)  # type: ignore[call-overload]
            self.read.append((view.ctypes.data, view.nbytes))
            before(source, target, block)

        monkeypatch.setattr(copier, "copy_block", copy_block)

    def _sends(self, rows: Rows) -> Cursor:
        self.read += [(int(at), int(n)) for at, n in rows[1:]]  # the first one is the part's head
        return Cursor(rows)

    def _receives(self, rows: Rows) -> Cursor:
        self.written += [(int(at), int(n)) for at, n in rows]
        return Cursor(rows)


def inside(ranges: list[tuple[int, int]], layers: list[list[np.ndarray]]) -> bool:
    """Whether each range lies in the memory of one layer's tensor."""
    bounds = [np.lib.array_utils.byte_bounds(kind) for layer in layers for kind in layer]
    return all(any(low <= at and at + n <= high for low, high in bounds) for at, n in ranges)


@contextmanager
def handing_over(transport: str, source: Pool, target: Pool) -> Iterator[tuple[Side, Side]]:
    """Between pools whose memory outlives it."""
    pools = [{"spec": spec, "memory": memory} for spec, memory, _ in (source, target)]
    made = [Side(role, transport=transport, **pool) for role, pool in zip(ROLES, pools, strict=True)]
    for side in made:
        side.close = side.manager.close  # type: ignore[method-assign]
    with joined(*made):
        yield made[0], made[1]


KINDS = {"own": engine_pool, "shared": shared_pool, "ours": our_pool}
ORDERS = ["KNBH", "NKBH", "KNHB", "NKHB"]  # vLLM has all of them, by attention backend: NHD and HND
PAIRS: list[object] = [
    *[("tcp", "own", a, "own", b) for a in ORDERS for b in ORDERS],
    *[("tcp", "ours", "", "own", b) for b in ORDERS],
    *[("tcp", "own", a, "ours", "") for a in ORDERS],
    *[("shm", "shared", a, "shared", b) for a, b in (("KNBH", "NKHB"), ("NKHB", "KNBH"), ("NKBH", "NKBH"))],
    *[("shm", "ours", "", "shared", b) for b in ("NKBH", "KNHB")],
    ("shm", "shared", "NKHB", "ours", ""),
]


def over_library(name: str, *pools: str) -> object:
    """The same with the real library, where it can be loaded."""
    reason = kinds.KINDS.available()[name]
    return pytest.param(
        name, *pools, marks=[pytest.mark.slow, pytest.mark.skipif(reason != kinds.USABLE, reason=reason)]
    )


PAIRS += [
    over_library(name, *pools)
    for name in ("nixl", "mooncake")
    for pools in (("own", "NKHB", "own", "KNBH"), ("ours", "", "own", "NKBH"), ("own", "KNHB", "ours", ""))
]


@pytest.mark.parametrize(("transport", "kind", "order", "other_kind", "other_order"), PAIRS)
def test_kv_goes_from_one_engines_tensors_into_anothers_without_a_copy(
    transport: str, kind: str, order: str, other_kind: str, other_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{transport} {order} {other_order}")
    sizes = rng.choice([(4, 4), (4, 16), (16, 4), (1, 4), (16, 64)])
    counts = [-(-TOKENS // size) + 3 for size in sizes]
    source, target = (
        KINDS[kind](order, counts[0], sizes[0]),
        KINDS[other_kind](other_order, counts[1], sizes[1]),
    )
    pages = [rng.sample(range(count), count - 3) for count in counts]
    every = [(layer, value, token) for layer in range(LAYERS) for value in (0, 1) for token in range(TOKENS)]
    for layer, value, token in every:
        page, inside_page = divmod(token, sizes[0])
        source[2][layer][value][pages[0][page], inside_page] = element(layer, value, token).view(np.float16)
    before = [[kind.copy() for kind in layer] for layer in target[2]]
    seen = Addresses(monkeypatch)
    with handing_over(transport, source, target) as (prefill, decode):
        _, sender, receiver = begin(prefill, decode, TOKENS)
        receiver.publish(pages[1])
        prefill.wait(sender, KVPoll.WAITING_FOR_INPUT)
        sender.send(Span(0, 20), pages[0])
        sender.send(Span(20, TOKENS), pages[0], b"7")
        decode.wait(receiver, KVPoll.SUCCESS)  # its checksums compared: those of two unequal layouts agree
        prefill.wait(sender, KVPoll.SUCCESS)
    for layer, value, token in every:
        page, inside_page = divmod(token, sizes[1])
        place = (pages[1][page], inside_page)
        assert np.array_equal(target[2][layer][value][place].view(np.uint16), element(layer, value, token))
        before[layer][value][place] = target[2][layer][value][place]
    same = [
        np.array_equal(was.view(np.uint16), now.view(np.uint16))
        for layers in zip(before, target[2], strict=True)
        for was, now in zip(*layers, strict=True)
    ]
    assert all(same), "something else was written"
    if transport == "tcp":
        nbytes = TOKENS * SHAPE.token_bytes
        assert sum(n for _, n in seen.read) == sum(n for _, n in seen.written) == nbytes
        assert inside(seen.read, source[2])
        assert inside(seen.written, target[2])
    elif transport == "shm":
        own = np.frombuffer(source[1].buffer, np.uint8)
        assert set(seen.read) == {(own.ctypes.data, own.nbytes)}


def test_the_tensors_of_torch_are_described_as_those_of_numpy() -> None:
    tensors = [torch.zeros(6, 2, HEADS, 4, DIM, dtype=torch.float16) for _ in range(LAYERS)]  # HND
    layers = [[t[:, kv].transpose(1, 2) for kv in (0, 1)] for t in tensors]
    spec, memory = pool_of(SHAPE, layers)
    arrays = [[t.numpy() for t in layer] for layer in layers]
    assert pool_of(SHAPE, arrays)[0] == spec
    assert [r.address for r in memory.regions] == [t.data_ptr() for t in tensors]
    assert [r.nbytes for r in memory.regions] == [t.nbytes for t in tensors]
    assert {r.kind for r in memory.regions} == {MemoryKind.HOST}
    memory.regions[0].buffer[0:2] = np.float16(3).tobytes()
    assert tensors[0].flatten()[0] == 3


def test_a_latent_alone_is_a_pool_of_one_plane_for_each_layer() -> None:
    shape = KVShape(kind="mla", layers=2, kv_heads=1, k_dim=12, v_dim=0, dtype="float16", item_bytes=2)
    latents = [np.zeros((6, 4, 12), np.float16) for _ in range(2)]
    spec, memory = pool_of(shape, [(t[:, :, None],) for t in latents])
    assert [plane.page_stride for plane in spec.planes] == [4 * 24, 4 * 24]
    assert [(r.address, r.nbytes) for r in memory.regions] == [(t.ctypes.data, t.nbytes) for t in latents]
    assert spec.plane(1, False).dense(4)


def test_tensors_in_one_region_each_lie_at_equal_distances_however_they_were_allocated() -> None:
    whole = np.zeros((LAYERS, 2, 6, 4, HEADS, DIM), np.float16)
    order = random.Random(1).sample(range(LAYERS), LAYERS)
    spec, memory = pool_of(SHAPE, [list(whole[layer]) for layer in order])
    assert [plane.region for plane in spec.planes] == list(range(2 * LAYERS))
    assert len({b - a for a, b in zip(memory.starts, memory.starts[1:], strict=False)}) == 1


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (
            np.zeros((2, 6, 4, HEADS, DIM + 1), np.float16),
            r"layers\[1\]\[0\].shape\[3\] \(items\) is 9 where 8",
        ),
        (np.zeros((2, 6, 5, HEADS, DIM), np.float16), r"layers\[1\]\[0\].shape\[1\] \(tokens\) is 5 where 4"),
        (np.zeros((2, 6, 4, HEADS, DIM), np.float32), r"layers\[1\]\[0\] has items of 4 bytes"),
        (
            np.zeros((2, 6, 4, HEADS, 2 * DIM), np.float16)[..., ::2],
            r"layers\[1\]\[0\].strides\[3\] \(items\)",
        ),
        (np.zeros((2, 6, 4, HEADS, DIM), np.float16)[:, ::-1], r"strides\[0\] \(pages\) is -\d+ bytes"),
        (np.zeros((1, 6, 4, HEADS, DIM), np.float16), r"layers\[1\] has 1 tensors where 2 are needed"),
        (np.zeros((2, 6, 4, DIM), np.float16), r"layers\[1\]\[0\].shape is \(6, 4, 8\) where"),
    ],
)
def test_tensors_that_are_no_pool_are_refused(layer: np.ndarray, words: str) -> None:
    good = list(np.zeros((2, 6, 4, HEADS, DIM), np.float16))
    shape = KVShape(layers=2, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float16", item_bytes=2)
    with pytest.raises(ConfigError, match=words):
        pool_of(shape, [good, list(layer)])
    with pytest.raises(LayoutMismatch, match=r"planes\[2\].offset: .* overlaps planes\[0\]"):
        pool_of(shape, [good, good])
    memory = allocate(4096)
    with pytest.raises(ConfigError, match=r"layers\[0\]\[0\] at .* none of the memory's regions"):
        pool_of(shape, [good, good], memory=memory)
    memory.close()
    with pytest.raises(ConfigError, match="layers: there is none"):
        pool_of(shape, [])


def test_buffers_of_other_engines_are_described_by_views_or_by_pointers() -> None:
    """Layer-major, block-major (all layers of a block together), and a block as the unit where K of a token
    is no row; each as views, and as addresses without a tensor."""
    layers, blocks, tokens = 2, 5, 4
    shape = KVShape(layers=layers, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float16", item_bytes=2)
    for order in ("LKNBH", "NLKBH", "NLKHB"):
        sizes = {"L": layers, "K": 2, "N": blocks, "B": tokens, "H": HEADS}
        whole = np.zeros([sizes[axis] for axis in order] + [DIM], np.float16)
        axes = [order.index(axis) for axis in "LKNBH"]
        views = whole.transpose(*axes, 5)
        pointers = [
            [
                PointerView(
                    address=view.ctypes.data,
                    shape=view.shape,
                    strides=view.strides,
                    item_bytes=2,
                    owner=whole,
                )
                for view in layer
            ]
            for layer in views
        ]
        by_view, memory = pool_of(shape, [tuple(layer) for layer in views])
        by_pointer, same = pool_of(shape, pointers)
        assert by_view == by_pointer
        assert [(r.address, r.nbytes) for r in memory.regions] == [
            (r.address, r.nbytes) for r in same.regions
        ]
        assert len(memory.regions) == (2 * layers if order == "LKNBH" else 1)

    # K as [head, item, token], V as [head, token, item], side by side in each block of each layer.
    caches = [np.zeros((blocks, 2, HEADS, DIM * tokens), np.float16) for _ in range(layers)]
    unit = KVShape(
        layers=layers, kv_heads=HEADS, k_dim=DIM * tokens, v_dim=DIM * tokens, dtype="x", item_bytes=2
    )
    spec, memory = pool_of(
        unit,
        [
            [
                PointerView(
                    address=cache[:, kind].ctypes.data,
                    shape=(blocks, 1, HEADS, DIM * tokens),
                    strides=(cache.strides[0], cache.strides[0], cache.strides[2], 2),
                    item_bytes=2,
                    owner=cache,
                )
                for kind in (0, 1)
            ]
            for cache in caches
        ],
    )
    assert (spec.page_tokens, spec.pages, len(memory.regions)) == (1, blocks, layers)
    assert [plane.offset for plane in spec.planes] == [0, caches[0].strides[1]] * layers
    with pytest.raises(ConfigError, match=r"layers\[0\]\[0\].shape\[3\]"):
        pool_of(
            shape,
            [[PointerView(address=4096, shape=(1, 1, 2, 9), strides=(36, 36, 18, 2), item_bytes=2)] * 2],
        )


def test_a_pool_that_is_not_the_memory_given_is_refused_before_anything_starts() -> None:
    spec, memory, _ = engine_pool("NKBH", 6, 4)
    ours, small, _ = our_pool("", 6, 4)
    wrong = [(spec, Memory(memory.regions[:-1])), (spec, small), (ours, memory)]
    for pool, given in wrong:
        with pytest.raises(ConfigError, match=r"the pool (is described|needs)"):
            Side(Role.PREFILL, transport="tcp", spec=pool, memory=given, limits=LIMITS)


def kept() -> tuple[int, int, int]:
    """Descriptors, mappings of shared memory and threads of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:segue"), threading.active_count()


def test_memory_that_the_second_transport_refuses_leaves_nothing_of_the_first() -> None:
    """Its descriptors, and the mapping of its table of epochs."""
    spec, memory, _ = engine_pool("NKBH", 6, 4)
    found = []
    for _ in range(3):  # an event loop's first one in a process keeps a pipe
        with pytest.raises(ConfigError, match="shm"):
            KVManager(KVConfig(role=Role.PREFILL, model="m", spec=spec, transports=("tcp", "shm")), memory)
        found.append(kept())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("wrong", ["no secret", "port in use"])
def test_a_manager_that_cannot_listen_leaves_nothing_open(transport: str, wrong: str) -> None:
    """Nor do its ranks: their transports and what hashes have threads of their own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = ("0.0.0.0", 0) if wrong == "no secret" else taken.getsockname()
        found = []
        for _ in range(3):
            memory = allocate(spec().nbytes)
            config = KVConfig(
                role=Role.DECODE, model="m", spec=spec(), transports=(transport,), host=at[0], port=at[1]
            )
            with pytest.raises(ConfigError, match="secret" if wrong == "no secret" else str(at[1])):
                KVManager(config, memory).start()
            memory.close()
            found.append(kept())
    assert found[0] == found[1] == found[2]
