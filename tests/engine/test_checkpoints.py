"""Checkpoints that do not say the same everywhere: weights that are missing or left over, ends of a sequence,
scaled rotary embeddings."""

import json

import gguf
import pytest
import torch
from engine_models import VOCAB, GreedySampler, engine_for, save_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from segue.engine.models.gguf_options import apply_rope, end_tokens
from segue.engine.models.model_loading import load_model
from segue.engine.models.model_registry import known_families
from segue.kv.errors import ConfigError
from segue.server.frontend.frontend_process import model_bounds
from segue.server.frontend.tokenizer import ModelTokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp("model"), family)
        return made[family]

    return folder


def changed(source, folder, weights=None, **config):
    """The model in `source` with another configuration, and with weights that `weights` has changed."""
    folder.mkdir(exist_ok=True)
    values = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(source / "model.safetensors")
    if weights is not None:
        weights(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- weights ----------------------------------------------------------------------------------


def without(name):
    return lambda weights: weights.pop(name)


def with_more(name):
    return lambda weights: weights.update({name: torch.zeros(3)})


def with_prefix(weights):
    for name in list(weights):
        weights[f"base_model.model.{name}"] = weights.pop(name)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        (
            "llama",
            without("model.layers.1.mlp.up_proj.weight"),
            r"lacks model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        ("llama", without("lm_head.weight"), r"lacks lm_head\.weight"),
        ("llama", with_prefix, r"lacks lm_head\.weight, model\.embed_tokens.* and \d+ more"),
        ("gemma3", without("model.embed_tokens.weight"), r"model\.embed_tokens\.weight"),
        (
            "qwen3-moe",
            without("model.layers.0.mlp.experts.1.down_proj.weight"),
            r"experts.*\(3, 48, 32\) for",
        ),
        (
            "deepseek-v3",
            without("model.layers.1.mlp.gate.e_score_correction_bias"),
            "e_score_correction_bias",
        ),
        (
            "llama",
            with_more("model.layers.1.self_attn.q_proj.bias"),
            r"has .*q_proj\.bias.*: not of the model",
        ),
        (
            "llama",
            with_more("model.layers.1.self_attn.q_proj.lora_A.weight"),
            r"lora_A\.weight.*: not of the model",
        ),
        ("llama", with_more("model.layers.3.mlp.up_proj.weight"), r"layers\.3.*: not of the model"),
        ("llama", with_more("lm_head.bias"), r"lm_head\.bias.*: not of the model"),
    ],
)
def test_a_checkpoint_that_is_not_the_configured_model_is_refused(folders, tmp_path, family, change, words):
    changed(folders(family), tmp_path, change)
    with pytest.raises(ConfigError, match=words):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", with_more("model.layers.0.self_attn.rotary_emb.inv_freq")),  # of old checkpoints
        ("llama", with_more("visual.patch_embed.weight")),
        ("llama", with_more("score.weight")),
        ("gemma3", lambda weights: None),  # its head is its embedding
        (
            "gemma3",
            lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
        ),
        ("deepseek-v3", with_more("model.layers.3.eh_proj.weight")),  # predicts a second token
    ],
)
def test_weights_that_other_models_share_the_file_with_are_let_be(folders, tmp_path, family, change):
    changed(folders(family), tmp_path, change, num_nextn_predict_layers=1)
    assert load_model(tmp_path, "float32").shape.layers >= 3


# --- ends of a sequence -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        (5, None, None, {5}),
        (5, None, "<|8|>", {5, 8}),
        (None, None, "<|8|>", {8}),
        ([5, 6], {"eos_token_id": [7, 5]}, "<|8|>", {5, 6, 7, 8}),
        (5, {"eos_token_id": None}, None, {5}),
        (VOCAB, {}, "<|8|>", {8}),  # an id that no token has
    ],
)
def test_a_sequence_ends_at_every_token_that_anybody_names(
    folders, tmp_path, config, generation, tokenizer, ends
):
    changed(folders("llama"), tmp_path, eos_token_id=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        words = Tokenizer(WordLevel({f"<|{i}|>": i for i in range(VOCAB)}, "<|0|>"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=tokenizer).save_pretrained(tmp_path)
    assert engine_for(tmp_path, GreedySampler()).info.eos_token_ids == ends


# --- how long a sequence may be ---------------------------------------------------------------

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
NESTED = {"full_attention": YARN | {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("family", "values", "tokens"),
    [
        ("qwen3", {}, 256),
        ("qwen3", {"rope_scaling": YARN}, 1024),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.5}}, 640),
        ("qwen3", {"rope_scaling": YARN | {"factor": None}}, 256),
        ("qwen3", {"rope_scaling": YARN, "max_position_embeddings": 2048}, 2048),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 256),
        ("deepseek_v3", {"rope_scaling": YARN | {"factor": 40, "mscale": 1.0}}, 256 * 40),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 256),
        ("gemma3_text", {"rope_parameters": NESTED}, 256),
    ],
)
def test_a_scaled_rotary_embedding_makes_the_context_longer(family, values, tokens):
    config = {"max_position_embeddings": 256} | values
    assert known_families()[family].context_tokens(config) == tokens


@pytest.mark.parametrize("scaling", [YARN | {"factor": "4"}, YARN | {"factor": float("inf")}])
def test_a_scaling_that_is_no_number_is_refused(scaling):
    with pytest.raises(ConfigError, match="rope scaling"):
        known_families()["llama"].context_tokens({"max_position_embeddings": 256, "rope_scaling": scaling})


def test_the_engine_and_the_frontend_serve_the_longer_context(folders, tmp_path):
    changed(
        folders("llama"), tmp_path, max_position_embeddings=256, rope_parameters=YARN | {"rope_theta": 1e4}
    )
    assert load_model(tmp_path, "float32").context_tokens == 1024
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    assert model_bounds(tmp_path, ModelTokenizer(words)) == (1024, VOCAB)


# --- GGUF -------------------------------------------------------------------------------------


def header(path, architecture="llama", tensors=None, tokens=(), **values):
    """A reader of a GGUF file with these values (`__` for a dot) and tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in values.items():
        key = f"{architecture}.rope.{name.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    if tokens:
        writer.add_token_list(list(tokens))
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


def llama(**more):
    return LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=1024, **more)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def divisors(**more):
    """The tensor of frequencies that llama.cpp makes of Llama 3's scaling, from transformers' frequencies."""
    config = llama(rope_parameters=LLAMA3 | more)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    return {"rope_freqs.weight": (plain / scaled).numpy().astype("float32")}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"scaling__type": "none", "scaling__factor": 4.0}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"scaling__type": "linear", "scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # of old files
        ({"scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 256},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0},
        ),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__yarn_beta_fast": 16.0},
            {"beta_fast": 16.0, "beta_slow": 1.0, "original_max_position_embeddings": 1024},
        ),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__attn_factor": 0.5},
            {"attention_factor": pytest.approx(0.5 * 1.1386294)},
        ),
        ({"freq_base": 5e5, "tensors": divisors()}, LLAMA3),
        ({"freq_base": 5e5, "tensors": divisors(factor=8.0)}, LLAMA3 | {"factor": 8.0}),
    ],
)
def test_the_rotary_scaling_of_a_gguf_file_is_kept(tmp_path, values, wanted):
    config = llama()
    apply_rope(header(tmp_path / "m.gguf", **values), config)
    assert {name: config.rope_parameters[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scaling__type": "longrope", "scaling__factor": 4.0}, "scaling.type is longrope"),
        ({"tensors": {"rope_factors_long.weight": divisors()["rope_freqs.weight"]}}, "longrope"),
        ({"scaling__attn_factor": 2.0}, "scaling.attn_factor is 2.0"),
        ({"scaling__factor": 4.0, "scaling__attn_factor": 2.0}, "scaling.attn_factor is 2.0"),
        ({"scaling__type": "yarn", "scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"scaling__type": "yarn", "scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"scaling__new_option": 1.0}, "scaling.new_option"),
        ({"dimension_count": 32}, "dimension_count is 32 of 64 items"),
        ({"freq_base": 1e4, "freq_base_swa": 5e5}, "freq_base_swa"),
        ({"freq_base": 1e4, "tensors": divisors()}, "rope_freqs.weight"),  # other frequencies than these
        ({"freq_base": 5e5, "scaling__factor": 2.0, "tensors": divisors()}, "linear beside the tensor"),
    ],
)
def test_a_rotary_embedding_that_cannot_be_converted_is_refused_by_name(tmp_path, values, words):
    with pytest.raises(ConfigError, match=words):
        apply_rope(header(tmp_path / "m.gguf", **values), llama())


def test_the_scaling_of_gemma3_is_that_of_its_full_attention(tmp_path):
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    values = {"freq_base": 1e6, "scaling__type": "linear", "scaling__factor": 8.0}
    apply_rope(header(tmp_path / "m.gguf", "gemma3", **values), config)
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    assert (full["rope_type"], full["factor"], full["rope_theta"]) == ("linear", 8.0, 1e6)
    assert (sliding["rope_type"], sliding["rope_theta"]) == ("default", 1e4)


def test_a_gguf_file_ends_at_its_eos_its_eot_and_marks_of_a_turn_s_end(tmp_path):
    tokens = ["</s>", "a", "<turn>", "<|im_end|>", "<|im_start|>", "<|eot_id|>"]
    assert end_tokens(header(tmp_path / "m.gguf", tokens=tokens)) == [0, 2, 3, 5]
