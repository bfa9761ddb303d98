"""The training of a field: its network and, for feature alignment (REPA), a projector.

A step is FieldTrainer.learn > Engine (precision, compilation, processes) > Learner (network and projector)
> Matching (timesteps, noise, target, loss) > network. Model holds the same network for previews and sampling.
"""

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mvm import checkpoint, noise
from mvm.checkpoint import Weights
from mvm.data import Images, Resident, Store, augmentation, augmented, mirror, mirrored, send
from mvm.distributed.processes import Processes, precision
from mvm.distributed.sharding import like_parameter, whole
from mvm.model import Model, own_network, require_codec
from mvm.network import AUGMENT_MAP, Own, OwnConfig
from mvm.network.own import buffers_of, load_weights
from mvm.network.pretrained import load_encoder
from mvm.objective import Batch, Loss, Matching, Projector
from mvm.optim.ema import MAIN, Averages
from mvm.optim.optimizers import optimizers
from mvm.path import Condition
from mvm.path.condition import batched, rows
from mvm.published import Opened
from mvm.recipes import OWN_DATA, Recipe, require_field_recipe
from mvm.recipes.memory import Memory, fit_memory
from mvm.store import Share
from mvm.training.data import training_latents
from mvm.training.dataset import StreamOrder, place_in_stream, stream_of
from mvm.training.engine import Engine
from mvm.training.features import FeatureBank, open_bank
from mvm.training.finetune import fit
from mvm.training.preview import FieldPreview
from mvm.training.trainer import Figures, Trainer, Write

PROJECTOR = "projector."  # prefix of the projector's weights; the network's have none


class Learner(nn.Module):
    """learner(batch) -> Loss: all that is trained, joined with the objective into one module."""

    def __init__(self, network: nn.Module, objective: Matching, projector: Projector | None) -> None:
        super().__init__()
        self.network, self.projector = network, projector
        self.objective = objective

    def forward(self, batch: Batch) -> Loss:
        return self.objective(self.network, batch, self.projector)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters by the names that checkpoints use."""
        return [(name.removeprefix("network."), value) for name, value in self.named_parameters()]


def build_projector(recipe: Recipe, width: int) -> Projector:
    """Return REPA's projector, initialised from the recipe's seed; width: of the teacher's features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed + 1)
        return Projector(recipe.repa, recipe.network.dimensions[1], width)


def _generators(device: torch.device) -> list[torch.device]:
    """Return the devices beside the CPU whose random numbers a network there may draw."""
    return [device] if device.type == "cuda" else []


class FieldTrainer(Trainer[Recipe]):
    """The training of a Recipe. teacher: the frozen encoder's features of the data; None without REPA.

    network: of a recipe whose network is the user's own; it is trained in place.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Images | Store,
        processes: Processes | None = None,
        teacher: FeatureBank | None = None,
        network: Own | None = None,
    ) -> None:
        device = (processes or Processes()).device
        store = Resident(data, device) if isinstance(data, Images) else data
        super().__init__(recipe, store, processes)
        self.teacher = teacher
        self.model = Model(recipe, network=network).to(device)
        self.own, self.place = network is not None, None  # place: of a stream, at the last snapshot
        if stream_of(store) is not None:
            self.order = StreamOrder(0, recipe.seed)
        self.latents = training_latents(recipe, self.model.codec, store, self.processes)
        self.objective = Matching(
            recipe.objective,
            self.model.schedule,
            recipe.path.law,
            recipe.repa,
            recipe.repa.tap(recipe.network.dimensions[0]),
            dropout=recipe.network.dropout > 0,
        )
        projector = None if teacher is None else build_projector(recipe, teacher.width).to(device)
        if network is not None:
            self._try_out(network)
        self.learner = Learner(self.model.network, self.objective, projector)
        unused = self.own or (projector is not None and recipe.repa.stop > 0)
        # sharded weights cannot be copied into a network of their own
        spare = network is not None and recipe.engine.parallel == "fsdp"
        self.spare: Any = copy.deepcopy(self.model.network).cpu() if spare else None
        self.engine = Engine(recipe.engine, self.learner, self.model.network, self.processes, unused)
        self.optimizers = optimizers(recipe.train, self.learner.named())
        self.averages = Averages(self.model.network, recipe.train.ema, recipe.train.power)

    def _try_out(self, network: Own) -> None:
        """Refuse a network of the user's that does not take the data, before anything is written."""
        stream = stream_of(self.store)
        x0, condition = self.store.gather(torch.zeros(1, dtype=torch.int64)) if stream is None else stream.first
        objective, device = self.recipe.objective, self.processes.device
        if condition is not None and objective.conditional and objective.has_null and network.null is None:
            raise ValueError(
                f"objective.label_drop={objective.label_drop} puts the null condition in a condition's place, and the "
                "network has none: give its class an attribute null, or set objective.label_drop to 0"
            )
        seeds = noise.derive(self.recipe.seed, torch.arange(2, device=device))
        two = rows((self.encode(x0.to(device)), condition), torch.zeros(2, dtype=torch.int64, device=x0.device))
        batch = Batch(two[0], None if condition is None else batched(self.known(two[1]), two[0]), seeds)
        network.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=_generators(device)):
            try:
                found = self.objective(network, batch)
            except (RuntimeError, TypeError) as error:
                shape = tuple(batch.x0.shape)
                raise ValueError(f"network fails on x of shape {shape} and t of shape (2,): {error}") from error
        if not bool(torch.isfinite(found.total)):
            raise ValueError(f"network predicts NaN or Inf for x of shape {tuple(batch.x0.shape)}; check its weights")
        network.train()
        learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
        if not learned:
            raise ValueError("network has no parameters that require a gradient: there is nothing to train")

    @classmethod
    def fit_memory(cls, recipe: Recipe, processes: Processes) -> tuple[Recipe, Memory | None, str]:
        if isinstance(recipe.network, OwnConfig):
            return recipe, None, ""
        return fit_memory(recipe, processes.device, processes.world)

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        store: Store,
        run: Path,
        processes: Processes,
        progress: bool,
        network: nn.Module | None = None,
    ) -> "FieldTrainer":
        """Return the trainer at step 0; the teacher's features are cached as the recipe says."""
        if not recipe.repa.encoder:
            return cls(recipe, store, processes, network=own_network(recipe, network, "this recipe"))
        device = processes.device
        encoder = load_encoder(recipe.repa.encoder, recipe.repa.resolution).to(device)
        if precision(recipe.engine, device) != torch.float32:
            encoder = encoder.to(torch.bfloat16)
        side = min(encoder.side, recipe.sample_shape[-1] // recipe.network.patch)
        teacher = open_bank(
            recipe.repa.cache,
            encoder,
            store,
            store.labels,
            folder=run / "features",
            side=side,
            device=device,
            share=Share(processes.rank, processes.world, lambda: processes.any(False)),
            progress=progress,
        )
        return cls(recipe, store, processes, teacher)

    def preview(self, folder: Path) -> FieldPreview:
        found = FieldPreview(self.recipe.preview, self.model, self.store, folder, self.processes)
        if self.own:
            found.stored = lambda images: self.model.codec.decode(self.encode(images))
        return found

    def result(self, run: Path, progress: bool) -> Model:
        """Return a model of its own with the averaged weights; a network of the user's keeps the trained ones."""
        network = copy.deepcopy(self.spare or self.model.network) if self.own else None
        model = Model(self.recipe, self.model.codec if self.own else None, network).to(self.processes.device)
        if network is None:
            model.network.load_state_dict(self.averages.whole(MAIN))
        else:
            load_weights(network, self.averages.whole(MAIN) | buffers_of(self.model.network), "its average")
        return model.eval().requires_grad_(False)

    # ---- a step

    def batch(self) -> Batch:
        positions = self.positions(self.step)
        indices, seeds = self.order.indices(positions), self.order.seeds(positions)
        flipped = mirrored(seeds) if self.recipe.data.mirror else torch.zeros(len(seeds), dtype=torch.bool)
        latents = None if self.latents is None else self.latents.gather(indices, flipped)
        kind = self.recipe.condition.kind
        if latents is not None and self.teacher is None and kind in ("labels", "none"):  # no image is needed
            labels = self.store.labels
            chosen = send(labels[send(indices, labels.device)], latents.device)
            return Batch(latents, chosen if kind == "labels" else None, send(seeds, latents.device))
        images, condition = self.images(indices)
        device = images.device
        if self.recipe.data.mirror:
            images = mirror(images, send(flipped, device))
        features = augment = None
        if self.teacher is not None and self.recipe.repa.active(self.step):
            features = self.teacher.lookup(indices, flipped, images)
        if self.recipe.data.augment:
            parameters = augmentation(seeds, self.recipe.data.augment)
            images, augment = augmented(images, parameters), send(parameters, device)
        x0 = self.encode(images) if latents is None else latents
        return Batch(x0, self.known(condition), send(seeds, device), features, augment)

    def encode(self, images: Tensor) -> Tensor:
        """Return stored samples as the path works on them; float images of the user's lie in [-1, 1] already."""
        data, scale = self.recipe.data, self.recipe.codec.scale
        if data.name == OWN_DATA and images.is_floating_point():  # in their dtype: a network may be of float64
            return images / scale if data.values == "float" else images * scale
        return self.model.codec.encode(images)

    def known(self, condition: Condition) -> Condition:
        """Return the condition as the network learns it: None where the model is unconditional without a null class."""
        recipe = self.recipe
        unused = recipe.condition.kind == "none" or (self.own and not recipe.objective.conditional)
        return None if unused else condition

    @contextmanager
    def _drawing(self) -> Generator[None]:
        """Inside, what a network of the user's draws (dropout) is a function of seed, step and process."""
        if not self.own:
            yield
            return
        place = torch.tensor([self.step * self.processes.world + self.processes.rank])
        with torch.random.fork_rng(devices=_generators(self.processes.device)):
            torch.manual_seed(int(noise.derive(self.recipe.seed, place)))
            yield

    def learn(self, rate: float) -> Figures:
        with self.at_once(), self._drawing():
            figures = self.accumulate(self.optimizers, self.batch(), self.engine)
        norm = self.update(self.optimizers, self.learner, rate)
        return {**figures, "grad_norm": norm}

    # ---- its state

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.learner.named())

    def state(self) -> dict[str, Iterable[tuple[str, Tensor]]]:
        state, buffers = super().state(), buffers_of(self.model.network)
        for name in ("model", *self.averages.profiles) if buffers else ():
            state[name] = chain(state[name], buffers.items())
        if self.learner.projector is None:
            return state
        projector = {name: value for name, value in self.learner.named() if name.startswith(PROJECTOR)}
        return {**state, "projector": projector.items()}

    def snapshot(self, quality: float | None = None) -> Write | None:
        self.place = place_in_stream(self.store, self.step * self.recipe.train.batch)
        return super().snapshot(quality)

    def restore(self, folder: Path) -> None:
        super().restore(folder)
        if (stream := stream_of(self.store)) is not None:
            place = checkpoint.read_manifest(folder).get("stream")
            stream.go_on(self.step * self.recipe.train.batch, place, say=self.processes.main)

    @property
    def provenance(self) -> dict[str, Any]:
        place = {} if self.place is None else {"stream": self.place}
        return {"codec": self.model.codec.identity.get("codec", ""), **place}

    def require_provenance(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        require_codec(folder, manifest, self.model.codec)

    def load(self, files: dict[str, Weights]) -> None:
        super().load({**files, "model": {**files["model"], **files.get("projector", {})}})

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        """Set the parameters from whole tensors; names must match, but for a projector that is not there."""
        named: dict[str, Tensor] = {n: value for n, value in self.learner.named() if n in weights or PROJECTOR not in n}
        named |= buffers_of(self.model.network)
        if unknown := sorted(set(weights) ^ set(named)):
            raise ValueError(f"these weights do not fit the recipe's network: {', '.join(unknown[:3])} ...")
        for name, parameter in named.items():
            if parameter.shape != weights[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(weights[name].shape)}, the recipe's network {tuple(parameter.shape)}"
                )
            parameter.copy_(like_parameter(weights[name].to(parameter.dtype), parameter))

    def start_from(self, weights: Weights) -> None:
        """Begin with given weights; a map of augmentation is dropped or starts at zero, as the recipe augments."""
        weights = {name: value for name, value in weights.items() if name != AUGMENT_MAP} | {
            name: weights.get(name, torch.zeros(value.shape))
            for name, value in self.model.network.named_parameters()
            if name == AUGMENT_MAP
        }
        super().start_from(weights)

    def init_from(self, opened: Opened, source: str) -> list[str]:
        require_field_recipe(opened.recipe, source)
        if self.own:
            self.start_from(opened.weights)
            return [f"took all {len(opened.weights)} tensors, step {opened.origin['step']} of {opened.origin['run']}"]
        own = {name: whole(value.detach()).cpu() for name, value in self.model.network.named_parameters()}
        fitted, lines = fit(own, self.recipe, opened)
        self.start_from(fitted)
        return lines
