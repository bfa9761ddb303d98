"""Images, or other samples, of a trained model: seeds -> noise -> field -> solver -> decode, batch by batch.

    samples = mvm.load("digits").generate(16, classes=[3, 5], rho=1.0)  # or mvm.generate("digits", 16, ...)
    samples.save("grid.png")

A Sampler holds how the network is computed (precision, compilation) and what is kept between batches.
"""

import hashlib
import importlib
import math
import re
import sys
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from mvm import noise
from mvm.distributed.processes import Processes
from mvm.latent import Undecoded
from mvm.latent.codec import DIGITS, fingerprint
from mvm.model import Model, load
from mvm.network import DDT, DiT
from mvm.network.fast import cpu, gpu, int8
from mvm.options import MOST_IMAGES, at_least, between, choose, nearest
from mvm.path import Condition
from mvm.path.condition import batched, map_tensors, rows
from mvm.pictures import MOST_IN_GRID, is_image, png_bytes, require_pictures, sample_grid, to_pillow, write_images
from mvm.precision import PRECISIONS, arithmetic
from mvm.recipes import SampleConfig
from mvm.solver import Adams, Solver, integrate
from mvm.solver.base import State
from mvm.solver.sampling import say_where, solver_for
from mvm.solver.sharing import SharingPlan, best_steps, shared, similarity
from mvm.solver.variants import warn_of_noise
from mvm.untrusted import cut

PROBES = 8  # samples by which the steps that compute a backbone are chosen
LABELS = dict.fromkeys(("balanced", "random"))


@dataclass(frozen=True, eq=False)
class Generated:
    """uint8 images (B, C, H, W), their labels and seeds, and what one of them cost: evaluations (nfe) and passes.

    Of a model of arrays `images` are float32, of any shape (B, C, *space). condition: of each, where it is no label;
    labels are then the rows of what was asked for. names: of the model's classes, or the captions. A notebook shows
    images as a grid.
    """

    images: Tensor
    labels: Tensor
    seeds: Tensor
    nfe: int
    passes: int
    names: Sequence[str] = ()
    condition: Condition = None

    def __len__(self) -> int:
        return len(self.images)

    def first(self, count: int) -> "Generated":
        """Return the first images."""
        part = slice(count)
        first = {name: getattr(self, name)[part] for name in ("images", "labels", "seeds")}
        return replace(self, **first, condition=rows(self.condition, part))

    def pil(self) -> list[Image.Image]:
        """Return the images as Pillow images."""
        require_pictures(self.images.shape[1:], self.images.dtype, "pil()")
        return [to_pillow(image) for image in self.images]

    def grid(self, across: int = 0) -> Image.Image:
        """Return the images as one picture, a class a row where there are several; across: images in a row."""
        require_pictures(self.images.shape[1:], self.images.dtype, "grid()")
        return sample_grid(self.images, self.labels, self.names, across)

    def save(self, out: str | Path) -> None:
        """Write X.png, one grid; X.npz, X.npy, X.parquet, X.zip, or a folder of PNG files: what `mvm sample` writes.

        Float arrays, and samples of other axes than height and width, are written as X.npz or X.npy alone.
        """
        write_images(Path(out), self.images, self.labels, self.names)

    def _repr_png_(self) -> bytes | None:
        visible = is_image(self.images.shape[1:], self.images.dtype) and self.images.shape[1] in (1, 3)
        return png_bytes(self.first(MOST_IN_GRID).grid()) if visible else None


def asked_classes(classes: Sequence[int], num_classes: int) -> list[int]:
    """Return the asked classes, all of them when none is asked; one the model does not have is an error."""
    chosen = list(classes) or list(range(num_classes))
    if bad := ",".join(str(number) for number in chosen if not 0 <= number < num_classes):
        raise ValueError(f"classes={bad} out of range; this model has classes 0 to {num_classes - 1}")
    return chosen


def class_numbers(text: str, names: Sequence[str]) -> tuple[int, ...]:
    """Return the classes in "3,cat": numbers, or a model's own names, which may hold commas; none in "".

    Upper and lower case are the same unless that names two classes. A name wins over a number.
    """
    known = {name.casefold(): number for number, name in enumerate(names)} | {n: i for i, n in enumerate(names)}
    parts, numbers = [part.strip() for part in text.split(",") if part.strip()], []
    while parts:
        for length in range(len(parts), 0, -1):  # the longest name first
            name = ", ".join(parts[:length])
            number = known.get(name, known.get(name.casefold(), known.get(name.replace(", ", ","))))
            if number is None and length == 1 and name.lstrip("-").isdigit():
                number = int(name)
            if number is not None:
                break
        else:
            known_here = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            remedy = f"give numbers or names of this model: {known_here}"
            raise ValueError(f"classes={parts[0]} is unknown{nearest(parts[0], names)}; {remedy}")
        numbers.append(number)
        del parts[:length]
    return tuple(numbers)


def cycle_labels(classes: Sequence[int], num: int, num_classes: int) -> Tensor:
    """Return num labels that go round the asked classes (all of them when none is asked)."""
    at_least("num", num, 1)
    chosen = asked_classes(classes, num_classes)
    return torch.tensor([chosen[i % len(chosen)] for i in range(num)], dtype=torch.int64)


def row_count(condition: Condition) -> int:
    """Return how many rows a condition has; 1 where there is none."""
    counts = [1]
    map_tensors(lambda _, tensor: counts.append(len(tensor)) or tensor if tensor.ndim else tensor, condition)
    return max(counts)


def asked_conditions(
    model: Model, draw: "Draw", condition: Condition = None, captions: Sequence[str] = (), encoder: str | Path = ""
) -> tuple[Tensor, Condition]:
    """Return what images of a draw are asked for: labels (num,), and the conditions that these are the rows of, if any.

    Of a model of class labels these are all there is; of another one a condition's rows, or the captions, take the
    place of classes: a draw goes round them, or draws from them. Without a condition: the null condition. encoder: the
    folder of the text encoder, where it is not the recipe's.
    """
    if model.labelled:
        if condition is not None or captions:
            raise ValueError("condition is for models of another condition than class labels; give classes=[...] here")
        return draw.chosen_labels(model.num_classes), None
    if draw.classes:
        kind = model.recipe.condition.kind
        raise ValueError(f"classes={draw.classes} are for models of class labels; this one has condition.kind='{kind}'")
    if captions:
        if condition is not None:
            raise ValueError("condition and captions are given; give one of the two")
        condition = embedded(model, captions, encoder)
    if condition is None:
        model.require_null()
        return torch.zeros(draw.num, dtype=torch.int64), None
    count = row_count(condition)
    condition = model.check_condition(condition, torch.empty(count))
    return draw.chosen_labels(count), condition


def given(model: Model, labels: Tensor, conditions: Condition) -> Condition:
    """Return what a model is given for images of these labels, as `asked_conditions` returns both."""
    return labels if model.labelled else rows(conditions, labels)


def embedded(model: Model, captions: Sequence[str], encoder: str | Path = "") -> Condition:
    """Return captions as the model's text encoder embeds them; encoder: its folder, where it is not the recipe's."""
    kind = model.recipe.condition
    if isinstance(captions, str) or not all(isinstance(text, str) for text in captions):
        raise ValueError(f"captions={captions!r} must be a list of texts, e.g. ['a red square']")
    if kind.kind != "tokens":
        raise ValueError(f"captions are for models of text; this one has condition.kind='{kind.kind}'")
    if not (folder := encoder or model.text_encoder):
        if kind.encoder:
            named = f"condition.encoder={cut(repr(kind.encoder))}"
            raise ValueError(
                f"captions need the text encoder that the model names, {named}, which lies outside of its folder: give "
                "--encoder FOLDER (encoder= in Python), or --allow-download"
            )
        raise ValueError(
            "captions need a text encoder, and condition.encoder is empty: this model learned from embeddings, or was "
            "exported; give encoder=, the folder that made them, or condition={'tokens': ..., 'mask': ...}"
        )
    from mvm.data.text import TextEncoder  # and transformers with it

    return TextEncoder(folder).embed(list(captions), kind.length)


def batch_spans(num: int, batch: int) -> list[slice]:
    """Return the images of each batch."""
    return [slice(start, min(start + batch, num)) for start in range(0, num, batch)]


@dataclass(frozen=True)
class Draw:
    """Which images: how many, their seeds and labels.

    seed: image i has seed `seed + i`. labels: balanced goes round the classes, random draws each from the image's own
    seed. classes: to go round or draw from; all when empty. batch: images made together, and in one part.
    """

    num: int
    seed: int = 0
    labels: str = "balanced"
    classes: tuple[int, ...] = ()
    batch: int = 256

    def __post_init__(self) -> None:
        between("num", self.num, 1, MOST_IMAGES)
        at_least("seed", self.seed, 0)
        at_least("batch", self.batch, 1)
        try:
            choose("labels", self.labels, LABELS)
        except ValueError as error:
            raise ValueError(f"{error}; names of classes go to classes") from None

    def chosen_seeds(self) -> Tensor:
        """Return the seeds (num,)."""
        return noise.as_seeds(range(self.seed, self.seed + self.num), self.num)

    def chosen_labels(self, num_classes: int) -> Tensor:
        """Return the labels (num,), int64."""
        if self.labels == "balanced":
            return cycle_labels(self.classes, self.num, num_classes)
        chosen = torch.tensor(asked_classes(self.classes, num_classes))
        drawn = noise.uniform(self.chosen_seeds(), noise.LABEL, (1,))[:, 0] * len(chosen)
        return chosen[drawn.long()]

    def spans(self) -> list[slice]:
        """Return the images of each part."""
        return batch_spans(self.num, self.batch)

    def filled(self, span: slice, settings: SampleConfig) -> Tensor:
        """Return the indices of a part's images, filled up from the first image on to the size of the first part.

        Then all batches have one shape, for the compiler's sake; a solver that takes images one by one needs none.
        """
        size = span.stop - span.start if settings.build_solver().per_sample else min(self.batch, self.num)
        return torch.arange(span.start, span.start + size) % self.num


def require_same_data(model: Model, auto: Model) -> None:
    """Refuse a weaker model of other samples, conditions or latents than those of the model that it is to guide."""

    def facts(each: Model) -> dict[str, Any]:
        recipe, names = each.recipe, each.classes if each.labelled else ()
        return {
            "samples": each.sample_shape,
            "codec": f"{recipe.codec.kind} of {recipe.data.values}, scale {recipe.codec.scale:g}",
            "latents of fingerprint": each.codec.identity.get("codec", "")[:DIGITS] or "none",
            "condition": recipe.condition.words,
            "classes": len(names),
            **{f"class {number}": name for number, name in enumerate(names)},
        }

    ours, theirs = facts(model), facts(auto)
    for what, value in ours.items():
        if theirs[what] != value:
            names = [each.origin.get("run", each.recipe.name) for each in (auto, model)]
            raise ValueError(
                f"auto: '{names[0]}' has {what} {theirs[what]}, and '{names[1]}', which it is to guide, has {value}; "
                "give a weaker model of the same data"
            )


def check_settings(model: Model, settings: SampleConfig, auto: Model | None = None) -> None:
    """Refuse settings that a model, guided by a weaker one if need be, cannot be sampled with, before the work."""
    settings.guidance(auto)
    solver, recipe = settings.build_solver(), model.recipe
    solver.plan(model.schedule, settings.nfe, settings.rho)
    if isinstance(model.codec, Undecoded):
        model.codec.refuse()  # before the work
    if settings.internal != 1 and not recipe.network.inner_block:
        raise ValueError(f"internal={settings.internal} needs a network with an inner head (network.inner_block)")
    if settings.share and not isinstance(model.network, DDT):
        raise ValueError(f"share={settings.share} needs network.kind='ddt'")
    recipe.require_guidance("cfg", settings.cfg)


def solver_of(model: Model, settings: SampleConfig) -> Solver:
    """Return the solver that samples the model: as the settings name it, or the default with the model's tuned times.

    Sharing a backbone between steps and guidance by another model make another field than times were fitted to.
    """
    size = math.prod(model.sample_shape)
    if not settings.unnamed or settings.share or settings.auto_scale != 1:
        return settings.build_solver().for_field(model, size)
    return solver_for(None, model, size, settings.nfe, settings.rho, settings.guidance())


def takes_tuned_times(model: Model, settings: SampleConfig) -> bool:
    """Return whether the model is sampled by times that were fitted to it."""
    solver = solver_of(model, settings)
    return isinstance(solver, Adams) and bool(solver.given)


def solver_record(model: Model, settings: SampleConfig) -> str:
    """Return the solver as it samples the model, for records: what it was asked for, and a hash of all its numbers.

    Constants may change between versions, also those that follow from the number of evaluations. Nine digits count:
    machines differ in the last ones.
    """
    solver = solver_of(model, settings)
    plan = solver.plan(model.schedule, settings.nfe, settings.rho)
    numbers = re.sub(r"\d+\.?\d*(e[+-]?\d+)?", lambda match: f"{float(match[0]):.9g}", repr(plan))
    shifted = f", shift {solver.shift:g}" if solver.shift not in (0, 1) else ""  # records without one are as ever
    return f"{solver!r}{shifted}, plan {hashlib.sha256(numbers.encode()).hexdigest()[:12]}"


# --- recordings of whole loops on a GPU ---------------------------------------------------------------------------

MOST_RECORDINGS = 4  # at a time; each holds the memory of its whole loop

Work = Callable[..., Any]  # tensors, and returns one or several


def record_graph(function: Work, examples: tuple[Tensor, ...]) -> Work:
    """Return a function as a CUDA graph, with tensors of its own to read from and to write to.

    The function must be a stream of launches alone: it may look at no value on the device.
    """
    inputs, graph = tuple(example.clone() for example in examples), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*inputs)

    def replay(*values: Tensor) -> Any:
        for mine, given in zip(inputs, values, strict=True):
            mine.copy_(given)
        graph.replay()
        return map_tensors(lambda _, each: each.clone(), output)  # the next replay writes over it

    return replay


def recording_key(module: nn.Module, device: torch.device) -> Hashable:
    """Return what a recording depends on besides its inputs: where the weights are, and the arithmetic around it."""
    arithmetic = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    weights = tuple(value.data_ptr() for value in module.parameters())
    return weights, arithmetic, torch.get_float32_matmul_precision()


class Replays:
    """Loops recorded once and replayed, so that thousands of launches become one; the last few used are kept.

    The first call with a key is plain (compilers and libraries settle then), the second records, later ones replay.
    Where there is no GPU every call is plain: what is computed is the same in all three. `record` makes a recording.
    """

    def __init__(self, record: Callable[[Work, tuple[Tensor, ...]], Work] = record_graph) -> None:
        self.record = record
        self.seen: OrderedDict[Hashable, Work | None] = OrderedDict()  # None: called once, not recorded yet
        self.failed = False

    def __call__(self, key: Hashable, function: Work, *inputs: Tensor) -> Any:
        """Return function(*inputs); the same key must mean the same function."""
        on_gpu = self.record is not record_graph or all(value.is_cuda for value in inputs)
        if self.failed or not on_gpu:
            return function(*inputs)
        key = (key, *((tuple(value.shape), value.dtype, value.device) for value in inputs))
        work = self.seen.get(key)
        if key in self.seen and work is None:
            try:
                work = self.record(function, inputs)
            except RuntimeError as error:
                self.failed = True  # of this model, for good: what could not be recorded once will not be later
                why = str(error).splitlines()[0]
                warnings.warn(f"the sampling loop could not be recorded ({why}); it runs step by step", stacklevel=3)
                work = function
        self.seen[key] = work
        self.seen.move_to_end(key)
        while len(self.seen) > MOST_RECORDINGS:
            self.seen.popitem(last=False)
        return (work or function)(*inputs)


def to_host(images: Tensor) -> Callable[[], Tensor]:
    """Begin to copy images to the host; return what waits for them. The device is free for other work meanwhile."""
    if not images.is_cuda:
        return lambda: images
    host: Any = torch.empty(images.shape, dtype=images.dtype, pin_memory=True)
    host.copy_(images, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


# --- the sampler --------------------------------------------------------------------------------------------------

OnStep = Callable[[int, int], None]  # steps done of a batch, and of how many


_COMPILED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # in place, and whether kernels are in them


def compile_network(model: Model, kernels: bool = True) -> bool:
    """Compile the network in place, once per shape of a batch; return whether hand-written kernels are in it.

    Of a DDT both halves apart: encoder sharing calls them so, and a whole call is one after the other. kernels: in
    bf16 on a GPU, norm and positions of queries and keys by a kernel written by hand, and a SwiGLU's product with its
    gate by another, on Hopper; the compiler does the rest.
    """
    if model.network in _COMPILED:
        return _COMPILED[model.network]
    available = gpu.gpu_kernels() if kernels and model.device.type == "cuda" else None
    if available is not None:
        gpu.apply(model.network, available, sampling=True)
    if isinstance(model.network, DDT):
        for half in ("condition", "head"):
            setattr(model.network, half, torch.compile(getattr(model.network, half), dynamic=False))
    else:
        model.network.compile(dynamic=False)
    _COMPILED[model.network] = available is not None
    return available is not None


class Sampler:
    """A model made ready to sample, and what is kept between batches: recorded loops, sharing plans, costs.

    precision: one of mvm.precision.PRECISIONS; None: as it is around the call. compile: compile the model's network,
    in place and for good; pays on a GPU when many batches have one shape. replay: a compiled model on a GPU records
    the whole loop of a batch too, from the second batch of a shape on. kernels: as in `compile_network`. auto: a weaker
    model of the same data, which guides where settings have an auto_scale; computed as the model is. finite: raise
    where images come of NaN or Inf, and tell after which step; untold they are black.
    """

    def __init__(
        self,
        model: Model,
        precision: str | None = "fp32",
        *,
        compile: bool = False,
        replay: bool = True,
        kernels: bool = True,
        auto: Model | None = None,
        finite: bool = True,
    ) -> None:
        if precision is not None:
            choose("precision", precision, PRECISIONS)
        if auto is not None:
            require_same_data(model, auto)
            if auto.device != model.device:
                raise ValueError(f"auto is on {auto.device}, the model on {model.device}; move one: auto.to(device)")
        self.models = (model,) if auto is None else (model, auto)
        compiled = compile or any(each.network in _COMPILED for each in self.models)
        if precision == "int8" and compiled:
            raise ValueError("precision='int8' is for a network that is not compiled; leave out --compile")
        self.model, self.auto, self.precision, self.compiled, self.finite = model, auto, precision, compiled, finite
        by_hand = [compile_network(each, kernels) for each in self.models if compiled]
        self.kernels = any(by_hand)
        self.replays = Replays() if compiled and replay else None
        self.plans: dict[Hashable, SharingPlan] = {}  # of encoder sharing, by settings
        self.costs: dict[SampleConfig, tuple[int, int]] = {}  # evaluations and passes of an image
        self.ahead = int(model.device.type == "cuda")  # batches begun after the one that is asked for

    def facts(self) -> dict[str, Any]:
        """Return how the network is computed, for records; kernels only where they are used: old records stay."""
        how = {"precision": self.precision, "compiled": self.compiled}
        return {**how, "kernels": True} if self.kernels and self.precision == "bf16" else how

    def auto_facts(self, settings: SampleConfig) -> dict[str, Any]:
        """Return which weights guide by autoguidance, for records; nothing where none do: old records stay."""
        if self.auto is None or settings.auto_scale == 1:
            return {}
        known = {name: value for name, value in self.auto.origin.items() if name != "tuned"}
        return {"auto": known if "sha256" in known else {"sha256": fingerprint(known, self.auto.network.state_dict())}}

    @contextmanager
    def computing(self) -> Generator[None]:
        """Compute the networks in the sampler's precision, on a CPU in the fastest way, without a graph."""
        way = int8 if self.precision == "int8" else cpu
        switches = nullcontext() if self.precision is None else arithmetic(self.precision, self.model.device)
        with switches, ExitStack() as faster, torch.no_grad():
            for each in self.models:
                if each.fast and each.device.type == "cpu":
                    faster.enter_context(way.applied(each.network))
            yield

    def sharing_plan(self, settings: SampleConfig) -> SharingPlan:
        """Return which evaluations compute the backbone: chosen once, by its similarity between steps."""
        key = (settings.solver, settings.t_min, settings.nfe, settings.rho, settings.share, settings.shift)
        if key not in self.plans:
            model, seeds = self.model, torch.arange(PROBES)
            labels = cycle_labels((), PROBES, model.num_classes).to(model.device) if model.labelled else None
            x = noise.initial(seeds.to(model.device), model.sample_shape)
            how = {"solver": solver_of(model, settings), "nfe": settings.nfe, "rho": settings.rho, "seeds": seeds}
            computed = max(1, round(settings.nfe * (1 - settings.share)))
            with self.computing():
                steps = best_steps(similarity(model, x, condition=labels, **how), computed)
            self.plans[key] = SharingPlan(settings.nfe, steps)
        return self.plans[key]

    def launch(
        self, condition: Condition, seeds: Tensor, settings: SampleConfig, on_step: OnStep | None = None
    ) -> Callable[[], Generated]:
        """Begin a batch; return what waits for its images. By a solver of fixed steps the loop waits for no device."""
        model, solver = self.model, solver_of(self.model, settings)
        if condition is not None or model.labelled:
            condition = model.check_condition(condition, seeds)
        labels = condition if model.labelled else torch.zeros(len(seeds), dtype=torch.int64)
        noise.as_seeds(seeds, len(seeds))
        plan = self.sharing_plan(settings) if settings.share else None  # looks at the device, once
        draw = noise.normal_compiled if self.compiled and model.device.type == "cuda" else noise.normal
        show = None if on_step is None or solver.by_tolerance else lambda state: on_step(state.index, settings.nfe)
        how: dict[str, Any] = {"schedule": model.schedule, "nfe": settings.nfe, "rho": settings.rho}
        how |= {"guidance": settings.guidance(self.auto), "draw": draw}

        def values_of(condition: Condition, seeds: Tensor, on_step: Callable[[State], None] | None) -> Tensor:
            x = draw(seeds, noise.INITIAL, model.sample_shape)
            with nullcontext(model) if plan is None else shared(model, plan) as field:
                solution = integrate(field, x, solver, seeds, condition=condition, on_step=on_step, **how)
            self.costs[settings] = solution.nfe, solution.passes  # a replay counts nothing
            return model.codec.decode_float(solution.x)

        def images_of(condition: Condition, seeds: Tensor) -> tuple[Tensor, Tensor]:
            """Return the images, and whether they are of finite numbers, which nobody waits for here."""
            values = values_of(condition, seeds, show)
            return model.codec.stored(values), values.isfinite().all()

        with self.computing():
            there = seeds.to(model.device)
            placed: Any = None if condition is None else batched(condition, there)
            # another one may look at the device
            ours = all(each.labelled or isinstance(each.network, DiT | DDT) for each in self.models)
            if self.replays is None or solver.by_tolerance or not ours:
                images, finite = images_of(placed, there)
            else:
                parts: dict[str, Tensor] = {}  # of the condition: a recording takes tensors alone
                map_tensors(lambda name, tensor: parts.setdefault(name, tensor), placed)

                def images_of_parts(*values: Tensor) -> tuple[Tensor, Tensor]:
                    following = iter(values)
                    return images_of(map_tensors(lambda *_: next(following), placed), values[-1])

                key = settings, tuple(parts), *(recording_key(each, model.device) for each in self.models)
                images, finite = self.replays(key, images_of_parts, *parts.values(), there)
            wait, wait_finite, (nfe, passes) = to_host(images), to_host(finite), self.costs[settings]
        own = None if model.labelled else condition

        def made() -> Generated:
            images = wait()
            if self.finite and not bool(wait_finite()):
                with self.computing():
                    say_where(lambda look: values_of(placed, there, look))
            return Generated(images, labels, seeds, nfe, passes, model.classes, own)

        return made

    def batches(
        self, batches: Iterable[tuple[Condition, Tensor]], settings: SampleConfig, on_step: OnStep | None = None
    ) -> Iterator[Generated]:
        """Yield the images of each (condition, seeds), in order. on_step: called after every step, on a CPU alone.

        A GPU works on the next batch while the host has the last one in hand, to write it or to hand it on. Too much
        noise is warned of here, once for all batches: every stream of images passes.
        """
        warn_of_noise(solver_of(self.model, settings), settings.nfe, settings.rho)
        on_step = on_step if self.model.device.type == "cpu" else None  # a GPU's launches run ahead of its steps
        begun: deque[Callable[[], Generated]] = deque()
        for condition, seeds in batches:
            begun.append(self.launch(condition, seeds, settings, on_step))
            if len(begun) > self.ahead:
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def batch(self, condition: Condition, seeds: Tensor, settings: SampleConfig) -> Generated:
        """Return the images of these labels, or another condition, and seeds, made together."""
        return self.launch(condition, seeds, settings)()

    def images(
        self, condition: Condition, seeds: Tensor, settings: SampleConfig, *, batch: int = 256, progress: bool = True
    ) -> Generated:
        """Return the images of these labels, or another condition, and seeds; nfe and passes are their mean.

        An image depends on its own seed and condition, not on the batch.
        """
        at_least("batch", batch, 1)
        batches = [(torch.arange(s.start, s.stop), s.stop - s.start) for s in batch_spans(len(seeds), batch)]
        return self._joined(condition, seeds, settings, batches, progress)

    def generate(
        self,
        num: int = 16,
        *,
        classes: Sequence[int | str] = (),
        condition: Condition = None,
        captions: Sequence[str] = (),
        encoder: str | Path = "",
        seed: int = 0,
        labels: str = "balanced",
        batch: int = 256,
        progress: bool = True,
        interval: tuple[float, float] | None = None,
        **settings: Any,
    ) -> Generated:
        """Return `num` images: those of `mvm sample` with the same options, bit for bit.

        condition: of a model that has another than class labels: `num` rows, or one for all; captions: the same as
        texts, to go round, embedded by the encoder that the recipe names, or by that in the folder `encoder`; neither:
        the null condition.
        classes: numbers or names, to go round (labels="balanced") or to draw from ("random"); all when empty. seed:
        image i has seed `seed + i`, and is the same picture whatever num and batch. interval: where guidance acts.
        settings: those of SampleConfig (nfe, solver, rho, cfg, ...); what is not given is the recipe's own.
        """
        model = self.model
        chosen = model.recipe.sample.asked(interval=interval, **settings)
        if interval is not None and not chosen.guided:
            raise ValueError(f"interval={interval} acts on guidance; give its scale too, e.g. cfg=1.5")
        numbers = [class_numbers(each, model.classes) if isinstance(each, str) else (each,) for each in classes]
        draw = Draw(num, seed, labels, tuple(int(n) for some in numbers for n in some), batch)
        batches = [(draw.filled(span, chosen), span.stop - span.start) for span in draw.spans()]
        if condition is not None and (count := row_count(condition)) not in (1, num):
            raise ValueError(f"condition has {count} rows for num={num} images; give one for each, or one for all")
        asked, table = asked_conditions(model, draw, condition, captions, encoder)
        samples = self._joined(given(model, asked, table), draw.chosen_seeds(), chosen, batches, progress)
        return samples if model.labelled else replace(samples, labels=asked, names=tuple(captions))

    def _joined(
        self,
        condition: Condition,
        seeds: Tensor,
        settings: SampleConfig,
        batches: Sequence[tuple[Tensor, int]],
        progress: bool,
    ) -> Generated:
        """Return all images; batches: the indices of each, and how many of its first images are wanted."""
        check_settings(self.model, settings, self.auto)
        if condition is not None or self.model.labelled:
            condition = self.model.check_condition(condition, seeds)
        parts: list[Generated] = []
        with tqdm(total=len(seeds), desc="sample", unit="image", disable=not progress, leave=None) as bar:
            generated = self.batches(((rows(condition, i), seeds[i]) for i, _ in batches), settings, steps_of(bar))
            for (_, count), part in zip(batches, generated, strict=True):
                parts.append(part.first(count))
                bar.update(count)
        nfe, passes = mean_cost((len(part), part.nfe, part.passes) for part in parts)
        images, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels"))
        own = None if self.model.labelled else condition
        return Generated(images, labels, seeds, nfe, passes, self.model.classes, own)


# --- how long it takes --------------------------------------------------------------------------------------------

LONG = 3600.0  # seconds of work that a command does not begin unasked
SMALL = 1e13  # multiply-adds that take minutes on a slow CPU: no need to measure how fast this machine is
SHARE = 0.5  # of the speed of a large product that a network reaches: 0.48 to 0.73 on one core, less where calls bind
ADAPTIVE = 100  # evaluations of a solver that goes by tolerance, about


def speed(device: torch.device) -> float:
    """Return multiply-adds a second of a large product of matrices, in the arithmetic that is set around the call."""
    side = 8192 if device.type == "cuda" else 768
    a, seconds = torch.ones(side, side, device=device), []
    for _ in range(3):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # which waits for the device
        seconds.append(time.perf_counter() - start)
    return side**3 / min(seconds)


def seconds_of(sampler: Sampler, num: int, settings: SampleConfig) -> float:
    """Return about how long so many images take here, rather too much; 0 where that is little, or not known.

    By arithmetic alone, before anything of the network is run: a stranger's model may take hours for one pass.
    """
    recipe, network = sampler.model.recipe, sampler.model.network
    if not isinstance(network, DiT | DDT):
        return 0.0
    guided = sum(rule.scale != 1 for rule in settings.guidance(sampler.auto))
    passes = (1 + guided) * (ADAPTIVE if settings.takes_tolerance else settings.nfe)
    tokens = math.prod(extent // recipe.network.patch for extent in recipe.sample_shape[1:]) + recipe.condition.length
    depth, width, _ = recipe.network.dimensions
    most = tokens * (sum(value.numel() for value in network.parameters()) + 2 * tokens * depth * width)
    if num * passes * most < SMALL:
        return 0.0
    with sampler.computing():
        return num * passes * recipe.multiply_adds / (SHARE * speed(sampler.model.device))


def require_patience(sampler: Sampler, num: int, settings: SampleConfig, yes: bool, processes: Processes) -> None:
    """Refuse work of more than an hour in all processes, unless the user says yes."""
    seconds = 0 if yes else processes.max(round(seconds_of(sampler, num, settings) / processes.world))
    if seconds > LONG:
        hours = seconds / 3600
        words = f"{hours:.0f} h" if hours < 48 else f"{hours / 24:,.0f} days"
        raise ValueError(
            f"num={num:,}: this takes about {words}, at {settings.nfe:,} evaluations of "
            f"{sampler.model.recipe.multiply_adds:.2g} multiply-adds an image; give --yes to begin, or less to do"
        )


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


class GenerateModule(ModuleType):
    """This module, which may be called: mvm.generate("digits", 16) is `mvm.load("digits").generate(16)`."""

    def __call__(self, model: Model | str | Path, num: int = 16, **options: Any) -> Generated:
        return (model if isinstance(model, Model) else load(model)).generate(num, **options)

    def __reduce__(self) -> tuple[Any, ...]:  # a subclass of modules is not pickled by name otherwise
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = GenerateModule
