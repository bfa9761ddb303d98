"""biased_gelu: gelu, by its formula with tanh, of a product with its bias; backwards with the sum for the bias."""

import math

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

from mvm.network.fast.kernels.tiles import Tiles, backward_by

FORWARD = Tiles(8, 128, 1, 4, 1)
BACKWARD = Tiles(8, 128, 32, 4, 4)

# gelu(v) = v (1 + tanh z) / 2 = v / (1 + exp(-2 z)), with 2 z = SLOPE (v + CUBE v^3): nothing cancels or becomes nan
SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBE = tl.constexpr(0.044715)
LOG2E = tl.constexpr(math.log2(math.e))  # GPUs have powers of 2, and the factor is one with SLOPE


@triton.jit
def biased_gelu_kernel(
    x, bias, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    plus = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    first = tl.program_id(0) * (TURNS * ROWS)
    x += first.to(tl.int64) * width
    out += first.to(tl.int64) * width
    for turn in tl.range(TURNS, num_stages=STAGES):
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (first + row < rows) & (column < width)
        place = row * width + column
        v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + plus
        rest = tl.exp2(v * (-SLOPE * LOG2E + (-SLOPE * LOG2E * CUBE) * (v * v)))
        tl.store(out + place, (v / (1 + rest)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def biased_gelu_back_kernel(
    grad, x, bias, x_out, partial, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    plus = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0) * (TURNS * ROWS)
    grad += first.to(tl.int64) * width
    x += first.to(tl.int64) * width
    x_out += first.to(tl.int64) * width
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in tl.range(TURNS, num_stages=STAGES):  # rows outside have a gradient of zero
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (first + row < rows) & (column < width)[None, :]
        place = row * width + column[None, :]
        v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + plus
        d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        square = v * v
        chance = 1 / (1 + tl.exp2(v * (-SLOPE * LOG2E + (-SLOPE * LOG2E * CUBE) * square)))
        of_x = d * chance * (1 + v * (1 - chance) * (SLOPE + (3 * SLOPE * CUBE) * square))
        tl.store(x_out + place, of_x.to(x_out.dtype.element_ty), mask=inside)
        sums += of_x
    part = partial + tl.program_id(0).to(tl.int64) * width + column
    tl.store(part, tl.sum(sums, axis=0), mask=column < width)


@triton_op("mvm::biased_gelu", mutates_args=())
def biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(x + bias), by its formula with tanh; x (..., width), bias (width,)."""
    x = x.contiguous()
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    grid, constants = FORWARD.cover(rows, width)
    out = torch.empty_like(x)
    wrap_triton(biased_gelu_kernel)[grid](x, bias, out, rows, width, **constants)
    return out


@triton_op("mvm::biased_gelu_backward", mutates_args=())
def biased_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the bias, the latter float32."""
    grad, x = grad.contiguous(), x.contiguous()
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    grid, constants = BACKWARD.cover(rows, width)
    out = torch.empty_like(x)
    partial = x.new_empty((grid[0], width), dtype=torch.float32)
    wrap_triton(biased_gelu_back_kernel)[grid](grad, x, bias, out, partial, rows, width, **constants)
    return out, partial.sum(0)


backward_by(biased_gelu, biased_gelu_backward)
