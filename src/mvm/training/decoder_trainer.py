"""Stage 1 in memory: one step of a decoder and of the discriminator that judges it, and how their state is kept."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mvm import checkpoint
from mvm.data import Order, Store, mirror, mirrored, send
from mvm.distributed.processes import EngineConfig, Processes, autocast, parts_of
from mvm.latent import RAE, Decoder, LatentEncoder, load_latent_encoder
from mvm.latent.fingerprint import Origin, require_same
from mvm.objective import Loss
from mvm.objective.reconstruction import Reconstruction, build
from mvm.optim.ema import MAIN, Averages
from mvm.optim.optimizers import learning_rate, optimizers, set_rate, step_unless
from mvm.pixels import to_unit
from mvm.recipes import DecoderRecipe
from mvm.training.engine import Engine
from mvm.training.logs import Record, Window
from mvm.training.trainer import checkpoint_of, numbers, require_data, restore_moments

HEADS = "discriminator."  # names of the discriminator's heads: state of the training, kept with the optimizer's


@dataclass(frozen=True)
class Part:
    """Images first, ..., last - 1 of a store, numbered from 0."""

    store: Store
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, indices: Tensor) -> Tensor:
        return self.store[indices + self.first]


def split(store: Store, held_out: int) -> tuple[Part, Part]:
    """Return the images to train on and the last ones, which are held out."""
    count = len(store)
    if held_out >= count:
        raise ValueError(f"held_out.count={held_out} leaves nothing to train on: the data hold {count} images")
    return Part(store, 0, count - held_out), Part(store, count - held_out, count)


def frozen_encoder(recipe: DecoderRecipe) -> LatentEncoder:
    """Return the encoder whose latents are decoded; errors name the recipe's options."""
    if not recipe.encoder.name:
        raise ValueError("encoder.name is empty; give a DINOv2 or DINOv3: a hub name, a local folder, or Meta's .pth")
    try:
        return load_latent_encoder(recipe.encoder, "encoder")
    except ValueError as error:
        raise ValueError(str(error).replace("encoder.encoder=", "encoder.name=")) from error


def build_decoder(recipe: DecoderRecipe, encoder: LatentEncoder) -> Decoder:
    """Return the decoder, initialised from the recipe's seed; one that makes images of another size is refused."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        decoder = Decoder(recipe.decoder, encoder.latent_shape, encoder.origin)
    if decoder.image_shape != recipe.data.shape:
        raise ValueError(
            f"decoder.patch={recipe.decoder.patch} makes images {decoder.image_shape} of {decoder.side}x{decoder.side} "
            f"latents, the data hold {recipe.data.shape}; set decoder.patch, encoder.resolution, or prepare the data so"
        )
    return decoder


def build_objective(recipe: DecoderRecipe) -> Reconstruction:
    """Return the losses with their networks; the discriminator's heads are drawn from the recipe's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed + 1)
        return build(recipe.reconstruction)


def _engine_config(config: EngineConfig, place: Processes) -> EngineConfig:
    """Return the engine's settings with auto decided: blocks alone are compiled, see DecoderRecipe."""
    if config.compile != "auto":
        return config
    return replace(config, compile="blocks" if place.device.type == "cuda" else "off")


class Batch(NamedTuple):
    """Images in [-1, 1], their raw latents, and their seeds."""

    images: Tensor
    latents: Tensor
    seeds: Tensor

    def cut(self, part: slice) -> "Batch":
        return Batch(*(value[part] for value in self))


class DecoderTrainer:
    """Decoder, discriminator, optimizers, averages, and the number of steps done: all a function of (recipe, step)."""

    def __init__(self, recipe: DecoderRecipe, store: Store, place: Processes | None = None) -> None:
        self.recipe, self.step, self.place, self.store = recipe, 0, place or Processes(), store
        device = self.place.device
        self.images, self.held_out = split(store, recipe.held_out.count)
        self.order = Order(len(self.images), recipe.seed)
        self.mine = self.place.share(recipe.train.batch)
        self.encoder = frozen_encoder(recipe).to(device)
        self.decoder = build_decoder(recipe, self.encoder).to(device)
        self.objective = build_objective(recipe)
        for network in (self.objective.lpips, self.objective.judge):
            if network is not None:
                network.to(device)
        config = _engine_config(recipe.engine, self.place)
        self.engine = Engine(config, self.decoder, self.decoder, self.place, False)  # ty: ignore[invalid-argument-type]
        self.optimizers = optimizers(recipe.train, self.decoder.named_parameters())
        own = replace(recipe.train, optimizer="adamw")  # Muon is for transformers
        self.judge_optimizers = optimizers(own, self.heads.named_parameters()) if len(self.heads) else []
        self.averages = Averages(self.decoder, recipe.train.ema, recipe.train.power)
        self.window = Window()
        self.between_steps = True  # False while a step is under way: such a state must not be saved
        self.unread: list[tuple[int, float, dict[str, Tensor]]] = []  # steps whose figures are still on the device

    @property
    def heads(self) -> nn.ModuleList:
        """Return what the discriminator learns; empty without one."""
        return nn.ModuleList() if self.objective.judge is None else self.objective.judge.heads

    def averaged_decoder(self) -> Decoder:
        """Return a decoder of its own with the averaged weights."""
        decoder = Decoder(self.recipe.decoder, self.encoder.latent_shape, self.encoder.origin).to(self.place.device)
        decoder.load_state_dict(self.averages.whole(MAIN))
        return decoder.eval().requires_grad_(False)

    # ---- a step

    def positions(self, step: int) -> Tensor:
        """Return the places in the stream that this process consumes in step `step`."""
        return self.order.positions(step, self.recipe.train.batch)[self.mine]

    def batch(self) -> Batch:
        """Return this process's batch of the current step: a pure function of (seed, step)."""
        positions = self.positions(self.step)
        seeds = self.order.seeds(positions)
        images = self.images[self.order.indices(positions)]
        following = self.positions(self.step + 1)
        self.store.expect(lambda: self.order.indices(following))
        if self.recipe.data.mirror:
            images = mirror(images, send(mirrored(seeds), images.device))
        with autocast(self.recipe.engine, self.place.device):
            latents = self.encoder(images)
        return Batch(to_unit(images), latents, send(seeds, images.device))

    def _restore_images(self, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of the global batch's loss in the decoder; return this process's share of its parts."""
        found: dict[str, Tensor] = {}
        cuts = list(parts_of(len(batch.seeds), self.recipe.engine.accumulate))
        for number, cut in enumerate(cuts, start=1):
            part = batch.cut(cut)
            share = len(part.seeds) / self.recipe.train.batch
            noised = RAE.noised(part.latents, part.seeds, self.recipe.reconstruction.tau)
            with self.engine.gradients_stay(number < len(cuts)):
                output = self.engine(noised)
                loss = self._judged(output, part)
                (loss.total * share * self.place.world).backward()  # DDP averages over processes
            _add(found, loss.parts, share)
        found["loss"] = found.pop("total")
        return found

    def _judged(self, output: Tensor, part: Batch) -> Loss:
        with autocast(self.recipe.engine, self.place.device):
            return self.objective.generator(output, part.images, part.seeds, self.step, self.decoder.head.weight)

    def _tell_apart(self, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of the discriminator's loss in its heads; return this process's share of its parts.

        Fakes come of the decoder as it is now, without noise. The heads are small: their gradients are summed here.
        """
        found: dict[str, Tensor] = {}
        for cut in parts_of(len(batch.seeds), self.recipe.engine.accumulate):
            part = batch.cut(cut)
            share = len(part.seeds) / self.recipe.train.batch
            with autocast(self.recipe.engine, self.place.device):
                with torch.no_grad():
                    fake = self.decoder.eval()(part.latents).float()
                loss = self.objective.discriminator(fake, part.images, part.seeds, self.step)
            (loss.total * share).backward()
            _add(found, loss.parts, share)
        self.decoder.train()
        for parameter in self.heads.parameters():
            if parameter.grad is not None:
                self.place.sum(parameter.grad)
        return {f"disc_{name}": value for name, value in found.items()}

    def _descend(
        self,
        movers: list[torch.optim.Optimizer],
        learned: nn.Module,
        rate: float,
        gradient: Callable[[], Any],
        others: Tensor | float = 0.0,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Do a step of one of the two sides; return its figures and the norm of its gradient.

        A gradient that is not finite leaves weights and optimizer as they are, and so does the other side's norm.
        """
        for optimizer in movers:
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
        figures = gradient()
        norm = nn.utils.clip_grad_norm_(learned.parameters(), self.recipe.train.clip or math.inf, foreach=True)
        for optimizer in movers:
            step_unless(optimizer, ~torch.isfinite(norm + others))
        return figures, norm.detach()

    def advance(self) -> None:
        """Do one step: the decoder's, then the discriminator's once it has started, then the averages."""
        self.between_steps = False
        rate, batch = learning_rate(self.recipe.train, self.step), self.batch()
        figures, norm = self._descend(self.optimizers, self.decoder, rate, lambda: self._restore_images(batch))
        if self.recipe.reconstruction.judged(self.step):
            told, _ = self._descend(self.judge_optimizers, self.heads, rate, lambda: self._tell_apart(batch), norm)
            figures |= told
        self.averages.update(self.step)
        self.step += 1
        self.unread.append((self.step, rate, {**figures, "grad_norm": norm}))
        self.between_steps = True

    def read(self) -> list[Record]:
        """Return the figures of the steps since the last reading."""
        unread, self.unread = self.unread, []
        return [Record(step, {**numbers(values, self.place), "lr": rate}) for step, rate, values in unread]

    # ---- its state

    def _named(self) -> dict[str, nn.Parameter]:
        """Return all that learns, by the names that checkpoints use."""
        heads = {HEADS + name: value for name, value in self.heads.named_parameters()}
        return {**dict(self.decoder.named_parameters()), **heads}

    def _training_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizers' moments as NAME/KEY, and the heads with the vectors of their spectral norms."""
        for name, parameter in self._named().items():
            for optimizer in (*self.optimizers, *self.judge_optimizers):
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{name}/{key}", value
        for name, value in self.heads.state_dict().items():
            yield HEADS + name, value

    def snapshot(self, quality: float | None = None) -> Callable[[Path], None] | None:
        """Return a function that writes the state of this moment, for the main process; None for others."""
        if not self.place.main:
            return None
        groups: dict[str, Iterable[tuple[str, Tensor]]] = {"model": self.decoder.named_parameters()}
        groups |= {name: self.averages.parts(name) for name in self.averages.profiles}
        groups["optimizer"] = self._training_state()
        state = {part: {n: v.detach().to("cpu", copy=True) for n, v in group} for part, group in groups.items()}
        return checkpoint_of(self, state, quality, {"encoder": self.encoder.origin.metadata})

    def restore(self, folder: Path) -> None:
        """Read a checkpoint; every file is checked before anything is changed."""
        manifest = checkpoint.read_manifest(folder)
        require_data(folder, manifest, self)
        require_same(f"the decoder in {folder}", Origin.of(manifest["encoder"]), self.encoder.origin)
        parts = {part: checkpoint.load(folder, part) for part in ("model", *self.averages.profiles, "optimizer")}
        self._load(parts["model"])
        for name in self.averages.profiles:
            self.averages.restore(name, parts[name])
        kept = parts["optimizer"]
        restore_moments([*self.optimizers, *self.judge_optimizers], self._named(), kept)
        self.heads.load_state_dict({n.removeprefix(HEADS): v for n, v in kept.items() if "/" not in n})
        self.step, self.window = manifest["step"], Window(**manifest["window"])

    def _load(self, weights: checkpoint.Weights) -> None:
        try:
            self.decoder.load_state_dict(weights)
        except RuntimeError as error:  # it lists names and shapes
            raise ValueError(f"these weights do not fit the recipe's decoder: {error}") from None

    def start_from(self, weights: checkpoint.Weights) -> None:
        """Begin with given weights, and averages that start there; discriminator, optimizers and step are fresh."""
        self._load(weights)
        for name in self.averages.profiles:
            self.averages.restore(name, {key: value.float() for key, value in weights.items()})


def _add(found: dict[str, Tensor], parts: dict[str, Tensor], share: float) -> None:
    for name, value in parts.items():
        found[name] = found.get(name, 0) + share * value
