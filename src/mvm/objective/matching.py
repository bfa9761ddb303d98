"""The loss: regression of the scaled mean velocity u (paper section 3.2), or of another prediction kind."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mvm import noise
from mvm.network import Output
from mvm.options import between, choose
from mvm.path import KINDS, Schedule, TimeLaw, perturb


class Network(Protocol):
    """What an objective asks of a network."""

    @property
    def null(self) -> int: ...

    def __call__(self, x: Tensor, level: Tensor, condition: Tensor) -> Output: ...


class Batch(NamedTuple):
    """Encoded samples (B, ...), int64 labels (B,), and one seed per sample for everything random."""

    x0: Tensor
    labels: Tensor
    seeds: Tensor


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


@dataclass(frozen=True)
class Matching:
    """objective(network, batch) -> Loss: mean squared error between prediction and target."""

    config: ObjectiveConfig
    schedule: Schedule
    law: TimeLaw

    def drop_labels(self, batch: Batch, null: int) -> Tensor:
        """Return labels with a share replaced by the null class, decided by each sample's seed."""
        dropped = noise.uniform(batch.seeds, noise.LABEL, (1,))[:, 0] < self.config.label_drop
        return torch.where(dropped, null, batch.labels)

    def __call__(self, network: Network, batch: Batch) -> Loss:
        noised = perturb(batch.x0, batch.seeds, self.schedule, self.law, self.config.kind)
        level = self.schedule.level(noised.t)
        output = network(noised.x, level, self.drop_labels(batch, network.null))
        outer = torch.mean((output.prediction - noised.target) ** 2)
        if output.inner is None:
            return Loss(outer, {"loss": outer.detach()})
        inner = torch.mean((output.inner - noised.target) ** 2)
        return Loss(outer + self.config.inner_weight * inner, {"loss": outer.detach(), "inner": inner.detach()})
