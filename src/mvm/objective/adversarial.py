"""A discriminator of trained heads on a frozen vision transformer, its hinge losses, and the adaptive weight.

discriminator = Discriminator(TransformerFeatures(load_encoder("facebook/dinov2-small"), blocks=(3, 6, 9, 12)))
logits = discriminator(images)                     # (B, taps * tokens); images in [-1, 1]
optimizer = AdamW(discriminator.heads.parameters())  # the heads alone learn, and alone belong in a checkpoint
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, instance_norm, interpolate, leaky_relu, relu
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import cached

from mvm import noise
from mvm.network.pretrained import Encoder, PatchTokens
from mvm.options import choose
from mvm.pixels import to_uint8, to_unit

QUARTERS = 4  # taps in the blocks; the fifth is at the end
KERNEL = 9  # tokens, along the rows
SLOPE = 0.2
GROUPS = 8  # of channels, at most
NORM_EPS = 1e-5
RATIO_EPS = 1e-6
MAX_RATIO = 1e4


def quarter_blocks(depth: int) -> tuple[int, ...]:
    """Return the blocks (1-based) that end the quarters of a network: 3, 6, 9, 12 of 12."""
    return tuple(sorted({math.ceil(depth * part / QUARTERS) for part in range(1, QUARTERS + 1)}))


class TransformerFeatures(nn.Module):
    """features(images) -> tokens (B, N, width) after each chosen block and at the end; frozen, always in eval.

    Images (B, 1 or 3, H, W) are in [-1, 1]; they are resized (bilinear) and scaled as the encoder needs, and the
    gradient flows back to them. Class and register tokens are left out. The end is after the final norm; without
    last_norm, as published, before it: where the last block is among the chosen ones, its tokens once more.
    """

    def __init__(self, encoder: Encoder, blocks: Sequence[int] = (), last_norm: bool = True) -> None:
        super().__init__()
        body = encoder.body
        if not isinstance(body, PatchTokens):
            raise ValueError(f"encoder='{encoder.name}' is no vision transformer with a state per block; give a DINO")
        depth = cast(Any, body.network).config.num_hidden_layers
        if wrong := [block for block in blocks if not 1 <= block <= depth]:
            raise ValueError(f"blocks={list(blocks)}: '{encoder.name}' has the blocks 1 to {depth}, so no {wrong[0]}")
        self.blocks, self.depth, self.last_norm = tuple(blocks) or quarter_blocks(depth), depth, last_norm
        self.encoder, self.width, self.taps = encoder, encoder.width, len(self.blocks) + 1
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever mode a parent module is in: what the discriminator sees by does not change."""
        return super().train(False)

    def forward(self, images: Tensor) -> list[Tensor]:
        unit = ((images.float() + 1) / 2).expand(-1, 3, -1, -1)
        size = (self.encoder.resolution, self.encoder.resolution)
        if unit.shape[2:] != size:  # not antialiased: as published, and torch has a deterministic gradient of this
            unit = interpolate(unit, size=size, mode="bilinear", align_corners=False)
        body = cast(PatchTokens, self.encoder.body)
        pixels = self.encoder.scaling(unit).to(next(body.parameters()).dtype)
        output = body.network(pixel_values=pixels, output_hidden_states=True, **body.arguments)
        states = [output.hidden_states[block] for block in self.blocks]  # number 0 is what enters the first block
        last = body.final(output.last_hidden_state) if self.last_norm else output.hidden_states[self.depth]
        return [state[:, body.extra :] for state in (*states, last)]


class LocalBatchNorm(nn.Module):
    """Batch norm over so many images of a batch in turn: no running statistics, nothing of other processes."""

    def __init__(self, width: int, together: int = 8, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.together, self.eps = together, eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.together == 1:
            return instance_norm(x.float(), weight=self.weight, bias=self.bias, eps=self.eps)
        parts = x.float().split(self.together)  # the last few are taken together
        return torch.cat([batch_norm(part, None, None, self.weight, self.bias, True, eps=self.eps) for part in parts])


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": LocalBatchNorm,
    "image": lambda width: LocalBatchNorm(width, 1, 1e-6),  # each channel of an image by itself, as published
    "group": lambda width: nn.GroupNorm(math.gcd(width, GROUPS), width, NORM_EPS),  # each image by itself
}


def _convolution(width: int, out: int, kernel: int) -> nn.Module:
    """Return a convolution along the tokens, closed to a ring, whose weight (out, width * kernel) has norm 1."""
    return spectral_norm(nn.Conv1d(width, out, kernel, padding=kernel // 2, padding_mode="circular"))


class DiscriminatorHead(nn.Module):
    """head(tokens (B, N, width)) -> logits (B, N), float32."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        make = choose("norm", norm, NORMS)
        self.enter, self.enter_norm = _convolution(width, width, 1), make(width)
        self.mix, self.mix_norm = _convolution(width, width, KERNEL), make(width)
        self.leave = _convolution(width, 1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = leaky_relu(self.enter_norm(self.enter(tokens.transpose(1, 2))), SLOPE)
        x = (x + leaky_relu(self.mix_norm(self.mix(x)), SLOPE)) / math.sqrt(2)
        return self.leave(x)[:, 0].float()


class DiscriminatorHeads(nn.ModuleList):
    """heads(taps) -> logits (B, taps * tokens): a head per tap.

    They are compiled as one: spectral norms give each head classes of its own, so that none would share another's code.
    """

    def forward(self, taps: Sequence[Tensor]) -> Tensor:
        return torch.cat([head(tokens) for head, tokens in zip(self, taps, strict=True)], dim=1)


class Discriminator(nn.Module):
    """discriminator(images in [-1, 1]) -> logits (B, taps * tokens), high for real: one head per tap of the features.

    features: a frozen module with `taps` and `width`, images -> a list of tokens (B, N, width). norm "batch" judges 8
    images in the light of each other, "image" (as published) and "group" every image alone. Each forward in training
    mode takes one step of the power iterations behind the spectral norms; in eval nothing changes.
    """

    def __init__(self, features: TransformerFeatures, norm: str = "batch") -> None:
        super().__init__()
        self.features = features
        self.heads = DiscriminatorHeads(DiscriminatorHead(features.width, norm) for _ in range(features.taps))
        self.together = max(getattr(module, "together", 1) for module in self.modules())

    def forward(self, images: Tensor) -> Tensor:
        taps = self.features(images)
        if taps[0].shape[1] < KERNEL // 2:
            raise ValueError(f"a head needs {KERNEL // 2} tokens or more, the encoder gives {taps[0].shape[1]}")
        return self.heads(taps)

    @contextmanager
    def judging(self) -> Generator[None]:
        """Neither learn nor change for a while: what is judged gets a gradient, the heads get none."""
        training = self.heads.training
        self.heads.eval().requires_grad_(False)
        try:
            yield
        finally:
            self.heads.train(training).requires_grad_(True)


def discriminator_hinge(real: Tensor, fake: Tensor) -> Tensor:
    """Return (mean max(0, 1 - real) + mean max(0, 1 + fake)) / 2 of logits."""
    return (relu(1 - real).mean() + relu(1 + fake).mean()) / 2


def eight_bit(images: Tensor) -> Tensor:
    """Return images in [-1, 1] as they look when stored, without gradient: else rounding gives the fakes away."""
    return to_unit(to_uint8(images.detach()))


def logits_of_both(discriminator: Discriminator, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of images of which the first half is real, the second fake: by weights of one power iteration.

    In one pass, unless a norm over several images would then join real ones with fake ones.
    """
    count = len(images) // 2
    if count % discriminator.together == 0:
        return discriminator(images).tensor_split((count,))
    with cached():
        return discriminator(images[:count]), discriminator(images[count:])


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor) -> Tensor:
    """Return |reconstruction| / (|adversarial| + 1e-6) in [0, 1e4], without gradient (Esser et al. 2021).

    Both are gradients of the decoder's last layer; the weight makes the two losses pull on it equally.
    """
    gradients = (reconstruction, adversarial)
    numerator, denominator = (torch.linalg.vector_norm(gradient.detach().float()) for gradient in gradients)
    return (numerator / (denominator + RATIO_EPS)).clamp(0, MAX_RATIO)


def _source(shift: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the index that each pixel of an axis comes from (B, size), and whether it lies on the axis."""
    index = torch.arange(size, device=shift.device) - shift[:, None]
    return index.clamp(0, size - 1), (index >= 0) & (index < size)


class _Move(torch.autograd.Function):
    """Images moved by whole pixels. The gradient moves back, by gathering: a scatter's sums have no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(down, right)
        rows, has_row = _source(down, x.shape[2])
        columns, has_column = _source(right, x.shape[3])
        moved = x.gather(2, rows[:, None, :, None].expand_as(x)).gather(3, columns[:, None, None, :].expand_as(x))
        return moved * (has_row[:, None, :, None] & has_column[:, None, None, :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        down, right = ctx.saved_tensors
        return _Move.apply(grads[0], -down, -right), None, None


def _pixels(share: float, size: int) -> int:
    """Return the share of a side in whole pixels, halves up."""
    return int(share * size + 0.5)


def _one_of(u: Tensor, count: int) -> Tensor:
    """Return whole numbers 0 .. count - 1, each for an equal part of u in (0, 1)."""
    return (u * count).floor().long()


def _in_box(u: Tensor, size: int, share: float) -> Tensor:
    """Return whether a pixel of an axis lies in the box (B, size), whose middle is anywhere on it."""
    length = _pixels(share, size)
    first = _one_of(u, size + 1 - length % 2) - length // 2
    index = torch.arange(size, device=u.device)
    return (index >= first[:, None]) & (index < first[:, None] + length)


def augmented(
    images: Tensor, seeds: Tensor, translate: float = 0.125, colour: bool = True, cutout: float = 0.0
) -> Tensor:
    """Return images (B, C, H, W) tinted, moved and cut: a pure function of them and their seeds (B,), differentiable.

    Zhao et al. 2020. Images are in [-1, 1]; a pixel that nothing is moved to is 0, mid grey. Real and fake images of
    one seed change alike. colour: brightness, saturation, contrast. translate, cutout: shares of a side; 0: none.
    """
    if len(seeds) != len(images):
        raise ValueError(f"there are {len(seeds)} seeds for {len(images)} images; give one seed per image")
    u = noise.uniform(seeds.to(images.device), noise.AUGMENT, (7,))  # all seven, whatever is switched on
    x, (height, width) = images, images.shape[2:]
    if colour:
        brightness, saturation, contrast = u[:, :3, None, None, None].to(x.dtype).unbind(1)
        x = x + (brightness - 0.5)
        grey = x.mean(1, keepdim=True)
        x = (x - grey) * (2 * saturation) + grey
        mean = x.mean((1, 2, 3), keepdim=True)
        x = (x - mean) * (contrast + 0.5) + mean
    if translate:
        tall, wide = _pixels(translate, height), _pixels(translate, width)
        x = _Move.apply(x, _one_of(u[:, 3], 2 * tall + 1) - tall, _one_of(u[:, 4], 2 * wide + 1) - wide)
    if cutout:
        rows, columns = _in_box(u[:, 5], height, cutout), _in_box(u[:, 6], width, cutout)
        x = x * ~(rows[:, None, :, None] & columns[:, None, None, :])
    return x
