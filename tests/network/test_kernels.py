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
    q, k, *grads = (t.contiguous() for t in torch.randn(4, 3, side * side, heads, head))
    weights = torch.rand(2, head)
    given = [t.clone().requires_grad_() for t in (q, k, *weights)]
    cos, sin = rotary_waves(rotary_table(side, head))
    wanted = norm_rotate(given[0], given[2], cos, sin), norm_rotate(given[1], given[3], cos, sin)
    torch.autograd.backward(wanted, grads)
    rows, tokens, constants = rotary._sizes(q)
    programs = triton.cdiv(rows, rotary.TOKENS)
    outs, backs = [torch.empty_like(q) for _ in range(2)], [torch.empty_like(q) for _ in range(2)]
    partial = torch.empty(programs, 4, constants["BLOCK"])
    rest = (*weights, cos, sin, rows, tokens)
    rotary.rotate_kernel[(programs,)](q, k, *outs, *rest, **constants, EPS=NORM_EPS)
    rotary.rotate_back_kernel[(programs,)](*grads, q, k, *backs, partial, *rest, **constants, EPS=NORM_EPS)
    of_weights = partial.sum(0)[:, : head // 2].reshape(2, -1)
    check(zip((*outs, *backs, *of_weights), (*wanted, *(t.grad for t in given))), 1e-5)

for rows, width in ((100, 48), (64, 128), (130, 70)):
    torch.manual_seed(0)
    gate, up, grad = (t.contiguous() for t in torch.randn(3, rows, width))
    biases = torch.randn(2, width)
    given = [t.clone().requires_grad_() for t in (gate, up, *biases)]
    wanted = silu(given[0] + given[2]) * (given[1] + given[3])
    wanted.backward(grad)
    *_, grid = swiglu._cover(gate)
    out, *backs = (torch.empty_like(gate) for _ in range(3))
    partial, size = torch.empty(grid[0], 2, width), {"ROWS": swiglu.ROWS, "COLUMNS": swiglu.COLUMNS}
    swiglu.gated_kernel[grid](gate, up, *biases, out, rows, width, **size)
    swiglu.gated_back_kernel[grid](grad, gate, up, *biases, *backs, partial, rows, width, **size)
    check(zip((out, *backs, *partial.sum(0)), (wanted, *(t.grad for t in given))), 1e-4)
"""


def test_kernels_equal_the_plain_code():
    pytest.importorskip("triton", reason="Triton comes with torch's GPU builds")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
