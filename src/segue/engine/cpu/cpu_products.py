"""Products, norms and the output head that the decoder layers of a CPU are made of.

Weights are packed once for oneDNN where that is faster (bfloat16 with AVX-512 or AMX; measured for float32
and float16: no gain). Activation, gating and residual are folded into the products.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.engine.cpu.cpu_kernels import Kernels
from segue.engine.models.model_loading import LoadedModel
from segue.engine.ranks.collectives import TensorGroup

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
        """The product through the model's activation."""
        out: Tensor = self._unary(x, self.weight, self.bias, self._activation, [], self._algorithm)
        return out

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, times `other` element by element. May reuse `other`'s memory."""
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

    def joined(self, *linears: nn.Linear) -> PackedProduct | PlainProduct:
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


class FeedForward:
    """The part of a layer after its attention: dense, or transformers' mixture of experts."""

    def __init__(self, mlp: Any, make: ProductMaker) -> None:
        self.mixture: Any = None
        if {name for name, _ in mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
            self._gate, self._up = make.joined(mlp.gate_proj), make.joined(mlp.up_proj)
            self._down = make.summed(mlp.down_proj)
        else:
            self.mixture = mlp
        self._ranks = make.tp

    def __call__(self, normed: Tensor) -> Tensor:
        """The output for the rows `normed`."""
        if self.mixture is None:
            return self._down(self._inner(normed))
        mixed: Tensor = self.mixture(normed.unsqueeze(0))[0]
        return mixed if self._ranks is None else self._ranks.sum(mixed)

    def plus(self, normed: Tensor, x: Tensor) -> Tensor:
        """The same plus `x`."""
        return self._down.plus(self._inner(normed), x) if self.mixture is None else self(normed).add_(x)

    def _inner(self, normed: Tensor) -> Tensor:
        return self._up.times(normed, self._gate.activated(normed))


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
