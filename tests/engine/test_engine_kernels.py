"""The compiled kernels against plain torch in float64, at the sizes models have and some they have not."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from segue.engine.cpu.cpu_kernels import make_kernels
from segue.engine.cpu.cpu_numba import ROUNDED, wide
from segue.kv.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: Half a step of each type at 1, and room for float32 sums.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 3e-6}


def close(got, wanted, dtype):
    return torch.allclose(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Case:
    """Sequences with `contexts` tokens each, on shuffled pages of a pool full of noise."""

    def __init__(self, dtype, dim, heads, kv_heads, page_tokens, contexts, threads=1):
        torch.manual_seed(0)
        self.dtype, self.page_tokens, self.contexts = dtype, page_tokens, contexts
        self.kernels = make_kernels(dtype, dim, heads, kv_heads, threads)
        counts = [-(-tokens // page_tokens) for tokens in contexts]
        self.pages = torch.randperm(sum(counts)).int().numpy()
        self.first_page = (np.cumsum(counts) - counts).astype(np.int32)
        slots = sum(counts) * page_tokens
        self.k, self.v = (torch.randn(slots, kv_heads, dim).to(DTYPES[dtype]) for _ in "kv")
        self.rows = len(contexts) + 2
        # single rows need not be neighbours in the step
        self.at = np.array([0, *range(2, len(contexts) + 1)], dtype=np.int32)
        self.ends = np.array(contexts, dtype=np.int32)
        self.qkv = torch.randn(self.rows, heads + 2 * kv_heads, dim).to(DTYPES[dtype])
        self.heads, self.scale = heads, dim**-0.5

    def attend(self, window=0):
        out = torch.full((self.rows, self.heads, self.qkv.shape[2]), 7.0).to(DTYPES[self.dtype])
        arrays = (self.at, self.ends, self.pages, self.first_page)
        self.kernels.attend(
            self.qkv.data_ptr(),
            out.data_ptr(),
            self.k.data_ptr(),
            self.v.data_ptr(),
            *(array.ctypes.data for array in arrays),
            len(self.at),
            self.page_tokens,
            window,
            self.scale,
        )
        return out

    def wanted(self, index, window=0):
        """Attention of one sequence by torch, over a copy of its tokens in order."""
        tokens = np.arange(self.contexts[index])
        slots = self.pages[self.first_page[index] + tokens // self.page_tokens] * self.page_tokens
        slots = (slots + tokens % self.page_tokens)[-window:]
        q = self.qkv[self.at[index], : self.heads, None].double()
        k, v = (kv[slots].transpose(0, 1).double() for kv in (self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)[:, 0]


SIZES = [(64, 9, 3, 16), (128, 8, 1, 7), (256, 4, 2, 200)]
#: What the models of `test_engine_families` have, too: heads as small as these, and one for each of q.
SMALL = [(16, 4, 4, 1), (24, 6, 2, 16)]


# Each size and each type; not each with each, since every pair is compiled anew.
@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "kv_heads", "page_tokens"),
    [
        *(("bfloat16", *size) for size in SIZES),
        *(pytest.param("bfloat16", *size, marks=pytest.mark.slow) for size in SMALL),
        *((dtype, *SIZES[0]) for dtype in ("float16", "float32")),
    ],
)
def test_single_rows_attend_to_their_own_pages(dtype, dim, heads, kv_heads, page_tokens):
    case = Case(dtype, dim, heads, kv_heads, page_tokens, [1, 15, 16, 17, 130, 400])
    for window in (0, 1, 20, 1000):
        out = case.attend(window)
        for index, row in enumerate(case.at):
            assert close(out[row], case.wanted(index, window), dtype), (index, window)


def test_other_rows_are_left_alone():
    case = Case("float32", 64, 9, 3, 16, [40, 50])
    out = case.attend()
    assert (out[1] == 7.0).all()
    assert (out[3] == 7.0).all()


@pytest.mark.slow
def test_threads_that_attend_at_once_do_not_disturb_one_another():
    """Memory that a kernel allocates must live as long as it computes: numba frees an array after the last
    use of its name, and an address into it then belongs to another allocation. One arena for all threads
    makes that the next thread, instead of once in a thousand runs (a wrong token)."""
    here = str(Path(__file__).parent)
    program = (
        f"import ctypes, sys; sys.path.insert(0, {here!r}); ctypes.CDLL(None).mallopt(-8, 1)\n"
        "import threading; from test_engine_kernels import Case\n"
        "import torch\n"
        "cases = [Case('float32', 64, 9, 3, 16, [47, 33, 300 + n]) for n in range(4)]\n"
        "wanted = [case.attend() for case in cases]\n"
        "wrong = []\n"
        "def work(n):\n"
        "    for _ in range(500):\n"
        "        if not torch.equal(cases[n].attend(), wanted[n]): wrong.append(n)\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "sys.exit(len(wrong))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", [1, 2, 5])
def test_threads_share_rows_and_heads(count):
    """Each (row, head) is computed in one order whoever computes it: the same bits."""
    contexts = [300 + 9 * index for index in range(count)]
    alone = Case("bfloat16", 64, 9, 3, 16, contexts).attend()
    shared = Case("bfloat16", 64, 9, 3, 16, contexts, threads=2).attend()
    assert torch.equal(alone, shared)


def test_a_row_does_not_depend_on_its_batch():
    """Tokens must not change with the neighbours: the same bits alone and among others."""
    case = Case("bfloat16", 64, 9, 3, 16, [300, 200, 100])
    together = case.attend()
    for index in range(3):
        out = torch.empty_like(together)
        arrays = (case.at[index:], case.ends[index:], case.pages, case.first_page[index:])
        case.kernels.attend(
            case.qkv.data_ptr(),
            out.data_ptr(),
            case.k.data_ptr(),
            case.v.data_ptr(),
            *(array.ctypes.data for array in arrays),
            1,
            16,
            0,
            case.scale,
        )
        assert torch.equal(out[case.at[index]], together[case.at[index]])


def test_scores_far_apart_neither_overflow_nor_vanish():
    case = Case("float32", 64, 9, 3, 16, [300])
    case.k.mul_(200.0)
    out = case.attend()
    assert torch.isfinite(out[0]).all()
    assert close(out[0], case.wanted(0), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_not_hidden(dtype):
    case = Case(dtype, 64, 9, 3, 16, [40, 50])
    case.qkv[case.at[0], 0, 5] = float("nan")
    out = case.attend()
    assert torch.isnan(out[case.at[0], 0]).all()
    assert not torch.isnan(out[case.at[1]]).any()
    x, normed, weight = (
        torch.randn(2, 64).to(DTYPES[dtype]),
        torch.empty(2, 64).to(DTYPES[dtype]),
        torch.ones(64),
    )
    x[1, 3] = float("nan")
    case.kernels.norm(x.data_ptr(), normed.data_ptr(), weight.data_ptr(), 2, 64, 1e-6)
    assert torch.isfinite(normed[0]).all()
    assert torch.isnan(normed[1]).all()


#: What is compiled for two threads takes the longest, 8 s for each type.
HOW = [*((1, dtype) for dtype in DTYPES), (2, "bfloat16")]
HOW += [pytest.param(2, dtype, marks=pytest.mark.slow) for dtype in ("float16", "float32")]


@pytest.mark.parametrize(("threads", "dtype"), HOW)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (5, 33), (70, 1024)])
def test_norm(dtype, threads, rows, size):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, size).mul_(3).to(DTYPES[dtype]), torch.randn(size)
    out = torch.empty_like(x)
    kernels = make_kernels(dtype, 64, 9, 3, threads)
    kernels.norm(x.data_ptr(), out.data_ptr(), weight.data_ptr(), rows, size, 1e-5)
    assert close(out, F.rms_norm(x.double(), (size,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize(("threads", "dtype"), HOW)
@pytest.mark.parametrize("normed", [False, True])
def test_turn_rotates_in_place_and_writes_the_pool(dtype, normed, threads):
    torch.manual_seed(0)
    rows, heads, kv_heads, dim = 6, 9, 3, 64
    kernels = make_kernels(dtype, dim, heads, kv_heads, threads)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(DTYPES[dtype])
    angle = torch.rand(rows, dim // 2).repeat(1, 2) * 6
    cos, sin = (part.to(DTYPES[dtype]) for part in (angle.cos(), angle.sin()))
    weight = torch.randn(heads + kv_heads, dim)
    k_pool, v_pool = (torch.zeros(40, kv_heads, dim).to(DTYPES[dtype]) for _ in "kv")
    slots = torch.tensor([3, 4, 39, 0, 17, 18])
    before = qkv.clone()
    kernels.rotary(
        qkv.data_ptr(),
        rows,
        cos.data_ptr(),
        sin.data_ptr(),
        weight.data_ptr() if normed else 0,
        1e-6,
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        slots.data_ptr(),
    )
    wide = before[:, : heads + kv_heads].double()
    if normed:
        wide = F.rms_norm(wide, (dim,), eps=1e-6) * weight.double()
    rotated = torch.cat((-wide[..., dim // 2 :], wide[..., : dim // 2]), -1)
    wanted = wide * cos.double().unsqueeze(1) + rotated * sin.double().unsqueeze(1)
    scale = 4 if normed else 2  # one rounding more, of values up to four
    assert torch.allclose(qkv[:, : heads + kv_heads].double(), wanted, atol=scale * 2 * TOLERANCE[dtype])
    assert torch.equal(qkv[:, heads + kv_heads :], before[:, heads + kv_heads :])
    assert torch.equal(k_pool[slots], qkv[:, heads : heads + kv_heads])
    assert torch.equal(v_pool[slots], qkv[:, heads + kv_heads :])
    others = [slot for slot in range(40) if slot not in slots]
    assert (k_pool[others] == 0).all()
    assert (v_pool[others] == 0).all()


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match="bfloat16"):
        make_kernels("int8", 64, 9, 3, 1)


def test_every_float16_is_widened_exactly():
    widen = numba.njit(lambda item: wide(item))
    halves = np.arange(65536, dtype=np.uint16).view(np.int16)
    got = np.array([widen(half) for half in halves], np.float32)
    wanted = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(wanted)
    assert np.isnan(got[nan]).all()
    assert (got[~nan].view(np.uint32) == wanted[~nan].view(np.uint32)).all()


def test_float32_is_rounded_to_float16_as_numpy_does():
    rounded = ROUNDED["float16"]
    narrow = numba.njit(lambda value: rounded(value))
    exact = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    # each float16 itself, the middle between it and the next one, the floats beside it, and noise
    with np.errstate(invalid="ignore"):
        near = [exact, (exact[:-1] + exact[1:]) / 2, np.nextafter(exact, np.float32(np.inf))]
    values = np.concatenate([*near, np.float32([65519.996, 65520, 1e9, -1e9]), bits.view(np.float32)])
    got = np.array([narrow(value) for value in values], np.int16).view(np.float16)
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16)
    nan = np.isnan(values)
    assert np.isnan(got[nan]).all()
    assert (got[~nan].view(np.uint16) == wanted[~nan].view(np.uint16)).all()


@pytest.mark.slow
def test_a_processor_without_float16_or_wide_vectors_will_do(tmp_path):
    """LLVM ends the process where it misses a conversion."""
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "SEGUE_CACHE": str(tmp_path)}
    here = f"{__file__}::test_norm[5-33-1-float16]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", here],
        env=os.environ | plain,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
