"""What a training step needs of memory, estimated from the shapes, what is free, and how the two are made to fit."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from mvm.network import DDT, OwnConfig, build_network, parameters
from mvm.recipes.reading import AnyRecipe
from mvm.recipes.schema import Recipe

# Bytes that a block keeps for its backward pass, per token and unit of width, by what engine.recompute leaves of them.
# Fitted to measurements at batch 256 and 256 tokens (benchmarks/results/training-speed.md): S 40.7, B 40.1, XL 39.4.
BLOCK_BYTES = {
    "all": 40.0,
    "products": 23.3,
    "nothing": 10.3,
}  # the last two: XL alone; "nothing" holds its working space
WEIGHT, GRADIENT, HALF, AVERAGE = 4, 4, 2, 4  # bytes a parameter: float32, float32, bf16 copy, each average
MOMENTS = {"adamw": 8, "muon": 4}
# The same on a CPU in float32, not compiled, an upper bound: peaks of `mvm train` less the states were 159 to 235
# (cifar10, cifar10-small, digits, imagenet32-dit-b; torch 2.13). torch and Python besides.
BLOCK_BYTES_ON_HOST, LIBRARIES = 250.0, 0.7e9
# Bytes of activations that a CPU computes at once: more is not faster, and Ctrl-C is answered between the blocks.
AT_ONCE = 3e9
SLACK = 0.8  # of an estimate: less is certain not to fit


class Memory(NamedTuple):
    """Bytes that do not depend on the batch (weights, gradients, optimizer, averages), and those that do."""

    states: float
    activations: float

    @property
    def total(self) -> float:
        return self.states + self.activations


def training_memory(recipe: Recipe, batch: int, device: str = "cuda") -> Memory:
    """Return the memory of a training step on one device with `batch` images: a GPU, compiled in bf16, or a CPU.

    The classic design with its kernels takes 11 to 17 % less (S, B, XL measured). Left out: images or latents that
    live on the device, REPA's projector and encoder, the codec; what network.skip and network.local keep (8 % more
    measured on cifar10-small); and what engine.fp8 changes, which was not measured.
    Against measurements that were not fitted: imagenet256-ddt-xl +0.5 %, cifar10 without Muon, skips and local
    convolutions -2 %, imagenette-ddt-s -18 % (large latents, a small network).
    """
    averages = len(recipe.train.ema) + len(recipe.train.power)
    each = WEIGHT + GRADIENT + HALF + MOMENTS[recipe.train.optimizer] + AVERAGE * averages
    states = float(each * parameters(*recipe.blueprint))
    with torch.device("meta"):
        network = build_network(*recipe.blueprint)
    depth, width, _ = recipe.network.dimensions
    again = math.ceil(recipe.engine.recompute * depth)  # as the engine does
    tokens = len(network.cos)  # with those beside the image's
    activations = tokens * width * ((depth - again) * BLOCK_BYTES["all"] + again * BLOCK_BYTES[recipe.engine.keep])
    if isinstance(network, DDT):
        head_depth, head_width, _ = recipe.network.head_dimensions  # ty: ignore[missing-attribute]
        activations += network.tokens * head_depth * head_width * BLOCK_BYTES["all"]
    if device == "cpu":
        return Memory(states + LIBRARIES, batch * activations * BLOCK_BYTES_ON_HOST / BLOCK_BYTES["all"])
    return Memory(states, batch * activations)


CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (  # limit, use, statistics; in versions 2 and 1
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device; of the host those that this process may have (its cgroup's limit)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(sizes["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # another system: half of what it has
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for limit, used, stat in CGROUP_FILES:
        try:
            usage = dict(line.split() for line in (CGROUP / stat).read_text().splitlines())
            cached = int(usage["inactive_file"])  # counted as used, but given up when it is needed
            free = min(free, int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()) + cached)
        except (OSError, KeyError, ValueError):  # no such file, or "max"
            continue
    return free


def fit_memory(recipe: AnyRecipe, device: torch.device, world: int = 1) -> tuple[AnyRecipe, Memory | None, str]:
    """Return the recipe with as much gradient accumulation as a CPU needs, a step's memory, and a warning or "".

    What cannot fit is a ValueError that says what would. On a GPU nothing is changed: accumulation is slower there.
    None: the need of a decoder, and of a network of the user's own, is not known.
    """
    if not isinstance(recipe, Recipe) or isinstance(recipe.network, OwnConfig):
        return recipe, None, ""
    images, free, engine = recipe.train.batch / world, free_memory(device), recipe.engine
    if device.type == "cpu":
        free /= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    states, each = training_memory(recipe, 1, device.type)
    if engine.parallel == "fsdp":
        states /= engine.shard or world
    room = SLACK * free - states
    if device.type == "cpu":
        room = min(room, AT_ONCE)
    parts = math.ceil(images / max(1, room // each))
    if device.type == "cpu":
        recipe = replace(recipe, engine=replace(engine, accumulate=max(engine.accumulate, parts)))
    need = Memory(states, math.ceil(images / recipe.engine.accumulate) * each)
    if need.total <= free:
        return recipe, need, ""
    sizes = f"{need.total / 1e9:.1f} GB of memory for a step, and {free / 1e9:.1f} GB are free"
    message = f"{recipe.name} needs about {sizes}"
    remedy = f"--engine.accumulate {parts}" if states + each <= SLACK * free else "a smaller network (--network.size S)"
    if device.type == "cpu" or SLACK * need.total > free:
        raise ValueError(f"{message}; try {remedy}, or a smaller recipe (mvm recipes)")
    return recipe, need, f"{message}; if it fails, try {remedy}"
