"""Frozen encoders as the first half of an autoencoder: uint8 images -> a grid of latents.

    encoder = load_latent_encoder(EncoderConfig("facebook/dinov2-with-registers-base", layers="last-4"))
    latents = encoder(images)                          # (B, C, h, w), float32
    statistics = measure(encoder, images).result(encoder.origin)     # of both mirrors of every image
    z = statistics.normalise(encoder(images))

Conventions, fixed and part of the fingerprint: levels / 255, bicubic antialiased resize to the encoder's resolution,
the checkpoint's mean and deviation; the tokens after each chosen block pass a LayerNorm without weights, then are
averaged. A mirrored latent is the latent of the mirrored image: flipped latents are something else.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from tqdm import tqdm

from mvm.files import atomic
from mvm.latent.codec import Origin, fingerprint, save_tensors
from mvm.network.pretrained import Encoder, load_encoder
from mvm.options import at_least
from mvm.untrusted import cut

EPS = 1e-5  # added to the variance of latents, as published
NORM_EPS = 1e-5  # of the norm without weights, for every family: as RAEv2 replaces it
KINDS = ("dinov2", "dinov2_with_registers", "dinov3_vit", "clip_vision_model", "siglip_vision_model")
CONVENTION = "levels/255; bicubic antialiased, clipped; norm of each block without weights; mean over blocks"


class ImagesByIndex(Protocol):
    """uint8 images: images[indices (B,) on the CPU] -> (B, C, H, W). A tensor is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class EncoderConfig:
    """Frozen encoder of the autoencoder, and which of its layers are the latent.

    Numbers in a list of layers become text. RAEv2's K = 7 of a ViT-L, [layers=11.13...23] counted from 0, is
    "12,14,16,18,20,22,24".
    """

    name: str = ""
    """Frozen encoder: a hub name, a folder in transformers' format, or Meta's .pth of a DINOv3."""
    layers: str = "last"
    """Blocks whose tokens are averaged into the latent: "last", "last-K" (the last K), or numbers from 1 such as
    "3,6,9,12"."""
    resolution: int = 0
    """Side in pixels to which images are resized for the encoder; 0: its own."""
    global_mean: bool = False
    """Add the mean token of the last chosen block to all tokens, as RAEv2 does for DINOv3."""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", _as_text(self.layers))
        at_least("encoder.resolution", self.resolution, 0)


def _as_text(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(layers: str, depth: int) -> list[int]:
    """Return the block numbers that the text says; none where it makes no sense."""
    if re.fullmatch(r"\d+( *, *\d+)*", layers):
        return [int(number) for number in layers.split(",")]
    last = re.fullmatch(r"last(?:-(\d+))?", layers)
    count = int(last[1] or 1) if last else 0
    return list(range(depth - count + 1, depth + 1))


def chosen_blocks(layers: str | Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the numbers of the blocks, from 1, in rising order."""
    layers_from_1 = _numbers(layers, depth) if isinstance(layers, str) else list(layers)
    blocks = tuple(sorted(set(layers_from_1)))
    if not blocks or len(blocks) != len(layers_from_1) or blocks[0] < 1 or blocks[-1] > depth:
        allowed = f"'last', 'last-K' with K from 1 to {depth}, or different block numbers from 1 to {depth}"
        raise ValueError(f"encoder.layers={layers!r} does not suit {depth} blocks; give {allowed}")
    return blocks


def plain_norm(tokens: Tensor) -> Tensor:
    """Return tokens (..., C) with mean 0 and variance 1 each: a LayerNorm without weights."""
    return layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPS)


class LatentEncoder(nn.Module):
    """encoder(images uint8) -> latents (B, C, h, w) float32, unnormalised; frozen, without gradient, always in eval.

    eval matters: in training mode a DINOv3 rescales its positions at random.
    """

    def __init__(self, encoder: Encoder, layers: str | Sequence[int] = "last", global_mean: bool = False) -> None:
        super().__init__()
        if encoder.kind not in KINDS:
            what = f"'{encoder.name}' ({encoder.kind or 'no vision transformer'})"
            raise ValueError(f"encoder.name={what} gives no latents; known: {', '.join(KINDS)}")
        self.encoder, self.global_mean = encoder, global_mean
        model = cast(Any, encoder.body.network).config
        self.blocks = chosen_blocks(layers, model.num_hidden_layers)
        self.config = EncoderConfig(encoder.name, _as_text(self.blocks), encoder.resolution, global_mean)
        self.latent_shape = (encoder.width, encoder.side, encoder.side)
        facts = asdict(self.config) | {"scaling": asdict(encoder.scaling), "eps": NORM_EPS, "convention": CONVENTION}
        facts["layers"] = self.blocks
        del facts["name"]  # a folder may be moved
        for name in ("model_type", "num_attention_heads", "layer_norm_eps", "hidden_act", "rope_theta"):
            facts[name] = getattr(model, name, None)  # which the shapes of the weights do not show
        weights = {name: value for name, value in encoder.body.state_dict().items() if "mask_token" not in name}
        self.fingerprint = fingerprint(facts, weights)  # now: the weights may be rounded later

    @property
    def origin(self) -> Origin:
        """Return what is written into all that is made with this encoder."""
        blocks = ", ".join(map(str, self.blocks))
        extra = ", global mean" if self.global_mean else ""
        return Origin(self.fingerprint, f"'{self.config.name}' (blocks {blocks}{extra}; {self.config.resolution} px)")

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever mode a surrounding module is in."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        device = next(self.encoder.parameters()).device
        tokens = [plain_norm(states) for states in self.encoder.after_blocks(images.to(device), self.blocks)]
        mean = torch.stack(tokens).mean(0)
        if self.global_mean:
            mean = mean + tokens[-1].mean(1, keepdim=True)
        return mean.transpose(1, 2).reshape(-1, *self.latent_shape)


def load_latent_encoder(config: EncoderConfig, option: str = "codec") -> LatentEncoder:
    """Return the encoder of a config; option: the group of options it comes from, for errors."""
    encoder = load_encoder(config.name, config.resolution, option)
    return LatentEncoder(encoder, config.layers, config.global_mean)


# --- statistics of latents ----------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """z = (latent - mean) / sqrt(variance + EPS) and its inverse; mean, variance: float32 buffers (C, h, w).

    encoder: what the latents came from; count: how many there were, mirrors counted.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, mean: Tensor, variance: Tensor, encoder: Origin, count: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().float())
        self.register_buffer("variance", variance.detach().float())
        self.encoder, self.count = encoder, count

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the numbers and of the encoder's fingerprint."""
        return fingerprint({"encoder": self.encoder.fingerprint, "eps": EPS}, self.state_dict())

    def normalise(self, latents: Tensor) -> Tensor:
        """Return raw latents (B, C, h, w) with mean 0 and variance 1, in float32."""
        return (latents.float() - self.mean) / (self.variance + EPS).sqrt()

    def restore(self, latents: Tensor) -> Tensor:
        """Return normalised latents as the encoder gives them, in float32."""
        return latents.float() * (self.variance + EPS).sqrt() + self.mean

    def save(self, path: Path) -> None:
        """Write a .safetensors file, the encoder in its metadata."""
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            save_tensors(temporary, self.state_dict(), {**self.encoder.metadata, "count": str(self.count)})


def load_statistics(path: Path) -> Statistics:
    """Return the statistics in a file; what is no such file is a ValueError that names it."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            mean, variance = file.get_tensor("mean"), file.get_tensor("variance")
            statistics = Statistics(mean, variance, Origin.of(metadata), int(metadata["count"]))
        if mean.shape != variance.shape or not (mean.is_floating_point() and variance.is_floating_point()):
            raise ValueError(f"mean {tuple(mean.shape)} and variance {tuple(variance.shape)} are no pair of floats")
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"'{path}' holds no latent statistics ({cut(error)}); measure them again") from None
    return statistics


class LatentMoments:
    """Count, mean and sum of squares about it of a stream of latents, in float64, joined by Chan's rule.

    Nothing of the size of the mean is ever squared, so no digits are lost. Memory is two latents.
    """

    def __init__(self, shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.mean = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, latents: Tensor) -> None:
        """Take in a batch (B, C, h, w); an empty one changes nothing."""
        if latents.shape[1:] != self.mean.shape:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; (B, {tuple(self.mean.shape)}) is needed")
        if len(latents):
            latents = latents.detach().to(self.mean)
            mean = latents.mean(0)
            self._join(len(latents), mean, (latents - mean).square().sum(0))

    def merge(self, other: "LatentMoments") -> None:
        """Take in all that another has seen."""
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"latents of {tuple(self.mean.shape)} and {tuple(other.mean.shape)} do not mix")
        if other.count:
            self._join(other.count, other.mean.to(self.mean), other.squares.to(self.mean))

    def _join(self, count: int, mean: Tensor, squares: Tensor) -> None:
        total = self.count + count
        gap = mean - self.mean
        self.squares += squares + gap.square() * (self.count * count / total)
        self.mean += gap * (count / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """Return the variance in float64; divided by the count, so that normalised latents have variance 1."""
        return self.squares / self.count

    def result(self, encoder: Origin) -> Statistics:
        """Return the statistics of all latents so far, as the statistics of this encoder."""
        if self.count < 2:
            raise ValueError(f"statistics need at least 2 latents; there are {self.count}")
        if not bool(self.squares.isfinite().all()):
            raise ValueError("latents hold NaN or infinity; look at the images and the encoder's weights")
        return Statistics(self.mean, self.variance, encoder, self.count)

    def state(self) -> dict[str, Tensor]:
        """Return copies as CPU tensors with a leading axis of length 1, along which processes join theirs."""
        named = {"count": torch.tensor(self.count), "mean": self.mean, "squares": self.squares}
        return {name: value.to("cpu", copy=True)[None] for name, value in named.items()}

    @staticmethod
    def from_state(state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> "LatentMoments":
        """Return the moments of a state, or of several joined along the first axis, merged in that order."""
        moments = LatentMoments(state["mean"].shape[1:], device)
        for count, mean, squares in zip(state["count"].tolist(), state["mean"], state["squares"], strict=True):
            if count:
                moments._join(count, mean.to(moments.mean), squares.to(moments.mean))
        return moments


def measure(
    encoder: LatentEncoder,
    images: ImagesByIndex,
    *,
    batch: int = 64,
    rank: int = 0,
    world: int = 1,
    progress: bool = True,
) -> LatentMoments:
    """Return the moments of both mirrors of all images; of `world` processes, each takes every world-th batch.

    Batches are cut alike however many processes there are: the last digit of a latent may depend on its neighbours.
    """
    moments = LatentMoments(encoder.latent_shape, next(encoder.parameters()).device)
    batches = torch.arange(len(images)).split(batch)[rank::world]
    for indices in tqdm(batches, desc="statistics", unit="batch", disable=not progress):
        chosen = images[indices]
        moments.add(encoder(chosen))
        moments.add(encoder(chosen.flip(-1)))
    return moments
