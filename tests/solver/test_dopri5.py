"""dopri5 as the literature counts it: the same calls and the same state as torchdiffeq by hand."""

import pytest
import torch

from mvm import noise
from mvm.oracle import gaussian, mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, convert, full_time
from mvm.solver import Adaptive, ClassifierFree, no_noise, run, solve

odeint = pytest.importorskip("torchdiffeq").odeint

PATHS = (MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving())
MEANS = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = mixture(0.6 * MEANS, 0.2, labels=torch.tensor([0, 0, 0, 1, 1, 1]))
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
T_MIN = 1e-5


def start(batch=8, dtype=torch.float64):
    return noise.initial(torch.arange(batch), (5,), dtype)


def by_hand(schedule, x, tolerance):
    """torchdiffeq on the flow velocity of the whole batch in t/end, and how often it was asked."""
    calls = []

    def velocity(share, state):
        calls.append(float(share))
        time = torch.full((len(state),), schedule.end * min(max(float(share), T_MIN), 1), dtype=torch.float64)
        flow = convert(DATA.denoise(state, time, schedule, LABELS), "x0", "flow", state, time, schedule)
        return schedule.end * flow

    ends = torch.tensor([1.0, T_MIN], dtype=x.dtype)
    state = odeint(velocity, x, ends, rtol=tolerance, atol=tolerance, method="dopri5")[-1]
    end = torch.full((len(x),), T_MIN * schedule.end, dtype=torch.float64)
    return DATA.denoise(state, end, schedule, LABELS), len(calls)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5])
@pytest.mark.parametrize("schedule", PATHS, ids=str)
def test_same_count_and_same_images_as_torchdiffeq_by_hand(schedule, tolerance):
    want, calls = by_hand(schedule, start(), tolerance)
    solver = Adaptive(tolerance, tolerance, name="dopri5", joint=True)
    found = solve(DATA.field(schedule), start(), schedule=schedule, solver=solver, condition=LABELS)
    assert (found.nfe, found.passes) == (calls, calls + 1)  # x0_hat at t_min is a pass, but none of the ODE's
    torch.testing.assert_close(found.x, want, rtol=0, atol=1e-9)


def test_the_name_is_tolerance_1e_5():
    found = solve(DATA.field(LinearFlow()), start(), schedule=LinearFlow(), solver="dopri5", condition=LABELS, nfe=3)
    assert found.nfe == by_hand(LinearFlow(), start(), 1e-5)[1]


def test_rejected_steps_count():
    """Two calls to begin with, then six for every step tried, whether it was taken or not."""
    path, tried = VariancePreserving(), {"taken": 0, "rejected": 0}

    class Velocity(torch.nn.Module):
        def forward(self, t, state):
            time = torch.full((len(state),), min(max(float(t), T_MIN), path.end), dtype=torch.float64)
            return convert(DATA.denoise(state, time, path, LABELS), "x0", "flow", state, time, path)

        def callback_accept_step(self, t, state, step):
            tried["taken"] += 1

        def callback_reject_step(self, t, state, step):
            tried["rejected"] += 1

    ends = torch.tensor([path.end, T_MIN], dtype=torch.float64)
    odeint(Velocity(), start(), ends, rtol=1e-5, atol=1e-5, method="dopri5")
    found = solve(DATA.field(path), start(), schedule=path, solver="dopri5", condition=LABELS)
    assert tried["rejected"] > 0
    assert found.nfe == 2 + 6 * (tried["taken"] + tried["rejected"])


def test_guidance_is_one_evaluation_and_two_passes():
    rule = ClassifierFree(1.5)
    found = solve(
        DATA.field(LinearFlow()), start(), schedule=LinearFlow(), solver="dopri5", condition=LABELS, guidance=rule
    )
    assert found.passes == 2 * (found.nfe + 1)


def test_the_batch_is_one_state():
    """Every call is on the whole batch, so all share their steps; `adaptive` solves each alone."""
    field, sizes = DATA.field(LinearFlow()), []

    def seen(x, t, condition):
        sizes.append(len(x))
        assert len(t.unique()) == 1
        return field(x, t, condition)

    together = solve(seen, start(), schedule=LinearFlow(), solver="dopri5", condition=LABELS)
    assert sizes == [8] * together.passes
    apart = solve(field, start()[:1], schedule=LinearFlow(), solver="dopri5", condition=LABELS[:1])
    assert not torch.equal(apart.x, together.x[:1])
    torch.testing.assert_close(apart.x, together.x[:1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("schedule", PATHS, ids=str)
def test_the_field_is_asked_between_the_end_and_t_min(schedule):
    """torchdiffeq steps past the end; a network knows no t below 0."""
    times = []

    def field(x, t, condition):
        times.append(float(t[0]))
        return gaussian(0.3, 0.5, (5,)).denoise(x, t, schedule)

    solve(field, start(), schedule=schedule, solver="dopri5")
    assert max(times) == pytest.approx(schedule.end)
    assert min(times) == T_MIN * schedule.end


@pytest.mark.parametrize("schedule", PATHS, ids=str)
def test_it_agrees_with_solving_one_by_one(schedule):
    field = DATA.field(schedule)
    one = solve(field, start(), schedule=schedule, solver=Adaptive(1e-7, 1e-7), condition=LABELS)
    all_ = solve(field, start(), schedule=schedule, solver=Adaptive(1e-7, 1e-7, joint=True), condition=LABELS)
    torch.testing.assert_close(all_.x, one.x, rtol=0, atol=1e-4)


def test_it_is_a_solver_like_the_others():
    """Its plan runs by `run`; other times than its own, and noise, are refused with the option named."""
    schedule, solver, field = LinearFlow(), Adaptive(1e-4, 1e-4, joint=True), DATA.field(LinearFlow())
    plan = solver.plan(schedule, 7, 0.0)
    found = run(plan, lambda x, t: field(x, full_time(x, t), LABELS), start(), no_noise)
    assert (plan.nfe, plan.steps, found.index) == (0, 2, 2)
    assert torch.equal(found.x, solve(field, start(), schedule=schedule, solver=solver, condition=LABELS).x)
    with pytest.raises(ValueError, match=r"solver='adaptive' chooses its own times.*adams"):
        solver.plan_times(schedule, (1.0, 0.5, 0.0), 0.0)
    with pytest.raises(ValueError, match=r"rho=0\.5.*'adaptive'.*rho=0.*adams"):
        solver.plan(schedule, 7, 0.5)
