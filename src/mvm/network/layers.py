"""What the transformers are made of: patches, embeddings, rotary positions, attention, MLPs, blocks and their stack."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

NORM_EPS = 1e-6


def grid_of(sample_shape: Sequence[int], patch: int) -> tuple[int, ...]:
    """Return how many patches each axis of space has; samples (C, *space) that patches do not divide are refused."""
    _, *space = sample_shape
    if not 1 <= len(space) <= 3 or any(extent < 1 or extent % patch for extent in space):
        raise ValueError(
            f"network.patch={patch} must divide every axis of the samples, of which there may be one to three after "
            f"the channels; theirs are {'x'.join(map(str, space)) or 'none'}"
        )
    return tuple(extent // patch for extent in space)


def patchify(x: Tensor, patch: int) -> Tensor:
    """Return (B, C, *space) as tokens (B, N, C patch^n), row by row, for n axes of space."""
    batch, channels, *space = x.shape
    axes = range(len(space))
    x = x.reshape(batch, channels, *(size for extent in space for size in (extent // patch, patch)))
    x = x.permute(0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes))
    return x.reshape(batch, -1, channels * patch ** len(space))


def unpatchify(tokens: Tensor, patch: int, channels: int, grid: Sequence[int]) -> Tensor:
    """Return tokens (B, N, C patch^n) as (B, C, *space); the inverse of patchify for patches in this grid."""
    batch, axes = tokens.shape[0], range(len(grid))
    x = tokens.reshape(batch, *grid, channels, *(patch for _ in axes))
    pairs = ((1 + axis, 2 + len(grid) + axis) for axis in axes)  # of the grid, and of the patch
    x = x.permute(0, 1 + len(grid), *(axis for pair in pairs for axis in pair))
    return x.reshape(batch, channels, *(size * patch for size in grid))


class LevelEmbedding(nn.Module):
    """Sinusoids of 1000 * noise level, then an MLP: (B,) in [0, 1] -> (B, d).

    The level is sqrt(t) on the mean-velocity path. Unscaled it would leave most of the frequencies flat.
    scale: in place of 1000, of other times.
    """

    rates: Tensor

    def __init__(self, width: int, scale: float = 1000.0, frequencies: int = 128, max_period: float = 10_000.0) -> None:
        super().__init__()
        rates = torch.exp(-math.log(max_period) * torch.arange(frequencies) / frequencies)
        self.register_buffer("rates", scale * rates, persistent=False)
        self.up = nn.Linear(2 * frequencies, width)
        self.out = nn.Linear(width, width)

    def forward(self, level: Tensor) -> Tensor:
        angle = level[:, None].float() * self.rates
        waves = torch.cat((torch.cos(angle), torch.sin(angle)), dim=-1)
        return self.out(silu(self.up(waves.to(self.up.weight.dtype))))


def modulate(x: Tensor, shift: Tensor, scale: Tensor, centred: bool = False) -> Tensor:
    """Return norm(x) (1 + scale) + shift; x (B, N, d), shift and scale (B, 1 or N, d). centred: by LayerNorm."""
    norm = layer_norm if centred else rms_norm
    return norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


def axis_angles(grid: Sequence[int], count: int, base: float) -> list[Tensor]:
    """Return the angles of each axis of a grid of tokens, (N, k) in float64: position times k frequencies 1 to 1/base.

    The axes share `count` frequencies evenly; the first ones have one more where that leaves a rest.
    """
    angles = []
    for axis, extent in enumerate(grid):
        own = count // len(grid) + (axis < count % len(grid))
        frequency = base ** (-torch.arange(own, dtype=torch.float64) / own)
        angle = torch.arange(extent, dtype=torch.float64)[:, None] * frequency
        shape = [1] * axis + [extent] + [1] * (len(grid) - axis - 1) + [own]
        angles.append(angle.reshape(shape).expand(*grid, own).reshape(-1, own))
    return angles


def rotary_table(grid: Sequence[int], head_width: int, base: float = 100.0) -> Tensor:
    """Return angles (N, head_width/2) of rotary positions on a grid of tokens, axis by axis: of images rows first.

    base 100 suits grids of 4 to 32 tokens a side; a language model's 10,000 would leave most angles flat.
    """
    return torch.cat(axis_angles(grid, head_width // 2, base), dim=-1).float()


def rotary_waves(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) for `rotate`, each (N, head): cos of both halves, and sin with the first half's sign turned."""
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., head) with its halves rotated as (real, imaginary): x cos + swap(x) sin.

    The halves are swapped by a flip, not cut and joined: a compiler reads that as an index, and it is much faster.
    """
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos + swapped * sin


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotate(norm(x) * weight) in x's dtype; x (B, N, heads, head), cos and sin (N, head)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = rms_norm(x.to(wide), weight.shape, weight.to(wide), NORM_EPS)
    return rotate(normed, cos[:, None], sin[:, None]).to(x.dtype)


def linear_parts(x: Tensor, layer: nn.Linear, parts: int) -> tuple[Tensor, ...]:
    """Return the layer's output in equal parts, each by a product of its own.

    To cut one product's output would cost more on a GPU: the gradient had to be put together again from its parts'.
    """
    biases = (None,) * parts if layer.bias is None else layer.bias.chunk(parts)
    return tuple(linear(x, weight, bias) for weight, bias in zip(layer.weight.chunk(parts), biases, strict=True))


class Attention(nn.Module, ABC):
    """Multi-head self-attention: x (B, N, d), cos and sin (N, head) from rotary_waves -> (B, N, d)."""

    qkv: nn.Linear
    out: nn.Linear

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values as the first layer gives them, each (B, N, heads, head)."""
        return tuple(part.unflatten(-1, (self.heads, -1)) for part in linear_parts(x, self.qkv, 3))

    @abstractmethod
    def placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values as they are compared, each (B, N, heads, head)."""

    def mixed(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the input of the last layer."""
        query, key, value = (part.transpose(1, 2) for part in self.placed(x, cos, sin))
        return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.out(self.mixed(x, cos, sin))


class RotaryAttention(Attention):
    """Attention with QK-norm and rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_norm = nn.RMSNorm(width // heads, NORM_EPS)
        self.key_norm = nn.RMSNorm(width // heads, NORM_EPS)
        self.out = nn.Linear(width, width)

    def placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.products(x)
        query = norm_rotate(query, self.query_norm.weight, cos, sin)
        return query, norm_rotate(key, self.key_norm.weight, cos, sin), value


class MLP(nn.Module, ABC):
    """Two layers for each token; `hidden` is the input of the second."""

    down: nn.Linear

    @abstractmethod
    def hidden(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class SwiGLU(MLP):
    """down(silu(gate(x)) * up(x)); hidden is 2/3 of ratio * width, so that it costs what a plain MLP does."""

    def __init__(self, width: int, ratio: float = 4.0) -> None:
        super().__init__()
        hidden = 16 * math.ceil(2 / 3 * ratio * width / 16)
        self.gate_up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def hidden(self, x: Tensor) -> Tensor:
        gate, up = linear_parts(x, self.gate_up, 2)
        return silu(gate) * up


class Design(NamedTuple):
    """What a block is made of; centred: its norm is LayerNorm, not RMSNorm.

    sines: whether tokens begin with sine positions. base: of rotary positions. twice: whether a DDT's conditions pass
    a second SiLU before each modulation.
    """

    attention: type[Attention]
    mlp: type[MLP]
    centred: bool = False
    sines: bool = False
    base: float = 100.0
    twice: bool = False


MODERN = Design(RotaryAttention, SwiGLU)


def for_tokens(modulation: Tensor) -> Tensor:
    """Return a modulation (B, k) as (B, 1, k), for all tokens of an image; one for each, (B, N, k), stays."""
    return modulation[:, None] if modulation.dim() == 2 else modulation


def drop(shift: Tensor, scale: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shift and scale by which `modulate` gives mask (norm(x) (1 + scale) + shift); all (B, 1, d).

    Dropout of whole channels goes into a modulation so; a mask of tokens would not.
    """
    return (mask * shift).to(shift.dtype), (mask * (1 + scale) - 1).to(scale.dtype)


class Block(nn.Module):
    """Attention and an MLP, each modulated and gated by the condition (adaLN-Zero); condition (B, d) or (B, N, d).

    shared: the condition is a modulation (B, 6 d) that all blocks share, and each adds an offset of its own.
    """

    def __init__(self, width: int, heads: int, design: Design = MODERN, shared: bool = False) -> None:
        super().__init__()
        self.centred = design.centred
        self.attention = design.attention(width, heads)
        self.mlp = design.mlp(width)
        self.modulation = None if shared else nn.Linear(width, 6 * width)
        self.offset = nn.Parameter(torch.zeros(6 * width)) if shared else None

    def modulations(self, condition: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return shift, scale and gate of attention, then of the MLP, each (B, 1 or N, d); see forward."""
        if self.modulation is not None:
            modulation = self.modulation(condition)
        else:
            assert self.offset is not None
            modulation = condition + self.offset.to(condition.dtype)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = for_tokens(modulation).chunk(6, dim=-1)
        if mask is not None:
            shift_a, scale_a = drop(shift_a, scale_a, mask[:, :1])
            shift_m, scale_m = drop(shift_m, scale_m, mask[:, 1:])
        return shift_a, scale_a, gate_a, shift_m, scale_m, gate_m

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the tokens after the block; mask: dropout's factors of the channels that branches see (B, 2, d)."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulations(condition, mask)
        x = x + gate_a * self.attention(modulate(x, shift_a, scale_a, self.centred), cos, sin)
        return x + gate_m * self.mlp(modulate(x, shift_m, scale_m, self.centred))


class Head(nn.Module):
    """Modulated norm and a linear map to pixels; condition (B, d), or (B, N, d): one for every token."""

    def __init__(self, width: int, out: int, design: Design = MODERN) -> None:
        super().__init__()
        self.centred = design.centred
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = for_tokens(self.modulation(condition)).chunk(2, dim=-1)
        return self.linear(modulate(x, shift, scale, self.centred))


class Stack(nn.ModuleList):
    """Blocks, numbered from 1, one after the other; with `recompute` the first ones by activation checkpointing."""

    def __init__(self, blocks: Iterable[nn.Module] = ()) -> None:
        super().__init__(blocks)
        self.recompute = 0  # blocks, from the first, whose activations the backward pass computes again
        self.context_fn: Callable[[], Any] | None = None  # checkpoint's: which results are stored all the same

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        taps: Sequence[int] = (),
        image: int | None = None,
        skips: nn.ModuleList | None = None,
        locals: nn.ModuleList | None = None,
        masks: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the image's tokens after all blocks, and after those in taps.

        image: so many tokens, the first, are the image's, and taps and locals see them alone; None: all. masks:
        dropout's factors for each block. skips: the n-th maps the output of block n to what is added before block
        depth + 1 - n. locals: one before each block.
        """
        outputs, features = [], {}
        for number, block in enumerate(self, start=1):
            mirrored = len(self) + 1 - number
            if skips is not None and mirrored < number:
                tokens = tokens + skips[mirrored - 1](outputs[mirrored - 1])
            if locals is not None:
                mixed = locals[number - 1](tokens[:, :image])
                tokens = mixed if image is None else torch.cat((mixed, tokens[:, image:]), dim=1)
            tokens = self.run(number, block, tokens, condition, cos, sin, masks and masks[number - 1])
            if skips is not None and number <= len(skips):  # no other output is stored: sampling frees it
                outputs.append(tokens)
            if number in taps:
                features[number] = tokens[:, :image]
        return tokens[:, :image], features

    def run(self, number: int, block: nn.Module, *inputs: Any) -> Any:
        """Return the block's output, by checkpointing where it is among those that are computed again."""
        if number > self.recompute or not torch.is_grad_enabled():
            return block(*inputs)
        options: dict[str, Any] = {} if self.context_fn is None else {"context_fn": self.context_fn}
        return checkpoint(block, *inputs, use_reentrant=False, **options)
