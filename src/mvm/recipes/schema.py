"""Recipes: frozen dataclasses from TOML, to JSON in the run directory; unknown keys are errors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from mvm.data import AUGMENT_SIZE, DATA_SETS
from mvm.distributed.processes import EngineConfig
from mvm.latent import DecoderConfig, EncoderConfig
from mvm.latent.rae import decoder_cost
from mvm.network import ConditionConfig, DiTConfig, OwnConfig, multiply_adds
from mvm.network.own import OWN
from mvm.objective import ObjectiveConfig, RepaConfig
from mvm.objective.reconstruction import ReconstructionConfig
from mvm.optim.optimizers import TrainConfig
from mvm.options import at_least, check
from mvm.path import MEAN_VELOCITY_KINDS, NOISE_KINDS, MeanVelocity, Schedule, TimeLaw, schedule_named
from mvm.settings import SampleConfig

RECIPE = "recipe.json"  # in a run directory
TASK = "task"  # in a recipe: what is trained; without it a field
DECODER = "decoder"  # the task of stage 1: the decoder of a frozen encoder, together a representation autoencoder
FOLDER = "folder"  # data.name of a prepared folder that the catalogue does not know
MOST_CLASSES = 1 << 20  # each has a name and a row of the network's table
OWN_DATA = "own"  # data.name of a dataset given in Python, of which a recipe has the shape alone


@dataclass(frozen=True)
class DataConfig:
    """Training samples, images or arrays: a data set known by name, or any prepared folder."""

    name: str = "digits"
    """Data set; "folder" is any folder written by `mvm data prepare`, named by data.path.
    One of: digits, cifar10, imagenet32, imagenet256, imagenet512, imagenette, folder."""
    path: str = ""
    """Folder of prepared images, as written by `mvm data prepare`; empty: data/NAME."""
    mirror: bool = False
    """Flip half of the training images left to right, at random."""
    augment: float = 0.0
    """Probability of each of five augmentations (up-down flip, size, rotation, stretch, translation).
    The network receives which were applied, so samples show none. 0: no augmentation."""
    channels: int = 0
    """Channels of a sample: 3 for colour, 1 for grey. For data.name "folder" only; 0: read from the folder."""
    size: int = 0
    """Side of square images in pixels, set by `mvm data prepare --size`. For data.name "folder" only; 0: read from the
    folder."""
    space: tuple[int, ...] = ()
    """Size along each axis except the channels, e.g. 32,64 for height and width, or 1024 for a signal. For data.name
    "folder" only; empty: data.size by data.size, or read from the folder."""
    values: str = "uint8"
    """What the samples are: uint8 images, or float arrays. One of: uint8, float."""
    classes: int = 0
    """Number of classes. For data.name "folder" only; 0: read from the folder."""
    names: tuple[str, ...] = ()
    """Class names. For data.name "folder" and data sets whose classes have no names; empty: read from the folder."""

    def __post_init__(self) -> None:
        check("data", self, values=("uint8", "float"))
        if self.name == OWN_DATA:
            for option in ("path", "mirror", "augment", "size"):
                if value := getattr(self, option):
                    raise ValueError(f"data.{option}={value} is not for a dataset in Python, which does that itself")
            return
        check("data", self, name=(*DATA_SETS, FOLDER), augment=(0, 1), channels=0, size=0, classes=(0, MOST_CLASSES))
        for option in ("channels", "size", "space", "classes"):
            if self.name != FOLDER and getattr(self, option):
                raise ValueError(f"data.{option} belongs to data.name='{FOLDER}'; '{self.name}' is known")
        if self.values == "float" and self.name != FOLDER:
            raise ValueError(f"data.values='float' belongs to data.name='{FOLDER}'; '{self.name}' has uint8 images")
        space = ",".join(map(str, self.space))
        if any(extent < 1 for extent in self.space):
            raise ValueError(f"data.space={space} must be positive, one extent for each axis")
        if self.size and self.space and self.space != (self.size, self.size):
            raise ValueError(f"data.size={self.size} is the side of squares, and data.space={space}; leave size out")
        known = DATA_SETS.get(self.name)
        named = self.name == FOLDER or (known is not None and known.unnamed)
        if self.names and not (named and len(self.names) == (self.classes if known is None else len(known.classes))):
            raise ValueError(
                f"data.names has {len(self.names)} names, data.classes={self.classes}; leave both out: they are read "
                f"from data.path (data.name='{FOLDER}')"
            )
        if self.path and self.name != FOLDER and DATA_SETS[self.name].load is not None:
            raise ValueError(f"data.path={self.path}: '{self.name}' is in the package; give --data.name {FOLDER} too")
        if self.name == FOLDER and not self.path:
            raise ValueError(f"data.name='{FOLDER}' needs data.path, a folder written by: mvm data prepare")

    @property
    def folder(self) -> Path:
        """Where the prepared images are looked for."""
        if self.name == OWN_DATA:
            raise ValueError(
                "data.name='own' is a dataset that was given in Python; give it again: mvm.train(network, dataset, run)"
            )
        return Path(self.path or f"data/{self.name}")

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image, (C, *space) of any sample."""
        if self.name == OWN_DATA:
            return (self.channels, *self.space)
        if self.name != FOLDER:
            return DATA_SETS[self.name].shape
        return (self.channels, *(self.space or (self.size, self.size)))

    @property
    def class_names(self) -> tuple[str, ...]:
        if self.name in (FOLDER, OWN_DATA):
            return self.names or tuple(map(str, range(self.classes)))
        return self.names or DATA_SETS[self.name].classes

    @property
    def square(self) -> bool:
        """Whether samples are square uint8 images, also while the folder is not opened yet."""
        space = self.shape[1:]
        return self.values == "uint8" and len(space) == 2 and space[0] == space[1]

    @property
    def pictured(self) -> bool:
        """Whether samples are uint8 images, square or not, of grey levels or colours."""
        return self.values == "uint8" and len(self.shape) == 3 and self.shape[0] in (1, 3)

    def require_square(self, option: str) -> None:
        """Refuse an option that is for square uint8 images alone."""
        if not self.square:
            shape = "x".join(map(str, self.shape))
            raise ValueError(f"{option} is for square images, and the data are {shape} {self.values}; leave it out")


@dataclass(frozen=True)
class CodecConfig:
    """What is diffused: pixels, or the latents of a representation autoencoder (rae) or a VAE."""

    kind: str = "pixels"
    """Space in which the model is trained: pixels, latents of a representation autoencoder, or of a VAE.
    One of: pixels, rae, vae."""
    path: str = ""
    """Folder of the autoencoder: RUN/rae of a stage 1 training, or a VAE (AutoencoderKL) in diffusers' format."""
    encoder: str = ""
    """Folder or file with the weights of the autoencoder's encoder; empty: where they were in stage 1."""
    channels: int = 0
    """Channels of a latent, as the autoencoder has them; 0 for pixels."""
    side: int = 0
    """Height and width of a latent, as the autoencoder has them; 0 for pixels."""
    posterior: str = "mean"
    """Latent that a VAE gives an image: the posterior's mean, or a random draw that is fixed for each image. One of:
    mean, draw."""
    cache: str = "device"
    """Where the latents of the training set are kept; none encodes the images at every step.
    One of: device, disk, none."""
    latents: str = ""
    """Folder in which the encoded latents are stored; empty: beside the data. Unused with codec.cache none."""
    scale: float = 1.0
    """Scale of the data: pixels lie in [-scale, scale], float arrays are divided by it. Timesteps are drawn for scaled
    pixels: for equal noise on an image, lower path.law.mean by log(scale)."""

    def __post_init__(self) -> None:
        check(
            "codec", self, kind=("pixels", "rae", "vae"), posterior=("mean", "draw"), cache=("device", "disk", "none")
        )
        least = 0 if self.kind == "pixels" else 1
        check("codec", self, channels=least, side=least, scale=(0.01, 100))
        if self.kind != "pixels" and self.scale != 1:
            raise ValueError(f"codec.scale={self.scale} is for pixels; latents have the scale of their statistics")


@dataclass(frozen=True)
class PathConfig:
    """Noise schedule."""

    schedule: str = "mean-velocity"
    """Noise schedule: alpha and sigma of x_t = alpha x0 + sigma eps.
    One of: mean-velocity, linear-flow, variance-preserving."""
    T: float = 1.0
    """End time T of the mean-velocity path. It rescales t, and u by 1/sqrt(T); signal-to-noise ratios do not change."""
    law: TimeLaw = field(default_factory=TimeLaw)

    def __post_init__(self) -> None:
        try:
            schedule = self.build()
        except ValueError as error:  # it begins with the option
            raise ValueError(f"path.{error}") from None
        self.law.require(schedule)

    def build(self) -> Schedule:
        return schedule_named(self.schedule, self.T)


@dataclass(frozen=True)
class PreviewConfig:
    """Previews during training: images sampled with the averaged weights, and a cheap metric."""

    every: int = 0
    """Steps between previews; 0: none."""
    grid: int = 64
    """Number of images in the grid of a preview."""
    count: int = 1024
    """Number of images for a preview's metric, fd_pixels: a Frechet distance of downscaled pixels (not FID). For a
    decoder: largest number of held-out images that it restores."""

    def __post_init__(self) -> None:
        check("preview", self, every=0, grid=1, count=max(2, self.grid))  # a covariance needs two


def require_previews(train: TrainConfig, preview: PreviewConfig) -> None:
    """Refuse train.keep_best where a checkpoint has no preview to judge it by."""
    if train.keep_best and (not preview.every or train.save_every % preview.every):
        raise ValueError(
            f"train.keep_best judges checkpoints by previews: preview.every={preview.every} must divide "
            f"train.save_every={train.save_every}"
        )


@dataclass(frozen=True)
class BaseRecipe(ABC):
    """What recipes of every task begin with; all have the tables train, engine and preview too, after their own."""

    task: ClassVar[str]
    name: str = "unnamed"
    """Name of the recipe; a run is written to runs/NAME unless --out says otherwise."""
    description: str = ""
    """One line on what the recipe trains, shown by `mvm recipes`."""
    seed: int = 0
    """Seed of weights, data order and noise."""
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)

    @property
    @abstractmethod
    def multiply_adds(self) -> int:
        """Multiply-adds of one image's forward pass through what is trained."""

    @abstractmethod
    def usage(self, run: str, done: bool) -> str:
        """Return what can be done with a run now, "" for nothing; run: its folder, done: after the last step."""


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """Everything that decides a run."""

    task: ClassVar[str] = "field"
    codec: CodecConfig = field(default_factory=CodecConfig)
    path: PathConfig = field(default_factory=PathConfig)
    condition: ConditionConfig = field(default_factory=ConditionConfig)
    network: DiTConfig | OwnConfig = field(default_factory=DiTConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    repa: RepaConfig = field(default_factory=RepaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_objective()
        self._check_data()
        if isinstance(self.network, OwnConfig):
            self._check_own()
        self.require_guidance("sample.cfg", self.sample.cfg)
        if self.sample.auto_scale != 1:
            raise ValueError(
                f"sample.auto_scale={self.sample.auto_scale}: a recipe names no weaker model; leave it at 1, and give "
                "--auto RUN --auto-scale to what samples"
            )
        self.repa.tap(self.network.dimensions[0])  # refuses a block that is not there
        require_previews(self.train, self.preview)

    def _check_objective(self) -> None:
        """An objective that this schedule cannot sample, or these times not weight, is refused before training."""
        kind, name, schedule = self.objective.kind, self.path.schedule, self.path.build()
        if kind in MEAN_VELOCITY_KINDS and not isinstance(schedule, MeanVelocity):
            raise ValueError(f"objective.kind='{kind}' belongs to mean-velocity; on path.schedule='{name}' use flow")
        if kind in NOISE_KINDS and float(schedule.alpha(schedule.end)) == 0:
            raise ValueError(
                f"objective.kind='{kind}' gives no x0 where sampling starts on path.schedule='{name}', as "
                "alpha = 0 there; use another kind, or variance-preserving"
            )
        if self.network.time == "step" and name != "variance-preserving":
            raise ValueError(f"network.time='step' is of path.schedule='variance-preserving', not '{name}'; use level")
        law = self.path.law
        if self.objective.weight == "likelihood" and (law.name != "uniform" or not law.t_min):
            raise ValueError(
                f"objective.weight='likelihood' is for uniform t cut off near 0, not for path.law.name='{law.name}' "
                f"with path.law.t_min={law.t_min}; use uniform from 1e-5, or its equal: weight noise, law lam-uniform"
            )

    def require_guidance(self, option: str, scale: float) -> None:
        """Refuse classifier-free guidance of a network that has never seen what it goes between."""
        if scale != 1 and self.condition.kind == "none":
            raise ValueError(f"{option}={scale}: condition.kind='none' leaves nothing to guide to; use cfg 1")
        self.objective.require_guidance(option, scale)

    def _check_data(self) -> None:
        """Refuse what is for square pixels with other data, and what does not see, or has no input for, warped ones."""
        data, codec, condition = self.data, self.codec.kind, f"condition.kind='{self.condition.kind}'"
        if self.condition.kind == "image":
            if codec != "pixels":
                raise ValueError(f"{condition} has the space of samples, and codec.kind='{codec}' makes latents")
            if data.mirror or data.augment:
                option = "data.mirror" if data.mirror else "data.augment"
                raise ValueError(f"{condition} would stay as it is under {option}; leave one of the two out")
        if data.name == OWN_DATA and codec != "pixels":
            raise ValueError(f"codec.kind='{codec}' reads prepared images; give latents as the samples of the dataset")
        for option, wanted in {
            "codec.kind='rae'": codec == "rae",
            "repa.encoder": self.repa.encoder,
            "data.augment": data.augment,
        }.items():
            if wanted:
                data.require_square(option)
        if data.augment:
            augment = f"data.augment={data.augment}"
            if codec != "pixels":
                raise ValueError(f"{augment} warps pixels, and codec.kind='{codec}' has latents; set it to 0")
            if self.repa.encoder:
                raise ValueError(f"{augment}: repa.encoder's features are of plain images; leave one of the two out")
            if self.network.kind != "dit":
                raise ValueError(f"{augment} is for network.kind='dit'; a {self.network.kind} has no input for it")

    def _check_own(self) -> None:
        """Refuse what needs a DiT or DDT with a network of the user's own."""
        for option in ("repa.encoder", "engine.recompute", "engine.kernels", "engine.fp8", "sample.share"):
            table, _, name = option.partition(".")
            if (value := getattr(getattr(self, table), name)) and value != "off":
                raise ValueError(f"{option}={value} is for network.kind dit or ddt, not for a network of your own")

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """(C, *space) of what the path works on: (C, H, W) of images."""
        codec = self.codec
        return self.data.shape if codec.kind == "pixels" else (codec.channels, codec.side, codec.side)

    @property
    def blueprint(self) -> tuple[DiTConfig | OwnConfig, tuple[int, ...], int, int, ConditionConfig]:
        """What build_network takes: network config, sample shape, number of classes, augment_size, condition."""
        augment_size = AUGMENT_SIZE if self.data.augment else 0
        return self.network, self.sample_shape, len(self.data.class_names), augment_size, self.condition

    @property
    def multiply_adds(self) -> int:
        if isinstance(self.network, OwnConfig):
            return 0  # not known
        return multiply_adds(self.network, self.sample_shape, len(self.data.class_names), self.condition)

    def usage(self, run: str, done: bool) -> str:
        own = ""
        if isinstance(self.network, OwnConfig):
            own = f" --network {'module:PACKAGE.MODULE:CLASS' if self.network.kind == OWN else self.network.kind}"
        return f"sample: mvm sample {run}{own} --out {'samples.npy' if self.data.values == 'float' else 'grid.png'}"


@dataclass(frozen=True)
class HeldOutConfig:
    """Held-out images, restored by previews and never trained on."""

    count: int = 0
    """Number of held-out images, chosen by the seed and spread evenly over the classes. 0: none."""

    def __post_init__(self) -> None:
        at_least("held_out.count", self.count, 0)


@dataclass(frozen=True)
class DecoderRecipe(BaseRecipe):
    """Everything that decides a run of stage 1."""

    task: str = DECODER  # ty: ignore[incompatible-attribute-override]  # a field, the first: JSON begins with it
    """What is trained: the decoder of a representation autoencoder."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    reconstruction: ReconstructionConfig = field(default_factory=ReconstructionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task != DECODER:
            raise ValueError(f"task='{self.task}': this is a recipe of task '{DECODER}'")
        if self.preview.every and not self.held_out.count:
            raise ValueError(
                f"preview.every={self.preview.every} restores held-out images, and held_out.count=0: "
                "hold some out, or set preview.every to 0"
            )
        self.data.require_square(f"task='{DECODER}'")
        require_previews(self.train, self.preview)
        engine, needs_last = self.engine, "the adversarial weight needs the gradient of their last layer alone"
        for option, value, wrong, why in (  # what is made for the networks of stage 2 alone is refused, not ignored
            ("data.augment", self.data.augment, self.data.augment, "which have no input for it; set it to 0"),
            ("engine.parallel", "'fsdp'", engine.parallel == "fsdp", "which fit one GPU; use ddp"),
            ("engine.compile", repr(engine.compile), engine.compile in ("full", "graph"), f"{needs_last}; use blocks"),
            ("engine.recompute", engine.recompute, engine.recompute, "leave it at 0"),
            ("engine.kernels", engine.kernels, engine.kernels, "leave it at False"),
            ("engine.fp8", repr(engine.fp8), engine.fp8 != "off", "leave it off"),
        ):
            if wrong:
                raise ValueError(f"{option}={value} is not for decoders: {why}")

    @property
    def side(self) -> int:
        """Latents a side, as the images and the decoder's patch say; 0 while the data's folder is not opened."""
        return self.data.shape[-1] // self.decoder.patch

    @property
    def multiply_adds(self) -> int:
        """Of the decoder alone, without the frozen networks around it."""
        return decoder_cost(self.decoder, self.side).multiply_adds

    def usage(self, run: str, done: bool) -> str:
        return f"the autoencoder is {run}/rae: --codec.kind rae --codec.path {run}/rae" if done else ""
