"""Random state dicts in the layouts that other projects publish, and their forward passes written from the papers.

Names and shapes are the published ones. The forward passes are written apart from the library: plain matrices, softmax
and float64; tables of positions and frequencies of time are rounded to float32, as there.
"""

import math

import numpy as np
import torch

F64 = torch.float64


class Draw:
    """Named random tensors: matrices of unit gain, so that nothing saturates or vanishes."""

    def __init__(self, seed=0, dtype=F64):
        self.generator, self.dtype, self.state = torch.Generator().manual_seed(seed), dtype, {}

    def normal(self, name, *shape, scale=1.0):
        value = torch.randn(shape, generator=self.generator, dtype=F64) * scale
        self.state[name] = value.to(self.dtype)

    def linear(self, name, out, width, gain=1.0):
        self.normal(f"{name}.weight", out, width, scale=gain / math.sqrt(width))
        self.normal(f"{name}.bias", out, scale=0.1)

    def norm(self, name, width, bias=False):
        self.normal(f"{name}.weight", width, scale=0.2)
        self.state[f"{name}.weight"] += 1
        if bias:
            self.normal(f"{name}.bias", width, scale=0.1)

    def patches(self, name, width, channels, patch):
        self.normal(f"{name}.proj.weight", width, channels, patch, patch, scale=1 / math.sqrt(channels * patch**2))
        self.normal(f"{name}.proj.bias", width, scale=0.1)

    def table(self, name, value):
        self.state[name] = torch.as_tensor(value).to(torch.float32).to(self.dtype)


def sines(width, side, extra=0):
    """Fixed positions: the column's waves in the first half, the row's in the second; sines before cosines."""
    frequency = 1 / 10000 ** (np.arange(width // 4) / (width / 4))
    rows, columns = np.divmod(np.arange(side * side), side)
    waves = [f(np.outer(p, frequency)) for p in (columns, rows) for f in (np.sin, np.cos)]
    return np.concatenate((np.zeros((extra, width)), np.concatenate(waves, axis=1)))[None]


def rotary(head, side, extra=0, dtype=torch.float32):
    """(cos, sin) of shape (tokens, head): a row's angles on the first half of the pairs, a column's on the second."""
    frequency = 10000.0 ** (-np.arange(head // 4) / (head // 4))
    rows, columns = np.divmod(np.arange(side * side), side)
    angles = np.concatenate((np.outer(rows, frequency), np.outer(columns, frequency)), axis=1)
    angles = np.concatenate((angles, np.zeros((extra, head // 2))))
    angles = torch.from_numpy(np.repeat(angles, 2, axis=1)).to(dtype)
    return angles.cos(), angles.sin()


# --- state dicts --------------------------------------------------------------------------------------------------


def sit_state(width=16, depth=2, patch=2, channels=4, side=4, classes=5, sigma=True, projectors=False, **options):
    """DiT, SiT and REPA's SiT; side: patches a side; sigma: twice the channels, the second half a learned variance."""
    draw = Draw(**options)
    draw.table("pos_embed", sines(width, side))
    draw.patches("x_embedder", width, channels, patch)
    draw.linear("t_embedder.mlp.0", width, 256)
    draw.linear("t_embedder.mlp.2", width, width)
    draw.normal("y_embedder.embedding_table.weight", classes + 1, width)
    for n in range(depth):
        draw.linear(f"blocks.{n}.attn.qkv", 3 * width, width, gain=2)
        draw.linear(f"blocks.{n}.attn.proj", width, width)
        draw.linear(f"blocks.{n}.mlp.fc1", 4 * width, width)
        draw.linear(f"blocks.{n}.mlp.fc2", width, 4 * width)
        draw.linear(f"blocks.{n}.adaLN_modulation.1", 6 * width, width)
    draw.linear("final_layer.linear", patch**2 * channels * (2 if sigma else 1), width)
    draw.linear("final_layer.adaLN_modulation.1", 2 * width, width)
    if projectors:
        for n in (0, 2, 4):
            draw.linear(f"projectors.0.{n}", 8, 8)
    return draw.state


def lightning_block(draw, name, width):
    hidden = int(2 / 3 * int(4 * width))
    for n in (1, 2):
        draw.norm(f"{name}.norm{n}", width)
    draw.linear(f"{name}.attn.qkv", 3 * width, width, gain=2)
    draw.linear(f"{name}.attn.proj", width, width)
    draw.linear(f"{name}.mlp.w12", 2 * hidden, width)
    draw.linear(f"{name}.mlp.w3", width, hidden)
    draw.linear(f"{name}.adaLN_modulation.1", 6 * width, width)


def lightning_state(width=16, depth=2, heads=2, patch=1, channels=4, side=4, classes=5, fourier=False, **options):
    """LightningDiT; fourier: as RAE has it."""
    draw = Draw(**options)
    draw.table("pos_embed", sines(width, side))
    for name, table in zip(("cos", "sin"), rotary(width // heads, side), strict=True):
        draw.table(f"feat_rope.freqs_{name}", table)
    draw.patches("x_embedder", width, channels, patch)
    if fourier:
        draw.normal("t_embedder.W", 256)
    draw.linear("t_embedder.mlp.0", width, 512 if fourier else 256)
    draw.linear("t_embedder.mlp.2", width, width)
    draw.normal("y_embedder.embedding_table.weight", classes + 1, width)
    for n in range(depth):
        lightning_block(draw, f"blocks.{n}", width)
    draw.norm("final_layer.norm_final", width)
    draw.linear("final_layer.linear", patch**2 * channels, width)
    draw.linear("final_layer.adaLN_modulation.1", 2 * width, width)
    return draw.state


def rae_state(widths=(16, 24), depths=(2, 2), heads=(2, 2), channels=8, side=4, classes=5, **options):
    """RAE's DiT^DH."""
    draw = Draw(**options)
    draw.table("pos_embed", sines(widths[0], side))
    for part, width, number in zip(("enc", "dec"), widths, heads, strict=True):
        for name, table in zip(("cos", "sin"), rotary(width // number, side), strict=True):
            draw.table(f"{part}_feat_rope.freqs_{name}", table)
    draw.patches("s_embedder", widths[0], channels, 1)
    draw.patches("x_embedder", widths[1], channels, 1)
    if widths[0] != widths[1]:
        draw.linear("s_projector", widths[1], widths[0])
    draw.normal("t_embedder.W", 256)
    draw.linear("t_embedder.mlp.0", widths[0], 512)
    draw.linear("t_embedder.mlp.2", widths[0], widths[0])
    draw.normal("y_embedder.embedding_table.weight", classes + 1, widths[0])
    for n in range(sum(depths)):
        lightning_block(draw, f"blocks.{n}", widths[0 if n < depths[0] else 1])
    draw.norm("final_layer.norm_final", widths[1])
    draw.linear("final_layer.linear", channels, widths[1])
    draw.linear("final_layer.adaLN_modulation.1", 2 * widths[1], widths[1])
    return draw.state


def raev2_state(widths=(16, 24), depths=(3, 2), heads=(2, 2), channels=8, side=4, classes=5, inner=True, **options):
    """RAEv2's DiT^DH, with in-context conditioning."""
    draw = Draw(**options)
    times, kinds = 4, 8
    for part, width, number, extra in (("enc", widths[0], heads[0], times + kinds), ("dec", widths[1], heads[1], 0)):
        for name, table in zip(("cos", "sin"), rotary(width // number, side, extra), strict=True):
            draw.table(f"{part}_rope.freqs_{name}", table)
    draw.patches("s_embedder", widths[0], channels, 1)
    draw.patches("x_embedder", widths[1], channels, 1)
    draw.linear("s_projector", widths[1], widths[0])
    draw.normal("t_embedder.W", 256)
    draw.normal("t_embedder.learnable_tokens", times, widths[0])
    draw.linear("t_embedder.mlp.0", widths[0], 512)
    draw.linear("t_embedder.mlp.2", widths[0], widths[0])
    draw.normal("ctx_embedder.embedding_table.weight", classes + 1, widths[0])
    draw.normal("ctx_embedder.learnable_tokens", kinds, widths[0])
    for n in range(sum(depths)):
        width = widths[0 if n < depths[0] else 1]
        for k in (1, 2):
            draw.norm(f"blocks.{n}.norm{k}", width)
        for part in ("q", "k", "v", "proj"):
            draw.linear(f"blocks.{n}.attn.{part}", width, width)
        for part in ("q", "k"):
            draw.norm(f"blocks.{n}.attn.{part}_norm", width // heads[0 if n < depths[0] else 1])
        hidden = int(2 / 3 * width * 4)
        for part in ("w1", "w2"):
            draw.linear(f"blocks.{n}.mlp.{part}", hidden, width)
        draw.linear(f"blocks.{n}.mlp.w3", width, hidden)
        if n >= depths[0]:
            draw.linear(f"blocks.{n}.adaln_modulation.1", 6 * width, width)
    for name, width in (("final_layer", widths[1]), *([("base_final_layer", widths[0])] if inner else [])):
        draw.norm(f"{name}.norm", width)
        draw.linear(f"{name}.linear", channels, width)
        draw.linear(f"{name}.adaln_modulation.1", 2 * width, width)
    return draw.state


def decoder_state(width=64, depth=2, hidden=128, channels=16, side=4, patch=4, **options):
    """A decoder of RAE or RAEv2."""
    draw = Draw(**options)
    draw.linear("decoder_embed", width, channels)
    draw.table("decoder_pos_embed", sines(width, side, extra=1))
    draw.normal("trainable_cls_token", 1, 1, width)
    for n in range(depth):
        name = f"decoder_layers.{n}"
        for part in ("query", "key", "value"):
            draw.linear(f"{name}.attention.attention.{part}", width, width)
        draw.linear(f"{name}.attention.output.dense", width, width)
        draw.linear(f"{name}.intermediate.dense", hidden, width)
        draw.linear(f"{name}.output.dense", width, hidden)
        for part in ("before", "after"):
            draw.norm(f"{name}.layernorm_{part}", width, bias=True)
    draw.norm("decoder_norm", width, bias=True)
    draw.linear("decoder_pred", patch**2 * 3, width)
    return draw.state


# --- forward passes -----------------------------------------------------------------------------------------------


def silu(x):
    return x / (1 + torch.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def layer(s, name, x):
    return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]


def centred(x, eps=1e-6):
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x, table):
    """Neighbours (0, 1), (2, 3), ... as real and imaginary part, times exp(i angle)."""
    cos, sin = (wave.to(x.dtype) for wave in table)
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = (even * cos[..., ::2] - odd * sin[..., ::2], odd * cos[..., 1::2] + even * sin[..., 1::2])
    return torch.stack(pairs, -1).flatten(-2)


def attend(query, key, value, heads, table=None, norms=None):
    batch, tokens, width = query.shape
    query, key, value = (p.reshape(batch, tokens, heads, -1).transpose(1, 2) for p in (query, key, value))
    if norms is not None:
        query, key = rms(query, norms[0]), rms(key, norms[1])
    if table is not None:
        query, key = turned(query, table), turned(key, table)
    weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(width // heads), -1)
    return (weights @ value).transpose(1, 2).reshape(batch, tokens, width)


def patched(s, name, x):
    weight = s[f"{name}.proj.weight"]
    patch = weight.shape[-1]
    windows = x.unfold(2, patch, patch).unfold(3, patch, patch)  # (B, C, h, w, p, p)
    return torch.einsum("bchwpq,dcpq->bhwd", windows, weight).flatten(1, 2) + s[f"{name}.proj.bias"]


def unpatched(x, patch, channels):
    batch, tokens, _ = x.shape
    side = math.isqrt(tokens)
    x = x.reshape(batch, side, side, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", x).reshape(batch, -1, side * patch, side * patch)[:, :channels]


def sinusoids(t):
    """Of frequencies in float32, as published, but times them in float64: of step 999 float32 keeps 4 digits."""
    frequency = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
    angle = t.float()[:, None] * frequency.to(F64)
    return torch.cat((angle.cos(), angle.sin()), -1)


def fourier(s, t):
    angle = t.float()[:, None] * s["t_embedder.W"].float() * 2 * torch.pi
    return torch.cat((angle.sin(), angle.cos()), -1)


def embedded_time(s, t):
    waves = fourier(s, t) if "t_embedder.W" in s else sinusoids(t)
    return layer(s, "t_embedder.mlp.2", silu(layer(s, "t_embedder.mlp.0", waves.to(F64))))


def sit(s, x, t, y, heads=2):
    """The output of a SiT, and of a DiT, its mean alone: (B, C, H, W)."""
    width, channels, patch, _ = s["x_embedder.proj.weight"].shape
    tokens = patched(s, "x_embedder", x) + s["pos_embed"]
    c = silu(embedded_time(s, t) + s["y_embedder.embedding_table.weight"][y])
    n = 0
    while f"blocks.{n}.attn.qkv.weight" in s:
        shift, scale, gate, shift2, scale2, gate2 = layer(s, f"blocks.{n}.adaLN_modulation.1", c)[:, None].chunk(6, -1)
        qkv = layer(s, f"blocks.{n}.attn.qkv", centred(tokens) * (1 + scale) + shift)
        tokens = tokens + gate * layer(s, f"blocks.{n}.attn.proj", attend(*qkv.split(width, -1), heads))
        hidden = gelu_tanh(layer(s, f"blocks.{n}.mlp.fc1", centred(tokens) * (1 + scale2) + shift2))
        tokens = tokens + gate2 * layer(s, f"blocks.{n}.mlp.fc2", hidden)
        n += 1
    shift, scale = layer(s, "final_layer.adaLN_modulation.1", c)[:, None].chunk(2, -1)
    return unpatched(layer(s, "final_layer.linear", centred(tokens) * (1 + scale) + shift), patch, channels)


def lightning_step(s, name, tokens, c, heads, table):
    """One block of LightningDiT or RAE; c (B, 1 or N, d), before its SiLU."""
    width = tokens.shape[-1]
    shift, scale, gate, shift2, scale2, gate2 = layer(s, f"{name}.adaLN_modulation.1", silu(c)).chunk(6, -1)
    qkv = layer(s, f"{name}.attn.qkv", rms(tokens, s[f"{name}.norm1.weight"]) * (1 + scale) + shift)
    tokens = tokens + gate * layer(s, f"{name}.attn.proj", attend(*qkv.split(width, -1), heads, table))
    first, second = layer(s, f"{name}.mlp.w12", rms(tokens, s[f"{name}.norm2.weight"]) * (1 + scale2) + shift2).chunk(
        2, -1
    )
    return tokens + gate2 * layer(s, f"{name}.mlp.w3", silu(first) * second)


def last_layer(s, name, norm, ada, tokens, c):
    shift, scale = layer(s, f"{name}.{ada}.1", silu(c)).chunk(2, -1)
    return layer(s, f"{name}.linear", rms(tokens, s[f"{name}.{norm}.weight"]) * (1 + scale) + shift)


def lightning(s, x, t, y, heads=2, tables=torch.float32):
    width, channels, patch, _ = s["x_embedder.proj.weight"].shape
    tokens = patched(s, "x_embedder", x) + s["pos_embed"]
    table = rotary(width // heads, math.isqrt(tokens.shape[1]), dtype=tables)
    c = (embedded_time(s, t) + s["y_embedder.embedding_table.weight"][y])[:, None]
    n = 0
    while f"blocks.{n}.norm1.weight" in s:
        tokens = lightning_step(s, f"blocks.{n}", tokens, c, heads, table)
        n += 1
    return unpatched(last_layer(s, "final_layer", "norm_final", "adaLN_modulation", tokens, c), patch, channels)


def rae(s, x, t, y, heads=(2, 2), depth=2, tables=torch.float32):
    """RAE's DiT^DH."""
    widths = [s[f"{name}_embedder.proj.weight"].shape[0] for name in "sx"]
    side, channels = x.shape[-1], x.shape[1]
    first, second = (rotary(w // h, side, dtype=tables) for w, h in zip(widths, heads, strict=True))
    time = embedded_time(s, t)
    c = silu(time + s["y_embedder.embedding_table.weight"][y])[:, None]
    tokens, n = patched(s, "s_embedder", x) + s["pos_embed"], 0
    for n in range(depth):
        tokens = lightning_step(s, f"blocks.{n}", tokens, c, heads[0], first)
    c = silu(time[:, None] + tokens)
    c = layer(s, "s_projector", c) if "s_projector.weight" in s else c
    tokens, n = patched(s, "x_embedder", x), depth
    while f"blocks.{n}.norm1.weight" in s:
        tokens = lightning_step(s, f"blocks.{n}", tokens, c, heads[1], second)
        n += 1
    return unpatched(last_layer(s, "final_layer", "norm_final", "adaLN_modulation", tokens, c), 1, channels)


def raev2_step(s, name, tokens, heads, table, c=None):
    modulation = [0.0, 0.0, 1.0] * 2 if c is None else layer(s, f"{name}.adaln_modulation.1", silu(c)).chunk(6, -1)
    shift, scale, gate, shift2, scale2, gate2 = modulation
    x = rms(tokens, s[f"{name}.norm1.weight"]) * (1 + scale) + shift
    parts = [layer(s, f"{name}.attn.{part}", x) for part in "qkv"]
    norms = [s[f"{name}.attn.{part}_norm.weight"] for part in "qk"]
    tokens = tokens + gate * layer(s, f"{name}.attn.proj", attend(*parts, heads, table, norms))
    x = rms(tokens, s[f"{name}.norm2.weight"]) * (1 + scale2) + shift2
    hidden = silu(layer(s, f"{name}.mlp.w1", x)) * layer(s, f"{name}.mlp.w2", x)
    return tokens + gate2 * layer(s, f"{name}.mlp.w3", hidden)


def raev2(s, x, t, y, heads=(2, 2), depth=3, inner=2, tables=torch.float32):
    """RAEv2's DiT^DH: its prediction, and the inner head's."""
    widths = [s[f"{name}_embedder.proj.weight"].shape[0] for name in "sx"]
    side, channels = x.shape[-1], x.shape[1]
    first = rotary(widths[0] // heads[0], side, 12, dtype=tables)
    second = rotary(widths[1] // heads[1], side, dtype=tables)
    time = embedded_time(s, t)[:, None]
    kinds = s["ctx_embedder.learnable_tokens"] + s["ctx_embedder.embedding_table.weight"][y][:, None]
    tokens = torch.cat((patched(s, "s_embedder", x), s["t_embedder.learnable_tokens"] + time, kinds), 1)
    for n in range(depth):
        tokens = raev2_step(s, f"blocks.{n}", tokens, heads[0], first)
        if n + 1 == inner:
            c = silu(time + tokens[:, : side**2])
            base = unpatched(last_layer(s, "base_final_layer", "norm", "adaln_modulation", c, c), 1, channels)
    c = layer(s, "s_projector", silu(time + tokens[:, : side**2]))
    tokens, n = patched(s, "x_embedder", x), depth
    while f"blocks.{n}.norm1.weight" in s:
        tokens = raev2_step(s, f"blocks.{n}", tokens, heads[1], second, c)
        n += 1
    return unpatched(last_layer(s, "final_layer", "norm", "adaln_modulation", tokens, c), 1, channels), base


def decoder(s, latents, heads=4, mean=(0.0,) * 3, deviation=(1.0,) * 3):
    """Images in [0, 1] by a decoder of RAE (with the scaling of its encoder's pixels), or RAEv2."""

    def normed(x, name):
        return centred(x, 1e-12) * s[f"{name}.weight"] + s[f"{name}.bias"]

    tokens = layer(s, "decoder_embed", latents.flatten(2).transpose(1, 2))
    tokens = torch.cat((s["trainable_cls_token"].expand(len(tokens), -1, -1), tokens), 1) + s["decoder_pos_embed"]
    n = 0
    while f"decoder_layers.{n}.output.dense.weight" in s:
        name = f"decoder_layers.{n}"
        x = normed(tokens, f"{name}.layernorm_before")
        mixed = attend(*(layer(s, f"{name}.attention.attention.{p}", x) for p in ("query", "key", "value")), heads)
        tokens = tokens + layer(s, f"{name}.attention.output.dense", mixed)
        x = gelu(layer(s, f"{name}.intermediate.dense", normed(tokens, f"{name}.layernorm_after")))
        tokens = tokens + layer(s, f"{name}.output.dense", x)
        n += 1
    x = layer(s, "decoder_pred", normed(tokens, "decoder_norm"))[:, 1:]
    patch = math.isqrt(x.shape[-1] // 3)
    scaling = (torch.tensor(value, dtype=F64)[:, None, None] for value in (deviation, mean))
    image = unpatched(x, patch, 3)
    return image * next(scaling) + next(scaling)
