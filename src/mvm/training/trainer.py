"""What the loop asks of a training, and what every training has in common.

A step is Trainer.advance > learn > Engine (precision, compilation, processes) > the network and its loss. FieldTrainer
trains the network of a field, DecoderTrainer the decoder of an autoencoder; the loop does not know which.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mvm import checkpoint
from mvm.checkpoint import Weights
from mvm.data import Order, Store
from mvm.distributed.processes import Processes, parts_of
from mvm.distributed.sharding import SharedFile, like_parameter, whole
from mvm.latent import RAE
from mvm.model import Model
from mvm.objective import Loss
from mvm.optim.ema import Averages, power_name
from mvm.optim.optimizers import learning_rate, set_rate, step_unless
from mvm.published import Opened
from mvm.recipes import OWN_DATA, AnyRecipe
from mvm.training.engine import Engine
from mvm.training.logs import StepRecord, Window, warn
from mvm.training.preview import Preview

Write = Callable[[Path], None]  # of a state into a run directory, by the main process, whenever there is time
Figures = dict[str, Tensor]
R = TypeVar("R", bound=AnyRecipe)


class Trainer(ABC, Generic[R]):
    """A training in memory: networks, optimizers, averages, and the number of steps done.

    Everything in it is a function of (recipe, step). Under several processes all of them must call each method.
    """

    engine: Engine
    optimizers: list[Optimizer]
    averages: Averages  # of the network that is trained, and sampled from

    def __init__(self, recipe: R, store: Store, processes: Processes | None = None, held_out: int = 0) -> None:
        """held_out: how many of the images are not trained on."""
        self.recipe, self.store, self.step = recipe, store, 0
        self.processes = processes or Processes()
        self.order = Order(len(store) - held_out, recipe.seed)
        self.mine = self.processes.share(recipe.train.batch)
        self.window = Window()
        self.between_steps = True  # False while a step is under way: such a state must not be saved
        self.unread: list[tuple[int, float, Figures]] = []  # steps whose figures are still on the device
        self.at_once: Callable[[], AbstractContextManager[None]] = nullcontext  # around what a signal may cut short
        self.on_part: Callable[[int, int], None] = lambda done, parts: None  # after each part of an accumulated step

    # ---- what a concrete trainer says

    @classmethod
    def open(cls, recipe: R, store: Store, run: Path, processes: Processes, progress: bool, network: Any) -> Self:
        """Return the trainer of a recipe at step 0; network: of the user's own, for a recipe of one."""
        return cls(recipe, store, processes)

    @abstractmethod
    def batch(self) -> Any:
        """Return this process's batch of the current step: a pure function of (seed, step)."""

    @abstractmethod
    def learn(self, rate: float) -> Figures:
        """Do the forward and backward passes and the optimizers' updates of a step; return its figures.

        One of them is grad_norm; the others are this process's share of means over the global batch.
        """

    @abstractmethod
    def named(self) -> dict[str, nn.Parameter]:
        """Return all that learns, by the names that checkpoints use."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the trained weights from whole tensors; those that do not fit are refused."""

    @property
    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """What a checkpoint records of the frozen networks that it was trained with."""

    @abstractmethod
    def require_provenance(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that was trained with other frozen networks."""

    def keep_codec(self, run: Path) -> None:
        """Write what samples are decoded by into the run, which then needs nothing from elsewhere to be sampled."""

    @abstractmethod
    def preview(self, folder: Path) -> Preview:
        """Return what looks at the averaged weights while they are trained, and writes its pictures to the folder."""

    @abstractmethod
    def result(self, run: Path, progress: bool) -> Model | RAE:
        """Return what was trained, with the averaged weights, whole in every process."""

    # ---- data

    def positions(self, step: int) -> Tensor:
        """Return the positions in the stream that this process consumes in step `step`."""
        return self.order.positions(step, self.recipe.train.batch)[self.mine]

    def indices(self, positions: Tensor) -> Tensor:
        """Return the index in the data of what is at these positions of the stream."""
        return self.order.indices(positions)

    def images(self, indices: Tensor) -> tuple[Tensor, Any]:
        """Return samples and their conditions on the device; those of the next step are read meanwhile."""
        images = self.store.gather(indices)
        following = self.positions(self.step + 1)
        self.store.expect(lambda: self.indices(following))
        return images

    # ---- a step

    def advance(self) -> None:
        """Do one step: forward, backward, clip, optimizer, averages.

        A gradient that is not finite leaves weights and optimizer as they are; step, rate and data order go on.
        """
        rate = learning_rate(self.recipe.train, self.step)
        figures = self.learn(rate)
        self.averages.update(self.step)
        self.step += 1
        self.unread.append((self.step, rate, figures))
        self.between_steps = True

    def accumulate(
        self, optimizers: Sequence[Optimizer], batch: Any, loss_of: Callable[[Any], Loss], summed: bool = False
    ) -> Figures:
        """Leave the gradient of the global batch's mean loss, part by part; return this process's share of the figures.

        summed: gradients are summed over the processes afterwards; else the engine takes their mean.
        """
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        figures: Figures = {}
        scale = 1 if summed else self.processes.world
        cuts = list(parts_of(len(batch.seeds), self.recipe.engine.accumulate))
        for number, cut in enumerate(cuts, start=1):
            part = batch.cut(cut)
            share = len(part.seeds) / self.recipe.train.batch
            with self.engine.gradients_stay(number < len(cuts)):
                loss = loss_of(part)
                (loss.total * share * scale).backward()
            for name, value in loss.parts.items():
                figures[name] = figures.get(name, 0) + share * value
            self.on_part(number, len(cuts))
        return figures

    def update(
        self, optimizers: Sequence[Optimizer], learned: nn.Module, rate: float, other_norm: Tensor | float = 0.0
    ) -> Tensor:
        """Clip the gradient of what is learned and step; return its norm.

        Unless that and the other norm are finite, weights and optimizers stay as they are.
        """
        self.between_steps = False
        norm = whole(nn.utils.clip_grad_norm_(learned.parameters(), self.recipe.train.clip or math.inf, foreach=True))
        bad = ~torch.isfinite(norm + other_norm)
        for optimizer in optimizers:
            set_rate(optimizer, rate)
            step_unless(optimizer, bad)
        return norm

    def read(self) -> list[StepRecord]:
        """Return the figures of the steps since the last reading: one wait for the device, whatever their number."""
        unread, self.unread = self.unread, []
        records = []
        for step, rate, figures in unread:
            norm = figures.pop("grad_norm")  # every process's
            sums = self.processes.sum(torch.stack([value.float() for value in figures.values()])).tolist()
            values = dict(zip(figures, sums, strict=True)) | {"grad_norm": float(norm), "lr": rate}
            records.append(StepRecord(step, values))
        return records

    # ---- its state

    def state(self) -> dict[str, Iterable[tuple[str, Tensor]]]:
        """Return everything that a checkpoint holds: its files, each with tensors by name, which may be sharded."""
        return {
            "model": self.averages.network.named_parameters(),
            **{name: self.averages.parts(name) for name in self.averages.profiles},
            "optimizer": self.optimizer_state(),
        }

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizers' moments and counters as NAME/KEY."""
        for name, parameter in self.named().items():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{name}/{key}", value

    def snapshot(self, quality: float | None = None) -> Write | None:
        """Return a function that writes the state of this moment as a checkpoint, and removes older ones.

        None in all processes but the main one.
        """
        state: dict[str, Weights] = {}  # on the CPU, apart from what the next steps change
        for file, tensors in self.state().items():
            state[file] = {}
            for name, value in tensors:
                tensor = whole(value)  # one at a time on the device: all would need the memory that sharding saves
                if self.processes.main:
                    state[file][name] = tensor.to("cpu", copy=True)
        if not self.processes.main:
            return None
        step, train = self.step, self.recipe.train
        facts = {"step": step, "recipe": self.recipe.name, "window": asdict(self.window), "data": self.store.stamp}
        facts |= self.provenance | ({} if quality is None else {"quality": quality})

        def write(run: Path) -> None:
            checkpoint.save(checkpoint.step_folder(run, step), state, facts)
            try:
                checkpoint.prune(run, train.keep, train.keep_best)
            except OSError as error:
                warn(f"older checkpoints could not be removed ({error})")

        return write

    def averages_snapshot(self) -> Write | None:
        """Return a function that writes snapshots/step-N with every power-function average, in half precision.

        None in all processes but the main one.
        """
        averages = {
            name: {key: value.half().cpu() for key, value in self.averages.whole(name).items()}
            for name in map(power_name, self.recipe.train.power)
        }
        step, facts = self.step, {"step": self.step, "recipe": self.recipe.name}

        def write(run: Path) -> None:
            checkpoint.save(run / "snapshots" / checkpoint.step_name(step), averages, facts)

        return write if self.processes.main else None

    def restore(self, folder: Path) -> None:
        """Read a checkpoint; every file is checked before anything is changed.

        Each process checks and reads its share of the bytes.
        """
        manifest = checkpoint.read_manifest(folder)
        there, now = manifest.get("data", self.store.stamp), self.store.stamp
        if there != now:
            config, other = self.recipe.data, f"data ({there}) than dataset holds now ({now})"
            if config.name != OWN_DATA:
                other = f"images than data.path={config.folder} holds now"
            raise ValueError(f"{folder} was trained on other {other}")
        self.require_provenance(folder, manifest)
        files, group = list(self.state()), self.processes
        with group.together():
            checkpoint.check(folder, files, group.rank, group.world)
        self.load({file: SharedFile(folder / f"{file}.safetensors", group) for file in files})
        self.step, self.window = manifest["step"], Window(**manifest["window"])

    def load(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set weights, averages and optimizers from the files of a checkpoint."""
        self.load_weights(files["model"])
        for name in self.averages.profiles:
            self.averages.restore(name, files[name])
        named = self.named()
        owner = {id(p): each for each in self.optimizers for group in each.param_groups for p in group["params"]}
        for entry in files["optimizer"]:
            name, _, key = entry.rpartition("/")
            if (parameter := named.get(name)) is not None:
                value = files["optimizer"][entry]
                # moments are sharded as their parameter is; counters are on its device
                alike = value.shape == parameter.shape
                state = like_parameter(value, parameter) if alike else value.to(parameter.device)
                owner[id(parameter)].state[parameter][key] = state

    def start_from(self, weights: Weights) -> None:
        """Begin with given weights, and averages that start there; all else is fresh."""
        self.load_weights(weights)
        for name in self.averages.profiles:
            self.averages.restore(name, {key: value.float() for key, value in weights.items()})

    def init_from(self, opened: Opened, source: str) -> list[str]:
        """Begin with another model's weights, fitted to this network; return what there is to say about them."""
        self.start_from(opened.weights)
        return []
