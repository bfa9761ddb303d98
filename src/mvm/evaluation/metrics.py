"""Metrics as pure functions of features, in float64."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from mvm.pixels import to_unit


class Moments(NamedTuple):
    """Mean (d,) and covariance (d, d) of a set of features, and how many there were."""

    mean: Tensor
    covariance: Tensor
    count: int


def moments(features: Tensor) -> Moments:
    """Return mean and unbiased covariance of features (N, d)."""
    if features.ndim != 2 or features.shape[0] < 2:
        raise ValueError(f"features have shape {tuple(features.shape)}; (N, d) with N >= 2 is needed")
    features = features.double()
    mean = features.mean(0)
    centred = features - mean
    return Moments(mean, centred.T @ centred / (features.shape[0] - 1), features.shape[0])


def _square_root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semidefinite matrix; rounding below 0 is cut."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a^1/2 C_b C_a^1/2)^1/2)."""
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features have {len(a.mean)} and {len(b.mean)} dimensions; they must come from one space")
    root = _square_root(a.covariance)
    cross = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp_min(0).sqrt().sum()
    gap = ((a.mean - b.mean) ** 2).sum()
    return float(gap + a.covariance.trace() + b.covariance.trace() - 2 * cross)


def pixel_features(images: Tensor) -> Tensor:
    """Return uint8 images (N, ...) as vectors in [-1, 1] (N, d): a space that needs no network."""
    return to_unit(images).flatten(1).double()


SHRUNKEN_SIDE = 8


def shrunken_features(images: Tensor) -> Tensor:
    """Return uint8 images (N, C, H, W) as vectors of at most 8x8 means per channel: layout and colour, no detail."""
    unit = to_unit(images)
    return adaptive_avg_pool2d(unit, min(SHRUNKEN_SIDE, unit.shape[-1])).flatten(1).double()
