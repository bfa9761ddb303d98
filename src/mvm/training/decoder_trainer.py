"""Stage 1: the training of a decoder and of the discriminator that judges it, which ends with an autoencoder."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mvm import checkpoint, noise
from mvm.data import Store, mirror, mirrored, send
from mvm.distributed.processes import Processes, autocast
from mvm.latent import RAE, Decoder, LatentEncoder, LatentMoments, load_latent_encoder, load_rae, measure
from mvm.latent.codec import Origin, require_same
from mvm.objective import Loss
from mvm.objective.reconstruction import build
from mvm.optim.ema import MAIN, Averages
from mvm.optim.optimizers import learning_rate, optimizers
from mvm.pixels import to_unit
from mvm.published import Opened
from mvm.recipes import DecoderRecipe
from mvm.training.data import StoreSubset, held_out_by_class
from mvm.training.engine import Engine
from mvm.training.logs import warn
from mvm.training.preview import DecoderPreview
from mvm.training.trainer import Figures, Trainer

HEADS = "discriminator."  # names of the discriminator's heads: state of the training, kept with the optimizer's
FOLDER = "rae"  # of the autoencoder, in a run directory
# How images are held out, as checkpoints say it: spread over the classes; those that say nothing hold out the last.
BY_CLASS, LAST = "by class", "last"


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


class DecoderBatch(NamedTuple):
    """Images in [-1, 1], their raw latents, and their seeds."""

    images: Tensor
    latents: Tensor
    seeds: Tensor

    def cut(self, part: slice) -> "DecoderBatch":
        return DecoderBatch(*(value[part] for value in self))


class DecoderTrainer(Trainer[DecoderRecipe]):
    """The training of a DecoderRecipe: the decoder's step, then the discriminator's once it has started."""

    def __init__(self, recipe: DecoderRecipe, store: Store, processes: Processes | None = None) -> None:
        held_out, count = recipe.held_out.count, len(store)
        if held_out >= count:
            raise ValueError(f"held_out.count={held_out} leaves nothing to train on: the data hold {count} images")
        super().__init__(recipe, store, processes, held_out)
        self.hold_out(BY_CLASS)
        device = self.processes.device
        self.encoder = frozen_encoder(recipe).to(device)
        self.decoder = build_decoder(recipe, self.encoder).to(device)
        with torch.random.fork_rng(devices=[]):  # the discriminator's heads are drawn from the recipe's seed
            torch.manual_seed(recipe.seed + 1)
            self.objective = build(recipe.reconstruction)
        for network in (self.objective.lpips, self.objective.judge):
            if network is not None:
                network.to(device)
        engine = recipe.engine
        if engine.compile == "auto":  # blocks alone are compiled, see DecoderRecipe
            engine = replace(engine, compile="blocks" if device.type == "cuda" else "off")
        self.engine = Engine(engine, self.decoder, self.decoder, self.processes, False)  # ty: ignore[invalid-argument-type]
        self.draw: noise.Normal = noise.normal
        if self.engine.mode != "off":  # more than half of what a step reads and writes is theirs
            self._compile_others()
        self.decoder_optimizers = optimizers(recipe.train, self.decoder.named_parameters(), self.processes)
        own = replace(recipe.train, optimizer="adamw")  # Muon is for transformers
        self.judge_optimizers = optimizers(own, self.heads.named_parameters()) if len(self.heads) else []
        self.optimizers = [*self.decoder_optimizers, *self.judge_optimizers]
        self.averages = Averages(self.decoder, recipe.train.ema, recipe.train.power)

    def hold_out(self, rule: str) -> None:
        """Divide the images into those that are trained on, in their order, and those that never are."""
        count, held_out = len(self.store), self.recipe.held_out.count
        if rule == BY_CLASS:
            chosen = held_out_by_class(self.store.labels, held_out, self.recipe.seed)
        else:
            chosen = torch.arange(count - held_out, count)
        rest = torch.ones(count, dtype=torch.bool)
        rest[chosen] = False
        self.rule = rule
        self.trained_on, self.held_out = StoreSubset(self.store, rest.nonzero()[:, 0]), StoreSubset(self.store, chosen)

    def _compile_others(self) -> None:
        """Compile what works beside the decoder: both encoders' blocks, LPIPS, the discriminator's heads, what draws.

        Uncompiled, noise and augmentation are hundreds of small kernels each, which take longer to start than to run.
        """
        self.draw = noise.normal_compiled
        self.encoder.encoder.compile_blocks()
        if self.objective.judge is not None:
            self.objective.judge.features.encoder.compile_blocks()
            self.objective.judge.heads.compile()
            self.objective = replace(self.objective, augmented=torch.compile(self.objective.augmented, dynamic=False))
        if self.objective.lpips is not None:
            self.objective.lpips.compile()

    @property
    def heads(self) -> nn.ModuleList:
        """What the discriminator learns; empty without one."""
        return nn.ModuleList() if self.objective.judge is None else self.objective.judge.heads

    def preview(self, folder: Path) -> DecoderPreview:
        return DecoderPreview(self, folder)

    def result(self, run: Path, progress: bool) -> RAE:
        """Return the autoencoder with the averaged decoder; after the last step it has statistics and is in RUN/rae.

        What is there already is kept where it is the same; statistics of an earlier end of the same run still hold.
        """
        decoder = Decoder(self.recipe.decoder, self.encoder.latent_shape, self.encoder.origin)
        decoder.to(self.processes.device).load_state_dict(self.averages.whole(MAIN))
        rae = RAE(self.encoder, decoder.eval().requires_grad_(False)).eval()
        if self.step < self.recipe.train.steps:
            return rae
        processes, earlier = self.processes, None
        if processes.main:
            with suppress(ValueError):  # nothing there, damaged, or of another encoder
                earlier = load_rae(run / FOLDER, self.encoder)
        statistics = processes.broadcast(None if earlier is None else earlier.statistics)
        same = earlier is not None and earlier.decoder.fingerprint == decoder.fingerprint and statistics is not None
        if statistics is None:  # the latents of all training images, both mirrors, in full precision
            mine = measure(self.encoder, self.trained_on, rank=processes.rank, world=processes.world, progress=progress)
            joined = {name: processes.gather(value) for name, value in mine.state().items()}
            statistics = LatentMoments.from_state(joined).result(self.encoder.origin)
        rae.set_statistics(statistics)
        with processes.main_first():
            if processes.main and not same:
                rae.save(run / FOLDER)
        return rae

    # ---- a step

    def indices(self, positions: Tensor) -> Tensor:
        return self.trained_on.indices[super().indices(positions)]

    def batch(self) -> DecoderBatch:
        positions = self.positions(self.step)
        seeds = self.order.seeds(positions)
        images, _ = self.images(self.indices(positions))
        if self.recipe.data.mirror:
            images = mirror(images, send(mirrored(seeds), images.device))
        with autocast(self.recipe.engine, self.processes.device):
            latents = self.encoder(images)
        return DecoderBatch(to_unit(images), latents, send(seeds, images.device))

    def _reconstruction(self, part: DecoderBatch) -> Loss:
        """Return the decoder's loss, of latents with noise."""
        output = self.engine(RAE.noised(part.latents, part.seeds, self.recipe.reconstruction.tau, self.draw))
        with autocast(self.recipe.engine, self.processes.device):
            return self.objective.generator(output, part.images, part.seeds, self.step, self.decoder.head.weight)

    def _discrimination(self, part: DecoderBatch) -> Loss:
        """Return the discriminator's loss; its fakes come of the decoder as it is now, without noise."""
        with autocast(self.recipe.engine, self.processes.device):
            with torch.no_grad():
                fake = self.decoder.eval()(part.latents).float()
            return self.objective.discriminator(fake, part.images, part.seeds, self.step)

    def learn(self, rate: float) -> Figures:
        self.between_steps = False  # from the start: the forward pass changes the discriminator's spectral norms
        batch = self.batch()
        figures = self.accumulate(self.decoder_optimizers, batch, self._reconstruction)
        figures["loss"] = figures.pop("total")
        norm = self.update(self.decoder_optimizers, self.decoder, rate)
        if self.recipe.reconstruction.judged(self.step):
            judged = self.accumulate(self.judge_optimizers, batch, self._discrimination, summed=True)
            self.decoder.train()
            for parameter in self.heads.parameters():  # they are small, and not the engine's
                if parameter.grad is not None:
                    self.processes.sum(parameter.grad)
            if (config := self.recipe.reconstruction).disc_schedule == "own":
                rate = learning_rate(self.recipe.train, self.step - config.disc_start)
            self.update(self.judge_optimizers, self.heads, rate, norm)
            figures |= {f"disc_{name}": value for name, value in judged.items()}
        return {**figures, "grad_norm": norm}

    # ---- its state

    def named(self) -> dict[str, nn.Parameter]:
        heads = {HEADS + name: value for name, value in self.heads.named_parameters()}
        return {**dict(self.decoder.named_parameters()), **heads}

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizers' state as NAME/KEY, and the heads with the vectors of their spectral norms."""
        yield from super().optimizer_state()
        for name, value in self.heads.state_dict().items():
            yield HEADS + name, value

    @property
    def provenance(self) -> dict[str, Any]:
        return {"encoder": self.encoder.origin.metadata, "held_out": self.rule}

    def require_provenance(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        require_same(f"the decoder in {folder}", Origin.of(manifest["encoder"]), self.encoder.origin)

    def restore(self, folder: Path) -> None:
        """Read a checkpoint; a run goes on as it began: what it has trained on is never held out."""
        rule = checkpoint.read_manifest(folder).get("held_out", LAST)
        if rule not in (BY_CLASS, LAST):
            raise ValueError(f"{folder} has images held out by the rule '{rule}'; go on with the version that wrote it")
        self.hold_out(rule)
        if rule == LAST and len(self.held_out) and self.processes.main:
            warn(f"this run holds out the last {len(self.held_out)} images, as it began; new ones spread them by class")
        super().restore(folder)

    def load(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load(files)
        stored = files["optimizer"]
        self.heads.load_state_dict({name.removeprefix(HEADS): stored[name] for name in stored if "/" not in name})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self.decoder.load_state_dict(weights)
        except RuntimeError as error:  # it lists names and shapes
            raise ValueError(f"these weights do not fit the recipe's decoder: {error}") from None

    def init_from(self, opened: Opened, source: str) -> list[str]:
        seen = "its decoder may have learned from images that are held out here, whose figures are then too good"
        return [*super().init_from(opened, source), *([seen] if len(self.held_out) else [])]
