"""Checkpoints of other projects: their tensors under our names, and the recipe that says what they are.

    mvm.load("sit:SiT-XL-2-256x256.pt", codec="sd-vae-ft-ema").generate(4)

DiT, SiT and REPA, LightningDiT, DiT^DH of RAE and of RAEv2, and the decoders of these two. Nothing of a file is
executed, and nothing is believed but its tensors: shapes give all sizes, and a tensor that is missing, left over or of
another shape is refused by name. What has no counterpart in our networks is folded into the matrix next to it: the
weights of a norm, the sign of a velocity, the order of a patch's numbers or of rotary pairs, channels for a learned
variance (dropped).
"""

import argparse
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mvm.checkpoint import Weights
from mvm.files import sha256
from mvm.latent import Decoder, DecoderConfig, DecoderOnly, EncoderConfig, Statistics
from mvm.latent.codec import Origin, fingerprint
from mvm.latent.encoder import EPS
from mvm.latent.rae import SIZES, Dimensions
from mvm.network import DDTConfig, DiTConfig
from mvm.network.extras import sine_positions
from mvm.network.layers import rotary_table
from mvm.objective import ObjectiveConfig
from mvm.options import choose
from mvm.recipes import FOLDER, CodecConfig, DataConfig, Recipe
from mvm.recipes.schema import PathConfig
from mvm.untrusted import MOST_WEIGHTS, check_pth, cut, is_named_tensor

NESTED = ("ema", "model", "state_dict")  # where training scripts keep the weights among other things
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # of torch's parallel and compiled modules
DECODER = "decoder_embed.weight"  # the first tensor of a decoder
PREFIX = "decoder."  # of a decoder in a whole autoencoder
HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16, 1440: 20, 2048: 16}  # published, by width; files do not say
# mean and deviation of an encoder's pixels
SCALINGS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "half": ((0.5,) * 3, (0.5,) * 3)}
# of diffusers' attention, which keeps the other names
DIFFUSERS = {"to_q": "attention.query", "to_k": "attention.key", "to_v": "attention.value", "to_out.0": "output.dense"}
SPREAD = 1e-5  # which diffusers adds to a deviation
SIDE = 16  # of latents at which diffusers' positions are the authors'
Pair = tuple[Tensor, Tensor]  # weight and bias of a linear layer


# --- files --------------------------------------------------------------------------------------------------------


def state_dict_in(loaded: object, where: str, weights: str = "ema") -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint: those of `weights` where it keeps several, else the only ones."""
    if isinstance(loaded, Mapping):
        tables = {key: loaded[key] for key in NESTED if isinstance(loaded.get(key), Mapping)}
        loaded = tables.get(weights) or next(iter(tables.values()), loaded)
    if not isinstance(loaded, Mapping) or not loaded or not all(map(is_named_tensor, loaded.items())):
        raise ValueError(f"{where} holds something other than named tensors; save the state dict alone")
    return {WRAPPERS.sub("", name): value for name, value in loaded.items()}


def read_tensors(path: Path, weights: str = "ema") -> dict[str, Tensor]:
    """Return the tensors of a .safetensors, or of a file of torch's, of which nothing is executed."""
    if not path.is_file():
        raise ValueError(f"'{path}' is no file; give a .safetensors, .pt, .pth or .ckpt")
    try:
        if path.suffix == ".safetensors":
            if path.stat().st_size > MOST_WEIGHTS:
                raise ValueError(f"larger than {MOST_WEIGHTS:,} bytes")
            loaded: object = load_file(path)
        else:
            check_pth(path)
            # training scripts keep their arguments next to the weights: a Namespace is a table, and is not looked at
            with torch.serialization.safe_globals([argparse.Namespace]):
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError:
        raise
    except SafetensorError as error:
        raise ValueError(f"'{path}' is no whole safetensors file ({cut(error)}); get it again") from None
    except Exception as error:  # of a torn or foreign file torch raises ten kinds of error
        raise ValueError(f"'{path}' is no whole file of weights alone ({cut(error)}); get it again") from None
    return state_dict_in(loaded, f"'{path}'", weights)


class ForeignTensors:
    """Named tensors, each taken once; where: the file, for errors."""

    def __init__(self, named: Mapping[str, Tensor], where: str) -> None:
        self.left = {
            name: value.float() if value.is_floating_point() and value.itemsize < 4 else value
            for name, value in named.items()
        }
        self.where = where
        # of positions that a file holds, against their formula: the last digit of bfloat16 where it is rounded
        halved = any(value.is_floating_point() and value.itemsize < 4 for value in named.values())
        self.table_error = 2**-7 if halved else 1e-4

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Return the shape of a tensor of so many axes."""
        if name not in self.left or self.left[name].ndim != axes:
            problem = f"has shape {tuple(self.left[name].shape)}" if name in self.left else "is missing"
            raise ValueError(f"{self.where}: '{name}' {problem}; is it of another format (--as)?")
        return tuple(self.left[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of that shape, once."""
        if self.shape(name, len(shape)) != shape:
            raise ValueError(f"{self.where}: '{name}' has shape {tuple(self.left[name].shape)}, not {shape}")
        return self.left.pop(name)

    def linear(self, name: str, out: int, width: int) -> Pair:
        """Return weight and bias of a linear layer."""
        return self.take(f"{name}.weight", out, width), self.take(f"{name}.bias", out)

    def patches(self, name: str, width: int, channels: int, patch: int) -> Pair:
        """Return the layer that embeds patches, a convolution in the file."""
        weight = self.take(f"{name}.proj.weight", width, channels, patch, patch)
        return weight.flatten(1), self.take(f"{name}.proj.bias", width)

    def count(self, prefix: str) -> int:
        """Return how many numbered modules begin with this, at least one."""
        numbers = {name[len(prefix) :].partition(".")[0] for name in self.left if name.startswith(prefix)}
        if not numbers:
            raise ValueError(f"{self.where}: '{prefix}0' is missing; is it of another format (--as)?")
        return len(numbers)

    def square(self, tokens: int) -> int:
        """Return the side of a square of tokens."""
        side = math.isqrt(tokens)
        if side**2 != tokens or not side:
            raise ValueError(f"{self.where}: {tokens} tokens are no square")
        return side

    def drop(self, prefix: str) -> None:
        """Leave out what sampling does not need."""
        self.left = {name: value for name, value in self.left.items() if not name.startswith(prefix)}

    def check_positions(self, name: str, positions: Tensor, formula: Tensor) -> None:
        """Refuse a table of a file that is not what our formula gives: ours are not stored."""
        if not float((positions.float() - formula).abs().max()) <= self.table_error:
            raise ValueError(f"{self.where}: '{name}' is not the published table of positions; that network is unknown")

    def finish(self) -> None:
        """Refuse tensors that nothing has taken: the file is of another network."""
        if self.left:
            names = ", ".join(sorted(map(cut, self.left))[:3])
            raise ValueError(f"{self.where}: {len(self.left)} tensors belong to no known part ({names}, ...)")


# --- layers -------------------------------------------------------------------------------------------------------


def named(name: str, pair: Pair) -> Weights:
    """Return the entries of a linear layer."""
    return {f"{name}.weight": pair[0], f"{name}.bias": pair[1]}


def stacked(pairs: Iterable[Pair]) -> Pair:
    """Return several linear layers of one input as one."""
    weights, biases = zip(*pairs, strict=True)
    return torch.cat(weights), torch.cat(biases)


def chunked(pair: Pair, count: int) -> list[Pair]:
    """Return one linear layer as several, of equal widths."""
    return list(zip(pair[0].chunk(count), pair[1].chunk(count), strict=True))


def _in_float64(compute: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Return what float64 gives, in the values' dtype."""
    return compute(*(value.double() for value in values)).to(values[0].dtype)


def _scaled(pair: Pair, norm: Tensor) -> Pair:
    """Return a linear layer with the weights of the norm before it."""
    return _in_float64(torch.mul, pair[0], norm), pair[1]


def _modulated(pair: Pair, norms: Iterable[Tensor]) -> Pair:
    """Return modulations (shift, scale, gate; or the first two) with the weights of the norms: w (1 + s) = 1 + s'."""
    weight, bias = pair[0].clone(), pair[1].clone()
    for number, norm in enumerate(norms):
        width = len(norm)
        rows = slice((3 * number + 1) * width, (3 * number + 2) * width)
        weight[rows] = _in_float64(lambda weight, norm: weight * norm[:, None], weight[rows], norm)
        bias[rows] = _in_float64(lambda bias, norm: norm * bias + norm - 1, bias[rows], norm)
    return weight, bias


def _halves(value: Tensor, heads: int) -> Tensor:
    """Return rows (heads * head, ...) with rotary pairs (0, 1), (2, 3), ... as (0, half), (1, half + 1), ..."""
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _padded(value: Tensor, rows: int) -> Tensor:
    """Return a tensor with rows of zeros after its own: channels of an MLP that add nothing."""
    return torch.cat((value, value.new_zeros(rows - len(value), *value.shape[1:])))


def to_patches(pair: Pair, channels: int, patch: int, sign: int = 1) -> Pair:
    """Return the last layer: a patch's numbers by channel first, the first channels alone, times the sign."""
    rows = [value.unflatten(0, (patch * patch, -1))[:, :channels].transpose(0, 1).flatten(0, 1) for value in pair]
    return sign * rows[0], sign * rows[1]


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


def _heads_of(width: int, asked: int) -> int:
    """Return the number of heads: as asked, or as published for this width."""
    if not (heads := asked or HEADS.get(width, 0)):
        known = ", ".join(map(str, HEADS))
        raise ValueError(
            f"heads=0: a file does not say its heads, and width {width} is not published ({known}); "
            "give them: mvm convert ... --heads N"
        )
    return heads


def _rotary_heads(t: ForeignTensors, name: str, width: int, side: int, others: int = 0) -> int:
    """Return the heads that a table of rotary waves is for; others: tokens after the image's, without positions."""
    tokens, head = t.shape(f"{name}.freqs_cos", 2)
    if tokens != side**2 + others or not head or head % 4 or width % head:
        raise ValueError(f"{t.where}: '{name}.freqs_cos' is for {tokens} tokens and heads of {head}, of width {width}")
    angles = torch.cat((rotary_table((side, side), head, 1e4), torch.zeros(others, head // 2))).repeat_interleave(2, -1)
    for wave, function in (("cos", torch.cos), ("sin", torch.sin)):
        t.check_positions(name, t.take(f"{name}.freqs_{wave}", tokens, head), function(angles))
    return width // head


def _sine_side(t: ForeignTensors, width: int) -> int:
    """Return the side of a square of tokens whose positions are the fixed waves."""
    side = t.square(t.shape("pos_embed", 3)[1])
    positions = t.take("pos_embed", 1, side**2, width)[0]
    t.check_positions("pos_embed", positions, sine_positions((side, side), width))
    return side


def _embeddings(t: ForeignTensors, labels: str, width: int, options: Options) -> tuple[Weights, int, bool]:
    """Return the embeddings of labels and time, the number of classes, and whether the null class was trained.

    Time has sinusoids, or random Fourier features with their frequencies.
    """
    name = f"{labels}.embedding_table.weight"
    rows = t.shape(name, 2)[0]
    classes = options.classes or rows - 1
    if classes not in (rows, rows - 1) or classes < 1:
        raise ValueError(f"classes={classes}: {t.where} has {rows} rows of labels, the null class counted in")
    waves = t.shape("t_embedder.mlp.0.weight", 2)[1]
    rates = {"level.rates": t.take("t_embedder.W", waves // 2)} if "t_embedder.W" in t else {}
    if waves != (512 if rates else 256):
        raise ValueError(
            f"{t.where}: time is embedded by {waves} waves; 256 sinusoids or 512 Fourier features are known"
        )
    weights = {
        "label.weight": _padded(t.take(name, rows, width), classes + 1),
        **rates,
        **named("level.up", t.linear("t_embedder.mlp.0", width, waves)),
        **named("level.out", t.linear("t_embedder.mlp.2", width, width)),
    }
    return weights, classes, classes < rows


def _classic_block(t: ForeignTensors, old: str, new: str, width: int, heads: int) -> Weights:
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


def _lightning_block(t: ForeignTensors, old: str, new: str, width: int, heads: int) -> Weights:
    """Return a block of LightningDiT or RAE."""
    hidden = t.shape(f"{old}.mlp.w12.weight", 2)[0] // 2
    norms = [t.take(f"{old}.norm{number}.weight", width) for number in (1, 2)]
    modulation = _modulated(t.linear(f"{old}.adaLN_modulation.1", 6 * width, width), norms)
    parts = chunked(t.linear(f"{old}.attn.qkv", 3 * width, width), 3)
    parts += chunked(t.linear(f"{old}.mlp.w12", 2 * hidden, width), 2)
    return _rotary_block(t, old, new, width, heads, parts) | named(f"{new}.modulation", modulation)


def _raev2_block(t: ForeignTensors, old: str, new: str, width: int, heads: int) -> Weights:
    """Return a block of RAEv2, which is modulated in the head alone."""
    hidden = t.shape(f"{old}.mlp.w1.weight", 2)[0]
    norms = [t.take(f"{old}.norm{number}.weight", width) for number in (1, 2)]
    parts = [t.linear(f"{old}.attn.{part}", width, width) for part in "qkv"]
    parts += [t.linear(f"{old}.mlp.w{number}", hidden, width) for number in (1, 2)]
    weights = {
        f"{new}.attention.{name}_norm.weight": _halves(t.take(f"{old}.attn.{name[0]}_norm.weight", width // heads), 1)
        for name in ("query", "key")
    }
    if f"{old}.adaln_modulation.1.weight" in t:
        modulation = _modulated(t.linear(f"{old}.adaln_modulation.1", 6 * width, width), norms)
        weights |= named(f"{new}.modulation", modulation)
    else:
        parts = [_scaled(part, norms[0 if number < 3 else 1]) for number, part in enumerate(parts)]
    return weights | _rotary_block(t, old, new, width, heads, parts)


def _rotary_block(t: ForeignTensors, old: str, new: str, width: int, heads: int, parts: Iterable[Pair]) -> Weights:
    """Return attention with rotary positions and a SwiGLU; parts: query, key, value, and the MLP's gate and up.

    The SwiGLU's hidden width is the next multiple of 16, as ours.
    """
    query, key, value, gate, up = parts
    turned = [(_halves(weight, heads), _halves(bias, heads)) for weight, bias in (query, key)]
    down, bias = t.linear(f"{old}.mlp.w3", width, len(gate[0]))
    hidden = 16 * math.ceil(len(gate[0]) / 16)
    gate_up = stacked((_padded(weight, hidden), _padded(bias, hidden)) for weight, bias in (gate, up))
    return {
        **named(f"{new}.attention.qkv", stacked([*turned, value])),
        **named(f"{new}.attention.out", t.linear(f"{old}.attn.proj", width, width)),
        **named(f"{new}.mlp.gate_up", gate_up),
        **named(f"{new}.mlp.down", (_padded(down.T, hidden).T.contiguous(), bias)),
    }


def _last(
    t: ForeignTensors, old: str, new: str, width: int, shape: tuple[int, int], sign: int = 1, norm: str = ""
) -> Weights:
    """Return the last layer; shape: channels and patch. norm: the name of its norm, which has weights."""
    channels, patch = shape
    ada = next((ada for ada in ("adaLN_modulation", "adaln_modulation") if f"{old}.{ada}.1.weight" in t), "adaLN")
    modulation = t.linear(f"{old}.{ada}.1", 2 * width, width)
    out = t.shape(f"{old}.linear.weight", 2)[0]
    if out not in (channels * patch**2, 2 * channels * patch**2):
        raise ValueError(f"{t.where}: '{old}.linear' gives {out} numbers a patch of {channels}x{patch}x{patch}")
    if norm:
        modulation = _modulated(modulation, [t.take(f"{old}.{norm}.weight", width)])
    linear = to_patches(t.linear(f"{old}.linear", out, width), channels, patch, sign)
    return {**named(f"{new}.modulation", modulation), **named(f"{new}.linear", linear)}


def _convert_dit(t: ForeignTensors, options: Options, time: str, sign: int = 1, design: str = "classic") -> Converted:
    """Return a DiT, SiT or REPA's SiT as a DiT of the classic design, a LightningDiT as one of the lightning design."""
    lightning = design == "lightning"
    width, channels, patch, _ = t.shape("x_embedder.proj.weight", 4)
    side, depth = _sine_side(t, width), t.count("blocks.")
    heads = _rotary_heads(t, "feat_rope", width, side) if lightning else _heads_of(width, options.heads)
    if ("t_embedder.W" in t) != (time == "fourier"):
        raise ValueError(f"{t.where}: time is embedded as in another format; LightningDiT of RAE is --as rae")
    weights, classes, null = _embeddings(t, "y_embedder", width, options)
    weights |= named("embed", t.patches("x_embedder", width, channels, patch))
    block = _lightning_block if lightning else _classic_block
    for number in range(depth):
        weights |= block(t, f"blocks.{number}", f"blocks.{number}", width, heads)
    weights |= _last(t, "final_layer", "head", width, (channels, patch), sign, "norm_final" if lightning else "")
    t.drop("projectors.")  # REPA's, for training alone
    t.finish()
    config = DiTConfig("tiny", patch, depth, width, heads, design=design, time=time)
    return Converted(config, weights, (channels, side * patch, side * patch), classes, null)


def _convert_rae(t: ForeignTensors, options: Options) -> Converted:
    """Return RAE's DiT^DH as a DDT of the lightning design; RAE's LightningDiT, which has no wide head, as a DiT."""
    if "s_embedder.proj.weight" not in t:
        return _convert_dit(t, options, "fourier", design="lightning")
    side = _sine_side(t, t.shape("s_embedder.proj.weight", 4)[0])
    names = ("feat_rope", "y_embedder", "norm_final")
    return _convert_ddt(t, options, side, names, _lightning_block, design="lightning")


def _convert_raev2(t: ForeignTensors, options: Options) -> Converted:
    """Return RAEv2's DiT^DH, with in-context conditioning and mostly an inner head, as a DDT of the raev2 design."""
    width = t.shape("s_embedder.proj.weight", 4)[0]
    times, kinds = (t.shape(f"{name}_embedder.learnable_tokens", 2)[0] for name in ("t", "ctx"))
    design = {"design": "raev2", "conditioning": "in-context", "time_tokens": times, "class_tokens": kinds}
    side = t.square(t.shape("dec_rope.freqs_cos", 2)[0])
    inner = options.inner_block if "base_final_layer.linear.weight" in t else 0
    names = ("rope", "ctx_embedder", "norm")
    t.drop("repa_projector.")  # for training alone
    context = {
        "context.time": t.take("t_embedder.learnable_tokens", times, width),
        "context.kind": t.take("ctx_embedder.learnable_tokens", kinds, width),
    }
    converted = _convert_ddt(t, options, side, names, _raev2_block, times + kinds, inner_block=inner, **design)
    return converted._replace(weights=context | converted.weights)


def _convert_ddt(
    t: ForeignTensors,
    options: Options,
    side: int,
    names: tuple[str, str, str],
    block: Callable[..., Weights],
    extra: int = 0,
    **design: Any,
) -> Converted:
    """Return a DiT^DH; names: of its rotary tables, embedding of labels and last norm; extra: tokens of context."""
    rope, labels, norm = names
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
    heads = _rotary_heads(t, f"enc_{rope}", width, side, extra)
    head_heads = _rotary_heads(t, f"dec_{rope}", head_width, side)
    weights, classes, null = _embeddings(t, labels, width, options)
    if design.get("inner_block"):
        weights |= _last(t, "base_final_layer", "inner_head", width, (channels, 1), norm=norm)
    if "s_projector.weight" in t or width != head_width:
        project = t.linear("s_projector", head_width, width)
    else:  # there is none in the file where backbone and head are as wide
        project = torch.eye(width), torch.zeros(width)
    weights |= {
        **named("wide.project", project),
        **named("embed", t.patches("s_embedder", width, channels, 1)),
        **named("wide.embed", t.patches("x_embedder", head_width, channels, 1)),
        **_last(t, "final_layer", "wide.out", head_width, (channels, 1), norm=norm),
    }
    for number in range(depth):
        weights |= block(t, f"blocks.{number}", f"blocks.{number}", width, heads)
    for number in range(count - depth):
        weights |= block(t, f"blocks.{depth + number}", f"wide.blocks.{number}", head_width, head_heads)
    t.finish()
    config = DDTConfig(
        "tiny", depth=depth, width=width, heads=heads,
        head_depth=count - depth, head_width=head_width, head_heads=head_heads, time="fourier", **design,
    )  # fmt: skip
    return Converted(config, weights, (channels, side, side), classes, null)


# --- checkpoints --------------------------------------------------------------------------------------------------


class ForeignFormat(NamedTuple):
    """A project's files. convert: its network. kind, schedule: what it predicts, on which path. codec, factor: of its
    latents, and pixels a side for one of them."""

    convert: Callable[[ForeignTensors, Options], Converted]
    kind: str = "flow"
    schedule: str = "linear-flow"
    codec: str = "vae"
    factor: int = 8


# SiT and LightningDiT run from noise at 0 to data at 1: their velocity is minus ours, at 1 - t.
FORMATS: dict[str, ForeignFormat] = {
    "sit": ForeignFormat(partial(_convert_dit, time="1-t", sign=-1)),
    "dit": ForeignFormat(partial(_convert_dit, time="step"), "eps", "variance-preserving"),
    "repa": ForeignFormat(partial(_convert_dit, time="t")),
    "lightningdit": ForeignFormat(partial(_convert_dit, time="1-t", sign=-1, design="lightning"), factor=16),
    "rae": ForeignFormat(_convert_rae, codec="rae", factor=16),
    "raev2": ForeignFormat(_convert_raev2, "x0", codec="rae", factor=16),
}


def is_decoder(tensors: Iterable[str]) -> bool:
    """Return whether tensors are of a decoder, alone or in a whole autoencoder."""
    return any(name in tensors for name in (DECODER, PREFIX + DECODER))


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
    """Return a published checkpoint as our model; weights: "ema", or "model" where the file has both.

    Samples of 1 or 3 channels are pixels in [-1, 1].
    """
    source, options = choose("format", format, FORMATS), options or Options()
    tensors = read_tensors(path, weights)
    if is_decoder(tensors):
        raise ValueError(f"'{path}' is a decoder (stage 1), which alone samples nothing; write it: mvm convert")
    converted = source.convert(ForeignTensors(tensors, f"'{path}'"), options)
    channels, side, _ = converted.shape
    pixels = channels in (1, 3)
    size = side if pixels else side * (options.factor or source.factor)
    known = (size, converted.classes) == (256, 1000) and channels != 1
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:64].strip("-.") or "model"
    folder = DataConfig(FOLDER, name, channels=channels if pixels else 3, size=size, classes=converted.classes)
    recipe = Recipe(
        name=name,
        description=f"Converted from {name}.",
        data=DataConfig("imagenet256") if known else folder,
        codec=CodecConfig() if pixels else CodecConfig(source.codec, channels=channels, side=side),
        path=PathConfig(source.schedule),
        network=converted.network,
        objective=ObjectiveConfig(source.kind, label_drop=0.1 if converted.null else 0.0),
    )
    return Foreign(recipe, converted.weights, sha256(path))


# --- decoders -----------------------------------------------------------------------------------------------------


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
    head = (_in_float64(lambda w: w * gain[:, None], weight), _in_float64(lambda b: b * gain + shift, bias))
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
    return renamed, (mean, _in_float64(lambda s: (s + SPREAD) ** 2 - EPS, deviation)), (pixels[0], pixels[1])


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
