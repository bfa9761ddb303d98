"""Products of 8-bit floats: their values, their gradients, what they do to shapes, and that they compile."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from mvm.network.fast import float8, gpu
from mvm.network.fast.float8 import GRADIENTS, GRANULARITY, ONE_SCALE, VALUES, products
from mvm.network.layers import Block, rotary_table, rotary_waves

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
TO_THE_BIT = {"rtol": 0, "atol": 0}
both = pytest.mark.parametrize("granularity", GRANULARITY)


def rounded(x, dtype, dims):
    """Values of x as an 8-bit format has them, and their scales: over all of it, or over the dimensions given."""
    factor = LARGEST[dtype] / x.abs().amax(dims, keepdim=True).float()
    return (x.float() * factor).to(dtype).double(), (1 / factor).double()


def plain(a, b, a_dtype, b_dtype, granularity):
    """a b^T in plain floats, of a and b rounded over what is summed: rows of either, or all of it."""
    dims = (0, 1) if granularity in ONE_SCALE else 1  # of few rows no sample is drawn
    (x, x_scale), (y, y_scale) = rounded(a, a_dtype, dims), rounded(b, b_dtype, dims)
    return ((x @ y.t()) * x_scale * y_scale.t()).float()


def weight_gradient(grad, x, granularity):
    """g^T x of the rounded matrices; in full where gradients of weights are."""
    return (
        grad.t() @ x if granularity == "partly" else plain(grad.t(), x.t(), GRADIENTS[granularity], VALUES, granularity)
    )


def draw(*shapes, seed=0):
    """Normal numbers of which some are much larger than others, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * torch.randn(shape[:-1], generator=generator).exp()[..., None]
        for shape in shapes
    ]


def run(x, weights, gradients, granularity, biases=(None, None)):
    """Answers, and the gradients of x and of the weights."""
    inputs = [value.clone().requires_grad_() for value in (x, *weights)]
    found = products(inputs[0], inputs[1:], biases, granularity)
    torch.autograd.backward(found, gradients)
    return found, [value.grad for value in inputs]


def distance(found, want):
    return ((found - want).norm() / want.norm()).item()


@both
def test_answers_and_gradients_are_those_of_the_rounded_matrices(granularity):
    x, one, other, g, h = draw((32, 48), (16, 48), (64, 48), (32, 16), (32, 64))
    (a, b), (dx, d_one, d_other) = run(x, (one, other), (g, h), granularity)
    torch.testing.assert_close(a, plain(x, one, VALUES, VALUES, granularity), **TO_THE_BIT)
    torch.testing.assert_close(b, plain(x, other, VALUES, VALUES, granularity), **TO_THE_BIT)
    parts = [plain(grad, w.t(), GRADIENTS[granularity], VALUES, granularity) for grad, w in ((g, one), (h, other))]
    torch.testing.assert_close(dx, parts[0] + parts[1], **TO_THE_BIT)
    for found, grad in ((d_one, g), (d_other, h)):
        torch.testing.assert_close(found, weight_gradient(grad, x, granularity), **TO_THE_BIT)


@pytest.mark.parametrize(("granularity", "recipe"), [("tensor", "tensorwise"), ("row", "rowwise")])
def test_values_are_those_of_torchao(granularity, recipe):
    """Its layers, with products of the rounded values in float32; scales as they are, not powers of two."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x, weight, grad = draw((128, 64), (96, 64), (128, 96))
    layers = nn.Sequential(nn.Linear(64, 96, bias=False))
    layers[0].weight.data.copy_(weight)
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(layers, config=replace(config, emulate=True, round_scales_to_power_of_2=False))
    theirs = x.clone().requires_grad_()
    want = layers(theirs)
    want.backward(grad)
    (found,), (dx, dw) = run(x, (weight,), (grad,), granularity, (None,))
    assert distance(want, x @ weight.t()) > 0.01  # they round
    for ours, other in ((found, want), (dx, theirs.grad), (dw, layers[0].weight.grad)):
        assert distance(ours, other) < 1e-6  # seen: 2.4e-7


@both
def test_what_eight_bits_hold_is_multiplied_exactly(granularity):
    """Small whole numbers, with the format's largest in every row and column: each scale is 1, nothing is rounded."""
    generator = torch.Generator().manual_seed(0)

    def whole(largest):
        x = torch.randint(-4, 5, (32, 32), generator=generator).float()
        return x.fill_diagonal_(largest)

    x, weight, grad = whole(448.0), whole(448.0), whole(LARGEST[GRADIENTS[granularity]])
    (found,), (dx, dw) = run(x, (weight,), (grad,), granularity, (None,))
    x, weight, grad = x.double(), weight.double(), grad.double()
    assert torch.equal(found, (x @ weight.t()).float())
    assert torch.equal(dx, (grad @ weight).float())
    assert torch.equal(dw, (grad.t() @ x).float())


@both
def test_rounding_is_small(granularity):
    """Three bits of mantissa are 2.6 % a value, two 5 %; two roundings add as squares do."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(256, 256, generator=generator) for _ in range(3))
    (found,), (dx, dw) = run(x, (weight,), (grad,), granularity, (None,))
    assert 0.01 < distance(found, x @ weight.t()) < 0.045
    assert 0.01 < distance(dx, grad @ weight) < 0.065
    assert granularity == "partly" or 0.01 < distance(dw, grad.t() @ x) < 0.065


def test_a_sample_has_room_and_cuts_off_above_it():
    """Some rows are seen: so many times their largest still fits in others, more is that; gradients have more room."""
    rows = float8.FEW
    x, grad = torch.ones(rows, 16), torch.ones(rows, 16)
    x[1], x[2], x[3] = 3.9, 5.0, -5e6
    grad[1], grad[2] = 60.0, 1e6
    (found,), (dx, _) = run(x, (torch.eye(16),), (grad,), "sampled", (None,))
    for row, want, within in ((0, 1.0, 1e-6), (1, 3.9, 0.04), (2, 4.0, 1e-6), (3, -4.0, 1e-6)):
        assert found[row].tolist() == pytest.approx([want] * 16, rel=within)
    for row, want, within in ((0, 1.0, 1e-6), (1, 60.0, 0.07), (2, 64.0, 1e-6)):
        assert dx[row].tolist() == pytest.approx([want] * 16, rel=within)


@pytest.mark.parametrize("side", [4, 8, 16, 32])
def test_a_sample_sees_every_place_of_an_image(side):
    """What is large at one token of all images is seen, wherever that is."""
    images = -(-float8.FEW // side**2) + 17
    for place in range(side**2):
        x = torch.ones(images, side**2, 1)
        x[:, place] = 100.0
        assert float8._factor(x.flatten(0, 1), "sampled", VALUES) == 448.0 / 400.0


def test_of_few_rows_all_are_seen():
    x = torch.zeros(float8.FEW - 1, 16)
    x[1] = 7.0
    assert torch.equal(float8._factor(x, "sampled", VALUES), float8._factor(x, "tensor", VALUES))


def test_scales_by_rows_spare_small_rows():
    """Rows 2^-20 as large as others are zeros with one scale for all, and as exact as others with their own."""
    (x, weight) = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    x[16:] *= 2.0**-20
    want = x @ weight.t()
    by_tensor, by_row = (products(x, (weight,), (None,), granularity)[0] for granularity in ("tensor", "row"))
    assert torch.equal(by_tensor[16:], torch.zeros(16, 32))
    assert distance(by_row[16:], want[16:]) < 0.045


@both
def test_zeros_and_gradients_of_zeros_are_zeros(granularity):
    x, weight = torch.zeros(16, 32), draw((16, 32))[0]
    (found,), (dx, dw) = run(x, (weight,), (torch.zeros(16, 16),), granularity, (None,))
    for value in (found, dx, dw):
        assert torch.equal(value, torch.zeros_like(value))


@both
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(granularity, value):
    """The trainer leaves out a step whose gradient is not finite; rounding must not make it look so."""
    x, weight, grad = draw((16, 32), (16, 32), (16, 16))
    for bad in (0, 1):
        tensors = [x.clone(), grad.clone()]
        tensors[bad][3, 5] = value
        _, (dx, dw) = run(tensors[0], (weight,), (tensors[1],), granularity, (None,))
        assert not torch.isfinite(dw).all()
        assert bad == 0 or not torch.isfinite(dx[3]).any()


@both
@pytest.mark.parametrize("shape", [(2, 8), (3, 5), (1,), (2, 2, 3)])
def test_leading_dimensions_and_biases_are_those_of_linear(granularity, shape):
    """The rows as one matrix; where they are not 16 n, zeros that fill them up change nothing."""
    x, weight, other, g, h = draw((*shape, 32), (16, 32), (48, 32), (*shape, 16), (*shape, 48))
    bias = torch.randn(16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found, (dx, dw, _) = run(x, (weight, other), (g, h), granularity, (bias, None))
    assert [value.shape for value in found] == [(*shape, 16), (*shape, 48)]
    rows = x.flatten(0, -2)
    want = plain(rows, weight, VALUES, VALUES, granularity)
    torch.testing.assert_close(found[0].flatten(0, -2), want + bias, **TO_THE_BIT)
    assert dx.shape == x.shape
    torch.testing.assert_close(dw, weight_gradient(g.flatten(0, -2), rows, granularity))
    torch.testing.assert_close(bias.grad, g.flatten(0, -2).sum(0))


@both
def test_autocast_decides_the_dtype_of_answers_and_not_of_weights_gradients(granularity):
    x, weight = draw((16, 32), (16, 32))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (found,), want = products(x, (weight,), (torch.zeros(16),), granularity), linear(x, weight)
    assert found.dtype == want.dtype == torch.bfloat16
    full = products(x, (weight,), (None,), granularity)[0]
    assert torch.equal(found, full.bfloat16())
    found.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


@both
def test_a_gpu_is_handed_what_it_takes(granularity):
    """torch's own checks of layouts, sizes and scales, on matrices that have a shape and no values."""
    context = SimpleNamespace()
    context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
    with torch.device("meta"):
        x, grad = (torch.empty(64, n, dtype=torch.bfloat16) for n in (32, 48))
        weights = [torch.empty(48, 32) for _ in range(2)]
    answers = float8._Products.forward(context, x, granularity, torch.bfloat16, *weights)
    dx, _, _, *dws = float8._Products.backward(context, grad, grad)
    assert [(value.shape, value.dtype) for value in answers] == 2 * [((64, 48), torch.bfloat16)]
    assert (dx.shape, dx.dtype) == ((64, 32), torch.bfloat16)
    assert [(value.shape, value.dtype) for value in dws] == 2 * [((48, 32), torch.float32)]
    with pytest.raises(RuntimeError, match="16"):  # the checks are there, and see an odd size
        float8._Products.forward(context, x[:, :24], granularity, torch.bfloat16, weights[0][:, :24])


def block(granularity):
    torch.manual_seed(0)
    found = Block(32, 2)
    gpu.apply(found, fp8=granularity)
    return found


@both
def test_a_block_compiles_whole_and_gives_the_same_bits(granularity):
    torch.compiler.reset()
    module, waves = block(granularity), rotary_waves(rotary_table((4, 4), 16))
    x, condition = torch.randn(2, 16, 32), torch.randn(2, 32)
    found = []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        answer = call(leaf, condition, *waves)
        answer.square().sum().backward()
        found.append([answer.detach(), leaf.grad, *(parameter.grad.clone() for parameter in module.parameters())])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_without_a_gradient_a_block_is_not_rounded():
    x, condition, waves = torch.randn(2, 16, 32), torch.randn(2, 32), rotary_waves(rotary_table((4, 4), 16))
    exact, coarse = block("off"), block("row")
    assert not torch.equal(exact(x, condition, *waves), coarse(x, condition, *waves))
    with torch.no_grad():
        assert torch.equal(exact(x, condition, *waves), coarse(x, condition, *waves))


class Roundings(TorchDispatchMode):
    """Shapes of what is cast to 8 bits."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        found = function(*given, **(named or {}))
        if function is torch.ops.aten._to_copy.default and found.dtype == VALUES:
            self.shapes.append(tuple(found.shape))
        return found


def test_activations_are_rounded_once_for_all_weights():
    x, *weights = draw((32, 64), (16, 64), (16, 64), (16, 64))
    with Roundings() as seen:
        products(x, weights, (None,) * 3, "tensor")
    assert seen.shapes == [(32, 64), (16, 64), (16, 64), (16, 64)]
