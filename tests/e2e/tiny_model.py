"""A random two-layer model with a byte tokenizer: real arithmetic, loaded in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 256 + 8
CONTEXT_TOKENS = 4096
#: A chat template with tools, whose calls have the form of Hermes.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} answer with <tool_call>\n{% endif %}"
    "{% for m in messages %}<|258|>{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|258|>assistant: {% endif %}"
)


def save(folder: Path, config: Any = None, **sizes: int) -> Path:
    """Write the model into `folder`, the same one each time; with other `sizes`, or of another family if its
    `config` is given."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    sizes = {"hidden_size": 64, "max_position_embeddings": CONTEXT_TOKENS} | sizes
    config = config or LlamaConfig(
        **sizes,
        vocab_size=VOCAB,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=257,
        bos_token_id=256,
        pad_token_id=256,
        # Wider weights make the likeliest token stand out more, but float noise grows faster (75 times
        # from here to 0.5), and a draw that noise decides is not the same twice in any system.
        initializer_range=0.1,
    )
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # by default the delta rule forgets within a token or two
            torch.nn.init.uniform_(parameter, -6, -1)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {character: i for i, character in enumerate(alphabet)}
    words |= {f"<|{i}|>": i for i in range(256, VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|256|>", eos_token="<|257|>")
    fast.save_pretrained(folder)
    return folder
