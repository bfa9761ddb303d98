"""Query and key norm with rotary positions as one GPU kernel each way, by hand: the compiler's own takes four passes.

norm_rotate in layers.py is the twin that runs everywhere else and says what is computed; tests/network/test_kernels.py
compares the two where Triton is installed, benchmarks/device_parity.py on a GPU.
Imported on a GPU alone, since Triton is there alone.
"""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS = 16  # heads of tokens that one program works on at a time
PROGRAMS = 1056  # of the backward pass, each with its own sum for the weight: eight per multiprocessor of an H200


@triton.jit
def forward_kernel(
    x, out, weight, cos, sin, rows, heads, tokens, HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = tl.arange(0, BLOCK)
    there = tl.where(here < HEAD // 2, here + HEAD // 2, here - HEAD // 2)  # the other half
    inside = (row < rows)[:, None] & (here < HEAD)[None, :]
    start, angle = row[:, None] * HEAD, ((row // heads) % tokens)[:, None] * HEAD
    a = tl.load(x + start + here[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + start + there[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(a * a, axis=1) / HEAD + EPS)[:, None]
    w = tl.load(weight + here, mask=here < HEAD, other=0.0)[None, :]
    v = tl.load(weight + there, mask=here < HEAD, other=0.0)[None, :]
    c = tl.load(cos + angle + here[None, :], mask=inside, other=0.0)
    s = tl.load(sin + angle + here[None, :], mask=inside, other=0.0)
    turned = a * inverse * w * c + b * inverse * v * s
    tl.store(out + start + here[None, :], turned.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad, x, out, partial, weight, cos, sin, rows, heads, tokens,
    HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    here = tl.arange(0, BLOCK)
    there = tl.where(here < HEAD // 2, here + HEAD // 2, here - HEAD // 2)
    w = tl.load(weight + here, mask=here < HEAD, other=0.0)[None, :]
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, PROGRAMS * ROWS):
        row = tl.arange(0, ROWS).to(tl.int64) + first
        inside = (row < rows)[:, None] & (here < HEAD)[None, :]
        start, angle = row[:, None] * HEAD, ((row // heads) % tokens)[:, None] * HEAD
        a = tl.load(x + start + here[None, :], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, axis=1) / HEAD + EPS)[:, None]
        n = a * inverse
        g = tl.load(grad + start + here[None, :], mask=inside, other=0.0).to(tl.float32)
        h = tl.load(grad + start + there[None, :], mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + angle + here[None, :], mask=inside, other=0.0)
        s = tl.load(sin + angle + there[None, :], mask=inside, other=0.0)
        back = g * c + h * s  # the rotation undone: swapping the halves is its own inverse
        total += tl.sum(back * n, axis=0)
        d = back * w
        along = tl.sum(d * n, axis=1)[:, None] / HEAD
        tl.store(out + start + here[None, :], ((d - n * along) * inverse).to(out.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * BLOCK + here, total)


def _sizes(x: Tensor) -> tuple[int, dict[str, int]]:
    """Return the number of rows of x (B, N, heads, head), and the kernels' constants."""
    head = x.shape[-1]
    return x.numel() // head, {"HEAD": head, "BLOCK": triton.next_power_of_2(head), "ROWS": ROWS}


@triton_op("mvm::norm_rotate", mutates_args=())
def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return rotate(norm(x) * weight); x (B, N, heads, head) contiguous, cos and sin (N, head) from rotary_waves."""
    rows, constants = _sizes(x)
    out = torch.empty_like(x)
    grid = (triton.cdiv(rows, ROWS),)
    wrap_triton(forward_kernel)[grid](x, out, weight, cos, sin, rows, x.shape[2], x.shape[1], **constants, EPS=eps)
    return out


@triton_op("mvm::norm_rotate_backward", mutates_args=())
def norm_rotate_backward(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    rows, constants = _sizes(x)
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    out, partial = torch.empty_like(x), x.new_empty((programs, constants["BLOCK"]), dtype=torch.float32)
    wrap_triton(backward_kernel)[(programs,)](
        grad, x, out, partial, weight, cos, sin, rows, x.shape[2], x.shape[1], **constants, PROGRAMS=programs, EPS=eps
    )
    return out, partial.sum(0)[: x.shape[-1]]


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = norm_rotate_backward(grad.contiguous(), *ctx.saved_tensors, ctx.eps)
    return dx, dw.to(ctx.saved_tensors[1].dtype), None, None, None


norm_rotate.register_autograd(_backward, setup_context=_setup)
