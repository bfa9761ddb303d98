"""The exact step of the reverse family, and multistep coefficients as float64 tables.

With a = (1 + rho^2)/2, from s to t on the mean-velocity path (docs/explanation/solver.md; paper section 3.3, T = 1):

    x_t = (t/s)^a x_s + INT_t^s t^a [a r^(-a-1) + (1-a) r^(-a)] x0_hat(r) dr + sqrt(t (1 - (t/s)^(rho^2))) xi

A coefficient is the integral of that weight against a Lagrange polynomial in a variable phi(t). Tables
depend on times and rho only; they are made once, on the host, in float64.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvm.options import choose
from mvm.path import MEAN_VELOCITY

Array = NDArray[np.float64]
LEGENDRE = np.polynomial.legendre.leggauss(32)  # points and weights on (-1, 1): exact to 1e-14 for the grids in use


class Variable(ABC):
    """phi: the variable in which x0_hat is interpolated by a polynomial."""

    @abstractmethod
    def __call__(self, t: Array) -> Array: ...


@dataclass(frozen=True)
class PowerVariable(Variable):
    """phi = t^q."""

    q: float

    def __post_init__(self) -> None:
        if not 0 < self.q < np.inf:
            raise ValueError(f"q={self.q} is out of range; it must be positive and finite")

    def __call__(self, t: Array) -> Array:
        return t**self.q


@dataclass(frozen=True)
class LamVariable(Variable):
    """phi = lam, half log-SNR."""

    def __call__(self, t: Array) -> Array:
        return MEAN_VELOCITY.lam(t).numpy()


@dataclass(frozen=True)
class SoftLamVariable(Variable):
    """phi = log((r + b)/(1 + d r)), r = sigma/alpha: -lam between log b and -log d, where it saturates."""

    b: float
    d: float

    def __post_init__(self) -> None:
        for name, value in (("b", self.b), ("d", self.d)):
            if not 0 < value < np.inf:
                raise ValueError(f"{name}={value} is out of range; it must be positive and finite")

    def __call__(self, t: Array) -> Array:
        sigma, alpha = np.sqrt(t), 1 - t
        return np.log((sigma + self.b * alpha) / (alpha + self.d * sigma))


@dataclass(frozen=True)
class Quadrature:
    """One step s -> t: decay of x_s, noise std, and INT weight f = sum(weights * f(nodes))."""

    decay: float
    std: float
    nodes: Array
    weights: Array


def _interval(start: float, end: float) -> tuple[Array, Array]:
    """Gauss-Legendre points and weights of INT_end^start (negative weights when end > start)."""
    points, weights = LEGENDRE
    return (start + end + (start - end) * points) / 2, weights * (start - end) / 2


def _exact_coefficients(s: float, t: float, rho: float) -> tuple[float, float]:
    """Decay and noise std of the exact step; forward in time (t > s) only the ODE is defined."""
    a = (1 + rho**2) / 2
    return (t / s) ** a, max(0.0, -t * np.expm1(rho**2 * np.log(t / s))) ** 0.5


def _exact_in_log_t(s: float, t: float, rho: float) -> Quadrature:
    """tau exact; nodes uniform-ish in log t: right for phi = t^q, and finite at s = 1."""
    a = (1 + rho**2) / 2
    log_r, weights = _interval(np.log(s), np.log(t))
    r = np.exp(log_r)
    return Quadrature(*_exact_coefficients(s, t, rho), r, weights * t**a * (a * r**-a + (1 - a) * r ** (1 - a)))


def _lam_interval(s: float, t: float) -> tuple[Array, Array, Array]:
    """(lam, t of lam, weights of INT d lam from s to t)."""
    lam, weights = _interval(*(float(MEAN_VELOCITY.lam(end)) for end in (t, s)))
    return lam, MEAN_VELOCITY.t_from_lam(lam).numpy(), weights


def _exact_in_lam(s: float, t: float, rho: float) -> Quadrature:
    """tau exact; nodes in lam: right for phi = lam. Phi(r -> t) = rho^2/2 log(r/t), tau^2 = rho^2 (1-r)/(1+r)."""
    lam, r, weights = _lam_interval(s, t)
    growth = (t / r) ** (rho**2 / 2) * (1 + rho**2 * (1 - r) / (1 + r))
    return Quadrature(*_exact_coefficients(s, t, rho), r, weights * t**0.5 * np.exp(lam) * growth)


def _piecewise(s: float, t: float, rho: float, at: float) -> Quadrature:
    """tau held constant over the step at its value at time `at`, as SA-Solver does."""
    tau2 = rho**2 * (1 - at) / (1 + at)
    lam, r, weights = _lam_interval(s, t)
    end = float(MEAN_VELOCITY.lam(t))
    step = end - float(MEAN_VELOCITY.lam(s))
    decay = (t / s) ** 0.5 * np.exp(-tau2 * step)
    std = (-t * np.expm1(-2 * tau2 * step)) ** 0.5
    return Quadrature(decay, std, r, weights * t**0.5 * (1 + tau2) * np.exp(lam - tau2 * (end - lam)))


TAUS = ("exact", "start", "end")


def quadrature(s: float, t: float, rho: float, tau: str, variable: Variable) -> Quadrature:
    """Return the step s -> t with tau exact, or held at its value at the step's start or end."""
    choose("tau", tau, dict.fromkeys(TAUS))
    if s >= 1 and (tau != "exact" or isinstance(variable, LamVariable)):
        raise ValueError(f"t={s}: lam is infinite there; with phi = lam or a piecewise tau use a grid with t_max < 1")
    if tau != "exact":
        return _piecewise(s, t, rho, s if tau == "start" else t)
    return _exact_in_lam(s, t, rho) if isinstance(variable, LamVariable) else _exact_in_log_t(s, t, rho)


def lagrange(points: Array, at: Array) -> Array:
    """Return the Lagrange basis of `points`, row j at `at`: (len(points), len(at))."""
    rows = np.ones((len(points), len(at)))
    for j in range(len(points)):
        for k in range(len(points)):
            if k != j:
                rows[j] *= (at - points[k]) / (points[j] - points[k])
    return rows


@dataclass(frozen=True)
class Row:
    """Coefficients of one step: x_t = decay x_s + sum(predict * x0_hats) + std xi, newest x0_hat first.

    `correct` is used one evaluation later, when x0_hat at the new time stands first; () means no corrector.
    """

    decay: float
    std: float
    predict: tuple[float, ...]
    correct: tuple[float, ...] = ()


TO_DATA = Row(0.0, 0.0, (1.0,))  # the step into t = 0, for every solver: x0_hat is the answer


def ending_row(past: tuple[float, ...], variable: Variable) -> Row:
    """Return the step into t = 0 that puts there the polynomial through x0_hat at `past`, newest first.

    It is the exact step's limit: at t -> 0 its weight becomes a point mass at the end of the step.
    """
    return Row(0.0, 0.0, tuple(lagrange(variable(np.array(past)), variable(np.zeros(1)))[:, 0].tolist()))


def build_row(
    past: tuple[float, ...], t: float, rho: float, tau: str, variable: Variable, predictor: int, corrector: int
) -> Row:
    """Return the step from past[0] to t; `past` are the times evaluated so far, newest first."""
    if t == 0:  # the weight becomes a point mass at the end of the step
        return TO_DATA
    step = quadrature(past[0], t, rho, tau, variable)
    at = variable(step.nodes)

    def weights(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple((lagrange(variable(np.array(times)), at) @ step.weights).tolist())

    predict = weights(past[:predictor])
    correct = weights((t, *past[: corrector - 1])) if corrector else ()
    row = Row(float(step.decay), float(step.std), predict, correct)
    if not np.isfinite((row.decay, row.std, *predict, *correct)).all():
        raise ValueError(
            f"rho={rho}, predictor={predictor}, corrector={corrector}: the step from t={past[0]:g} to {t:g} has no "
            "finite coefficients; use a smaller rho, lower orders or fewer evaluations"
        )
    return row
