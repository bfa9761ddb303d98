"""Sampling in float32 on a CPU: the formulas of the network with fewer passes over memory, equal but for rounding.

With a gradient, in other precisions, on other devices and for a compiler these modules are the plain ones.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, conv3d, layer_norm, silu

from mvm.network.conditions import Given
from mvm.network.dit import DiT, Output
from mvm.network.extras import Local
from mvm.network.fast.swap import Swaps, swap, swapped
from mvm.network.layers import NORM_EPS, Block, Head, RotaryAttention, SwiGLU, for_tokens, linear_parts

# Values of the tokens of as many images as one core takes at once: what a block makes of them, about eight times as
# much, is then still in its cache when it is needed next.
AT_ONCE = 2**17
CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: conv1d, 2: conv2d, 3: conv3d}  # by axes of space


def suits(x: Tensor) -> bool:
    """Return whether x is computed by this module: float32 on a CPU, without a gradient, autocast or a compiler."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not x.is_cpu or x.dtype != torch.float32:
        return False
    return not torch.is_autocast_enabled("cpu")


def inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / rms of the last dimension, which stays; by a norm: one pass, and no copy of squares."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(NORM_EPS).rsqrt_()


def modulate(x: Tensor, shift: Tensor, scale: Tensor, centred: bool = False) -> Tensor:
    """Return layers.modulate."""
    normed = layer_norm(x, x.shape[-1:], eps=NORM_EPS) if centred else x * inverse_rms(x)
    return torch.addcmul(shift, normed, 1 + scale)


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return layers.norm_rotate, with the weight in the waves, and halves that are swapped by no copy."""
    half = x.shape[-1] // 2
    cos, sin = (cos * weight)[:, None], (sin * weight.roll(half))[:, None]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half])
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned.mul_(inverse_rms(x))


class LeanBlock(Block):
    """A block whose sums are one pass each."""

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        if not suits(x):
            return super().forward(x, condition, cos, sin, mask)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulations(condition, mask)
        x = torch.addcmul(x, gate_a, self.attention(modulate(x, shift_a, scale_a, self.centred), cos, sin))
        return torch.addcmul(x, gate_m, self.mlp(modulate(x, shift_m, scale_m, self.centred)))


class LeanHead(Head):
    """A head whose norm is two passes."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        if not suits(x):
            return super().forward(x, condition)
        shift, scale = for_tokens(self.modulation(condition)).chunk(2, dim=-1)
        return self.linear(modulate(x, shift, scale, self.centred))


class LeanRotaryAttention(RotaryAttention):
    """Attention that turns queries and keys in place."""

    def placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if not suits(x):
            return super().placed(x, cos, sin)
        query, key, value = self.products(x)
        query = norm_rotate(query, self.query_norm.weight, cos, sin)
        return query, norm_rotate(key, self.key_norm.weight, cos, sin), value


class LeanSwiGLU(SwiGLU):
    """An MLP that gates in place."""

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up."""
        return linear_parts(x, self.gate_up, 2)

    def hidden(self, x: Tensor) -> Tensor:
        if not suits(x):
            return super().hidden(x)
        gate, up = self.products(x)
        return silu(gate, inplace=True).mul_(up)


class LeanLocal(Local):
    """The local convolution by the library's own, which without a gradient is ten times as fast on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not suits(x):
            return super().forward(x)
        axes = len(self.grid)
        grid = x.unflatten(1, self.grid).movedim(-1, 1)  # channels innermost in memory, as they are
        mixed = CONVOLUTIONS[axes](grid, self.weight.movedim(-1, 0)[:, None], padding=1, groups=x.shape[-1])
        return x + mixed.movedim(1, -1).flatten(1, axes)


class TiledDiT(DiT):
    """A DiT that takes a few images of a batch at a time, as many as stay in the caches."""

    SETTINGS = ("at_once",)
    at_once = AT_ONCE

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        condition: Given,
        taps: Sequence[int] = (),
        augment: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Output:
        if not suits(x) or augment is not None or seeds is not None:  # sampling alone is worth cutting up
            return super().forward(x, level, condition, taps, augment, seeds)
        values = (self.tokens + self.text) * self.embed.out_features
        several = max(1, torch.get_num_threads() * self.at_once // values)
        outputs = []
        for part in (slice(start, start + several) for start in range(0, len(x), several)):
            if isinstance(condition, Mapping):
                rows = {name: value[part] for name, value in condition.items()}
            else:
                rows = None if condition is None else condition[part]
            outputs.append(super().forward(x[part], level[part], rows, taps))
        predictions, inners, features = zip(*outputs, strict=True)
        inner = None if inners[0] is None else torch.cat(inners)
        taps_of_all = {tap: torch.cat([feature[tap] for feature in features]) for tap in features[0]}
        return Output(torch.cat(predictions), inner, taps_of_all)


SWAPS: Swaps = {
    Block: LeanBlock,
    Head: LeanHead,
    RotaryAttention: LeanRotaryAttention,
    SwiGLU: LeanSwiGLU,
    Local: LeanLocal,
    DiT: TiledDiT,
}


def apply(network: nn.Module, at_once: int = AT_ONCE) -> None:
    """Have a network sample by these modules; at_once: values of tokens that a core takes."""
    swap(network, SWAPS)
    if isinstance(network, TiledDiT):
        network.at_once = at_once


def applied(network: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which a network samples by these modules."""
    return swapped(network, SWAPS)
