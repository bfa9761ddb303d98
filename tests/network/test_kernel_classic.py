"""The kernels of a classic block, gelu and the parts of a product, against plain torch in Triton's interpreter."""

import pytest
from kernel_code import WRITTEN, run

CODE = """
import torch
from torch.nn.functional import gelu
from mvm.network.fast.kernels import biased_gelu, parted
from mvm.network.fast.kernels.gelu import biased_gelu_backward
from mvm.network.fast.kernels.parts import join

def check(found, wanted, within=2e-6):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    size = max(1.0, float(wanted.detach().abs().max()))
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=within, atol=within * size)

def results(work, grads, *inputs):
    given = [value.detach().requires_grad_() for value in inputs]
    values = work(*given)
    values = values if isinstance(values, tuple) else (values,)
    return *values, *torch.autograd.grad(values, given, grads)

def compare(kernel, plain, grads, *inputs):
    before = [value.clone() for value in (*grads, *inputs)]
    for found, wanted in zip(results(kernel, grads, *inputs), results(plain, grads, *inputs), strict=True):
        check(found, wanted)
    assert all(torch.equal(*pair) for pair in zip(before, (*grads, *inputs), strict=True))

def plain_gelu(x, bias):
    return gelu(x + bias, approximate="tanh")

def plain_parts(qkv, bias):  # what a bias that is not detached would get
    return (qkv + (bias - bias.detach()).view(qkv.shape[2:])).unbind(2)

r = torch.randn
torch.manual_seed(0)

for shape in ((300, 70), (2, 13, 48), (131, 128), (2, 9, 1536), (1, 1)):
    x, bias, grad = 2 * r(shape), r(shape[-1]), r(shape)
    compare(biased_gelu, plain_gelu, [grad], x, bias)
compare(biased_gelu, plain_gelu, [r(2, 70, 9).mT], r(2, 70, 9).mT, r(70))
compare(biased_gelu, plain_gelu, [r(1, 1, 1).expand(2, 9, 48)], r(2, 9, 48), r(48))

# where tanh is 1, and far beyond: no value is lost, none is nan
x = torch.tensor([-1e5, -3e3, -100, -20, -10, -6, -1e-3, 0, 1e-3, 6, 10, 20, 100, 3e3, 1e5]).repeat(3, 1)
compare(biased_gelu, plain_gelu, [torch.ones_like(x)], x, torch.zeros(15))

for batch, tokens, heads, head in ((3, 16, 3, 64), (2, 9, 3, 72), (5, 27, 3, 20), (1, 1, 1, 2)):
    shape = batch, tokens, heads, head
    qkv, bias, grads = r(batch, tokens, 3, heads, head), r(3 * heads * head), [r(shape) for _ in range(3)]
    compare(parted, plain_parts, grads, qkv, bias)
shape = 2, 9, 3, 20
turned = [r(2, 3, 9, 20).transpose(1, 2), r(1, 1, 1, 1).expand(shape), r(2, 9, 3, 40)[..., ::2]]
compare(parted, plain_parts, turned, r(2, 9, 3, 3, 20), r(180))

# views of the product, and a gradient for those that were used alone
qkv, bias = r(2, 9, 3, 3, 20, requires_grad=True), r(180, requires_grad=True)
views = parted(qkv, bias)
assert [view.data_ptr() for view in views] == [view.data_ptr() for view in qkv.unbind(2)]
assert all(not view.is_contiguous() for view in views)
of_qkv, of_bias = torch.autograd.grad(views[1].sum(), (qkv, bias))
assert torch.equal(of_qkv.sum((0, 1, 3, 4)), torch.tensor([0.0, 2 * 9 * 60, 0.0]))
assert torch.equal(of_bias, torch.tensor([0.0, 18.0, 0.0]).repeat_interleave(60))

# a product that added the detached bias, as layers have it
x, weight, bias = r(2, 9, 60), r(180, 60) / 8, r(180)
def product(parts, x, weight, bias, added):
    qkv = torch.nn.functional.linear(x, weight, added).view(2, 9, 3, 3, 20)
    return parts(qkv, bias)
grads = [r(2, 9, 3, 20) for _ in range(3)]
found = results(lambda x, w, b: product(parted, x, w, b, b.detach()), grads, x, weight, bias)
wanted = results(lambda x, w, b: product(lambda qkv, _: qkv.unbind(2), x, w, b, b), grads, x, weight, bias)
for one, other in zip(found, wanted, strict=True):
    check(one, other)

# in bfloat16, with a bias of either type: sums stay float32 until their end
x, grad, bias = (2 * r(2, 9, 70)).bfloat16(), r(2, 9, 70).bfloat16(), r(70)
for kind in (torch.float32, torch.bfloat16):
    found = results(biased_gelu, [grad], x, bias.to(kind))
    wanted = results(plain_gelu, [grad.float()], x.float(), bias.to(kind).float())
    for one, other, dtype in zip(found, wanted, (x.dtype, x.dtype, kind), strict=True):
        check(one, other.to(dtype), 2**-7 if dtype == torch.bfloat16 else 1e-5)
assert biased_gelu_backward(grad, x, bias.bfloat16())[1].dtype == torch.float32
grads = [r(40, 9, 3, 20).bfloat16() for _ in range(3)]
side_by_side, sums = join(*grads)
assert torch.equal(side_by_side, torch.stack(grads, dim=2))
check(sums, torch.stack(grads, dim=2).double().sum((0, 1)).flatten().float(), 1e-6)
qkv = r(40, 9, 3, 3, 20).bfloat16()
for kind in (torch.float32, torch.bfloat16):
    *_, of_qkv, of_bias = results(parted, grads, qkv, r(180).to(kind))
    assert torch.equal(of_qkv, side_by_side) and torch.equal(of_bias, sums.to(kind))
"""

MUTATIONS = (
    WRITTEN
    + """
from mvm.network.fast.kernels import biased_gelu, parted

assert written(biased_gelu, r(2, 16, 64), r(64)) == [["out"], ["partial", "x_out"]]
assert written(lambda *given: sum(parted(*given)), r(2, 16, 3, 2, 16), r(96)) == [["out", "partial"]]
"""
)


@pytest.mark.parametrize(("code", "interpreted"), [(CODE, True), (MUTATIONS, False)], ids=["values", "mutations"])
def test_kernels_equal_the_plain_code_and_write_to_no_input(code, interpreted):
    run(code, interpreted=interpreted)
