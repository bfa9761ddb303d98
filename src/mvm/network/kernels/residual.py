"""add_modulate: a gated branch is added to the tokens, and their modulated norm taken; each way one pass.

A program works on a run of tokens of one image, tile by tile, so that backwards the sums over tokens (of shift, scale
and gate) stay with it until its end; torch adds those of the runs of an image, always in one order.
"""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Chosen by benchmarks/kernel_speed.py: tokens of an image that a program works on, a power of two; values at once (the
# rows are tokens, the columns the whole width, padded to a power of two); warps; tiles in flight (above 1 the next
# waits in shared memory).
FORWARD = (4, 512, 2, 1)
BACKWARD = (64, 2048, 4, 2)


@triton.jit
def add_modulate_kernel(
    x, y, gate, shift, scale, x_out, h_out, gate_stride, shift_stride, scale_stride, tokens, runs,
    BRANCH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    image = (tl.program_id(0) // runs).to(tl.int64)
    first = tl.program_id(0) % runs * RUN
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    by = 1 + tl.load(scale + image * scale_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    plus = tl.load(shift + image * shift_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    if BRANCH:
        weight = tl.load(gate + image * gate_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    start = image * tokens * WIDTH
    for done in tl.range(0, RUN, ROWS, num_stages=STAGES):
        row = first + done + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & within[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
        if BRANCH:
            value += weight * tl.load(y + start + place, mask=inside, other=0.0).to(tl.float32)
            stored = value.to(x_out.dtype.element_ty)
            tl.store(x_out + start + place, stored, mask=inside)
            value = stored.to(tl.float32)  # backwards only what was stored is known
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + EPS)[:, None]
        tl.store(h_out + start + place, (value * inverse * by + plus).to(h_out.dtype.element_ty), mask=inside)


@triton.jit
def add_modulate_back_kernel(
    x_grad, h_grad, x, y, gate, scale, x_out, y_out, partial, gate_stride, scale_stride, tokens, runs,
    BRANCH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 3 if BRANCH else 2
    image = (tl.program_id(0) // runs).to(tl.int64)
    first = tl.program_id(0) % runs * RUN
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    by = 1 + tl.load(scale + image * scale_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
    of_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    of_scale = tl.zeros((ROWS, BLOCK), tl.float32)
    if BRANCH:
        weight = tl.load(gate + image * gate_stride + column, mask=within, other=0.0).to(tl.float32)[None, :]
        of_gate = tl.zeros((ROWS, BLOCK), tl.float32)
    start = image * tokens * WIDTH
    for done in tl.range(0, RUN, ROWS, num_stages=STAGES):  # what lies outside was loaded as zeros, and adds nothing
        row = first + done + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & within[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(h_grad + start + place, mask=inside, other=0.0).to(tl.float32)
        back = grad * by
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + EPS)
        along = tl.sum(back * value, axis=1) / WIDTH * inverse  # two sums that do not wait for each other
        value *= inverse[:, None]
        of_shift += grad
        of_scale += grad * value
        total = (back - value * along[:, None]) * inverse[:, None]
        if BRANCH:
            total += tl.load(x_grad + start + place, mask=inside, other=0.0).to(tl.float32)
            of_gate += total * tl.load(y + start + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(y_out + start + place, (total * weight).to(y_out.dtype.element_ty), mask=inside)
        tl.store(x_out + start + place, total.to(x_out.dtype.element_ty), mask=inside)
    sums = partial + tl.program_id(0).to(tl.int64) * (PARTS * WIDTH) + column
    tl.store(sums, tl.sum(of_shift, axis=0), mask=within)
    tl.store(sums + WIDTH, tl.sum(of_scale, axis=0), mask=within)
    if BRANCH:
        tl.store(sums + 2 * WIDTH, tl.sum(of_gate, axis=0), mask=within)


def _cover(x: Tensor, run: int, tile: int, warps: int, stages: int) -> tuple[int, int, dict[str, int]]:
    """Return tokens and runs of an image of x (B, N, width), and the kernels' constants."""
    tokens, width = x.shape[1:]
    block = triton.next_power_of_2(width)
    rows = min(max(1, tile // block), run)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "RUN": run, "STAGES": stages, "num_warps": warps}
    return tokens, triton.cdiv(tokens, run), constants


@triton_op("mvm::add_modulate", mutates_args=())
def add_modulate(x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return z = x + gate y, and norm(z) (1 + scale) + shift; x, y (B, N, d), the others (B, 1, d)."""
    x, y = x.contiguous(), y.contiguous()
    tokens, runs, constants = _cover(x, *FORWARD)
    outs = torch.empty_like(x), torch.empty_like(x)
    strides = gate.stride(0), shift.stride(0), scale.stride(0)
    wrap_triton(add_modulate_kernel)[(len(x) * runs,)](
        x, y, gate, shift, scale, *outs, *strides, tokens, runs, BRANCH=True, **constants, EPS=eps
    )
    return outs


@triton_op("mvm::add_modulate_backward", mutates_args=())
def add_modulate_backward(
    x_grad: Tensor, h_grad: Tensor, x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and y, and of shift, scale and gate (B, 3, d); x: the sum that was returned."""
    x_grad, h_grad, x, y = (value.contiguous() for value in (x_grad, h_grad, x, y))
    tokens, runs, constants = _cover(x, *BACKWARD)
    outs = torch.empty_like(x), torch.empty_like(y)
    partial = x.new_empty((len(x), runs, 3, x.shape[-1]), dtype=torch.float32)
    wrap_triton(add_modulate_back_kernel)[(len(x) * runs,)](
        x_grad, h_grad, x, y, gate, scale, *outs, partial, gate.stride(0), scale.stride(0), tokens, runs,
        BRANCH=True, **constants, EPS=eps,
    )  # fmt: skip
    return *outs, partial.sum(1)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, y, gate, _, scale, ctx.eps = inputs
    ctx.save_for_backward(output[0], y, gate, scale)


def _add_modulate_backward(ctx, x_grad: Tensor, h_grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, gate, scale = ctx.saved_tensors
    dx, dy, sums = add_modulate_backward(x_grad, h_grad, x, y, gate, scale, ctx.eps)
    of_shift, of_scale, of_gate = sums.split(1, dim=1)
    return dx, dy, of_gate.to(gate.dtype), of_shift.to(scale.dtype), of_scale.to(scale.dtype), None


add_modulate.register_autograd(_add_modulate_backward, setup_context=_keep)


@triton_op("mvm::norm_modulate", mutates_args=())
def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return norm(x) (1 + scale) + shift; x (B, N, d), shift and scale (B, 1, d)."""
    x = x.contiguous()
    tokens, runs, constants = _cover(x, *FORWARD)
    out = torch.empty_like(x)  # without a branch the kernel touches neither y, gate nor x_out
    wrap_triton(add_modulate_kernel)[(len(x) * runs,)](
        x, x, shift, shift, scale, out, out, 0, shift.stride(0), scale.stride(0), tokens, runs,
        BRANCH=False, **constants, EPS=eps,
    )  # fmt: skip
    return out


@triton_op("mvm::norm_modulate_backward", mutates_args=())
def norm_modulate_backward(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of shift and scale (B, 2, d)."""
    grad, x = grad.contiguous(), x.contiguous()
    tokens, runs, constants = _cover(x, *BACKWARD)
    out = torch.empty_like(x)
    partial = x.new_empty((len(x), runs, 2, x.shape[-1]), dtype=torch.float32)
    wrap_triton(add_modulate_back_kernel)[(len(x) * runs,)](
        grad, grad, x, x, scale, scale, out, out, partial, 0, scale.stride(0), tokens, runs,
        BRANCH=False, **constants, EPS=eps,
    )  # fmt: skip
    return out, partial.sum(1)


def _keep_modulated(ctx, inputs: tuple, output: Tensor) -> None:
    x, _, scale, ctx.eps = inputs
    ctx.save_for_backward(x, scale)


def _norm_modulate_backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale = ctx.saved_tensors
    dx, sums = norm_modulate_backward(grad, x, scale, ctx.eps)
    return dx, *(part.to(scale.dtype) for part in sums.split(1, dim=1)), None


norm_modulate.register_autograd(_norm_modulate_backward, setup_context=_keep_modulated)
