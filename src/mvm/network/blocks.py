"""Transformer blocks, the stack of them and the head after it.

A block is attention and an MLP, each modulated and gated by the condition (adaLN-Zero), in one of two designs.
modern: RMSNorm, norm of queries and keys, rotary positions, SwiGLU. classic, as DiT and SiT have it: LayerNorm, a bias
with queries, keys and values, no positions here (tokens have theirs from the start), GELU. Both cost the same.
lightning and raev2 are between them, as in LightningDiT and RAE, and in RAEv2: for their weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mvm.network.extras import (
    GELU,
    AugmentMap,
    BiasedAttention,
    FourierEmbedding,
    LightningAttention,
    Local,
    PlainAttention,
    Skip,
    drop,
)
from mvm.network.layers import MLP, Attention, RotaryAttention, SwiGLU, modulate


class Design(NamedTuple):
    """What a block is made of; centred: its norm is LayerNorm, not RMSNorm.

    sines: whether tokens begin with sine positions. base: of rotary positions. twice: whether a DDT's conditions pass
    a second SiLU before each modulation.
    """

    attention: type[Attention]
    mlp: type[MLP]
    centred: bool
    sines: bool = False
    base: float = 100.0
    twice: bool = False


DESIGNS = {
    "modern": Design(RotaryAttention, SwiGLU, centred=False),
    "classic": Design(PlainAttention, GELU, centred=True, sines=True),
    "lightning": Design(LightningAttention, SwiGLU, centred=False, sines=True, base=1e4, twice=True),
    "raev2": Design(BiasedAttention, SwiGLU, centred=False, base=1e4, twice=True),
}


def for_tokens(modulation: Tensor) -> Tensor:
    """Return a modulation (B, k) as (B, 1, k), for all tokens of an image; one for each, (B, N, k), stays."""
    return modulation[:, None] if modulation.dim() == 2 else modulation


class ModulatedBlock(nn.Module, ABC):
    """Attention and MLP, each modulated and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int, design: str = "modern") -> None:
        super().__init__()
        parts = DESIGNS[design]
        self.centred = parts.centred
        self.attention = parts.attention(width, heads)
        self.mlp = parts.mlp(width)

    @abstractmethod
    def modulated(self, condition: Tensor) -> Tensor:
        """Return shifts, scales and gates side by side (B, 1 or N, 6 d)."""

    def modulations(self, condition: Tensor, kept: Tensor | None) -> tuple[Tensor, ...]:
        """Return shift, scale and gate of attention, then of the MLP; see forward."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulated(condition).chunk(6, dim=-1)
        if kept is not None:
            shift_a, scale_a = drop(shift_a, scale_a, kept[:, :1])
            shift_m, scale_m = drop(shift_m, scale_m, kept[:, 1:])
        return shift_a, scale_a, gate_a, shift_m, scale_m, gate_m

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the tokens after the block; kept: dropout's factors of the channels that branches see (B, 2, d)."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulations(condition, kept)
        x = x + gate_a * self.attention(modulate(x, shift_a, scale_a, self.centred), cos, sin)
        return x + gate_m * self.mlp(modulate(x, shift_m, scale_m, self.centred))


class Block(ModulatedBlock):
    """A block with a modulation of its own; condition (B, d), or (B, N, d): one for every token."""

    def __init__(self, width: int, heads: int, design: str = "modern") -> None:
        super().__init__(width, heads, design)
        self.modulation = nn.Linear(width, 6 * width)

    def modulated(self, condition: Tensor) -> Tensor:
        return for_tokens(self.modulation(condition))


class SharedBlock(ModulatedBlock):
    """A block that adds its offset to a modulation it shares with all others; condition (B, 6 d)."""

    def __init__(self, width: int, heads: int, design: str = "modern") -> None:
        super().__init__(width, heads, design)
        self.offset = nn.Parameter(torch.zeros(6 * width))

    def modulated(self, condition: Tensor) -> Tensor:
        return for_tokens(condition + self.offset.to(condition.dtype))


BLOCKS: dict[str, type[ModulatedBlock]] = {"own": Block, "shared": SharedBlock}


class Head(nn.Module):
    """Modulated norm and a linear map to pixels; condition (B, d), or (B, N, d): one for every token."""

    def __init__(self, width: int, out: int, design: str = "modern") -> None:
        super().__init__()
        self.centred = DESIGNS[design].centred
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = for_tokens(self.modulation(condition)).chunk(2, dim=-1)
        return self.linear(modulate(x, shift, scale, self.centred))


def images(tokens: Tensor, image: int | None) -> Tensor:
    """Return the tokens that are an image's: the first so many, or all."""
    return tokens if image is None else tokens[:, :image]


class Passed(NamedTuple):
    """tokens (B, N, d) after the last block; the inner head's output, or None; outputs of the blocks in taps."""

    tokens: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


class Stack(nn.ModuleList):
    """Blocks, numbered from 1, one after the other; with `recompute` the first ones by activation checkpointing."""

    def __init__(self, blocks: Iterable[nn.Module] = ()) -> None:
        super().__init__(blocks)
        self.recompute = 0  # blocks, from the first, whose activations the backward pass computes again
        self.keeping: Callable[[], Any] | None = None  # checkpoint's context_fn: what is stored of them all the same

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        image: int | None = None,
        taps: Sequence[int] = (),
        inner_block: int = 0,
        inner_head: Callable[[Tensor], Tensor] | None = None,
        skips: nn.ModuleList | None = None,
        locals: nn.ModuleList | None = None,
        kept: Sequence[Tensor] | None = None,
    ) -> Passed:
        """Return the tokens after all blocks, the inner head's output and the tapped ones.

        image: so many tokens, the first, are the image's: what taps, the inner head and locals read; None: all.
        skips: the n-th maps the output of block n to what is added before block depth + 1 - n. locals: one before each
        block. kept: dropout's factors for each block.
        """
        self.check(taps)
        outputs, features, inner = [], {}, None
        for number, block in enumerate(self, start=1):
            mirrored = len(self) + 1 - number
            if skips is not None and mirrored < number:
                tokens = tokens + skips[mirrored - 1](outputs[mirrored - 1])
            if locals is not None:
                mixed = locals[number - 1](images(tokens, image))
                tokens = mixed if image is None else torch.cat((mixed, tokens[:, image:]), dim=1)
            tokens = self.run(number, block, tokens, condition, cos, sin, kept and kept[number - 1])
            if skips is not None and number <= len(skips):  # nothing else is kept: sampling frees it
                outputs.append(tokens)
            if number in taps:
                features[number] = images(tokens, image)
            if inner_head is not None and number == inner_block:
                inner = inner_head(images(tokens, image))
        return Passed(images(tokens, image), inner, features)

    def check(self, taps: Sequence[int]) -> None:
        """Refuse taps of blocks that are not there."""
        if any(not 1 <= tap <= len(self) for tap in taps):
            raise ValueError(f"taps={tuple(taps)} must be block numbers, 1 to {len(self)}")

    def run(self, number: int, block: nn.Module, *given: Any) -> Any:
        """Return the block's output, by checkpointing where it is among those that are computed again."""
        if number > self.recompute or not torch.is_grad_enabled():
            return block(*given)
        keeping: dict[str, Any] = {} if self.keeping is None else {"context_fn": self.keeping}
        return checkpoint(block, *given, use_reentrant=False, **keeping)


def initialise(network: nn.Module) -> None:
    """Xavier everywhere, zero biases; zero all that adds to the tokens: modulations, skips, locals."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in network.modules():
        if isinstance(module, Block | Head):
            nn.init.zeros_(module.modulation.weight)
        if isinstance(module, Head):
            nn.init.zeros_(module.linear.weight)
        if isinstance(module, SharedBlock):
            nn.init.zeros_(module.offset)
        if isinstance(module, Local | Skip | AugmentMap):
            nn.init.zeros_(module.weight)
        if isinstance(module, FourierEmbedding):
            module.reset()
