"""The residual stream by kernels: in Triton's interpreter against the plain code, and a DiT that hands sums on."""

import pytest
import torch
import torch._dynamo
from kernel_code import run
from stand_ins import Counted, StandIns

from mvm.network import DDT, DDTConfig, DiT, DiTConfig
from mvm.network.fast import gpu, recompute
from mvm.network.layers import Block, rotary_table, rotary_waves

CODE = """
import torch
from mvm.network.fast.kernels import residual
from mvm.network.layers import NORM_EPS, modulate

def check(found, wanted):
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5)

def run(kernel, images, runs, *arguments, BRANCH, CENTRED, constants):
    constants = {name: value for name, value in constants.items() if name != "num_warps"}
    if kernel is residual.add_modulate_kernel:
        constants["EPS"] = NORM_EPS
    kernel[(images * runs,)](*arguments, BRANCH=BRANCH, CENTRED=CENTRED, **constants)

for images, tokens, width, length, tile, centred in (
    (2, 9, 48, 64, 4096, False), (3, 16, 60, 8, 256, True), (2, 70, 72, 32, 512, False), (1, 16, 64, 8, 64, False),
    (2, 9, 48, 64, 4096, True), (2, 70, 72, 32, 512, True), (2, 70, 72, 22, 1024, True),
):
    torch.manual_seed(0)
    x, y, *grads = (t.contiguous() for t in torch.randn(4, images, tokens, width))
    x += 3  # a mean that a centred norm takes away
    moments = torch.full((images, tokens, 2), torch.nan)
    modulation = torch.randn(images, 1, 6 * width)
    given = [t.clone().requires_grad_() for t in (x, y, modulation)]
    shift, scale, gate = modulation.chunk(6, dim=-1)[1:4]
    plain = given[2].chunk(6, dim=-1)[1:4]
    z = given[0] + plain[2] * given[1]
    wanted = z, modulate(z, *plain[:2], centred)
    torch.autograd.backward(wanted, grads)
    count, runs, constants = residual._cover(x, length, tile, 4, 1)
    assert count == tokens and runs == -(-tokens // length)
    outs, backs = [torch.full_like(x, torch.nan) for _ in range(2)], [torch.full_like(x, torch.nan) for _ in range(2)]
    partial = torch.full((images, runs, 4, width), torch.nan)
    strides = gate.stride(0), shift.stride(0), scale.stride(0)
    assert strides == (6 * width,) * 3
    forward, back = residual.add_modulate_kernel, residual.add_modulate_back_kernel
    run(forward, images, runs, x, y, gate, shift, scale, *outs, moments, *strides, tokens, runs, BRANCH=True,
        CENTRED=centred, constants=constants)
    run(back, images, runs, *grads, outs[0], y, moments, gate, scale, *backs, partial, *strides[1:], tokens, runs,
        BRANCH=True, CENTRED=centred, constants=constants)
    assert torch.equal(outs[0], z)
    check(outs[1], wanted[1])
    check(backs[0], given[0].grad)
    check(backs[1], given[1].grad)
    check(partial[:, :, :3].sum(1).flatten(1), given[2].grad[:, 0, width : 4 * width])
    check(partial[:, :, 3].sum((0, 1)), given[1].grad.sum((0, 1)))  # of a bias that is in y

    given = [t.clone().requires_grad_() for t in (x, modulation)]
    plain = given[1].chunk(6, dim=-1)[1:3]
    wanted = modulate(given[0], *plain, centred)
    wanted.backward(grads[0])
    out, of_x, partial = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan), partial[:, :, :2].contiguous()
    before = x.clone()
    run(forward, images, runs, x, x, shift, shift, scale, out, out, moments, 0, *strides[1:], tokens, runs,
        BRANCH=False, CENTRED=centred, constants=constants)
    run(back, images, runs, grads[0], grads[0], x, x, moments, scale, scale, of_x, of_x, partial, 0, strides[2], tokens,
        runs, BRANCH=False, CENTRED=centred, constants=constants)
    assert torch.equal(x, before)
    check(out, wanted)
    check(of_x, given[0].grad)
    check(partial.sum(1).flatten(1), given[1].grad[:, 0, width : 3 * width])

# in bfloat16 the norm is that of the sum as it was stored
torch.manual_seed(0)
x, y = (t.contiguous() for t in torch.randn(2, 2, 9, 48).bfloat16())
gate, shift, scale = torch.randn(2, 1, 144).bfloat16().chunk(3, dim=-1)
tokens, runs, constants = residual._cover(x, 64, 4096, 4, 1)
z, h, moments = torch.empty_like(x), torch.empty_like(x), torch.empty(2, 9, 2)
run(residual.add_modulate_kernel, 2, runs, x, y, gate, shift, scale, z, h, moments, 144, 144, 144, tokens, runs,
    BRANCH=True, CENTRED=False, constants=constants)
cut = lambda t: (t.view(torch.int32) & -65536).view(torch.float32).bfloat16()  # the interpreter does not round to it
assert torch.equal(z, cut(x.float() + gate.float() * y.float()))
assert (h != cut(modulate(z.float(), shift.float(), scale.float()))).float().mean() < 0.01
"""


def test_kernels_equal_the_plain_code():
    run(CODE, interpreted=True)


SMALL = {"size": "tiny", "depth": 4, "width": 16, "heads": 2, "patch": 2}
CASES = {
    "plain": ({}, {}),
    "taps": ({}, {"taps": (2, 3)}),
    "inner": ({"inner_block": 2}, {"taps": (2, 4)}),
    "shared": ({"modulation": "shared"}, {}),
    "skip and local": ({"skip": True, "local": True}, {"taps": (1,)}),
    "recompute": ({}, {"recompute": 2}),
    "recompute all": ({"inner_block": 1}, {"recompute": 4, "taps": (3,)}),
    "keep products": ({}, {"recompute": 3, "keep_products": True}),
    "classic": ({"design": "classic"}, {"taps": (2,)}),
    "dropout": ({"dropout": 0.3}, {"recompute": 2, "keep_products": True, "told": {"seeds": torch.arange(3)}}),
}


def shaken(network):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    return network


def built(kernels, config, again=0, keep_products=False):
    """A DiT with these kernels, and some blocks computed again."""
    network = shaken(DiT(config, (1, 8, 8), 5))
    network.blocks.recompute = again
    if keep_products:
        recompute.apply(network)
    if kernels is not None:
        gpu.apply(network, kernels)
    return network


def inputs(batch=3, side=8, channels=1):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, channels, side, side, generator=generator)
    return x, torch.rand(batch, generator=generator), torch.arange(batch) % 6


def values_and_gradients(network, taps=(), **told):
    """Return all that the network answers, and the gradients of a loss of all of it."""
    out = network(*inputs(), taps=taps, **told)
    values = [out.prediction, *(() if out.inner is None else (out.inner,)), *out.features.values()]
    sum(value.sin().sum() for value in values).backward()
    grads = {name: parameter.grad for name, parameter in network.named_parameters()}
    return values, grads


def equal(found, wanted, within=2e-6):
    for a, b in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(a, b, rtol=within, atol=within)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert torch.count_nonzero(grad), name
        size = float(grad.abs().max())
        torch.testing.assert_close(found[1][name], grad, rtol=0, atol=within * size, msg=lambda m, n=name: f"{n}: {m}")


def residual(kernels):
    """How often the two kernels of the residual stream were called."""
    return {"norm": kernels.calls["norm_modulate"], "add": kernels.calls["add_modulate"]}


@pytest.mark.parametrize("case", CASES)
def test_a_dit_that_hands_sums_on_is_the_plain_one(case):
    changes, how = CASES[case]
    found = []
    for kernels in (None, StandIns):
        config = DiTConfig(**SMALL, **changes)
        network = built(kernels, config, how.get("recompute", 0), how.get("keep_products", False))
        found.append(values_and_gradients(network, how.get("taps", ()), **how.get("told", {})))
    equal(found[1], found[0], 5e-6)


@pytest.mark.parametrize(
    ("case", "starts"),  # blocks that nothing was left for
    [("plain", 1), ("taps", 3), ("inner", 2), ("shared", 1), ("skip and local", 4), ("keep products", 1)],
)
def test_an_addition_is_left_wherever_the_tokens_are_not_read(case, starts):
    (changes, how), kernels = CASES[case], Counted()
    config = DiTConfig(**SMALL, **changes)
    network = built(kernels, config, how.get("recompute", 0), how.get("keep_products", False))
    network(*inputs(), taps=how.get("taps", ()))
    assert residual(kernels) == {"norm": starts, "add": 2 * 4 - starts}


def test_a_block_computed_again_keeps_one_tensor_not_two():
    kernels = Counted()
    built(kernels, DiTConfig(**SMALL), again=3)(*inputs())
    assert residual(kernels) == {"norm": 3, "add": 5}  # to the last block alone something is left


def test_sampling_leaves_nothing():
    kernels = Counted()
    with torch.no_grad():
        built(kernels, DiTConfig(**SMALL))(*inputs())
    assert residual(kernels) == {"norm": 4, "add": 4}


COMPILED = {
    "whole": ((2, True), lambda network: network.compile(backend="aot_eager", fullgraph=True)),
    "blocks": ((0, False), lambda network: [block.compile(backend="aot_eager") for block in network.blocks]),
}


@pytest.mark.parametrize("mode", COMPILED)
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_compiled_it_is_the_same(mode):
    """Compiled whole, a DiT breaks at no block, whatever it hands on; blocks alone stay below the limit of graphs."""
    (again, keep_products), compile_ = COMPILED[mode]
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        network = built(StandIns, DiTConfig(**{**SMALL, "depth": 3}), again, keep_products)
        if compiled:
            compile_(network)
        found.append(values_and_gradients(network))
    equal(found[1], found[0])
    if mode == "blocks":
        for batch in (3, 5, 4):
            with torch.no_grad():
                network(*inputs(batch))


def test_blocks_with_a_condition_for_every_token_stay_plain():
    config = DDTConfig(size="tiny", depth=2, width=16, heads=2, head_depth=2, head_width=24, head_heads=2)
    found, kernels = [], Counted()
    for given in (None, kernels):
        network = shaken(DDT(config, (1, 8, 8), 5))
        if given is not None:
            gpu.apply(network, given)
        found.append(values_and_gradients(network))
    equal(found[1], found[0], 5e-6)
    assert residual(kernels) == {"norm": 2, "add": 2}  # of the backbone's two blocks


@pytest.mark.parametrize(
    "told", [{"leave": True}, {"pending": (torch.zeros(1, 4, 8), torch.zeros(8), torch.zeros(1, 1, 8))}]
)
def test_where_kernels_are_not_taken_a_block_takes_and_leaves_nothing(told):
    block = Block(8, 2)
    gpu.apply(block, Counted(takes=lambda x: False))
    cos, sin = rotary_waves(rotary_table((2, 2), 4))
    with pytest.raises(ValueError, match="pending and leave are for kernels"):
        block(torch.zeros(1, 4, 8), torch.zeros(1, 8), cos, sin, **told)


def test_a_block_hands_on_no_parameter():
    """FSDP hangs hooks on what a block returns; on a parameter, which stays, they would be one more at every step."""
    block = Block(8, 2)
    gpu.apply(block, StandIns)
    cos, sin = rotary_waves(rotary_table((2, 2), 4))
    tokens, left = block(torch.randn(1, 4, 8), torch.randn(1, 8), cos, sin, leave=True)
    assert not any(value.is_leaf for value in (tokens, *left))
