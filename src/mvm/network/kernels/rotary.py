"""norm_rotate: query and key norm with rotary positions, both at once, each way one pass."""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

TOKENS = 16  # that one program works on; it goes through their heads one by one


@triton.jit
def _rotated(x, out, weight, start, c, s, row, half, inside, HEAD: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr):
    """Norm and rotate one head of the program's tokens: (low, high) -> (low c - high s, high c + low s)."""
    low = tl.load(x + start + row + half, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + start + row + half + HALF, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD + EPS)[:, None]
    low *= inverse * tl.load(weight + half, mask=half < HALF, other=0.0)
    high *= inverse * tl.load(weight + half + HALF, mask=half < HALF, other=0.0)
    tl.store(out + start + row + half, (low * c - high * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + start + row + half + HALF, (high * c + low * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, rows, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD // 2
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, BLOCK)[None, :]
    inside = (token < rows)[:, None] & (half < HALF)
    angle = (token % tokens)[:, None] * HEAD + half
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle + HALF, mask=inside, other=0.0)  # the first half holds its negative
    row = token[:, None] * (HEADS * HEAD)
    for head in range(HEADS):
        _rotated(q, q_out, q_weight, head * HEAD, c, s, row, half, inside, HEAD, HALF, EPS)
        _rotated(k, k_out, k_weight, head * HEAD, c, s, row, half, inside, HEAD, HALF, EPS)


@triton.jit
def _turned_back(
    grad, x, out, weight, start, c, s, row, half, inside, HEAD: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr
):
    """Store the gradient of one head of the program's tokens; return the weight's, (tokens, half) low and high."""
    low = tl.load(x + start + row + half, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + start + row + half + HALF, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + start + row + half, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(grad + start + row + half + HALF, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD + EPS)[:, None]
    low *= inverse
    high *= inverse
    back_low, back_high = g * c + h * s, h * c - g * s  # the rotation undone
    d = back_low * tl.load(weight + half, mask=half < HALF, other=0.0)
    e = back_high * tl.load(weight + half + HALF, mask=half < HALF, other=0.0)
    along = (tl.sum(d * low, axis=1) + tl.sum(e * high, axis=1))[:, None] / HEAD
    tl.store(out + start + row + half, ((d - low * along) * inverse).to(out.dtype.element_ty), mask=inside)
    tl.store(out + start + row + half + HALF, ((e - high * along) * inverse).to(out.dtype.element_ty), mask=inside)
    return back_low * low, back_high * high


@triton.jit
def rotate_back_kernel(
    q_grad, k_grad, q, k, q_out, k_out, partial, q_weight, k_weight, cos, sin, rows, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD // 2
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, BLOCK)[None, :]
    inside = (token < rows)[:, None] & (half < HALF)
    angle = (token % tokens)[:, None] * HEAD + half
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle + HALF, mask=inside, other=0.0)
    row = token[:, None] * (HEADS * HEAD)
    q_low = tl.zeros((TOKENS, BLOCK), tl.float32)
    q_high, k_low, k_high = q_low, q_low, q_low
    for head in range(HEADS):
        a, b = _turned_back(q_grad, q, q_out, q_weight, head * HEAD, c, s, row, half, inside, HEAD, HALF, EPS)
        q_low += a
        q_high += b
        a, b = _turned_back(k_grad, k, k_out, k_weight, head * HEAD, c, s, row, half, inside, HEAD, HALF, EPS)
        k_low += a
        k_high += b
    place = partial + tl.program_id(0) * (4 * BLOCK) + tl.arange(0, BLOCK)  # of four parts, summed over programs later
    tl.store(place, tl.sum(q_low, axis=0))
    tl.store(place + BLOCK, tl.sum(q_high, axis=0))
    tl.store(place + 2 * BLOCK, tl.sum(k_low, axis=0))
    tl.store(place + 3 * BLOCK, tl.sum(k_high, axis=0))


def _sizes(q: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return tokens of the whole batch and of an image of q (B, N, heads, head), and the kernels' constants."""
    batch, tokens, heads, head = q.shape
    block = triton.next_power_of_2(head // 2)
    return batch * tokens, tokens, {"HEADS": heads, "HEAD": head, "BLOCK": block, "TOKENS": TOKENS}


@triton_op("mvm::norm_rotate", mutates_args=())
def norm_rotate(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return rotate(norm(x) * weight) of both; (B, N, heads, head) contiguous, cos and sin (N, head)."""
    rows, tokens, constants = _sizes(q)
    outs = torch.empty_like(q), torch.empty_like(k)
    wrap_triton(rotate_kernel)[(triton.cdiv(rows, TOKENS),)](
        q, k, *outs, q_weight, k_weight, cos, sin, rows, tokens, **constants, EPS=eps
    )
    return outs


@triton_op("mvm::norm_rotate_backward", mutates_args=())
def norm_rotate_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q and k, and those of both weights side by side (2, head)."""
    rows, tokens, constants = _sizes(q)
    programs = triton.cdiv(rows, TOKENS)
    outs = torch.empty_like(q), torch.empty_like(k)
    partial = q.new_empty((programs, 4, constants["BLOCK"]), dtype=torch.float32)
    wrap_triton(rotate_back_kernel)[(programs,)](
        q_grad, k_grad, q, k, *outs, partial, q_weight, k_weight, cos, sin, rows, tokens, **constants, EPS=eps
    )
    return *outs, partial.sum(0)[:, : q.shape[-1] // 2].reshape(2, -1)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _rotate_backward(ctx, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dq, dk, weights = norm_rotate_backward(q_grad.contiguous(), k_grad.contiguous(), *saved, ctx.eps)
    return dq, dk, weights[0].to(saved[2].dtype), weights[1].to(saved[3].dtype), None, None, None


norm_rotate.register_autograd(_rotate_backward, setup_context=_keep)
