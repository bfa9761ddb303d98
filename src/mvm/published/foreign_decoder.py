"""Decoders of RAE and RAEv2 as autoencoders that decode: the authors' files, and diffusers' AutoencoderRAE."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from mvm.checkpoint import Weights
from mvm.latent import Decoder, DecoderConfig, DecoderOnly, EncoderConfig, Statistics
from mvm.latent.decoder import SIZES, Dimensions
from mvm.latent.fingerprint import Origin, fingerprint
from mvm.latent.statistics import EPS
from mvm.network.extras import sine_positions
from mvm.options import choose
from mvm.published.foreign import DECODER, PREFIX, ForeignTensors, in_float64, named, read_tensors, stacked, to_patches
from mvm.untrusted import cut

# mean and deviation of an encoder's pixels
SCALINGS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "half": ((0.5,) * 3, (0.5,) * 3)}
# of diffusers' attention, which keeps the other names
DIFFUSERS = {"to_q": "attention.query", "to_k": "attention.key", "to_v": "attention.value", "to_out.0": "output.dense"}
SPREAD = 1e-5  # which diffusers adds to a deviation
SIDE = 16  # of latents at which diffusers' positions are the authors'


def convert_decoder(
    format: str,
    path: Path,
    *,
    stats: Path | None = None,
    pixels: str = "imagenet",
    encoder: str = "unknown",
    weights: str = "ema",
) -> DecoderOnly:
    """Return RAE's or RAEv2's decoder as the half of an autoencoder that decodes.

    stats: the file with mean and variance of the latents; None: they are not normalised. pixels: how RAE's encoder
    scales pixels, "imagenet" or "half" (SigLIP); RAEv2's decoder gives pixels at once. A file of diffusers has both.
    encoder: its name, for people.
    """
    if format not in ("rae", "raev2"):
        raise ValueError(f"--as {format}: '{path}' is a decoder; use --as rae or --as raev2")
    scaling = choose("pixels", pixels, SCALINGS) if format == "rae" else ((0.0,) * 3, (1.0,) * 3)
    tensors, moments = read_tensors(path, weights), None
    if PREFIX + DECODER in tensors:
        others = {name: value for name, value in tensors.items() if not name.startswith(PREFIX)}
        tensors = {name.removeprefix(PREFIX): v for name, v in tensors.items() if name.startswith(PREFIX)}
        if any(".to_q." in name for name in tensors):
            tensors, moments, scaling = _of_diffusers(ForeignTensors(others, f"'{path}'"), tensors)
    config, shape, values = _decoder(ForeignTensors(tensors, f"'{path}'"), *scaling)
    origin = Origin(fingerprint({"published": format, "encoder": encoder}), f"'{encoder}' of a published {format}")
    decoder = Decoder(config, shape, origin)
    decoder.load_state_dict({name: value.float() for name, value in values.items()})
    statistics = Statistics(*(moments or _moments(stats, shape)), origin, 0)
    return DecoderOnly(EncoderConfig(encoder), decoder, statistics).eval().requires_grad_(False)


def _decoder(
    t: ForeignTensors, mean: Iterable[float], deviation: Iterable[float]
) -> tuple[DecoderConfig, tuple[int, int, int], Weights]:
    """Return config, shape of a latent and weights; mean and deviation by which pixels in [0, 1] were scaled."""
    width, channels = t.shape(DECODER, 2)
    side, depth = t.square(t.shape("decoder_pos_embed", 3)[1] - 1), t.count("decoder_layers.")
    hidden = t.shape("decoder_layers.0.intermediate.dense.weight", 2)[0]
    out = t.shape("decoder_pred.weight", 2)[0]
    patch = math.isqrt(out // 3)
    size = next((n for n, d in SIZES.items() if d == Dimensions(depth, width, d.heads, hidden)), "")
    if not size or out != 3 * patch**2:
        raise ValueError(
            f"{t.where}: {depth} layers of {width} and {hidden} for {out} numbers are no published decoder"
        )
    positions = t.take("decoder_pos_embed", 1, side**2 + 1, width)[0]
    t.check_positions("decoder_pos_embed", positions, _positions(side, width))
    gain = 2 * torch.tensor([*deviation], dtype=torch.float64).repeat(patch**2)  # of [0, 1] to [-1, 1]
    shift = 2 * torch.tensor([*mean], dtype=torch.float64).repeat(patch**2) - 1  # channels are innermost
    weight, bias = t.linear("decoder_pred", out, width)
    head = (in_float64(lambda w: w * gain[:, None], weight), in_float64(lambda b: b * gain + shift, bias))
    values = {
        **named("embed", t.linear("decoder_embed", width, channels)),
        "summary": t.take("trainable_cls_token", 1, 1, width),
        **_norm(t, "decoder_norm", "norm", width),
        **named("head", to_patches(head, 3, patch)),
    }
    for n in range(depth):
        old, new = f"decoder_layers.{n}", f"blocks.{n}"
        parts = [t.linear(f"{old}.attention.attention.{part}", width, width) for part in ("query", "key", "value")]
        values |= {
            **_norm(t, f"{old}.layernorm_before", f"{new}.attention_norm", width),
            **_norm(t, f"{old}.layernorm_after", f"{new}.mlp_norm", width),
            **named(f"{new}.qkv", stacked(parts)),
            **named(f"{new}.out", t.linear(f"{old}.attention.output.dense", width, width)),
            **named(f"{new}.up", t.linear(f"{old}.intermediate.dense", hidden, width)),
            **named(f"{new}.down", t.linear(f"{old}.output.dense", width, hidden)),
        }
    t.finish()
    return DecoderConfig(size, patch), (channels, side, side), values


def _norm(t: ForeignTensors, old: str, new: str, width: int) -> Weights:
    return named(new, (t.take(f"{old}.weight", width), t.take(f"{old}.bias", width)))


def _positions(side: int, width: int) -> Tensor:
    """Return positions of the class token, which has none, and of the latents."""
    return torch.cat((torch.zeros(1, width), sine_positions((side, side), width)))


def _of_diffusers(
    t: ForeignTensors, tensors: Weights
) -> tuple[Weights, tuple[Tensor, Tensor], tuple[list[float], list[float]]]:
    """Return the decoder's tensors by the authors' names, moments of latents, and mean and deviation of pixels."""
    shape = t.left["_latents_mean"].squeeze().shape if "_latents_mean" in t else ()
    if len(shape) != 3 or shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{t.where}: '_latents_mean' has shape {tuple(shape)}; statistics of {SIDE}x{SIDE} latents are needed, as "
            "diffusers has other positions than the authors for other sides"
        )
    for name, count in {"_latents_std": math.prod(shape), "encoder_mean": 3, "encoder_std": 3}.items():
        if name not in t or t.left[name].numel() != count:
            raise ValueError(f"{t.where}: '{name}' is missing, or no {count} numbers")
    mean, deviation = (t.left[f"_latents_{name}"].float().reshape(shape) for name in ("mean", "std"))
    pixels = [t.left[f"encoder_{name}"].flatten().tolist() for name in ("mean", "std")]
    renamed = {"decoder_pos_embed": _positions(SIDE, len(tensors[DECODER]))[None]}
    for name, value in tensors.items():
        for theirs, ours in DIFFUSERS.items():
            name = name.replace(f".attention.{theirs}.", f".attention.{ours}.")
        renamed[name] = value
    return renamed, (mean, in_float64(lambda s: (s + SPREAD) ** 2 - EPS, deviation)), (pixels[0], pixels[1])


def _moments(path: Path | None, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of latents; without a file those that change nothing."""
    if path is None:
        return torch.zeros(shape), torch.full(shape, 1 - EPS)
    tensors = read_tensors(path)
    try:
        mean, variance = (tensors[name].float().squeeze().expand(shape) for name in ("mean", "var"))
    except (KeyError, RuntimeError):
        names = ", ".join(f"{cut(name)} {tuple(value.shape)}" for name, value in list(tensors.items())[:3])
        raise ValueError(f"'{path}' has no mean and var of latents {shape}; it has {names}") from None
    return mean.contiguous(), variance.contiguous()
