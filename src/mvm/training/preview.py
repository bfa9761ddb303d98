"""Previews of a run while it trains: a grid of pictures, and figures of which one chooses checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvm import noise
from mvm.data import Store
from mvm.distributed.processes import Processes
from mvm.files import atomic
from mvm.generate import Sampler, cycle_labels
from mvm.metrics.distances import Moments, frechet_distance, moments, shrunken_features
from mvm.metrics.lpips import BACKBONES, load_lpips
from mvm.metrics.restoration import WINDOW, psnr, ssim
from mvm.model import Model
from mvm.objective.reconstruction import Reconstruction
from mvm.path import Condition
from mvm.path.condition import map_tensors, rows
from mvm.pictures import grid, is_image, png_bytes, write_images
from mvm.pixels import to_uint8
from mvm.recipes import PreviewConfig
from mvm.training.data import spread
from mvm.training.dataset import stream_of
from mvm.training.logs import warn

if TYPE_CHECKING:
    from mvm.training.decoder_trainer import DecoderTrainer

QUALITY = "fd_pixels"
FD_VALUES = "fd_values"  # of float samples
REFERENCE = 10_000  # images of the data that the figure compares with

BATCH = 64  # images restored and compared at a time
COLUMNS = 8
RFD = "rfd_encoder"
LPIPS_HELD_OUT = "lpips_held_out"  # "lpips" is the loss of training images
Figure = Callable[[Tensor, Tensor], Tensor]  # (originals, restored), uint8 -> one value an image


class Preview(ABC):
    """preview(step) -> figures of the weights that the model has now.

    Every process makes its share of the images; under fsdp the network is spread over them, so all must call.
    """

    def __init__(self, config: PreviewConfig, count: int, folder: Path, processes: Processes) -> None:
        """count: how many images are made."""
        self.config, self.count, self.folder, self.processes = config, count, folder, processes
        self.before_write: Callable[[], object] = lambda: None  # raises where the folder is no longer to be written to

    def due(self, step: int) -> bool:
        """Whether a preview is due after step `step`."""
        return self.config.every > 0 and step % self.config.every == 0

    @property
    def share(self) -> Tensor:
        """This process's part of range(count), padded: equally many in each process, as under fsdp calls must be."""
        each = -(-self.count // self.processes.world)
        return torch.arange(self.processes.rank * each, (self.processes.rank + 1) * each) % self.count

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Write the grid, in the main process; a full disk is no reason to stop training."""
        try:
            if self.processes.main:
                self.before_write()
                write(self.folder / f"step-{step:08d}.png")
        except OSError as error:
            warn(f"the samples of step {step} could not be written ({error}); training goes on")

    @abstractmethod
    def __call__(self, step: int) -> dict[str, float]: ...

    @staticmethod
    @abstractmethod
    def quality(figures: dict[str, float]) -> float | None:
        """Return what checkpoints are chosen by, lower being better; None where there is no figure."""


def reference_moments(store: Store, as_sampled: Callable[[Tensor], Tensor] = lambda images: images) -> Moments:
    """Return the moments of samples spread evenly over the data; as_sampled: the store's samples as the model's are."""
    parts = spread(store, REFERENCE).split(1000)
    return moments(torch.cat([shrunken_features(as_sampled(store[part])).cpu() for part in parts]))


class FieldPreview(Preview):
    """Samples, always from the same seeds and conditions, and the Frechet distance of their features from the data's.

    Conditions are the classes in turn, or those of samples spread over the data. Of a stream there is no distance.
    """

    def __init__(self, config: PreviewConfig, model: Model, store: Store, folder: Path, processes: Processes) -> None:
        super().__init__(config, config.count, folder, processes)
        self.model, self.store, self.stream = model, store, stream_of(store)
        self.as_sampled: Callable[[Tensor], Tensor] = lambda images: images  # the store's samples as the model's are
        self.reference: Moments | None = None  # read when first needed
        # what is around a preview decides; weights that are not finite are for the training to refuse
        self.sampler = Sampler(model, precision=None, finite=False)
        self.labels, self.condition = torch.zeros(config.count, dtype=torch.int64), None
        if model.labelled:
            self.condition = self.labels = cycle_labels((), config.count, model.num_classes)
        self.seeds = noise.derive(model.recipe.seed, torch.arange(config.count) + (1 << 40))  # apart from training's

    def _images(self) -> Tensor:
        mine, settings = self.share, self.model.recipe.sample
        samples = self.sampler.images(rows(self.condition, mine), self.seeds[mine], settings, progress=False)
        return self.processes.gather(samples.images.cpu())[: self.count]

    def _conditions(self) -> Condition:
        """Return the conditions of samples spread over the data; None where there are none."""
        if not self.model.recipe.objective.conditional or self.model.recipe.condition.kind == "none":
            return None
        if self.stream is not None:
            given, count = self.stream.first.condition, 1
        else:
            indices = spread(self.store, self.count)
            given, count = self.store.gather(indices)[1], len(indices)
        return map_tensors(lambda _, tensor: tensor.cpu(), rows(given, torch.arange(self.count) % count))

    @torch.no_grad()
    def __call__(self, step: int) -> dict[str, float]:
        if self.condition is None:
            self.condition = self._conditions()
        images = self._images()
        grid = images[: self.config.grid]
        pictures = is_image(grid.shape[1:], grid.dtype) and grid.shape[1] in (1, 3)
        labels, suffix = self.labels[: len(grid)], ".png" if pictures else ".npy"
        self.save(step, lambda path: write_images(path.with_suffix(suffix), grid, labels, self.model.classes))
        if self.stream is not None:
            return {}
        self.reference = self.reference or reference_moments(self.store, self.as_sampled)
        name = QUALITY if images.dtype == torch.uint8 else FD_VALUES
        return {name: frechet_distance(moments(shrunken_features(images)), self.reference)}

    @staticmethod
    def quality(figures: dict[str, float]) -> float | None:
        return figures.get(QUALITY, figures.get(FD_VALUES))


def known_figures(objective: Reconstruction, side: int, device: torch.device) -> dict[str, Figure]:
    """Return the figures that images of this side have: LPIPS is the loss's own, or where its weights can be read.

    That with VGG16 has a name of its own: its values are others.
    """
    figures: dict[str, Figure] = {"psnr": psnr}
    if side >= WINDOW:
        figures["ssim"] = ssim
    config = objective.config
    if side >= BACKBONES[config.lpips_net].smallest:
        try:
            lpips = objective.lpips or load_lpips(config.lpips_weights, config.lpips_net)
            name = LPIPS_HELD_OUT if config.lpips_net == "alex" else f"{LPIPS_HELD_OUT}_{config.lpips_net}"
            figures[name] = lpips.to(device).measure
        except ValueError:
            if config.lpips_weights:
                raise
    return figures


def pairs(originals: Tensor, restored: Tensor, columns: int = COLUMNS) -> Tensor:
    """Return both as one list for a grid of so many columns: a row of originals above the row of what became of them.

    A last row that is not full is filled with white.
    """
    white = torch.full((-len(originals) % columns, *originals.shape[1:]), 255, dtype=torch.uint8)
    rows = (torch.cat((images, white)).unflatten(0, (-1, columns)) for images in (originals, restored))
    return torch.stack(tuple(rows), 1).flatten(0, 2)


class DecoderPreview(Preview):
    """Held-out images above what the decoder restores of them; PSNR, SSIM and LPIPS as means over the images, and the
    Frechet distance between the frozen encoder's class tokens of both (rfd_encoder; it is not rFID, and only comparable
    within an encoder).
    """

    def __init__(self, trainer: "DecoderTrainer", folder: Path) -> None:
        config = trainer.recipe.preview
        super().__init__(config, min(config.count, len(trainer.held_out)), folder, trainer.processes)
        self.trainer = trainer
        self.figures: dict[str, Figure] | None = None  # read when first needed

    def _measure(self, originals: Tensor, restored: Tensor) -> dict[str, float]:
        """Return the means of the figures of all images."""
        device, encoder = self.processes.device, self.trainer.encoder.encoder
        self.figures = self.figures or known_figures(self.trainer.objective, originals.shape[-1], device)
        values: dict[str, list[Tensor]] = {name: [] for name in self.figures}
        tokens: tuple[list[Tensor], ...] = [], []  # the frozen encoder's class tokens, in float64 on the CPU
        for batches in zip(restored.split(BATCH), originals.split(BATCH), strict=True):
            after, before = (images.to(device) for images in batches)  # one batch on the device at a time
            for name, figure in self.figures.items():
                values[name].append(figure(before, after))
            for images, summaries in zip((after, before), tokens, strict=True):
                summaries.append(encoder.summary(images).double().cpu())
        means = {name: float(torch.cat(each).mean()) for name, each in values.items()}
        if self.count >= 2:  # a covariance needs two
            means[RFD] = frechet_distance(*(moments(torch.cat(summaries)) for summaries in tokens))
        return means

    @torch.no_grad()
    def __call__(self, step: int) -> dict[str, float]:
        images, encoder, decoder = self.trainer.held_out, self.trainer.encoder, self.trainer.decoder
        mine = [to_uint8(decoder(encoder(images[part]))).cpu() for part in self.share.split(BATCH)]
        restored = self.processes.gather(torch.cat(mine))[: self.count]
        originals = torch.cat([images[part].cpu() for part in torch.arange(self.count).split(BATCH)])
        first = slice(self.config.grid)
        columns = min(COLUMNS, len(originals[first]))

        def write(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(path) as temporary:
                picture = grid(pairs(originals[first], restored[first], columns), columns, gap=2)
                temporary.write_bytes(png_bytes(picture))

        self.save(step, write)
        return self._measure(originals, restored)

    @staticmethod
    def quality(figures: dict[str, float]) -> float:
        return -figures["psnr"]
