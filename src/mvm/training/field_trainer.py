"""The training of a field: its network and, for feature alignment (REPA), a projector.

A step is FieldTrainer.learn > Engine (precision, compilation, processes) > Learner (network and projector)
> Matching (timesteps, noise, target, loss) > network. Model holds the same network for previews and sampling.
"""

import copy
from collections import ChainMap
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mvm import checkpoint, noise
from mvm.checkpoint import Weights
from mvm.data import Images, Resident, Store, augmentation, augmented, mirror, mirrored, send
from mvm.distributed.processes import Processes, autocast, precision
from mvm.distributed.sharding import like_parameter, whole
from mvm.model import Model, own_network, require_codec
from mvm.network import AUGMENT_MAP, Own, build_network
from mvm.network.own import buffers_of, load_weights
from mvm.network.pretrained import load_encoder
from mvm.objective import Batch, Loss, Matching, Projector
from mvm.optim.ema import MAIN, Averages
from mvm.optim.optimizers import optimizers
from mvm.path import Condition
from mvm.path.condition import batched, rows
from mvm.published import Opened, keep_codec
from mvm.recipes import OWN_DATA, Recipe, options, require_field_recipe
from mvm.store import Share
from mvm.training.data import training_latents
from mvm.training.dataset import StreamOrder, place_in_stream, stream_of
from mvm.training.engine import Engine
from mvm.training.features import FeatureBank, open_bank
from mvm.training.preview import FieldPreview
from mvm.training.trainer import Figures, Trainer

PROJECTOR = "projector."  # prefix of the projector's weights; the network's have none

TAKER = "label."  # begins the names of what takes the condition, of any kind
LABELS = f"{TAKER}weight"  # (classes + 1, width); the last row is the null class
# The weights mean something else where these differ. Training goes on, but must learn that first.
MEANING = ("path.schedule", "path.T", "objective.kind", "codec.kind", "codec.scale", "network.time")


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


class FieldTrainer(Trainer[Recipe]):
    """The training of a Recipe. teacher: the frozen encoder's features of the data; None without REPA.

    network: of a recipe whose network is the user's own; it is trained in place.
    """

    def __init__(
        self, recipe: Recipe, data: Images | Store, processes: Processes | None = None,
        teacher: FeatureBank | None = None, network: Own | None = None,
    ) -> None:  # fmt: skip
        device = (processes or Processes()).device
        store = Resident(data, device) if isinstance(data, Images) else data
        super().__init__(recipe, store, processes)
        self.teacher = teacher
        self.model = Model(recipe, network=network).to(device)
        self.own = network is not None
        # besides the CPU a network may draw random numbers on its GPU
        self.generators = [device] if device.type == "cuda" else []
        if stream_of(store) is not None:
            self.order = StreamOrder(0, recipe.seed)
        self.latents = training_latents(recipe, self.model.codec, store, self.processes)
        block = recipe.repa.tap(recipe.network.dimensions[0])
        self.objective = Matching(
            recipe.objective, self.model.schedule, recipe.path.law, recipe.repa, block, recipe.network.dropout > 0
        )
        projector = None
        if teacher is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(recipe.seed + 1)
                projector = Projector(recipe.repa, recipe.network.dimensions[1], teacher.width).to(device)
        if network is not None:
            self._try_out(network)
        self.learner = Learner(self.model.network, self.objective, projector)
        unused = self.own or (projector is not None and recipe.repa.stop > 0)
        # sharded weights cannot be copied into a network of their own
        spare = network is not None and recipe.engine.parallel == "fsdp"
        self.spare: Any = copy.deepcopy(self.model.network).cpu() if spare else None
        self.engine = Engine(recipe.engine, self.learner, self.model.network, self.processes, unused)
        self.optimizers = optimizers(recipe.train, self.learner.named(), self.processes)
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
        shape = tuple(batch.x0.shape)
        network.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=self.generators):
            try:
                loss = self.objective(network, batch).total
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"network fails on x of shape {shape} and t of shape (2,): {error}") from error
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"network predicts NaN or Inf for x of shape {shape}; check its weights")
        network.train()
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise ValueError("network has no parameters that require a gradient: there is nothing to train")

    @classmethod
    def open(cls, recipe: Recipe, store: Store, run: Path, processes: Processes, progress: bool, network: Any) -> Self:
        """Return the trainer at step 0; the teacher's features are cached as the recipe says."""
        if not recipe.repa.encoder:
            return cls(recipe, store, processes, network=own_network(recipe, network, "this recipe"))
        device = processes.device
        encoder = load_encoder(recipe.repa.encoder, recipe.repa.resolution).to(device)
        if precision(recipe.engine, device) != torch.float32:
            encoder = encoder.to(torch.bfloat16)
        side = min(encoder.side, recipe.sample_shape[-1] // recipe.network.patch)
        share = Share(processes.rank, processes.world, lambda: processes.any(False))
        folder, cache = run / "features", recipe.repa.cache
        teacher = open_bank(
            cache, encoder, store, store.labels, folder=folder, side=side, device=device, share=share, progress=progress
        )
        return cls(recipe, store, processes, teacher)

    def keep_codec(self, run: Path) -> None:
        keep_codec(run, self.recipe, self.model.codec)

    def preview(self, folder: Path) -> FieldPreview:
        preview = FieldPreview(self.recipe.preview, self.model, self.store, folder, self.processes)
        if self.own:
            preview.as_sampled = lambda images: self.model.codec.decode(self.encode(images))
        return preview

    def result(self, run: Path, progress: bool) -> Model:
        """Return a model of its own with the averaged weights; a network of the user's keeps the trained ones."""
        if not self.own:
            model = Model(self.recipe, self.model.codec).to(self.processes.device)
            model.network.load_state_dict(self.averages.whole(MAIN))
        else:
            network = copy.deepcopy(self.spare or self.model.network)
            model = Model(self.recipe, self.model.codec, network).to(self.processes.device)
            load_weights(network, self.averages.whole(MAIN) | buffers_of(self.model.network), "its average")
        return model.eval().requires_grad_(False)

    # ---- a step

    def batch(self) -> Batch:
        positions = self.positions(self.step)
        indices, seeds = self.indices(positions), self.order.seeds(positions)
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
        """Return stored samples as the path works on them, a frozen encoder's products in engine.precision.

        Float images of the user's lie in [-1, 1] already.
        """
        data, scale = self.recipe.data, self.recipe.codec.scale
        if data.name == OWN_DATA and images.is_floating_point():  # in their dtype: a network may be of float64
            return images / scale if data.values == "float" else images * scale
        with autocast(self.recipe.engine, self.processes.device):
            return self.model.codec.encode(images)

    def known(self, condition: Condition) -> Condition:
        """Return the condition as the network learns it: None where the model is unconditional without a null class."""
        recipe = self.recipe
        unused = recipe.condition.kind == "none" or (self.own and not recipe.objective.conditional)
        return None if unused else condition

    def learn(self, rate: float) -> Figures:
        with self.at_once(), torch.random.fork_rng(devices=self.generators, enabled=self.own):
            if self.own:  # what such a network draws (dropout) is a function of seed, step and process
                number = self.step * self.processes.world + self.processes.rank
                torch.manual_seed(int(noise.derive(self.recipe.seed, torch.tensor([number]))))
            figures = self.accumulate(self.optimizers, self.batch(), self.engine)
        return figures | {"grad_norm": self.update(self.optimizers, self.learner, rate)}

    # ---- its state

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.learner.named())

    def state(self) -> dict[str, Iterable[tuple[str, Tensor]]]:
        state, buffers = super().state(), buffers_of(self.model.network)
        for name in ("model", *self.averages.profiles) if buffers else ():
            state[name] = chain(state[name], buffers.items())
        if self.learner.projector is not None:
            state["projector"] = [each for each in self.learner.named() if each[0].startswith(PROJECTOR)]
        return state

    def restore(self, folder: Path) -> None:
        super().restore(folder)
        if (stream := stream_of(self.store)) is not None:
            place = checkpoint.read_manifest(folder).get("stream")
            stream.go_on(self.step * self.recipe.train.batch, place, say=self.processes.main)

    @property
    def provenance(self) -> dict[str, Any]:
        place = place_in_stream(self.store, self.step * self.recipe.train.batch)
        return {"codec": self.model.codec.identity.get("codec", ""), **({} if place is None else {"stream": place})}

    def require_provenance(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        require_codec(folder, manifest, self.model.codec)

    def load(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        parts: Any = [files[name] for name in ("model", "projector") if name in files]
        super().load({**files, "model": ChainMap(*parts)})  # lazily: all of it at once would take the memory twice

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the parameters from whole tensors; names must match, but for a projector that is not there."""
        named: dict[str, Tensor] = {n: value for n, value in self.learner.named() if n in weights or PROJECTOR not in n}
        named |= buffers_of(self.model.network)
        if unknown := sorted(set(weights) ^ set(named)):
            raise ValueError(f"these weights do not fit the recipe's network: {', '.join(unknown[:3])} ...")
        for name, parameter in named.items():
            given = weights[name]
            if parameter.shape != given.shape:
                expected = tuple(parameter.shape)
                raise ValueError(f"{name} has shape {tuple(given.shape)}, the recipe's network {expected}")
            parameter.copy_(like_parameter(given.to(parameter.dtype), parameter))

    def start_from(self, weights: Weights) -> None:
        """Begin with given weights; a map of augmentation is dropped or starts at zero, as the recipe augments."""
        own = {name: torch.zeros(p.shape) for name, p in self.model.network.named_parameters() if name == AUGMENT_MAP}
        fitting = {name: value for name, value in weights.items() if name != AUGMENT_MAP or name in own}
        super().start_from(own | fitting)

    def init_from(self, opened: Opened, source: str) -> list[str]:
        require_field_recipe(opened.recipe, source)
        if self.own:
            self.start_from(opened.weights)
            return [f"took all {len(opened.weights)} tensors, step {opened.origin['step']} of {opened.origin['run']}"]
        own = {name: whole(value.detach()).cpu() for name, value in self.model.network.named_parameters()}
        fitted, lines = fit(own, self.recipe, opened)
        self.start_from(fitted)
        return lines


def fit(own: Weights, recipe: Recipe, opened: Opened) -> tuple[Weights, list[str]]:
    """Return weights for the recipe's network, from another model's where they fit, and what to say of them.

    own: the network's weights at initialisation. Another number of classes, of channels or another patch changes the
    shapes of some tensors, which start as in `own`; a new class starts as the null class. So does what takes another
    kind or size of condition. Any other difference between the networks is an error. The number of an image's tokens
    changes no shape: their positions are not learned.
    """
    given = {name: value.float() for name, value in opened.weights.items()}
    flexible, free = _shaped_by_data(recipe), {AUGMENT_MAP}
    if recipe.condition != require_field_recipe(opened.recipe, opened.origin["run"]).condition:
        takers = {name for name in own.keys() | given.keys() if name.startswith(TAKER)}
        given = {name: value for name, value in given.items() if name not in takers}
        free |= takers
    wrong = sorted((own.keys() ^ given.keys()) - free)
    wrong += [n for n in own if n in given and own[n].shape != given[n].shape and n not in flexible]
    if wrong:
        raise _other_network(recipe, opened, wrong)
    taken = {n: given[n] for n in own if n in given and own[n].shape == given[n].shape}
    fitted, fresh = {**own, **taken}, [n for n in own if n not in taken and n != AUGMENT_MAP]
    names, before = recipe.data.class_names, opened.classes
    bare = all(map(str.isdigit, names)) or all(map(str.isdigit, before))  # numbers name nothing
    if LABELS in given and (LABELS not in taken or (names != before and not bare)):
        taken.pop(LABELS, None)
        same = [] if bare else [name for name in names if name in before]
        table = given[LABELS][-1].repeat(len(names) + 1, 1)  # every class as the null class
        for name in same:
            table[names.index(name)] = given[LABELS][before.index(name)]
        fitted[LABELS] = table
        listed = ", ".join(["the null class", *same[:10], *(["..."] if len(same) > 10 else [])])
        fresh = [n for n in fresh if n != LABELS] + [f"{LABELS} for {len(names)} classes (kept: {listed})"]
    lines = [f"took {len(taken)} of {len(own)} tensors, step {opened.origin['step']} of {opened.origin['run']}"]
    if fresh:
        lines.append(f"made anew: {', '.join(fresh)}")
    was, now = options(opened.recipe), options(recipe)
    if other := [f"{name} {was[name]} there, {now[name]} now" for name in MEANING if was[name] != now[name]]:
        lines.append(f"warning: what the network reads or predicts differs: {'; '.join(other)}")
    return fitted, lines


def _shaped_by_data(recipe: Recipe) -> set[str]:
    """Return the names of the parameters whose shape depends on channels or classes."""
    network, (channels, *space), classes, augment_size, condition = recipe.blueprint
    with torch.device("meta"):
        one, other = (
            build_network(network, (channels + more, *space), classes + more, augment_size, condition)
            for more in (0, 1)
        )
    shapes = {name: value.shape for name, value in other.named_parameters()}
    return {name for name, value in one.named_parameters() if shapes[name] != value.shape}


def _other_network(recipe: Recipe, opened: Opened, names: list[str]) -> ValueError:
    before, now = (
        options(each.network) | dict(zip(("depth", "width", "heads"), each.network.dimensions, strict=True))
        for each in (require_field_recipe(opened.recipe, opened.origin["run"]), recipe)  # 0: what the size says
    )
    free = ("size", "patch", "dropout")  # the first is in those three, the others change no shape that matters
    other = [f"--network.{n} {value}" for n, value in before.items() if now.get(n) != value and n not in free]
    remedy = f"give the recipe its network: {' '.join(other)}" if other else "train with the recipe it was made by"
    return ValueError(
        f"--init-from: {', '.join(names[:3])} of '{opened.origin['run']}' (recipe {opened.recipe.name}) do not fit the "
        f"recipe's network; {remedy}"
    )
