"""The representation autoencoder: a frozen encoder, statistics of its latents, and a trained decoder.

    rae = RAE(encoder, decoder, statistics)
    rae.decode(rae.encode(images))                     # uint8 -> uint8, always the same
    rae.save(folder); load_rae(folder)
    load_decoder_only(folder).decode(latents)          # what sampling needs: no encoder is opened

The decoder is a plain vision transformer from latents to pixels, as in MAE. Stage 1 trains it on raw latents, without
statistics: rae.decoder(rae.noised(rae.raw(images), seeds)).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from mvm import noise
from mvm.files import atomic, claimed, write_text
from mvm.latent.codec import DIGITS, Codec, Origin, fingerprint, require_same, save_tensors
from mvm.latent.encoder import EncoderConfig, LatentEncoder, Statistics, load_latent_encoder, load_statistics
from mvm.network.extras import sine_positions
from mvm.network.layers import unpatchify
from mvm.options import at_least, choose
from mvm.pixels import to_uint8
from mvm.untrusted import cut, read_json, refusal, whole_numbers

FORMAT = 1
INDEX = "rae.json"
DECODER, STATISTICS = "decoder.safetensors", "statistics.safetensors"
MOST_SIDE = 512  # of latents; images of 8,192 pixels at patches of 16
NORM_EPS = 1e-12  # of the decoder, as published
TAU = 0.8  # published strength of the noise that the decoder is trained under


class Dimensions(NamedTuple):
    """Shape of the transformer; hidden: width of the MLPs."""

    depth: int
    width: int
    heads: int
    hidden: int


SIZES = {
    "tiny": Dimensions(2, 64, 4, 128),  # for tests
    "S": Dimensions(8, 384, 6, 1536),
    "B": Dimensions(12, 768, 12, 3072),
    "L": Dimensions(24, 1024, 16, 4096),
    "XL": Dimensions(28, 1152, 16, 4096),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder of the autoencoder: a vision transformer from latents to pixels."""

    size: str = "B"
    """Size of the decoder, which sets depth, width and heads. One of: tiny, S, B, L, XL."""
    patch: int = 16
    """Side of the patch of pixels that one latent becomes."""

    def __post_init__(self) -> None:
        choose("decoder.size", self.size, SIZES)
        at_least("decoder.patch", self.patch, 1)


class DecoderBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to its input."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        _, width, self.heads, hidden = dimensions
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4)  # each (B, heads, N, head)
        x = x + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """decoder(latents (B, C, h, h), unnormalised) -> images (B, 3, h patch, h patch), meant to lie in [-1, 1].

    encoder: whose latents it is trained on. `head` is the last layer, at which the adversarial weight is measured.
    """

    positions: Tensor

    def __init__(self, config: DecoderConfig, latent_shape: Sequence[int], encoder: Origin) -> None:
        super().__init__()
        channels, height, width = latent_shape
        if height != width:
            raise ValueError(f"latents are {height}x{width}; a decoder needs a square")
        dimensions = SIZES[config.size]
        self.config, self.encoder = config, encoder
        self.latent_shape, self.side = (channels, height, width), height
        self.embed = nn.Linear(channels, dimensions.width)
        self.summary = nn.Parameter(torch.zeros(1, 1, dimensions.width))  # the class token: no pixels come of it
        self.blocks = nn.ModuleList(DecoderBlock(dimensions) for _ in range(dimensions.depth))
        self.norm = nn.LayerNorm(dimensions.width, eps=NORM_EPS)
        self.head = nn.Linear(dimensions.width, 3 * config.patch**2)
        self.register_buffer("positions", sine_positions((self.side, self.side), dimensions.width), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initialise as MAE: Xavier, zero biases, the class token small."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.summary, std=0.02)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return (3, H, W) of the images."""
        side = self.side * self.config.patch
        return 3, side, side

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the weights, the config and the encoder's fingerprint."""
        facts = {**asdict(self.config), "latent_shape": self.latent_shape, "encoder": self.encoder.fingerprint}
        return fingerprint(facts, self.state_dict())

    def require(self, encoder: Origin, latent_shape: Sequence[int]) -> None:
        """Raise unless this decoder is for that encoder's latents."""
        require_same("decoder", self.encoder, encoder)
        if tuple(latent_shape) != self.latent_shape:
            raise ValueError(f"the decoder takes latents {self.latent_shape}, the encoder gives {tuple(latent_shape)}")

    def forward(self, latents: Tensor) -> Tensor:
        if latents.shape[1:] != self.latent_shape:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; (B, {self.latent_shape}) is needed")
        x = self.embed(latents.flatten(2).transpose(1, 2)) + self.positions
        x = torch.cat((self.summary.expand(len(x), -1, -1).to(x.dtype), x), dim=1)  # at no position: its own is zero
        for block in self.blocks:
            x = block(x)
        return unpatchify(self.head(self.norm(x[:, 1:])), self.config.patch, 3, (self.side, self.side))


class DecoderCost(NamedTuple):
    """Learned values, and multiply-adds of one image's forward pass: matrix products alone."""

    parameters: int
    multiply_adds: int


def decoder_cost(config: DecoderConfig, side: int) -> DecoderCost:
    """Return the cost for latents of side^2 places, without the first layer: that one is as wide as the encoder is."""
    with torch.device("meta"):
        decoder = Decoder(config, (1, side, side), Origin("", ""))
    values = sum(value.numel() for name, value in decoder.named_parameters() if not name.startswith("embed."))
    dimensions, places = SIZES[config.size], side**2
    tokens, width = places + 1, dimensions.width  # the class token, too
    block = tokens * (4 * width**2 + 2 * width * dimensions.hidden) + 2 * tokens**2 * width
    return DecoderCost(values, dimensions.depth * block + places * width * decoder.head.out_features)


# --- the autoencoder ----------------------------------------------------------------------------------------------


class LatentDecoder(nn.Module, Codec):
    """decode: normalised latents -> uint8 images, by the decoder and the statistics of one encoder's latents.

    encoder_config: which encoder that is. Parts of different encoders are refused.
    """

    def __init__(self, encoder_config: EncoderConfig, decoder: Decoder, statistics: Statistics | None = None) -> None:
        super().__init__()
        self.encoder_config, self.decoder = encoder_config, decoder
        self.latent_shape: tuple[int, ...] = decoder.latent_shape
        self.statistics: Statistics | None = None
        if statistics is not None:
            self.set_statistics(statistics)

    def set_statistics(self, statistics: Statistics) -> None:
        """Take the statistics of the encoder's latents; any others are refused."""
        require_same("statistics", statistics.encoder, self.decoder.encoder)
        if statistics.mean.shape != self.latent_shape:
            shapes = f"{tuple(statistics.mean.shape)}, the encoder gives {self.latent_shape}"
            raise ValueError(f"the statistics are of latents {shapes}; measure them anew")
        self.statistics = statistics.to(self.decoder.head.weight.device)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return (3, H, W) of decoded images."""
        return self.decoder.image_shape

    @property
    def fingerprint(self) -> str:
        """Return the sha256 that latents depend on: encoder and statistics; a decoder may be trained further."""
        return fingerprint({"encoder": self.decoder.encoder.fingerprint, "statistics": self._measured.fingerprint})

    @property
    def identity(self) -> dict[str, str]:
        return {"codec": self.fingerprint, "decoder": self.decoder.fingerprint}

    @property
    def _measured(self) -> Statistics:
        if self.statistics is None:
            raise ValueError("the autoencoder has no latent statistics yet; measure them and call set_statistics")
        return self.statistics

    def decode_float(self, samples: Tensor) -> Tensor:
        """Return normalised latents as images (B, 3, H, W), float32, about [-1, 1]; with gradient."""
        latents = self._measured.restore(samples)
        return self.decoder(latents.to(self.decoder.head.weight.dtype)).float()

    def save(self, folder: Path) -> None:
        """Write the decoder, the statistics and what they belong to; the encoder's weights stay where they are."""
        origin = self.decoder.encoder
        index: dict[str, Any] = {
            "format": FORMAT,
            "encoder": {**asdict(self.encoder_config), "fingerprint": origin.fingerprint},
            "words": origin.words,
            "latent_shape": self.latent_shape,
            "decoder": {**asdict(self.decoder.config), "fingerprint": self.decoder.fingerprint},
            "statistics": None,
        }
        with claimed(folder), atomic(folder) as temporary:
            if any(folder.iterdir()) and not (folder / INDEX).is_file():
                raise ValueError(f"'{folder}' is not empty and holds no autoencoder; give another folder")
            temporary.mkdir()
            save_tensors(temporary / DECODER, self.decoder.state_dict(), origin.metadata)
            if self.statistics is not None:
                self.statistics.save(temporary / STATISTICS)
                index["statistics"] = {"fingerprint": self.statistics.fingerprint}
            write_text(temporary / INDEX, json.dumps(index, indent=2) + "\n")


class RAE(LatentDecoder):
    """encode: uint8 images -> normalised latents, too."""

    def __init__(self, encoder: LatentEncoder, decoder: Decoder, statistics: Statistics | None = None) -> None:
        decoder.require(encoder.origin, encoder.latent_shape)
        super().__init__(encoder.config, decoder, statistics)
        self.encoder = encoder

    def raw(self, images: Tensor) -> Tensor:
        """Return latents as the encoder gives them, which is what the decoder takes."""
        return self.encoder(images)

    @staticmethod
    def noised(latents: Tensor, seeds: Tensor, tau: float = TAU, draw: noise.Normal = noise.normal) -> Tensor:
        """Return raw latents (B, ...) + sigma e, sigma = tau U(0, 1) and e normal, both of the sample's own seed (B,).

        So does the published code; the paper says sigma is half-normal, |N(0, tau^2)|. tau = 0: as they are.
        """
        at_least("tau", tau, 0)
        sigma = tau * noise.uniform(seeds, noise.TIME, (1,) * (latents.ndim - 1)).to(latents)
        return latents + sigma * draw(seeds, noise.TRAIN, latents.shape[1:], torch.float32).to(latents)

    def encode(self, images: Tensor) -> Tensor:
        return self._measured.normalise(self.raw(images))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Return decoder(encoder(images)), float (B, 3, H, W) about [-1, 1]; needs no statistics."""
        return self.decoder(self.raw(images).to(self.decoder.head.weight.dtype)).float()

    @torch.no_grad()
    def restore(self, images: Tensor) -> Tensor:
        return to_uint8(self.reconstruct(images))


class DecoderOnly(LatentDecoder):
    """An autoencoder that makes pictures of latents; its encoder is opened when the first pictures are encoded.

    source: where the encoder's weights lie, "" where they lay when the folder was written; None: it is never opened.
    """

    source: str | None = None

    @cached_property  # which is no submodule
    def encoder(self) -> LatentEncoder:
        """The encoder, opened now; another one than the decoder's is refused."""
        if self.source is None:
            what = f"this autoencoder was opened without its encoder '{self.encoder_config.name}': it decodes alone"
            raise ValueError(
                f"{what}; to encode images, give --allow-download (allow_download=True to mvm.load) if you trust what "
                "names it, or open it with load_rae(folder, encoder)"
            )
        config = self.encoder_config
        encoder = load_latent_encoder(replace(config, name=self.source or config.name))
        require_same("autoencoder", self.decoder.encoder, encoder.origin)
        return encoder

    def encode(self, images: Tensor) -> Tensor:
        return self._measured.normalise(self.encoder.to(self.decoder.head.weight.device)(images))

    def renamed(self, encoder: str) -> "DecoderOnly":
        """Return the same, with another name for the encoder: where it lies on one machine says nothing on others."""
        origin = self.decoder.encoder
        words = origin.words.replace(self.encoder_config.name, encoder)
        for part in (self.decoder, self._measured):
            part.encoder = origin._replace(words=words)
        self.encoder_config = replace(self.encoder_config, name=encoder)
        return self


def is_rae(folder: Path) -> bool:
    """Return whether a folder holds an autoencoder."""
    return (folder / INDEX).is_file()


@dataclass(frozen=True)
class Index:
    """What a folder says of its autoencoder; statistics: their fingerprint, None without any."""

    encoder: EncoderConfig
    origin: Origin
    latent_shape: tuple[int, int, int]
    decoder: DecoderConfig
    decoder_fingerprint: str
    statistics: str | None


def read_index(folder: Path) -> Index:
    """Return what a folder says of its autoencoder."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"'{folder}' holds no autoencoder (no {INDEX})")
    with refusal(f"'{path}' is damaged", "restore it"):
        table = read_json(path)
        if (version := table["format"]) == FORMAT:
            encoder, decoder = dict(table["encoder"]), dict(table["decoder"])
            origin = Origin(encoder.pop("fingerprint"), table["words"])
            digest = decoder.pop("fingerprint")
            statistics = None if table["statistics"] is None else table["statistics"]["fingerprint"]
            texts = [*origin, encoder["name"], digest, *([] if statistics is None else [statistics])]
            if not all(isinstance(text, str) and text for text in texts):
                raise ValueError("words and fingerprints must be text")
            channels, height, width = table["latent_shape"]
            config = DecoderConfig(**decoder)
            whole_numbers(channels, height, width, config.patch)
            if height != width or not channels or not height:
                raise ValueError(f"latents {cut(table['latent_shape'])}: a decoder needs a square")
            return Index(EncoderConfig(**encoder), origin, (channels, height, width), config, digest, statistics)
    raise ValueError(f"'{path}' has format {cut(version)}; this version of mvm reads {FORMAT}")


def _require_fingerprint(path: Path, actual: str, expected: str) -> None:
    if actual != expected:
        there = f"'{path}' has the fingerprint {actual[:DIGITS]}, its folder says {expected[:DIGITS]}"
        raise ValueError(f"{there}: it is damaged or was put there from elsewhere; restore it")


def _load_decoder(folder: Path, index: Index) -> Decoder:
    path = folder / DECODER
    try:
        with safe_open(path, "pt") as file:
            made_with = Origin.of(file.metadata() or {})
        require_same(f"decoder '{path}'", made_with, index.origin)
        weights = load_file(path)
        # before memory is taken for a decoder: these tensors are of all sizes that one can have
        if (side := index.latent_shape[-1]) > MOST_SIDE:  # the positions are not in the file
            raise ValueError(f"latents of {side} x {side}; at most {MOST_SIDE} a side are decoded")
        depth, width, _, hidden = SIZES[index.decoder.size]
        expected = {
            "embed.weight": (width, index.latent_shape[0]),
            f"blocks.{depth - 1}.up.weight": (hidden, width),
            "head.weight": (3 * index.decoder.patch**2, width),
        }
        if other := [name for name, size in expected.items() if name not in weights or weights[name].shape != size]:
            raise ValueError(f"{', '.join(other)}: missing, or of another shape")
        decoder = Decoder(index.decoder, index.latent_shape, made_with)
        decoder.load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"'{path}' holds no decoder that suits its {INDEX} ({cut(error)}); restore it") from None
    _require_fingerprint(path, decoder.fingerprint, index.decoder_fingerprint)
    return decoder


def _load_statistics(folder: Path, index: Index) -> Statistics | None:
    if index.statistics is None:
        return None
    path = folder / STATISTICS
    statistics = load_statistics(path)
    require_same(f"statistics '{path}'", statistics.encoder, index.origin)
    _require_fingerprint(path, statistics.fingerprint, index.statistics)
    return statistics


def load_rae(folder: Path, encoder: LatentEncoder | str = "") -> RAE:
    """Return the autoencoder in a folder.

    encoder: one already loaded, or where its weights lie now; "": where they lay when the folder was written.
    An encoder, statistics or a decoder that do not belong together are a ValueError that names both sides.
    """
    index = read_index(folder)
    if isinstance(encoder, str):
        encoder = load_latent_encoder(replace(index.encoder, name=encoder or index.encoder.name))
    require_same(f"autoencoder '{folder}'", index.origin, encoder.origin)
    return RAE(encoder, _load_decoder(folder, index), _load_statistics(folder, index)).eval()


def load_decoder_only(folder: Path, encoder: str | None = None) -> DecoderOnly:
    """Return the autoencoder in a folder without its encoder, whose weights need not be anywhere.

    encoder: where they lie, to be opened if images are encoded ("": where they lay); None: none are encoded.
    """
    index = read_index(folder)
    codec = DecoderOnly(index.encoder, _load_decoder(folder, index), _load_statistics(folder, index)).eval()
    codec.source = encoder
    return codec
