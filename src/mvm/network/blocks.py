"""Blocks of a DiT and the head after them: attention and MLP, modulated and gated by the condition (adaLN-Zero)."""

from abc import ABC, abstractmethod
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mvm.network.branches import GELU, MLP, Attention, PlainAttention, RotaryAttention, SwiGLU
from mvm.network.layers import NORM_EPS, ByKernels, add_gated, drop, modulate, product_bias_apart, takes_kernels


class Design(NamedTuple):
    """What a block is made of; centred: its norm is LayerNorm, not RMSNorm."""

    attention: type[Attention]
    mlp: type[MLP]
    centred: bool


DESIGNS = {
    "modern": Design(RotaryAttention, SwiGLU, centred=False),
    "classic": Design(PlainAttention, GELU, centred=True),
}

# Still to be added to the tokens: a branch's answer y, the bias that is in it detached, and its gate: gate y.
Pending = tuple[Tensor, Tensor, Tensor]


class ModulatedBlock(ByKernels, ABC):
    """Attention and MLP, each modulated and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int, design: str = "modern") -> None:
        super().__init__()
        attention, mlp, self.centred = DESIGNS[design]
        self.attention = attention(width, heads)
        self.mlp = mlp(width)

    @abstractmethod
    def modulated(self, condition: Tensor) -> Tensor:
        """Return shifts, scales and gates side by side (B, 1, 6 d): those of an image serve all its tokens."""

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        cos: Tensor,
        sin: Tensor,
        pending: Pending | None = None,
        leave: bool = False,
        kept: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Pending]:
        """Return the tokens after the block; with kernels also (tokens, pending), if it is to leave its last addition.

        pending: what the block before left. An addition and the norm after it are one kernel, across blocks too.
        kept: dropout's factors of the channels that the two branches see (B, 2, d); None: all are 1.
        """
        modulation = self.modulated(condition)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation.chunk(6, dim=-1)
        if kept is not None:
            shift_a, scale_a = drop(shift_a, scale_a, kept[:, :1])
            shift_m, scale_m = drop(shift_m, scale_m, kept[:, 1:])
        kernels, centred = self.kernels, self.centred
        by_kernels = kernels is not None and takes_kernels(kernels, x)
        if not by_kernels or modulation.shape[1] > 1:  # they know no modulation of every token
            if pending is not None or leave:
                raise ValueError("a block without kernels adds what it has itself; pending and leave are for kernels")
            x = add_gated(x, gate_a, self.attention(modulate(x, shift_a, scale_a, centred), cos, sin))
            return add_gated(x, gate_m, self.mlp(modulate(x, shift_m, scale_m, centred)))
        if pending is None:
            normed = kernels.norm_modulate(x, shift_a, scale_a, NORM_EPS, centred)
        else:
            x, normed = kernels.add_modulate(x, *pending, shift_a, scale_a, NORM_EPS, centred)
        answer = _bias_apart(self.attention.mixed(normed, cos, sin), self.attention.out, self.attention.fp8)
        x, normed = kernels.add_modulate(x, *answer, gate_a, shift_m, scale_m, NORM_EPS, centred)
        if not leave:
            return add_gated(x, gate_m, self.mlp(normed))
        return x, (*_bias_apart(self.mlp.hidden(normed), self.mlp.down, self.mlp.fp8), gate_m)


def _bias_apart(x: Tensor, layer: nn.Linear, fp8: str) -> tuple[Tensor, Tensor]:
    """Return the layer's answer with its bias detached, and the bias, whose gradient add_modulate has at hand.

    The bias as a view: FSDP hangs a hook on all that a block returns, and on a parameter they would never be taken off.
    """
    return product_bias_apart(x, layer, fp8), layer.bias.view_as(layer.bias)


class Block(ModulatedBlock):
    """A block with a modulation of its own; condition (B, d)."""

    def __init__(self, width: int, heads: int, design: str = "modern") -> None:
        super().__init__(width, heads, design)
        self.modulation = nn.Linear(width, 6 * width)

    def modulated(self, condition: Tensor) -> Tensor:
        return self.modulation(condition)[:, None]


class SharedBlock(ModulatedBlock):
    """A block that adds its offset to a modulation it shares with all others; condition (B, 6 d)."""

    def __init__(self, width: int, heads: int, design: str = "modern") -> None:
        super().__init__(width, heads, design)
        self.offset = nn.Parameter(torch.zeros(6 * width))

    def modulated(self, condition: Tensor) -> Tensor:
        return (condition + self.offset.to(condition.dtype))[:, None]


BLOCKS: dict[str, type[ModulatedBlock]] = {"own": Block, "shared": SharedBlock}


class Head(nn.Module):
    """Modulated norm and a linear map to pixels."""

    def __init__(self, width: int, out: int, design: str = "modern") -> None:
        super().__init__()
        self.centred = DESIGNS[design].centred
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, out)

    def modulated(self, condition: Tensor) -> Tensor:
        """Return shift and scale side by side (B, 1, 2 d)."""
        return self.modulation(condition)[:, None]

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulated(condition).chunk(2, dim=-1)
        return self.linear(modulate(x, shift, scale, self.centred))


def use_kernels(network: nn.Module, kernels: ModuleType, of: tuple[type[ByKernels], ...] = (ByKernels,)) -> None:
    """Compute modules `of` these classes by kernels written by hand, where precision suits them."""
    for module in network.modules():
        if isinstance(module, of):
            module.kernels = kernels
