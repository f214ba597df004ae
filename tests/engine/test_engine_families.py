"""Each supported family against `transformers` generate: greedy, float32, exact tokens."""

import functools
import json
import random
import subprocess
import sys

import pytest
import torch
from engine_models import (
    BASE,
    FAMILY_CONFIGS,
    LARGE_ROWS,
    GreedySampler,
    engine_for,
    generate,
    last_logprobs,
    save_model,
    serve,
)
from transformers import SeedOssConfig

from segue.engine.models import families
from segue.engine.models.model_loading import read_config
from segue.engine.models.model_registry import known_families
from segue.kv.errors import ConfigError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family.replace("/", "-")), family)
        return made[family]

    return folder


def prompts_of(lengths, vocab_size=97, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size) for _ in range(n)] for n in lengths]


PROMPTS = prompts_of([1, 2, 15, 16, 17, 33, 64, 100, 300])


@pytest.fixture(scope="module")
def wanted(folders):
    """The tokens that transformers generates for `PROMPTS`, once per family."""
    return functools.cache(lambda family: generate(folders(family), PROMPTS, 12))


@pytest.mark.parametrize("family", sorted(FAMILY_CONFIGS))
@pytest.mark.parametrize("chunk", [16, 64, 1000])
def test_tokens_equal_generate(folders, wanted, family, chunk):
    engine = engine_for(folders(family), GreedySampler())
    assert serve(engine, PROMPTS, 12, chunk=chunk, scatter_seed=chunk) == wanted(family)


@pytest.mark.slow
def test_rows_of_the_size_of_deepseek_v3(tmp_path):
    folder = save_model(tmp_path, LARGE_ROWS)
    engine = engine_for(folder, GreedySampler())
    assert serve(engine, PROMPTS, 12, chunk=64, scatter_seed=1) == generate(folder, PROMPTS, 12)


def test_every_family_on_the_list_is_tested():
    assert {config.model_type for config in FAMILY_CONFIGS.values()} == set(known_families())


def test_a_family_is_added_by_adding_a_file(tmp_path, monkeypatch, request):
    folder = save_model(tmp_path / "model", SeedOssConfig(**BASE, head_dim=20))
    with pytest.raises(ConfigError, match="'seed_oss' are not supported"):
        read_config(folder)
    (tmp_path / "seed.py").write_text(
        "from segue.engine.models.model_registry import ModelFamily\nFAMILIES = {'seed_oss': ModelFamily()}\n"
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    request.addfinalizer(lambda: sys.modules.pop(f"{families.__name__}.seed", None))
    engine = engine_for(folder, GreedySampler())
    assert serve(engine, PROMPTS[:6], 6, chunk=16) == generate(folder, PROMPTS[:6], 6)


def test_families_are_known_without_torch():
    code = (
        "import sys; from segue.engine.models.model_registry import known_families; "
        "print(len(known_families()), {'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(known_families())), "set()"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "gpt2.*supported are deepseek_v2, deepseek_v3, gemma3_text, lfm2, llama"),
        ({"model_type": "gemma3"}, r"its text model alone is gemma3_text\)"),
        ({"model_type": "qwen3_5"}, r"its text model alone is qwen3_5_text\)"),
        ({"model_type": None}, "None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantization_config"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folders, tmp_path, change, text):
    config = json.loads((folders("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=text):
        read_config(tmp_path)


@pytest.mark.parametrize("change", [{"attn_logit_softcapping": 50.0}, {"use_bidirectional_attention": True}])
def test_options_that_attention_would_ignore_are_refused(folders, tmp_path, change):
    config = json.loads((folders("gemma3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=next(iter(change))):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}),
        ("deepseek-v2", {"norm_topk_prob": True}),
        ("deepseek-v2", {"scoring_func": "sigmoid"}),
        ("deepseek-v2", {"moe_layer_freq": 2}),
        ("deepseek-v2", {"num_key_value_heads": 2}),
        ("deepseek-v3", {"topk_method": "greedy"}),
        ("deepseek-v3", {"scoring_func": "softmax"}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_options_of_latent_attention_that_are_not_computed_are_refused(folders, tmp_path, family, change):
    config = json.loads((folders(family) / "config.json").read_text())
    config |= {"topk_method": "greedy"} if family == "deepseek-v2" else {"topk_method": "noaux_tc"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=next(iter(change))):
        read_config(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a model folder"):
        read_config(tmp_path / "missing")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a model folder"):
        read_config(tmp_path)


#: Their arithmetic is llama's, with windows and biases that others have too.
LIKE_LLAMA = ("qwen2", "qwen2-window", "mistral", "mistral-full", "lfm2-bias", "qwen3-next-bias")


# Every family in the usual type; in float16, whose rounding is nobody's but the kernels', two will do. Almost
# all of the time is taken by compiling, once for each type and size of heads.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in sorted(FAMILY_CONFIGS) if family not in LIKE_LLAMA),
        *(pytest.param(family, "bfloat16", marks=pytest.mark.slow) for family in LIKE_LLAMA),
        ("llama", "float16"),
        pytest.param("qwen3", "float16", marks=pytest.mark.slow),
    ],
)
def test_half_precision_is_as_close_to_float32_as_transformers(folders, family, dtype):
    """The engine's rounding, over chunks and decodes, is no worse than transformers' own."""
    (prompt,) = prompts_of([50])
    exact = last_logprobs(folders(family), prompt, torch.float32)
    theirs = (last_logprobs(folders(family), prompt, getattr(torch, dtype)) - exact).abs().mean()
    sampler = GreedySampler()
    serve(engine_for(folders(family), sampler, dtype=dtype), [prompt], 1, chunk=16)
    ours = (torch.log_softmax(sampler.logits[0].float(), -1) - exact).abs().mean()
    assert ours < 2 * theirs + 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_is_computed_where_packing_is_refused(folders, family, monkeypatch):
    """As on a processor below AVX-512, whatever this one is."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    test_half_precision_is_as_close_to_float32_as_transformers(folders, family, "bfloat16")
