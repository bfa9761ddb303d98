"""gated: silu of one half of a product with its bias times the other half; backwards with the sum for the bias.

Both halves are one product, and one tensor's gradient.
"""

import math

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

from mvm.network.fast.kernels.tiles import Tiles, backward_by

FORWARD = Tiles(8, 128, 1, 4, 1)
BACKWARD = Tiles(8, 128, 32, 4, 3)


@triton.jit
def _biases(bias, column, width):
    present = column < width
    g, u = tl.load(bias + column, mask=present, other=0.0), tl.load(bias + column + width, mask=present, other=0.0)
    return g.to(tl.float32)[None, :], u.to(tl.float32)[None, :]


@triton.jit
def gated_kernel(
    both, bias, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate_bias, up_bias = _biases(bias, column, width)
    first = tl.program_id(0) * (TURNS * ROWS)
    # Not in a function of both pointers: the compiler would take what was read for written, and copy it first.
    both += first.to(tl.int64) * (2 * width)
    out += first.to(tl.int64) * width
    for turn in tl.range(TURNS, num_stages=STAGES):
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (first + row < rows) & (column < width)[None, :]
        place = row * (2 * width) + column[None, :]
        g = tl.load(both + place, mask=inside, other=0.0).to(tl.float32) + gate_bias
        u = tl.load(both + place + width, mask=inside, other=0.0).to(tl.float32) + up_bias
        tl.store(out + row * width + column[None, :], (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_back_kernel(
    grad, both, bias, both_out, partial, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate_bias, up_bias = _biases(bias, column, width)
    first = tl.program_id(0) * (TURNS * ROWS)
    both += first.to(tl.int64) * (2 * width)
    both_out += first.to(tl.int64) * (2 * width)
    grad += first.to(tl.int64) * width
    sum_gate, sum_up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in tl.range(TURNS, num_stages=STAGES):  # rows outside have a gradient of zero
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (first + row < rows) & (column < width)[None, :]
        place = row * (2 * width) + column[None, :]
        g = tl.load(both + place, mask=inside, other=0.0).to(tl.float32) + gate_bias
        u = tl.load(both + place + width, mask=inside, other=0.0).to(tl.float32) + up_bias
        d = tl.load(grad + row * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        chance = tl.sigmoid(g)
        of_up = d * g * chance
        of_gate = d * u * chance * (1 + g * (1 - chance))
        tl.store(both_out + place, of_gate.to(both_out.dtype.element_ty), mask=inside)
        tl.store(both_out + place + width, of_up.to(both_out.dtype.element_ty), mask=inside)
        sum_gate += of_gate
        sum_up += of_up
    sums = partial + tl.program_id(0) * (2 * width) + column
    tl.store(sums, tl.sum(sum_gate, axis=0), mask=column < width)
    tl.store(sums + width, tl.sum(sum_up, axis=0), mask=column < width)


@triton_op("mvm::gated", mutates_args=())
def gated(both: Tensor, bias: Tensor) -> Tensor:
    """Return silu(gate) * up of (gate, up) = both + bias; both (..., 2 width)."""
    both = both.contiguous()
    rows, width = math.prod(both.shape[:-1]), both.shape[-1] // 2
    grid, constants = FORWARD.cover(rows, width)
    out = both.new_empty((*both.shape[:-1], width))
    wrap_triton(gated_kernel)[grid](both, bias, out, rows, width, **constants)
    return out


@triton_op("mvm::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, both: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both and of the bias."""
    grad, both = grad.contiguous(), both.contiguous()
    rows, width = math.prod(both.shape[:-1]), both.shape[-1] // 2
    grid, constants = BACKWARD.cover(rows, width)
    out = torch.empty_like(both)
    partial = both.new_empty((grid[0], 2 * width), dtype=torch.float32)
    wrap_triton(gated_back_kernel)[grid](grad, both, bias, out, partial, rows, width, **constants)
    return out, partial.sum(0)


backward_by(gated, gated_backward)
