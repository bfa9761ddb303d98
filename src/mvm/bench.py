"""Speed and memory of a recipe, measured with random images: what a step and a sample cost on this machine."""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from tqdm import tqdm

from mvm import noise
from mvm.data import Images
from mvm.distributed.processes import Processes, autocast, determinism, precision
from mvm.generate import Sampler, cycle_labels
from mvm.network import OwnConfig, parameters
from mvm.path import Condition
from mvm.recipes import FOLDER, CodecConfig, DataConfig, Recipe
from mvm.recipes.memory import training_memory
from mvm.recipes.page import training_flops
from mvm.training.engine import compile_mode
from mvm.training.features import FeatureBank, TensorBank
from mvm.training.field_trainer import FieldTrainer
from mvm.training.logs import matrix_ceiling

WARM_UP = 5  # steps before the timing: compilation, memory, libraries
TEACHER_WIDTH = 768  # of random features instead of a recipe's encoder, which is not timed
SETTLED = 3  # batches before the timing: the first compiles, the second is recorded, the third replayed
SAMPLED = 5  # batches timed
PARTS = 5  # of the measured steps; the spread between them is the measurement's own


class RandomBank(TensorBank):
    """A teacher's features that are random numbers: lookup costs what a cached bank's does."""

    def __init__(self, count: int, tokens: int, width: int, device: torch.device) -> None:
        super().__init__(torch.randn(2, count, tokens, width, device=device, dtype=torch.float16))


def random_images(recipe: Recipe, count: int) -> Images:
    """Return images of the recipe's shape with random pixels and labels, or random rows of another condition."""
    draw = torch.Generator().manual_seed(recipe.seed)
    classes = recipe.data.class_names or ("0",)
    images = torch.randint(0, 256, (count, *recipe.data.shape), dtype=torch.uint8, generator=draw)
    if recipe.data.values == "float":
        images = images / 128 - 1
    labels = torch.randint(0, len(classes), (count,), generator=draw)
    kind, draw = recipe.condition, torch.Generator().manual_seed(recipe.seed)
    condition: Condition = None
    match kind.kind:
        case "none":
            condition = ()
        case "vector":
            condition = torch.randn(count, kind.width, generator=draw)
        case "image":
            condition = torch.rand(count, kind.width, *recipe.data.shape[1:], generator=draw) * 2 - 1
        case "tokens":
            tokens = torch.randn(count, kind.length, kind.width, generator=draw)
            condition = {"tokens": tokens, "mask": torch.ones(count, kind.length, dtype=torch.bool)}
    return Images(images, labels, classes, condition)


def on_random_samples(recipe: Recipe) -> Recipe:
    """Return the recipe on random samples of its latents' shape, for whose speed no autoencoder is needed."""
    if recipe.codec.kind == "pixels":
        return recipe
    channels, side, _ = recipe.sample_shape
    facts: dict[str, Any] = {"channels": channels, "size": side, "classes": len(recipe.data.class_names)}
    data = DataConfig(name=FOLDER, path="random", mirror=recipe.data.mirror, **facts)
    return replace(recipe, data=data, codec=CodecConfig())


def _now(device: torch.device) -> float:
    """Return the time, all work on the device done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """Return how long the work takes each time, sorted."""
    moments = [_now(device)]
    for _ in range(times):
        work()
        moments.append(_now(device))
    return sorted(end - start for start, end in pairwise(moments))


def bench_training(
    recipe: Recipe, processes: Processes, *, steps: int = 30, teacher: FeatureBank | None = None, progress: bool = True
) -> dict[str, Any]:
    """Return images per second of whole training steps (batch, forward, backward, optimizer, averages), and memory."""
    device = processes.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with determinism(recipe.engine):
        trainer = FieldTrainer(recipe, random_images(recipe, 4 * recipe.train.batch), processes, teacher)
        start = time.perf_counter()
        bar = tqdm(total=WARM_UP + steps, desc=f"train {recipe.name}", unit="step", disable=not progress)

        def run(count: int) -> None:
            for _ in range(count):
                trainer.advance()
                bar.update(1)

        with bar:
            run(WARM_UP)
            warm_up = _now(device) - start
            part = max(1, steps // PARTS)
            times = seconds_of(lambda: run(part), device, PARTS)
        trainer.read()
        ceiling = matrix_ceiling(device)
    median, spread = times[len(times) // 2] / part, times[-1] / times[0] - 1
    rate = recipe.train.batch / median
    figures = {"warm_up_s": warm_up, "step_ms": 1000 * median, "spread": spread, "images_per_second": rate}
    if ceiling is not None:
        ceiling *= processes.world
        figures |= {"mfu": rate * training_flops(recipe) / ceiling, "ceiling_tflops": ceiling / 1e12}
    if device.type == "cuda":
        figures["memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return figures


def bench_sampling(recipe: Recipe, processes: Processes, *, num: int = 256, progress: bool = True) -> dict[str, Any]:
    """Return images per second by the recipe's own sampler: the median batch; compiled and replayed on a GPU."""
    from mvm.model import Model

    model = Model(recipe).to(processes.device).eval().requires_grad_(False)
    sampler = Sampler(model, precision=None, compile=compile_mode(recipe.engine, processes) != "off")
    given = cycle_labels((), num, model.num_classes) if model.labelled else random_images(recipe, num).given
    seeds = noise.derive(0, torch.arange(num))

    def run() -> None:
        with autocast(recipe.engine, processes.device):
            sampler.images(given, seeds, recipe.sample, batch=num, progress=progress)

    # a CPU needs minutes for a batch, and no recording
    settled, batches = (SETTLED, SAMPLED) if processes.device.type == "cuda" else (1, 1)
    for _ in range(settled):
        run()
    times = seconds_of(run, processes.device, batches)
    seconds, spread = times[len(times) // 2], times[-1] / times[0] - 1
    settings = {"nfe": recipe.sample.nfe, "rho": recipe.sample.rho, "share": recipe.sample.share, "batches": batches}
    return {"images": num, **settings, "seconds": seconds, "spread": spread, "images_per_second": num / seconds}


def machine(device: torch.device) -> dict[str, str]:
    """Return what the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def bench(
    recipe: Recipe, processes: Processes, *, steps: int = 30, num: int = 0, progress: bool = True
) -> dict[str, Any]:
    """Return everything measured of one recipe, with what it was measured on; without training where steps is 0.

    num: images to sample; 0: none.
    """
    if isinstance(recipe.network, OwnConfig):
        raise ValueError(f"network.kind='{recipe.network.kind}': mvm bench measures dit and ddt, not your own network")
    recipe = on_random_samples(recipe)
    shape = recipe.sample_shape
    tokens = math.prod(extent // recipe.network.patch for extent in shape[1:])
    teacher = None
    if recipe.repa.encoder:
        teacher = RandomBank(4 * recipe.train.batch, tokens, TEACHER_WIDTH, processes.device)
    figures: dict[str, Any] = {
        "recipe": recipe.name,
        "repa": "none" if teacher is None else f"cached features, {teacher.width} wide",
        "network": {"size": recipe.network.size, "patch": recipe.network.patch, "input": list(shape)},
        "tokens": tokens,
        "parameters": parameters(*recipe.blueprint),
        "multiply_adds": recipe.multiply_adds,
        "batch": recipe.train.batch,
        "precision": str(precision(recipe.engine, processes.device)).removeprefix("torch."),
        "compile": compile_mode(recipe.engine, processes),
        "recompute": recipe.engine.recompute,
        "keep": recipe.engine.keep,
        "machine": machine(processes.device),
        "memory_estimate_gb": training_memory(recipe, recipe.train.batch).total / 1e9,
    }
    if steps:
        figures["training"] = bench_training(recipe, processes, steps=steps, teacher=teacher, progress=progress)
    if num:
        figures["sampling"] = bench_sampling(recipe, processes, num=num, progress=progress)
    return figures


def growth(recipe: Recipe, processes: Processes, *, steps: int = 12, progress: bool = True) -> list[dict[str, Any]]:
    """Return what doubling resolution, depth and batch does to a step's time and memory, each alone."""
    recipe = on_random_samples(recipe)
    data, (channels, *space) = recipe.data, recipe.data.shape
    twice = DataConfig(
        name=FOLDER, path="random", mirror=data.mirror, augment=data.augment, values=data.values,
        channels=channels, space=tuple(2 * extent for extent in space), classes=len(data.class_names),
    )  # fmt: skip
    changed = {
        "resolution": replace(recipe, data=twice),
        "depth": replace(recipe, network=replace(recipe.network, depth=2 * recipe.network.dimensions[0])),
        "batch": replace(recipe, train=replace(recipe.train, batch=2 * recipe.train.batch)),
    }
    base = bench_training(recipe, processes, steps=steps, progress=progress)
    rows = [{"change": "as it is", "times_step": 1.0, **base}]
    for name, larger in changed.items():
        row = bench_training(larger, processes, steps=steps, progress=progress)
        rows.append({"change": f"{name} x 2", "times_step": row["step_ms"] / base["step_ms"], **row})
    return rows


COLUMNS = ("step_ms", "spread", "images_per_second", "mfu", "memory_gb")


def table(rows: Sequence[Mapping[str, Any]], first: str) -> str:
    """Return rows of figures as a Markdown table; columns nobody has are left out."""

    def cell(value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

    names = [first, *(name for name in ("times_step", *COLUMNS) if any(name in row for row in rows))]
    cells = [names, *([cell(row.get(name, "")) for name in names] for row in rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])
