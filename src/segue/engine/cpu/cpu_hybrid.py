"""Decoder layers that keep a state of fixed size instead of KV."""

from __future__ import annotations

from inspect import unwrap
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.engine.cpu.cpu_attention import StepContext
from segue.engine.cpu.cpu_products import FeedForward, ProductMaker


class StateLayer(nn.Module):
    """A layer with a state over rows `[n, hidden]`, called by transformers' own model in place of its own.
    `index` counts these layers."""

    def __init__(self, layer: Any, index: int, make: ProductMaker) -> None:
        super().__init__()
        parts = dict(layer.named_children())
        self.mixer: _Mixer
        if "conv" in parts:
            self.mixer = ShortConvolution(layer.conv, index, make)
        else:
            self.mixer = DeltaRule(layer.linear_attn, index, make)
        self.input_norm = make.norm(layer.input_layernorm)
        self.mlp_norm = make.norm(layer.post_attention_layernorm)
        self.feed_forward = FeedForward(layer.mlp, make)

    def forward(self, hidden_states: Tensor, *, segue_step: StepContext, **_unused: object) -> Tensor:
        x = hidden_states[0] if hidden_states.dim() == 3 else hidden_states
        rows, normed = segue_step.rows, segue_step.normed
        x = self.mixer.plus(self.input_norm(x, rows, normed), x, segue_step)
        return self.feed_forward.plus(self.mlp_norm(x, rows, normed), x)

    __call__ = forward  # no hooks are ever registered: spare the dispatch


class _Mixer(Protocol):
    """A layer's operation across the tokens of a sequence."""

    def plus(self, normed: Tensor, x: Tensor, step: StepContext) -> Tensor:
        """The output for the rows `normed`, plus `x`; advances the state of their sequences."""
        ...


class ShortConvolution:
    """The gated short convolution of lfm2."""

    def __init__(self, conv: Any, index: int, make: ProductMaker) -> None:
        self._index = index
        self._gates = make.joined(conv.in_proj)
        self._weight, self._bias = _by_position(conv.conv)
        self._out = make.summed(conv.out_proj)

    def plus(self, normed: Tensor, x: Tensor, step: StepContext) -> Tensor:
        before, after, inputs = self._gates(normed).chunk(3, -1)
        past = step.state.tensor(0, self._index)
        convolved = step.state.convolve(past, before * inputs, self._weight, self._bias)
        step.layer_stored()
        return self._out.plus(convolved.to(x.dtype).mul_(after), x)


class DeltaRule:
    """The gated delta rule of qwen3_next and qwen3_5_text, behind a short convolution; in float32 between its
    products, and computed by transformers' own functions."""

    def __init__(self, mixer: Any, index: int, make: ProductMaker) -> None:
        from transformers.models.qwen3_next import modeling_qwen3_next as library

        # unwrapped: transformers would put kernels of other packages in their place, which are for GPUs
        self._one_token = unwrap(library.torch_recurrent_gated_delta_rule)
        self._many_tokens = unwrap(library.torch_chunk_gated_delta_rule)
        self._index = index
        inputs = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        self._inputs = make.joined(*inputs)
        self._sizes = [product.out_features for product in inputs]
        self._weight, self._bias = _by_position(mixer.conv1d)
        self._activation = make.activation
        self._parts = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
        self._key_items, self._value_items = mixer.head_k_dim, mixer.head_v_dim
        #: value heads that share a key head
        self._group = mixer.num_v_heads // mixer.num_k_heads
        self._rate = -mixer.A_log.detach().float().exp()
        self._rate_bias = mixer.dt_bias.detach().float()
        self._norm = mixer.norm
        self._out = make.summed(mixer.out_proj)

    def plus(self, normed: Tensor, x: Tensor, step: StepContext) -> Tensor:
        state = step.state
        inputs, gates, betas, decays = torch.split(self._inputs(normed), self._sizes, -1)
        convolved = state.convolve(state.tensor(0, self._index), inputs, self._weight, self._bias)
        query, key, value = torch.split(self._activation(convolved), self._parts, -1)
        made = state.recur(
            state.tensor(1, self._index),
            self._rule,
            value.view(len(x), -1, self._value_items),
            query.view(len(x), -1, self._key_items).repeat_interleave(self._group, 1),
            key.view(len(x), -1, self._key_items).repeat_interleave(self._group, 1),
            F.softplus(decays.float() + self._rate_bias).mul_(self._rate),
            betas.float().sigmoid_(),
        )
        step.layer_stored()
        gated = self._norm(made.view(-1, self._value_items), gates.reshape(-1, self._value_items))
        return self._out.plus(gated.view(len(x), -1).to(x.dtype), x)

    def _rule(
        self, past: Tensor, value: Tensor, query: Tensor, key: Tensor, decay: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `StepState.recur`."""
        rule = self._one_token if query.shape[1] == 1 else self._many_tokens
        made, state = rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=past,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return made, state


def _by_position(conv: nn.Conv1d) -> tuple[Tensor, Tensor | None]:
    """The weight of a convolution of each channel, `[width, channels]`, and its bias, in float32."""
    bias = None if conv.bias is None else conv.bias.detach().float()
    return conv.weight.detach().squeeze(1).t().float().contiguous(), bias
