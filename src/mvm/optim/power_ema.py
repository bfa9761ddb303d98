"""Power-function averages of the weights, and other averages rebuilt from stored ones after training.

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and its appendix.
The average after T steps has the profile p(t) = (gamma + 1) t^gamma / T^(gamma + 1) on [0, T]. Its deviation is a
fixed share sigma_rel of the run, whatever the length; averages of two gammas, stored now and then, span most others.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WIDEST = 0.28  # a flat average has 1/sqrt(12) = 0.289: gamma is 0 there, and negative beyond


def exponent(sigma_rel: float) -> float:
    """Return gamma of a relative width sigma_rel = sqrt((gamma + 1) / ((gamma + 2)^2 (gamma + 3))), the profile's
    deviation over the run: the largest root of a cubic."""
    if not 0 < sigma_rel < WIDEST:
        raise ValueError(
            f"the relative width {sigma_rel} is out of range for an average (train.power, --width); it must lie in "
            f"(0, {WIDEST}), e.g. 0.05 or 0.1"
        )
    inverse = sigma_rel**-2.0
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])  # (gamma + 2)^2 (gamma + 3) = inverse (gamma + 1)
    return float(roots.real.max())  # all three are real up to WIDEST, and the other two negative


def decay_at(gamma: float, step: int) -> float:
    """Return beta = (1 - 1/t)^(gamma + 1) with t = step + 1, where `step` steps were done before this one.

    After n steps the weights of step i then count (i^(gamma + 1) - (i - 1)^(gamma + 1)) / n^(gamma + 1), which is the
    profile's integral over that step. beta is 0 at first: nothing of the initial weights stays.
    """
    return (step / (step + 1)) ** (gamma + 1)


class Snapshot(NamedTuple):
    """An average, stored or wanted: the steps done when it is taken, and its exponent."""

    step: int
    gamma: float


def fit(snapshots: Sequence[Snapshot], target: Snapshot) -> tuple[np.ndarray, float]:
    """Return one coefficient a snapshot, of the sum of profiles nearest to the target's in L2, and its relative error.

    |fit - target| / |target| of 0.01 is the average asked for, 0.3 is another one: narrower than the narrowest stored
    average, or between steps stored far apart, it is large.
    Differences from the nearest stored profile are fitted: coefficients then add up to 1 by construction, so that
    weights that never moved come out as they were, and a target that is stored leaves nothing to fit.
    """
    if not snapshots:
        raise ValueError("snapshots is empty; give at least one stored average")
    stored, wanted = np.array(snapshots, dtype=np.float64), np.array(target, dtype=np.float64)  # (n, 2), (2,)
    nearest = int(np.argmin(_inner(stored, stored) - 2 * _inner(stored, wanted)))
    origin, rest = stored[nearest], np.delete(stored, nearest, axis=0)
    gram = _centred(rest[:, None], rest[None], origin)  # (n - 1, n - 1)
    moments = _centred(rest, wanted, origin)  # (n - 1,)
    # least squares, rows scaled to unit length as early profiles are far longer; a snapshot given twice has length 0
    length = np.sqrt(np.maximum(gram.diagonal(), np.finfo(np.float64).eps * gram.max(initial=1e-300)))
    share = np.linalg.lstsq(gram / length / length[:, None], moments / length, rcond=None)[0] / length
    residual = _centred(wanted, wanted, origin) - 2 * share @ moments + share @ gram @ share
    error = np.sqrt(max(0.0, residual) / _inner(wanted, wanted))  # rounding may leave it just below 0
    return np.insert(share, nearest, 1 - share.sum()), float(error)


def _inner(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return <p_a, p_b> = (ga + 1)(gb + 1) / (ga + gb + 1) (small/large)^g / large, g the later profile's exponent.

    The powers t^g are divided out before they are taken: a ratio at most 1 cannot overflow, whatever the steps.
    """
    (step_a, gamma_a), (step_b, gamma_b) = np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0)
    small, large = np.minimum(step_a, step_b), np.maximum(step_a, step_b)
    later = np.where(step_a >= step_b, gamma_a, gamma_b)
    return (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1) * (small / large) ** later / large


def _centred(a: np.ndarray, b: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Return <p_a - p_origin, p_b - p_origin>."""
    return _inner(a, b) - _inner(a, origin) - _inner(origin, b) + _inner(origin, origin)


@torch.no_grad()
def combine(tensors: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the sum of coefficient * weights by name, in float32 or wider.

    Besides the sum one snapshot is in memory at a time, if the iterable loads them as it goes.
    """
    total: dict[str, Tensor] = {}
    for coefficient, weights in tensors:
        if total and weights.keys() != total.keys():
            odd = sorted(weights.keys() ^ total.keys())
            raise ValueError(f"tensors of different networks: {odd} are not in all; combine snapshots of one run")
        for name, value in weights.items():
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            before = total.get(name)
            total[name] = float(coefficient) * wide if before is None else before.add_(wide, alpha=float(coefficient))
        del weights  # or it would outlive the loading of the next
    if not total:
        raise ValueError("tensors is empty; give at least one (coefficient, weights)")
    return total
