"""attend: attention of a few hundred tokens with query-key norm and rotary positions, each way one kernel.

All keys of a head fit into one program: a softmax needs no second pass, and neither the placed queries and keys nor
their gradients ever reach memory. Queries, keys and values are one product, and one tensor's gradient.
"""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

MOST_TOKENS = 256  # of an image that a program can hold
HEAD_WIDTHS = (16, 32, 64)  # that a program can hold, and halve
LOG2_E = tl.constexpr(1.4426950408889634)  # the GPU's exponential is of 2

# Chosen by benchmarks/kernel_speed.py: queries that a program takes at once, and its warps.
FORWARD = (64, 4)
BACKWARD = (32, 8)


def fits(tokens: int, head: int) -> bool:
    """Return whether attend takes as many tokens of an image and heads as wide."""
    return tokens <= MOST_TOKENS and head in HEAD_WIDTHS


@triton.jit
def _places(cos, sin, token, tokens, HEAD: tl.constexpr):
    """Return (cos, signed sin) of the tokens' positions, (tokens, head)."""
    HALF: tl.constexpr = HEAD // 2
    column = tl.arange(0, HEAD)[None, :]
    angle = token[:, None] * HEAD + column % HALF  # both halves turn by the same angle: half the table is read
    inside = (token < tokens)[:, None]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle + HALF, mask=inside, other=0.0)
    return c, tl.where(column < HALF, -s, s)


@triton.jit
def _placed(x, weight, cos, sin, token, tokens, ROW: tl.constexpr, HEAD: tl.constexpr, EPS: tl.constexpr):
    """Return rotate(norm(x) * weight) of one head's tokens, (tokens, head) in float32; zero past the last."""
    column = tl.arange(0, HEAD)
    other = (column + HEAD // 2) % HEAD  # of the half that is rotated into this one; its second load finds a cache
    row, inside = token[:, None] * ROW, (token < tokens)[:, None]
    value = tl.load(x + row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    swapped = tl.load(x + row + other[None, :], mask=inside, other=0.0).to(tl.float32)
    c, s = _places(cos, sin, token, tokens, HEAD)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / HEAD + EPS)[:, None]
    w, v = tl.load(weight + column)[None, :].to(tl.float32), tl.load(weight + other)[None, :].to(tl.float32)
    return (value * w * c + swapped * v * s) * inverse


@triton.jit
def _halves(x, ROWS: tl.constexpr, HEAD: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HEAD // 2)), (0, 2, 1)))


@triton.jit
def _turned_back(
    grad, x, weight, cos, sin, out, token, tokens,
    ROWS: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Store the gradient before _placed of one after it; return the weight's, summed over tokens, of both halves."""
    HALF: tl.constexpr = HEAD // 2
    g, h = _halves(grad, ROWS, HEAD)
    half = tl.arange(0, HALF)[None, :]
    inside = (token < tokens)[:, None]
    place, angle = token[:, None] * ROW + half, token[:, None] * HEAD + half
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle + HALF, mask=inside, other=0.0)
    low = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD + EPS)[:, None]
    low *= inverse
    high *= inverse
    back_low, back_high = g * c + h * s, h * c - g * s  # the rotation undone
    d = back_low * tl.load(weight + half).to(tl.float32)
    e = back_high * tl.load(weight + half + HALF).to(tl.float32)
    along = (tl.sum(d * low, axis=1) + tl.sum(e * high, axis=1))[:, None] / HEAD
    tl.store(out + place, ((d - low * along) * inverse).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HALF, ((e - high * along) * inverse).to(out.dtype.element_ty), mask=inside)
    return tl.sum(back_low * low, axis=0), tl.sum(back_high * high, axis=0)


@triton.jit
def attend_kernel(
    qkv, out, totals, q_weight, k_weight, cos, sin, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, TURNS: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = HEADS * HEAD
    ROW: tl.constexpr = 3 * WIDTH
    kind = out.dtype.element_ty
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    q = qkv + image * tokens * ROW + head * HEAD
    k, v = q + WIDTH, q + 2 * WIDTH
    out += image * tokens * WIDTH + head * HEAD
    token, column = tl.arange(0, TOKENS), tl.arange(0, HEAD)[None, :]
    keys = _placed(k, k_weight, cos, sin, token, tokens, ROW, HEAD, EPS).to(kind)
    values = tl.load(v + token[:, None] * ROW + column, mask=(token < tokens)[:, None], other=0.0)
    for turn in range(TURNS):
        query = turn * QUERIES + tl.arange(0, QUERIES)
        queries = _placed(q, q_weight, cos, sin, query, tokens, ROW, HEAD, EPS).to(kind)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (SCALE * LOG2_E)
        score = tl.where((token < tokens)[None, :], score, float("-inf"))
        most = tl.max(score, axis=1)
        chance = tl.exp2(score - most[:, None])
        total = tl.sum(chance, axis=1)
        mixed = tl.dot(chance.to(kind), values, input_precision=PRECISION) / total[:, None]
        tl.store(totals + tl.program_id(0) * tokens + query, most + tl.log2(total), mask=query < tokens)
        tl.store(out + query[:, None] * WIDTH + column, mixed.to(kind), mask=(query < tokens)[:, None])


@triton.jit
def attend_back_kernel(
    grad, qkv, totals, qkv_out, partial, q_weight, k_weight, cos, sin, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, TURNS: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Keys are rows here, (tokens, queries): the sums over queries, which stay in registers, are then of full height.
    WIDTH: tl.constexpr = HEADS * HEAD
    ROW: tl.constexpr = 3 * WIDTH
    HALF: tl.constexpr = HEAD // 2
    kind = qkv_out.dtype.element_ty
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    q, q_out = qkv + image * tokens * ROW + head * HEAD, qkv_out + image * tokens * ROW + head * HEAD
    k, v, k_out, v_out = q + WIDTH, q + 2 * WIDTH, q_out + WIDTH, q_out + 2 * WIDTH
    grad += image * tokens * WIDTH + head * HEAD
    token, column = tl.arange(0, TOKENS), tl.arange(0, HEAD)[None, :]
    keys = _placed(k, k_weight, cos, sin, token, tokens, ROW, HEAD, EPS).to(kind)
    values = tl.load(v + token[:, None] * ROW + column, mask=(token < tokens)[:, None], other=0.0)
    of_keys = tl.zeros((TOKENS, HEAD), tl.float32)
    of_values = tl.zeros((TOKENS, HEAD), tl.float32)
    weight_low, weight_high = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    for turn in range(TURNS):
        query = turn * QUERIES + tl.arange(0, QUERIES)
        queries = _placed(q, q_weight, cos, sin, query, tokens, ROW, HEAD, EPS).to(kind)
        given = tl.load(grad + query[:, None] * WIDTH + column, mask=(query < tokens)[:, None], other=0.0)
        score = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (SCALE * LOG2_E)
        total = tl.load(totals + tl.program_id(0) * tokens + query, mask=query < tokens, other=0.0)
        chance = tl.where((token < tokens)[:, None], tl.exp2(score - total[None, :]), 0.0)
        of_values = tl.dot(chance.to(kind), given, of_values, input_precision=PRECISION)
        of_chance = tl.dot(values, tl.trans(given), input_precision=PRECISION)
        of_score = (chance * (of_chance - tl.sum(chance * of_chance, axis=0)[None, :]) * SCALE).to(kind)
        of_keys = tl.dot(of_score, queries, of_keys, input_precision=PRECISION)
        of_queries = tl.dot(tl.trans(of_score), keys, input_precision=PRECISION)
        low, high = _turned_back(of_queries, q, q_weight, cos, sin, q_out, query, tokens, QUERIES, ROW, HEAD, EPS)
        weight_low += low
        weight_high += high
    tl.store(v_out + token[:, None] * ROW + column, of_values.to(kind), mask=(token < tokens)[:, None])
    low, high = _turned_back(of_keys, k, k_weight, cos, sin, k_out, token, tokens, TOKENS, ROW, HEAD, EPS)
    place = partial + tl.program_id(0) * (4 * HALF) + tl.arange(0, HALF)  # of four parts, summed over programs later
    tl.store(place, weight_low)
    tl.store(place + HALF, weight_high)
    tl.store(place + 2 * HALF, low)
    tl.store(place + 3 * HALF, high)


def _constants(qkv: Tensor, most_queries: int, warps: int, eps: float) -> dict[str, int | float | str]:
    tokens, _, heads, head = qkv.shape[1:]
    held = max(16, triton.next_power_of_2(tokens))
    queries = min(most_queries, held)
    return {
        "HEADS": heads,
        "HEAD": head,
        "TOKENS": held,
        "QUERIES": queries,
        "TURNS": triton.cdiv(tokens, queries),
        "SCALE": head**-0.5,
        "EPS": eps,
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",  # of no meaning to 16 bits
        "num_warps": warps,
        "num_stages": 1,  # a program has few turns; loading ahead of them takes more shared memory than there is
    }


@triton_op("mvm::attend", mutates_args=())
def attend(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return attention (B, N, heads, head) of qkv (B, N, 3, heads, head) contiguous; cos and sin (N, head).

    Also, for the backward pass, log2 of the sums of each softmax (B, heads, N).
    """
    batch, tokens, _, heads, head = qkv.shape
    out = qkv.new_empty((batch, tokens, heads, head))
    totals = qkv.new_empty((batch, heads, tokens), dtype=torch.float32)
    wrap_triton(attend_kernel)[(batch * heads,)](
        qkv, out, totals, q_weight, k_weight, cos, sin, tokens, **_constants(qkv, *FORWARD, eps)
    )
    return out, totals


@triton_op("mvm::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    qkv: Tensor,
    totals: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of qkv, and those of both weights side by side (2, head)."""
    batch, tokens, _, heads, head = qkv.shape
    out = torch.empty_like(qkv)
    partial = qkv.new_empty((batch * heads, 2, head), dtype=torch.float32)
    wrap_triton(attend_back_kernel)[(batch * heads,)](
        grad, qkv, totals, out, partial, q_weight, k_weight, cos, sin, tokens, **_constants(qkv, *BACKWARD, eps)
    )
    return out, partial.sum(0)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    qkv, *rest, ctx.eps = inputs
    ctx.save_for_backward(qkv, output[1], *rest)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    of_qkv, weights = attend_backward(grad.contiguous(), *saved, ctx.eps)
    return of_qkv, weights[0].to(saved[2].dtype), weights[1].to(saved[3].dtype), None, None, None


attend.register_autograd(_backward, setup_context=_keep)
