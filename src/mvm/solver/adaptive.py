"""Adaptive Runge-Kutta by torchdiffeq (optional extra `adaptive`)."""

import importlib
from dataclasses import dataclass

from torch import Tensor

from mvm.options import at_least
from mvm.path import Schedule
from mvm.solver.base import Evaluate
from mvm.solver.onestep import drift


@dataclass(frozen=True)
class Adaptive:
    """Dormand-Prince 5(4) to a tolerance, ODE only; it has no nfe to give, it reports the one it took.

    It integrates in c = t^sigma_power from the schedule's end to t_min and returns x0_hat there. rtol and atol
    bound the error of a step, not of the image. Samples are solved one by one, each with its own steps.
    """

    rtol: float = 1e-5
    atol: float = 1e-5
    t_min: float = 1e-5
    name: str = "adaptive"

    def __post_init__(self) -> None:
        for option in ("rtol", "atol", "t_min"):
            at_least(option, getattr(self, option), 1e-12)

    def integrate(self, schedule: Schedule, evaluate: Evaluate, x: Tensor) -> Tensor:
        """Return x0_hat at t_min."""
        try:
            odeint = importlib.import_module("torchdiffeq").odeint
        except ImportError as error:
            raise ValueError(
                "solver='adaptive' needs torchdiffeq; install it with: pip install 'mvm[adaptive]'"
            ) from error
        power = schedule.sigma_power

        def velocity(c: Tensor, state: Tensor) -> Tensor:
            t = min(max(float(c) ** (1 / power), self.t_min), schedule.end)
            a, b = drift(schedule, t, 0.0)
            return (a * state + b * evaluate(state, t)) * (float(c) ** (1 / power - 1) / power)

        ends = x.new_tensor([schedule.end**power, self.t_min**power])
        exactly = {"step_t": ends[1:]}  # else it steps past the end, to negative times, and interpolates back
        states = odeint(velocity, x, ends, rtol=self.rtol, atol=self.atol, method="dopri5", options=exactly)
        return evaluate(states[-1], self.t_min)
