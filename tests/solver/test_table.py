"""Step coefficients against scipy: quadrature of the weight (docs/explanation/solver.md), and the SDE's moments."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad, solve_ivp

from mvm.solver import LamVariable, PowerVariable, adams
from mvm.solver.table import TO_DATA, build_row, lagrange, quadrature

LAM, SQRT, ROOT = LamVariable(), PowerVariable(0.5), PowerVariable(0.8)
RHOS = [0.0, 0.5, 0.75, 1.0]
PAST = (0.35, 0.6, 0.8, 0.93)


def lam(t):
    return math.log1p(-t) - 0.5 * math.log(t)


def time_of(value):
    r = math.exp(value)
    return (2 / (r + math.sqrt(r * r + 4))) ** 2


def phi(variable, t):
    return lam(t) if isinstance(variable, LamVariable) else t**variable.q


def basis(variable, times, j, r):
    """Lagrange polynomial j of `times` in phi, at time r."""
    others = [phi(variable, s) for k, s in enumerate(times) if k != j]
    return math.prod((phi(variable, r) - p) / (phi(variable, times[j]) - p) for p in others)


def by_weight(s, t, rho, variable, times, j):
    """INT_t^s t^a [a r^(-a-1) + (1-a) r^(-a)] L_j(r) dr (docs/explanation/solver.md); in log r, for precision."""
    a = (1 + rho**2) / 2

    def integrand(y):
        r = math.exp(y)
        return t**a * (a * r ** (-a - 1) + (1 - a) * r**-a) * basis(variable, times, j, r) * r

    return quad(integrand, math.log(t), math.log(s), epsabs=1e-13, epsrel=1e-13, limit=200)[0]


def by_moments(s, t, rho, tau, variable, times):
    """Decay, std and one weight per time from dy = [(1+k) e^lam x0 - k y] dlam + sqrt(2 k) dw, y = x/sqrt(t)."""
    fixed = {"start": s, "end": t}.get(tau)

    def k(value):
        at = time_of(value) if fixed is None else fixed
        return rho**2 * (1 - at) / (1 + at)

    def rate(value, y):
        r = time_of(value)
        drive = [(1 + k(value)) * math.exp(value) * basis(variable, times, j, r) for j in range(len(times))]
        return [
            -k(value) * y[0],
            2 * k(value) * (1 - y[1]),
            *(d - k(value) * w for d, w in zip(drive, y[2:], strict=True)),
        ]

    begin = [1.0, 0.0, *[0.0] * len(times)]
    y = solve_ivp(rate, (lam(s), lam(t)), begin, method="DOP853", rtol=1e-12, atol=1e-14).y[:, -1]
    return y[0] * math.sqrt(t / s), math.sqrt(max(0.0, t * y[1])), y[2:] * math.sqrt(t)


@pytest.mark.parametrize("variable", [LAM, SQRT, ROOT], ids=str)
@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("t", [0.3, 0.1, 1e-3])
def test_exact_tau_is_the_weights_integral(variable, rho, t):
    row = build_row(PAST, t, rho, "exact", variable, 3, 4)
    a = (1 + rho**2) / 2
    assert row.decay == pytest.approx((t / PAST[0]) ** a, rel=1e-13)
    assert row.std == pytest.approx(math.sqrt(t * (1 - (t / PAST[0]) ** (rho**2))), rel=1e-12)
    predict = [by_weight(PAST[0], t, rho, variable, PAST[:3], j) for j in range(3)]
    nodes = (t, *PAST[:3])
    correct = [by_weight(PAST[0], t, rho, variable, nodes, j) for j in range(4)]
    assert row.predict == pytest.approx(predict, rel=1e-9, abs=1e-10)
    assert row.correct == pytest.approx(correct, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("tau", ["exact", "start", "end"])
@pytest.mark.parametrize("variable", [LAM, ROOT], ids=str)
@pytest.mark.parametrize("rho", [0.0, 0.75, 1.0])
def test_every_tau_solves_the_moment_equations(tau, variable, rho):
    t = 0.12
    row = build_row(PAST, t, rho, tau, variable, 3, 3)
    for got, times in ((row.predict, PAST[:3]), (row.correct, (t, *PAST[:2]))):
        decay, std, weights = by_moments(PAST[0], t, rho, tau, variable, times)
        assert row.decay == pytest.approx(decay, rel=1e-9)
        assert row.std == pytest.approx(std, rel=1e-8, abs=1e-12)
        assert got == pytest.approx(weights.tolist(), rel=1e-8, abs=1e-9)


def test_tau_start_and_end_differ_but_agree_on_small_steps():
    wide = [build_row((0.5,), 0.1, 1.0, tau, LAM, 1, 0).std for tau in ("start", "exact", "end")]
    assert wide[0] < wide[1] < wide[2]  # tau grows towards the data
    near = [build_row((0.5,), 0.4999, 1.0, tau, LAM, 1, 0).std for tau in ("start", "exact", "end")]
    assert near[0] == pytest.approx(near[2], rel=2e-4)
    # with tau held at the step's start, a step of rho = 1 by hand
    tau2, h = (1 - 0.5) / (1 + 0.5), lam(0.1) - lam(0.5)
    assert wide[0] == pytest.approx(math.sqrt(0.1 * (1 - math.exp(-2 * tau2 * h))), rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(
    st.floats(0.05, 0.95),
    st.floats(1e-3, 0.95),
    st.floats(0, 1.5),
    st.integers(1, 4),
    st.sampled_from([LAM, SQRT, ROOT]),
)
def test_weights_sum_to_the_constants(s, ratio, rho, order, variable):
    t = s * ratio
    past = tuple(s + (0.99 - s) * i / 4 for i in range(4))
    row = build_row(past, t, rho, "exact", variable, order, order)
    a = (1 + rho**2) / 2
    want = (1 - t) - (t / s) ** a * (1 - s)
    assert sum(row.predict) == pytest.approx(want, abs=1e-9 * max(1, sum(map(abs, row.predict))))
    assert sum(row.correct) == pytest.approx(want, abs=1e-9 * max(1, sum(map(abs, row.correct))))
    assert len(row.predict) == order
    assert len(row.correct) == order


@pytest.mark.parametrize(("s", "t"), [(1.0, 0.5), (0.7, 0.1), (1.0, 1e-6), (0.2, 0.1999)])
def test_rho_one_is_a_brownian_bridge(s, t):
    row = build_row((s,), t, 1.0, "exact", ROOT, 1, 0)
    assert row.decay == pytest.approx(t / s, rel=1e-13)
    assert row.predict[0] == pytest.approx(1 - t / s, rel=1e-12)
    assert row.std == pytest.approx(math.sqrt(t * (s - t) / s), rel=1e-10)
    assert row.correct == ()


@pytest.mark.parametrize("rho", RHOS)
def test_two_steps_of_constant_x0_are_one(rho):
    first = build_row((0.9,), 0.4, rho, "exact", ROOT, 1, 0)
    second = build_row((0.4,), 0.05, rho, "exact", ROOT, 1, 0)
    whole = build_row((0.9,), 0.05, rho, "exact", ROOT, 1, 0)
    assert first.decay * second.decay == pytest.approx(whole.decay, rel=1e-12)
    assert second.decay * first.predict[0] + second.predict[0] == pytest.approx(whole.predict[0], rel=1e-12)
    assert math.hypot(second.decay * first.std, second.std) == pytest.approx(whole.std, rel=1e-12)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("std", [0.1, 2.0])
def test_the_step_keeps_the_paths_marginals(rho, std):
    """From exact x_s with the exact linear x0_hat: many small steps keep the variance of x_t."""
    times = np.geomspace(0.9, 0.05, 801)
    variance = (0.1 * std) ** 2 + 0.9
    for s, t in pairwise(times):
        row = build_row((s,), t, rho, "exact", ROOT, 1, 0)
        gain = (1 - s) * std**2 / ((1 - s) ** 2 * std**2 + s)
        variance = (row.decay + row.predict[0] * gain) ** 2 * variance + row.std**2
    assert variance == pytest.approx((0.95 * std) ** 2 + 0.05, rel=0.02)


@pytest.mark.parametrize(("s", "t"), [(0.1, 0.4), (0.02, 0.9), (0.3, 0.31)])
@pytest.mark.parametrize("variable", [LAM, SQRT], ids=str)
def test_forward_in_time_rows_of_the_ode(s, t, variable):
    past = (s, s / 2, s / 4)
    row = build_row(past, t, 0.0, "exact", variable, 3, 4)
    assert row.std == 0
    assert row.decay == pytest.approx(math.sqrt(t / s), rel=1e-13)
    want = [by_weight(s, t, 0.0, variable, past, j) for j in range(3)]
    assert row.predict == pytest.approx(want, rel=1e-8, abs=1e-8 * max(map(abs, want)))
    assert sum(row.predict) == pytest.approx((1 - t) - math.sqrt(t / s) * (1 - s), abs=1e-9)
    back = build_row((t,), s, 0.0, "exact", variable, 1, 0)
    there = build_row((s,), t, 0.0, "exact", variable, 1, 0)
    assert there.decay * back.decay == pytest.approx(1, rel=1e-12)
    assert back.decay * there.predict[0] + back.predict[0] == pytest.approx(0, abs=1e-11)


def test_the_step_into_data_and_out_of_noise():
    assert build_row((0.2, 0.5), 0.0, 0.7, "exact", ROOT, 3, 4) == TO_DATA
    assert (TO_DATA.decay, TO_DATA.std, TO_DATA.predict, TO_DATA.correct) == (0.0, 0.0, (1.0,), ())
    for rho in RHOS:
        row = build_row((1.0,), 0.3, rho, "exact", ROOT, 3, 4)
        assert row.decay == pytest.approx(0.3 ** ((1 + rho**2) / 2))
        assert row.predict == pytest.approx((0.7,))
        assert len(row.correct) == 2


def test_a_vanishing_step_keeps_its_digits():
    """Unshifted monomials in float32 were 36 % wrong here: the weights are h/s at first order."""
    s, h = 0.3, 1e-7
    past = (s, s + h, s + 2 * h)
    row = build_row(past, s - h, 0.0, "exact", ROOT, 3, 0)
    # Adams-Bashforth 3 times the integrand's weight (r^-1.5 + r^-0.5)/2 s^0.5
    weight = h * s**0.5 * (s**-1.5 + s**-0.5) / 2
    assert row.predict == pytest.approx([weight * c for c in (23 / 12, -16 / 12, 5 / 12)], rel=1e-5)


def test_orders_grow_with_the_history():
    rows = adams(3, 4, 2).plan_times(None, (1.0, 0.7, 0.4, 0.2, 0.1, 0.0), 0.5).rows
    assert [len(row.predict) for row in rows] == [1, 2, 3, 3, 2]
    assert [len(row.correct) for row in rows] == [2, 3, 4, 4, 0]


def test_lagrange_basis_reproduces_polynomials():
    points, at = np.array([0.1, 0.4, 0.7, 1.3]), np.linspace(-1, 2, 9)
    rows = lagrange(points, at)
    for power in range(4):
        np.testing.assert_allclose(points**power @ rows, at**power, atol=1e-12)


def test_unknown_tau():
    with pytest.raises(ValueError, match="'exact'"):
        quadrature(0.5, 0.1, 0.0, "exactly", ROOT)
