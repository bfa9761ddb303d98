"""Looks at a run while it trains: a grid of samples, and a cheap quality figure to choose checkpoints by."""

from pathlib import Path

import torch
from torch import Tensor

from mvm import noise
from mvm.data import Store
from mvm.distributed.processes import Processes
from mvm.generate import cycle_labels, generate_all, write_images
from mvm.metrics.distances import Moments, frechet_distance, moments, shrunken_features
from mvm.model import Model
from mvm.recipes import PreviewConfig
from mvm.training.logs import warn

QUALITY = "fd_pixels"
REFERENCE = 10_000  # images of the data that the figure compares with


def reference_moments(store: Store) -> Moments:
    """Return the moments of images spread evenly over the data."""
    count = min(len(store), REFERENCE)
    indices = torch.linspace(0, len(store) - 1, count, dtype=torch.float64).long()
    return moments(torch.cat([shrunken_features(store[part]).cpu() for part in indices.split(1000)]))


class Preview:
    """preview(step) -> quality: samples of the weights the model has now, always from the same seeds and classes.

    Every process samples its share; under fsdp the network is spread over them, so all must call.
    """

    def __init__(self, config: PreviewConfig, model: Model, store: Store, folder: Path, place: Processes) -> None:
        self.config, self.model, self.folder, self.place = config, model, folder, place
        self.store = store
        self.reference: Moments | None = None  # read when first needed
        self.labels = cycle_labels((), config.count, model.num_classes)
        self.seeds = noise.derive(model.recipe.seed, torch.arange(config.count) + (1 << 40))  # apart from training's

    def due(self, step: int) -> bool:
        """Whether a look is due after step `step`."""
        return self.config.every > 0 and step % self.config.every == 0

    def _images(self) -> Tensor:
        """Return the images of all processes; a share is padded so that under fsdp all make equally many calls."""
        share = -(-self.config.count // self.place.world)
        mine = torch.arange(self.place.rank * share, (self.place.rank + 1) * share) % self.config.count
        settings = self.model.recipe.sample
        found = generate_all(self.model, self.labels[mine], self.seeds[mine], settings, progress=False).images
        return self.place.gather(found)[: self.config.count]

    def _write(self, step: int, images: Tensor) -> None:
        """Write the grid; a full disk is no reason to stop training."""
        try:
            write_images(self.folder / f"step-{step:08d}.png", images, self.labels[: len(images)], self.model.classes)
        except OSError as error:
            warn(f"the samples of step {step} could not be written ({error}); training goes on")

    @torch.no_grad()
    def __call__(self, step: int) -> float:
        images = self._images()
        if self.place.main:
            self._write(step, images[: self.config.grid])
        self.reference = self.reference or reference_moments(self.store)
        return frechet_distance(moments(shrunken_features(images)), self.reference)
