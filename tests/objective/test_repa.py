"""Representation alignment, each piece against numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, silu

from mvm.objective.repa import Projector, RepaConfig, alignment, match_grid, spatial_norm


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_alignment_by_hand():
    """cos of (3, 4) with (4, 3) is 24/25; with (-3, -4), -1; of (1, 0) with (0, 5), 0; with itself, 1."""
    projected = torch.tensor([[[3.0, 4.0], [3.0, 4.0]], [[1.0, 0.0], [1.0, 0.0]]])
    target = torch.tensor([[[4.0, 3.0], [-3.0, -4.0]], [[0.0, 5.0], [2.0, 0.0]]])
    want = ((1 - 24 / 25) + 2 + 1 + 0) / 4
    assert float(alignment(projected, target)) == pytest.approx(want, abs=1e-6)


def test_alignment_ignores_length_and_is_zero_at_the_target():
    target = draw(2, 9, 5)
    assert float(alignment(7 * target, target)) == pytest.approx(0, abs=1e-6)
    assert float(alignment(-target, target)) == pytest.approx(2, abs=1e-6)


def test_alignment_is_computed_in_float32():
    """The square of 300 overflows float16: a cosine taken there would be 0 or not a number."""
    big = torch.full((1, 1, 4), 300.0, dtype=torch.float16)
    loss = alignment(big, big)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["cosine", "mse"])
def test_autocast_does_not_reach_the_alignment(loss, dtype):
    """Of tokens as a projector leaves them under autocast, loss and gradient are those of float32 to the last bit."""
    student, target = (200 * draw(2, 9, 64, seed=seed).to(dtype) for seed in (0, 1))
    found = []
    for enabled in (False, True):
        tokens = (student if enabled else student.float()).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=enabled):
            value = alignment(tokens, match_grid(target, 3), loss)
        (gradient,) = torch.autograd.grad(value, tokens)
        assert value.dtype == torch.float32
        found.append((value, gradient.to(dtype)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_gradient_reaches_the_student_only():
    config = RepaConfig(encoder="x", hidden=8)
    projector, student = Projector(config, 6, 4), draw(2, 4, 6).requires_grad_()
    target = draw(2, 4, 4, seed=1).requires_grad_()
    alignment(projector(student), target).backward()
    assert target.grad is None
    assert student.grad is not None
    assert student.grad.norm() > 0
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in projector.parameters())


def test_gradient_step_brings_the_cosine_nearer():
    student, target = draw(2, 4, 6).requires_grad_(), draw(2, 4, 6, seed=1)
    before = alignment(student, target)
    before.backward()
    assert student.grad is not None
    assert alignment(student - student.grad, target) < before


def test_shapes_are_not_broadcast():
    with pytest.raises(AssertionError, match=r"\(2, 4, 6\) against \(2, 1, 6\)"):
        alignment(draw(2, 4, 6), draw(2, 1, 6))


def test_mlp_projector_formula():
    projector = Projector(RepaConfig(hidden=10), 6, 4)
    first, second, third = (layer for layer in projector.layers if isinstance(layer, nn.Linear))
    assert [tuple(layer.weight.shape) for layer in (first, second, third)] == [(10, 6), (10, 10), (4, 10)]
    for parameter in projector.parameters():
        nn.init.normal_(parameter)
    x = draw(2, 9, 6)
    h = silu(x @ first.weight.T + first.bias)
    want = silu(h @ second.weight.T + second.bias) @ third.weight.T + third.bias
    assert torch.allclose(projector(x), want, rtol=1e-4, atol=1e-4)


def test_conv_projector_sees_the_neighbours_on_the_grid():
    projector = Projector(RepaConfig(projector="conv"), 5, 3)
    x = draw(2, 16, 5)
    (layer,) = projector.layers
    assert isinstance(layer, nn.Conv2d)
    nn.init.normal_(layer.bias)
    grid = torch.zeros(2, 5, 4, 4)
    for n in range(16):
        grid[:, :, n // 4, n % 4] = x[:, n]
    found, want = projector(x), conv2d(grid, layer.weight, layer.bias, padding=1)
    assert found.shape == (2, 16, 3)
    for n in range(16):
        assert torch.allclose(found[:, n], want[:, :, n // 4, n % 4], atol=1e-5)


def test_match_grid_averages_whole_blocks():
    """A 4x4 grid onto 2x2: each token is the mean of its four."""
    features = torch.arange(16.0).reshape(1, 16, 1)
    assert match_grid(features, 2).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert match_grid(features, 1).flatten().tolist() == [7.5]


def test_match_grid_interpolates_where_no_factor_fits():
    """Onto a finer grid: between tokens linearly, beyond the outer ones constant."""
    features = torch.tensor([0.0, 4.0, 8.0, 12.0]).reshape(1, 4, 1)
    rows = match_grid(features, 4).reshape(4, 4)
    assert rows[0].tolist() == [0, 1, 3, 4]
    assert rows[:, 0].tolist() == [0, 2, 6, 8]


def test_match_grid_loses_no_token_when_it_shrinks():
    """9 onto 4: without a filter, some tokens would have no influence at all."""
    features = torch.zeros(1, 81, 1, requires_grad=True)
    match_grid(features, 4).sum().backward()
    assert features.grad is not None
    assert features.grad.min() > 0
    assert torch.allclose(match_grid(torch.ones(1, 81, 2), 4), torch.ones(1, 16, 2))


def test_match_grid_of_equal_size_and_of_no_square():
    features = draw(2, 9, 5).half()
    assert torch.equal(match_grid(features, 3), features.float())
    with pytest.raises(AssertionError, match="8 tokens are no square grid"):
        match_grid(draw(2, 8, 5), 2)


def test_spatial_norm_by_hand():
    """Tokens 1, 2, 6: mean 3, std sqrt(7)."""
    target = torch.tensor([1.0, 2.0, 6.0]).reshape(1, 3, 1)
    want = [(x - 0.8 * 3) / (math.sqrt(7) + 1e-6) for x in (1, 2, 6)]
    assert spatial_norm(target, 0.8).flatten().tolist() == pytest.approx(want, rel=1e-5)
    assert torch.equal(spatial_norm(target, 0), target)


def test_spatial_norm_removes_what_tokens_share():
    target = 100 + draw(2, 16, 5)
    other = 3 * target - 40
    assert torch.allclose(spatial_norm(target, 1.0), spatial_norm(other, 1.0), atol=1e-3)
    assert spatial_norm(target, 1.0).mean(1).abs().max() < 1e-4
    assert torch.isfinite(spatial_norm(torch.ones(1, 4, 2), 1.0)).all()


def test_defaults_by_size_of_network():
    config = RepaConfig(encoder="x")
    assert [config.tap(depth) for depth in (2, 4, 12, 13, 28)] == [2, 4, 4, 8, 8]
    assert [config.hidden_width(width) for width in (64, 384, 768, 1152)] == [128, 768, 1536, 2048]
    assert RepaConfig(block=7, hidden=99).tap(12) == 7
    assert RepaConfig(block=7, hidden=99).hidden_width(384) == 99


def test_when_it_is_active():
    assert not RepaConfig().active(0)
    assert RepaConfig(encoder="x").active(10**9)
    assert [RepaConfig(encoder="x", stop=3).active(step) for step in (0, 2, 3, 4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": -1}, r"repa\.resolution=-1 is out of range"),
        ({"block": -1}, r"repa\.block=-1"),
        ({"hidden": -2}, r"repa\.hidden=-2"),
        ({"stop": -3}, r"repa\.stop=-3"),
        ({"weight": -0.1}, r"repa\.weight=-0\.1 is out of range"),
        ({"weight": math.nan}, r"repa\.weight=nan"),
        ({"normalise": 1.5}, r"repa\.normalise=1\.5"),
        ({"projector": "cnov"}, r"repa\.projector='cnov' is unknown \(did you mean 'conv'\?\)"),
        ({"cache": "gpu"}, r"repa\.cache='gpu' is unknown; allowed: device, disk, none"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        RepaConfig(**options)


def test_block_beyond_the_network():
    with pytest.raises(ValueError, match=r"repa\.block=13 must lie in \[0, 12\]"):
        RepaConfig(block=13).tap(12)


def test_alignment_by_mean_square():
    projected, target = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    assert alignment(projected, target, "mse") == pytest.approx(float((projected - target).square().mean()))
    assert alignment(target, target, "mse") == 0
    with pytest.raises(ValueError, match=r"repa\.loss='mae' is unknown"):
        RepaConfig(loss="mae")
