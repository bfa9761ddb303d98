"""Networks of other projects as ours: DiT, SiT and REPA, LightningDiT, DiT^DH of RAE and of RAEv2."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mvm.checkpoint import Weights
from mvm.network import DDTConfig, DiTConfig
from mvm.published.foreign.tensors import (
    Pair,
    Tensors,
    check_sines,
    embedded,
    halves,
    modulated,
    named,
    padded,
    rotary_heads,
    scaled,
    square,
    swiglu,
    to_patches,
)

HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16, 1440: 20, 2048: 16}  # published, by width; files do not say


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


def _labels(t: Tensors, name: str, options: Options) -> tuple[Tensor, int, bool]:
    """Return the label table with a null class, the number of classes, and whether that was trained."""
    rows, width = t.shape(name, 2)
    table, classes = t.take(name, rows, width), options.classes or rows - 1
    if classes not in (rows, rows - 1) or classes < 1:
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
    return named("wide.project", (torch.eye(width), torch.zeros(width)))


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
