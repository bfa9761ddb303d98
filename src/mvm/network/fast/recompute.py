"""Activation checkpointing that stores what is expensive to compute twice: results of matrix products and attention.

All else in a block is cheap, and half its memory.
"""

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

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
