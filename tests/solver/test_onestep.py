"""One-step solvers: their coefficients by hand, on the mean-velocity path with T = 1 and on the linear flow."""

import math

import pytest
import torch

from mvm.path import LinearFlow, MeanVelocity
from mvm.solver.base import State, no_noise
from mvm.solver.onestep import HeunPlan, drift, euler_row

MV, S, T = MeanVelocity(), 0.49, 0.25


def test_drift_by_hand():
    """Theorem 6's ODE, dx/dt = (x - (1 + t) x0)/(2 t), and theorem 4's SDE, dx/dt = (x - x0)/t."""
    assert drift(MV, S, 0.0) == pytest.approx((1 / (2 * S), -(1 + S) / (2 * S)), rel=1e-12)
    assert drift(MV, S, 1.0) == pytest.approx((1 / S, -1 / S), rel=1e-12)
    assert drift(LinearFlow(), S, 0.0) == pytest.approx((1 / S, -1 / S), rel=1e-12)  # (x - x0)/t


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.75, 1.0, 1.5])
def test_euler_by_hand(rho):
    """In c = t^p, p = (1 + rho^2)/2: dt = t^(1-p)/p dc. At rho = 1 that is a Brownian bridge's step, t/s x + ..."""
    p = (1 + rho**2) / 2
    h = S ** (1 - p) / p * (T**p - S**p)
    row = euler_row(MV, S, T, rho)
    assert row.decay == pytest.approx(1 + h * (1 + rho**2) / (2 * S), rel=1e-12)
    assert row.decay == pytest.approx((T / S) ** p, rel=1e-12)  # exact: near 0 the state leaves x0_hat as c
    assert row.predict == pytest.approx((h * (-1 - (1 + rho**2) * (1 - S) / (2 * S)),), rel=1e-12)
    assert row.std == pytest.approx(rho * math.sqrt(S - T), abs=1e-15)
    assert row.correct == ()


def test_euler_on_the_linear_flow_is_the_usual_one():
    """x + (t - s)(x - x0)/s."""
    row = euler_row(LinearFlow(), S, T, 0.0)
    assert (row.decay, *row.predict, row.std) == pytest.approx((T / S, 1 - T / S, 0.0), rel=1e-12)


def test_heun_by_hand():
    """In c = sqrt(t), dx/dc = (x - (1 + c^2) x0)/c: the mean of the slopes at both ends, of a field that moves."""
    answers = {S: 0.3, T: -0.2}
    x, c, d = 1.1, math.sqrt(S), math.sqrt(T)
    first = (x - (1 + S) * answers[S]) / c
    predicted = x + (d - c) * first
    wanted = x + (d - c) * (first + (predicted - (1 + T) * answers[T]) / d) / 2
    plan = HeunPlan((S, T), MV, frozenset())
    found = plan.step(
        State(0, torch.tensor([[x]], dtype=torch.float64)),
        lambda state, t: torch.full_like(state, answers[t]),
        no_noise,
    )
    assert float(found.x) == pytest.approx(wanted, rel=1e-12)
    assert plan.nfe == 2
