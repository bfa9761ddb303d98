"""The training of a field: its network and, for feature alignment (REPA), a projector.

A step is FieldTrainer.learn > Engine (precision, compilation, processes) > Learner (network and projector)
> Matching (timesteps, noise, target, loss) > network. Model holds the same network for previews and sampling.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mvm.checkpoint import Weights
from mvm.data import Images, Resident, Store, augmentation, augmented, mirror, mirrored, send
from mvm.distributed.processes import Processes, precision
from mvm.distributed.sharding import like_parameter, whole
from mvm.model import Model, require_codec
from mvm.network import AUGMENT_MAP
from mvm.network.pretrained import load_encoder
from mvm.objective import Batch, Loss, Matching, Projector
from mvm.optim.ema import MAIN, Averages
from mvm.optim.optimizers import optimizers
from mvm.published import Opened
from mvm.recipes import Recipe, require_field_recipe
from mvm.recipes.memory import Memory, fit_memory
from mvm.store import Share
from mvm.training.data import training_latents
from mvm.training.engine import Engine
from mvm.training.features import FeatureBank, open_bank
from mvm.training.finetune import fit
from mvm.training.preview import FieldPreview
from mvm.training.trainer import Figures, Trainer

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


class FieldTrainer(Trainer[Recipe]):
    """The training of a Recipe. teacher: the frozen encoder's features of the data; None without REPA."""

    def __init__(
        self,
        recipe: Recipe,
        data: Images | Store,
        processes: Processes | None = None,
        teacher: FeatureBank | None = None,
    ) -> None:
        device = (processes or Processes()).device
        store = Resident(data, device) if isinstance(data, Images) else data
        super().__init__(recipe, store, processes)
        self.teacher = teacher
        self.model = Model(recipe).to(device)
        self.latents = training_latents(recipe, self.model.codec, store, self.processes)
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
        self.engine = Engine(recipe.engine, self.learner, self.model.network, self.processes, unused)
        self.optimizers = optimizers(recipe.train, self.learner.named())
        self.averages = Averages(self.model.network, recipe.train.ema, recipe.train.power)

    @classmethod
    def fit_memory(cls, recipe: Recipe, processes: Processes) -> tuple[Recipe, Memory | None, str]:
        return fit_memory(recipe, processes.device, processes.world)

    @classmethod
    def open(cls, recipe: Recipe, store: Store, run: Path, processes: Processes, progress: bool) -> "FieldTrainer":
        """Return the trainer at step 0; the teacher's features are cached as the recipe says."""
        if not recipe.repa.encoder:
            return cls(recipe, store, processes)
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
        return FieldPreview(self.recipe.preview, self.model, self.store, folder, self.processes)

    def result(self, run: Path, progress: bool) -> Model:
        """Return a model of its own with the averaged weights."""
        model = Model(self.recipe).to(self.processes.device)
        model.network.load_state_dict(self.averages.whole(MAIN))
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
        x0 = self.model.codec.encode(images) if latents is None else latents
        return Batch(x0, None if kind == "none" else condition, send(seeds, device), features, augment)

    def learn(self, rate: float) -> Figures:
        with self.at_once():
            figures = self.accumulate(self.optimizers, self.batch(), self.engine)
        norm = self.update(self.optimizers, self.learner, rate)
        return {**figures, "grad_norm": norm}

    # ---- its state

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.learner.named())

    def state(self) -> dict[str, Iterable[tuple[str, Tensor]]]:
        if self.learner.projector is None:
            return super().state()
        projector = {name: value for name, value in self.learner.named() if name.startswith(PROJECTOR)}
        return {**super().state(), "projector": projector.items()}

    @property
    def provenance(self) -> dict[str, Any]:
        return {"codec": self.model.codec.identity.get("codec", "")}

    def require_provenance(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        require_codec(folder, manifest, self.model.codec)

    def load(self, files: dict[str, Weights]) -> None:
        super().load({**files, "model": {**files["model"], **files.get("projector", {})}})

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
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
        own = {name: whole(value.detach()).cpu() for name, value in self.model.network.named_parameters()}
        fitted, lines = fit(own, self.recipe, opened)
        self.start_from(fitted)
        return lines
