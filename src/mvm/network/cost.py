"""What a network costs: parameters, and multiply-adds of a forward pass. Counted without memory or random numbers."""

from collections.abc import Sequence

import torch
from torch import nn

from mvm.network.blocks import Block, ModulatedBlock
from mvm.network.conditions import TextTokens, Vector
from mvm.network.config import BY_LABELS, ConditionConfig, DiTConfig
from mvm.network.ddt import DDT, PlainBlock, build_network
from mvm.network.dit import DiT
from mvm.network.extras import Skip
from mvm.network.own import OwnConfig

HEAD = "head "  # begins the names of a DDT's head's parts; what has another name is the backbone's


def parameters(
    config: DiTConfig | OwnConfig,
    sample_shape: Sequence[int],
    num_classes: int,
    augment_size: int = 0,
    condition: ConditionConfig = BY_LABELS,
) -> int:
    """Return the number of learned values."""
    with torch.device("meta"):  # shapes alone, so that no width is worked out a second time here
        network = build_network(config, sample_shape, num_classes, augment_size, condition)
    return sum(p.numel() for p in network.parameters())


def multiply_adds(
    config: DiTConfig | OwnConfig, sample_shape: Sequence[int], num_classes: int, condition: ConditionConfig = BY_LABELS
) -> int:
    """Return the multiply-adds of one image's forward pass: 2 FLOPs each, and 6 in training, backward included."""
    return sum(multiply_adds_by_part(config, sample_shape, num_classes, condition).values())


def multiply_adds_by_part(
    config: DiTConfig | OwnConfig, sample_shape: Sequence[int], num_classes: int, condition: ConditionConfig = BY_LABELS
) -> dict[str, int]:
    """Return the multiply-adds of one image by part: matrix products alone; norms, gates and look-ups are left out.

    So is the input for augmentation, a small map that training alone has. The parts of a DDT's head have names that
    begin with HEAD: all others are spared where the backbone is shared.
    """
    with torch.device("meta"):
        network = build_network(config, sample_shape, num_classes, condition=condition)
    return _of_dit(network) if isinstance(network, DiT) else _of_ddt(network)


def _of_dit(network: DiT) -> dict[str, int]:
    tokens = network.tokens
    heads = [head for head in (network.head, network.inner_head) if head is not None]
    return {
        "embed": tokens * _products(network.embed),
        "level": _products(network.level.up, network.level.out),  # one vector an image, not one a token
        **_of_condition(network),
        **_of_blocks(network.blocks, tokens + network.text),
        "shared modulation": 0 if network.shared is None else _products(network.shared),
        "skips": (tokens + network.text) * _products(*(skip for skip in network.skips or () if isinstance(skip, Skip))),
        "heads": sum(tokens * _products(head.linear) + _products(head.modulation) for head in heads),
    }


def _of_ddt(network: DDT) -> dict[str, int]:
    tokens, inner, wide = network.tokens, network.inner_head, network.wide
    level = _products(network.level.up, network.level.out)  # twice: the head may run alone
    return {
        "embed": tokens * _products(network.embed),
        "level": level,
        **_of_condition(network),
        **_of_blocks(network.blocks, len(network.cos)),
        "inner": 0 if inner is None else tokens * _products(inner.modulation, inner.linear),
        HEAD + "level": level,
        HEAD + "embed": tokens * _products(wide.embed),
        HEAD + "project": tokens * _products(wide.project),
        **{HEAD + name: count for name, count in _of_blocks(wide.blocks, tokens, conditions=tokens).items()},
        HEAD + "last": tokens * _products(wide.out.modulation, wide.out.linear),
    }


def _of_condition(network: DiT | DDT) -> dict[str, int]:
    """Return the multiply-adds of what maps a vector or text; an image's channels are in the embedding's."""
    match network.label:
        case Vector() as vector:
            return {"condition": _products(vector.map)}
        case TextTokens() as text:
            return {"condition": len(text.positions) * _products(text.map) + _products(text.mean)}
    return {}


def _of_blocks(blocks: nn.ModuleList, tokens: int, conditions: int = 1) -> dict[str, int]:
    """Return the multiply-adds of equal blocks on so many tokens, with so many conditions: one an image, or a token."""
    depth, block = len(blocks), blocks[0]
    assert isinstance(block, ModulatedBlock | PlainBlock)
    return {
        "modulation": depth * conditions * (_products(block.modulation) if isinstance(block, Block) else 0),
        "qkv": depth * tokens * _products(block.attention.qkv),
        # scores q k^T and their mix of v, each (N, N, d) over all heads together
        "attention": depth * 2 * tokens**2 * block.attention.out.in_features,
        "out": depth * tokens * _products(block.attention.out),
        "mlp": depth * tokens * _products(*(layer for layer in block.mlp.children() if isinstance(layer, nn.Linear))),
    }


def _products(*layers: nn.Linear) -> int:
    """Return the multiply-adds of the layers on one vector each."""
    return sum(layer.in_features * layer.out_features for layer in layers)
