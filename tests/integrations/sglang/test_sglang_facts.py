"""What is read from SGLang's objects, with doubles that have the same attributes."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace as Double
from typing import Any

import pytest

from segue.integrations.prompt_claim import Media
from segue.integrations.served_weights import AdapterFingerprints
from segue.integrations.sglang.sglang_facts import prompt_of, served_model
from segue.kv import ConfigError


def args(path: Path | str, **changes: Any) -> Double:
    fields = {
        "model_path": str(path),
        "revision": None,
        "load_format": "auto",
        "random_seed": 1,
        "quantization": None,
        "json_model_override_args": "{}",
        "context_length": None,
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
    }
    return Double(**{**fields, **changes})


def model(folder: Path, weights: bytes = b"w" * 5000, **configuration: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **configuration}))
    return folder


def test_two_fine_tunes_with_equal_names_and_sizes_are_two_models(tmp_path: Path) -> None:
    one, same, other, wider = (
        model(tmp_path / "a"),
        model(tmp_path / "b", transformers_version="5.0"),
        model(tmp_path / "c", b"w" * 4999 + b"x"),
        model(tmp_path / "d", hidden_size=16),
    )
    assert served_model(args(one)) == served_model(args(same))
    found = {served_model(args(path)) for path in (one, other, wider)}
    assert len(found) == 3
    found.add(served_model(args(one, quantization="fp8")))
    found.add(served_model(args(one, json_model_override_args='{"rope_theta": 1}')))
    assert len(found) == 5


def test_a_draft_models_weights_are_a_part_of_the_model(tmp_path: Path) -> None:
    one = model(tmp_path / "a")
    drafts = [model(tmp_path / "b", b"x" * 5000), model(tmp_path / "c", b"y" * 5000)]
    alone = served_model(args(one))
    assert served_model(args(one, speculative_draft_model_path=str(one))) == alone, "its own layers draft"
    both = [served_model(args(one, speculative_draft_model_path=str(draft))) for draft in drafts]
    assert len({alone, *both}) == 3


def test_weights_that_are_not_here_are_known_by_name(tmp_path: Path) -> None:
    assert served_model(args("nobody/a")) == served_model(args("nobody/a", random_seed=7))
    assert served_model(args("nobody/a")) != served_model(args("nobody/a", revision="main"))
    random = [args(model(tmp_path / "a"), load_format="dummy", random_seed=seed) for seed in (1, 2)]
    assert served_model(random[0]) != served_model(random[1])
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        served_model(args(tmp_path / "a"))


def req(**changes: Any) -> Double:
    fields = {
        "lora_id": None,
        "cache_salt": "salt",
        "multimodal_inputs": None,
        "input_embeds": None,
        "positional_embed_overrides": None,
    }
    return Double(**{**fields, **changes})


def queue(**refs: Double) -> Double:
    runner = Double(lora_manager=Double(lora_refs=refs))
    return Double(scheduler=Double(tp_worker=Double(model_runner=runner)))


def test_a_prompt_with_all_that_its_kv_depends_on(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"w" * 100)
    loaded = queue(
        one=Double(lora_name="a", lora_path=str(adapter)), sent=Double(lora_name="b", lora_path=None)
    )
    found, tokens = AdapterFingerprints(), array("q", [1, 2, 3])
    plain = prompt_of(loaded, req(), tokens, found)
    assert (plain.tokens, plain.cache_salt, plain.lora_name, plain.embeds) == (tokens, "salt", None, False)
    adapted = prompt_of(loaded, req(lora_id="one"), tokens, found)
    assert adapted.lora_name == "a"
    assert adapted.lora_weights
    for name in ("sent", "gone"):
        unknown = prompt_of(loaded, req(lora_id=name), tokens, found)
        assert (bool(unknown.lora_name), unknown.lora_weights) == (True, None)
    image = Double(modality="IMAGE", hash=7, offsets=[(1, 2)])
    pictured = prompt_of(loaded, req(multimodal_inputs=Double(mm_items=[image])), tokens, found)
    assert pictured.media == (Media("IMAGE 7", 1, 1),)
    for given in ({"input_embeds": [[0.5]]}, {"positional_embed_overrides": object()}):
        assert prompt_of(loaded, req(**given), tokens, found).embeds
