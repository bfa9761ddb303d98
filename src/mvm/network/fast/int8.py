"""Matrix products of 8-bit integers on a CPU, without a gradient: several times as fast as float32 where it has VNNI.

A row of the input and a row of the weight each have a scale, so that an image does not depend on others in its batch.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.weak import WeakTensorKeyDictionary

from mvm.network.extras import GELU, PlainAttention
from mvm.network.fast import cpu
from mvm.network.fast.cpu import LeanRotaryAttention, LeanSwiGLU, suits
from mvm.network.fast.float8 import SMALLEST
from mvm.network.fast.swap import Swaps, swap, swapped
from mvm.network.layers import MLP, Attention, RotaryAttention, SwiGLU

LARGEST = 127.0


class ScaledRows(NamedTuple):
    """A matrix (M, K) as values * scale: int8 values, scale float32 (M, 1)."""

    values: Tensor
    scale: Tensor


def rounded(x: Tensor) -> ScaledRows:
    """Return the float32 matrix x, each row scaled so that its largest magnitude is 127."""
    magnitude = x.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST)
    return ScaledRows((x * (LARGEST / magnitude)).round_().to(torch.int8), magnitude.div_(LARGEST))


# of each weight: version and address, by which a change since is seen, and its rounded rows
_rounded_weights = WeakTensorKeyDictionary()


def rounded_weight(weight: Tensor) -> ScaledRows:
    """Return `rounded` of a weight, computed again only when it has changed."""
    now = weight._version, weight.data_ptr()
    before, rows = _rounded_weights.get(weight, (None, None))
    if rows is None or before != now:
        rows = rounded(weight.detach())
        _rounded_weights[weight] = now, rows
    return rows


def multiply(a: ScaledRows, b: ScaledRows, bias: Tensor | None) -> Tensor:
    """Return a b^T + bias (M, N) in float32, for a (M, K) and b (N, K); sums are exact."""
    sums = torch._int_mm(a.values, b.values.t()).float().mul_(b.scale.t())
    return sums.mul_(a.scale) if bias is None else torch.addcmul(bias, sums, a.scale, out=sums)


def products(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> tuple[Tensor, ...]:
    """Return x w^T + b for each of `parts` equal parts of a weight and its bias; x (..., d)."""
    rows, whole = rounded(x.flatten(0, -2)), rounded_weight(weight)
    weights = (ScaledRows(*part) for part in zip(*(value.chunk(parts) for value in whole), strict=True))
    biases = (None,) * parts if bias is None else bias.chunk(parts)
    results = (multiply(rows, part, b) for part, b in zip(weights, biases, strict=True))
    return tuple(value.unflatten(0, x.shape[:-1]) for value in results)


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return the layer's answer."""
    return products(x, layer.weight, layer.bias, 1)[0]


class Int8Attention(Attention):
    """Attention whose layers are products of int8."""

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        if not suits(x):
            return super().products(x)
        return tuple(part.unflatten(-1, (self.heads, -1)) for part in products(x, self.qkv.weight, self.qkv.bias, 3))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return product(self.mixed(x, cos, sin), self.out) if suits(x) else super().forward(x, cos, sin)


class Int8RotaryAttention(Int8Attention, LeanRotaryAttention):
    """RotaryAttention, lean too."""


class Int8PlainAttention(Int8Attention, PlainAttention):
    """PlainAttention."""


class Int8MLP(MLP):
    """An MLP whose layers are products of int8."""

    def forward(self, x: Tensor) -> Tensor:
        return product(self.hidden(x), self.down) if suits(x) else super().forward(x)


class Int8SwiGLU(Int8MLP, LeanSwiGLU):
    """SwiGLU, lean too."""

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        return products(x, self.gate_up.weight, self.gate_up.bias, 2)


class Int8GELU(Int8MLP, GELU):
    """GELU."""

    def hidden(self, x: Tensor) -> Tensor:
        return gelu(product(x, self.up), approximate="tanh") if suits(x) else super().hidden(x)


SWAPS: Swaps = {
    **cpu.SWAPS,
    RotaryAttention: Int8RotaryAttention,
    PlainAttention: Int8PlainAttention,
    SwiGLU: Int8SwiGLU,
    GELU: Int8GELU,
}


def apply(network: nn.Module) -> None:
    """Have a network sample by these modules on a CPU, and the rest as cpu.apply has it."""
    swap(network, SWAPS)


def applied(network: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which a network samples by these modules."""
    return swapped(network, SWAPS)
