"""Data order as a pure function of (seed, step): resume needs one integer, whatever the process count."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mvm import noise


@dataclass
class Order:
    """The global stream of sample indices: one fresh permutation of the data per epoch."""

    size: int
    seed: int
    _epoch: int = field(default=-1, init=False)
    _permutation: Tensor = field(default_factory=lambda: torch.empty(0), init=False)  # of the epoch last asked for

    def _of_epoch(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            shuffled = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            self._epoch, self._permutation = epoch, torch.from_numpy(shuffled)
        return self._permutation

    def positions(self, step: int, batch: int) -> Tensor:
        """Return the places in the stream that step `step` consumes."""
        return torch.arange(step * batch, (step + 1) * batch)

    def indices(self, positions: Tensor) -> Tensor:
        """Return the data index at each position."""
        epochs = positions // self.size
        out = torch.empty_like(positions)
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            out[here] = self._of_epoch(epoch)[positions[here] % self.size]
        return out

    def seeds(self, positions: Tensor) -> Tensor:
        """Return one seed per position, for the noise, time and dropout of that sample."""
        return noise.derive(self.seed, positions)
