"""The GPU kernels against their plain twin, in Triton's interpreter: runs where Triton is installed."""

import os
import subprocess
import sys

import pytest

CODE = """
import torch, triton
import mvm.network.kernels as kernels
from mvm.network.layers import NORM_EPS, norm_rotate, rotary_table, rotary_waves

for head, heads, side in ((64, 3, 4), (72, 2, 3), (16, 2, 4)):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, side * side, heads, head).unbind(0)
    x, grad, weight = x.contiguous().requires_grad_(), grad.contiguous(), torch.rand(head).requires_grad_()
    cos, sin = rotary_waves(rotary_table(side, head))
    want = norm_rotate(x, weight, cos, sin)
    want.backward(grad)
    rows, constants = kernels._sizes(x)
    constants["EPS"] = NORM_EPS
    out, dx = torch.empty_like(x), torch.empty_like(x)
    programs, places = 3, (rows, heads, side * side)
    partial = torch.empty(programs, constants["BLOCK"])
    plain, w = x.detach(), weight.detach()
    kernels.forward_kernel[(triton.cdiv(rows, kernels.ROWS),)](plain, out, w, cos, sin, *places, **constants)
    kernels.backward_kernel[(programs,)](grad, plain, dx, partial, w, cos, sin, *places, **constants, PROGRAMS=programs)
    for found, wanted in ((out, want), (dx, x.grad), (partial.sum(0)[:head], weight.grad)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
"""


def test_kernels_equal_the_plain_code():
    pytest.importorskip("triton", reason="Triton comes with torch's GPU builds")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
