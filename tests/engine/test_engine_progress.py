"""A start of a minute is not silent: what is said, and how often."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path

import pytest
from engine_models import engine_for, save_model

from segue.engine.models import progress
from segue.engine.models.progress import counted, step


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "segue.engine")


def test_a_step_says_that_it_begins_and_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    ticks = count(0, 1.5)
    with step("kv_pool", "gib=2.00", clock=lambda: next(ticks)):
        assert caplog.messages == ["event=kv_pool_begins gib=2.00"]
    assert caplog.messages[1:] == ["event=kv_pool_done seconds=1.5"]


def test_a_step_that_fails_is_not_called_done(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), step("weights_loading"):
        raise KeyError
    assert caplog.messages == ["event=weights_loading_begins"]


def test_what_takes_long_is_counted_every_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = {"s": 0.0}
    for item in counted("weights_loading", range(10), 10, clock=lambda: now["s"]):
        now["s"] = 0.5 * (item + 1)
    assert caplog.messages == [f"event=weights_loading done={done} of=10" for done in (4, 8)]


def test_each_step_of_a_start_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    save_model(tmp_path, "llama")
    engine_for(tmp_path, None)
    said = [line.partition(" ")[0].removeprefix("event=") for line in caplog.messages]
    weights = said.count("weights_loading")
    assert weights > 1, "transformers tells how many weights it has"
    # A process compiles its kernels once: an earlier test may have been the first to need them.
    assert [name for name in said if name != "weights_loading" and not name.startswith("kernel")] == [
        *("weights_loading_begins", "weights_loading_done"),
        *("kv_pool_begins", "kv_pool_done", "tokenizer_begins", "tokenizer_done"),
    ]
    assert f"event=weights_loading done={weights - 1} of={weights}" in caplog.messages
