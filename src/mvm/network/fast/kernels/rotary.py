"""placed: query and key norm with rotary positions, both at once and from one product; each way one pass.

Backwards the gradients of queries, keys and values are written side by side, as the product has them: the two products
that follow are then one each, and no sum or copy lies between.
"""

from typing import Any

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Chosen by benchmarks/kernel_speed.py: tokens that a program works on, going through their heads; its warps; and
# backwards heads in flight (above 1 the next waits in shared memory).
FORWARD = (32, 4)
BACKWARD = (32, 4, 3)


@triton.jit
def _waves(cos, sin, position, half, inside, HEAD: tl.constexpr):
    """Return (cos, sin) of the angles at these positions, for one half of a head: both halves turn alike."""
    angle = position * HEAD + half
    c = tl.load(cos + angle, mask=inside, other=0.0)
    return c, tl.load(sin + angle + HEAD // 2, mask=inside, other=0.0)  # the first half holds its negative


@triton.jit
def _weights(weight, half, HEAD: tl.constexpr):
    """Return the weights of both halves of a head."""
    within = half < HEAD // 2
    low = tl.load(weight + half, mask=within, other=0.0)
    return low, tl.load(weight + half + HEAD // 2, mask=within, other=0.0)


@triton.jit
def _rotated(x, out, low_weight, high_weight, c, s, place, offset, inside, HEAD: tl.constexpr, EPS: tl.constexpr):
    """Norm and rotate one head of the program's tokens: (low, high) -> (low c - high s, high c + low s)."""
    HALF: tl.constexpr = HEAD // 2
    low = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / HEAD + EPS)[:, None]
    low *= inverse * low_weight
    high *= inverse * high_weight
    tl.store(out + offset, (low * c - high * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + offset + HALF, (high * c + low * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def place_kernel(
    qkv, q_out, k_out, q_weight, k_weight, cos, sin, rows, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = HEADS * HEAD
    first = tl.program_id(0) * TOKENS
    token, half = tl.arange(0, TOKENS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (first + token < rows) & (half < HEAD // 2)
    c, s = _waves(cos, sin, (first + token) % tokens, half, inside, HEAD)
    q_low, q_high = _weights(q_weight, half, HEAD)
    k_low, k_high = _weights(k_weight, half, HEAD)
    qkv += first.to(tl.int64) * (3 * WIDTH)
    q_out += first.to(tl.int64) * WIDTH
    k_out += first.to(tl.int64) * WIDTH
    for head in tl.static_range(HEADS):
        place, offset = token * (3 * WIDTH) + head * HEAD + half, token * WIDTH + head * HEAD + half
        _rotated(qkv, q_out, q_low, q_high, c, s, place, offset, inside, HEAD, EPS)
        _rotated(qkv + WIDTH, k_out, k_low, k_high, c, s, place, offset, inside, HEAD, EPS)


@triton.jit
def _rotated_back(
    grad, x, out, low_weight, high_weight, c, s, place, offset, inside, HEAD: tl.constexpr, EPS: tl.constexpr
):
    """Store the gradient of one head of the program's tokens; return the weight's, (tokens, half) low and high."""
    HALF: tl.constexpr = HEAD // 2
    low = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(grad + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    back_low, back_high = g * c + h * s, h * c - g * s  # the rotation undone
    d, e = back_low * low_weight, back_high * high_weight
    inverse = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / HEAD + EPS)[:, None]
    along = (tl.sum(d * low + e * high, axis=1) / HEAD)[:, None] * inverse  # two sums that do not wait for each other
    low *= inverse
    high *= inverse
    tl.store(out + place, ((d - low * along) * inverse).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HALF, ((e - high * along) * inverse).to(out.dtype.element_ty), mask=inside)
    return back_low * low, back_high * high


@triton.jit
def place_back_kernel(
    q_grad, k_grad, v_grad, qkv, out, partial, q_weight, k_weight, cos, sin, rows, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD // 2
    WIDTH: tl.constexpr = HEADS * HEAD
    first = tl.program_id(0) * TOKENS
    token, half = tl.arange(0, TOKENS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (first + token < rows) & (half < HEAD // 2)
    c, s = _waves(cos, sin, (first + token) % tokens, half, inside, HEAD)
    q_low, q_high = _weights(q_weight, half, HEAD)
    k_low, k_high = _weights(k_weight, half, HEAD)
    qkv += first.to(tl.int64) * (3 * WIDTH)
    out += first.to(tl.int64) * (3 * WIDTH)
    q_grad += first.to(tl.int64) * WIDTH
    k_grad += first.to(tl.int64) * WIDTH
    v_grad += first.to(tl.int64) * WIDTH
    of_q_low = tl.zeros((TOKENS, BLOCK), tl.float32)
    of_q_high, of_k_low, of_k_high = of_q_low, of_q_low, of_q_low
    for head in tl.range(HEADS, num_stages=STAGES):
        place, offset = token * (3 * WIDTH) + head * HEAD + half, token * WIDTH + head * HEAD + half
        a, b = _rotated_back(q_grad, qkv, out, q_low, q_high, c, s, place, offset, inside, HEAD, EPS)
        of_q_low += a
        of_q_high += b
        a, b = _rotated_back(k_grad, qkv + WIDTH, out + WIDTH, k_low, k_high, c, s, place, offset, inside, HEAD, EPS)
        of_k_low += a
        of_k_high += b
        value_low = tl.load(v_grad + offset, mask=inside)
        value_high = tl.load(v_grad + offset + HALF, mask=inside)
        tl.store(out + place + 2 * WIDTH, value_low, mask=inside)
        tl.store(out + place + 2 * WIDTH + HALF, value_high, mask=inside)
    sums = partial + tl.program_id(0) * (4 * BLOCK) + tl.arange(0, BLOCK)  # of four parts, summed over programs later
    tl.store(sums, tl.sum(of_q_low, axis=0))
    tl.store(sums + BLOCK, tl.sum(of_q_high, axis=0))
    tl.store(sums + 2 * BLOCK, tl.sum(of_k_low, axis=0))
    tl.store(sums + 3 * BLOCK, tl.sum(of_k_high, axis=0))


def _cover(qkv: Tensor, tokens_at_once: int, warps: int) -> tuple[int, int, int, dict[str, int]]:
    """Return programs, tokens of the whole batch and of an image of qkv (B, N, 3, heads, head), and constants."""
    batch, tokens, _, heads, head = qkv.shape
    block = triton.next_power_of_2(head // 2)
    constants = {"HEADS": heads, "HEAD": head, "BLOCK": block, "TOKENS": tokens_at_once, "num_warps": warps}
    return triton.cdiv(batch * tokens, tokens_at_once), batch * tokens, tokens, constants


@triton_op("mvm::place", mutates_args=())
def place(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return rotate(norm(x) * weight) of queries and keys; qkv (B, N, 3, heads, head), cos and sin (N, head)."""
    qkv = qkv.contiguous()
    programs, rows, tokens, constants = _cover(qkv, *FORWARD)
    batch, _, _, heads, head = qkv.shape
    outs = qkv.new_empty((batch, tokens, heads, head)), qkv.new_empty((batch, tokens, heads, head))
    wrap_triton(place_kernel)[(programs,)](qkv, *outs, q_weight, k_weight, cos, sin, rows, tokens, **constants, EPS=eps)
    return outs


@triton_op("mvm::place_backward", mutates_args=())
def place_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of qkv, and of both weights side by side (2, head)."""
    q_grad, k_grad, v_grad, qkv = (value.contiguous() for value in (q_grad, k_grad, v_grad, qkv))
    tokens_at_once, warps, stages = BACKWARD
    programs, rows, tokens, constants = _cover(qkv, tokens_at_once, warps)
    out = torch.empty_like(qkv)
    partial = qkv.new_empty((programs, 4, constants["BLOCK"]), dtype=torch.float32)
    wrap_triton(place_back_kernel)[(programs,)](
        q_grad, k_grad, v_grad, qkv, out, partial, q_weight, k_weight, cos, sin, rows, tokens,
        **constants, STAGES=stages, EPS=eps,
    )  # fmt: skip
    return out, partial.sum(0)[:, : qkv.shape[-1] // 2].reshape(2, -1)


class _Placed(torch.autograd.Function):
    """Not an operator with a gradient: values are a view of the product, which no operator may return."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, ctx.eps = rest
        ctx.save_for_backward(qkv, *tensors)
        return *place(qkv, *rest), qkv.select(2, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        of_qkv, weights = place_backward(*grads, *saved, ctx.eps)
        return of_qkv, weights[0].to(saved[1].dtype), weights[1].to(saved[2].dtype), None, None, None


def placed(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, N, heads, head) of qkv (B, N, 3, heads, head), the first two by `place`."""
    return _Placed.apply(qkv, q_weight, k_weight, cos, sin, eps)
