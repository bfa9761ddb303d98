"""Checkpoints of other projects: their tensors under our names, and the recipe that says what they are.

    mvm.load("sit:SiT-XL-2-256x256.pt", codec="sd-vae-ft-ema").generate(4)

Nothing of a file is believed but its tensors: shapes give all sizes, and a tensor that is missing, left over or of
another shape is refused by name. What has no place of its own is put into the matrix beside it: the weights of a norm,
the sign of a velocity, the order of a patch's numbers or of rotary pairs, channels for a learned variance (dropped).
"""

import argparse
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mvm.checkpoint import Weights
from mvm.files import sha256
from mvm.latent import Decoder, DecoderConfig, DecoderOnly, EncoderConfig, Statistics
from mvm.latent.decoder import SIZES as DECODERS
from mvm.latent.decoder import Dimensions
from mvm.latent.fingerprint import Origin, fingerprint
from mvm.latent.statistics import EPS
from mvm.network import DDTConfig, DiTConfig
from mvm.network.extras import sine_positions
from mvm.network.layers import rotary_table
from mvm.objective import ObjectiveConfig
from mvm.options import choose
from mvm.recipes import FOLDER, CodecConfig, DataConfig, Recipe
from mvm.recipes.schema import PathConfig
from mvm.untrusted import MOST_WEIGHTS, check_pth, cut, is_named_tensor

HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16, 1440: 20, 2048: 16}  # published, by width; files do not say
PICKED = ("ema", "model", "state_dict")  # where training scripts keep the weights among other things
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # of torch's parallel and compiled modules
TABLE_ERROR = 1e-4  # of positions that a file holds, against their formula
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SCALINGS = {"imagenet": IMAGENET, "half": ((0.5,) * 3, (0.5,) * 3)}  # mean and deviation of an encoder's pixels


class Tensors:
    """Named tensors, each taken once; where: the file, for errors."""

    def __init__(self, named: Mapping[str, Tensor], where: str) -> None:
        self.left = {
            name: value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value
            for name, value in named.items()
        }
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Return the shape of a tensor of so many axes."""
        if name not in self.left or self.left[name].ndim != axes:
            found = f"has shape {tuple(self.left[name].shape)}" if name in self.left else "is missing"
            raise ValueError(f"{self.where}: '{name}' {found}; is it of another format (--as)?")
        return tuple(self.left[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of that shape, once."""
        if self.shape(name, len(shape)) != shape:
            raise ValueError(f"{self.where}: '{name}' has shape {tuple(self.left[name].shape)}, not {shape}")
        return self.left.pop(name)

    def linear(self, name: str, out: int, width: int) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a linear layer."""
        return self.take(f"{name}.weight", out, width), self.take(f"{name}.bias", out)

    def count(self, prefix: str) -> int:
        """Return how many numbered modules begin with this, at least one."""
        numbers = {name[len(prefix) :].partition(".")[0] for name in self.left if name.startswith(prefix)}
        if not numbers:
            raise ValueError(f"{self.where}: '{prefix}0' is missing; is it of another format (--as)?")
        return len(numbers)

    def drop(self, *prefixes: str) -> None:
        """Leave out what sampling does not need."""
        self.left = {name: value for name, value in self.left.items() if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Refuse tensors that nothing has taken: the file is of another network."""
        if self.left:
            names = ", ".join(sorted(map(cut, self.left))[:3])
            raise ValueError(f"{self.where}: {len(self.left)} tensors belong to no known part ({names}, ...)")


def pick(found: object, where: str, weights: str = "ema") -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint: those of `weights` where it keeps several, else the only ones."""
    if isinstance(found, Mapping):
        tables = {key: found[key] for key in PICKED if isinstance(found.get(key), Mapping)}
        found = tables.get(weights) or next(iter(tables.values()), found)
    if not isinstance(found, Mapping) or not found or not all(map(is_named_tensor, found.items())):
        raise ValueError(f"{where} holds something other than named tensors; save the state dict alone")
    return {WRAPPERS.sub("", name): value for name, value in found.items()}


def read_tensors(path: Path, weights: str = "ema") -> dict[str, Tensor]:
    """Return the tensors of a .safetensors, or of a file of torch's, of which nothing is executed."""
    if not path.is_file():
        raise ValueError(f"'{path}' is no file; give a .safetensors, .pt, .pth or .ckpt")
    try:
        if path.suffix == ".safetensors":
            if path.stat().st_size > MOST_WEIGHTS:
                raise ValueError(f"larger than {MOST_WEIGHTS:,} bytes")
            found: object = load_file(path)
        else:
            check_pth(path)
            # training scripts keep their arguments beside the weights: a Namespace is a table, and is not looked at
            with torch.serialization.safe_globals([argparse.Namespace]):
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError:
        raise
    except SafetensorError as error:
        raise ValueError(f"'{path}' is no whole safetensors file ({cut(error)}); get it again") from None
    except Exception as error:  # of a torn or foreign file torch raises ten kinds of error
        raise ValueError(f"'{path}' is no whole file of weights alone ({cut(error)}); get it again") from None
    return pick(found, f"'{path}'", weights)


# --- parts --------------------------------------------------------------------------------------------------------

Pair = tuple[Tensor, Tensor]  # weight and bias of a linear layer


def wide(compute: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Return what float64 gives, in the values' dtype."""
    return compute(*(value.double() for value in values)).to(values[0].dtype)


def scaled(pair: Pair, norm: Tensor) -> Pair:
    """Return a linear layer with the weights of the norm before it."""
    return wide(lambda weight, norm: weight * norm, pair[0], norm), pair[1]


def modulated(pair: Pair, norms: Iterable[Tensor]) -> Pair:
    """Return modulations (shift, scale, gate; or the first two) with the weights of the norms: w (1 + s) = 1 + s'."""
    weight, bias = pair[0].clone(), pair[1].clone()
    for number, norm in enumerate(norms):
        width = len(norm)
        rows = slice((3 * number + 1) * width, (3 * number + 2) * width)
        weight[rows] = wide(lambda weight, norm: weight * norm[:, None], weight[rows], norm)
        bias[rows] = wide(lambda bias, norm: norm * bias + norm - 1, bias[rows], norm)
    return weight, bias


def halves(value: Tensor, heads: int) -> Tensor:
    """Return rows (heads * head, ...) with rotary pairs (0, 1), (2, 3), ... as (0, half), (1, half + 1), ..."""
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def padded(value: Tensor, rows: int) -> Tensor:
    """Return a tensor with rows of zeros after its own: channels of an MLP that add nothing."""
    return torch.cat((value, value.new_zeros(rows - len(value), *value.shape[1:])))


def named(name: str, pair: Pair) -> Weights:
    """Return the entries of a linear layer."""
    return {f"{name}.weight": pair[0], f"{name}.bias": pair[1]}


def swiglu(name: str, gate: Pair, up: Pair, down: Pair) -> Weights:
    """Return a SwiGLU; its hidden width is the next multiple of 16, as ours."""
    hidden = 16 * math.ceil(len(gate[0]) / 16)
    joint = tuple(torch.cat((padded(a, hidden), padded(b, hidden))) for a, b in zip(gate, up, strict=True))
    return {
        f"{name}.gate_up.weight": joint[0],
        f"{name}.gate_up.bias": joint[1],
        **named(f"{name}.down", (padded(down[0].T, hidden).T.contiguous(), down[1])),
    }


def embedded(t: Tensors, name: str, width: int, channels: int, patch: int) -> Pair:
    """Return the layer that embeds patches, a convolution in the file."""
    weight = t.take(f"{name}.proj.weight", width, channels, patch, patch)
    return weight.flatten(1), t.take(f"{name}.proj.bias", width)


def to_patches(pair: Pair, channels: int, patch: int, sign: int = 1) -> Pair:
    """Return the last layer: a patch's numbers by channel first, the first channels alone, times the sign."""
    rows = [value.unflatten(0, (patch * patch, -1))[:, :channels].transpose(0, 1).flatten(0, 1) for value in pair]
    return sign * rows[0], sign * rows[1]


def check_sines(t: Tensors, name: str, side: int, width: int) -> None:
    """Refuse positions that are not the fixed waves: ours are not stored."""
    found = t.take(name, 1, side**2, width)[0]
    _check_table(t, name, found, sine_positions((side, side), width))


def _check_table(t: Tensors, name: str, found: Tensor, wanted: Tensor) -> None:
    if float((found.float() - wanted).abs().max()) > TABLE_ERROR:
        raise ValueError(f"{t.where}: '{name}' is not the published table of positions; that network is not known")


def rotary_heads(t: Tensors, name: str, width: int, side: int, others: int = 0) -> int:
    """Return the number of heads that a table of rotary waves shows; others: tokens behind, without positions."""
    tokens, head = t.shape(f"{name}.freqs_cos", 2)
    if tokens != side**2 + others or not head or head % 4 or width % head:
        raise ValueError(f"{t.where}: '{name}.freqs_cos' is for {tokens} tokens and heads of {head}, of width {width}")
    angles = torch.cat((rotary_table((side, side), head, 1e4), torch.zeros(others, head // 2))).repeat_interleave(2, -1)
    for wave, function in (("cos", torch.cos), ("sin", torch.sin)):
        _check_table(t, name, t.take(f"{name}.freqs_{wave}", tokens, head), function(angles))
    return width // head


def heads_of(width: int, asked: int) -> int:
    """Return the number of heads: as asked, or as published for this width."""
    found = asked or HEADS.get(width, 0)
    if not found:
        known = ", ".join(map(str, HEADS))
        raise ValueError(
            f"heads=0: a file does not say its heads, and width {width} is not published ({known}); "
            "give them: mvm convert ... --heads N"
        )
    return found


def square(t: Tensors, count: int) -> int:
    """Return the side of a square of tokens."""
    side = math.isqrt(count)
    if side**2 != count or not side:
        raise ValueError(f"{t.where}: {count} tokens are no square")
    return side


# --- networks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What files do not say. heads: of attention. classes: 0: all rows but one, the null class. inner_block: after
    which RAEv2's inner head stands. factor: pixels a side for one latent. 0: as published."""

    heads: int = 0
    classes: int = 0
    inner_block: int = 8
    factor: int = 0


class Converted(NamedTuple):
    """A network's config, its weights, the shape of a sample, classes, and whether there is a null class."""

    network: DiTConfig
    weights: Weights
    shape: tuple[int, int, int]
    classes: int
    null: bool


def _labels(t: Tensors, name: str, options: Options) -> tuple[Tensor, int, bool]:
    """Return the label table with a null class, the number of classes, and whether that was trained."""
    rows, width = t.shape(name, 2)
    table, classes = t.take(name, rows, width), options.classes or rows - 1
    if classes not in (rows, rows - 1) or not classes:
        raise ValueError(f"classes={classes}: {t.where} has {rows} rows of labels, the null class counted in")
    return padded(table, classes + 1), classes, classes < rows


def _time(t: Tensors, width: int) -> Weights:
    """Return the embedding of time: sinusoids, or random Fourier features with their frequencies."""
    waves = t.shape("t_embedder.mlp.0.weight", 2)[1]
    rates = {"level.rates": t.take("t_embedder.W", waves // 2)} if "t_embedder.W" in t else {}
    if waves != (512 if rates else 256):
        raise ValueError(
            f"{t.where}: time is embedded by {waves} waves; 256 sinusoids or 512 Fourier features are known"
        )
    up, out = t.linear("t_embedder.mlp.0", width, waves), t.linear("t_embedder.mlp.2", width, width)
    return {**rates, **named("level.up", up), **named("level.out", out)}


def _attention(name: str, parts: Iterable[Pair], out: Pair, heads: int) -> Weights:
    """Return attention with rotary positions of queries, keys and values apart."""
    query, key, value = parts
    turned = [tuple(halves(each, heads) for each in pair) for pair in (query, key)]
    weight, bias = (torch.cat((turned[0][i], turned[1][i], value[i])) for i in (0, 1))
    return {**named(f"{name}.qkv", (weight, bias)), **named(f"{name}.out", out)}


def _lightning_block(t: Tensors, old: str, new: str, width: int, heads: int) -> Weights:
    """Return a block of LightningDiT or RAE."""
    norms = [t.take(f"{old}.norm{number}.weight", width) for number in (1, 2)]
    weight, bias = t.linear(f"{old}.attn.qkv", 3 * width, width)
    parts = zip(weight.chunk(3), bias.chunk(3), strict=True)
    hidden = t.shape(f"{old}.mlp.w12.weight", 2)[0] // 2
    gates, gate_biases = (value.chunk(2) for value in t.linear(f"{old}.mlp.w12", 2 * hidden, width))
    modulation = modulated(t.linear(f"{old}.adaLN_modulation.1", 6 * width, width), norms)
    return {
        **_attention(f"{new}.attention", parts, t.linear(f"{old}.attn.proj", width, width), heads),
        **swiglu(
            f"{new}.mlp",
            (gates[0], gate_biases[0]),
            (gates[1], gate_biases[1]),
            t.linear(f"{old}.mlp.w3", width, hidden),
        ),
        **named(f"{new}.modulation", modulation),
    }


def _classic_block(t: Tensors, old: str, new: str, width: int, heads: int) -> Weights:
    """Return a block of DiT or SiT."""
    hidden = t.shape(f"{old}.mlp.fc1.weight", 2)[0]
    if hidden != 16 * math.ceil(4 * width / 16):
        raise ValueError(f"{t.where}: '{old}.mlp' is {hidden} wide; 4 * {width} is known")
    return {
        **named(f"{new}.attention.qkv", t.linear(f"{old}.attn.qkv", 3 * width, width)),
        **named(f"{new}.attention.out", t.linear(f"{old}.attn.proj", width, width)),
        **named(f"{new}.mlp.up", t.linear(f"{old}.mlp.fc1", hidden, width)),
        **named(f"{new}.mlp.down", t.linear(f"{old}.mlp.fc2", width, hidden)),
        **named(f"{new}.modulation", t.linear(f"{old}.adaLN_modulation.1", 6 * width, width)),
    }


def _last(t: Tensors, old: str, new: str, width: int, shape: tuple[int, int], sign: int, norm: str = "") -> Weights:
    """Return the last layer; shape: channels and patch. norm: the name of its norm, which has weights."""
    channels, patch = shape
    ada = next((ada for ada in ("adaLN_modulation", "adaln_modulation") if f"{old}.{ada}.1.weight" in t), "adaLN")
    modulation = t.linear(f"{old}.{ada}.1", 2 * width, width)
    out = t.shape(f"{old}.linear.weight", 2)[0]
    if out not in (channels * patch**2, 2 * channels * patch**2):
        raise ValueError(f"{t.where}: '{old}.linear' gives {out} numbers a patch of {channels}x{patch}x{patch}")
    if norm:
        modulation = modulated(modulation, [t.take(f"{old}.{norm}.weight", width)])
    linear = to_patches(t.linear(f"{old}.linear", out, width), channels, patch, sign)
    return {**named(f"{new}.modulation", modulation), **named(f"{new}.linear", linear)}


def convert_dit(t: Tensors, options: Options, time: str, sign: int, design: str = "classic") -> Converted:
    """Return a DiT, SiT or REPA's SiT as a DiT of the classic design, a LightningDiT as one of the lightning design."""
    lightning = design == "lightning"
    width, channels, patch, _ = t.shape("x_embedder.proj.weight", 4)
    side, depth = square(t, t.shape("pos_embed", 3)[1]), t.count("blocks.")
    heads = rotary_heads(t, "feat_rope", width, side) if lightning else heads_of(width, options.heads)
    if ("t_embedder.W" in t) != (time == "fourier"):
        raise ValueError(f"{t.where}: time is embedded as in another format; LightningDiT of RAE is --as rae")
    table, classes, null = _labels(t, "y_embedder.embedding_table.weight", options)
    weights = {**named("embed", embedded(t, "x_embedder", width, channels, patch)), **_time(t, width)}
    check_sines(t, "pos_embed", side, width)
    block = _lightning_block if lightning else _classic_block
    for number in range(depth):
        weights |= block(t, f"blocks.{number}", f"blocks.{number}", width, heads)
    weights |= _last(t, "final_layer", "head", width, (channels, patch), sign, "norm_final" if lightning else "")
    t.drop("projectors.")  # REPA's, for training alone
    t.finish()
    config = DiTConfig("tiny", patch, depth, width, heads, design=design, time=time)
    return Converted(config, {**weights, "label.weight": table}, (channels, side * patch, side * patch), classes, null)


def _ddt_parts(t: Tensors) -> tuple[int, int, int, int, int]:
    """Return the widths of backbone and head, the channels of a token, and the blocks of both."""
    (width, channels, *patches), (head_width, _, *others) = (
        t.shape(f"{name}_embedder.proj.weight", 4) for name in ("s", "x")
    )
    if [*patches, *others] != [1] * 4:
        raise ValueError(f"{t.where}: patches of {patches} and {others}; those of RAE's stage 2 are single tokens")
    count = t.count("blocks.")
    widths = [t.shape(f"blocks.{number}.attn.proj.weight", 2)[0] for number in range(count)]
    # where both are as wide the blocks do not say which are the head's; every published head has two
    depth = count - 2 if head_width == width else widths.count(width)
    if not 0 < depth < count:
        raise ValueError(f"{t.where}: {count} blocks of widths {widths} are no backbone of {width} with a head")
    return width, head_width, channels, depth, count - depth


def _projected(t: Tensors, width: int, head_width: int) -> Weights:
    """Return the map from backbone to head; there is none in the file where both are as wide."""
    if "s_projector.weight" in t or width != head_width:
        return named("wide.project", t.linear("s_projector", head_width, width))
    like = t.left["x_embedder.proj.bias"]
    return named("wide.project", (torch.eye(width, dtype=like.dtype), torch.zeros_like(like)))


def convert_rae(t: Tensors, options: Options) -> Converted:
    """Return RAE's DiT^DH as a DDT of the lightning design; RAE's LightningDiT, which has no wide head, as a DiT."""
    if "s_embedder.proj.weight" not in t:
        return convert_dit(t, options, "fourier", 1, "lightning")
    width, head_width, channels, depth, head_depth = _ddt_parts(t)
    side = square(t, t.shape("pos_embed", 3)[1])
    heads = rotary_heads(t, "enc_feat_rope", width, side)
    head_heads = rotary_heads(t, "dec_feat_rope", head_width, side)
    table, classes, null = _labels(t, "y_embedder.embedding_table.weight", options)
    check_sines(t, "pos_embed", side, width)
    weights = {
        "label.weight": table,
        **_time(t, width),
        **_projected(t, width, head_width),
        **named("embed", embedded(t, "s_embedder", width, channels, 1)),
        **named("wide.embed", embedded(t, "x_embedder", head_width, channels, 1)),
        **_last(t, "final_layer", "wide.out", head_width, (channels, 1), 1, "norm_final"),
    }
    for number in range(depth):
        weights |= _lightning_block(t, f"blocks.{number}", f"blocks.{number}", width, heads)
    for number in range(head_depth):
        old = f"blocks.{depth + number}"
        weights |= _lightning_block(t, old, f"wide.blocks.{number}", head_width, head_heads)
    t.finish()
    config = _ddt((depth, width, heads), (head_depth, head_width, head_heads), design="lightning")
    return Converted(config, weights, (channels, side, side), classes, null)


def _ddt(backbone: tuple[int, int, int], head: tuple[int, int, int], **others: object) -> DDTConfig:
    names = ("depth", "width", "heads", "head_depth", "head_width", "head_heads")
    return DDTConfig("tiny", **dict(zip(names, (*backbone, *head), strict=True)), time="fourier", **others)  # ty: ignore


def _raev2_block(t: Tensors, old: str, new: str, width: int, heads: int) -> Weights:
    """Return a block of RAEv2, which is modulated in the head alone."""
    norms = [t.take(f"{old}.norm{number}.weight", width) for number in (1, 2)]
    parts = [t.linear(f"{old}.attn.{part}", width, width) for part in "qkv"]
    hidden = t.shape(f"{old}.mlp.w1.weight", 2)[0]
    gate, up = (t.linear(f"{old}.mlp.w{number}", hidden, width) for number in (1, 2))
    modulation: Weights = {}
    if f"{old}.adaln_modulation.1.weight" in t:
        modulation = named(
            f"{new}.modulation", modulated(t.linear(f"{old}.adaln_modulation.1", 6 * width, width), norms)
        )
    else:
        parts, gate, up = [scaled(part, norms[0]) for part in parts], scaled(gate, norms[1]), scaled(up, norms[1])
    own = {
        f"{new}.attention.{name}_norm.weight": halves(t.take(f"{old}.attn.{name[0]}_norm.weight", width // heads), 1)
        for name in ("query", "key")
    }
    return {
        **_attention(f"{new}.attention", parts, t.linear(f"{old}.attn.proj", width, width), heads),
        **own,
        **swiglu(f"{new}.mlp", gate, up, t.linear(f"{old}.mlp.w3", width, hidden)),
        **modulation,
    }


def convert_raev2(t: Tensors, options: Options) -> Converted:
    """Return RAEv2's DiT^DH, with in-context conditioning and mostly an inner head, as a DDT of the raev2 design."""
    width, head_width, channels, depth, head_depth = _ddt_parts(t)
    times, kinds = (t.shape(f"{name}_embedder.learnable_tokens", 2)[0] for name in ("t", "ctx"))
    side = square(t, t.shape("dec_rope.freqs_cos", 2)[0])
    heads = rotary_heads(t, "enc_rope", width, side, times + kinds)
    head_heads = rotary_heads(t, "dec_rope", head_width, side)
    table, classes, null = _labels(t, "ctx_embedder.embedding_table.weight", options)
    inner = options.inner_block if "base_final_layer.linear.weight" in t else 0
    weights = {
        "label.weight": table,
        "context.time": t.take("t_embedder.learnable_tokens", times, width),
        "context.kind": t.take("ctx_embedder.learnable_tokens", kinds, width),
        **_time(t, width),
        **_projected(t, width, head_width),
        **named("embed", embedded(t, "s_embedder", width, channels, 1)),
        **named("wide.embed", embedded(t, "x_embedder", head_width, channels, 1)),
        **_last(t, "final_layer", "wide.out", head_width, (channels, 1), 1, "norm"),
        **(_last(t, "base_final_layer", "inner_head", width, (channels, 1), 1, "norm") if inner else {}),
    }
    for number in range(depth):
        weights |= _raev2_block(t, f"blocks.{number}", f"blocks.{number}", width, heads)
    for number in range(head_depth):
        weights |= _raev2_block(t, f"blocks.{depth + number}", f"wide.blocks.{number}", head_width, head_heads)
    t.drop("repa_projector.")  # for training alone
    t.finish()
    config = _ddt(
        (depth, width, heads),
        (head_depth, head_width, head_heads),
        design="raev2",
        conditioning="in-context",
        time_tokens=times,
        class_tokens=kinds,
        inner_block=inner,
    )
    return Converted(config, weights, (channels, side, side), classes, null)


# --- formats ------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A project's files. convert: its network. kind, schedule: what it predicts, on which path. codec, factor: of its
    latents, and pixels a side for one of them."""

    convert: Callable[[Tensors, Options], Converted]
    kind: str = "flow"
    schedule: str = "linear-flow"
    codec: str = "vae"
    factor: int = 8


# SiT and LightningDiT run from noise at 0 to data at 1: their velocity is minus ours, at 1 - t.
FORMATS: dict[str, Format] = {
    "sit": Format(lambda t, options: convert_dit(t, options, "1-t", -1)),
    "dit": Format(lambda t, options: convert_dit(t, options, "step", 1), "eps", "variance-preserving"),
    "repa": Format(lambda t, options: convert_dit(t, options, "t", 1)),
    "lightningdit": Format(lambda t, options: convert_dit(t, options, "1-t", -1, "lightning"), factor=16),
    "rae": Format(convert_rae, codec="rae", factor=16),
    "raev2": Format(convert_raev2, "x0", codec="rae", factor=16),
}


def recipe_of(name: str, format: Format, found: Converted, factor: int = 0) -> Recipe:
    """Return the recipe of a converted network; samples of 1 or 3 channels are pixels in [-1, 1]."""
    channels, side, _ = found.shape
    pixels = channels in (1, 3)
    size = side if pixels else side * (factor or format.factor)
    known = (size, found.classes) == (256, 1000) and channels != 1
    folder = DataConfig(FOLDER, name, channels=channels if pixels else 3, size=size, classes=found.classes)
    return Recipe(
        name=name,
        description=f"Converted from {name}.",
        data=DataConfig("imagenet256") if known else folder,
        codec=CodecConfig() if pixels else CodecConfig(format.codec, channels=channels, side=side),
        path=PathConfig(format.schedule),
        network=found.network,
        objective=ObjectiveConfig(format.kind, label_drop=0.1 if found.null else 0.0),
    )


def plain(name: str) -> str:
    """Return a name of letters, digits, dots and dashes for a recipe."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip("-.") or "model"


def as_foreign(name: str) -> tuple[str, Path] | None:
    """Return format and file of "sit:FILE"; None for any other name."""
    format, colon, file = name.partition(":")
    return (format, Path(file)) if colon and format in FORMATS else None


class Foreign(NamedTuple):
    """A converted file: recipe, weights, and the sha256 of the file."""

    recipe: Recipe
    weights: Weights
    sha256: str


def convert(format: str, path: Path, weights: str = "ema", options: Options | None = None) -> Foreign:
    """Return a published checkpoint as our model; weights: "ema", or "model" where the file has both."""
    chosen = choose("format", format, FORMATS)
    tensors = read_tensors(path, weights)
    if is_decoder(tensors):
        raise ValueError(f"'{path}' is a decoder (stage 1), which alone samples nothing; write it: mvm convert")
    options = options or Options()
    found = chosen.convert(Tensors(tensors, f"'{path}'"), options)
    return Foreign(recipe_of(plain(path.stem), chosen, found, options.factor), found.weights, sha256(path))


# --- stage 1 ------------------------------------------------------------------------------------------------------

DECODER = "decoder_embed.weight"


def is_decoder(tensors: Iterable[str]) -> bool:
    """Return whether tensors are of a decoder, alone or in a whole autoencoder."""
    return any(name in tensors for name in (DECODER, f"decoder.{DECODER}"))


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
    scales pixels, "imagenet" or "half" (SigLIP); RAEv2's decoder gives pixels at once. encoder: its name, for people.
    """
    if format not in ("rae", "raev2"):
        raise ValueError(f"--as {format}: '{path}' is a decoder; use --as rae or --as raev2")
    tensors = read_tensors(path, weights)
    if DECODER not in tensors:
        tensors = {name.removeprefix("decoder."): v for name, v in tensors.items() if name.startswith("decoder.")}
    t = Tensors(tensors, f"'{path}'")
    width, channels = t.shape(DECODER, 2)
    side, depth = square(t, t.shape("decoder_pos_embed", 3)[1] - 1), t.count("decoder_layers.")
    hidden = t.shape("decoder_layers.0.intermediate.dense.weight", 2)[0]
    out = t.shape("decoder_pred.weight", 2)[0]
    size = next((n for n, d in DECODERS.items() if d == Dimensions(depth, width, d.heads, hidden)), "")
    if not size or out != 3 * math.isqrt(out // 3) ** 2:
        raise ValueError(
            f"{t.where}: {depth} layers of {width} and {hidden} for {out} numbers are no published decoder"
        )
    positions = t.take("decoder_pos_embed", 1, side**2 + 1, width)[0]
    _check_table(
        t, "decoder_pos_embed", positions, torch.cat((torch.zeros(1, width), sine_positions((side, side), width)))
    )
    mean, deviation = choose("pixels", pixels, SCALINGS) if format == "rae" else ((0.0,) * 3, (1.0,) * 3)
    gain = 2 * torch.tensor(deviation, dtype=torch.float64).repeat(out // 3)  # of [0, 1] to [-1, 1]; channels innermost
    shift = 2 * torch.tensor(mean, dtype=torch.float64).repeat(out // 3) - 1
    weight, bias = t.linear("decoder_pred", out, width)
    head = (wide(lambda w: w * gain[:, None], weight), wide(lambda b: b * gain + shift, bias))
    values = {
        **named("embed", t.linear("decoder_embed", width, channels)),
        "summary": t.take("trainable_cls_token", 1, 1, width),
        **named("norm", (t.take("decoder_norm.weight", width), t.take("decoder_norm.bias", width))),
        **named("head", to_patches(head, 3, math.isqrt(out // 3))),
    }
    for n in range(depth):
        old, new = f"decoder_layers.{n}", f"blocks.{n}"
        parts = [t.linear(f"{old}.attention.attention.{part}", width, width) for part in ("query", "key", "value")]
        joint = (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
        for ours, theirs in (("attention_norm", "before"), ("mlp_norm", "after")):
            norm = f"{old}.layernorm_{theirs}"
            values |= named(f"{new}.{ours}", (t.take(f"{norm}.weight", width), t.take(f"{norm}.bias", width)))
        values |= {
            **named(f"{new}.qkv", joint),
            **named(f"{new}.out", t.linear(f"{old}.attention.output.dense", width, width)),
            **named(f"{new}.up", t.linear(f"{old}.intermediate.dense", hidden, width)),
            **named(f"{new}.down", t.linear(f"{old}.output.dense", width, hidden)),
        }
    t.finish()
    shape = (channels, side, side)
    origin = Origin(fingerprint({"published": format, "encoder": encoder}), f"'{encoder}' of a published {format}")
    decoder = Decoder(DecoderConfig(size, math.isqrt(out // 3)), shape, origin)
    decoder.load_state_dict({name: value.float() for name, value in values.items()})
    statistics = Statistics(*_moments(stats, shape), origin, 0)
    return DecoderOnly(EncoderConfig(encoder), decoder, statistics).eval().requires_grad_(False)


def _moments(path: Path | None, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of latents; without a file those that change nothing."""
    if path is None:
        return torch.zeros(shape), torch.full(shape, 1 - EPS)
    found = read_tensors(path)
    try:
        mean, variance = (found[name].float().squeeze().expand(shape) for name in ("mean", "var"))
    except (KeyError, RuntimeError):
        names = ", ".join(f"{cut(name)} {tuple(value.shape)}" for name, value in list(found.items())[:3])
        raise ValueError(f"'{path}' has no mean and var of latents {shape}; it has {names}") from None
    return mean.contiguous(), variance.contiguous()
