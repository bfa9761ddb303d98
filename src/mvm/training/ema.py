"""The exponential moving average of the weights: what is sampled from."""

import torch
from torch import Tensor, nn


def decay_at(decay: float, step: int) -> float:
    """Return min(decay, (1 + step)/(10 + step)): early weights are forgotten quickly."""
    return min(decay, (1 + step) / (10 + step))


def copy_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the network's weights by name, detached and copied."""
    return {name: value.detach().clone() for name, value in network.named_parameters()}


@torch.no_grad()
def update(average: dict[str, Tensor], network: nn.Module, decay: float, step: int) -> None:
    """average += (1 - decay) (weights - average), in place."""
    weights = dict(network.named_parameters())
    torch._foreach_lerp_(
        [average[name] for name in weights], [w.detach() for w in weights.values()], 1 - decay_at(decay, step)
    )
