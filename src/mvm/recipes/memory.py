"""What a training step needs of a GPU's memory, estimated from the shapes: compiled, bf16, one process."""

import math
from typing import NamedTuple

import torch

from mvm.network import DDT, build_network, parameters
from mvm.recipes.schema import Recipe

# Bytes that a block keeps for its backward pass, per token and unit of width, by what engine.recompute leaves of them.
# Fitted to measurements at batch 256 and 256 tokens (benchmarks/results/training-speed.md): S 40.7, B 40.1, XL 39.4.
KEPT = {"all": 40.0, "products": 23.3, "nothing": 10.3}  # the last two: XL alone; "nothing" holds its working space
WEIGHT, GRADIENT, HALF, AVERAGE = 4, 4, 2, 4  # bytes a parameter: float32, float32, bf16 copy, each average
MOMENTS = {"adamw": 8, "muon": 4}


class Memory(NamedTuple):
    """Bytes that do not depend on the batch (weights, gradients, optimizer, averages), and those that do."""

    states: float
    activations: float

    @property
    def total(self) -> float:
        return self.states + self.activations


def training_memory(recipe: Recipe, batch: int) -> Memory:
    """Return the memory of a training step on one GPU with `batch` images.

    The classic design with its kernels takes 11 to 17 % less (S, B, XL measured). Left out: images or latents that
    live on the device, REPA's projector and encoder, the codec; what network.skip and network.local keep (8 % more
    measured on cifar10-small); and what engine.fp8 changes, which was not measured.
    Against measurements that were not fitted: imagenet256-ddt-xl +0.5 %, cifar10 without Muon, skips and local
    convolutions -2 %, imagenette-ddt-s -18 % (large latents, a small network).
    """
    averages = len(recipe.train.ema) + len(recipe.train.power)
    each = WEIGHT + GRADIENT + HALF + MOMENTS[recipe.train.optimizer] + AVERAGE * averages
    return Memory(float(each * parameters(*recipe.blueprint)), batch * _kept(recipe))


def _kept(recipe: Recipe) -> float:
    """Return the bytes that one image's blocks keep."""
    with torch.device("meta"):
        network = build_network(*recipe.blueprint)
    depth, width, _ = recipe.network.dimensions
    again = math.ceil(recipe.engine.recompute * depth)  # as the engine does
    tokens, head = network.side**2, 0.0
    if isinstance(network, DDT):
        head_depth, head_width, _ = recipe.network.head_dimensions  # ty: ignore[missing-attribute]
        head = tokens * head_depth * head_width * KEPT["all"]
        tokens += 0 if network.context is None else len(network.context.time) + len(network.context.kind)
    return tokens * width * ((depth - again) * KEPT["all"] + again * KEPT[recipe.engine.keep]) + head
