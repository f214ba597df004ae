"""How the process that runs a model treats freed memory."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEEP_BYTES = 2**30


def keep_freed_memory() -> None:
    """Let malloc keep what a step frees, for the next step.

    By default glibc gives blocks of megabytes (activations, logits) back to the kernel, and each
    step pays for their page faults again. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
