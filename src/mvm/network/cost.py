"""What a network costs: parameters, and multiply-adds of a forward pass. Counted without memory or random numbers."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from mvm.network.config import BY_LABELS, ConditionConfig, DiTConfig
from mvm.network.ddt import build_network
from mvm.network.own import OwnConfig


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


class MultiplyAdds(NamedTuple):
    """Multiply-adds of one image: of all products but attention's two, and of those."""

    products: int
    attention: int


@cache  # a pass through a large network takes a quarter of a second, and fits of costs ask often
def multiply_adds_by_kind(
    config: DiTConfig | OwnConfig,
    sample_shape: tuple[int, ...],
    num_classes: int,
    condition: ConditionConfig = BY_LABELS,
) -> MultiplyAdds:
    """Return the multiply-adds of one image's forward pass, as torch counts them: matrix products alone.

    The input for augmentation, a small map that training alone has, is left out.
    """
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network = build_network(config, sample_shape, num_classes, condition=condition)
        null = torch.zeros(1, dtype=torch.int64) if isinstance(network.null, int) else network.null
        network(torch.empty(1, *sample_shape), torch.empty(1), null)
    counts = counter.get_flop_counts()["Global"]
    attention = sum(count for product, count in counts.items() if "bmm" in str(product) or "attention" in str(product))
    return MultiplyAdds((sum(counts.values()) - attention) // 2, attention // 2)


def multiply_adds(
    config: DiTConfig | OwnConfig, sample_shape: Sequence[int], num_classes: int, condition: ConditionConfig = BY_LABELS
) -> int:
    """Return the multiply-adds of one image's forward pass: 2 FLOPs each, and 6 in training, backward included."""
    return sum(multiply_adds_by_kind(config, tuple(sample_shape), num_classes, condition))
