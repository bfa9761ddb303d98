"""What one training step on one GPU does, counted from the shapes, and the seconds that a fit of measurements gives it.

A step is a sum of the GPU's four terms, each an amount of work times what a unit of it costs, or the host's time for
the blocks where that is longer. The amounts are here; the costs are fitted by cost_fit.py.
"""

import math
from typing import NamedTuple

from mvm.network.cost import multiply_adds_by_kind
from mvm.recipes import Recipe
from mvm.recipes.estimate import FORWARD
from mvm.recipes.memory import HALF, training_memory


class Work(NamedTuple):
    """Amounts of one step; UNITS says of what."""

    products: float
    attention: float
    elementwise: float
    states: float
    blocks: float


TERMS = Work._fields
GPU_TERMS = tuple(term for term in TERMS if term != "blocks")
UNITS = {
    "products": "FLOP of matrix products without attention's",
    "attention": "FLOP of attention's two products",
    "elementwise": "bytes of one bf16 number a token, unit of width and block",
    "states": "bytes of weights, gradients, moments and averages",
    "blocks": "blocks started",
}


def step_work(recipe: Recipe, images: int) -> Work:
    """Return the work of one step of so many images on one GPU, in engine.accumulate parts.

    Blocks that are computed again do FORWARD of their work once more; engine.keep says of which terms. Left out: REPA,
    codecs, and the network's first and last layers but for their products.
    """
    network, optimizer = recipe.network, recipe.train.optimizer
    if network.kind != "dit" or optimizer != "adamw":
        raise ValueError(
            f"the cost of a step is known for network.kind='dit' and train.optimizer='adamw', not for '{network.kind}' "
            f"and '{optimizer}'; measure it with: mvm bench {recipe.name}"
        )
    shape = recipe.sample_shape
    depth, width, _ = network.dimensions
    tokens = (shape[-1] // network.patch) ** 2
    counts = multiply_adds_by_kind(network, shape, len(recipe.data.class_names))
    cheap = 1 + FORWARD * math.ceil(recipe.engine.recompute * depth) / depth
    dear = cheap if recipe.engine.keep == "nothing" else 1.0
    return Work(
        products=6.0 * images * counts.products * dear,
        attention=6.0 * images * counts.attention * dear,
        elementwise=float(HALF * images * tokens * depth * width) * cheap,
        states=training_memory(recipe, images).states,
        blocks=float(depth * recipe.engine.accumulate),
    )
