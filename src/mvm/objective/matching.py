"""The loss: regression of the scaled mean velocity u (paper section 3.2), or of another prediction kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mvm import noise
from mvm.network import Output
from mvm.objective.auxiliary import RepaConfig, alignment, match_grid, spatial_norm
from mvm.options import between, choose
from mvm.path import KINDS, Schedule, TimeLaw, perturb


class Network(Protocol):
    """What an objective asks of a network."""

    @property
    def null(self) -> int: ...

    def __call__(self, x: Tensor, level: Tensor, condition: Tensor, taps: Sequence[int] = ()) -> Output: ...


class Batch(NamedTuple):
    """Encoded samples (B, ...), int64 labels (B,), one seed per sample for everything random, a teacher's tokens.

    features (B, M, z) are a frozen encoder's of the clean images, on its own grid; None: no alignment.
    """

    x0: Tensor
    labels: Tensor
    seeds: Tensor
    features: Tensor | None = None

    def cut(self, part: slice) -> "Batch":
        """Return some of the samples."""
        features = None if self.features is None else self.features[part]
        return Batch(self.x0[part], self.labels[part], self.seeds[part], features)


class Loss(NamedTuple):
    """total: what is minimised; parts: named values for the log."""

    total: Tensor
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class ObjectiveConfig:
    """kind: what the network predicts. label_drop: share of samples trained as the null class."""

    kind: str = "u"
    label_drop: float = 0.1
    inner_weight: float = 0.5  # of the inner head's loss, where the network has one

    def __post_init__(self) -> None:
        choose("objective.kind", self.kind, KINDS)
        between("objective.label_drop", self.label_drop, 0, 1)
        between("objective.inner_weight", self.inner_weight, 0, 100)


def _square_error(prediction: Tensor, target: Tensor) -> Tensor:
    return torch.mean((prediction.to(target.dtype) - target) ** 2)


@dataclass(frozen=True)
class Matching:
    """objective(network, batch) -> Loss: mean squared error, and what the network's other heads learn.

    repa takes part where a projector is given and the batch has a teacher's features; `block` is the block aligned.
    """

    config: ObjectiveConfig
    schedule: Schedule
    law: TimeLaw
    repa: RepaConfig = field(default_factory=RepaConfig)
    block: int = 0

    def drop_labels(self, batch: Batch, null: int) -> Tensor:
        """Return labels with a share replaced by the null class, decided by each sample's seed."""
        dropped = noise.uniform(batch.seeds, noise.LABEL, (1,))[:, 0] < self.config.label_drop
        return torch.where(dropped, null, batch.labels)

    def align(self, tokens: Tensor, projector: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        """Return the alignment loss of hidden tokens (B, N, d) with a teacher's (B, M, z)."""
        target = match_grid(features.float(), round(tokens.shape[1] ** 0.5))
        return alignment(projector(tokens), spatial_norm(target, self.repa.normalise))

    def __call__(self, network: Network, batch: Batch, projector: Callable[[Tensor], Tensor] | None = None) -> Loss:
        noised = perturb(batch.x0, batch.seeds, self.schedule, self.law, self.config.kind)
        level = self.schedule.level(noised.t)
        teaches = projector is not None and batch.features is not None
        output = network(noised.x, level, self.drop_labels(batch, network.null), (self.block,) if teaches else ())
        total = _square_error(output.prediction, noised.target)
        parts = {"loss": total.detach()}
        if output.inner is not None:
            inner = _square_error(output.inner, noised.target)
            total, parts["inner"] = total + self.config.inner_weight * inner, inner.detach()
        if projector is not None and batch.features is not None:
            repa = self.align(output.features[self.block], projector, batch.features)
            total, parts["repa"] = total + self.repa.weight * repa, repa.detach()
        return Loss(total, parts)
