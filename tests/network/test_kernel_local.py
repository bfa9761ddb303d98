"""The local convolution by a kernel: in Triton's interpreter against the plain code, and the layer that calls it."""

import pytest
import torch
from kernel_code import WRITTEN, run
from stand_ins import Counted

from mvm.network.extras import Local
from mvm.network.fast import gpu

CODE = """
import torch
from mvm.network.fast import kernels
from mvm.network.fast.kernels import local
from mvm.network.extras import Local

def plain(x, weight):
    layer = Local(x.shape[2], (round(x.shape[1] ** 0.5),) * 2).to(x.dtype)
    return torch.func.functional_call(layer, {"weight": weight}, (x,))

# grids of a power of two and not, one place, one row of blocks and several, a last block that is not full
for images, side, width, columns in ((2, 4, 32, 32), (3, 5, 48, 32), (1, 1, 8, 16), (2, 8, 70, 32), (2, 3, 40, 64)):
    local.FORWARD = local.BACKWARD = (columns, 4)
    torch.manual_seed(side)
    x, weight, grad = torch.randn(images, side**2, width), torch.randn(3, 3, width), torch.randn(images, side**2, width)
    for given in (x, x.mT.contiguous().mT):  # not contiguous too
        found, wanted = [], []
        for work, out in ((kernels.add_local, found), (plain, wanted)):
            inputs = given.detach().requires_grad_(), weight.detach().requires_grad_()
            value = work(*inputs)
            out += [value, *torch.autograd.grad(value, inputs, grad)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)

# in bfloat16 the nine products are added in float32 and rounded once
x, weight = torch.randn(2, 16, 32).bfloat16(), torch.randn(3, 3, 32)
out = kernels.add_local(x, weight)
assert out.dtype == torch.bfloat16
cut = lambda t: (t.view(torch.int32) & -65536).view(torch.float32).bfloat16()  # the interpreter does not round to it
assert (out != cut(plain(x.float(), weight))).float().mean() < 0.01
"""

MUTATIONS = (
    WRITTEN
    + """
from mvm.network.fast.kernels import add_local
assert written(add_local, r(2, 16, 48), r(3, 3, 48)) == [["out"], ["out", "partial"]]
"""
)


@pytest.mark.parametrize(("code", "interpreted"), [(CODE, True), (MUTATIONS, False)], ids=["values", "mutations"])
def test_the_kernel_equals_the_plain_code_and_writes_to_no_input(code, interpreted):
    run(code, interpreted=interpreted)


def test_the_layer_asks_its_kernel_where_it_may():
    asked = []
    add_local = lambda x, weight: asked.append(weight) or x + 1  # noqa: E731
    layer, x = Local(8, (4, 4)), torch.randn(2, 16, 8)
    gpu.apply(layer, Counted(add_local=add_local, takes=lambda x: x.is_cuda))
    assert torch.equal(layer(x), x)  # weights begin as zeros; a CPU takes no kernel
    gpu.apply(layer, Counted(add_local=add_local))
    assert torch.equal(layer(x), x + 1)
    assert asked[0] is layer.weight
