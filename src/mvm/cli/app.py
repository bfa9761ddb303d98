"""The application and the kinds of argument that its commands share."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Group, Parameter, Token

import mvm
from mvm.files import write_text
from mvm.options import meanings
from mvm.process import INTERRUPTED as INTERRUPTED
from mvm.settings import NEEDS, OPTIONS, SampleConfig

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions, RenderableType

    from mvm.distributed.processes import Processes
    from mvm.generate import Draw, Sampler
    from mvm.model import Model

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., int])
USAGE_ERROR = 2

# What a command is for, in the order of `mvm --help`.
START, TRAIN, SAMPLE, JUDGE, SHARE, OTHER = (
    Group(name, sort_key=place)
    for place, name in enumerate(("Start", "Train", "Sample", "Evaluate", "Share", "Other options"))
)
# What an option is about, in the order of every command's help. Each option has one: Annotated[int, IMAGES].
TRAINING, INPUT, EDITING, IMAGES, SAMPLING, GUIDANCE, MEASUREMENT, FEATURES, MODEL, OUTPUT, SERVER, HARDWARE = (
    Parameter(group=Group(name, sort_key=place))
    for place, name in enumerate(
        (
            "Training",
            "Input",
            "Editing",
            "Images",
            "Sampling",
            "Guidance",
            "Measurement",
            "Features",
            "Model",
            "Output",
            "Server",
            "Hardware",
        )
    )
)


def _default(value: object) -> str | None:
    """Return a default as the help shows it; None where there is nothing to show."""
    if value is None or value is False or value == "":
        return None
    return "on" if value is True else str(value)


DEFAULTS = Parameter(show_default=_default)  # of every App, as the pages of the site do not inherit it


def _flowed(text: str) -> str:
    """Return a text whose lines flow within a paragraph; those of a list stay."""
    return re.sub(r"(?<!\n)\n(?!\n|- | )", " ", text)


class Flowing:
    """The look of help: cyclopts' own, but paragraphs fill the terminal, whatever the lines of the source."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        from cyclopts.help import DefaultFormatter

        entries = [entry.copy(description=self._flow(entry.description)) for entry in panel.entries]
        DefaultFormatter()(console, options, panel.copy(entries=entries))

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: Any) -> None:
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)

    def render_description(
        self, console: "Console", options: "ConsoleOptions", description: "RenderableType | None"
    ) -> None:
        console.print(self._flow(description))

    def _flow(self, shown: Any) -> Any:
        text: Any = getattr(shown, "primary_renderable", None)
        if hasattr(text, "plain"):  # rich's Text
            text.plain = _flowed(text.plain)
        return shown


def examples(*lines: str) -> str:
    """Return the last part of a command's help: lines `mvm ...  # what it does`, aligned."""
    pairs = [line.split("  # ") for line in lines]
    width = max(len(command) for command, _ in pairs)
    return "\n".join(["Examples:", *(f"  {command:{width}}  # {what}" for command, what in pairs)])


app = App(
    name="mvm",
    version=mvm.__version__,
    help="Mean Velocity Matching: train, sample and evaluate generative models that are ODE and SDE at once.",
    help_format="plaintext",
    help_formatter=Flowing(),
    help_epilogue=examples(
        "mvm demo  # train, sample, report: 2 to 4 minutes",
        "mvm sample cifar10 --out grid.png  # sample a shipped model",
        "mvm train digits  # train a recipe; see mvm recipes",
        "mvm sample --help  # the options of a command",
    ),
    default_parameter=DEFAULTS,
)
for flags in (*app.help_flags, *app.version_flags):
    app[flags].group = OTHER


def command(group: Group, *lines: str, name: str | None = None) -> Callable[[F], F]:
    """Return a decorator that adds a command to a group of `mvm --help`; lines: its examples."""
    return app.command(name=name, group=group, help_epilogue=examples(*lines))


def _whole(kind: type, tokens: Sequence[Token]) -> int:
    """Return a whole number; 2.5 is an error, not 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"'{tokens[0].value}' is not a whole number") from None


Whole = Annotated[int, Parameter(converter=_whole)]
Num = Annotated[Whole, Parameter(alias="-n"), IMAGES]
Batch = Annotated[Whole, HARDWARE]
Device = Annotated[str, Parameter(help="Device: cpu, cuda, or auto (cuda if there is a GPU)."), HARDWARE]
JsonFile = Annotated[Path | None, Parameter(name="--json", help="Also write the results to this JSON file."), OUTPUT]
_ELSEWHERE = "Let the model open encoders and autoencoders that it names outside its folder, by a path or on the Hub."
Download = Annotated[bool, Parameter(negative="", help=_ELSEWHERE), MODEL]

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
    "interval": "Where guidance acts: LOW,HIGH in log-SNR progress from 0 (noise) to 1 (image), e.g. 0.6,0.8."
}
_HELP["solver"] += " Without --solver, time steps fitted by `mvm tune` are used if the model has them."
_GUIDES = ("cfg", "interval", "internal", "auto_scale")  # options of guidance, in the order of the help


def with_sampler_options(
    kinds: Mapping[str, Any], defaults: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds options for sampler settings, of these kinds; one that is not given is None.

    defaults: what that stands for, as the help shows it; by default the model's own.
    """

    def add(cls: type[T]) -> type[T]:
        options: list[Any] = []
        sampling = [name for name in OPTIONS if name not in _GUIDES]
        for name in filter(kinds.__contains__, (*sampling, *_GUIDES)):
            shown = "the model's" if defaults is None else defaults.get(name)
            words, group = Parameter(help=_HELP[name], show_default=shown), GUIDANCE if name in _GUIDES else SAMPLING
            kind: Any = Annotated[kinds[name] | None, words, group]  # ty: ignore[invalid-type-form]
            options.append((name, kind, None))
        module = {"__module__": cls.__module__}
        made: Any = make_dataclass(cls.__name__, options, bases=(cls,), frozen=True, namespace=module)
        return made

    return add


_UNUSED = {  # the message on an option without effect
    "interval": "--interval {value} acts on guidance; give its scale too, e.g. --cfg 1.5",
    "nfe": "--nfe {value} has no effect with --solver {solver}, which is adaptive; give --tolerance instead",
    "tolerance": "--tolerance {value} belongs to --solver adaptive or dopri5; add one of them, or give --nfe instead",
    "t_min": "--t-min {value} belongs to --solver sa; add it, or leave --t-min out",
    "shift": "--shift {value} has no effect with --solver {solver}, which is adaptive; leave it out",
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
        """Return the recipe's settings with the given options; one that would have no effect is an error.

        auto: the weaker model of autoguidance, where one is named.
        """
        given = self.given()
        pair = {"interval": parse_interval(given["interval"])} if "interval" in given else {}
        settings = recipes.asked(**{**given, **pair})
        require_used(given, [settings], auto)
        return settings


@Parameter(name="*")
@with_sampler_options(KINDS | {"nfe": Whole})
class SamplerOptions(GivenOptions):
    """All of them."""


@Parameter(name="*")
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


@Parameter(name="*")
@with_sampler_options(_AXES, {"solver": "adams", "nfe": "8,13,26", "rho": "0,1"})
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
        Weights to use: ema (exponential moving average), model (the raw weights), or another average that the run
        keeps, e.g. ema-0.999 or power-0.1.
    checkpoint
        Checkpoint to use: latest, best (by the previews), or a step number.
    network
        Class of your own network, module:PACKAGE.MODULE:CLASS, if the model has one. The module is imported.
    """

    weights: Annotated[str, MODEL] = "ema"
    checkpoint: Annotated[str, MODEL] = "latest"
    network: Annotated[str | None, MODEL] = None
    allow_download: Download = False

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
        Image i uses seed SEED + i, so an image does not depend on the batch size or the number of images.
    labels
        How classes are chosen: balanced cycles through them, random draws one for each image from its seed.
    classes
        Classes to sample, by number or name, e.g. 3,5 or "english springer,tench". Default: all classes.
    precision
        Precision of sampling: fp32, on a GPU also tf32 or bf16, on a CPU also int8. The others are faster, but bf16
        and int8 change figures such as FID.
    compile
        Compile the network before sampling: useful on a GPU, for many images.
    kernels
        Use the GPU kernels of this package, with --compile in bf16 on a GPU.
    auto
        Weaker model for autoguidance, of the same data: smaller or trained less. Named like MODEL; needs --auto-scale.
    auto_weights
        Weights of the weaker model, as in --weights.
    auto_checkpoint
        Checkpoint of the weaker model, as in --checkpoint. An early checkpoint of the same run serves too.
    auto_network
        Network class of the weaker model, as in --network.
    """

    seed: Annotated[Whole, IMAGES] = 0
    labels: Annotated[str, IMAGES] = "balanced"
    classes: Annotated[str, IMAGES] = ""
    precision: Annotated[str, HARDWARE] = "fp32"
    compile: Annotated[bool, HARDWARE] = False
    kernels: Annotated[bool, HARDWARE] = True
    auto: Annotated[str, GUIDANCE] = ""
    auto_weights: Annotated[str, GUIDANCE] = "ema"
    auto_checkpoint: Annotated[str, GUIDANCE] = "latest"
    auto_network: Annotated[str | None, GUIDANCE] = None

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
