"""Seeds -> noise -> field -> solver -> decode -> images, as a stream."""

import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from mvm import noise
from mvm.model import Model
from mvm.network import DDT
from mvm.network.fast import cpu, gpu, int8
from mvm.options import at_least, nearest
from mvm.pictures import WRITERS, check_output, grid, png_bytes, to_pillow, write_images
from mvm.precision import arithmetic
from mvm.recipes import SampleConfig
from mvm.replay import Replays, arriving, surroundings
from mvm.solver import Adams, Solver, check_request, integrate
from mvm.solver.sampling import solver_for, warn_of_noise
from mvm.solver.sharing import SharingPlan, best_steps, shared, similarity

__all__ = [
    "WRITERS",
    "Generated",
    "asked_classes",
    "check_output",
    "class_numbers",
    "compile_network",
    "computed_by",
    "computing",
    "cycle_labels",
    "generate",
    "generate_all",
    "generate_batch",
    "generate_batches",
    "grid",
    "mean_cost",
    "png_bytes",
    "sampling_precision",
    "sharing_plan",
    "to_pillow",
    "write_images",
]


class Generated(NamedTuple):
    """uint8 images (B, C, H, W), their labels and seeds, and what one of them cost."""

    images: Tensor
    labels: Tensor
    seeds: Tensor
    nfe: int
    passes: int


def asked_classes(classes: Sequence[int], num_classes: int) -> list[int]:
    """Return the asked classes, all of them when none is asked; one the model does not have is an error."""
    chosen = list(classes) or list(range(num_classes))
    bad = [c for c in chosen if not 0 <= c < num_classes]
    if bad:
        raise ValueError(
            f"classes={','.join(map(str, bad))} out of range; this model has classes 0 to {num_classes - 1}"
        )
    return chosen


def class_numbers(text: str, names: Sequence[str]) -> tuple[int, ...]:
    """Return the classes in "3,cat": numbers, or a model's own names, which may hold commas; none in "".

    Upper and lower case are the same unless that names two classes. A name wins over a number.
    """
    known = {name.casefold(): number for number, name in enumerate(names)} | {n: i for i, n in enumerate(names)}
    parts, found = [part.strip() for part in text.split(",") if part.strip()], []
    while parts:
        for length in range(len(parts), 0, -1):  # the longest name first
            name = ", ".join(parts[:length])
            number = known.get(name, known.get(name.casefold(), known.get(name.replace(", ", ","))))
            if number is None and length == 1 and name.lstrip("-").isdigit():
                number = int(name)
            if number is not None:
                break
        else:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise ValueError(
                f"classes={parts[0]} is unknown{nearest(parts[0], names)}; give numbers or names of this model: {shown}"
            )
        found.append(number)
        del parts[:length]
    return tuple(found)


def cycle_labels(classes: Sequence[int], num: int, num_classes: int) -> Tensor:
    """Return num labels that go round the asked classes (all of them when none is asked)."""
    at_least("num", num, 1)
    chosen = asked_classes(classes, num_classes)
    return torch.tensor([chosen[i % len(chosen)] for i in range(num)], dtype=torch.int64)


def sampling_precision(name: str | None, device: torch.device) -> AbstractContextManager[None]:
    """Return the context of the network's arithmetic, one of PRECISIONS; None: as it is around the call."""
    return nullcontext() if name is None else arithmetic(name, device)


@contextmanager
def computing(model: Model, precision: str | None) -> Generator[None]:
    """Compute a model's network in that precision, as `sampling_precision` has it, and on a CPU in the fastest way."""
    way = int8 if precision == "int8" else cpu
    faster = model.fast and model.device.type == "cpu"
    with sampling_precision(precision, model.device), way.applied(model.network) if faster else nullcontext():
        yield


def compile_network(model: Model, replay: bool = True, kernels: bool = True) -> None:
    """Compile the network in place, once per shape of a batch: pays on a GPU when many batches have one shape.

    Of a DDT both halves apart: encoder sharing calls them so, and a whole call is one after the other.
    replay: on a GPU, record the whole loop of a batch too, from the second batch of a shape on. kernels: in bf16 on
    a GPU, norm and positions of queries and keys by a kernel written by hand, and a SwiGLU's product with its gate by
    another, on Hopper; the compiler does the rest as well.
    """
    found = gpu.gpu_kernels() if kernels and model.device.type == "cuda" else None
    if found is not None:
        gpu.apply(model.network, found, sampling=True)
    if isinstance(model.network, DDT):
        for half in ("condition", "head"):
            setattr(model.network, half, torch.compile(getattr(model.network, half), dynamic=False))
    else:
        model.network.compile(dynamic=False)
    model.compiled, model.kernels = True, found is not None
    model.replays = Replays() if replay else None


def computed_by(model: Model, precision: str) -> dict[str, Any]:
    """Return how the network is computed, for records; kernels are told where they are, so that old records stay."""
    told = {"precision": precision, "compiled": model.compiled}
    return {**told, "kernels": True} if model.kernels and precision == "bf16" else told


PROBES = 8  # samples by which the steps that compute a backbone are chosen


def sharing_plan(model: Model, settings: SampleConfig) -> SharingPlan:
    """Return which evaluations compute the backbone: chosen by its similarity between steps, once for a model."""
    key = (settings.solver, settings.t_min, settings.nfe, settings.rho, settings.share)
    if key not in model.plans:
        seeds = torch.arange(PROBES)
        labels = cycle_labels((), PROBES, model.num_classes).to(model.device)
        x = noise.initial(seeds.to(model.device), model.sample_shape)
        how = {"solver": settings.build_solver(), "nfe": settings.nfe, "rho": settings.rho, "seeds": seeds}
        computed = max(1, round(settings.nfe * (1 - settings.share)))
        steps = best_steps(similarity(model, x, condition=labels, **how), computed)
        model.plans[key] = SharingPlan(settings.nfe, steps)
    return model.plans[key]


def check_settings(model: Model, settings: SampleConfig) -> None:
    """Refuse settings that a model cannot be sampled with, before anything is made of it."""
    solver, recipe = settings.build_solver(), model.recipe
    solver.plan(model.schedule, settings.nfe, settings.rho)
    if settings.internal != 1 and not recipe.network.inner_block:
        raise ValueError(f"internal={settings.internal} needs a network with an inner head (network.inner_block)")
    if settings.share and not isinstance(model.network, DDT):
        raise ValueError(f"share={settings.share} needs network.kind='ddt'")
    recipe.objective.require_guidance("cfg", settings.cfg)


def solver_of(model: Model, settings: SampleConfig) -> Solver:
    """Return the solver that samples the model: as the settings name it, or the default with the model's tuned times.

    A backbone that is shared between steps is another field than the one that times were fitted to.
    """
    solver = None if settings.unnamed and not settings.share else settings.build_solver()
    size = math.prod(model.sample_shape)
    return solver_for(solver, model, size, settings.nfe, settings.rho, settings.guidance())


def takes_tuned_times(model: Model, settings: SampleConfig) -> bool:
    """Return whether the model is sampled by times that were fitted to it."""
    solver = solver_of(model, settings)
    return isinstance(solver, Adams) and bool(solver.given)


def solver_told(model: Model, settings: SampleConfig) -> str:
    """Return the solver as it samples the model, for records: what it was asked for, and a hash of all its numbers.

    Constants may change between versions, also those that follow from the number of evaluations. Nine digits count:
    machines differ in the last ones.
    """
    solver = solver_of(model, settings)
    plan = solver.plan(model.schedule, settings.nfe, settings.rho)
    told = re.sub(r"\d+\.?\d*(e[+-]?\d+)?", lambda found: f"{float(found[0]):.9g}", repr(plan))
    return f"{solver!r}, plan {hashlib.sha256(told.encode()).hexdigest()[:12]}"


def _field(model: Model, settings: SampleConfig) -> AbstractContextManager[Any]:
    """Return the model for one batch, its backbone shared between steps where that is asked for."""
    return shared(model, sharing_plan(model, settings)) if settings.share else nullcontext(model)


class Underway(NamedTuple):
    """Images that a device may still be working on: `wait` returns them on the host."""

    wait: Callable[[], Tensor]
    labels: Tensor
    seeds: Tensor
    nfe: int
    passes: int

    def arrived(self) -> Generated:
        """Return the finished images."""
        return Generated(self.wait(), self.labels, self.seeds, self.nfe, self.passes)


OnStep = Callable[[int, int], None]  # steps done of a batch, and of how many


def _start(
    model: Model, labels: Tensor, seeds: Tensor, settings: SampleConfig, solver: Solver, on_step: OnStep | None
) -> Underway:
    """Return a batch under way. By a solver of fixed steps its launches wait for no device: they can be recorded."""
    how: dict[str, Any] = {"schedule": model.schedule, "nfe": settings.nfe, "rho": settings.rho}
    guidance = settings.guidance()
    check_request(model, model.schedule, settings.nfe, settings.rho, labels)
    noise.as_seeds(seeds, len(labels))
    if settings.share:
        sharing_plan(model, settings)  # looks at the device, once
    draw = noise.normal_compiled if model.compiled and model.device.type == "cuda" else noise.normal

    def made(labels: Tensor, seeds: Tensor) -> Tensor:
        with _field(model, settings) as field:
            x = draw(seeds, noise.INITIAL, model.sample_shape)
            done = (
                None if on_step is None or solver.by_tolerance else (lambda state: on_step(state.index, settings.nfe))
            )
            solution = integrate(
                field, x, solver, seeds, condition=labels, guidance=guidance, draw=draw, on_step=done, **how
            )
            model.costs[settings] = solution.nfe, solution.passes  # a replay counts nothing
            return model.codec.decode(solution.x)

    inputs = labels.to(model.device), seeds.to(model.device)
    if model.replays is None or solver.by_tolerance:
        images = made(*inputs)
    else:
        images = model.replays((settings, surroundings(model, model.device)), made, *inputs)
    return Underway(arriving(images), labels, seeds, *model.costs[settings])


def _launch(
    model: Model,
    labels: Tensor,
    seeds: Tensor,
    settings: SampleConfig,
    precision: str | None,
    on_step: OnStep | None = None,
) -> Underway:
    if precision == "int8" and model.compiled:
        raise ValueError("precision='int8' is for a network that is not compiled; leave out --compile")
    solver = solver_of(model, settings)
    with computing(model, precision), torch.no_grad():
        return _start(model, labels, seeds, settings, solver, on_step)


def generate_batch(
    model: Model, labels: Tensor, seeds: Tensor, settings: SampleConfig, precision: str | None = None
) -> Generated:
    """Return the images of these seeds and labels, made together."""
    return _launch(model, labels, seeds, settings, precision).arrived()


def _ahead(device: torch.device) -> int:
    """Return how many batches are under way beside the one asked for: a host works on its own batches alone."""
    return int(device.type == "cuda")


def generate_batches(
    model: Model,
    batches: Iterable[tuple[Tensor, Tensor]],
    settings: SampleConfig,
    precision: str | None = None,
    on_step: OnStep | None = None,
) -> Iterator[Generated]:
    """Yield the images of each (labels, seeds), in order. on_step: told of every step, on a CPU alone.

    A GPU works on the next batch while the host has the last one in hand, to write it or to hand it on. Too much noise
    is warned of here, once for all batches: every stream of images passes.
    """
    warn_of_noise(solver_of(model, settings), settings.nfe, settings.rho)
    underway: deque[Underway] = deque()
    for labels, seeds in batches:
        told = on_step if model.device.type == "cpu" else None  # a GPU's launches run ahead of its steps
        underway.append(_launch(model, labels, seeds, settings, precision, told))
        if len(underway) > _ahead(model.device):
            yield underway.popleft().arrived()
    while underway:
        yield underway.popleft().arrived()


def generate(
    model: Model,
    labels: Tensor,
    seeds: Tensor,
    settings: SampleConfig,
    *,
    batch: int = 256,
    progress: bool = True,
    precision: str | None = None,
) -> Iterator[Generated]:
    """Yield images batch by batch; an image depends on its own seed and label, not on the batch."""
    at_least("batch", batch, 1)
    check_settings(model, settings)
    spans = (slice(start, start + batch) for start in range(0, len(labels), batch))
    parts = ((labels[span], seeds[span]) for span in spans)
    with tqdm(total=len(labels), desc="sample", unit="image", disable=not progress, leave=None) as bar:
        for made in generate_batches(model, parts, settings, precision, steps_of(bar)):
            bar.update(len(made.labels))
            yield made


def steps_of(bar: tqdm) -> OnStep:
    """Return what shows the steps of a batch on a bar of images."""
    return lambda done, steps: bar.set_postfix_str(f"evaluation {min(done, steps)} of {steps}")


def mean_cost(parts: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """Return the mean nfe and passes of an image from (images, nfe, passes) of parts.

    Parts differ for solvers with a tolerance alone.
    """
    sizes, nfes, passes = zip(*parts, strict=True)
    count = sum(sizes)
    nfe, each = (round(sum(n * c for n, c in zip(sizes, costs, strict=True)) / count) for costs in (nfes, passes))
    return nfe, each


def generate_all(
    model: Model,
    labels: Tensor,
    seeds: Tensor,
    settings: SampleConfig,
    *,
    batch: int = 256,
    progress: bool = True,
    precision: str | None = None,
) -> Generated:
    """Return all images at once; nfe and passes are their mean."""
    parts = list(generate(model, labels, seeds, settings, batch=batch, progress=progress, precision=precision))
    nfe, passes = mean_cost((len(part.images), part.nfe, part.passes) for part in parts)
    return Generated(torch.cat([part.images for part in parts]), labels, seeds, nfe, passes)
