"""The GPU kernels against their plain twins, in Triton's interpreter: runs where Triton is installed.

And, everywhere, the layers that use them: with stand-ins in plain torch they answer as they do without.
"""

import copy
import pickle

import pytest
import torch
from kernel_code import WRITTEN, run
from stand_ins import StandIns

from mvm.network import DDTConfig, DiTConfig, build_network
from mvm.network.extras import GELU, PlainAttention
from mvm.network.fast import gpu, swap
from mvm.network.layers import Attention, RotaryAttention, SwiGLU, rotary_table, rotary_waves

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
    cos, sin = rotary_waves(rotary_table((side, side), head))
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
from mvm.network.layers import modulate

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
    x = x + gate * (y + bias)
    return x, modulate(x, shift, scale, centred)

waves, r = rotary_waves(rotary_table((3, 3), 16)), torch.randn
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


LAYERS = [RotaryAttention, SwiGLU, PlainAttention, GELU]
NETWORKS = {
    "modern": DiTConfig(size="tiny", depth=2, width=32, heads=2),
    "classic": DiTConfig(size="tiny", depth=2, width=32, heads=2, design="classic", modulation="shared"),
    "all": DiTConfig(size="tiny", depth=3, width=32, heads=2, skip=True, local=True, inner_block=2),
    "ddt": DDTConfig(size="tiny", depth=2, width=32, heads=2, patch=2),
}


def shaken(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.2)  # some begin as zeros, and so would the answer
    return module


def network_of(name):
    network = shaken(build_network(NETWORKS[name], (1, 8, 8), 10))
    return network, (torch.randn(2, 1, 8, 8), torch.rand(2), torch.arange(2))


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_one_product_by_kernels_is_several_without(kind):
    layer = shaken(kind(32) if kind in (SwiGLU, GELU) else kind(32, 2))
    x, waves = torch.randn(2, 16, 32, requires_grad=True), rotary_waves(rotary_table((4, 4), 16))
    given = (x, *waves) if isinstance(layer, Attention) else (x,)
    found = []
    for kernels in (None, StandIns):
        gpu.apply(layer, kernels)
        answer = layer(*given)
        found.append((answer, *torch.autograd.grad(answer.sin().sum(), (x, *layer.parameters()))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6 * float(other.detach().abs().max()))


class Elsewhere(StandIns):
    """Kernels for another device."""

    @staticmethod
    def takes(x):
        return False


APPLIED = {
    "kernels": {"kernels": StandIns},
    "sampling": {"kernels": StandIns, "sampling": True},
    "float8": {"fp8": "tensor"},
    "both": {"kernels": StandIns, "fp8": "row"},
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("how", [{}, {"kernels": Elsewhere}], ids=["none", "for another device"])
def test_where_kernels_are_not_for_x_nothing_changes(name, how):
    network, given = network_of(name)
    found = []
    for applied in (False, True):
        if applied:
            gpu.apply(network, **how)
        network.zero_grad()
        out = network(*given, taps=(1,))
        (out.prediction.square().sum() + out.features[1].sum()).backward()
        with torch.no_grad():
            sampled = network(*given).prediction
        learned = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        found.append([sampled, out.prediction, *learned])
    assert len(found[0]) > 20
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("how", APPLIED)
def test_state_dict_stays_and_undone_it_is_the_plain_network(name, how):
    network, given = network_of(name)
    plain, keys, kinds = network(*given).prediction, list(network.state_dict()), list(map(type, network.modules()))
    held = [vars(module).keys() for module in network.modules()]
    gpu.apply(network, **APPLIED[how])
    assert list(map(type, network.modules())) != kinds
    assert list(network.state_dict()) == keys
    gap = float(((network(*given).prediction - plain).norm() / plain.norm()).detach())
    assert 1e-3 < gap < 0.3 if "fp8" in APPLIED[how] else gap < 1e-5
    swap.plain(network)
    assert list(map(type, network.modules())) == kinds
    assert [vars(module).keys() for module in network.modules()] == held
    assert torch.equal(network(*given).prediction, plain)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
@pytest.mark.parametrize("how", APPLIED)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_copied_with_its_kernels(way, how, name):
    network, given = network_of(name)
    gpu.apply(network, **APPLIED[how])
    network.compile(backend="eager")
    other = way(network)
    assert list(map(type, other.modules())) == list(map(type, network.modules()))
    assert torch.equal(other(*given).prediction, network(*given).prediction)
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(next(other.parameters()), next(network.parameters()))
