"""Published samplers: parity with diffusers on an exact field, orders, counts; the fields and noises are shared."""

import math
import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from mvm import noise
from mvm.oracle import gaussian, mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, full_time
from mvm.solver import SOLVERS, run, sample, solve, solver_named
from mvm.solver.peers import (
    PEERS,
    SA_NOISE,
    SigmaGrid,
    as_grid,
    deis,
    dpm,
    edm_churn,
    er_sde,
    ipndm,
    moments,
    sa_official,
    sde_dpm,
    seeds,
    unipc,
)
from mvm.solver.table import TO_DATA

diffusers = pytest.importorskip("diffusers")

MV = MeanVelocity()
ODE = ["dpm++2m", "dpm++3m", "unipc", "deis", "ipndm"]
SDE = ["sde-dpm++2m", "sde-dpm++3m", "sa-official", "er-sde", "seeds2", "seeds3", "edm-churn"]


def small():
    means = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return mixture(means, torch.tensor([0.2, 0.5, 0.1, 0.3], dtype=torch.float64), labels=torch.tensor([0, 1, 1, 0]))


def start(batch=4):
    return noise.initial(torch.arange(batch), (3,), torch.float64)


def evaluate(x, t):
    return small().denoise(x, full_time(x, t), MV)


def silent(index):
    raise AssertionError("an ODE solver asked for noise")


def draws(index):
    return noise.normal(torch.arange(4), noise.STEP + index, (3,), torch.float64)


def times_of(r):
    return tuple(float(MV.t_from_lam(-math.log(value))) if value else 0.0 for value in r)


def states(plan, source=silent):
    """The state after every step, as a variance-preserving path has it."""
    seen = []
    run(plan, evaluate, start(), source, on_step=seen.append)
    return [state.x / float(MV.norm(plan.times[state.index])) for state in seen]


def by_diffusers(scheduler, r):
    """The states of a scheduler in its variance-preserving coordinates, driven through sigma/alpha = r."""
    times, n = times_of(r), len(r) - 1
    scheduler.set_timesteps(n)
    sigmas = torch.tensor(r, dtype=torch.float64)
    ipndm = isinstance(scheduler, diffusers.IPNDMScheduler)
    if ipndm:
        scheduler.alphas, scheduler.betas = 1 / torch.sqrt(1 + sigmas**2), sigmas / torch.sqrt(1 + sigmas**2)
    else:
        sigmas[-1] = max(sigmas[-1], 1e-12)  # some schedulers take its logarithm
        scheduler.sigmas = sigmas
        scheduler.timesteps = torch.arange(n, 0, -1)
    x, seen = start() / float(MV.norm(times[0])), []
    scheduler.set_begin_index(0)
    for i in range(n):
        scale = float(MV.norm(times[i]))
        out = evaluate(x.double() * scale, times[i])
        if ipndm:  # diffusion-v
            alpha, sigma = float(scheduler.alphas[i]), float(scheduler.betas[i])
            out = alpha * (x - alpha * out) / sigma - sigma * out
        more = {"variance_noise": draws(i)} if isinstance(scheduler, diffusers.DPMSolverMultistepScheduler) else {}
        x = scheduler.step(out, scheduler.timesteps[i], x, **more).prev_sample
        seen.append(x.double())
    return seen


def far(got, want):
    """The greatest difference on the way, relative to the greatest value there."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


VP = {"prediction_type": "sample"}
PARITY = {
    "dpm++2m": (dpm(2), lambda: diffusers.DPMSolverMultistepScheduler(solver_order=2, **VP)),
    "dpm++3m": (dpm(3), lambda: diffusers.DPMSolverMultistepScheduler(solver_order=3, **VP)),
    "unipc": (unipc(), lambda: diffusers.UniPCMultistepScheduler(solver_order=3, **VP)),
    "unipc-bh1": (unipc(2, "bh1"), lambda: diffusers.UniPCMultistepScheduler(solver_order=2, solver_type="bh1", **VP)),
    "deis": (deis(), lambda: diffusers.DEISMultistepScheduler(solver_order=3, **VP)),
    "ipndm": (ipndm(), diffusers.IPNDMScheduler),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("nfe", [3, 10, 18])
def test_parity_with_diffusers(name, nfe):
    """Every state on the way, and x0_hat at the end; in eps_hat diffusers may extrapolate into the end instead."""
    solver, make = PARITY[name]
    r = [*np.geomspace(40.0, 0.02, nfe).tolist(), 0.0]
    got, want = states(solver.plan_times(MV, times_of(r), 0.0)), by_diffusers(make(), r)
    last = nfe - 1 if name in ("deis", "ipndm") else nfe
    assert far(got[:last], want[:last]) < 1e-5


SCHEDULED = {"solver_order": 2, "algorithm_type": "sde-dpmsolver++"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nfe", [3, 10, 18])
def test_the_sde_of_dpm_2m_is_diffusers(nfe):
    r = [*np.geomspace(40.0, 0.02, nfe).tolist(), 0.0]
    got = states(sde_dpm(2).plan_times(MV, times_of(r), 1.0), draws)
    assert far(got, by_diffusers(diffusers.DPMSolverMultistepScheduler(**SCHEDULED, **VP), r)) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("orders", [(3, 4), (2, 2), (1, 2), (3, 3)])
@pytest.mark.parametrize("nfe", [4, 12])
def test_sa_official_is_diffusers(monkeypatch, nfe, orders):
    """tau 0.8 between r = 0.5 and 9, judged at the start of a step as diffusers does."""
    r = [*np.geomspace(40.0, 0.02, nfe).tolist(), 0.0]
    indices = iter(range(nfe))
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_sasolver.randn_tensor", lambda shape, **how: draws(next(indices))
    )
    options = dict(zip(("predictor_order", "corrector_order"), orders, strict=True))
    scheduler = diffusers.SASolverScheduler(tau_func=lambda t: 0.8 * (0.5 <= r[nfe - int(t)] <= 9), **options, **VP)
    solver = sa_official(*orders, noise=(0.5, 9.0), tau_at="start")
    assert far(states(solver.plan_times(MV, times_of(r), 0.8), draws), by_diffusers(scheduler, r)) < 1e-5


def test_the_interval_of_sa_official():
    """0.2 to 0.8 of 1000 timesteps; outside it, and before tau is judged at the end, no noise."""
    path = VariancePreserving()
    assert [math.exp(-float(path.lam(t))) for t in (0.2, 0.8)] == pytest.approx(SA_NOISE)
    times = times_of([100.0, 30.0, 20.0, 1.0, 0.5, 0.0])
    for tau_at, noisy in (("end", [False, True, True, False, False]), ("start", [False, False, True, True, False])):
        rows = sa_official(tau_at=tau_at).plan_times(MV, times, 1.0).rows
        assert [row.std > 0 for row in rows] == noisy


# --- against the published formulas, written down again in y = x/alpha over r = sigma/alpha ------------------------


def denoised(y, r):
    t = times_of([r])[0]
    return evaluate(y * float(MV.alpha(t)), t)


def published_3m(y, r):
    """k-diffusion's DPM-Solver++(3M) SDE at eta = 1."""
    past = []
    for i, (s, t) in enumerate(pairwise(r[:-1])):
        h = math.log(s / t)
        past.insert(0, (denoised(y, s), h))
        y = math.exp(-2 * h) * y - math.expm1(-2 * h) * past[0][0]
        phi_2 = math.expm1(-2 * h) / (2 * h) + 1
        if i > 0:
            d1 = d1_0 = (past[0][0] - past[1][0]) * h / past[1][1]
        if i > 1:
            d1_1, r0, r1 = (past[1][0] - past[2][0]) * h / past[2][1], past[1][1] / h, past[2][1] / h
            d1 = d1_0 + (d1_0 - d1_1) * r0 / (r0 + r1)
            y = y - (phi_2 / (2 * h) - 0.5) * (d1_0 - d1_1) / (r0 + r1)
        if i > 0:
            y = y + phi_2 * d1
        y = y + t * math.sqrt(-math.expm1(-2 * h)) * draws(i)
    return denoised(y, r[-2])


def published_er_sde(y, r, points=None):
    """ER-SDE-Solver-3; points: of the published sums, None for the integrals that they stand for."""
    phi = lambda v: v * (np.exp(v**0.3) + 10)  # noqa: E731
    old = old_slope = None
    for i, (s, t) in enumerate(pairwise(r[:-1])):
        x0 = denoised(y, s)
        ratio = phi(t) / phi(s)
        y = ratio * y + (1 - ratio) * x0

        def integral(f, s=s, t=t):
            if points is None:
                return quad(f, t, s, epsabs=0, epsrel=1e-12)[0]
            return sum(f(t + k * (s - t) / points) for k in range(points)) * (s - t) / points

        if old is not None:
            slope = (x0 - old) / (s - r[i - 1])
            y = y + (t - s + phi(t) * integral(lambda v: 1 / phi(v))) * slope
            if old_slope is not None:
                bend = 2 * (slope - old_slope) / (s - r[i - 2])
                y = y + ((t - s) ** 2 / 2 + phi(t) * integral(lambda v, s=s: (v - s) / phi(v))) * bend
            old_slope = slope
        y, old = y + math.sqrt(t**2 - (s * ratio) ** 2) * draws(i), x0
    return denoised(y, r[-2])


def published_seeds(y, r, stages):
    """SEEDS-2 (midpoint) and SEEDS-3 at eta = 1, in x0_hat."""
    for i, (s, t) in enumerate(pairwise(r[:-1])):
        h = math.log(s / t)
        phi_2 = lambda c, h=h: 1 + math.expm1(-2 * c * h) / (2 * c * h)  # noqa: E731
        part = lambda c, h=h: -math.expm1(-2 * c * h)  # noqa: E731
        kicks, before, level = [], 0.0, 0.0
        for k, c in enumerate((1 / 2, 1) if stages == 2 else (1 / 3, 2 / 3, 1)):
            gap = (c - before) * h
            level = math.exp(-gap) * level + math.sqrt(-math.expm1(-2 * gap)) * draws(3 * i + k)
            kicks.append(s * math.exp(-c * h) * level)
            before = c
        first, y0 = denoised(y, s), y
        if stages == 2:
            middle = math.exp(-h) * y0 + part(1 / 2) * first + kicks[0]
            y = math.exp(-2 * h) * y0 + part(1) * denoised(middle, s * math.exp(-h / 2)) + kicks[1]
        else:
            middle = math.exp(-2 * h / 3) * y0 + part(1 / 3) * first + kicks[0]
            second = denoised(middle, s * math.exp(-h / 3))
            middle = math.exp(-4 * h / 3) * y0 + (part(2 / 3) - 2 * phi_2(2 / 3)) * first + 2 * phi_2(2 / 3) * second
            third = denoised(middle + kicks[1], s * math.exp(-2 * h / 3))
            y = math.exp(-2 * h) * y0 + (part(1) - 1.5 * phi_2(1)) * first + 1.5 * phi_2(1) * third + kicks[2]
    return denoised(y, r[-2])


def published_edm(y, r):
    """Algorithm 2 of EDM with its ImageNet-64 settings."""
    for i, (s, t) in enumerate(pairwise(r)):
        gamma = min(40 / (len(r) - 1), math.sqrt(2) - 1) if 0.05 <= s <= 50 and i else 0.0
        hat = s * (1 + gamma)
        y = y + math.sqrt(hat**2 - s**2) * 1.003 * draws(i)
        d = (y - denoised(y, hat)) / hat
        ahead = y + (t - hat) * d
        y = ahead if t == 0 else y + (t - hat) * (d + (ahead - denoised(ahead, t)) / t) / 2
    return y


@pytest.mark.parametrize("nfe", [2, 9])
@pytest.mark.parametrize(
    ("solver", "published"),
    [
        (sde_dpm(3), published_3m),
        (er_sde(), published_er_sde),
        (seeds(2), partial(published_seeds, stages=2)),
        (seeds(3), partial(published_seeds, stages=3)),
        (edm_churn(), published_edm),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parity_with_the_published_formulas(solver, published, nfe):
    r = [*np.geomspace(40.0, 0.02, nfe).tolist(), 0.0]
    got = run(solver.plan_times(MV, times_of(r), 1.0), evaluate, start(), draws).x
    want = published(start() / float(MV.alpha(times_of(r)[0])), r)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_the_sums_of_er_sde_stand_for_its_integrals():
    """The authors take 100 points, others 200: their images are ours but for the sums' error."""
    r = [*np.geomspace(40.0, 0.02, 9).tolist(), 0.0]
    y = start() / float(MV.alpha(times_of(r)[0]))
    exact, rough, fine = published_er_sde(y, r), published_er_sde(y, r, 100), published_er_sde(y, r, 800)
    assert 0 < float((fine - exact).abs().max()) < 0.2 * float((rough - exact).abs().max())


# --- the law, by linear recursion ----------------------------------------------------------------------------------


def law(plan, std, mean=0.3, first=1.0):
    """(mean, std) of the end for N(mean, std^2) data: every step is affine. Row 0 is the start, each noise has one."""
    exact, rows = gaussian(mean, std), {}
    x = torch.zeros(3 * plan.steps + 3, 1, dtype=torch.float64)
    x[0] = first

    def source(index):
        out = torch.zeros_like(x)
        out[rows.setdefault(index, len(rows) + 1)] = 1
        return out

    y = run(plan, lambda x, t: exact.denoise(x, full_time(x, t), MV), x, source).x[:, 0]
    return float(y[-1]), float((y[:-1] - y[-1]).norm())


CALM = [*map(solver_named, SDE[:-1]), edm_churn(s_churn=5, s_noise=1.0)]


@pytest.mark.parametrize("std", [0.1, 2.0])
@pytest.mark.parametrize("solver", CALM, ids=lambda s: s.name)
def test_the_law_of_many_steps(solver, std):
    for rho in (0.5, 1.0):
        mean, got = law(solver.plan(MV, 99, rho), std)
        assert got == pytest.approx(std, rel=0.03)
        assert mean == pytest.approx(0.3, abs=0.01)  # the noise at r = 80 knows nothing of it


@pytest.mark.parametrize("solver", CALM, ids=lambda s: s.name)
def test_weak_order(solver):
    def error_of_law(steps):
        plan, worst = solver.plan_times(MV, tuple(np.linspace(0.9, 0.1, steps + 1).tolist()), 1.0), 0.0
        for std in (0.3, 2.0):
            begin, end = (math.hypot(float(MV.alpha(t)) * std, float(MV.sigma(t))) for t in (0.9, 0.1))
            worst = max(worst, abs(law(plan, std, 0.0, begin)[1] - end))
        return worst

    measured = math.log2(error_of_law(30) / error_of_law(60))
    assert solver.weak_order - 0.35 < measured < solver.weak_order + 1


def test_rho_0_is_the_deterministic_limit():
    """The noisy forms without noise: DPM-Solver++, and samplers that draw none."""
    times = times_of([*np.geomspace(40.0, 0.02, 16).tolist(), 0.0])
    assert sde_dpm(2).plan_times(MV, times, 0.0) == dpm(2).plan_times(MV, times, 0.0)
    for name in SDE:
        run(solver_named(name).plan_times(MV, times, 0.0), evaluate, start(), silent)


def test_the_forms_of_unipc_differ():
    """Else the parity of "bh1" would say nothing."""
    r = [*np.geomspace(40.0, 0.02, 6).tolist(), 0.0]
    one, two = (states(unipc(2, variant).plan_times(MV, times_of(r), 0.0))[-1] for variant in ("bh1", "bh2"))
    assert float((one - two).abs().max()) > 1e-3


@pytest.mark.parametrize("H", [1e-6, 0.03, 0.9, 3.9, 4.1, 60.0, -0.02, -3.0, -9.0])
def test_moments(H):
    want = [quad(lambda v, k=k: H * math.exp(-H * (1 - v)) * v**k, 0, 1, epsabs=0, epsrel=1e-12)[0] for k in range(4)]
    assert moments(H, 4).tolist() == pytest.approx(want, rel=1e-11)


# --- what every solver promises ------------------------------------------------------------------------------------


def error(solver, steps):
    """Worst error of x(0.1), over several Gaussians, from the exact x(0.9)."""
    times = tuple(np.linspace(0.9, 0.1, steps + 1).tolist())
    plan = solver.plan_times(MV, times, 0.0)
    worst = 0.0
    for std in (0.3, 2.0):
        spread = [math.hypot(float(MV.alpha(t)) * std, float(MV.sigma(t))) for t in (0.9, 0.1)]
        exact = gaussian(0.3, std)
        x = torch.tensor([[1.3]], dtype=torch.float64)
        got = run(plan, lambda x, t, exact=exact: exact.denoise(x, full_time(x, t), MV), x, silent).x
        worst = max(worst, abs(float(got) - (0.9 * 0.3 + (1.3 - 0.1 * 0.3) * spread[1] / spread[0])))
    return worst


@pytest.mark.parametrize(
    "solver", [*(solver_named(name) for name in PEERS), unipc(2), deis(1), dpm(1)], ids=lambda s: f"{s.name}-{s.order}"
)
def test_order(solver):
    measured = math.log2(error(solver, 30) / error(solver, 60))
    assert solver.order - 0.35 < measured < solver.order + 1


@pytest.mark.parametrize("schedule", [MV, VariancePreserving()], ids=str)
@pytest.mark.parametrize("name", PEERS)
def test_exactly_nfe_evaluations_and_a_finite_image(name, schedule):
    field = small().field(schedule)
    for nfe in (1, 2, 3, 4, 9):
        for rho in (0.0, 1.0) if solver_named(name).weak_order else (0.0,):
            got = solve(field, start(), schedule=schedule, solver=name, nfe=nfe, rho=rho, seeds=range(4))
            assert got.nfe == got.passes == nfe == solver_named(name).plan(schedule, nfe, rho).nfe
            assert bool(torch.isfinite(got.x).all())


@pytest.mark.parametrize("name", PEERS)
def test_same_answer_through_an_equal_snr_schedule(name):
    options = {"solver": name, "nfe": 7, "rho": float(solver_named(name).weak_order > 0), "seeds": range(4)}
    want = sample(small().field(MV), start(), **options)
    got = sample(small().field(LinearFlow()), start(), schedule=LinearFlow(), **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", PEERS)
def test_the_ode_converges(name):
    """From r = 80 the noise has a little of x0 missing; the rest is the flow."""
    got = sample(gaussian(0.3, 0.5, (3,)).field(MV), start(), solver=name, nfe=60)
    torch.testing.assert_close(got, 0.3 + 0.5 * start(), rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ODE)
def test_the_ode_solvers_refuse_noise_and_name_those_that_take_it(name):
    words = rf"rho=0\.5: solver '{re.escape(name)}' is an ODE solver; use rho=0, or one of: adams, adams-power, sa, "
    with pytest.raises(ValueError, match=words):
        solver_named(name).plan(MV, 4, 0.5)


def test_names():
    assert all(build().name == name for name, build in PEERS.items())
    assert set(PEERS) < set(SOLVERS)


# --- grids ---------------------------------------------------------------------------------------------------------


def test_karras_and_log_snr():
    karras, even = (as_grid(spacing).times(5) for spacing in ("karras", "log-snr"))
    for times, last in ((karras, 0.002), (even, 0.01)):
        r = [math.exp(-float(MV.lam(t))) for t in times[:-1]]
        assert times[-1] == 0
        assert (r[0], r[-1]) == pytest.approx((80.0, last))
    powers = [math.exp(-float(MV.lam(t)) / 7) for t in karras[:-1]]
    assert np.diff(powers).tolist() == pytest.approx([powers[1] - powers[0]] * 4)
    lams = [float(MV.lam(t)) for t in even[:-1]]
    assert np.diff(lams).tolist() == pytest.approx([lams[1] - lams[0]] * 4)


def test_sa_official_does_not_evaluate_the_last_level():
    assert sa_official().grid.times(4)[:4] == as_grid("karras").times(5)[:4]
    assert sa_official().grid.times(1) == as_grid("karras").times(1)


def test_a_schedule_that_begins_lower_is_sampled_from_its_own_start():
    assert SigmaGrid().times(4, 0.9)[0] == 0.9
    assert SigmaGrid(sigma_max=1e9).times(4, 0.99)[0] == 0.99
    with pytest.raises(ValueError, match=r"sigma_min=0\.002"):
        SigmaGrid().times(4, 1e-7)


def test_bad_options():
    with pytest.raises(ValueError, match="grid='karas'"):
        dpm(grid="karas")
    with pytest.raises(ValueError, match="sigma_min=3"):
        SigmaGrid(sigma_min=3, sigma_max=2)
    with pytest.raises(ValueError, match="slope='bh3'"):
        unipc(variant="bh3")
    with pytest.raises(ValueError, match="order=5"):
        ipndm(5)
    with pytest.raises(ValueError, match=r"t=1\.0"):
        dpm().plan_times(MV, (1.0, 0.5, 0.0), 0.0)


@pytest.mark.parametrize(
    ("solver", "orders"),
    [
        (unipc(3), [(1, 2), (2, 3), (3, 4), (3, 4), (2, 3)]),
        (unipc(4), [(1, 2), (2, 3), (3, 4), (3, 4), (2, 3)]),
        (dpm(3), [(1, 0), (2, 0), (3, 0), (3, 0), (2, 0)]),
        (sa_official(), [(1, 2), (2, 3), (3, 4), (3, 4), (2, 3)]),
        (sde_dpm(3), [(1, 0), (2, 0), (3, 0), (3, 0), (3, 0)]),  # never lowered
    ],
    ids=["unipc", "unipc 4", "dpm", "sa-official", "sde-dpm"],
)
def test_orders_rise_by_one_a_step_and_fall_before_the_end(solver, orders):
    """Evaluations that predictor and corrector go through, in six: the corrector's are the predictor's and the next."""
    rows = solver.plan(MV, 6, 0.0).rows
    assert [(len(row.predict), len(row.correct)) for row in rows[:-1]] == orders
    assert rows[-1] == TO_DATA
