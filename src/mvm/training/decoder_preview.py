"""Looks at stage 1 while it trains: held-out images beside what the averaged decoder restores of them, and figures."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mvm.files import put_in_place, temporary_beside
from mvm.metrics.distances import frechet_distance, moments
from mvm.metrics.lpips import LPIPS, SMALLEST, load_lpips
from mvm.metrics.restoration import WINDOW, psnr, ssim
from mvm.objective.reconstruction import Reconstruction
from mvm.pictures import grid, png_bytes
from mvm.pixels import to_uint8
from mvm.training.decoder_trainer import DecoderTrainer
from mvm.training.logs import warn

BATCH = 64  # images restored and compared at a time
COLUMNS = 8
RFD = "rfd_encoder"
LPIPS_HELD_OUT = "lpips_held_out"  # "lpips" is the loss of training images
Figure = Callable[[Tensor, Tensor], Tensor]  # (originals, restored), uint8 -> one value an image


def quality(figures: dict[str, float]) -> float:
    """Return what checkpoints are chosen by, lower being better: minus the PSNR."""
    return -figures["psnr"]


def _lpips(objective: Reconstruction) -> LPIPS | None:
    """Return LPIPS as a figure: the loss's own, else what can be read; None where no weights were given or found."""
    if objective.lpips is not None:
        return objective.lpips
    try:
        return load_lpips(objective.config.lpips_weights)
    except ValueError:
        if objective.config.lpips_weights:
            raise
        return None


def known_figures(objective: Reconstruction, side: int, device: torch.device) -> dict[str, Figure]:
    """Return the figures that images of this side have."""
    found: dict[str, Figure] = {"psnr": psnr}
    if side >= WINDOW:
        found["ssim"] = ssim
    if side >= SMALLEST and (lpips := _lpips(objective)) is not None:
        found[LPIPS_HELD_OUT] = lpips.to(device).measure
    return found


def pairs(originals: Tensor, restored: Tensor, columns: int = COLUMNS) -> Tensor:
    """Return both as one list for a grid of so many columns: a row of originals above the row of what became of them.

    A last row that is not full is filled with white.
    """
    missing = -len(originals) % columns
    white = torch.full((missing, *originals.shape[1:]), 255, dtype=torch.uint8)
    rows = (torch.cat((images, white)).unflatten(0, (-1, columns)) for images in (originals, restored))
    return torch.stack(tuple(rows), 1).flatten(0, 2)


class DecoderPreview:
    """preview(step) -> figures: PSNR, SSIM and LPIPS as means over held-out images, and the Frechet distance between
    the frozen encoder's class tokens of both (rfd_encoder; it is not rFID, and only comparable within an encoder).

    Every process restores its share; the weights are those the decoder has now.
    """

    def __init__(self, trainer: DecoderTrainer, folder: Path) -> None:
        self.trainer, self.folder, self.place = trainer, folder, trainer.place
        self.config = trainer.recipe.preview
        self.count = min(self.config.count, len(trainer.held_out))
        self.figures: dict[str, Figure] | None = None  # read when first needed

    def due(self, step: int) -> bool:
        """Whether a look is due after step `step`."""
        return self.config.every > 0 and step % self.config.every == 0

    def _restored(self) -> Tensor:
        """Return all restored images on the CPU; a share is padded, so that all of them have one length."""
        trainer, share = self.trainer, -(-self.count // self.place.world)
        mine = torch.arange(self.place.rank * share, (self.place.rank + 1) * share) % self.count
        found = [to_uint8(trainer.decoder(trainer.encoder(trainer.held_out[part]))).cpu() for part in mine.split(BATCH)]
        return self.place.gather(torch.cat(found))[: self.count]

    def _measure(self, originals: Tensor, restored: Tensor) -> dict[str, float]:
        """Return the means of the figures of all images."""
        objective, side = self.trainer.objective, originals.shape[-1]
        self.figures = self.figures or known_figures(objective, side, self.place.device)
        parts = list(zip(originals.split(BATCH), restored.split(BATCH), strict=True))
        found = {
            name: float(torch.cat([figure(*(half.to(self.place.device) for half in part)) for part in parts]).mean())
            for name, figure in self.figures.items()
        }
        if self.count >= 2:  # a covariance needs two
            found[RFD] = frechet_distance(*(moments(self._summaries(images)) for images in (restored, originals)))
        return found

    def _summaries(self, images: Tensor) -> Tensor:
        """Return the frozen encoder's class tokens, in float64 on the CPU."""
        encoder = self.trainer.encoder.encoder
        return torch.cat([encoder.summary(part.to(self.place.device)).double().cpu() for part in images.split(BATCH)])

    def _write(self, step: int, originals: Tensor, restored: Tensor) -> None:
        """Write the grid; a full disk is no reason to stop training."""
        shown, out = slice(self.config.grid), self.folder / f"step-{step:08d}.png"
        columns = min(COLUMNS, len(originals[shown]))
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_beside(out)
            temporary.write_bytes(png_bytes(grid(pairs(originals[shown], restored[shown], columns), columns, gap=2)))
            put_in_place(temporary, out)
        except OSError as error:
            warn(f"the samples of step {step} could not be written ({error}); training goes on")

    @torch.no_grad()
    def __call__(self, step: int) -> dict[str, float]:
        restored = self._restored()
        originals = torch.cat([self.trainer.held_out[part].cpu() for part in torch.arange(self.count).split(BATCH)])
        if self.place.main:
            self._write(step, originals, restored)
        return self._measure(originals, restored)
