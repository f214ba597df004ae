"""The messages while a model is downloaded and converted."""

from __future__ import annotations

import itertools
import json
import os
import pty
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from segue.cli.commands import models
from segue.engine.models import model_store as store
from segue.kv.errors import ConfigError
from segue.server.settings.commands import DEFAULT_MODEL

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
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line
    ]  # rich before 14.3 ends with an empty one
    assert lines == [f"segue: {stage} m" for stage in STAGES]


def test_what_was_asked_for_is_what_the_store_looks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[Any, ...]] = []

    def resolve_model(model: str, *, cache: object, revision: object, weights: bool, progress: object) -> str:
        asked.append((model, cache, revision, weights))
        return "/somewhere"

    monkeypatch.setattr(store, "resolve_model", resolve_model)
    models.resolve("m", None)
    models.resolve("org/m", str(tmp_path), "v1", weights=False)
    assert asked == [("m", None, None, True), ("org/m", tmp_path, "v1", False)]


def test_a_model_that_is_a_folder_here_is_named_by_its_whole_path_and_the_default_one_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("mine", DEFAULT_MODEL):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert models.located("mine") == str(tmp_path / "mine")
    assert [models.located(name) for name in (DEFAULT_MODEL, "org/other")] == [DEFAULT_MODEL, "org/other"]


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        ({"num_attention_heads": 6, "hidden_size": 48}, 2 * 3 * 2 * 6 * 8),
        ({"num_attention_heads": 6, "head_dim": 16, "hidden_size": 48}, 2 * 3 * 2 * 6 * 16),
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
    ids=["each its own", "heads of another size", "grouped", "latent"],
)
def test_the_kv_of_a_token_is_what_the_pool_will_hold_of_it(
    config: dict[str, object], token_bytes: int, tmp_path: Path
) -> None:
    described = {**config, "num_hidden_layers": 3, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(described))
    for text in (described, {"text_config": described, "hidden_size": 7}):
        (tmp_path / "config.json").write_text(json.dumps(text))
        sizes = [models.model_size(tmp_path, dtype) for dtype in ("bfloat16", "float32")]
        assert [size.token_bytes for size in sizes if size is not None] == [token_bytes, 2 * token_bytes]
        said = [name for name in described if name != "model_type"]
        for name, wrong in itertools.product(said, ("6", True, -6, 0, 6.5, float("nan"), 2**62, [6])):
            broken = {**described, name: wrong}
            (tmp_path / "config.json").write_text(json.dumps(broken))
            with pytest.raises(ConfigError, match=rf"config\.json: {name} is .* a whole number"):
                models.model_size(tmp_path, "bfloat16")
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert models.model_size(tmp_path, "bfloat16") is None
    (tmp_path / "config.json").write_text(json.dumps({**described, "num_hidden_layers": None}))
    assert models.model_size(tmp_path, "bfloat16") is None


@pytest.mark.parametrize("stored", ["float16", "float32"])
def test_weights_take_the_bytes_of_the_type_that_they_are_served_in(stored: str, tmp_path: Path) -> None:
    """A pool is sized for what is free beside them, whatever type their files have."""
    described = {"num_attention_heads": 2, "hidden_size": 4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 64}))
    for name in ("a", "b"):
        save_file({"x": np.zeros((3, 5), stored), "y": np.zeros(7, stored)}, tmp_path / f"{name}.safetensors")
    sizes = [models.model_size(tmp_path, dtype) for dtype in ("bfloat16", "float32")]
    assert [size and size.weight_bytes for size in sizes] == [2 * 44, 4 * 44]
    (tmp_path / "b.safetensors").write_bytes(b"cut")
    assert models.model_size(tmp_path, "float32") is None
