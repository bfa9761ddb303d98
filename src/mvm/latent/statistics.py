"""Mean and variance of latents, of every channel at every position: exact, streaming, over processes.

moments = measure(encoder, images)                 # both mirrors of every image
statistics = moments.result(encoder.origin)
z = statistics.normalise(encoder(images))
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from mvm.files import put_in_place, temporary_beside
from mvm.latent.encoder import LatentEncoder, Pictures
from mvm.latent.fingerprint import Origin, fingerprint
from mvm.untrusted import cut

EPS = 1e-5  # added to the variance, as published


class Statistics(nn.Module):
    """z = (latent - mean) / sqrt(variance + EPS) and its inverse; mean, variance: float32 buffers (C, h, w).

    encoder: what the latents came from; count: how many there were, mirrors counted.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, mean: Tensor, variance: Tensor, encoder: Origin, count: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().float())
        self.register_buffer("variance", variance.detach().float())
        self.encoder, self.count = encoder, count

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the numbers and of the encoder's fingerprint."""
        return fingerprint({"encoder": self.encoder.fingerprint, "eps": EPS}, self.state_dict())

    def normalise(self, latents: Tensor) -> Tensor:
        """Return raw latents (B, C, h, w) with mean 0 and variance 1, in float32."""
        return (latents.float() - self.mean) / (self.variance + EPS).sqrt()

    def restore(self, latents: Tensor) -> Tensor:
        """Return normalised latents as the encoder gives them, in float32."""
        return latents.float() * (self.variance + EPS).sqrt() + self.mean

    def save(self, path: Path) -> None:
        """Write a .safetensors file, the encoder in its metadata."""
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        tensors = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, temporary, {**self.encoder.metadata, "count": str(self.count)})
        temporary.chmod(0o644)  # safetensors makes files private
        put_in_place(temporary, path)


def load_statistics(path: Path) -> Statistics:
    """Return the statistics in a file; what is no such file is a ValueError that names it."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            mean, variance = file.get_tensor("mean"), file.get_tensor("variance")
            found = Statistics(mean, variance, Origin.of(metadata), int(metadata["count"]))
        if mean.shape != variance.shape or not (mean.is_floating_point() and variance.is_floating_point()):
            raise ValueError(f"mean {tuple(mean.shape)} and variance {tuple(variance.shape)} are no pair of floats")
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"'{path}' holds no latent statistics ({cut(error)}); measure them again") from None
    return found


class LatentMoments:
    """Count, mean and sum of squares about it of a stream of latents, in float64, joined by Chan's rule.

    Nothing of the size of the mean is ever squared, so no digits are lost. Memory is two latents.
    """

    def __init__(self, shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.mean = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, latents: Tensor) -> None:
        """Take in a batch (B, C, h, w); an empty one changes nothing."""
        if latents.shape[1:] != self.mean.shape:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; (B, {tuple(self.mean.shape)}) is needed")
        if len(latents):
            latents = latents.detach().to(self.mean)
            mean = latents.mean(0)
            self._join(len(latents), mean, (latents - mean).square().sum(0))

    def merge(self, other: "LatentMoments") -> None:
        """Take in all that another has seen."""
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"latents of {tuple(self.mean.shape)} and {tuple(other.mean.shape)} do not mix")
        if other.count:
            self._join(other.count, other.mean.to(self.mean), other.squares.to(self.mean))

    def _join(self, count: int, mean: Tensor, squares: Tensor) -> None:
        total = self.count + count
        gap = mean - self.mean
        self.squares += squares + gap.square() * (self.count * count / total)
        self.mean += gap * (count / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """Return the variance in float64; divided by the count, so that normalised latents have variance 1."""
        return self.squares / self.count

    def result(self, encoder: Origin) -> Statistics:
        """Return the statistics of all latents so far, as the statistics of this encoder."""
        if self.count < 2:
            raise ValueError(f"statistics need at least 2 latents; there are {self.count}")
        if not bool(self.squares.isfinite().all()):
            raise ValueError("latents hold NaN or infinity; look at the images and the encoder's weights")
        return Statistics(self.mean, self.variance, encoder, self.count)

    def state(self) -> dict[str, Tensor]:
        """Return copies as CPU tensors with a leading axis of length 1, along which processes join theirs."""
        named = {"count": torch.tensor(self.count), "mean": self.mean, "squares": self.squares}
        return {name: value.to("cpu", copy=True)[None] for name, value in named.items()}

    @staticmethod
    def from_state(state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> "LatentMoments":
        """Return the moments of a state, or of several joined along the first axis, merged in that order."""
        found = LatentMoments(state["mean"].shape[1:], device)
        for count, mean, squares in zip(state["count"].tolist(), state["mean"], state["squares"], strict=True):
            part = LatentMoments(())
            part.count, part.mean, part.squares = count, mean, squares
            found.merge(part)
        return found


def measure(
    encoder: LatentEncoder, images: Pictures, *, batch: int = 64, rank: int = 0, world: int = 1, progress: bool = True
) -> LatentMoments:
    """Return the moments of both mirrors of all images; of `world` processes, each takes every world-th batch.

    Batches are cut alike however many processes there are: the last digit of a latent may depend on its neighbours.
    """
    device = next(encoder.parameters()).device
    found = LatentMoments(encoder.latent_shape, device)
    batches = torch.arange(len(images)).split(batch)[rank::world]
    for indices in tqdm(batches, desc="statistics", unit="batch", disable=not progress):
        shown = images[indices]
        found.add(encoder(shown))
        found.add(encoder(shown.flip(-1)))
    return found
