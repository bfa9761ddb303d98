"""add_modulate: a gated branch is added to the tokens, and their modulated norm taken; each way one pass.

A program works on a run of tokens of one image, tile by tile, so that backwards the sums over tokens (of shift, scale,
gate, and of the branch's bias) stay with it until its end; torch adds those of the runs, always in one order. The norm
is RMSNorm, or LayerNorm where it is centred; the mean and 1 / std of each token are kept for the way back.
"""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Chosen by benchmarks/kernel_speed.py: tokens of an image that a program works on; values at once (the rows are tokens,
# the columns the whole width, padded to a power of two); warps; tiles in flight (above 1 the next waits in shared
# memory).
FORWARD = (4, 1024, 2, 1)
BACKWARD = (64, 1024, 2, 3)


@triton.jit
def add_modulate_kernel(
    x, y, gate, shift, scale, x_out, h_out, moments, gate_stride, shift_stride, scale_stride, tokens, runs,
    BRANCH: tl.constexpr, CENTRED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    image = (tl.program_id(0) // runs).to(tl.int64)
    first = tl.program_id(0) % runs * RUN
    last = tl.minimum(first + RUN, tokens)
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    by = 1 + tl.load(scale + image * scale_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    plus = tl.load(shift + image * shift_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    if BRANCH:
        weight = tl.load(gate + image * gate_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    start = image * tokens * WIDTH
    moments += image * tokens * 2
    for done in tl.range(0, RUN, ROWS, num_stages=STAGES):
        row = first + done + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & within[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
        if BRANCH:
            value += weight * tl.load(y + start + place, mask=inside, other=0.0).to(tl.float32)
            stored = value.to(x_out.dtype.element_ty)
            tl.store(x_out + start + place, stored, mask=inside)
            value = stored.to(tl.float32)  # backwards only what was stored is known
        if CENTRED:
            mean = tl.sum(value, axis=1) / WIDTH
            value = tl.where(inside, value - mean[:, None], 0.0)
            tl.store(moments + 2 * row, mean, mask=row < last)
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + EPS)
        tl.store(moments + 2 * row + 1, inverse, mask=row < last)
        tl.store(h_out + start + place, (value * inverse[:, None] * by + plus).to(h_out.dtype.element_ty), mask=inside)


@triton.jit
def add_modulate_back_kernel(
    x_grad, h_grad, x, y, moments, gate, scale, x_out, y_out, partial, gate_stride, scale_stride, tokens, runs,
    BRANCH: tl.constexpr, CENTRED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 4 if BRANCH else 2
    image = (tl.program_id(0) // runs).to(tl.int64)
    first = tl.program_id(0) % runs * RUN
    last = tl.minimum(first + RUN, tokens)
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    by = 1 + tl.load(scale + image * scale_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    of_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    of_scale = tl.zeros((ROWS, BLOCK), tl.float32)
    if BRANCH:
        weight = tl.load(gate + image * gate_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
        of_gate = tl.zeros((ROWS, BLOCK), tl.float32)
        of_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    start = image * tokens * WIDTH
    moments += image * tokens * 2
    for done in tl.range(0, RUN, ROWS, num_stages=STAGES):  # what lies outside was loaded as zeros, and adds nothing
        row = first + done + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & within[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(h_grad + start + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(moments + 2 * row + 1, mask=row < last, other=0.0)[:, None]
        if CENTRED:
            value -= tl.load(moments + 2 * row, mask=row < last, other=0.0)[:, None]
        value *= inverse  # the norm; beyond the width a centred one is not zero, but every gradient there is
        back = grad * by
        of_shift += grad
        of_scale += grad * value
        total = back - value * (tl.sum(back * value, axis=1) / WIDTH)[:, None]
        if CENTRED:
            total -= (tl.sum(back, axis=1) / WIDTH)[:, None]
        total *= inverse
        if BRANCH:
            total += tl.load(x_grad + start + place, mask=inside, other=0.0).to(tl.float32)
            of_gate += total * tl.load(y + start + place, mask=inside, other=0.0).to(tl.float32)
            of_sum += total
            tl.store(y_out + start + place, (total * weight).to(y_out.dtype.element_ty), mask=inside)
        tl.store(x_out + start + place, total.to(x_out.dtype.element_ty), mask=inside)
    sums = partial + tl.program_id(0).to(tl.int64) * (PARTS * WIDTH) + column
    tl.store(sums, tl.sum(of_shift, axis=0), mask=within)
    tl.store(sums + WIDTH, tl.sum(of_scale, axis=0), mask=within)
    if BRANCH:
        tl.store(sums + 2 * WIDTH, tl.sum(of_gate, axis=0), mask=within)
        tl.store(sums + 3 * WIDTH, tl.sum(of_sum * weight, axis=0), mask=within)


def _cover(x: Tensor, run: int, tile: int, warps: int, stages: int) -> tuple[int, int, dict[str, int]]:
    """Return tokens and runs of an image of x (B, N, width), and the kernels' constants."""
    tokens, width = x.shape[1:]
    block = triton.next_power_of_2(width)
    rows = min(max(1, tile // block), run)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "RUN": run, "STAGES": stages, "num_warps": warps}
    return tokens, triton.cdiv(tokens, run), constants


def _moments(x: Tensor) -> Tensor:
    """Return room for the mean, used where a norm is centred, and 1 / std of each token of x (B, N, width)."""
    return x.new_empty((*x.shape[:2], 2), dtype=torch.float32)


@triton_op("mvm::add_modulate", mutates_args=())
def _add_modulate(
    x: Tensor, y: Tensor, bias: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.contiguous(), y.contiguous()
    tokens, runs, constants = _cover(x, *FORWARD)
    outs = torch.empty_like(x), torch.empty_like(x), _moments(x)
    strides = gate.stride(0), shift.stride(0), scale.stride(0)
    wrap_triton(add_modulate_kernel)[(len(x) * runs,)](
        x, y, gate, shift, scale, *outs, *strides, tokens, runs, BRANCH=True, CENTRED=centred, **constants, EPS=eps
    )
    return outs


def add_modulate(
    x: Tensor, y: Tensor, bias: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """Return z = x + gate y, and norm(z) (1 + scale) + shift; x, y (B, N, d), bias (d,), the others (B, 1, d).

    bias is in y already, detached: it is given for its gradient alone, a sum over all tokens that is had for nothing.
    """
    return _add_modulate(x, y, bias, gate, shift, scale, eps, centred)[:2]


@triton_op("mvm::add_modulate_backward", mutates_args=())
def add_modulate_backward(
    x_grad: Tensor,
    h_grad: Tensor,
    x: Tensor,
    y: Tensor,
    moments: Tensor,
    gate: Tensor,
    scale: Tensor,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and y, and of shift, scale, gate and bias (B, 4, d); x: the sum that was returned."""
    x_grad, h_grad, x, y = (value.contiguous() for value in (x_grad, h_grad, x, y))
    tokens, runs, constants = _cover(x, *BACKWARD)
    outs = torch.empty_like(x), torch.empty_like(y)
    partial = x.new_empty((len(x), runs, 4, x.shape[-1]), dtype=torch.float32)
    wrap_triton(add_modulate_back_kernel)[(len(x) * runs,)](
        x_grad, h_grad, x, y, moments, gate, scale, *outs, partial, gate.stride(0), scale.stride(0), tokens, runs,
        BRANCH=True, CENTRED=centred, **constants,
    )  # fmt: skip
    return *outs, partial.sum(1)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, y, bias, gate, _, scale, _, ctx.centred = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(output[0], y, output[2], gate, scale)


def _add_modulate_backward(ctx, x_grad: Tensor, h_grad: Tensor, of_moments: Tensor) -> tuple[Tensor | None, ...]:
    x, y, moments, gate, scale = ctx.saved_tensors
    dx, dy, sums = add_modulate_backward(x_grad, h_grad, x, y, moments, gate, scale, ctx.centred)
    of_shift, of_scale, of_gate, of_bias = sums.split(1, dim=1)
    of_modulation = of_gate.to(gate.dtype), of_shift.to(scale.dtype), of_scale.to(scale.dtype)
    return dx, dy, of_bias.sum((0, 1)).to(ctx.bias_dtype), *of_modulation, None, None


_add_modulate.register_autograd(_add_modulate_backward, setup_context=_keep)


@triton_op("mvm::norm_modulate", mutates_args=())
def _norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    tokens, runs, constants = _cover(x, *FORWARD)
    out, moments = torch.empty_like(x), _moments(x)  # without a branch the kernel touches neither y, gate nor x_out
    wrap_triton(add_modulate_kernel)[(len(x) * runs,)](
        x, x, shift, shift, scale, out, out, moments, 0, shift.stride(0), scale.stride(0), tokens, runs,
        BRANCH=False, CENTRED=centred, **constants, EPS=eps,
    )  # fmt: skip
    return out, moments


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float, centred: bool) -> Tensor:
    """Return norm(x) (1 + scale) + shift; x (B, N, d), shift and scale (B, 1, d)."""
    return _norm_modulate(x, shift, scale, eps, centred)[0]


@triton_op("mvm::norm_modulate_backward", mutates_args=())
def norm_modulate_backward(
    grad: Tensor, x: Tensor, moments: Tensor, scale: Tensor, centred: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of shift and scale (B, 2, d)."""
    grad, x = grad.contiguous(), x.contiguous()
    tokens, runs, constants = _cover(x, *BACKWARD)
    out = torch.empty_like(x)
    partial = x.new_empty((len(x), runs, 2, x.shape[-1]), dtype=torch.float32)
    wrap_triton(add_modulate_back_kernel)[(len(x) * runs,)](
        grad, grad, x, x, moments, scale, scale, out, out, partial, 0, scale.stride(0), tokens, runs,
        BRANCH=False, CENTRED=centred, **constants,
    )  # fmt: skip
    return out, partial.sum(1)


def _keep_modulated(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, _, scale, _, ctx.centred = inputs
    ctx.save_for_backward(x, output[1], scale)


def _norm_modulate_backward(ctx, grad: Tensor, of_moments: Tensor) -> tuple[Tensor | None, ...]:
    x, moments, scale = ctx.saved_tensors
    dx, sums = norm_modulate_backward(grad, x, moments, scale, ctx.centred)
    return dx, *(part.to(scale.dtype) for part in sums.split(1, dim=1)), None, None


_norm_modulate.register_autograd(_norm_modulate_backward, setup_context=_keep_modulated)
