"""The GPU kernels against their plain twins, in Triton's interpreter: runs where Triton is installed.

And, everywhere, the layers that use them: with stand-ins in plain torch they answer as they do without.
"""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from kernel_code import WRITTEN, run
from torch.nn.functional import gelu, silu

from mvm.network import DiT, DiTConfig, branches
from mvm.network.blocks import use_kernels
from mvm.network.branches import GELU, Attention, PlainAttention, RotaryAttention, SwiGLU
from mvm.network.layers import NORM_EPS, ByKernels, norm_rotate, rotary_table, rotary_waves

CODE = """
import torch, triton
from torch.nn.functional import silu
from mvm.network.fast.kernels import rotary, swiglu
from mvm.network.layers import NORM_EPS, norm_rotate, rotary_table, rotary_waves

def check(pairs, within):
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted.detach(), rtol=within, atol=within)

for head, heads, side in ((64, 3, 4), (72, 2, 3), (16, 2, 4), (60, 2, 3)):
    torch.manual_seed(0)
    qkv, *grads = torch.randn(3, side * side, 3, heads, head), *torch.randn(3, 3, side * side, heads, head)
    weights = torch.rand(2, head)
    given = [t.clone().requires_grad_() for t in (qkv, *weights)]
    cos, sin = rotary_waves(rotary_table(side, head))
    query, key, value = given[0].unbind(2)
    wanted = norm_rotate(query, given[1], cos, sin), norm_rotate(key, given[2], cos, sin), value
    torch.autograd.backward(wanted, grads)
    programs, rows, tokens, constants = rotary._cover(qkv, *rotary.FORWARD)
    outs, rest = [torch.empty_like(grads[0]) for _ in range(2)], (*weights, cos, sin, rows, tokens)
    rotary.place_kernel[(programs,)](qkv, *outs, *rest, **constants, EPS=NORM_EPS)
    programs, _, _, constants = rotary._cover(qkv, *rotary.BACKWARD[:2])
    back, partial = torch.empty_like(qkv), torch.empty(programs, 4, constants["BLOCK"])
    rotary.place_back_kernel[(programs,)](*grads, qkv, back, partial, *rest, **constants, STAGES=1, EPS=NORM_EPS)
    of_weights = partial.sum(0)[:, : head // 2].reshape(2, -1)
    check(zip((*outs, back, *of_weights), (*wanted[:2], *(t.grad for t in given))), 1e-5)

for rows, width in ((100, 48), (256, 128), (300, 70)):
    torch.manual_seed(0)
    both, grad, bias = torch.randn(rows, 2 * width), torch.randn(rows, width), torch.randn(2 * width)
    given = both.clone().requires_grad_(), bias.clone().requires_grad_()
    gate, up = (given[0] + given[1]).chunk(2, dim=-1)
    wanted = silu(gate) * up
    wanted.backward(grad)
    out, back = torch.empty(rows, width), torch.empty_like(both)
    grid, constants = swiglu.FORWARD.cover(rows, width)
    swiglu.gated_kernel[grid](both, bias, out, rows, width, **constants)
    grid, constants = swiglu.BACKWARD.cover(rows, width)
    partial = torch.empty(grid[0], 2 * width)
    swiglu.gated_back_kernel[grid](grad, both, bias, back, partial, rows, width, **constants)
    check(zip((out, back, partial.sum(0)), (wanted, *(t.grad for t in given))), 1e-4)

# the functions that layers call, gradients and all, from inputs that are not contiguous too
from mvm.network.fast import kernels
from mvm.network.layers import add_gated, modulate

def compare(kernel, plain, *inputs):
    found = []
    for work in (kernel, plain):
        given = [value.detach().requires_grad_() for value in inputs]
        values = work(*given)
        values = values if isinstance(values, tuple) else (values,)
        loss = sum((value * torch.arange(value.numel()).view_as(value).sin()).sum() for value in values)
        found.append((*values, *torch.autograd.grad(loss, given)))
    check(zip(found[0], found[1]), 2e-5)

def parts(qkv, v, w):
    query, key, value = qkv.unbind(2)
    return norm_rotate(query, v, *waves), norm_rotate(key, w, *waves), value

def halves(both, bias):
    gate, up = (both + bias).chunk(2, dim=-1)
    return silu(gate) * up

def residual(centred, add=kernels.add_modulate):
    def work(x, y, bias, modulation):
        gate, shift, scale = modulation.chunk(6, dim=-1)[2:5]
        y = y + bias.detach() if add is kernels.add_modulate else y
        return add(x, y, bias, gate, shift, scale, NORM_EPS, centred)
    return work

def plain_sum(x, y, bias, gate, shift, scale, eps, centred):
    x = add_gated(x, gate, y + bias)
    return x, modulate(x, shift, scale, centred)

waves, r = rotary_waves(rotary_table(3, 16)), torch.randn
compare(lambda *g: kernels.placed(*g, *waves, NORM_EPS), parts, r(2, 9, 3, 2, 16), r(16), r(16))
compare(kernels.gated, halves, r(2, 9, 24), r(24))
compare(kernels.gated, halves, r(2, 24, 9).mT, r(24))
for centred in (False, True):
    compare(residual(centred), residual(centred, plain_sum), r(2, 9, 20), r(2, 20, 9).mT, r(20), r(2, 1, 120))
    kernel, plain = lambda *g: kernels.norm_modulate(*g, NORM_EPS, centred), lambda *g: modulate(*g, centred)
    compare(kernel, plain, r(2, 20, 9).mT, r(2, 1, 20), r(2, 1, 20))
"""


MUTATIONS = (
    WRITTEN
    + """
from mvm.network.fast.kernels import add_modulate, gated, norm_modulate, placed

parts = r(2, 16, 48), *r(3, 2, 1, 48)
assert written(gated, r(2, 16, 64), r(64)) == [["out"], ["both_out", "partial"]]
found = written(lambda x, a, b: norm_modulate(x, a, b, 1e-6, True), *parts[:3])
assert found == [["h_out", "moments"], ["partial", "x_out"]]
found = written(lambda *given: sum(add_modulate(*given, 1e-6, False)), *r(2, 2, 16, 48), r(48), *parts[1:])
assert found == [["h_out", "moments", "x_out"], ["partial", "x_out", "y_out"]]
found = written(lambda *given: sum(placed(*given, 1e-6)), r(2, 16, 3, 2, 16), r(16), r(16), r(16, 16), r(16, 16))
assert found == [["k_out", "q_out"], ["out", "partial"]]
"""
)


@pytest.mark.parametrize(("code", "interpreted"), [(CODE, True), (MUTATIONS, False)], ids=["values", "mutations"])
def test_kernels_equal_the_plain_code_and_write_to_no_input(code, interpreted):
    run(code, interpreted=interpreted)


def placed(qkv, q_weight, k_weight, cos, sin, eps):
    query, key, value = qkv.unbind(2)
    assert eps == NORM_EPS
    assert qkv.is_contiguous()
    return norm_rotate(query, q_weight, cos, sin), norm_rotate(key, k_weight, cos, sin), value


def gated(both, bias):
    gate, up = (both + bias).chunk(2, dim=-1)
    return silu(gate) * up


class Parted(torch.autograd.Function):
    """parted in plain torch: the bias, which the product has added, gets its gradient here."""

    @staticmethod
    def forward(ctx, qkv, bias):
        return tuple(part.clone() for part in qkv.unbind(2))

    @staticmethod
    def backward(ctx, *grads):
        joined = torch.stack(grads, dim=2)
        return joined, joined.sum((0, 1)).flatten()


def biased_gelu(x, bias):
    return gelu(x + bias, approximate="tanh")


STAND_INS = SimpleNamespace(placed=placed, gated=gated, parted=Parted.apply, biased_gelu=biased_gelu)
LAYERS = [RotaryAttention(32, 2), SwiGLU(32), PlainAttention(32, 2), GELU(32)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_one_product_by_kernels_is_several_without(layer, monkeypatch):
    monkeypatch.setattr(branches, "takes_kernels", lambda kernels, x: True)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    x, waves = torch.randn(2, 16, 32, requires_grad=True), rotary_waves(rotary_table(4, 16))
    given = (x, *waves) if isinstance(layer, Attention) else (x,)
    found = []
    for kernels in (None, STAND_INS):
        layer.kernels = kernels
        answer = layer(*given)
        found.append((answer, *torch.autograd.grad(answer.sin().sum(), (x, *layer.parameters()))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6 * float(other.detach().abs().max()))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
@pytest.mark.parametrize("kernels", [None, branches])  # any Python module stands for them
def test_a_network_is_copied_with_its_kernels(way, kernels):
    torch.manual_seed(0)
    network = DiT(DiTConfig(size="tiny", depth=2, width=32, heads=2), (1, 8, 8), 10)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)  # some begin as zeros, and so would the answer
    use_kernels(network, kernels)
    network.compile(backend="eager")
    other = way(network)
    asked = [module.kernels for module in other.modules() if isinstance(module, ByKernels)]
    assert asked == [kernels] * 6  # a block, its attention and its MLP, twice
    given = torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([3, 7])
    assert torch.equal(other(*given).prediction, network(*given).prediction)
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(next(other.parameters()), next(network.parameters()))
