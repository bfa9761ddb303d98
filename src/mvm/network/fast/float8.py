"""Matrix products of 8-bit floats, forward and backward: at their best twice as many a second as in bf16.

A tensor is scaled so that its largest magnitude is the format's, then rounded; weights, sums, and all that is not a
product stay as they are. Scales are dynamic, taken from each tensor as it comes, or from a sample of it. Delayed ones,
from the magnitudes of past steps, would save that too, but are a state: it would have to be stored for a run to resume
exactly.

By hand and not by torchao's layers, whose values these are (a test compares them): x is rounded once for several
products, both directions in one pass, and a scale may come from a sample, which their layers do not offer.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TRITON = find_spec("triton") is not None  # looked up at import: a compiler cannot look into a search for modules

# Of the scales: one for a tensor; one for a tensor from some of its rows; one for each row of the left, column of the
# right. "partly": by row, and the gradients of weights, which need every operand transposed and scaled once more, are
# plain products.
GRANULARITY = ("tensor", "sampled", "row", "partly")
ONE_SCALE = ("tensor", "sampled")
STEP = 16  # the GPU's products want sizes that are multiples of it
VALUES = torch.float8_e4m3fn  # of activations and weights: three bits of mantissa
# Of gradients: two bits and more range, as they differ more among each other; by rows they differ less.
GRADIENTS = dict.fromkeys(ONE_SCALE, torch.float8_e5m2) | dict.fromkeys(("row", "partly"), torch.float8_e4m3fn)
# "sampled" looks at every 17th token alone (of a grid of 16 always another column), a pass less over each tensor, and
# leaves room above what it saw, which formats with exponents hardly feel: of e4m3's 18 powers of two it takes two, of
# e5m2's 32 six. What is larger still is cut off. From fewer rows than FEW no sample is drawn: it might miss them.
EVERY, FEW = 17, 1024
ROOM = {torch.float8_e4m3fn: 4.0, torch.float8_e5m2: 64.0}
SMALLEST = 2.0**-100  # magnitude that is still scaled up: zeros stay zeros, and no scale overflows

# Whether partial sums may stay in the tensor cores' narrow accumulators: faster. Gradients are sums over all tokens,
# where that would show; but with scales by rows torch's kernels for Hopper are made for it.
FAST_FORWARD = True
FAST_BACKWARD = dict.fromkeys(ONE_SCALE, False) | dict.fromkeys(("row", "partly"), True)


class Scaled(NamedTuple):
    """A matrix (M, K) as values * scale: 8-bit values, row by row; scale float32, () or (M, 1)."""

    values: Tensor
    scale: Tensor


def _factor(x: Tensor, granularity: str, dtype: torch.dtype) -> Tensor:
    """Return what x, or each of its rows, is multiplied by so that its largest magnitude is the format's."""
    if granularity == "sampled" and len(x) >= FEW:
        magnitude = ROOM[dtype] * x[::EVERY].abs().amax().float()
    else:
        magnitude = (x.abs().amax() if granularity in ONE_SCALE else x.abs().amax(-1, keepdim=True)).float()
    return torch.finfo(dtype).max / magnitude.clamp(min=SMALLEST)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in an 8-bit format: cut off at its largest, as a GPU does it; but what is not finite is not hidden."""
    largest = torch.finfo(dtype).max
    return (x.clamp(-largest, largest) + 0 * x).to(dtype)


def scaled(x: Tensor, granularity: str, dtype: torch.dtype) -> Scaled:
    """Return the matrix x rounded to 8 bits, with one scale for all or one for each row."""
    factor = _factor(x, granularity, dtype)
    return Scaled(_rounded(x.float() * factor, dtype).contiguous(), 1 / factor)


def _on_gpu(x: Tensor) -> bool:
    """Return whether x is where a kernel by hand can have it."""
    return TRITON and x.is_cuda


def scaled_both_ways(x: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Scaled, Scaled]:
    """Return x and its transpose, each as `scaled` would; a scale for all of x serves both."""
    if granularity in ONE_SCALE and _on_gpu(x):
        from mvm.network.fast.kernels.cast import rounded_both_ways

        factor = _factor(x, granularity, dtype)
        values, transposed = rounded_both_ways(x, factor, dtype)
        return Scaled(values, 1 / factor), Scaled(transposed, 1 / factor)
    plain = scaled(x, granularity, dtype)
    if granularity in ONE_SCALE:
        return plain, Scaled(plain.values.t().contiguous(), plain.scale)
    return plain, scaled(x.t(), granularity, dtype)


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a b^T (M, N) in `dtype`, for a (M, K) and b (N, K), by the GPU's own product where there is one."""
    if a.values.is_cpu:  # in float64, where sums of 8-bit values all but never round
        return (a.values.double() @ b.values.double().t() * a.scale * b.scale.t()).to(dtype)
    return torch._scaled_mm(a.values, b.values.t(), a.scale, b.scale.t(), out_dtype=dtype, use_fast_accum=fast)


def _of_weights(granularity: str) -> str:
    """Return how weights are scaled: they are small, and their rows no sample of each other."""
    return "tensor" if granularity == "sampled" else granularity


class _Products(torch.autograd.Function):
    """x (M, K) and weights (N, K) -> x w^T (M, N) of each; x is rounded once for all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, granularity: str, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        if granularity == "partly":
            plain, saved = scaled(x, granularity, VALUES), (x.to(dtype),)
        else:
            plain, saved = scaled_both_ways(x, granularity, VALUES)  # saved: half of bf16's memory
        ctx.save_for_backward(*weights, *saved)
        ctx.granularity, ctx.x_dtype = granularity, x.dtype
        rounded = (scaled(weight, _of_weights(granularity), VALUES) for weight in weights)
        return tuple(multiply(plain, weight, dtype, FAST_FORWARD) for weight in rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        granularity, fast = ctx.granularity, FAST_BACKWARD[ctx.granularity]
        saved = ctx.saved_tensors  # asked for once: recomputation gives them out once
        weights, x = saved[: len(gradients)], saved[len(gradients) :]
        to_x, to_weights = [], []
        for gradient, weight in zip(gradients, weights, strict=True):
            dtype = gradient.dtype
            if granularity == "partly":
                plain, of_weight = scaled(gradient, granularity, GRADIENTS[granularity]), gradient.t() @ x[0]
            else:
                plain, transposed = scaled_both_ways(gradient, granularity, GRADIENTS[granularity])
                of_weight = multiply(transposed, Scaled(*x), dtype, fast)
            _, weight_transposed = scaled_both_ways(weight, _of_weights(granularity), VALUES)
            to_x.append(multiply(plain, weight_transposed, dtype, fast))
            to_weights.append(of_weight.to(weight.dtype))
        return sum(to_x[1:], start=to_x[0]).to(ctx.x_dtype), None, None, *to_weights


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a plain product of x would have here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], granularity: str
) -> tuple[Tensor, ...]:
    """Return x w^T + b for each weight w (n, d) and bias b (n,), as `linear` does; x (..., d)."""
    dtype, rows = product_dtype(x), x.flatten(0, -2)
    count = len(rows)
    if count % STEP:  # the weights' gradients are sums over the rows: zeros add nothing
        rows = pad(rows, (0, 0, 0, -count % STEP))
    plain = (value[:count].unflatten(0, x.shape[:-1]) for value in _Products.apply(rows, granularity, dtype, *weights))
    return tuple(value if bias is None else value + bias.to(dtype) for value, bias in zip(plain, biases, strict=True))
