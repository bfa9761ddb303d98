"""gated: silu of one half of a product with its bias times the other half; backwards with the sum for the bias.

Both halves are one product, and one tensor's gradient.
"""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Chosen by benchmarks/kernel_speed.py: tokens and hidden units that a program takes at once, and its warps.
FORWARD = (32, 128, 8)
BACKWARD = (16, 128, 4)
TURNS = 8  # that a program takes backwards: sums of so many tokens are one part


@triton.jit
def _halves(both, bias, row, column, rows, width):
    """Return both halves of the product with their biases in float32; zero but for the bias past the last row."""
    inside, present = (row < rows)[:, None] & (column < width)[None, :], column < width
    place = row[:, None] * (2 * width) + column[None, :]
    g = tl.load(both + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + place + width, mask=inside, other=0.0).to(tl.float32)
    g += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)[None, :]
    u += tl.load(bias + column + width, mask=present, other=0.0).to(tl.float32)[None, :]
    return g, u, place, inside


@triton.jit
def gated_kernel(both, bias, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    g, u, _, inside = _halves(both, bias, row, column, rows, width)
    tl.store(
        out + row[:, None] * width + column[None, :], (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def gated_back_kernel(
    grad, both, bias, both_out, partial, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sum_gate, sum_up = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for turn in range(TURNS):
        row = (tl.program_id(0).to(tl.int64) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        g, u, place, inside = _halves(both, bias, row, column, rows, width)
        d = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        chance = tl.sigmoid(g)
        of_gate, of_up = d * u * chance * (1 + g * (1 - chance)), d * g * chance
        tl.store(both_out + place, of_gate.to(both_out.dtype.element_ty), mask=inside)
        tl.store(both_out + place + width, of_up.to(both_out.dtype.element_ty), mask=inside)
        sum_gate += tl.sum(of_gate, axis=0)  # rows outside have a gradient of zero
        sum_up += tl.sum(of_up, axis=0)
    sums = partial + tl.program_id(0) * (2 * width) + column
    tl.store(sums, sum_gate, mask=column < width)
    tl.store(sums + width, sum_up, mask=column < width)


def _cover(both: Tensor, rows_at_once: int, columns: int) -> tuple[int, int, tuple[int, int]]:
    """Return rows and width of the halves, and the programs that cover them."""
    width = both.shape[-1] // 2
    rows = both.numel() // (2 * width)
    return rows, width, (triton.cdiv(rows, rows_at_once), triton.cdiv(width, columns))


@triton_op("mvm::gated", mutates_args=())
def gated(both: Tensor, bias: Tensor) -> Tensor:
    """Return silu(gate) * up of (gate, up) = both + bias; both (..., 2 width) contiguous."""
    rows_at_once, columns, warps = FORWARD
    rows, width, grid = _cover(both, rows_at_once, columns)
    out = both.new_empty((*both.shape[:-1], width))
    wrap_triton(gated_kernel)[grid](both, bias, out, rows, width, ROWS=rows_at_once, COLUMNS=columns, num_warps=warps)
    return out


@triton_op("mvm::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, both: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both and of the bias."""
    rows_at_once, columns, warps = BACKWARD
    rows, width, grid = _cover(both, TURNS * rows_at_once, columns)
    out = torch.empty_like(both)
    partial = both.new_empty((grid[0], 2 * width), dtype=torch.float32)
    wrap_triton(gated_back_kernel)[grid](
        grad, both, bias, out, partial, rows, width,
        ROWS=rows_at_once, COLUMNS=columns, TURNS=TURNS, num_warps=warps,
    )  # fmt: skip
    return out, partial.sum(0)


def _keep(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    both, bias = ctx.saved_tensors
    of_both, of_bias = gated_backward(grad.contiguous(), both, bias)
    return of_both, of_bias.to(bias.dtype)


gated.register_autograd(_backward, setup_context=_keep)
