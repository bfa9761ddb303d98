"""Published samplers: parity with diffusers on an exact field, orders, counts; the fields and noises are shared."""

import math
import re

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from mvm import noise
from mvm.oracle import gaussian, mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, full_time
from mvm.solver import SOLVERS, run, sample, solve, solver_named
from mvm.solver.peers import PEERS, SigmaGrid, deis, dpm, ipndm, moments, unipc

diffusers = pytest.importorskip("diffusers")

MV = MeanVelocity()
ODE = ["dpm++2m", "dpm++3m", "unipc", "deis", "ipndm"]


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
        x = scheduler.step(out, scheduler.timesteps[i], x).prev_sample
        seen.append(x.double())
    return seen


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
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got[:last], want[:last], strict=True))
    assert worst < 1e-5


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
    for std in (0.3, 0.7, 2.0):
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
    measured = math.log2(error(solver, 120) / error(solver, 240))
    assert solver.order - 0.35 < measured < solver.order + 1


@pytest.mark.parametrize("schedule", [MV, MeanVelocity(2.5), LinearFlow(), VariancePreserving()], ids=str)
@pytest.mark.parametrize("name", PEERS)
def test_exactly_nfe_evaluations_and_a_finite_image(name, schedule):
    field = small().field(schedule)
    for nfe in (1, 2, 3, 4, 5, 6, 7, 13):
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
    got = sample(gaussian(0.3, 0.5, (3,)).field(MV), start(), solver=name, nfe=200)
    torch.testing.assert_close(got, 0.3 + 0.5 * start(), rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ODE)
def test_the_ode_solvers_refuse_noise_and_name_those_that_take_it(name):
    words = rf"rho=0\.5: solver '{re.escape(name)}' is an ODE solver; use rho=0, or one of: adams, sa, euler-maruyama"
    with pytest.raises(ValueError, match=words):
        solver_named(name).plan(MV, 4, 0.5)


def test_names():
    assert all(build().name == name for name, build in PEERS.items())
    assert set(PEERS) < set(SOLVERS)


# --- grids ---------------------------------------------------------------------------------------------------------


def test_karras_and_log_snr():
    karras, even = (SigmaGrid(spacing).times(5) for spacing in ("karras", "log-snr"))
    for times in (karras, even):
        r = [math.exp(-float(MV.lam(t))) for t in times[:-1]]
        assert times[-1] == 0
        assert (r[0], r[-1]) == pytest.approx((80.0, 0.002))
    powers = [math.exp(-float(MV.lam(t)) / 7) for t in karras[:-1]]
    assert np.diff(powers).tolist() == pytest.approx([powers[1] - powers[0]] * 4)
    lams = [float(MV.lam(t)) for t in even[:-1]]
    assert np.diff(lams).tolist() == pytest.approx([lams[1] - lams[0]] * 4)


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
