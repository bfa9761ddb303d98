"""How long a recipe takes on many GPUs: a simple model on top of what was measured on one, no measurement.

A step is the images of one GPU at the speed of one GPU, and what the sum of the gradients and the sending of Muon's
updates add to it. In the worst case that is all of a single ring's time. In the best case nodes have rings inside and
between them, and sums travel while earlier blocks are still computed.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mvm.network import parameters
from mvm.recipes.memory import GRADIENT, HALF
from mvm.recipes.page import NODE, SHOWN_BATCH, has_estimate, hours_on_h200, muon_matrices
from mvm.recipes.schema import Recipe

# images/s of one NVIDIA H200 where the network is none that recipes.page knows the speed of: `mvm bench` at 256 images
MEASURED = {"imagenet256-ddt-xl": 317.0}

FORWARD = 1 / 3  # of a block's work: the backward pass has two products for each of the forward's
NVLINK = 450e9  # bytes a second and GPU, one way: NVLink 4, of whose 900 GB/s half go each way
NETWORK = 50e9  # bytes a second and GPU, one way: an adapter of 400 Gbit/s for every GPU, and no congestion
BUCKET = 25 * 2**20  # bytes that DDP sums at once, its default


class Estimate(NamedTuple):
    """A step on some GPUs: images on each, seconds that it computes, seconds that sums add; and hours of training."""

    gpus: int
    images: float
    compute: float
    communication: float
    hours: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.communication

    @property
    def images_per_second(self) -> float:
        """Of all GPUs together."""
        return self.gpus * self.images / self.seconds

    @property
    def efficiency(self) -> float:
        """Speed over that of so many GPUs that need not communicate."""
        return self.compute / self.seconds


def speed_on_h200(recipe: Recipe) -> float:
    """Return images/s of training on one H200: measured for the recipe, or from the measured share of the ceiling."""
    if recipe.name in MEASURED:
        return MEASURED[recipe.name]
    if not has_estimate(recipe):
        raise ValueError(f"the speed of '{recipe.name}' was not measured; measure it with: mvm bench {recipe.name}")
    return recipe.train.steps * recipe.train.batch / (3600 * hours_on_h200(recipe))


def all_reduce_seconds(size: float, gpus: int) -> float:
    """Return 2 (n - 1)/n size / bandwidth: a ring's time for `size` bytes, at the pace of its slowest link."""
    return 2 * (gpus - 1) / gpus * size / (NVLINK if gpus <= NODE else NETWORK)


def nested_all_reduce_seconds(size: float, gpus: int) -> float:
    """Return the time of rings in two levels: each GPU of a node sums its share of `size` bytes with those of others.

    Inside a node gradients are first spread, summed, over its GPUs, and at the end gathered: a ring's time in all.
    """
    if gpus <= NODE:
        return all_reduce_seconds(size, gpus)
    if gpus % NODE:
        raise ValueError(f"{gpus} GPUs are not whole nodes of {NODE}; use a multiple of {NODE}")
    nodes = gpus // NODE
    return all_reduce_seconds(size, NODE) + 2 * (nodes - 1) / nodes * size / NODE / NETWORK


def exposed_seconds(backward: float, communication: float, buckets: int) -> float:
    """Return what sums add to a step whose backward pass makes equal buckets ready one by one, each sent in its turn.

    Either the last bucket is sent when all else is done, or sending is slower and only waits for the first bucket.
    """
    end = max(backward + communication / buckets, backward / buckets + communication)
    return end - backward


def estimate(recipe: Recipe, gpus: int) -> Estimate:
    """Return what a step and the training take on so many H200s, each with a copy of the weights, in the worst case."""
    return _estimated(recipe, gpus, all_reduce_seconds, lambda size, compute: all_reduce_seconds(size, gpus))


def best_estimate(recipe: Recipe, gpus: int) -> Estimate:
    """Return the same in the best case: two levels of rings, behind the backward pass of the last part of a batch."""

    def exposed(size: float, compute: float) -> float:
        parts = math.ceil(recipe.train.batch / gpus / SHOWN_BATCH)  # engine.accumulate: sums travel in the last alone
        backward = (1 - FORWARD) * compute / parts
        return exposed_seconds(backward, nested_all_reduce_seconds(size, gpus), math.ceil(size / BUCKET))

    return _estimated(recipe, gpus, nested_all_reduce_seconds, exposed)


def _estimated(
    recipe: Recipe, gpus: int, ring: Callable[[float, int], float], exposed: Callable[[float, float], float]
) -> Estimate:
    """ring: seconds of a sum of so many bytes over so many GPUs.

    exposed: from the bytes of the gradients and the seconds that a step computes, the seconds that sums add.
    """
    if gpus > recipe.train.batch:
        raise ValueError(f"train.batch={recipe.train.batch} is less than an image for each of {gpus} GPUs; enlarge it")
    images = recipe.train.batch / gpus
    compute = images / speed_on_h200(recipe)
    updates = HALF * sum(rows * columns for (rows, columns), _ in muon_matrices(recipe))
    # to send updates from their owners to all takes half of a sum's time, in which nothing else is computed
    communication = exposed(GRADIENT * parameters(*recipe.blueprint), compute) + ring(updates, gpus) / 2
    hours = recipe.train.steps * (compute + communication) / 3600
    return Estimate(gpus, images, compute, communication, hours)


def where_sums_dominate(recipe: Recipe, how: Callable[[Recipe, int], Estimate] = estimate) -> int | None:
    """Return the fewest GPUs, in whole nodes beyond one, on which sums take half of a step; None: more than images."""
    tried = [gpus for gpus in range(1, recipe.train.batch + 1) if gpus < NODE or gpus % NODE == 0]
    first = bisect_left(tried, True, key=lambda gpus: how(recipe, gpus).efficiency <= 0.5)  # it only falls
    return tried[first] if first < len(tried) else None


def with_batch(recipe: Recipe, batch: int) -> Recipe:
    """Return the recipe with another batch, for as many images."""
    steps = math.ceil(recipe.train.steps * recipe.train.batch / batch)
    return replace(recipe, train=replace(recipe.train, batch=batch, steps=steps))
