"""The representation autoencoder: a frozen encoder, statistics of its latents, and a trained decoder.

    rae = RAE(encoder, decoder, statistics)
    rae.decode(rae.encode(images))                     # uint8 -> uint8, always the same
    rae.save(folder); load_rae(folder)
    load_decoder_only(folder).decode(latents)          # what sampling needs: no encoder is opened

Stage 1 trains the decoder on raw latents, without statistics: rae.decoder(rae.noised(rae.raw(images), seeds)).
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mvm import noise
from mvm.files import put_in_place, temporary_beside, write_text
from mvm.latent.codec import Codec
from mvm.latent.decoder import SIZES, Decoder, DecoderConfig
from mvm.latent.encoder import EncoderConfig, LatentEncoder, load_latent_encoder
from mvm.latent.fingerprint import SHOWN, Origin, fingerprint, require_same
from mvm.latent.statistics import Statistics, load_statistics
from mvm.options import at_least
from mvm.pixels import to_uint8
from mvm.untrusted import cut, read_json, whole_numbers

FORMAT = 1
INDEX = "rae.json"
DECODER, STATISTICS = "decoder.safetensors", "statistics.safetensors"
MOST_SIDE = 512  # of latents; images of 8,192 pixels at patches of 16
TAU = 0.8  # published strength of the noise that the decoder is trained under


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

    @torch.no_grad()
    def decode(self, samples: Tensor) -> Tensor:
        return to_uint8(self.decode_float(samples))

    def save(self, folder: Path) -> None:
        """Write the decoder, the statistics and what they belong to; the encoder's weights stay where they are."""
        if folder.is_dir() and any(folder.iterdir()) and not (folder / INDEX).is_file():
            raise ValueError(f"'{folder}' is not empty and holds no autoencoder; give another folder")
        folder.resolve().parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(folder)
        try:
            temporary.mkdir()
            self._write(temporary)
            put_in_place(temporary, folder)
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _write(self, folder: Path) -> None:
        origin = self.decoder.encoder
        weights = {name: value.cpu().contiguous() for name, value in self.decoder.state_dict().items()}
        save_file(weights, folder / DECODER, origin.told)
        (folder / DECODER).chmod(0o644)  # safetensors makes files private
        told: dict[str, Any] = {
            "format": FORMAT,
            "encoder": {**asdict(self.encoder_config), "fingerprint": origin.fingerprint},
            "words": origin.words,
            "latent_shape": self.latent_shape,
            "decoder": {**asdict(self.decoder.config), "fingerprint": self.decoder.fingerprint},
            "statistics": None,
        }
        if self.statistics is not None:
            self.statistics.save(folder / STATISTICS)
            told["statistics"] = {"fingerprint": self.statistics.fingerprint}
        write_text(folder / INDEX, json.dumps(told, indent=2) + "\n")


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
    def noised(latents: Tensor, seeds: Tensor, tau: float = TAU) -> Tensor:
        """Return raw latents (B, ...) + sigma e, sigma = tau U(0, 1) and e normal, both of the sample's own seed (B,).

        So does the published code; the paper says sigma is half-normal, |N(0, tau^2)|. tau = 0: as they are.
        """
        at_least("tau", tau, 0)
        sigma = tau * noise.uniform(seeds, noise.TIME, (1,) * (latents.ndim - 1)).to(latents)
        return latents + sigma * noise.normal(seeds, noise.TRAIN, latents.shape[1:]).to(latents)

    def encode(self, images: Tensor) -> Tensor:
        measured = self._measured
        return measured.normalise(self.raw(images))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Return decoder(encoder(images)), float (B, 3, H, W) about [-1, 1]; needs no statistics."""
        return self.decoder(self.raw(images).to(self.decoder.head.weight.dtype)).float()


class DecoderOnly(LatentDecoder):
    """An autoencoder without its encoder: it makes pictures of latents, not latents of pictures."""

    def encode(self, images: Tensor) -> Tensor:
        raise ValueError(
            f"this autoencoder was opened without its encoder '{self.encoder_config.name}': it decodes, and a model "
            "in its latents samples; to encode images, open it with load_rae(folder, encoder)"
        )

    def renamed(self, encoder: str) -> "DecoderOnly":
        """Return the same, with another name for the encoder: where it lies on one machine says nothing on others."""
        config, origin = replace(self.encoder_config, name=encoder), self.decoder.encoder
        words = origin.words.replace(self.encoder_config.name, encoder)
        for part in (self.decoder, self._measured):
            part.encoder = origin._replace(words=words)
        self.encoder_config = config
        return self


def is_rae(folder: Path) -> bool:
    """Return whether a folder holds an autoencoder."""
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> dict[str, Any]:
    """Return what a folder tells of its autoencoder."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"'{folder}' holds no autoencoder (no {INDEX})")
    try:
        told = read_json(path)
        version = told["format"]
        if version == FORMAT:
            _check_index(told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{path}' is damaged ({cut(error)}); restore it") from None
    if version != FORMAT:
        raise ValueError(f"'{path}' has format {cut(version)}; this version of mvm reads {FORMAT}")
    return told


def _check_index(told: dict[str, Any]) -> None:
    """Raise where the index tells something else than fingerprints, words, and the shape of square latents."""
    parts = [told["encoder"], told["decoder"], *([] if told["statistics"] is None else [told["statistics"]])]
    texts = [told["words"], told["encoder"]["name"], *(part["fingerprint"] for part in parts)]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("words and fingerprints must be text")
    _, height, width = told["latent_shape"]
    whole_numbers(*told["latent_shape"])
    if height != width or not all(told["latent_shape"]):
        raise ValueError(f"latents {cut(told['latent_shape'])}: a decoder needs a square")


def _without_fingerprint(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "fingerprint"}


def _require_fingerprint(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(
            f"'{path}' has the fingerprint {found[:SHOWN]}, its folder says {expected[:SHOWN]}: "
            "it is damaged or was put there from elsewhere; restore it"
        )


def _load_decoder(folder: Path, told: dict[str, Any], encoder: Origin) -> Decoder:
    path = folder / DECODER
    try:
        with safe_open(path, "pt") as file:
            made_with = Origin.of(file.metadata() or {})
        require_same(f"decoder '{path}'", made_with, encoder)
        config, shape = DecoderConfig(**_without_fingerprint(told["decoder"])), told["latent_shape"]
        weights = load_file(path)
        _require_shapes(weights, config, shape)
        decoder = Decoder(config, shape, made_with)
        decoder.load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"'{path}' holds no decoder that suits its {INDEX} ({cut(error)}); restore it") from None
    _require_fingerprint(path, decoder.fingerprint, told["decoder"]["fingerprint"])
    return decoder


def _require_shapes(weights: Mapping[str, Tensor], config: DecoderConfig, shape: Sequence[int]) -> None:
    """Refuse tensors of another decoder before memory is taken for one: these are of all sides that it can have."""
    whole_numbers(config.patch)
    if shape[-1] > MOST_SIDE:  # the positions are not in the file
        raise ValueError(f"latents of {shape[-1]} x {shape[-1]}; at most {MOST_SIDE} a side are decoded")
    depth, width, _, hidden = SIZES[config.size]
    wanted = {
        "embed.weight": (width, shape[0]),
        f"blocks.{depth - 1}.up.weight": (hidden, width),
        "head.weight": (3 * config.patch**2, width),
    }
    if other := [name for name, size in wanted.items() if name not in weights or weights[name].shape != size]:
        raise ValueError(f"{', '.join(other)}: missing, or of another shape")


def _load_statistics(folder: Path, told: dict[str, Any]) -> Statistics | None:
    if told["statistics"] is None:
        return None
    found = load_statistics(folder / STATISTICS)
    require_same(f"statistics '{folder / STATISTICS}'", found.encoder, _origin(told))
    _require_fingerprint(folder / STATISTICS, found.fingerprint, told["statistics"]["fingerprint"])
    return found


def _encoder_config(folder: Path, told: dict[str, Any]) -> EncoderConfig:
    try:
        return EncoderConfig(**_without_fingerprint(told["encoder"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"'{folder / INDEX}' is damaged ({cut(error)}); restore it") from None


def _origin(told: dict[str, Any]) -> Origin:
    return Origin(told["encoder"]["fingerprint"], told["words"])


def load_rae(folder: Path, encoder: LatentEncoder | str = "") -> RAE:
    """Return the autoencoder in a folder.

    encoder: one already loaded, or where its weights lie now; "": where they lay when the folder was written.
    An encoder, statistics or a decoder that do not belong together are a ValueError that names both sides.
    """
    told = read_index(folder)
    if isinstance(encoder, str):
        config = _encoder_config(folder, told)
        encoder = load_latent_encoder(replace(config, name=encoder or config.name))
    require_same(f"autoencoder '{folder}'", _origin(told), encoder.origin)
    decoder = _load_decoder(folder, told, _origin(told))
    return RAE(encoder, decoder, _load_statistics(folder, told)).eval()


def load_decoder_only(folder: Path) -> DecoderOnly:
    """Return the autoencoder in a folder without its encoder, whose weights need not be anywhere."""
    told = read_index(folder)
    config = _encoder_config(folder, told)
    return DecoderOnly(config, _load_decoder(folder, told, _origin(told)), _load_statistics(folder, told)).eval()
