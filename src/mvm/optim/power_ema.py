"""Power-function averages of the weights, and other averages rebuilt from stored ones after training.

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and its appendix.
The average after T steps has the profile p(t) = (gamma + 1) t^gamma / T^(gamma + 1) on [0, T]. Its deviation is a
fixed share sigma_rel of the run, whatever the length; averages of two gammas, stored now and then, span most others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mvm.options import at_least

WIDEST = 0.28  # a flat average has 1/sqrt(12) = 0.289: gamma is 0 there, and negative beyond


def relative_width(gamma: float) -> float:
    """Return sigma_rel = sqrt((gamma + 1) / ((gamma + 2)^2 (gamma + 3))), the profile's deviation over the run."""
    return float(np.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))))


def exponent(sigma_rel: float) -> float:
    """Return gamma of a relative width: the largest root of the cubic in relative_width."""
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


@dataclass(frozen=True)
class Snapshot:
    """An average, stored or wanted: the steps done when it is taken, and its exponent."""

    step: int
    gamma: float

    def __post_init__(self) -> None:
        at_least("step", self.step, 1)
        at_least("gamma", self.gamma, 0)


def coefficients(snapshots: Sequence[Snapshot], target: Snapshot) -> np.ndarray:
    """Return one coefficient a snapshot: the sum of profiles nearest to the target's in L2.

    They add up to 1, so that weights that never moved come out as they were. A target that is stored gets 1 itself,
    and the others 0, up to rounding.
    """
    return _fit(snapshots, target)[0]


def fit_error(snapshots: Sequence[Snapshot], target: Snapshot) -> float:
    """Return |fit - target| / |target| of the profiles in L2: 0.01 is the average asked for, 0.3 is another one.

    Narrower than the narrowest stored average, or between steps stored far apart, it is large.
    """
    return _fit(snapshots, target)[1]


def _fit(snapshots: Sequence[Snapshot], target: Snapshot) -> tuple[np.ndarray, float]:
    """Return (coefficients, relative error), with the nearest stored profile as the origin.

    Differences from it are fitted, not profiles: the coefficients then add up to 1 by construction, and a target
    that is stored leaves nothing to fit.
    """
    if not snapshots:
        raise ValueError("snapshots is empty; give at least one stored average")
    stored, wanted = _rows(snapshots), _rows([target])[0]  # (n, 2), (2,)
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


def _rows(snapshots: Sequence[Snapshot]) -> np.ndarray:
    """Return (step, gamma) of each, (n, 2)."""
    return np.array([(entry.step, entry.gamma) for entry in snapshots], dtype=np.float64)


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


def combine(tensors: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the sum of coefficient * weights by name, in float32 or wider.

    Besides the sum one snapshot is in memory at a time, if the iterable loads them as it goes.
    """
    total: dict[str, Tensor] = {}
    for coefficient, weights in tensors:
        _add(total, float(coefficient), weights)
        del weights  # or it would outlive the loading of the next
    if not total:
        raise ValueError("tensors is empty; give at least one (coefficient, weights)")
    return total


@torch.no_grad()
def _add(total: dict[str, Tensor], coefficient: float, weights: Mapping[str, Tensor]) -> None:
    """total += coefficient * weights, in place; an empty total begins as zeros."""
    if total and weights.keys() != total.keys():
        odd = sorted(weights.keys() ^ total.keys())
        raise ValueError(f"tensors of different networks: {odd} are not in all; combine snapshots of one run")
    for name, value in weights.items():
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        total[name] = total[name].add_(wide, alpha=coefficient) if name in total else coefficient * wide
