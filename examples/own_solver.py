"""Write a solver: a two-step method for the ODE, and its order of convergence."""

import math
from dataclasses import dataclass

import torch

import mvm
from mvm.path import MEAN_VELOCITY
from mvm.solver import Plan, Solver, State


@dataclass(frozen=True)
class TwoStepPlan(Plan):
    """x_t = k x_s + (1 - t - k (1 - s)) x0, k = sqrt(t/s), is exact for constant x0: x0 is taken at the midpoint."""

    nfe = property(lambda self: self.steps)

    def step(self, state, evaluate, noise):
        s, t = self.times[state.index], self.times[state.index + 1]
        x0 = middle = evaluate(state.x, s)
        if state.history:  # linear extrapolation in sqrt(t), through the evaluation before
            before = self.times[state.index - 1] ** 0.5
            middle = x0 + (s**0.5 - t**0.5) / (2 * (before - s**0.5)) * (x0 - state.history[0])
        k = (t / s) ** 0.5
        return State(state.index + 1, k * state.x + (1 - t - k * (1 - s)) * middle, (x0,))


@dataclass(frozen=True)
class TwoStep(Solver):
    name: str = "two-step"
    order, weak_order = 2, 0  # of the ODE, and of the SDE's law, which it does not solve

    def plan(self, schedule, nfe, rho):
        return self.plan_times(schedule, tuple((1 - i / nfe) ** 4 for i in range(nfe + 1)), rho)

    def plan_times(self, schedule, times, rho):
        if rho:
            raise ValueError(f"rho={rho}: '{self.name}' solves the ODE alone; use rho=0, or another solver")
        return TwoStepPlan(times)


field = mvm.oracle.gaussian(0.3, 0.5).field(MEAN_VELOCITY)
noise = mvm.noise.initial(torch.arange(100), (1,), torch.float64)
samples = {n: mvm.sample(field, noise, solver=TwoStep(), nfe=n) for n in (128, 256)}
error = {n: (x - (0.3 + 0.5 * noise)).abs().max().item() for n, x in samples.items()}  # exact: 0.3 + 0.5 noise
order = math.log2(error[128] / error[256])
print(f"largest error {error[128]:.1e} at 128 evaluations, {error[256]:.1e} at 256: order {order:.2f}, expected 2")
