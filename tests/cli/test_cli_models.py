"""What a user sees while a model is fetched and converted."""

from __future__ import annotations

import json
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
            assert select.select([ours], [], [], 60)[0], f"nothing of {stage} in {seen!r}"
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


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}, 2 * 3 * 2 * 2 * 8),
        (
            {
                "model_type": "deepseek_v3",
                "kv_lora_rank": 24,
                "qk_rope_head_dim": 8,
                "num_attention_heads": 6,
                "hidden_size": 48,
            },
            2 * 3 * (24 + 8),
        ),
    ],
    ids=["grouped", "latent"],
)
def test_the_kv_of_a_token_is_what_the_pool_will_hold_of_it(
    config: dict[str, object], token_bytes: int, tmp_path: Path
) -> None:
    described = {**config, "num_hidden_layers": 3, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(described))
    size = models.model_size(tmp_path)
    assert size is not None
    assert size.token_bytes == token_bytes
