"""Solvers against exactly solvable problems: one Gaussian (linear, closed form) and a small mixture."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchdiffeq import odeint

from mvm import noise
from mvm.oracle import gaussian, mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, equal_snr, full_time
from mvm.solver import (
    Adaptive,
    Euler,
    EulerMaruyama,
    Heun,
    LamGrid,
    LamVariable,
    PowerGrid,
    PowerVariable,
    PredictorCorrector,
    adams,
    adams_power,
    run,
    sa,
    sample,
    solve,
    solver_named,
)

MV = MeanVelocity()
SCHEDULES = [MV, MeanVelocity(2.5), LinearFlow(), VariancePreserving()]
FIXED = ["adams", "sa", "heun", "euler", "euler-maruyama"]  # every solver that takes an nfe
SDE = ["adams", "sa", "euler-maruyama"]


def small():
    means = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return mixture(means, torch.tensor([0.2, 0.5, 0.1, 0.3], dtype=torch.float64), labels=torch.tensor([0, 1, 1, 0]))


def start(batch=4):
    return noise.initial(torch.arange(batch), (3,), torch.float64)


def evaluator(oracle, schedule=MV):
    return lambda x, t: oracle.denoise(x, full_time(x, t), schedule)


def silent(index):
    raise AssertionError("an ODE solver asked for noise")


def flow_of_gaussian(x, s, t, schedule, mean, std):
    """The probability flow keeps the standardised state: exact."""
    spread = lambda r: math.hypot(float(schedule.alpha(r)) * std, float(schedule.sigma(r)))  # noqa: E731
    return float(schedule.alpha(t)) * mean + (x - float(schedule.alpha(s)) * mean) * spread(t) / spread(s)


# --- order ---------------------------------------------------------------------------------------------------------


def error(solver, schedule, steps):
    """Worst relative error of x(0.1), over several Gaussians, from the exact x(0.9)."""
    times = tuple((np.linspace(0.9, 0.1, steps + 1) * schedule.end).tolist())
    plan = solver.plan_times(schedule, times, 0.0)
    worst = 0.0
    for std in (0.3, 0.7, 2.0):
        got = run(plan, evaluator(gaussian(0.3, std), schedule), torch.tensor([[1.3]], dtype=torch.float64), silent)
        want = flow_of_gaussian(1.3, times[0], times[-1], schedule, 0.3, std)
        worst = max(worst, abs(float(got.x) - want))
    return worst


def check_order(solver, schedule, slack=0.35):
    coarse, fine = error(solver, schedule, 120), error(solver, schedule, 240)
    measured = math.log2(coarse / fine)
    assert solver.order - slack < measured < solver.order + 1


@pytest.mark.parametrize("make", [adams, sa])
@pytest.mark.parametrize(("predictor", "corrector"), [(1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (2, 3), (3, 3), (3, 4)])
def test_order_of_the_multistep_solvers(make, predictor, corrector):
    solver = make(predictor, corrector)
    expected = min(corrector, predictor + 1, 3) if corrector else min(predictor, 2)
    assert solver.order == expected
    check_order(solver, MV)


@pytest.mark.parametrize("solver", [Euler(), EulerMaruyama(), Heun()], ids=lambda s: s.name)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_order_of_the_one_step_solvers(solver, schedule):
    assert solver.order == (2 if solver.name == "heun" else 1)
    check_order(solver, schedule)


def test_the_default_is_far_more_exact_than_euler():
    assert error(adams(), MV, 40) < 0.1 * error(Heun(), MV, 40)  # and at half of Heun's evaluations
    assert error(Heun(), MV, 40) < 0.1 * error(Euler(), MV, 40)


@pytest.mark.parametrize("solver", [adams(), sa(), Heun(), Euler()], ids=lambda s: s.name)
def test_forward_in_time_encodes(solver):
    """Times may rise: the ODE runs from data to noise, and back to where it began."""
    up = tuple(np.linspace(0.1, 0.9, 101).tolist())
    x = torch.tensor([[0.4], [-1.0]], dtype=torch.float64)
    there = run(solver.plan_times(MV, up, 0.0), evaluator(gaussian(0.3, 0.5)), x, silent).x
    want = torch.tensor([[flow_of_gaussian(float(v), 0.1, 0.9, MV, 0.3, 0.5)] for v in x], dtype=torch.float64)
    tolerance = 3e-2 if solver.name == "euler" else 2e-4
    torch.testing.assert_close(there, want, rtol=0, atol=tolerance)
    back = run(solver.plan_times(MV, up[::-1], 0.0), evaluator(gaussian(0.3, 0.5)), there, silent).x
    torch.testing.assert_close(back, x, rtol=0, atol=2 * tolerance)


# --- count and finiteness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", FIXED)
def test_exactly_nfe_evaluations_and_a_finite_image(name, schedule):
    oracle = small()
    for nfe in range(1, 9):
        for rho in (0.0, 0.75, 1.0) if name in SDE else (0.0,):
            calls = []

            def field(x, t, condition, calls=calls):
                assert t.shape == (4,)
                assert t.dtype == torch.float64
                assert 0 < float(t.min()) == float(t.max()) <= schedule.end
                calls.append(float(t[0]))
                return oracle.denoise(x, t, schedule)

            got = solve(field, start(), schedule=schedule, solver=name, nfe=nfe, rho=rho, seeds=range(4))
            assert len(calls) == got.nfe == got.passes == nfe
            assert bool(torch.isfinite(got.x).all())
            assert solver_named(name).plan(schedule, nfe, rho).nfe == nfe
            assert calls == sorted(calls, reverse=True)  # never back in time (Heun's pairs meet)


@pytest.mark.parametrize(
    ("name", "rho"),
    [*((name, 0.0) for name in ("adams", "heun", "euler", "euler-maruyama")), ("adams", 1.0), ("euler-maruyama", 1.0)],
)
def test_one_evaluation_is_the_posterior_mean_of_noise(name, rho):
    got = sample(small().field(MV), start(), solver=name, nfe=1, rho=rho)
    torch.testing.assert_close(got, small().means.mean(0).expand(4, 3))  # alpha = 0: x says nothing of x0


@pytest.mark.parametrize("name", FIXED)
def test_a_constant_field_is_reached_exactly(name):
    target = torch.tensor([0.3, -2.0, 5.0], dtype=torch.float64)
    for nfe in (1, 2, 3, 5):
        got = sample(lambda x, t, c: target.expand_as(x), start(), solver=name, nfe=nfe, rho=0.5 * (name in SDE))
        torch.testing.assert_close(got, target.expand(4, 3))


@pytest.mark.parametrize("rho", [0.0, 0.75])
def test_times_begin_at_one_and_end_at_zero(rho):
    for nfe in (1, 2, 13):
        times = adams().plan(MV, nfe, rho).times
        assert (times[0], times[-1], len(times)) == (1.0, 0.0, nfe + 1)
        times = adams_power().plan(MV, nfe, rho).times
        assert times == pytest.approx([(1 - (i / nfe) ** 1.4) ** 4 for i in range(nfe + 1)], abs=1e-15)
    times = np.array(sa().plan(MV, 13, rho).times)
    assert times[[0, -2, -1]] == pytest.approx([0.999, 0.001, 0.0], rel=1e-9)
    lams = np.log((1 - times[:-1]) / np.sqrt(times[:-1]))
    np.testing.assert_allclose(np.diff(lams), (lams[-1] - lams[0]) / 12, rtol=1e-8)


# --- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rho"), [*((name, 0.0) for name in FIXED), *((name, rho) for name in SDE for rho in (0.75, 1.0))]
)
@pytest.mark.parametrize("schedule", [MV, LinearFlow()], ids=str)
@pytest.mark.parametrize("steps", [4, 8])
def test_resume_is_bit_equal(name, rho, schedule, steps):
    nfe = 2 * steps - 1 if name == "heun" else steps
    make = lambda: solver_named(name).plan(schedule, nfe, rho)  # noqa: E731
    assert make().steps == steps
    own = schedule if solver_named(name).own_time else MV
    source = lambda index: noise.normal(torch.arange(4), noise.STEP + index, (3,), torch.float64)  # noqa: E731
    seen = []
    whole = run(make(), evaluator(small(), own), start(), source, on_step=seen.append)
    assert [state.index for state in seen] == list(range(1, steps + 1))
    for cut in range(1, steps):
        half = run(make(), evaluator(small(), own), start(), source, until=cut)
        assert half.index == cut
        assert torch.equal(half.x, seen[cut - 1].x)
        rest = run(make(), evaluator(small(), own), half, source)
        assert rest.index == steps
        assert torch.equal(rest.x, whole.x)


def test_the_corrector_reuses_the_predictors_noise():
    """PEC by hand, two steps of predictor 1 / corrector 2 at rho = 1 (Brownian bridges, x0_hat linear in t^q)."""
    plan = adams_power(1, 2, q=1.0).plan_times(MV, (0.8, 0.5, 0.2), 1.0)
    g, x, xi = gaussian(0.3, 0.5), torch.tensor([[1.1]], dtype=torch.float64), [0.7, -0.4]
    got = run(plan, evaluator(g), x, lambda i: torch.full_like(x, xi[i])).x
    first = evaluator(g)(x, 0.8)
    kick = math.sqrt(0.5 * 0.3 / 0.8) * xi[0]
    predicted = 5 / 8 * x + 3 / 8 * first + kick
    second = evaluator(g)(predicted, 0.5)
    # INT_.5^.8 .5/r^2 (r-.5)/.3 dr for the old value; the rest of 3/8 for the new
    old = 0.5 / 0.3 * (math.log(0.8 / 0.5) - 0.5 * (1 / 0.5 - 1 / 0.8))
    corrected = 5 / 8 * x + old * first + (3 / 8 - old) * second + kick
    want = 2 / 5 * corrected + 3 / 5 * second + math.sqrt(0.2 * 0.3 / 0.5) * xi[1]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# --- the exact law by linear recursion -----------------------------------------------------------------------------


def law(solver, nfe, rho, std, mean=0.3, schedule=MV):
    """(mean, std) of the sampled image for N(mean, std^2) data: exact, because every step is affine.

    Row 0 carries the initial noise, row i + 1 the noise of step i, the last row nothing: the mean.
    """
    plan = solver.plan(schedule, nfe, rho)
    x = torch.zeros(plan.steps + 2, 1, dtype=torch.float64)
    x[0] = 1

    def basis(index):
        out = torch.zeros_like(x)
        out[index + 1] = 1
        return out

    own = schedule if solver.own_time else MV
    y = run(plan, evaluator(gaussian(mean, std), own), x, basis).x[:, 0]
    return float(y[-1]), float((y[:-1] - y[-1]).norm())


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("std", [0.1, 0.5, 2.0])
def test_std_of_a_gaussian_by_adams(rho, std):
    for nfe, bound in ((13, 0.05), (26, 0.03), (52, 0.01)):
        mean, got = law(adams().for_size(3072), nfe, rho, std)
        assert mean == pytest.approx(0.3, abs=1e-10)
        assert got == pytest.approx(std, rel=bound)


@pytest.mark.parametrize(
    ("solver", "errors"),
    [
        (sa(tau="exact"), (13.5, 28.6, 6.3)),
        (PredictorCorrector("cubic", PowerGrid(3.0), PowerVariable(0.5)), (7.5, 2.6, -1.0)),
        (PredictorCorrector("cubic", PowerGrid(3.0), PowerVariable(1.0)), (-7.6, 0.7, -0.7)),
    ],
    ids=["sa", "sqrt", "t"],
)
def test_the_methods_measured_errors_at_13_evaluations(solver, errors):
    got = [100 * (law(solver, 13, 1.0, std)[1] / std - 1) for std in (0.1, 0.5, 2.0)]
    assert got == pytest.approx(errors, abs=0.2)  # the printed figures were sampled, these are exact


@pytest.mark.parametrize("tau", ["exact", "start", "end"])
@pytest.mark.parametrize("rho", [0.0, 0.75, 1.0])
def test_sa_converges_to_the_law(tau, rho):
    for std in (0.1, 0.5, 2.0):
        _, got = law(sa(t_max=1 - 1e-5, t_min=1e-6, tau=tau), 300, rho, std)
        assert got == pytest.approx(std, rel=0.015)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0, 1.3])
def test_euler_maruyama_converges_to_the_law_on_every_schedule(schedule, rho):
    """Drift and noise rate of the family must fit together, or the std is off at any step size."""
    for std in (0.5, 2.0):
        mean, got = law(EulerMaruyama(), 600, rho, std, schedule=schedule)
        assert got == pytest.approx(std, rel=0.02)
        assert mean == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0, 1.3])
def test_adams_law_converges_for_any_rho(rho):
    for std in (0.1, 0.5, 2.0):
        assert law(adams(), 300, rho, std)[1] == pytest.approx(std, rel=1e-3)


def error_of_law(solver, steps, rho, schedule):
    """Worst error of std(x) at 0.1, from the exact law at 0.9, over several Gaussians."""
    times = tuple((np.linspace(0.9, 0.1, steps + 1) * schedule.end).tolist())
    plan = solver.plan_times(schedule, times, rho)
    worst = 0.0
    for std in (0.3, 0.7, 2.0):
        spread = [math.hypot(float(schedule.alpha(t)) * std, float(schedule.sigma(t))) for t in (times[0], times[-1])]
        x = torch.zeros(steps + 1, 1, dtype=torch.float64)
        x[0] = spread[0]
        basis = torch.eye(steps + 1, dtype=torch.float64)
        y = run(plan, evaluator(gaussian(0.0, std), schedule), x, lambda i, e=basis: e[:, i + 1 :][:, :1]).x
        worst = max(worst, abs(float(y.norm()) - spread[1]))
    return worst


@pytest.mark.parametrize(
    ("solver", "schedule"),
    [
        *((solver, MV) for solver in (adams(), adams(1, 0), adams(2, 0), adams(1, 2), sa(), sa(tau="exact"))),
        *((EulerMaruyama(), schedule) for schedule in SCHEDULES),
    ],
    ids=lambda value: f"{value.name}-{value.weak_order}" if hasattr(value, "name") else str(value),
)
@pytest.mark.parametrize("rho", [0.5, 1.0])
def test_weak_order(solver, schedule, rho):
    measured = math.log2(error_of_law(solver, 80, rho, schedule) / error_of_law(solver, 160, rho, schedule))
    assert solver.weak_order - 0.25 < measured < solver.weak_order + 1


# --- parity --------------------------------------------------------------------------------------------------------


def reference(field, x, schedule_T=1.0):
    """Theorem 6 in c = sqrt(t/T) by torchdiffeq: dx/dt = -[(T+t)/(2T) v + x/(2T)], v = (x0_hat - x)/t."""
    T = schedule_T

    def rate(c, y):
        t = float(c) ** 2 * T
        v = (field(y, full_time(y, t), None) - y) / t
        return -((T + t) / (2 * T) * v + y / (2 * T)) * 2 * float(c) * T

    ends = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    y = odeint(rate, x, ends, rtol=1e-9, atol=1e-9, method="dopri5")[-1]
    return field(y, full_time(y, 1e-8 * T), None)


@pytest.mark.parametrize(
    ("solver", "nfe", "tolerance"),
    [
        (adams(), 100, 1e-4),
        (sa(t_max=1 - 1e-6, t_min=1e-7), 200, 5e-3),
        (Heun(), 401, 1e-3),
        (Euler(), 800, 1e-2),
        (EulerMaruyama(), 800, 1e-2),
        (Adaptive(1e-8, 1e-8, 1e-8), 1, 1e-5),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("T", [1.0, 2.5])
def test_parity_with_torchdiffeq(solver, nfe, tolerance, T):
    schedule = MeanVelocity(T)
    field = small().field(schedule)
    got = sample(field, start(), schedule=schedule, solver=solver, nfe=nfe)
    torch.testing.assert_close(got, reference(field, start(), T), rtol=0, atol=tolerance)


def test_the_error_falls_towards_torchdiffeq():
    field = small().field(MV)
    want = reference(field, start())
    errors = [float((sample(field, start(), nfe=nfe) - want).abs().max()) for nfe in (13, 26, 52, 104)]
    assert all(b < 0.4 * a for a, b in pairwise(errors))


@pytest.mark.parametrize("schedule", [LinearFlow(), MeanVelocity(2.5)], ids=str)
@pytest.mark.parametrize("rho", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("name", ["adams", "sa"])
@pytest.mark.parametrize("nfe", [1, 2, 13])
def test_same_answer_through_an_equal_snr_schedule(schedule, rho, name, nfe):
    options = {"solver": name, "nfe": nfe, "rho": rho, "seeds": range(4)}
    want = sample(small().field(MV), start(), **options)
    got = sample(small().field(schedule), start(), schedule=schedule, **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    mapped = equal_snr(small().field(schedule), schedule, MV)
    torch.testing.assert_close(sample(mapped, start(), **options), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["heun", "euler", "euler-maruyama"])
def test_T_only_rescales_time(name):
    options = {"solver": name, "nfe": 9, "rho": 0.75 * (name in SDE), "seeds": range(4)}
    want = sample(small().field(MV), start(), **options)
    got = sample(small().field(MeanVelocity(2.5)), start(), schedule=MeanVelocity(2.5), **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("solver", [adams(), Heun(), Adaptive(1e-9, 1e-9, 1e-9)], ids=lambda s: s.name)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_schedules_flow_from_its_own_noise(solver, schedule):
    """The noise handed in is the state at the schedule's own end, whichever solver runs."""
    x = start()
    got = sample(gaussian(0.3, 0.5, (3,)).field(schedule), x, schedule=schedule, solver=solver, nfe=401)
    want = flow_of_gaussian(x, schedule.end, 0.0, schedule, 0.3, 0.5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FIXED)
def test_variance_preserving_noise_reaches_the_field_unscaled(name):
    seen = []

    def field(x, t, condition):
        seen.append((x.clone(), float(t[0])))
        return torch.zeros_like(x)

    sample(field, start(), schedule=VariancePreserving(), solver=name, nfe=4)
    assert seen[0][1] == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(seen[0][0], start(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_a_variance_preserving_model_bridged_to_mean_velocity(rho):
    """Any pretrained model can be sampled by MVM's SDE and ODE, from exactly t = 1."""
    field = equal_snr(small().field(VariancePreserving()), VariancePreserving(), MV)
    got = sample(field, start(), nfe=26, rho=rho, seeds=range(4))
    want = sample(small().field(MV), start(), nfe=26, rho=rho, seeds=range(4))
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)


@pytest.mark.parametrize("tau", ["exact", "end", "start"])
def test_grid_and_variable_vary_separately(tau):
    """Any pair samples the law from a grid that begins below t = 1; 0.2 % is what t_min = 1e-3 leaves."""
    solver = PredictorCorrector("mixed", LamGrid(), PowerVariable(0.8), tau)
    mean, std = law(solver, 400, 1.0, 0.5)
    assert mean == pytest.approx(0.3, abs=1e-3)
    assert std == pytest.approx(0.5, rel=3e-3)


@pytest.mark.parametrize(
    ("variable", "tau"), [(LamVariable(), "exact"), (PowerVariable(0.5), "end"), (PowerVariable(0.5), "start")], ids=str
)
def test_phi_lam_and_a_held_tau_need_a_grid_below_t_1(variable, tau):
    def never(x, t, condition):
        raise AssertionError("evaluated")

    for r in (1.0, 3.0):
        with pytest.raises(ValueError, match=r"t=1\.0.*t_max < 1"):
            sample(never, start(), solver=PredictorCorrector("mixed", PowerGrid(r), variable, tau), nfe=8, rho=1.0)
    below = PredictorCorrector("mixed", PowerGrid(3.0, t_max=0.999), variable, tau)
    assert law(below, 400, 1.0, 0.5)[1] == pytest.approx(0.5, rel=3e-3)


# --- construction --------------------------------------------------------------------------------------------------


def test_bad_options():
    with pytest.raises(ValueError, match="predictor"):
        adams(predictor=0)
    with pytest.raises(ValueError, match="corrector"):
        adams(corrector=-1)
    with pytest.raises(ValueError, match="'exact'"):
        sa(tau="exacts")
    with pytest.raises(ValueError, match="r="):
        adams_power(r=0.5)
    for t_min, t_max in ((0.0, 0.9), (0.5, 0.4), (1e-3, 1.0)):
        with pytest.raises(ValueError, match="t_min"):
            sa(t_min=t_min, t_max=t_max)
    with pytest.raises(ValueError, match="rtol"):
        Adaptive(rtol=0)


@pytest.mark.parametrize("solver", [Heun(), Euler()], ids=lambda s: s.name)
def test_ode_solvers_refuse_noise(solver):
    for call in (lambda: solver.plan(MV, 4, 0.5), lambda: solver.plan_times(MV, (0.9, 0.1), 0.5)):
        with pytest.raises(ValueError, match="rho"):
            call()
