"""Activation checkpointing that stores what is expensive to compute twice: results of matrix products and attention.

All else in a block is cheap, and half its memory.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mvm.network import DDT, DiT

PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]


def keeping_products() -> Any:
    """Return the contexts of a checkpointed forward pass and of its recomputation."""
    return create_selective_checkpoint_contexts(PRODUCTS)


def apply(network: DiT | DDT) -> None:
    """Have the blocks that the backward pass computes again keep these results."""
    network.blocks.context_fn = keeping_products


class Recomputed(nn.Module):
    """A block that calls checkpoint itself, so that one compilation sees both."""

    options: dict[str, Any]

    def forward(self, *given: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*given)
        return checkpoint(super().forward, *given, use_reentrant=False, **self.options)


class Passing(nn.Module):
    """A stack that leaves checkpointing to its blocks."""

    def run(self, number: int, block: nn.Module, *given: Any) -> Any:
        return block(*given)


@cache
def _joined(first: type[nn.Module], kind: type[nn.Module], keeps_products: bool) -> type[nn.Module]:
    """Return the class of such modules: one for all of a kind, that they share the compiled code."""
    options = {"context_fn": keeping_products} if keeps_products else {}
    # of this package, for swap.plain: an abstract class would be of abc's
    return type(f"{first.__name__}{kind.__name__}", (first, kind), {"options": options, "__module__": __name__})


def inside(network: DiT | DDT) -> None:
    """Have the blocks that are computed again call checkpoint themselves; for blocks that are compiled one by one.

    Around a compiled block checkpoint sees products with an `out` buffer. Their results cannot be kept: the block uses
    the buffer again for something else, and when computed again it would read a buffer that nobody has filled.
    """
    stack = network.blocks
    keeps_products = stack.context_fn is keeping_products
    for block in stack[: stack.recompute]:
        block.__class__ = _joined(Recomputed, type(block), keeps_products)
    stack.__class__ = _joined(Passing, type(stack), keeps_products)
