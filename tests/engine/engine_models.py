"""Tiny random models and a small driver for tests of the engine."""

import random
from collections import defaultdict

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from segue.engine.cpu.cpu_forward import load_engine
from segue.engine.engine_api import SequenceResult, SequenceStep, run_step
from segue.engine.request import SamplingParams, TokenLogprob

VOCAB = 97
CONTEXT_TOKENS = 4096
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}

#: One dense layer, then two with experts; the latent is 24 + 8 items per token.
LATENT = {
    **BASE,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": CONTEXT_TOKENS // 4,
}
GROUPS = {"q_lora_rank": 20, "n_group": 4, "topk_group": 2}

#: Short convolutions around two layers of attention; the last layer of one has KV, that of the other a state.
CONVOLUTIONS = {**BASE, "head_dim": 8, "num_hidden_layers": 5}
CONV, DELTA, FULL = "conv", "linear_attention", "full_attention"

#: The delta rule: keys, values and both numbers of heads differ. Of 8 items of a head 2 are turned.
DELTA_RULES = {
    **BASE,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}

#: Of each family that keeps a state: its configuration's class, and sizes.
HYBRIDS = {
    "lfm2": (Lfm2Config, {**CONVOLUTIONS, "layer_types": [CONV, CONV, FULL, CONV, FULL]}),
    "qwen3.5": (Qwen3_5TextConfig, {**DELTA_RULES, "layer_types": [DELTA, FULL, DELTA]}),
    "qwen3-next": (Qwen3NextConfig, {**DELTA_RULES, **EXPERTS, "layer_types": [DELTA, DELTA, FULL]}),
}

#: Kernels are compiled for each size of heads, some seconds each, so families share sizes (20 is no whole
#: number of vectors).
FAMILY_CONFIGS = {
    "deepseek-v2": DeepseekV2Config(**LATENT),
    "deepseek-v2-groups-yarn": DeepseekV2Config(
        **{**LATENT, **GROUPS},
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        attention_bias=True,
        rope_parameters=YARN,
    ),
    "deepseek-v3": DeepseekV3Config(**{**LATENT, **GROUPS}, routed_scaling_factor=2.5),
    "deepseek-v3-dense-yarn": DeepseekV3Config(
        **{**LATENT, "first_k_dense_replace": 3}, rope_interleave=False, rope_parameters=YARN
    ),
    **{name: make(**sizes) for name, (make, sizes) in HYBRIDS.items()},
    "lfm2-bias": Lfm2Config(
        **CONVOLUTIONS, layer_types=[CONV, FULL, FULL, CONV, CONV], conv_bias=True, conv_L_cache=5
    ),
    "qwen3-next-bias": Qwen3NextConfig(
        **{**DELTA_RULES, **EXPERTS, "linear_num_value_heads": 2},
        layer_types=[FULL, DELTA, DELTA],
        attention_bias=True,
        linear_conv_kernel_dim=2,
        norm_topk_prob=False,
        rope_parameters={**YARN, "partial_rotary_factor": 0.5},
    ),
    "llama": LlamaConfig(
        **{**BASE, "hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
    ),
    "llama-mha-yarn": LlamaConfig(
        **{**BASE, "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 24},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": CONTEXT_TOKENS // 4,
        },
    ),
    "qwen2": Qwen2Config(**{**BASE, "num_key_value_heads": 1}),
    "qwen2-window": Qwen2Config(**BASE, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": Qwen3Config(**BASE, head_dim=20),
    "mistral": MistralConfig(**BASE, head_dim=20, sliding_window=20),
    "mistral-full": MistralConfig(**BASE, head_dim=8, sliding_window=None),
    "gemma3": Gemma3TextConfig(
        **{**BASE, "num_hidden_layers": 4, "num_key_value_heads": 1},
        head_dim=8,
        sliding_window=18,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=20,
        final_logit_softcapping=30.0,
    ),
    "mixtral": MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3-moe": Qwen3MoeConfig(
        **BASE,
        head_dim=20,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}

#: A token's row and a head as large as DeepSeek-V3's own.
LARGE_ROWS = DeepseekV3Config(
    **{
        **LATENT,
        **GROUPS,
        "hidden_size": 96,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "initializer_range": 0.1,
    }
)


def save_model(folder, family):
    """A random model of `family` (a name or a configuration) in float32. Norm weights are random too, so
    that they matter."""
    torch.manual_seed(7)
    config = FAMILY_CONFIGS[family] if isinstance(family, str) else family
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif name.endswith("A_log"):
                parameter.uniform_(-6, -1)  # by default the delta rule forgets within a token or two
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def generate(folder, prompts, count):
    """The tokens that transformers generates, greedily, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def leads(folder, prompts, outputs):
    """For each prompt: by how much the likeliest token led the second one where it was closest, over the
    tokens of its output, as transformers computes them in one forward; logits in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, -1).values
        found.append(float((best[:, 0] - best[:, 1]).min()))
    return found


def last_logprobs(folder, prompt, dtype):
    """Log-probabilities after `prompt` as transformers computes them, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)


class GreedySampler:
    """The smallest sampler that the runner accepts; keeps the logits it saw."""

    def __init__(self):
        self.tokens = {}
        self.logits = []

    def open(self, seq_id, prompt, sampling, output=()):
        self.tokens[seq_id] = [*prompt, *output]

    def append(self, seq_id, token):
        self.tokens[seq_id].append(token)

    def close(self, seq_id):
        del self.tokens[seq_id]

    def sample(self, seq_ids, logits):
        assert logits.shape[0] == len(seq_ids)
        self.logits.extend(logits.clone())
        chosen = logits.argmax(-1).tolist()
        for seq_id, token in zip(seq_ids, chosen, strict=True):
            self.append(seq_id, token)
        return [SequenceResult(i, token=t) for i, t in zip(seq_ids, chosen, strict=True)]

    def prompt_logprobs(self, seq_id, logits, next_tokens):
        rows = torch.log_softmax(logits.float(), -1)
        return [TokenLogprob(t, float(row[t])) for row, t in zip(rows, next_tokens, strict=True)]


def engine_for(folder, sampler, dtype="float32", pool_pages=128, page_tokens=16, **more):
    engine = load_engine(
        folder, dtype=dtype, pool_bytes=2**26, page_tokens=page_tokens, sampler=sampler, **more
    )
    assert engine.spec.pages >= pool_pages
    return engine


def page_lists(engine, lengths, scatter_seed=None, base=0):
    """Pages for sequences of `lengths` tokens: neighbours, or anywhere if a seed is given."""
    size = engine.spec.page_tokens
    counts = [-(-length // size) for length in lengths]
    pages = list(range(base, base + sum(counts) + 7))
    if scatter_seed is not None:
        draw = random.Random(scatter_seed)
        # Some runs stay whole, so that one run, a few runs and many runs all occur.
        cuts = sorted(draw.sample(range(1, len(pages)), len(pages) // 4))
        runs = [pages[a:b] for a, b in zip([0, *cuts], [*cuts, len(pages)], strict=True)]
        draw.shuffle(runs)
        pages = [page for run in runs for page in run]
    taken = iter(pages)
    return [[next(taken) for _ in range(count)] for count in counts]


def engines(folder, page_tokens=16, pool_bytes=2**23):
    """A function that loads the model in `folder`: an engine and the memory of its pool."""

    def make():
        engine = load_engine(folder, dtype="float32", pool_bytes=pool_bytes, page_tokens=page_tokens)
        return engine, engine.memory

    return make


def references(tmp_path_factory, prompts):
    """A function of a family: a folder with its model, and the 8 tokens that transformers generates for each
    of `prompts`. Each family is made once."""
    made = {}

    def make(family):
        if family not in made:
            folder = save_model(tmp_path_factory.mktemp(family), family)
            made[family] = folder, generate(folder, prompts, 8)
        return made[family]

    return make


def later(*values):
    """Parameters of a case that runs in `make test-slow` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def stored_of(pool, step):
    """The pool's content for a sequence: its KV, and its state as bytes if it has one."""
    state = None if step.slot is None else pool.by_slot[step.slot].clone()
    return pool.by_page[:, :, sorted(step.pages)].clone(), state


def serve(engine, prompts, count, chunk=10**6, scatter_seed=None, budget=None):
    """Run `prompts` to `count` tokens each, mixing chunks of prefill with decodes in every step."""
    pages = page_lists(engine, [len(p) + count for p in prompts], scatter_seed)
    # The last first; a slot still holds what the last run has left there.
    slots = [engine.spec.slots - 1 - at if engine.spec.slots else None for at in range(len(prompts))]
    done = defaultdict(int)
    outputs = [[] for _ in prompts]
    for seq_id, prompt in enumerate(prompts):
        engine.open(seq_id, prompt, SamplingParams(temperature=0.0, max_tokens=count))
    tick = 0
    while any(len(out) < count for out in outputs):
        steps = []
        for seq_id, prompt in enumerate(prompts):
            if len(outputs[seq_id]) == count or seq_id > tick:  # a new sequence joins each step
                continue
            tokens = [*prompt, *outputs[seq_id]]
            part = tokens[done[seq_id] : done[seq_id] + chunk]
            last = done[seq_id] + len(part) == len(tokens)
            steps.append(SequenceStep(seq_id, part, done[seq_id], pages[seq_id], last, slots[seq_id]))
            done[seq_id] += len(part)
        tick += 1
        at_stored = []

        def stored(seq_ids, steps=steps, at_stored=at_stored):
            """KV that may leave at this moment must not change any more."""
            assert sorted(seq_ids) == [step.seq_id for step in steps]
            at_stored.append([stored_of(engine.pool, s) for s in steps])

        results = run_step(engine, steps, stored)
        ((*before,),) = at_stored
        for step, (kv, state) in zip(steps, before, strict=True):
            after, state_after = stored_of(engine.pool, step)
            assert torch.equal(kv.isnan(), after.isnan())
            assert torch.equal(kv.nan_to_num(), after.nan_to_num())
            assert state is None or torch.equal(state, state_after)
        for result in results:
            assert result.error is None, result.error
            if result.token is not None:
                outputs[result.seq_id].append(result.token)
    for seq_id in range(len(prompts)):
        engine.close(seq_id)
    return outputs
