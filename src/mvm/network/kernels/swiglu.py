"""gated: silu(gate + its bias) * (up + its bias); backwards the sums for the biases come with the same pass."""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS, COLUMNS = 64, 64  # of tokens and hidden units that one program works on


@triton.jit
def gated_kernel(gate, up, gate_bias, up_bias, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    g += tl.load(gate_bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    u += tl.load(up_bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_back_kernel(
    grad, gate, up, gate_bias, up_bias, gate_out, up_out, partial, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    g += tl.load(gate_bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    u += tl.load(up_bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(g)
    of_gate = d * u * chance * (1 + g * (1 - chance))
    of_up = d * g * chance
    tl.store(gate_out + place, of_gate.to(gate_out.dtype.element_ty), mask=inside)
    tl.store(up_out + place, of_up.to(up_out.dtype.element_ty), mask=inside)
    sums = partial + tl.program_id(0) * (2 * width) + column  # rows outside were loaded as zeros
    tl.store(sums, tl.sum(of_gate, axis=0), mask=column < width)
    tl.store(sums + width, tl.sum(of_up, axis=0), mask=column < width)


def _cover(gate: Tensor) -> tuple[int, int, tuple[int, int]]:
    width = gate.shape[-1]
    rows = gate.numel() // width
    return rows, width, (triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))


@triton_op("mvm::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, gate_bias: Tensor, up_bias: Tensor) -> Tensor:
    """Return silu(gate + gate_bias) * (up + up_bias); (..., width) contiguous."""
    rows, width, grid = _cover(gate)
    out = torch.empty_like(gate)
    wrap_triton(gated_kernel)[grid](gate, up, gate_bias, up_bias, out, rows, width, ROWS=ROWS, COLUMNS=COLUMNS)
    return out


@triton_op("mvm::gated_backward", mutates_args=())
def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor, up_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and of both biases side by side (2, width)."""
    rows, width, grid = _cover(gate)
    outs = torch.empty_like(gate), torch.empty_like(up)
    partial = gate.new_empty((grid[0], 2, width), dtype=torch.float32)
    wrap_triton(gated_back_kernel)[grid](
        grad, gate, up, gate_bias, up_bias, *outs, partial, rows, width, ROWS=ROWS, COLUMNS=COLUMNS
    )
    return *outs, partial.sum(0)


def _keep_gated(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gated_backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    saved = ctx.saved_tensors
    of_gate, of_up, biases = gated_backward(grad.contiguous(), *saved)
    return of_gate, of_up, biases[0].to(saved[2].dtype), biases[1].to(saved[3].dtype)


gated.register_autograd(_gated_backward, setup_context=_keep_gated)
