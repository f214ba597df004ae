"""Looks into the processes of an SGLang engine, and disturbs them, by files of the folder SGLANG_PROBE.

| file | |
|---|---|
| `digests` | written: a line for each half that succeeded, with a digest of each page |
| `sizes-ROLE-PID` | written each 0.1 s: the entries of each table of the hand-offs |
| `hold` | while it exists, prefill sends no chunk of a request but the first |
| `fail-RANK` | prefill's rank of this number fails its next last chunk, after 1 s |
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import xxhash

from segue.integrations.sglang import sglang_handoffs
from segue.integrations.sglang.sglang_handoffs import RankHandoffs, ReceiverHalf, RoomHalf, SenderHalf
from segue.integrations.sglang.sglang_phases import SglPoll
from segue.kv import TransferFailed

#: tables of SGLang's own manager by rooms
SGLANG_TABLES = ("addr_to_rooms_tracker", "request_status", "failure_records", "transfer_infos")


def install(folder: Path) -> None:
    """Wrap the hand-offs of this process."""

    class ProbedSender(SenderHalf):
        def send(self, pages: Any, event: Any = None) -> None:
            if self.pages and (folder / "hold").exists():
                event = _Held(folder / "hold")
            if len(self.pages) + len(pages) == self.units and _takes_failure(folder):
                threading.Timer(1.0, self.fail, [TransferFailed("a rank of the test")]).start()
                return
            super().send(pages, event)

        def _phase(self) -> SglPoll:
            return _noted(self, super()._phase(), "prefill", self.pages, 0)

    class ProbedReceiver(ReceiverHalf):
        def _phase(self) -> SglPoll:
            return _noted(self, super()._phase(), "decode", self._pages, self._prefix)

    def _noted(half: RoomHalf, phase: SglPoll, role: str, pages: list[int], prefix: int) -> SglPoll:
        if phase is SglPoll.SUCCESS:
            line = {
                "role": role,
                "pid": os.getpid(),
                "room": half.room,
                "prefix": prefix,
                "pages": digests(half.handoffs, pages),
            }
            with (folder / "digests").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return phase

    original = RankHandoffs.start

    def start(self: RankHandoffs) -> tuple[str, int]:
        manager = sys._getframe(1).f_locals["self"]  # SGLang's, which has tables of its own
        threading.Thread(target=_write_sizes, args=(folder, self, manager), daemon=True).start()
        return original(self)

    RankHandoffs.start = start  # type: ignore[method-assign]
    sglang_handoffs.SenderHalf = ProbedSender  # type: ignore[misc]
    sglang_handoffs.ReceiverHalf = ProbedReceiver  # type: ignore[misc]


def digests(handoffs: RankHandoffs, pages: list[int]) -> list[str]:
    """A digest of each page over all layers."""
    found = []
    for page in pages:
        digest = xxhash.xxh3_64()
        for plane in handoffs.pool.spec.planes:
            at = handoffs.pool.memory.regions[plane.region].address + page * plane.page_stride
            digest.update(ctypes.string_at(at, plane.page_stride))
        found.append(digest.hexdigest())
    return found


class _Held:
    """An event of SGLang that comes when the file is gone."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def synchronize(self) -> None:
        while self._file.exists():
            time.sleep(0.01)


def _takes_failure(folder: Path) -> bool:
    from sglang.srt.runtime_context import get_parallel

    try:
        (folder / f"fail-{get_parallel().attn_tp_rank}").unlink()
    except FileNotFoundError:
        return False
    return True


def _write_sizes(folder: Path, handoffs: RankHandoffs, manager: Any) -> None:
    path = folder / f"sizes-{handoffs.manager.config.role.value}-{os.getpid()}"
    draft = path.with_name(path.name + ".new")
    while True:
        tables = {f"SGLang's {name}": len(getattr(manager, name, ())) for name in SGLANG_TABLES}
        draft.write_text(json.dumps(handoffs.sizes() | tables))
        draft.replace(path)
        time.sleep(0.1)
