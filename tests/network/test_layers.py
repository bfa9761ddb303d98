"""Layers against formulas written out by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, conv2d, conv3d, silu

from mvm.network.extras import GELU, Local, PlainAttention, sine_positions
from mvm.network.layers import (
    NORM_EPS,
    LevelEmbedding,
    RotaryAttention,
    SwiGLU,
    modulate,
    patchify,
    rotary_table,
    rotary_waves,
    rotate,
    unpatchify,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_scores(side, head, seed=0):
    """Raw q . k between every two places of a side x side grid, one q and one k put everywhere."""
    angles = rotary_table((side, side), head).double()
    q, k = draw(head, seed=seed), draw(head, seed=seed + 1)
    places = side * side
    turned_q = rotate(q.expand(places, head), *rotary_waves(angles))
    turned_k = rotate(k.expand(places, head), *rotary_waves(angles))
    return q, k, turned_q @ turned_k.T


def test_rotary_scores_depend_on_the_offset_only():
    side, head = 5, 16
    *_, scores = all_scores(side, head)
    by_offset = {}
    for i in range(side * side):
        for j in range(side * side):
            offset = (i // side - j // side, i % side - j % side)
            by_offset.setdefault(offset, []).append(float(scores[i, j]))
    assert len(by_offset) == (2 * side - 1) ** 2
    assert max(max(group) - min(group) for group in by_offset.values()) < 1e-5
    centres = sorted(sum(group) / len(group) for group in by_offset.values())
    assert min(b - a for a, b in itertools.pairwise(centres)) > 1e-5  # and every offset tells itself apart


def test_rotary_scores_equal_complex_rotation():
    """q . k at offset (dr, dc) is Re sum conj(q) k exp(i (theta_k - theta_q)), angles by row, then by column."""
    side, head, base = 4, 12, 100.0
    q, k, scores = all_scores(side, head, seed=5)
    quarter = head // 4
    frequency = torch.tensor([base ** (-n / quarter) for n in range(quarter)], dtype=torch.float64)
    cq, ck = torch.complex(*q.chunk(2)), torch.complex(*k.chunk(2))
    for i in range(side * side):
        for j in range(side * side):
            dr, dc = j // side - i // side, j % side - i % side
            turn = torch.exp(1j * torch.cat((dr * frequency, dc * frequency)))
            assert float(scores[i, j]) == pytest.approx(float((cq.conj() * ck * turn).sum().real), abs=1e-5)


def test_rotation_keeps_length_and_leaves_the_origin_alone():
    angles = rotary_table((6, 6), 8)
    x = draw(36, 8).float()
    turned = rotate(x, *rotary_waves(angles))
    assert torch.equal(turned[0], x[0])
    assert torch.allclose(turned.norm(dim=1), x.norm(dim=1), atol=1e-5)
    assert not torch.allclose(turned[1:], x[1:], atol=1e-2)


def test_modulate():
    x = draw(2, 3, 8)
    normal = x / torch.sqrt((x**2).mean(-1, keepdim=True) + NORM_EPS)
    shift, scale = draw(2, 1, 8, seed=1), draw(2, 1, 8, seed=2)
    assert torch.allclose(modulate(x, shift, scale), normal * (1 + scale) + shift, atol=1e-12)
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + NORM_EPS)
    assert torch.allclose(modulate(x, shift, scale, centred=True), normal * (1 + scale) + shift, atol=1e-12)


def test_attention_equals_softmax_written_out():
    side, width, heads = 3, 16, 2
    torch.manual_seed(0)
    layer = RotaryAttention(width, heads).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
    angles = rotary_table((side, side), width // heads).double()
    cos, sin = rotary_waves(angles)
    x = draw(2, side * side, width)
    head = width // heads
    want = torch.zeros_like(x)
    wq, wk, wv = layer.qkv.weight.chunk(3)
    for b in range(2):
        mixed = []
        for h in range(heads):
            rows = slice(h * head, (h + 1) * head)
            q, k, v = (x[b] @ w[rows].T for w in (wq, wk, wv))
            q, k = (
                rotate(z / torch.sqrt((z**2).mean(-1, keepdim=True) + NORM_EPS) * n.weight, cos, sin)
                for z, n in ((q, layer.query_norm), (k, layer.key_norm))
            )
            mixed.append(torch.softmax(q @ k.T / math.sqrt(head), dim=-1) @ v)
        want[b] = torch.cat(mixed, dim=-1) @ layer.out.weight.T + layer.out.bias
    assert torch.allclose(layer(x, cos, sin), want, atol=1e-10)


def test_classic_attention_is_torchs_own():
    torch.manual_seed(0)
    layer, wanted = PlainAttention(16, 4).double(), torch.nn.MultiheadAttention(16, 4, batch_first=True).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
        given = layer.qkv.weight, layer.qkv.bias, layer.out.weight, layer.out.bias
        own = wanted.in_proj_weight, wanted.in_proj_bias, wanted.out_proj.weight, wanted.out_proj.bias
        for parameter, value in zip(own, given, strict=True):
            parameter.copy_(value)
    x, nowhere = draw(2, 9, 16), torch.full((9, 4), torch.nan, dtype=torch.float64)  # positions are not read
    assert torch.allclose(layer(x, nowhere, nowhere), wanted(x, x, x, need_weights=False)[0], atol=1e-12)


def test_classic_mlp_formula():
    layer, x = GELU(8).double(), draw(3, 8)
    assert layer.up.weight.shape == (32, 8)
    a = x @ layer.up.weight.T + layer.up.bias
    inner = a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) / 2
    assert torch.allclose(layer(x), inner @ layer.down.weight.T + layer.down.bias, atol=1e-12)


def test_sine_positions_are_waves_of_row_and_column():
    side, width = 5, 24
    table = sine_positions((side, side), width).view(side, side, width)
    rates = 10_000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)
    for row in range(side):
        for column in range(side):
            want = torch.cat([f(place * rates) for place in (column, row) for f in (torch.sin, torch.cos)])
            assert torch.allclose(table[row, column].double(), want, atol=1e-6)
    assert len(torch.unique(table.flatten(0, 1), dim=0)) == side**2


@pytest.mark.parametrize(("width", "hidden"), [(384, 1024), (768, 2048), (1152, 3072), (64, 176), (16, 48)])
def test_swiglu_hidden_width(width, hidden):
    """8/3 width, rounded up to a multiple of 16."""
    layer = SwiGLU(width)
    assert layer.gate_up.weight.shape == (2 * hidden, width)
    assert layer.down.weight.shape == (width, hidden)


def test_swiglu_formula():
    layer = SwiGLU(8).double()
    x = draw(3, 8)
    a = x @ layer.gate_up.weight.T + layer.gate_up.bias
    gate, up = a.chunk(2, dim=-1)
    want = (gate * torch.sigmoid(gate) * up) @ layer.down.weight.T + layer.down.bias
    assert torch.allclose(layer(x), want, atol=1e-12)


def test_level_embedding_formula():
    layer = LevelEmbedding(8, frequencies=4, max_period=100.0)
    level = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    angle = 1000 * level[:, None] * torch.tensor([100.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    waves = torch.cat((torch.cos(angle), torch.sin(angle)), dim=1).float()
    want = silu(waves @ layer.up.weight.T + layer.up.bias) @ layer.out.weight.T + layer.out.bias
    assert torch.allclose(layer(level), want, atol=1e-3)


def test_patchify_layout():
    """Token n holds the patch at row n // side, column n % side: channels first, then its pixels row by row."""
    x = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4)
    tokens = patchify(x, 2)
    assert tokens.shape == (2, 4, 12)
    for n in range(4):
        r, c = 2 * (n // 2), 2 * (n % 2)
        assert torch.equal(tokens[:, n], x[:, :, r : r + 2, c : c + 2].reshape(2, 12))


def test_patchify_layout_on_any_axes():
    """Against cells cut out one by one: token n is the n-th cell of the grid, its last axis running fastest."""
    for grid in ((3,), (2, 3), (2, 1, 3)):
        x = torch.randn(2, 3, *(2 * extent for extent in grid))
        for token, place in zip(patchify(x, 2).unbind(1), itertools.product(*map(range, grid)), strict=True):
            cell = x[:, :, *(slice(2 * i, 2 * i + 2) for i in place)]
            assert torch.equal(token, cell.flatten(1))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_unpatchify_undoes_patchify(batch, channels, patch, grid):
    x = torch.randn(batch, channels, *(extent * patch for extent in grid))
    tokens = patchify(x, patch)
    assert tokens.shape == (batch, math.prod(grid), channels * patch ** len(grid))
    assert torch.equal(unpatchify(tokens, patch, channels, grid), x)


@pytest.mark.parametrize("grid", [(7,), (3, 5), (2, 3, 4)])
def test_rotary_and_sine_positions_on_any_axes(grid):
    """Each axis turns angles of its own by its own place; sines of the last axis stand first."""
    head, width = 16, 26
    for table, count, base in ((rotary_table(grid, head), head // 2, 100.0), (sine_positions(grid, width), 13, 1e4)):
        rates = [count // len(grid) + (axis < count % len(grid)) for axis in range(len(grid))]
        assert sum(rates) == count
        for row, place in zip(table, itertools.product(*map(range, grid)), strict=True):
            angles = [
                torch.tensor([i * base ** (-n / rate) for n in range(rate)])
                for i, rate in zip(place, rates, strict=True)
            ]
            waves = [torch.cat((a.sin(), a.cos())) for a in angles]
            assert torch.allclose(row, torch.cat(angles if base == 100.0 else waves[::-1]), atol=1e-6)


@pytest.mark.parametrize(("grid", "convolution"), [((6,), conv1d), ((3, 5), conv2d), ((2, 3, 4), conv3d)])
def test_local_is_a_depthwise_convolution_on_any_axes(grid, convolution):
    local = Local(4, grid)
    torch.nn.init.normal_(local.weight)
    x = torch.randn(2, math.prod(grid), 4)
    wide = x.unflatten(1, grid).movedim(-1, 1)
    mixed = convolution(wide, local.weight.movedim(-1, 0)[:, None], padding=1, groups=4)
    assert torch.allclose(local(x), x + mixed.flatten(2).transpose(1, 2), atol=1e-5)
