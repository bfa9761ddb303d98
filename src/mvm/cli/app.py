"""The application and the kinds of argument that its commands share."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter, Token

import mvm
from mvm.files import write_text
from mvm.options import meanings
from mvm.process import INTERRUPTED as INTERRUPTED
from mvm.settings import NEEDS, OPTIONS, SampleConfig

if TYPE_CHECKING:
    from mvm.distributed.processes import Processes
    from mvm.generate import Draw, Sampler
    from mvm.model import Model

T = TypeVar("T")
USAGE_ERROR = 2

app = App(
    name="mvm",
    version=mvm.__version__,
    help="Mean Velocity Matching: train, sample and compare generative models that are ODE and SDE at once.",
    help_format="plaintext",
)


def _whole(kind: type, tokens: Sequence[Token]) -> int:
    """Return a whole number; 2.5 is an error, not 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"'{tokens[0].value}' is not a whole number") from None


Whole = Annotated[int, Parameter(converter=_whole)]
Num = Annotated[Whole, Parameter(alias="-n")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto: cuda where there is one.")]
JsonFile = Annotated[Path | None, Parameter(name="--json", help="Write the figures there as well.")]

# dotted options such as --train.lr, taken off the command line before it is parsed
Overrides = dict[str, str]
Dotted = Annotated[Overrides | None, Parameter(parse=False)]


def is_first() -> bool:
    """Return whether this is the first of several processes of torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say_from_first(text: str, *, error: bool = False) -> None:
    """Print, in the first of several processes alone."""
    if is_first():
        print(text, file=sys.stderr if error else sys.stdout)


def warn_from_first(text: str) -> None:
    """Print a warning, in the first of several processes alone."""
    say_from_first(f"mvm: {text}", error=True)


def on_device(name: str) -> "AbstractContextManager[Processes]":
    """Return the processes that share the work, on a device by its name."""
    from mvm.distributed.processes import processes
    from mvm.model import choose_device

    return processes(choose_device(name))


def json_writer(path: Path | None) -> Callable[[object], None]:
    """Return what writes figures as JSON, if a file is named; its folder is made at once: it fails before the work."""
    if path is not None:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
    return lambda figures: None if path is None else write_text(path, json.dumps(figures, indent=2) + "\n")


def parse_interval(text: str) -> tuple[float, float]:
    """Return LOW and HIGH of "0.6,0.8"."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--interval {text}: two numbers in [0, 1] are needed, e.g. 0.6,0.8") from None
    return low, high


KINDS: dict[str, Any] = {entry.name: entry.type for entry in fields(SampleConfig)} | {"interval": str}
_HELP = meanings(SampleConfig) | {
    "interval": "Where guidance acts, LOW,HIGH in log-SNR progress (0 noise, 1 image), e.g. 0.6,0.8."
}
_HELP["solver"] += " One that is named has its own times; else those of mvm tune are used where the model has some."


def with_sampler_options(kinds: Mapping[str, Any]) -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds options for sampler settings, of these kinds; one that is not given is None."""

    def add(cls: type[T]) -> type[T]:
        options: list[Any] = []
        for name in filter(kinds.__contains__, OPTIONS):
            kind: Any = Annotated[kinds[name] | None, Parameter(help=_HELP[name])]  # ty: ignore[invalid-type-form]
            options.append((name, kind, None))
        module = {"__module__": cls.__module__}
        made: Any = make_dataclass(cls.__name__, options, bases=(cls,), frozen=True, namespace=module)
        return made

    return add


_UNUSED = {  # what is said of an option without effect
    "interval": "--interval {value} acts on guidance; give its scale too, e.g. --cfg 1.5",
    "nfe": "--nfe {value}: the {solver} solver takes --tolerance and reports what it used",
    "tolerance": "--tolerance {value} belongs to --solver adaptive or dopri5",
    "t_min": "--t-min {value} belongs to --solver sa",
    "shift": "--shift {value} moves the times of a solver, and {solver} chooses its own by --tolerance",
}


def require_used(given: Mapping[str, Any], cells: Sequence[SampleConfig], auto: str = "") -> None:
    """Refuse an option that has no effect on any of the settings that were made with it; auto: a weaker model."""
    if auto and all(cell.auto_scale == 1 for cell in cells):
        raise ValueError(f"--auto {auto} guides by a scale; give it too, e.g. --auto-scale 1.42")
    for name, needed in NEEDS.items():
        if name in given and not any(getattr(cell, needed) for cell in cells):
            raise ValueError(_UNUSED[name].format(value=given[name], solver=cells[0].solver))


class GivenOptions:
    """Sampler options of a command: those that are not given are the recipe's."""

    def given(self) -> dict[str, Any]:
        """Return the options that the command line has."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def settings(self, recipes: SampleConfig, auto: str = "") -> SampleConfig:
        """Return the recipe's settings with what was asked for; an option that would have no effect is an error.

        auto: the weaker model of autoguidance, where one is named.
        """
        given = self.given()
        pair = {"interval": parse_interval(given["interval"])} if "interval" in given else {}
        settings = recipes.asked(**{**given, **pair})
        require_used(given, [settings], auto)
        return settings


@Parameter(name="*", group="Sampler")
@with_sampler_options(KINDS | {"nfe": Whole})
class SamplerOptions(GivenOptions):
    """All of them."""


@Parameter(name="*", group="Sampler")
@with_sampler_options({name: KINDS[name] for name in ("cfg", "interval")})
class GuidanceOptions(GivenOptions):
    """The options of guidance."""


def _values(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Return the values in "a,b,c"."""
    try:
        values = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values:
        raise ValueError(f"--{option} {text}: values separated by commas are needed, e.g. 13,26")
    return values


_AXES = dict.fromkeys(OPTIONS, str) | {
    "solver": Annotated[str, Parameter(name=("--solvers", "--solver"))],
    "interval": Annotated[tuple[str, ...], Parameter(negative="")],
}


@Parameter(name="*", group="Sampler")
@with_sampler_options(_AXES)
class SweepAxes(GivenOptions):
    """The axes of a sweep: of each sampler option the values that are tried, None where the sweep's own are."""

    def cells(self, auto: str = "") -> list[SampleConfig]:
        """Return the settings of every cell; an option that would have no effect on any of them is an error.

        auto: the weaker model of autoguidance, where one is named.
        """
        from mvm.evaluation.cells import combinations

        given = self.given()
        axes = {
            name: _values("solvers" if name == "solver" else name.replace("_", "-"), value, KINDS[name])
            for name, value in given.items()
            if name != "interval"
        }
        if "interval" in given:
            axes["interval"] = tuple(map(parse_interval, given["interval"]))
            given["interval"] = " ".join(given["interval"])
        cells = combinations(**axes)
        require_used(given, cells, auto)
        return cells


@Parameter(name="*")
@dataclass(frozen=True)
class Weights:
    """Which weights of a model.

    Parameters
    ----------
    weights
        ema, model (the raw weights), or another average that the run keeps, e.g. ema-0.999 or power-0.1.
    checkpoint
        latest, best (by the previews), or a step number.
    network
        Of a model trained with a network of your own: module:PACKAGE.MODULE:CLASS, which is imported.
    allow_download
        Open what the model's files name outside of its folder, by a path or on the hub: encoders, and the autoencoder
        of a run that holds none.
    """

    weights: str = "ema"
    checkpoint: str = "latest"
    network: str | None = None
    allow_download: Annotated[bool, Parameter(negative="")] = False

    def load(self, name: str, encoder: bool = False) -> "Model":
        """Return the model of that name with these weights; encoder: opened now, to encode images."""
        from mvm.model import load

        return load(
            name,
            self.weights,
            self.checkpoint,
            encoder=encoder,
            network=self.network,
            allow_download=self.allow_download,
        )


@Parameter(name="*")
@dataclass(frozen=True)
class Drawing(Weights):
    """Which images are drawn from a model, and how its network is computed.

    Parameters
    ----------
    seed
        Image i has seed SEED + i: the same picture whatever the number of images and the batch.
    labels
        balanced goes round the classes; random draws one for each image, from its seed.
    classes
        Classes to go round or to draw from, by number or name, e.g. 3,5 or "english springer,tench"; all when empty.
    precision
        Of sampling: fp32, or on a GPU tf32 or bf16, on a CPU int8: faster, but bf16 and int8 move figures such as FID.
    compile
        Compile the network first: on a GPU, for many images.
    kernels
        With --compile on a GPU in bf16: kernels written by hand.
    auto
        A weaker model of the same data, smaller or trained less, that guides by --auto-scale: named as the model is.
    auto_weights
        Its weights, as --weights.
    auto_checkpoint
        Its checkpoint, as --checkpoint: one of few steps of the model's own run is a weaker model, too.
    auto_network
        Its network, as --network.
    """

    seed: Whole = 0
    labels: str = "balanced"
    classes: str = ""
    precision: str = "fp32"
    compile: bool = False
    kernels: bool = True
    auto: str = ""
    auto_weights: str = "ema"
    auto_checkpoint: str = "latest"
    auto_network: str | None = None

    def open(self, name: str, processes: "Processes", encoder: bool = False) -> "Sampler":
        """Return what draws from a model, on its device, compiled if that is asked for."""
        from mvm.generate import Sampler

        model, auto = self.load(name, encoder).to(processes.device), None
        if self.auto:
            weights = Weights(self.auto_weights, self.auto_checkpoint, self.auto_network, self.allow_download)
            auto = weights.load(self.auto)
            auto.network.to(processes.device)  # all that is asked of it
        return Sampler(model, self.precision, compile=self.compile, kernels=self.kernels, auto=auto)

    def draw(self, num: int, batch: int, names: Sequence[str] | None = None) -> "Draw":
        """Return which images, of the asked classes where the names of a model's are given."""
        from mvm.generate import Draw, asked_classes, class_numbers

        classes = () if names is None else class_numbers(self.classes, names)
        asked_classes(classes, 0 if names is None else len(names))  # refuses numbers out of range
        return Draw(num, self.seed, self.labels, classes, batch)
