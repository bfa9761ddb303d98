"""What a check is, and the oracle several of them share."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mvm import oracle


@dataclass(frozen=True)
class Check:
    """One measured value against its limit; `at_least` turns the comparison round."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


Checks = Iterator[Check]


def peak(x: Tensor) -> float:
    return float(x.detach().abs().max())


def lopsided() -> oracle.Mixture:
    """A lopsided 1-D mixture: nothing about it is symmetric, so no error can cancel."""
    return oracle.mixture(
        torch.tensor([[-0.9], [0.3], [1.1]]), torch.tensor([0.3, 0.15, 0.5]), torch.tensor([1.0, 2, 3])
    )
