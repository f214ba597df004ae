"""Replaces the decoder layers of a loaded model by ones with fewer, larger operations.

Same mathematics, other grouping: q, k and v in one product; weights packed once for oneDNN where that
is faster (bfloat16 with AVX-512 or AMX; measured for float32 and float16: no gain); activation, gating
and residual folded into the products; norms in the cheapest of torch's forms. Every family's fused
layers are compared with transformers' own by the tests; a layer of an unknown make is left alone.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.engine.cpu.cpu_attention import StepContext
from segue.engine.cpu.cpu_kernels import Kernels
from segue.engine.models.model_loading import LoadedModel, has_attention
from segue.engine.ranks.collectives import Place, TensorGroup
from segue.engine.ranks.slicing import AbsentLayer
from segue.kv import ConfigError, Internal

#: Tokens per row that may tie for the best logit and are told apart; more say that nothing is known.
MAX_TIES = 256

#: oneDNN's name and algorithm of the activations that it can fold into a product.
_ACTIVATIONS = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none")}


def packs_bfloat16() -> bool:
    """Whether bfloat16 weights can be packed here. oneDNN refuses below AVX-512; on ARM torch's own products
    use its kernels already, and packed ones are not measured."""
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if platform.machine() != "x86_64" or not there:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Product(Protocol):
    """`x W^T + b` over rows `[n, in]`, and the same plus something."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`."""
        ...


class GatedProduct(Product, Protocol):
    """And with what else may follow folded in."""

    def activated(self, x: Tensor) -> Tensor:
        """The product through the model's activation."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, times `other` element by element. May reuse `other`'s memory."""
        ...


class PackedProduct:
    """A product whose weights lie in the order oneDNN's kernels read them in."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias
        self._activation, self._algorithm = _ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._unary(x, self.weight, self.bias, "none", [], "")
        return out

    def activated(self, x: Tensor) -> Tensor:
        out: Tensor = self._unary(x, self.weight, self.bias, self._activation, [], self._algorithm)
        return out

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self._binary(x, other, self.weight, self.bias, "mul")
        return out

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self._binary(x, other, self.weight, self.bias, "add")
        return out


class PlainProduct:
    """A product by torch's own kernel, for types where packing gains nothing or is refused."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Any) -> None:
        self.weight = weight
        self.bias = bias
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def activated(self, x: Tensor) -> Tensor:
        out: Tensor = self._activation(F.linear(x, self.weight, self.bias))
        return out

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(other)


class SummedProduct:
    """A product whose inner items are shared out over ranks: each has some columns of the weight."""

    def __init__(self, product: Product, group: TensorGroup) -> None:
        self._product = product
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum(self._product(x))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)


class FusedNorm:
    """Root mean square norm over the last dimension; `weight` is float32 `[size]`."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self.weight = weight
        self.eps = eps
        self.size = weight.shape[-1]
        self._kernel = kernels.norm
        self._weight_at = weight.data_ptr()

    def __call__(self, x: Tensor, rows: int, out: Tensor) -> Tensor:
        """The norm of each row of `x` (`[rows, size]`, contiguous), in `out`, which is returned."""
        self._kernel(x.data_ptr(), out.data_ptr(), self._weight_at, rows, self.size, self.eps)
        return out


class NormModule(nn.Module):
    """A norm in a place where transformers' model wants a module."""

    def __init__(self, norm: FusedNorm) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, x.numel() // self._norm.size, torch.empty_like(x))


class FeedForward:
    """What follows the attention of a layer: dense, or transformers' own mixture of experts."""

    def __init__(self, mlp: Any, make: ProductMaker) -> None:
        self.mixture: Any = None
        if {name for name, _ in mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
            self._gate, self._up = make.joined(mlp.gate_proj), make.joined(mlp.up_proj)
            self._down = make.summed(mlp.down_proj)
        else:
            self.mixture = mlp
        self._ranks = make.tp

    def __call__(self, normed: Tensor) -> Tensor:
        """What it makes of the rows `normed`."""
        if self.mixture is None:
            return self._down(self._inner(normed))
        mixed: Tensor = self.mixture(normed.unsqueeze(0))[0]
        return mixed if self._ranks is None else self._ranks.sum(mixed)

    def plus(self, normed: Tensor, x: Tensor) -> Tensor:
        """The same plus `x`."""
        return self._down.plus(self._inner(normed), x) if self.mixture is None else self(normed).add_(x)

    def _inner(self, normed: Tensor) -> Tensor:
        return self._up.times(normed, self._gate.activated(normed))


class FusedLayer(nn.Module):
    """One decoder layer over rows `[n, hidden]`, called by transformers' own model in place of its own.
    `index` counts the layers that are here. The `last` one computes after its attention only the rows that
    are wanted of it."""

    def __init__(self, layer: Any, index: int, loaded: LoadedModel, make: ProductMaker) -> None:
        super().__init__()
        attn = layer.self_attn
        self.last = False
        self.index = index
        self.window = loaded.windows[index]
        self.scale = float(attn.scaling)
        self.head_dim = loaded.shape.k_dim
        self.kv_heads = loaded.part.heads
        self.heads = loaded.heads
        self.qkv = make.joined(attn.q_proj, attn.k_proj, attn.v_proj)
        self.o = make.summed(attn.o_proj)
        names = {name for name, _ in attn.named_children()}
        sandwich = "pre_feedforward_layernorm" in dict(layer.named_children())
        self.out_gate = make.joined(attn.gate_proj) if "gate_proj" in names else None
        self._head_norm_weight, self._head_norm_eps, self._head_norm_at = None, 0.0, 0
        if {"q_norm", "k_norm"} <= names:
            self._head_norm_weight, self._head_norm_eps = self._head_norm(attn, make)
            self._head_norm_at = self._head_norm_weight.data_ptr()
        self.input_norm = make.norm(layer.input_layernorm)
        self.attention_norm = make.norm(layer.post_attention_layernorm) if sandwich else None
        self.mlp_norm = make.norm(
            layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        )
        self.after_norm = make.norm(layer.post_feedforward_layernorm) if sandwich else None
        self.feed_forward = FeedForward(layer.mlp, make)

    def _head_norm(self, attn: Any, make: ProductMaker) -> tuple[Tensor, float]:
        q, k = make.norm(attn.q_norm), make.norm(attn.k_norm)
        return torch.cat((q.weight.expand(self.heads, -1), k.weight.expand(self.kv_heads, -1))), q.eps

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        segue_step: StepContext,
        **_unused: object,
    ) -> Tensor:
        x = hidden_states[0] if hidden_states.dim() == 3 else hidden_states
        rows, normed = segue_step.rows, segue_step.normed
        attended = self._attend(self.input_norm(x, rows, normed), position_embeddings, segue_step)
        wanted = segue_step.packed.wanted if self.last else None
        if wanted is None:
            return self._rest(attended, x, rows, normed)
        if not len(wanted):
            return x
        few = self._rest(attended[wanted], x[wanted], len(wanted), normed[: len(wanted)])
        return x.index_copy(0, wanted, few)

    def _rest(self, attended: Tensor, x: Tensor, rows: int, normed: Tensor) -> Tensor:
        """The layer after its attention."""
        if self.attention_norm is None:
            x = self.o.plus(attended, x)
        else:
            x = x + self.attention_norm(self.o(attended), rows, normed)
        self.mlp_norm(x, rows, normed)
        if self.after_norm is None:
            return self.feed_forward.plus(normed, x)
        return x + self.after_norm(self.feed_forward(normed), rows, normed)

    __call__ = forward  # no hooks are ever registered: spare the dispatch

    def _attend(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], step: StepContext) -> Tensor:
        qkv = self.qkv(x)
        cos, sin = position_embeddings
        for part in (cos, sin):  # the kernel trusts its addresses
            right = part.numel() == step.rows * self.head_dim and part.dtype == qkv.dtype
            if not right or not part.is_contiguous():
                raise Internal(
                    f"rotary embedding {part.dtype} {tuple(part.shape)} for heads of {self.head_dim}"
                )
        k_at, v_at = step.pool.layer_at[self.index]
        step.kernels.rotary(
            qkv.data_ptr(),
            step.rows,
            cos.data_ptr(),
            sin.data_ptr(),
            self._head_norm_at,
            self._head_norm_eps,
            k_at,
            v_at,
            step.slots_at,
        )
        attended = step.attend(self.index, qkv, self.scale, self.window)
        return attended if self.out_gate is None else attended.mul_(self.out_gate(x).sigmoid_())


class ProductMaker:
    """Makes the products and norms of one model in its family's manner."""

    def __init__(self, loaded: LoadedModel, kernels: Kernels, tp: TensorGroup | None) -> None:
        #: the ranks that each hold a part of every product
        self.tp = tp
        self._kernels = kernels
        self._one_plus = loaded.family.one_plus_norms
        self._act = loaded.family.activation(loaded.config)
        bfloat16 = loaded.shape.dtype == "bfloat16"
        self._packed = bfloat16 and self._act in _ACTIVATIONS and packs_bfloat16()

    def summed(self, linear: nn.Linear) -> Product:
        """A product that the tensor-parallel ranks have the columns of."""
        product = self.joined(linear)
        return product if self.tp is None else SummedProduct(product, self.tp)

    def joined(self, *linears: nn.Linear) -> GatedProduct:
        """One product that gives the outputs of all `linears` side by side."""
        weight = linears[0].weight.detach()
        if len(linears) > 1:
            weight = torch.cat([linear.weight for linear in linears]).detach()
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat([_bias(linear) for linear in linears]).detach()
        if self._packed:
            return PackedProduct(weight, bias, self._act)
        return PlainProduct(weight, bias, self.activation)

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The activation function of the model."""
        from transformers.activations import ACT2FN

        made: Callable[[Tensor], Tensor] = ACT2FN[self._act]
        return made

    def norm(self, module: Any) -> FusedNorm:
        """The norm `module` with its family's reading of the weight."""
        weight = module.weight.detach().float()
        if self._one_plus:
            return FusedNorm(1.0 + weight, module.eps, self._kernels)
        return FusedNorm(weight, module.variance_epsilon, self._kernels)


def _bias(linear: nn.Linear) -> Tensor:
    bias: Tensor | None = linear.bias
    return bias if bias is not None else torch.zeros(linear.out_features, dtype=linear.weight.dtype)


class Head:
    """Logits in float32 from final hidden states.

    A product in half precision rounds its result: at 25, bfloat16 has steps of 0.125, and the two
    best tokens often tie. So whatever lies within one such step of the best is computed again in
    float32: the best token is then the one that the hidden state really says.
    """

    def __init__(self, weight: Tensor, product: Product, softcap: float | None) -> None:
        self._weight = weight
        self._product = product
        self._softcap = softcap
        self._step = torch.finfo(weight.dtype).eps

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` in float32, of `hidden` `[rows, hidden]`."""
        rounded = self._product(hidden)
        logits = rounded.float()
        if rounded.dtype != torch.float32:
            self._refine(logits, hidden)
        if self._softcap is not None:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _refine(self, logits: Tensor, hidden: Tensor) -> None:
        # numpy scans rows of logits two to ten times as fast as torch's amax, ge and nonzero
        values = logits.numpy()
        best = values.max(-1, keepdims=True)
        near = values >= best - np.abs(best) * self._step
        found = np.flatnonzero(near)
        if len(hidden) < len(found) <= MAX_TIES * len(hidden):
            rows, tokens = (torch.from_numpy(part) for part in np.divmod(found, near.shape[1]))
            exact = hidden[rows].float().mul_(self._weight[tokens]).sum(-1)
            logits[rows, tokens] = exact


def fuse(loaded: LoadedModel, kernels: Kernels, place: Place) -> Head | None:
    """Replace the layers and the last norm of `loaded`, which was cut for `place`, in place; returns what
    makes its logits, on the rank that samples."""
    make = ProductMaker(loaded, kernels, place.tp)
    body = loaded.model.model
    from segue.engine.cpu.cpu_hybrid import StateLayer  # made of what this file has
    from segue.engine.cpu.cpu_mla import LatentLayer

    made = LatentLayer if loaded.shape.kind == "mla" else FusedLayer
    with_kv = with_state = 0
    for index, layer in enumerate(body.layers):
        if isinstance(layer, AbsentLayer):
            continue
        if not has_attention(layer):
            body.layers[index] = StateLayer(layer, with_state, make)
            with_state += 1
            continue
        if layer.self_attn.layer_idx != index:
            raise Internal(f"layer {index} of the model calls itself {layer.self_attn.layer_idx}")
        body.layers[index] = made(layer, with_kv, loaded, make)
        with_kv += 1
    last = body.layers[-1]
    if isinstance(last, FusedLayer) and last.feed_forward.mixture is None and place.size.ranks == 1:
        last.last = True  # other ranks, of a replica or of shared experts, do not know what is wanted
    body.norm = NormModule(make.norm(body.norm))
    setattr(body, loaded.family.last_norm, body.norm)
    if place.rank > 0:
        return None  # the leader samples
    head = loaded.model.lm_head
    if head.bias is not None:
        raise ConfigError("an output head with a bias is not supported")
    softcap = loaded.config.to_dict().get("final_logit_softcapping")
    return Head(head.weight.detach(), make.joined(head), softcap)
