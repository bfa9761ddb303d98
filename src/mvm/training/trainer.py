"""A run in memory: what one step does, and how its state is saved and restored.

A step is Trainer.advance > Engine (precision, compilation, processes) > Learner (network and projector)
> Matching (timesteps, noise, target, loss) > network. Model holds the same network for previews and sampling.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mvm import checkpoint
from mvm.data import Images, Order, Resident, Store, augmentation, augmented, mirror, mirrored, send
from mvm.distributed.processes import Processes, parts_of
from mvm.distributed.sharding import like_parameter, whole
from mvm.model import Model, require_codec
from mvm.network import AUGMENT_MAP
from mvm.objective import Batch, Matching, Projector
from mvm.optim.ema import Averages
from mvm.optim.optimizers import learning_rate, optimizers, set_rate, step_unless
from mvm.recipes import AnyRecipe, Recipe
from mvm.training.data import training_latents
from mvm.training.engine import Engine
from mvm.training.features import FeatureBank
from mvm.training.learner import PROJECTOR, Learner, projector_weights
from mvm.training.logs import Record, Window, warn


def build_projector(recipe: Recipe, width: int) -> Projector:
    """Return REPA's projector, initialised from the recipe's seed; width: of the teacher's features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed + 1)
        return Projector(recipe.repa, recipe.network.dimensions[1], width)


class Trainer:
    """Model, optimizers, averages, and the number of steps done. Everything in it is a function of (recipe, step)."""

    def __init__(
        self,
        recipe: Recipe,
        data: Images | Store,
        place: Processes | None = None,
        teacher: FeatureBank | None = None,
    ) -> None:
        self.recipe, self.step, self.place = recipe, 0, place or Processes()
        device = self.place.device
        self.store = Resident(data, device) if isinstance(data, Images) else data
        self.order = Order(len(self.store), recipe.seed)
        self.mine = self.place.share(recipe.train.batch)
        self.teacher = teacher
        self.model = Model(recipe).to(device)
        self.latents = training_latents(recipe, self.model.codec, self.store, self.place)
        objective = Matching(
            recipe.objective,
            self.model.schedule,
            recipe.path.law,
            recipe.repa,
            recipe.repa.tap(recipe.network.dimensions[0]),
            dropout=recipe.network.dropout > 0,
        )
        projector = None if teacher is None else build_projector(recipe, teacher.width).to(device)
        self.learner = Learner(self.model.network, objective, projector)
        unused = projector is not None and recipe.repa.stop > 0
        self.engine = Engine(recipe.engine, self.learner, self.model.network, self.place, unused)
        self.optimizers = optimizers(recipe.train, self.learner.named())
        self.averages = Averages(self.model.network, recipe.train.ema, recipe.train.power)
        self.window = Window()
        self.between_steps = True  # False while a step is under way: such a state must not be saved
        self.unread: list[tuple[int, float, dict[str, Tensor]]] = []  # steps whose figures are still on the device
        self.at_once: Callable[[], AbstractContextManager[None]] = nullcontext  # around what a signal may cut short
        self.on_part: Callable[[int, int], None] = lambda done, parts: None  # after each part of an accumulated step

    def positions(self, step: int) -> Tensor:
        """Return the places in the stream that this process consumes in step `step`."""
        return self.order.positions(step, self.recipe.train.batch)[self.mine]

    def batch(self) -> Batch:
        """Return this process's batch of the current step: a pure function of (seed, step)."""
        positions = self.positions(self.step)
        indices, seeds = self.order.indices(positions), self.order.seeds(positions)
        flipped = mirrored(seeds) if self.recipe.data.mirror else torch.zeros(len(seeds), dtype=torch.bool)
        if self.latents is not None and self.teacher is None:
            x0, labels = self.latents.gather(indices, flipped), self.store.labels
            chosen = labels[send(indices, labels.device)]
            return Batch(x0, send(chosen, x0.device), send(seeds, x0.device), None)
        images, labels = self.store.gather(indices)
        following = self.positions(self.step + 1)
        self.store.expect(lambda: self.order.indices(following))
        if self.recipe.data.mirror:
            images = mirror(images, send(flipped, images.device))
        features = self._features(indices, flipped, images)
        images, augment = self._augmented(images, seeds)
        return Batch(self._samples(indices, flipped, images), labels, send(seeds, images.device), features, augment)

    def _augmented(self, images: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the images warped as their seeds say, and the parameters of that for the network; None: nothing."""
        chance = self.recipe.data.augment
        if not chance:
            return images, None
        parameters = augmentation(seeds, chance)
        return augmented(images, parameters), send(parameters, images.device)

    def _samples(self, indices: Tensor, flipped: Tensor, images: Tensor) -> Tensor:
        """Return what the path works on: latents from the cache where there is one, else the images encoded."""
        if self.latents is not None:
            return self.latents.gather(indices, flipped)
        return self.model.codec.encode(images)

    def _features(self, indices: Tensor, flipped: Tensor, images: Tensor) -> Tensor | None:
        if self.teacher is None or not self.recipe.repa.active(self.step):
            return None
        return self.teacher.lookup(indices, flipped, images)

    def _backward(self) -> dict[str, Tensor]:
        """Leave the gradient of the global batch's mean loss in the parameters; return this process's share of it."""
        batch, total = self.batch(), self.recipe.train.batch
        found: dict[str, Tensor] = {}
        cuts = list(parts_of(len(batch.seeds), self.recipe.engine.accumulate))
        for number, cut in enumerate(cuts, start=1):
            part = batch.cut(cut)
            share = len(part.seeds) / total
            with self.engine.gradients_stay(number < len(cuts)):
                loss = self.engine(part)
                (loss.total * share * self.place.world).backward()  # DDP and FSDP average over processes
            for name, value in loss.parts.items():
                found[name] = found.get(name, 0) + share * value
            self.on_part(number, len(cuts))
        return found

    def advance(self) -> None:
        """Do one step: forward, backward, clip, optimizer, averages.

        A gradient that is not finite leaves weights and optimizer as they are; step, rate and data order go on.
        """
        config = self.recipe.train
        rate = learning_rate(config, self.step)
        for optimizer in self.optimizers:
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
        with self.at_once():
            parts = self._backward()
        self.between_steps = False
        norm = whole(nn.utils.clip_grad_norm_(self.learner.parameters(), config.clip or math.inf, foreach=True))
        for optimizer in self.optimizers:
            step_unless(optimizer, ~torch.isfinite(norm))
        self.averages.update(self.step)
        self.step += 1
        self.unread.append((self.step, rate, {**parts, "grad_norm": norm}))
        self.between_steps = True

    def read(self) -> list[Record]:
        """Return the figures of the steps since the last reading: one wait for the device, whatever their number."""
        unread, self.unread = self.unread, []
        return [Record(step, {**numbers(values, self.place), "lr": rate}) for step, rate, values in unread]

    def _optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.learner.named():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{name}/{key}", value

    def _whole_state(self) -> dict[str, checkpoint.Weights]:
        """Return everything that a checkpoint holds, gathered; every process must ask."""
        groups: dict[str, Iterable[tuple[str, Tensor]]] = {"model": self.model.network.named_parameters()}
        groups |= {name: self.averages.parts(name) for name in self.averages.profiles}
        groups["optimizer"] = self._optimizer_tensors()
        if found := projector_weights(self.learner):
            groups["projector"] = found.items()
        return {part: self._collect(group) for part, group in groups.items()}

    def _collect(self, group: Iterable[tuple[str, Tensor]]) -> checkpoint.Weights:
        """Return tensors on the CPU, apart from what the next steps change; for the main process alone.

        One tensor at a time is whole on the devices: all at once would need the memory that sharding saves.
        """
        found: checkpoint.Weights = {}
        for name, value in group:
            gathered = whole(value)
            if self.place.main:
                found[name] = gathered.to("cpu", copy=True)
        return found

    def snapshot(self, quality: float | None = None) -> Callable[[Path], None] | None:
        """Return a function that writes the state of this moment, for the main process; None for others."""
        state = self._whole_state()
        if not self.place.main:
            return None
        more = {"codec": self.model.codec.identity.get("codec", "")}
        return checkpoint_of(self, state, quality, more)

    def restore(self, folder: Path) -> None:
        """Read a checkpoint; every file is checked before anything is changed."""
        manifest = checkpoint.read_manifest(folder)
        require_data(folder, manifest, self)
        require_codec(folder, manifest, self.model.codec)
        parts = {part: checkpoint.load(folder, part) for part in self._parts()}
        self.load_weights({**parts["model"], **parts.get("projector", {})})
        for name in self.averages.profiles:
            self.averages.restore(name, parts[name])
        restore_moments(self.optimizers, dict(self.learner.named()), parts["optimizer"])
        self.step, self.window = manifest["step"], Window(**manifest["window"])

    def _parts(self) -> list[str]:
        projector = ["projector"] if self.learner.projector is not None else []
        return ["model", *self.averages.profiles, "optimizer", *projector]

    @torch.no_grad()
    def load_weights(self, weights: checkpoint.Weights) -> None:
        """Set the parameters from whole tensors; names must match, but for a projector that is not there."""
        named = {name: value for name, value in self.learner.named() if name in weights or PROJECTOR not in name}
        if unknown := sorted(set(weights) ^ set(named)):
            raise ValueError(f"these weights do not fit the recipe's network: {', '.join(unknown[:3])} ...")
        for name, parameter in named.items():
            if parameter.shape != weights[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(weights[name].shape)}, the recipe's network {tuple(parameter.shape)}"
                )
            parameter.copy_(like_parameter(weights[name].to(parameter.dtype), parameter))

    def start_from(self, weights: checkpoint.Weights) -> None:
        """Begin with given weights, and averages that start there; optimizer, step and warm-up are fresh."""
        weights = self._with_own_map(weights)
        self.load_weights(weights)
        for name in self.averages.profiles:
            self.averages.restore(name, {key: value.float() for key, value in weights.items()})

    def _with_own_map(self, weights: checkpoint.Weights) -> checkpoint.Weights:
        """Return the weights with a map of augmentation, zero if they have none, where the recipe augments alone."""
        others = {name: value for name, value in weights.items() if name != AUGMENT_MAP}
        own = dict(self.model.network.named_parameters()).get(AUGMENT_MAP)
        return others if own is None else {**others, AUGMENT_MAP: weights.get(AUGMENT_MAP, torch.zeros(own.shape))}


class Kept(Protocol):
    """What a checkpoint tells of a training, whatever is trained."""

    @property
    def recipe(self) -> AnyRecipe: ...

    store: Store
    step: int
    window: Window


def checkpoint_of(
    training: Kept, state: dict[str, checkpoint.Weights], quality: float | None, more: Mapping[str, Any]
) -> Callable[[Path], None]:
    """Return a function that writes this state of this moment into a run, and removes older ones as its recipe says."""
    recipe, step = training.recipe, training.step
    info = {
        "step": step,
        "recipe": recipe.name,
        "window": asdict(training.window),
        "data": training.store.stamp,
        **more,
    }
    if quality is not None:
        info["quality"] = quality

    def write(run: Path) -> None:
        checkpoint.save(checkpoint.step_folder(run, step), state, info)
        try:
            checkpoint.prune(run, recipe.train.keep, recipe.train.keep_best)
        except OSError as error:
            warn(f"older checkpoints could not be removed ({error})")

    return write


def require_data(folder: Path, manifest: Mapping[str, Any], training: Kept) -> None:
    """Refuse to go on with other images than before."""
    if manifest.get("data", training.store.stamp) != training.store.stamp:
        where = training.recipe.data.folder
        raise ValueError(f"{folder} was trained on other images than data.path={where} holds now")


def numbers(values: dict[str, Tensor], place: Processes) -> dict[str, float]:
    """Return figures as Python numbers; losses are summed over the processes' shares, the norm is everyone's."""
    names = [name for name in values if name != "grad_norm"]
    losses = place.sum(torch.stack([values[name].float() for name in names]))
    return {**dict(zip(names, losses.tolist(), strict=True)), "grad_norm": float(values["grad_norm"])}


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a piece of optimizer state where it belongs: moments as their parameter is, counters on its device."""
    return like_parameter(value, parameter) if value.shape == parameter.shape else value.to(parameter.device)


def restore_moments(
    optimizers: list[torch.optim.Optimizer], named: dict[str, nn.Parameter], moments: checkpoint.Weights
) -> None:
    """Give every optimizer its state back, each tensor placed as its parameter is."""
    for optimizer in optimizers:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in named.items():
            found = {key.rpartition("/")[2]: value for key, value in moments.items() if key.startswith(f"{name}/")}
            if id(parameter) in mine and found:
                optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in found.items()}
