"""add_local: tokens on their grid with a depthwise 3x3 convolution of them added; each way one pass.

A program takes some channels of one image, row after row of the grid, and keeps the three rows that it needs. Backwards
the gradient's nine neighbours serve both results: with the weights turned round they are the tokens' gradient, and
times the tokens the weights'. Sums of the latter are by image; torch adds those, always in one order.
"""

import math

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

from mvm.network.fast.kernels.tiles import backward_by

# Chosen by benchmarks/kernel_speed.py: channels of a program, and its warps.
FORWARD = (64, 4)
BACKWARD = (32, 4)


@triton.jit
def _shifted(x, row, shift, column, width, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return what lies `shift` to the right of each place in a row of the grid (BLOCK, columns); zero outside it."""
    place = tl.arange(0, BLOCK) + shift
    inside = (row >= 0) & (row < SIDE) & (place >= 0) & (place < SIDE)
    offset = (row * SIDE + place)[:, None] * width + column[None, :]
    return tl.load(x + offset, mask=inside[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def _row(x, row, column, width, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row of the grid as seen from each place: what lies left of it, the place itself, what lies right."""
    left = _shifted(x, row, -1, column, width, SIDE, BLOCK)
    right = _shifted(x, row, 1, column, width, SIDE, BLOCK)
    return left, _shifted(x, row, 0, column, width, SIDE, BLOCK), right


@triton.jit
def _weight(weight, number, column, width):
    return tl.load(weight + number * width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _weights(weight, column, width, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Return the nine weights in reading order, or from the last by steps of -1: turned round. The middle adds x."""
    w0 = _weight(weight, FIRST, column, width)
    w1 = _weight(weight, FIRST + STEP, column, width)
    w2 = _weight(weight, FIRST + 2 * STEP, column, width)
    w3 = _weight(weight, FIRST + 3 * STEP, column, width)
    w4 = 1 + _weight(weight, 4, column, width)
    w5 = _weight(weight, FIRST + 5 * STEP, column, width)
    w6 = _weight(weight, FIRST + 6 * STEP, column, width)
    w7 = _weight(weight, FIRST + 7 * STEP, column, width)
    w8 = _weight(weight, FIRST + 8 * STEP, column, width)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8


@triton.jit
def local_kernel(x, weight, out, width, blocks, SIDE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    image = (tl.program_id(0) // blocks).to(tl.int64)  # neighbours read what lies together
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    x += image * (SIDE * SIDE * width)
    out += image * (SIDE * SIDE * width)
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = _weights(weight, column, width, 0, 1)
    place = tl.arange(0, BLOCK)
    inside = (place < SIDE)[:, None] & (column < width)[None, :]
    up_left = tl.zeros((BLOCK, COLUMNS), x.dtype.element_ty)
    up, up_right = up_left, up_left
    left, middle, right = _row(x, 0, column, width, SIDE, BLOCK)
    for row in tl.range(0, SIDE):
        low_left, low, low_right = _row(x, row + 1, column, width, SIDE, BLOCK)
        total = w0 * up_left.to(tl.float32) + w1 * up.to(tl.float32) + w2 * up_right.to(tl.float32)
        total += w3 * left.to(tl.float32) + w4 * middle.to(tl.float32) + w5 * right.to(tl.float32)
        total += w6 * low_left.to(tl.float32) + w7 * low.to(tl.float32) + w8 * low_right.to(tl.float32)
        offset = (row * SIDE + place)[:, None] * width + column[None, :]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
        up_left, up, up_right = left, middle, right
        left, middle, right = low_left, low, low_right


@triton.jit
def local_back_kernel(
    grad, x, weight, out, partial, width, blocks, SIDE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    image = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    grad += image * (SIDE * SIDE * width)
    x += image * (SIDE * SIDE * width)
    out += image * (SIDE * SIDE * width)
    partial += image * (9 * width)
    # turned round: the weight that a token's right neighbour had for it is its own for the gradient to the left
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = _weights(weight, column, width, 8, -1)
    place = tl.arange(0, BLOCK)
    inside = (place < SIDE)[:, None] & (column < width)[None, :]
    s0 = tl.zeros((BLOCK, COLUMNS), tl.float32)
    s1, s2, s3, s4, s5, s6, s7, s8 = s0, s0, s0, s0, s0, s0, s0, s0
    up_left = tl.zeros((BLOCK, COLUMNS), grad.dtype.element_ty)
    up, up_right = up_left, up_left
    left, middle, right = _row(grad, 0, column, width, SIDE, BLOCK)
    for row in tl.range(0, SIDE):
        low_left, low, low_right = _row(grad, row + 1, column, width, SIDE, BLOCK)
        value = _shifted(x, row, 0, column, width, SIDE, BLOCK).to(tl.float32)
        g0, g1, g2 = up_left.to(tl.float32), up.to(tl.float32), up_right.to(tl.float32)
        g3, g4, g5 = left.to(tl.float32), middle.to(tl.float32), right.to(tl.float32)
        g6, g7, g8 = low_left.to(tl.float32), low.to(tl.float32), low_right.to(tl.float32)
        total = w0 * g0 + w1 * g1 + w2 * g2 + w3 * g3 + w4 * g4 + w5 * g5 + w6 * g6 + w7 * g7 + w8 * g8
        offset = (row * SIDE + place)[:, None] * width + column[None, :]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
        s0 += value * g8
        s1 += value * g7
        s2 += value * g6
        s3 += value * g5
        s4 += value * g4
        s5 += value * g3
        s6 += value * g2
        s7 += value * g1
        s8 += value * g0
        up_left, up, up_right = left, middle, right
        left, middle, right = low_left, low, low_right
    within = column < width
    tl.store(partial + column, tl.sum(s0, axis=0), mask=within)
    tl.store(partial + width + column, tl.sum(s1, axis=0), mask=within)
    tl.store(partial + 2 * width + column, tl.sum(s2, axis=0), mask=within)
    tl.store(partial + 3 * width + column, tl.sum(s3, axis=0), mask=within)
    tl.store(partial + 4 * width + column, tl.sum(s4, axis=0), mask=within)
    tl.store(partial + 5 * width + column, tl.sum(s5, axis=0), mask=within)
    tl.store(partial + 6 * width + column, tl.sum(s6, axis=0), mask=within)
    tl.store(partial + 7 * width + column, tl.sum(s7, axis=0), mask=within)
    tl.store(partial + 8 * width + column, tl.sum(s8, axis=0), mask=within)


def _cover(x: Tensor, columns: int, warps: int) -> tuple[int, int, dict[str, int]]:
    """Return the programs of x (B, N, d), how many of them an image has, and their constants."""
    side, blocks = math.isqrt(x.shape[1]), triton.cdiv(x.shape[2], columns)
    constants = {"SIDE": side, "BLOCK": triton.next_power_of_2(side), "COLUMNS": columns}
    return x.shape[0] * blocks, blocks, {**constants, "num_warps": warps}


@triton_op("mvm::add_local", mutates_args=())
def add_local(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (B, side^2, d) with its convolution by weight (3, 3, d) added, zeros around the grid."""
    x, weight = x.contiguous(), weight.contiguous()
    programs, blocks, constants = _cover(x, *FORWARD)
    out = torch.empty_like(x)
    wrap_triton(local_kernel)[(programs,)](x, weight, out, x.shape[2], blocks, **constants)
    return out


@triton_op("mvm::add_local_backward", mutates_args=())
def add_local_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in float32, of the weight."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    programs, blocks, constants = _cover(x, *BACKWARD)
    out = torch.empty_like(x)
    partial = x.new_empty((x.shape[0], *weight.shape), dtype=torch.float32)
    wrap_triton(local_back_kernel)[(programs,)](grad, x, weight, out, partial, x.shape[2], blocks, **constants)
    return out, partial.sum(0)


backward_by(add_local, add_local_backward)
