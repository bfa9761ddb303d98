"""gated_product: both products of a SwiGLU and its silu in one kernel, for sampling on Hopper GPUs: no gradient.

cuBLAS writes both products, 4 bytes for a hidden unit, and the next kernel reads them again to write 2; here they stay
in registers, and gating is done while the next products run.
"""

import torch
import triton  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import custom_op

# Slots in the ring, and whether x is kept in shared memory for all weights, by width: the fastest of a few tried on
# an H200. In other widths x comes along with the weights, which fits whatever they are.
RINGS = {384: (3, True)}
OTHERS = (4, False)
BLOCK = 128  # rows that a program takes at once
DEPTH = 64  # of a tile, along the width
CAPABILITY = (9, 0)  # Hopper's alone: its products of four warps are not in the GPUs after it
TRITON = "3.6."  # the one it was run with: what it is written in is experimental, and its names change
# Part of the GPU that must have work, on average: programs share rows and not columns, so that few rows leave most of
# it idle. Measured: at 0.73 from 1.05 (width 768) to 1.66 times as fast as cuBLAS, at 0.5 from 0.8 to 1.5.
FILLED = 0.7


def _programs() -> int:
    """Return how many programs the GPU runs at once, one on each of its processors; 0 where the kernel cannot run."""
    nvidia = torch.cuda.is_available() and torch.version.hip is None
    if not nvidia or torch.cuda.get_device_capability() != CAPABILITY or not triton.__version__.startswith(TRITON):
        return 0
    return torch.cuda.get_device_properties("cuda").multi_processor_count


PROGRAMS = _programs()  # found out at import: a compiler cannot look into it


def takes_gated_product(x: Tensor, hidden: int) -> bool:
    """Return whether gated_product can be had for x (..., K) and so many hidden units, and is faster."""
    width = x.shape[-1]
    if not PROGRAMS or width % DEPTH or hidden % 8:  # 8: rows of the output begin at multiples of 16 bytes
        return False
    blocks = -(-x.numel() // (width * BLOCK))
    rounds = -(-blocks // PROGRAMS)
    return blocks >= FILLED * max(rounds, 1) * PROGRAMS


@custom_op("mvm::gated_product", mutates_args=())
def gated_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return silu(gate) * up of (gate, up) = x weight^T + bias; x (..., K), weight (2 hidden, K), both bfloat16."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # ty: ignore[import-not-found]

    from mvm.network.fast.kernels.gated_product_gluon import TILES, gated_product_kernel

    width, hidden = x.shape[-1], len(weight) // 2
    flat = x.reshape(-1, width).contiguous()
    out = x.new_empty((*x.shape[:-1], hidden))
    stages, keep = RINGS.get(width, OTHERS)
    tensors = zip((flat, weight.contiguous(), out.view(-1, hidden)), TILES, strict=True)
    tiled = [TensorDescriptor.from_tensor(tensor, *tile) for tensor, tile in tensors]
    grid = (min(PROGRAMS, triton.cdiv(len(flat), BLOCK)),)
    with torch.cuda.device(x.device):
        gated_product_kernel[grid](*tiled, bias, len(flat), hidden, K=width, STAGES=stages, KEEP=keep, num_warps=4)
    return out


@gated_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(weight) // 2))
