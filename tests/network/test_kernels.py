"""The GPU kernels against their plain twin, in Triton's interpreter: runs where Triton is installed."""

import os
import subprocess
import sys

import pytest

CODE = """
import torch, triton
from torch.nn.functional import silu
from mvm.network.kernels import rotary, swiglu
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
    programs, _, _, constants = rotary._cover(qkv, *rotary.BACKWARD)
    back, partial = torch.empty_like(qkv), torch.empty(programs, 4, constants["BLOCK"])
    rotary.place_back_kernel[(programs,)](*grads, qkv, back, partial, *rest, **constants, EPS=NORM_EPS)
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
    *_, grid, constants = swiglu._cover(both, *swiglu.FORWARD)
    swiglu.gated_kernel[grid](both, bias, out, rows, width, **constants)
    *_, grid, constants = swiglu._cover(both, *swiglu.BACKWARD)
    partial = torch.empty(grid[0], 2 * width)
    swiglu.gated_back_kernel[grid](grad, both, bias, back, partial, rows, width, **constants)
    check(zip((out, back, partial.sum(0)), (wanted, *(t.grad for t in given))), 1e-4)
"""


def test_kernels_equal_the_plain_code():
    pytest.importorskip("triton", reason="Triton comes with torch's GPU builds")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
