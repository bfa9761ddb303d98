"""Adaptive Runge-Kutta by torchdiffeq (optional extra `adaptive`)."""

import importlib
from dataclasses import dataclass, field

from torch import Tensor

from mvm.options import between, needs
from mvm.path import Schedule
from mvm.solver.base import Evaluate, NoiseSource, Plan, Solver, State
from mvm.solver.onestep import drift


@dataclass(frozen=True)
class TolerancePlan(Plan):
    """Two steps: dopri5 from the schedule's end to t_min, then x0_hat there."""

    schedule: Schedule
    solver: "Adaptive"
    nfe = 0

    @property
    def uncounted(self) -> int:
        return int(self.solver.joint)  # evaluations are then those of the ODE, as the literature counts

    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        if state.index == 0:
            return State(1, self.solver.integrate(self.schedule, evaluate, state.x))
        x0 = evaluate(state.x, self.times[1])
        return State(2, x0, (x0,))


@dataclass(frozen=True)
class Adaptive(Solver):
    """Dormand-Prince 5(4) to a tolerance, ODE only; it has no nfe to give, it reports the one it took.

    It integrates from the schedule's end to t_min, where x0_hat is the image; t_min and the variables below are shares
    of that end. rtol and atol bound the error of a step, not of the image. joint = False: in c = t^sigma_power, samples
    one by one, each with its own steps. joint = True (see `dopri5`): in t, the whole batch as one state with one error
    norm, so images depend on their batch.
    """

    rtol: float = 1e-5
    atol: float = 1e-5
    t_min: float = 1e-5
    name: str = field(default="adaptive", kw_only=True)
    joint: bool = False
    order, by_tolerance, own_time = 5, True, True

    def __post_init__(self) -> None:
        for option in ("rtol", "atol", "t_min"):
            between(option, getattr(self, option), 1e-12, 1)
        if self.t_min >= 1:
            raise ValueError(f"t_min={self.t_min} must lie below 1: it is a share of the schedule's end")

    @property
    def per_sample(self) -> bool:
        return not self.joint

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        return self.plan_times(schedule, (schedule.end, self.t_min * schedule.end, 0.0), rho)

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        self.check_rho(rho)
        if times != (schedule.end, self.t_min * schedule.end, 0.0):
            raise ValueError(f"solver='{self.name}' chooses its own times; to give some, use adams")
        return TolerancePlan(times, schedule, self)

    def integrate(self, schedule: Schedule, evaluate: Evaluate, x: Tensor) -> Tensor:
        """Return the state at t_min of the schedule's end; x (B, ...) is solved as one."""
        try:
            odeint = importlib.import_module("torchdiffeq").odeint
        except ImportError as error:
            raise ValueError(needs(f"solver='{self.name}'", "torchdiffeq", "adaptive")) from error
        power = 1.0 if self.joint else schedule.sigma_power

        def velocity(c: Tensor, state: Tensor) -> Tensor:
            t = schedule.end * min(max(float(c) ** (1 / power), self.t_min), 1.0)
            a, b = drift(schedule, t, 0.0)
            return (a * state + b * evaluate(state, t)) * (schedule.end * float(c) ** (1 / power - 1) / power)

        ends = x.new_tensor([1.0, self.t_min**power])
        # by default torchdiffeq, as the literature counts, steps past the end and interpolates back (the field is
        # evaluated at t_min there); a step that ends exactly there needs fewer evaluations
        options = None if self.joint else {"step_t": ends[1:]}
        try:
            return odeint(velocity, x, ends, rtol=self.rtol, atol=self.atol, method="dopri5", options=options)[-1]
        except AssertionError as error:  # torchdiffeq's, of a step that became too small: so it is with NaN
            raise FloatingPointError(
                f"solver='{self.name}' found no step that is small enough ({error}): the network's answer is not "
                "finite, or changes too fast; check the weights, and try another solver, e.g. adams"
            ) from None


def dopri5() -> Adaptive:
    """Return the solver of the flow-matching literature: one ODE per batch, in the path's own t, defaults throughout.

    Its nfe counts calls on the batch, rejected steps included, and not the x0_hat taken from the state at t_min.
    """
    return Adaptive(name="dopri5", joint=True)
