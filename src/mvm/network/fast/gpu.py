"""Networks on a GPU: kernels written by hand, products in float8, and a residual stream fused across blocks.

Kernels are taken where products are of 16 bits; elsewhere, and where none are given, the formulas are the plain ones.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from mvm.network.dit import DiT
from mvm.network.extras import GELU, Local, PlainAttention
from mvm.network.fast import float8
from mvm.network.fast.recompute import keeping_products
from mvm.network.fast.swap import Swaps, swap
from mvm.network.layers import MLP, NORM_EPS, Attention, Block, RotaryAttention, Stack, SwiGLU

# Still to be added to the tokens: a branch's answer y, the bias that is in it detached, and its gate: gate y.
Pending = tuple[Tensor, Tensor, Tensor]


@cache
def gpu_kernels() -> Any:
    """Return the Kernels of mvm.network.fast.kernels, or None where there is no GPU or no Triton."""
    if not torch.cuda.is_available() or not float8.TRITON:
        return None
    from mvm.network.fast.kernels import Kernels

    return Kernels


class ByKernels(nn.Module):
    """A module that kernels by hand may compute."""

    SETTINGS = ("kernels", "fp8")
    kernels: Any = None  # as kernels.Kernels has them; None: the plain formulas
    fp8: str = "off"  # of a branch's products: one of float8.GRANULARITY

    def takes(self, x: Tensor) -> bool:
        """Return whether kernels are to compute x."""
        return self.kernels is not None and self.kernels.takes(x)

    def multiply(self, x: Tensor, *weights: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
        """Return x w^T + b for each (w, b): a branch's products, all through here.

        Without a gradient they are never of float8: samples drawn during training are then those of the stored network,
        which has no float8.
        """
        if self.fp8 == "off" or not torch.is_grad_enabled():
            return tuple(linear(x, weight, bias) for weight, bias in weights)
        return float8.products(x, *zip(*weights, strict=True), self.fp8)

    def product(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return the layer's answer."""
        return self.multiply(x, (layer.weight, layer.bias))[0]

    def products_of(self, x: Tensor, layer: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """Return the layer's answer in equal parts, as linear_parts does."""
        biases = (None,) * parts if layer.bias is None else layer.bias.chunk(parts)
        return self.multiply(x, *zip(layer.weight.chunk(parts), biases, strict=True))

    def product_bias_apart(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return the layer's answer with its bias detached: the kernel that takes it has the bias's gradient."""
        return self.multiply(x, (layer.weight, layer.bias.detach()))[0]


class GpuAttention(ByKernels, Attention):
    """Attention, its layers by `multiply`."""

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (self.heads, -1)) for part in self.products_of(x, self.qkv, 3))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.product(self.mixed(x, cos, sin), self.out)


class GpuRotaryAttention(GpuAttention, RotaryAttention):
    """One product for queries, keys and values; their norm and positions by one kernel."""

    def placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if not self.takes(x):
            return super().placed(x, cos, sin)
        qkv = self.product(x, self.qkv).unflatten(-1, (3, self.heads, -1))
        return self.kernels.placed(qkv, self.query_norm.weight, self.key_norm.weight, cos, sin, NORM_EPS)


class GpuPlainAttention(GpuAttention, PlainAttention):
    """One product for queries, keys and values."""

    def placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if not self.takes(x):
            return super().placed(x, cos, sin)
        qkv = self.product_bias_apart(x, self.qkv).unflatten(-1, (3, self.heads, -1))
        return self.kernels.parted(qkv, self.qkv.bias)


class GpuMLP(ByKernels, MLP):
    """An MLP, its layers by `multiply`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.hidden(x), self.down)


class GpuSwiGLU(GpuMLP, SwiGLU):
    """One product for gate and up, then one kernel; without a gradient product and gate in one kernel, on Hopper."""

    def hidden(self, x: Tensor) -> Tensor:
        kernels, layer = self.kernels, self.gate_up
        if self.takes(x):
            if torch.is_grad_enabled():
                return kernels.gated(self.multiply(x, (layer.weight, None))[0], layer.bias)
            narrow = float8.product_dtype(x) == torch.bfloat16
            if narrow and kernels.takes_gated_product(x, self.down.in_features):
                return kernels.gated_product(x.to(torch.bfloat16), layer.weight.to(torch.bfloat16), layer.bias)
        gate, up = self.products_of(x, layer, 2)
        return silu(gate) * up


class GpuGELU(GpuMLP, GELU):
    """Bias and GELU in one kernel."""

    def hidden(self, x: Tensor) -> Tensor:
        if self.takes(x):
            return self.kernels.biased_gelu(self.multiply(x, (self.up.weight, None))[0], self.up.bias)
        return gelu(self.product(x, self.up), approximate="tanh")


class KernelLocal(ByKernels, Local):
    """The local convolution in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        square = len(self.grid) == 2 and self.grid[0] == self.grid[1]  # all that the kernel knows
        return self.kernels.add_local(x, self.weight) if square and self.takes(x) else super().forward(x)


class KernelBlock(ByKernels, Block):
    """A block in which an addition and the norm after it are one kernel, across blocks too."""

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        pending: Pending | None = None,
        leave: bool = False,
    ) -> Any:
        """Return the tokens after the block; or (tokens, pending), if it is to leave its last addition to the next.

        pending: what the block before left.
        """
        if not self.takes(x) or condition.dim() > 2:  # kernels have no modulation of each token
            if pending is not None or leave:
                raise ValueError("a block without kernels adds what it has itself; pending and leave are for kernels")
            return super().forward(x, condition, cos, sin, mask)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulations(condition, mask)
        kernels, centred, attention, mlp = self.kernels, self.centred, self.attention, self.mlp
        assert isinstance(attention, GpuAttention)
        assert isinstance(mlp, GpuMLP)
        if pending is None:
            normed = kernels.norm_modulate(x, shift_a, scale_a, NORM_EPS, centred)
        else:
            x, normed = kernels.add_modulate(x, *pending, shift_a, scale_a, NORM_EPS, centred)
        answer = _bias_apart(attention, attention.mixed(normed, cos, sin), attention.out)
        x, normed = kernels.add_modulate(x, *answer, gate_a, shift_m, scale_m, NORM_EPS, centred)
        if not leave:
            return x + gate_m * mlp(normed)
        return x, (*_bias_apart(mlp, mlp.hidden(normed), mlp.down), gate_m)


def _bias_apart(branch: ByKernels, x: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the layer's answer with its bias detached, and the bias, whose gradient add_modulate has at hand.

    The bias as a view: FSDP hangs a hook on all that a block returns, and on a parameter they would never be taken off.
    """
    return branch.product_bias_apart(x, layer), layer.bias.view_as(layer.bias)


class FusedStack(ByKernels, Stack):
    """Blocks by kernels that leave their last addition to the next one's first kernel, in training.

    A tap reads the tokens and stops it at that block; skips or local convolutions stop it altogether.
    """

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        taps: Sequence[int] = (),
        image: int | None = None,
        masks: Sequence[Tensor] | None = None,
        **others: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        fused = torch.is_grad_enabled() and self.takes(tokens)  # each way to call a compiled block is one more graph
        if not fused or any(modules is not None for modules in others.values()):
            return super().forward(tokens, condition, cos, sin, taps=taps, image=image, masks=masks, **others)
        features, pending = {}, None
        for number, block in enumerate(self, start=1):
            # two tensors may not enter a block that is computed again, unless products are stored: it keeps what enters
            may_leave = number >= self.recompute or self.context_fn is keeping_products
            leave = may_leave and number not in (*taps, len(self))
            mask = None if masks is None else masks[number - 1]
            output = self.run(number, block, tokens, condition, cos, sin, mask, pending, leave)
            tokens, pending = output if leave else (output, None)
            if number in taps:
                features[number] = tokens[:, :image]
        return tokens[:, :image], features


BRANCHES: Swaps = {
    RotaryAttention: GpuRotaryAttention,
    PlainAttention: GpuPlainAttention,
    SwiGLU: GpuSwiGLU,
    GELU: GpuGELU,
}
SAMPLING: Swaps = {kind: BRANCHES[kind] for kind in (RotaryAttention, PlainAttention, SwiGLU)}
BLOCKS: Swaps = {Block: KernelBlock, Local: KernelLocal}


def apply(network: nn.Module, kernels: Any = None, fp8: str = "off", sampling: bool = False) -> None:
    """Have a network computed by kernels, by float8 products, or both.

    kernels: as gpu_kernels returns them. sampling: norm and positions of queries and keys, and a SwiGLU, alone are by
    kernels: a compiler of the whole network does the rest as well.
    """
    if fp8 != "off":
        _check_widths(network, fp8)
    swap(network, SAMPLING if sampling else BRANCHES, kernels=kernels, fp8=fp8)
    if kernels is None or sampling:
        return
    swap(network, BLOCKS, kernels=kernels)
    if isinstance(network, DiT):  # a DDT's blocks stay apart: what fusing them brings is not measured
        swap(network, {Stack: FusedStack}, kernels=kernels)


def _check_widths(network: nn.Module, fp8: str) -> None:
    """Refuse products of sizes that a GPU has no float8 product for."""
    for module in network.modules():
        if not isinstance(module, Attention | MLP):
            continue
        for layer in module.children():
            if isinstance(layer, nn.Linear) and (layer.in_features % float8.STEP or layer.out_features % float8.STEP):
                raise ValueError(
                    f"engine.fp8='{fp8}' needs widths that are multiples of {float8.STEP}, and a block has "
                    f"{layer.in_features} and {layer.out_features}; change network.width (a ddt's head: "
                    "network.head_width), or set engine.fp8 to off"
                )
