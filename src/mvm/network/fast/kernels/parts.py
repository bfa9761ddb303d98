"""parted: queries, keys and values of one product; backwards their gradients side by side, and the sum for the bias.

Forwards nothing is computed. Backwards one pass does what would be a copy and a sum over it.
"""

from typing import Any

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

from mvm.network.fast.kernels.tiles import Tiles

BACKWARD = Tiles(8, 128, 32, 4, 3)


@triton.jit
def join_kernel(
    q_grad, k_grad, v_grad, out, partial, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) * (TURNS * ROWS)
    q_grad += first.to(tl.int64) * width
    k_grad += first.to(tl.int64) * width
    v_grad += first.to(tl.int64) * width
    out += first.to(tl.int64) * (3 * width)
    of_q = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_k, of_v = of_q, of_q
    for turn in tl.range(TURNS, num_stages=STAGES):  # what lies outside was loaded as zeros, and adds nothing
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (first + row < rows) & (column < width)[None, :]
        offset, place = row * width + column[None, :], row * (3 * width) + column[None, :]
        q = tl.load(q_grad + offset, mask=inside, other=0.0)
        k = tl.load(k_grad + offset, mask=inside, other=0.0)
        v = tl.load(v_grad + offset, mask=inside, other=0.0)
        tl.store(out + place, q, mask=inside)
        tl.store(out + place + width, k, mask=inside)
        tl.store(out + place + 2 * width, v, mask=inside)
        of_q += q.to(tl.float32)
        of_k += k.to(tl.float32)
        of_v += v.to(tl.float32)
    sums = partial + tl.program_id(0).to(tl.int64) * (3 * width) + column
    tl.store(sums, tl.sum(of_q, axis=0), mask=column < width)
    tl.store(sums + width, tl.sum(of_k, axis=0), mask=column < width)
    tl.store(sums + 2 * width, tl.sum(of_v, axis=0), mask=column < width)


@triton_op("mvm::join", mutates_args=())
def join(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the three (B, N, heads, head) as one (B, N, 3, heads, head), and its float32 sums over all tokens."""
    q_grad, k_grad, v_grad = (value.contiguous() for value in (q_grad, k_grad, v_grad))
    batch, tokens, heads, head = q_grad.shape
    rows, width = batch * tokens, heads * head
    grid, constants = BACKWARD.cover(rows, width)
    out = q_grad.new_empty((batch, tokens, 3, heads, head))
    partial = q_grad.new_empty((grid[0], 3 * width), dtype=torch.float32)
    wrap_triton(join_kernel)[grid](q_grad, k_grad, v_grad, out, partial, rows, width, **constants)
    return out, partial.sum(0)


class _Parted(torch.autograd.Function):
    """Not an operator with a gradient: its results are views of the product, which no operator may return."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype = bias.dtype
        return qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        of_qkv, of_bias = join(*grads)
        return of_qkv, of_bias.to(ctx.dtype)


def parted(qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, N, heads, head), views of qkv (B, N, 3, heads, head).

    bias (3 heads head,) is one that the product already added, detached: here it gets its gradient, and is not added.
    """
    return _Parted.apply(qkv, bias)
