"""How long a recipe takes on many GPUs: a simple model on top of what was measured on one, no measurement.

A step is the images of one GPU at the speed of one GPU, then the sum of the gradients, one after the other.
"""

from typing import NamedTuple

from mvm.network import parameters
from mvm.recipes.page import has_estimate, hours_on_h200
from mvm.recipes.reading import as_field, load_recipe
from mvm.recipes.schema import Recipe

# images/s of one NVIDIA H200 where the network is none that recipes.page knows the speed of: `mvm bench` at 256 images
MEASURED = {"imagenet256-ddt-xl": 317.0}

GRADIENT = 4  # bytes a parameter: gradients are summed in float32
NODE = 8  # GPUs that NVLink joins
NVLINK, NETWORK = 450e9, 50e9  # bytes a second and GPU, one way

SHOWN = ("imagenet32-dit-b", "imagenet32-dit-l", "imagenet256-ddt-xl")
GPUS = (1, 8, 64)


class Estimate(NamedTuple):
    """A step on some GPUs: images on each, seconds of its two parts, and hours of the whole training."""

    gpus: int
    images: float
    compute: float
    communication: float
    hours: float

    @property
    def seconds(self) -> float:
        """Of a step: nothing overlaps."""
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


def estimate(recipe: Recipe, gpus: int) -> Estimate:
    """Return what a step and the whole training take on so many H200s, each with a whole copy of the weights."""
    images = recipe.train.batch / gpus
    compute = images / speed_on_h200(recipe)
    size = GRADIENT * parameters(recipe.network, recipe.sample_shape, len(recipe.data.class_names))
    communication = all_reduce_seconds(size, gpus)
    return Estimate(gpus, images, compute, communication, recipe.train.steps * (compute + communication) / 3600)


def scaling_table() -> str:
    """Return the table of docs/scale-out.md in Markdown."""
    lines = [
        "| recipe | GPUs | images a GPU | compute, ms | sum of gradients, ms | images/s | efficiency | hours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SHOWN:
        recipe = as_field(load_recipe(name), name)
        lines += [_row(name, estimate(recipe, gpus)) for gpus in GPUS]
    return "\n".join(lines)


def _row(name: str, told: Estimate) -> str:
    times = f"{1000 * told.compute:,.0f} | {1000 * told.communication:.1f} | {told.images_per_second:,.0f}"
    return f"| `{name}` | {told.gpus} | {told.images:.0f} | {times} | {told.efficiency:.0%} | {told.hours:.2g} |"
