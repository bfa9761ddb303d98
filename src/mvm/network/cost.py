"""What a DiT costs: parameters, and multiply-adds of a forward pass. Counted without memory or random numbers."""

from collections.abc import Sequence

import torch
from torch import nn

from mvm.network.dit import Block, DiT, DiTConfig


def _shapes(config: DiTConfig, sample_shape: Sequence[int], num_classes: int) -> DiT:
    """Return the network on the meta device: shapes alone, so that no width is worked out a second time here."""
    with torch.device("meta"):
        return DiT(config, sample_shape, num_classes)


def parameters(config: DiTConfig, sample_shape: Sequence[int], num_classes: int) -> int:
    """Return the number of learned values."""
    return sum(p.numel() for p in _shapes(config, sample_shape, num_classes).parameters())


def multiply_adds(config: DiTConfig, sample_shape: Sequence[int], num_classes: int) -> int:
    """Return the multiply-adds of one image's forward pass: 2 FLOPs each, and 6 in training, backward included."""
    return sum(multiply_adds_by_part(config, sample_shape, num_classes).values())


def multiply_adds_by_part(config: DiTConfig, sample_shape: Sequence[int], num_classes: int) -> dict[str, int]:
    """Return the multiply-adds of one image by part: matrix products alone; norms, gates and look-ups are left out."""
    network = _shapes(config, sample_shape, num_classes)
    tokens, depth, block = network.side**2, len(network.blocks), network.blocks[0]
    assert isinstance(block, Block)
    heads = [head for head in (network.head, network.inner_head) if head is not None]
    return {
        "embed": tokens * _products(network.embed),
        "level": _products(network.level.up, network.level.out),  # one vector an image, not one a token
        "modulation": depth * _products(block.modulation),  # of the same one vector
        "qkv": depth * tokens * _products(block.attention.qkv),
        # scores q k^T and their mix of v, each (N, N, d) over all heads together
        "attention": depth * 2 * tokens**2 * block.attention.out.in_features,
        "out": depth * tokens * _products(block.attention.out),
        "mlp": depth * tokens * _products(block.mlp.gate_up, block.mlp.down),
        "heads": sum(tokens * _products(head.linear) + _products(head.modulation) for head in heads),
    }


def _products(*layers: nn.Linear) -> int:
    """Return the multiply-adds of the layers on one vector each."""
    return sum(layer.in_features * layer.out_features for layer in layers)
