"""The two branches of a block, attention and MLP, each in two designs.

modern: norm of queries and keys, rotary positions, SwiGLU. classic, as DiT and SiT have it: a bias with queries, keys
and values, no positions here (tokens have theirs from the start), GELU. Both cost the same multiply-adds.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from mvm.network.fast.float8 import product_dtype
from mvm.network.layers import (
    NORM_EPS,
    ByKernels,
    RMSNorm,
    norm_rotate,
    product,
    product_bias_apart,
    products,
    products_of,
    takes_kernels,
)
from mvm.precision import way_of


class Attention(ByKernels, ABC):
    """Multi-head self-attention; a subclass has the layers, and says how queries and keys are made."""

    qkv: nn.Linear
    out: nn.Linear

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fp8 = "off"  # of the products, where an engine asks for it

    @abstractmethod
    def _parts(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each (B, N, heads, head)."""

    def mixed(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what the last layer is given; x (B, N, d), cos and sin (N, head) from rotary_waves."""
        query, key, value = (part.transpose(1, 2) for part in self._parts(x, cos, sin))
        return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return product(self.mixed(x, cos, sin), self.out, self.fp8)

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values as they come.

        Three products with parts of one matrix, not parts of one product: its gradient would have to be put together
        again from three, which costs more on a GPU than the larger product saves, unless a kernel does it.
        """
        return tuple(part.unflatten(-1, (self.heads, -1)) for part in products_of(x, self.qkv, 3, self.fp8))


class RotaryAttention(Attention):
    """Attention with QK-norm and rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_norm = RMSNorm(width // heads)
        self.key_norm = RMSNorm(width // heads)
        self.out = nn.Linear(width, width)

    def _parts(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        weights, kernels = (self.query_norm.weight, self.key_norm.weight), self.kernels
        if kernels is not None and takes_kernels(kernels, x):
            qkv = product(x, self.qkv, self.fp8).unflatten(-1, (3, self.heads, -1))
            return kernels.placed(qkv, *weights, cos, sin, NORM_EPS)
        query, key, value = self._products(x)
        return norm_rotate(query, weights[0], cos, sin), norm_rotate(key, weights[1], cos, sin), value


class PlainAttention(Attention):
    """Attention of the classic design: it reads no positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def _parts(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        kernels = self.kernels
        if kernels is None or not takes_kernels(kernels, x):
            return self._products(x)
        qkv = product_bias_apart(x, self.qkv, self.fp8).unflatten(-1, (3, self.heads, -1))
        return kernels.parted(qkv, self.qkv.bias)


class MLP(ByKernels, ABC):
    """Two layers for each token; a subclass has them, and says what lies between."""

    down: nn.Linear

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fp8 = "off"  # of the products, where an engine asks for it

    @abstractmethod
    def hidden(self, x: Tensor) -> Tensor:
        """Return what the last layer is given."""

    def forward(self, x: Tensor) -> Tensor:
        return product(self.hidden(x), self.down, self.fp8)


class SwiGLU(MLP):
    """down(silu(gate(x)) * up(x)); hidden is 2/3 of ratio * width, so that it costs what a plain MLP does."""

    def __init__(self, width: int, ratio: float = 4.0) -> None:
        super().__init__(width)
        hidden = 16 * math.ceil(2 / 3 * ratio * width / 16)
        self.gate_up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def hidden(self, x: Tensor) -> Tensor:
        kernels, layer = self.kernels, self.gate_up
        if kernels is not None and takes_kernels(kernels, x):
            if torch.is_grad_enabled():
                return kernels.gated(products(x, (layer.weight,), (None,), self.fp8)[0], layer.bias)
            if product_dtype(x) == torch.bfloat16 and kernels.takes_gated_product(x, self.down.in_features):
                return kernels.gated_product(x.to(torch.bfloat16), layer.weight.to(torch.bfloat16), layer.bias)
        # two products, for the reason that Attention has three
        gate, up = products_of(x, layer, 2, self.fp8)
        return silu(gate) * up if way_of(x) == "plain" else silu(gate, inplace=True).mul_(up)


class GELU(MLP):
    """down(gelu(up(x))), gelu by tanh: the classic design's."""

    def __init__(self, width: int, ratio: float = 4.0) -> None:
        super().__init__(width)
        hidden = 16 * math.ceil(ratio * width / 16)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def hidden(self, x: Tensor) -> Tensor:
        kernels = self.kernels
        if kernels is not None and takes_kernels(kernels, x):
            return kernels.biased_gelu(products(x, (self.up.weight,), (None,), self.fp8)[0], self.up.bias)
        return gelu(product(x, self.up, self.fp8), approximate="tanh")
