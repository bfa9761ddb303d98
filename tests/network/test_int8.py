"""8-bit products against integers written out, and weights rounded again only when they change."""

import pytest
import torch
from torch import nn

from mvm.network.fast import int8
from mvm.network.fast.int8 import products, rounded, rounded_weight


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rows_are_rounded_to_a_half_step_of_their_own_scale():
    x = draw(5, 24) * torch.tensor([1e-20, 1e-3, 1.0, 1e3, 0.0])[:, None]
    values, scale = rounded(x)
    assert values.dtype == torch.int8
    assert values[:4].abs().amax(1).tolist() == [127] * 4
    assert not values[4].any()
    assert bool(((values * scale - x).abs() <= 0.5001 * scale).all())


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_rounded_matrices(parts, bias):
    layer = nn.Linear(20, 18, bias=bias)
    x = draw(2, 7, 20)
    with torch.no_grad():
        found = products(x, layer.weight, layer.bias, parts)
        a, b = rounded(x.reshape(14, 20)), rounded(layer.weight)
        want = (a.values.double() * a.scale) @ (b.values.double() * b.scale).T
        want = (want + layer.bias if bias else want).reshape(2, 7, 18)
    assert [part.shape for part in found] == [(2, 7, 18 // parts)] * parts
    assert torch.allclose(torch.cat(found, -1).double(), want, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_the_others():
    x, weight = draw(40, 32), draw(16, 32, seed=1)
    (whole,) = products(x, weight, None, 1)
    (alone,) = products(x[7:8], weight, None, 1)
    assert torch.equal(whole[7:8], alone)


def test_a_weight_is_rounded_again_only_when_it_changed():
    layer = nn.Linear(8, 8)
    first = rounded_weight(layer.weight)
    assert rounded_weight(layer.weight) is first
    with torch.no_grad():
        layer.weight.mul_(-2)
    second = rounded_weight(layer.weight)
    assert torch.equal(second.values, -first.values)
    assert rounded_weight(layer.weight) is second
    layer.weight.data = draw(8, 8)
    third = rounded_weight(layer.weight)
    assert torch.equal(third.values, rounded(layer.weight.detach()).values)
    assert rounded_weight(layer.weight) is third


def test_a_weight_that_is_gone_is_forgotten():
    before = len(int8._rounded_weights)
    layer = nn.Linear(8, 8)
    rounded_weight(layer.weight)
    assert len(int8._rounded_weights) == before + 1
    del layer
    assert len(int8._rounded_weights) == before
