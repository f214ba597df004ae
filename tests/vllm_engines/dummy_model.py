"""A model of two layers whose answers depend on each token of the prompt, with a tokenizer of 512 words
(`t0` to `t511`): `python dummy_model.py FOLDER '{"num_hidden_layers": 2}'`."""

import json
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
config = LlamaConfig(
    **(sizes | json.loads(sys.argv[2])),
    vocab_size=512,
    max_position_embeddings=2048,
    # Large enough that attention decides which token is next.
    initializer_range=0.2,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
LlamaForCausalLM(config).float().save_pretrained(sys.argv[1])
tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.decoder = decoders.Fuse()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1").save_pretrained(
    sys.argv[1]
)
