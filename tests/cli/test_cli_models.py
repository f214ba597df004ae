"""What a user sees while a model is fetched and converted."""

from __future__ import annotations

import os
import pty
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from segue.cli import models
from segue.engine import store

STAGES = ("download", "unpack", "convert")
TOTAL = 100_000_000


def fake_store(monkeypatch: pytest.MonkeyPatch, shown: Callable[[str, int], None]) -> None:
    """A store that is half through each stage when it calls `shown`, and then done with it."""

    def resolve_model(_model: str, *, progress: store.Progress, **_: object) -> Path:
        for stage in STAGES:
            progress(stage, TOTAL // 2, TOTAL)
            shown(stage, TOTAL // 2)
            progress(stage, TOTAL, TOTAL)
        return Path("/somewhere")

    monkeypatch.setattr(store, "resolve_model", resolve_model)


def test_on_a_terminal_a_bar_says_which_stage_and_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()

    def shown(stage: str, _done: int) -> None:
        seen = ""
        while f"{stage} m" not in seen or "50.0/100.0 MB" not in seen.split(f"{stage} m")[-1]:
            assert select.select([ours], [], [], 10)[0], f"nothing of {stage} in {seen!r}"
            seen += os.read(ours, 65536).decode()
        assert "━" in seen, "there is no bar"

    fake_store(monkeypatch, shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert models.resolve("m", None) == Path("/somewhere")
    os.close(ours)


def test_in_a_log_each_stage_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_store(monkeypatch, lambda _stage, _done: None)
    assert models.resolve("m", None) == Path("/somewhere")
    assert capsys.readouterr().err.splitlines() == [f"segue: {stage} m" for stage in STAGES]
