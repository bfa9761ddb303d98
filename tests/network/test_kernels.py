"""The GPU kernels against their plain twin, in Triton's interpreter: runs where Triton is installed."""

import os
import subprocess
import sys

import pytest

CODE = """
import torch, triton
from torch.nn.functional import scaled_dot_product_attention, silu
from mvm.network.kernels import attention, rotary, swiglu
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

for rows, width in ((100, 48), (256, 128), (300, 70)):
    torch.manual_seed(0)
    both, grad, bias = torch.randn(rows, 2 * width), torch.randn(rows, width), torch.randn(2 * width)
    given = both.clone().requires_grad_(), bias.clone().requires_grad_()
    gate, up = (given[0] + given[1]).chunk(2, dim=-1)
    wanted = silu(gate) * up
    wanted.backward(grad)
    out, back = torch.empty(rows, width), torch.empty_like(both)
    tall, broad, _ = swiglu.FORWARD
    grid = swiglu._cover(both, tall, broad)[2]
    swiglu.gated_kernel[grid](both, bias, out, rows, width, ROWS=tall, COLUMNS=broad)
    tall, broad, _ = swiglu.BACKWARD
    grid = swiglu._cover(both, swiglu.TURNS * tall, broad)[2]
    partial, size = torch.empty(grid[0], 2 * width), dict(ROWS=tall, COLUMNS=broad, TURNS=swiglu.TURNS)
    swiglu.gated_back_kernel[grid](grad, both, bias, back, partial, rows, width, **size)
    check(zip((out, back, partial.sum(0)), (wanted, *(t.grad for t in given))), 1e-4)

for head, heads, side, queries in ((64, 3, 4, 16), (32, 2, 3, 16), (16, 2, 8, 32), (64, 1, 7, 32)):
    torch.manual_seed(0)
    qkv, grad = torch.randn(2, side * side, 3, heads, head), torch.randn(2, side * side, heads, head)
    weights = torch.rand(2, head) + 0.5
    given = [t.clone().requires_grad_() for t in (qkv, *weights)]
    cos, sin = rotary_waves(rotary_table(side, head))
    q, k, v = given[0].unbind(2)
    parts = norm_rotate(q, given[1], cos, sin), norm_rotate(k, given[2], cos, sin), v
    wanted = scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts)).transpose(1, 2)
    wanted.backward(grad)
    out, back, partial = torch.empty_like(grad), torch.empty_like(qkv), torch.empty(2 * heads, 2, head)
    totals, rest = torch.empty(2, heads, side * side), (*weights, cos, sin, side * side)
    constants = attention._constants(qkv, queries, 4, NORM_EPS)
    attention.attend_kernel[(2 * heads,)](qkv, out, totals, *rest, **constants)
    attention.attend_back_kernel[(2 * heads,)](grad, qkv, totals, back, partial, *rest, **constants)
    check(zip((out, back, *partial.sum(0)), (wanted, *(t.grad for t in given))), 1e-4)
"""


def test_kernels_equal_the_plain_code():
    pytest.importorskip("triton", reason="Triton comes with torch's GPU builds")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
