"""Recipes: frozen dataclasses from TOML, to JSON in the run directory; unknown keys are errors."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from mvm.data import DATA_SETS, TOLD
from mvm.network import DiTConfig
from mvm.objective import ObjectiveConfig, RepaConfig
from mvm.options import at_least, between, choose, finite
from mvm.path import MEAN_VELOCITY_KINDS, NOISE_KINDS, SCHEDULES, MeanVelocity, Schedule, TimeLaw, schedule_named
from mvm.solver import (
    DEFAULT_NFE,
    DEFAULT_T_MIN,
    MAX_RHO,
    SOLVERS,
    Adaptive,
    ClassifierFree,
    Guidance,
    Internal,
    Interval,
    LamGrid,
    PredictorCorrector,
    Solver,
    solver_named,
)
from mvm.training.optim import TrainConfig
from mvm.training.runtime import EngineConfig

RECIPE = "recipe.json"  # in a run directory
FOLDER = "folder"  # data.name of a prepared folder that the catalogue does not know


@dataclass(frozen=True)
class DataConfig:
    """Which images: a set known by name, or any prepared folder (name "folder").

    path: what `mvm data prepare` wrote; default data/NAME. mirror: half of the images are shown flipped left to
    right. augment: the probability of each of five warps, of which the network is told, so that samples have none.
    channels, size, classes and names (of the classes) belong to a "folder" and are read from it when a run starts.
    """

    name: str = "digits"
    path: str = ""
    mirror: bool = False
    augment: float = 0.0
    channels: int = 0
    size: int = 0
    classes: int = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choose("data.name", self.name, {**DATA_SETS, FOLDER: None})
        between("data.augment", self.augment, 0, 1)
        for option in ("channels", "size", "classes"):
            at_least(f"data.{option}", getattr(self, option), 0)
            if self.name != FOLDER and getattr(self, option):
                raise ValueError(f"data.{option} belongs to data.name='{FOLDER}'; '{self.name}' is known")
        if self.names and (self.name != FOLDER or len(self.names) != self.classes):
            raise ValueError(
                f"data.names has {len(self.names)} names, data.classes={self.classes}; leave both out: they are read "
                f"from data.path (data.name='{FOLDER}')"
            )
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
        if self.name != FOLDER:
            return DATA_SETS[self.name].classes
        return self.names or tuple(map(str, range(self.classes)))


@dataclass(frozen=True)
class CodecConfig:
    """Between images and what the path works on: pixels, or the latents of a representation autoencoder (rae).

    path: the autoencoder, as stage 1 wrote it. encoder: where its encoder's weights lie now, if elsewhere than then.
    channels, side: of a latent; they must be the autoencoder's. cache: where the latents of the data are kept:
    device, disk, or none (encoded every step); latents: the folder, by default beside the data. scale: pixels lie in
    [-scale, scale]. A law of log-SNR is then one of scaled pixels: log(scale) lower for the same noise on an image.
    """

    kind: str = "pixels"
    path: str = ""
    encoder: str = ""
    channels: int = 0
    side: int = 0
    cache: str = "device"
    latents: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        choose("codec.kind", self.kind, dict.fromkeys(("pixels", "rae")))
        choose("codec.cache", self.cache, dict.fromkeys(("device", "disk", "none")))
        for option in ("channels", "side"):
            at_least(f"codec.{option}", getattr(self, option), 1 if self.kind == "rae" else 0)
        between("codec.scale", self.scale, 0.01, 100)
        if self.kind == "rae" and self.scale != 1:
            raise ValueError(f"codec.scale={self.scale} is for pixels; latents have the scale of their statistics")


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


def _lam_grid(solver: Solver | Adaptive) -> LamGrid | None:
    """Return the grid of a solver whose last time can be chosen; None of any other."""
    return solver.grid if isinstance(solver, PredictorCorrector) and isinstance(solver.grid, LamGrid) else None


@dataclass(frozen=True)
class SampleConfig:
    """How to sample, unless told otherwise.

    cfg = 1 is no classifier-free guidance, internal = 1 none by the inner head; low and high bound both in log-SNR
    progress. share: part of the evaluations that take a DDT's backbone from an earlier one. tolerance is for adaptive
    and dopri5, which take it in place of nfe. t_min: the last time that sa evaluates; the others have none to choose.
    """

    solver: str = "adams"
    nfe: int = DEFAULT_NFE
    rho: float = 0.0
    cfg: float = 1.0
    low: float = 0.0
    high: float = 1.0
    tolerance: float = 1e-5
    internal: float = 1.0
    share: float = 0.0
    t_min: float = DEFAULT_T_MIN

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share={self.share} is out of range; it must be at least 0 and less than 1")
        if self.share and self.takes_tolerance:
            raise ValueError(f"share={self.share} needs a fixed number of evaluations; '{self.solver}' is adaptive")
        choose("solver", self.solver, SOLVERS)
        at_least("nfe", self.nfe, 1)
        between("rho", self.rho, 0, MAX_RHO)
        for name in ("cfg", "internal"):
            finite(name, getattr(self, name))
        self.guidance()
        self.build_solver()

    def build_solver(self) -> Solver | Adaptive:
        """Return the solver."""
        solver = solver_named(self.solver)
        if isinstance(solver, Adaptive):
            return replace(solver, rtol=self.tolerance, atol=self.tolerance)
        grid = _lam_grid(solver)
        return solver if grid is None else replace(solver, grid=replace(grid, t_min=self.t_min))

    @property
    def solver_told(self) -> str:
        """The solver with its times, variable and orders, for records: these defaults may change, names do not."""
        return repr(self.build_solver())

    @property
    def takes_tolerance(self) -> bool:
        """Whether the solver goes by tolerance and reports its nfe, instead of being given one."""
        return isinstance(self.build_solver(), Adaptive)

    @property
    def takes_t_min(self) -> bool:
        """Whether the solver's last time can be chosen."""
        return _lam_grid(self.build_solver()) is not None

    @property
    def guided(self) -> bool:
        """Whether anything guides, so that the interval has a meaning."""
        return self.cfg != 1 or self.internal != 1

    def guidance(self) -> tuple[Guidance, ...]:
        """Return the rules of guidance, the inner head's innermost; none at scale 1."""
        interval = Interval(self.low, self.high)
        inner = (Internal(self.internal, interval=interval),) if self.internal != 1 else ()
        return (*inner, ClassifierFree(self.cfg, interval=interval)) if self.cfg != 1 else inner


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
    codec: CodecConfig = field(default_factory=CodecConfig)
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
        self._check_augment()
        if self.train.optimizer == "muon" and self.engine.parallel == "fsdp":
            raise ValueError(
                "train.optimizer='muon' orthogonalises whole matrices, which engine.parallel='fsdp' spreads; "
                "use ddp, or train.optimizer='adamw'"
            )

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the path works on."""
        codec = self.codec
        return self.data.shape if codec.kind == "pixels" else (codec.channels, codec.side, codec.side)

    @property
    def blueprint(self) -> tuple[DiTConfig, tuple[int, int, int], int, int]:
        """What build_network and parameters ask for: shape, sample, classes, numbers that tell of augmentation."""
        told = TOLD if self.data.augment else 0
        return self.network, self.sample_shape, len(self.data.class_names), told

    def _check_augment(self) -> None:
        """What does not see the warped images, or cannot be told of them, is refused."""
        if not self.data.augment:
            return
        said = f"data.augment={self.data.augment}"
        if self.codec.kind != "pixels":
            raise ValueError(f"{said} warps pixels, and codec.kind='{self.codec.kind}' has latents; set it to 0")
        if self.repa.encoder:
            raise ValueError(f"{said}: repa.encoder's features are of images as they are; leave one of the two away")
        if self.network.kind != "dit":
            raise ValueError(f"{said} is for network.kind='dit'; a {self.network.kind} cannot be told of it")

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
        objective.require_guidance("sample.cfg", self.sample.cfg)

    def _check_best(self) -> None:
        every, save = self.preview.every, self.train.save_every
        if self.train.keep_best and (not every or save % every):
            raise ValueError(
                f"train.keep_best judges checkpoints by previews: preview.every={every} must divide "
                f"train.save_every={save}"
            )
