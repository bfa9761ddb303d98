"""Recipes: frozen dataclasses from TOML, to JSON in the run directory; unknown keys are errors."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from mvm.data import DATA_SETS
from mvm.network import DiTConfig
from mvm.objective import ObjectiveConfig, RepaConfig
from mvm.options import at_least, choose, nearest
from mvm.path import MEAN_VELOCITY_KINDS, NOISE_KINDS, SCHEDULES, MeanVelocity, Schedule, TimeLaw, schedule_named
from mvm.solver import DEFAULT_NFE, SOLVERS, Adaptive, ClassifierFree, Guidance, Interval, Solver, solver_named
from mvm.training.optim import TrainConfig
from mvm.training.runtime import EngineConfig

RECIPE = "recipe.json"  # in a run directory
BASE = "base"  # in TOML: the shipped recipe whose options hold where this one says nothing
FOLDER = "folder"  # data.name of a prepared folder that the catalogue does not know


@dataclass(frozen=True)
class DataConfig:
    """Which images: a set known by name, or any prepared folder (name "folder").

    path: what `mvm data prepare` wrote; default data/NAME. mirror: half of the images are shown flipped left to
    right. channels, size and classes belong to a "folder" and are read from it when a run starts.
    """

    name: str = "digits"
    path: str = ""
    mirror: bool = False
    channels: int = 0
    size: int = 0
    classes: int = 0

    def __post_init__(self) -> None:
        choose("data.name", self.name, {**DATA_SETS, FOLDER: None})
        for option in ("channels", "size", "classes"):
            at_least(f"data.{option}", getattr(self, option), 0)
            if self.name != FOLDER and getattr(self, option):
                raise ValueError(f"data.{option} belongs to data.name='{FOLDER}'; '{self.name}' is known")
        if self.path and self.name != FOLDER and DATA_SETS[self.name].load is not None:
            raise ValueError(
                f"data.path={self.path}: '{self.name}' ships in the package; give --data.name {FOLDER} too"
            )
        if self.name == FOLDER and not self.path:
            raise ValueError(f"data.name='{FOLDER}' needs data.path, a folder written by: mvm data prepare")

    @property
    def folder(self) -> Path:
        """Where the prepared images are looked for."""
        return Path(self.path or f"data/{self.name}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return (self.channels, self.size, self.size) if self.name == FOLDER else DATA_SETS[self.name].shape

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.classes))) if self.name == FOLDER else DATA_SETS[self.name].classes


@dataclass(frozen=True)
class PathConfig:
    """The schedule and the law of t in training."""

    schedule: str = "mean-velocity"
    law: TimeLaw = field(default_factory=TimeLaw)

    def __post_init__(self) -> None:
        choose("path.schedule", self.schedule, SCHEDULES)
        self.law.require(self.build())

    def build(self) -> Schedule:
        return schedule_named(self.schedule)


@dataclass(frozen=True)
class SampleConfig:
    """How to sample, unless told otherwise.

    cfg = 1 is no guidance; low and high bound it in log-SNR progress. tolerance is for adaptive and dopri5,
    which take it in place of nfe.
    """

    solver: str = "adams"
    nfe: int = DEFAULT_NFE
    rho: float = 0.0
    cfg: float = 1.0
    low: float = 0.0
    high: float = 1.0
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        choose("solver", self.solver, SOLVERS)
        at_least("nfe", self.nfe, 1)
        at_least("rho", self.rho, 0)
        self.guidance()
        self.build_solver()

    def build_solver(self) -> Solver | Adaptive:
        """Return the solver."""
        solver = solver_named(self.solver)
        return replace(solver, rtol=self.tolerance, atol=self.tolerance) if isinstance(solver, Adaptive) else solver

    @property
    def takes_tolerance(self) -> bool:
        """Whether the solver goes by tolerance and reports its nfe, instead of being given one."""
        return isinstance(self.build_solver(), Adaptive)

    def guidance(self) -> Guidance | None:
        """Return the guidance rule, or None at scale 1."""
        interval = Interval(self.low, self.high)
        return None if self.cfg == 1 else ClassifierFree(self.cfg, interval=interval)


@dataclass(frozen=True)
class PreviewConfig:
    """Looks at a run while it trains: every `every` steps (0: never) a grid of `grid` images of the averaged weights.

    count: images for the cheap quality figure, a Frechet distance between shrunken pixels (fd_pixels; not FID).
    """

    every: int = 0
    grid: int = 64
    count: int = 1024

    def __post_init__(self) -> None:
        at_least("preview.every", self.every, 0)
        at_least("preview.grid", self.grid, 1)
        at_least("preview.count", self.count, max(2, self.grid))  # a covariance needs two


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run."""

    name: str = "unnamed"
    description: str = ""
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    path: PathConfig = field(default_factory=PathConfig)
    network: DiTConfig = field(default_factory=DiTConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    repa: RepaConfig = field(default_factory=RepaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        self._check_kind()
        self._check_objective()
        self.repa.tap(self.network.dimensions[0])  # refuses a block that is not there
        self._check_best()
        if self.train.optimizer == "muon" and self.engine.parallel == "fsdp":
            raise ValueError(
                "train.optimizer='muon' orthogonalises whole matrices, which engine.parallel='fsdp' spreads; use ddp"
            )

    def _check_kind(self) -> None:
        """A kind that its schedule cannot sample is refused before training, not after."""
        kind, name, schedule = self.objective.kind, self.path.schedule, self.path.build()
        if kind in MEAN_VELOCITY_KINDS and not isinstance(schedule, MeanVelocity):
            raise ValueError(f"objective.kind='{kind}' belongs to mean-velocity; on path.schedule='{name}' use flow")
        if kind in NOISE_KINDS and float(schedule.alpha(schedule.end)) == 0:
            raise ValueError(
                f"objective.kind='{kind}' gives no x0 where sampling starts on path.schedule='{name}', as "
                "alpha = 0 there; use another kind, or variance-preserving"
            )

    def _check_objective(self) -> None:
        law, objective = self.path.law, self.objective
        if objective.weight == "likelihood" and (law.name != "uniform" or not law.t_min):
            raise ValueError(
                f"objective.weight='likelihood' is for uniform t cut off near 0, not for path.law.name='{law.name}' "
                f"with path.law.t_min={law.t_min}; use uniform from 1e-5, or its equal: weight noise, law lam-uniform"
            )
        if not objective.conditional and self.sample.cfg != 1:
            raise ValueError(
                f"sample.cfg={self.sample.cfg}: objective.label_drop=1 trains no classes to guide to; use cfg 1"
            )

    def _check_best(self) -> None:
        every, save = self.preview.every, self.train.save_every
        if self.train.keep_best and (not every or save % every):
            raise ValueError(
                f"train.keep_best judges checkpoints by previews: preview.every={every} must divide "
                f"train.save_every={save}"
            )


C = TypeVar("C")
NUMBERS = tuple[float, ...]  # a list of numbers in TOML, "a,b" on the command line


def _checked(option: str, value: Any, kind: type) -> Any:
    """Return value as `kind`; int counts as float, one number as a list of one, nothing else is bent."""
    if kind == NUMBERS:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_checked(option, item, float) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{option}={value!r} must be of type {kind.__name__}")
    return value


def from_dict(cls: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """Return a dataclass from nested mappings; an unknown key is an error with the nearest valid one."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'a recipe'} must be a table of options; got {values!r}")
    kinds = get_type_hints(cls)
    built: dict[str, Any] = {}
    for key, value in values.items():
        if key not in kinds:
            raise ValueError(f"unknown key '{where}{key}'{nearest(key, kinds)}; allowed: {', '.join(kinds)}")
        if is_dataclass(kinds[key]):
            built[key] = from_dict(kinds[key], _checked(f"{where}{key}", value, dict), f"{where}{key}.")
        else:
            built[key] = _checked(f"{where}{key}", value, kinds[key])
    return cls(**built)


def to_json(recipe: Recipe) -> str:
    """Return the recipe as JSON, every default written out."""
    return json.dumps(asdict(recipe), indent=2) + "\n"


def options(config: Any, where: str = "") -> dict[str, Any]:
    """Return every leaf option of a (nested) dataclass by its dotted name."""
    found: dict[str, Any] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            found |= options(value, f"{where}{entry.name}.")
        else:
            found[f"{where}{entry.name}"] = value
    return found


_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(option: str, text: str, kind: type) -> Any:
    """Return text as the option's type; 1e3 is a whole number, 'true' a bool, 'a,b' a list of numbers."""
    if kind is tuple:
        return tuple(parse(option, part, float) for part in text.split(",") if part.strip())
    try:
        if kind is bool:
            return _TRUTH[text.lower()]
        if kind is int and "e" in text.lower() and float(text).is_integer():
            return int(float(text))
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"--{option} {text}: a value of type {kind.__name__} is needed") from None


def override(recipe: Recipe, changes: Mapping[str, str]) -> Recipe:
    """Return the recipe with dotted options changed, e.g. {"train.lr": "3e-4"}; they are judged together."""
    known = options(recipe)
    values = asdict(recipe)
    for name, text in changes.items():
        if name not in known:
            raise ValueError(f"unknown option '--{name}'{nearest(name, known)}; see: mvm recipes NAME")
        *sections, last = name.split(".")
        table = values
        for section in sections:
            table = table[section]
        table[last] = parse(name, text, type(known[name]))
    return from_dict(Recipe, values)


def shipped() -> dict[str, str]:
    """Return the recipes in the package: name -> TOML text."""
    found = (entry for entry in files("mvm.recipes").iterdir() if entry.name.endswith(".toml"))
    return dict(sorted((entry.name.removesuffix(".toml"), entry.read_text(encoding="utf-8")) for entry in found))


def load_recipe(name_or_file: str) -> Recipe:
    """Return a shipped recipe by name, or one read from a .toml or .json file."""
    path = Path(name_or_file)
    if path.suffix in (".toml", ".json"):
        if not path.is_file():
            raise ValueError(f"recipe file {path} does not exist")
        return parse_recipe(path.read_text(encoding="utf-8"), path.suffix, str(path))
    return parse_recipe(choose("recipe", name_or_file, shipped()), ".toml", name_or_file)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of both, option by option; `above` wins."""
    both = {key for key in above if isinstance(above[key], dict) and isinstance(below.get(key), dict)}
    return {**below, **above, **{key: _merged(below[key], above[key]) for key in both}}


def _with_base(values: dict[str, Any], seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a recipe's tables on top of those of the shipped recipe it names as `base`, and so on."""
    base = values.pop(BASE, None)
    if base is None:
        return values
    if base in seen:
        raise ValueError(f"{BASE}='{base}': these recipes stand on each other: {', '.join(seen)}")
    below = tomllib.loads(choose(BASE, _checked(BASE, base, str), shipped()))
    return _merged(_with_base(below, (*seen, base)), values)


def parse_recipe(text: str, suffix: str, source: str) -> Recipe:
    """Return the recipe in TOML or JSON text; errors name the source. TOML may name a shipped recipe as its base."""
    try:
        return from_dict(Recipe, _with_base(tomllib.loads(text)) if suffix == ".toml" else json.loads(text))
    except (ValueError, TypeError) as error:  # TOML and JSON errors are ValueErrors
        raise ValueError(f"{source}: {error}") from None
