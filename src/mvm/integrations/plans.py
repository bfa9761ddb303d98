"""A plan seen from outside: in the time and the coordinates of the schedule that the network was trained on."""

import inspect
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mvm.options import choose, nearest
from mvm.path import MEAN_VELOCITY, Schedule, equal_snr_scale, equal_snr_time
from mvm.solver import SOLVERS, Plan, Solver, State
from mvm.solver.variants import once_a_step


def build_solver(name: str, options: dict[str, float | str]) -> Solver:
    """Return the solver of that name with these options; one that does not evaluate once a step is refused."""
    make = choose("solver", name, SOLVERS)
    if not once_a_step(make()):
        fitting = ", ".join(name for name, make in SOLVERS.items() if once_a_step(make()))
        raise ValueError(
            f"solver='{name}' does not evaluate the network once a step, as a scheduler must; use one of: "
            f"{fitting}, or sample with mvm.sample"
        )
    known = [option for option in inspect.signature(make).parameters if option not in ("name", "shift")] + ["shift"]
    for option in options:
        if option not in known:
            raise ValueError(
                f"solver_options: '{option}' is unknown to '{name}'{nearest(option, known)}; "
                f"allowed: {', '.join(known)}"
            )
    own = {option: value for option, value in options.items() if option != "shift"}
    return replace(make(**own), shift=options.get("shift", 0.0))


@dataclass(frozen=True)
class SchedulePlan:
    """A plan with its times as the schedule's, and the scales of the schedule's samples against the solver's states.

    first: what makes noise the first sample: 1, but where a grid begins short of the end, as native solvers take the
    noise as a state of the end.
    """

    plan: Plan
    times: tuple[float, ...]
    scales: tuple[float, ...]
    first: float = 1.0

    def to_state(self, index: int, sample: Tensor) -> Tensor:
        """Return a sample at times[index] as the solver's state, float32 at least; a copy, as samples get changed."""
        wide = sample if sample.dtype == torch.float64 else sample.float()
        return wide / self.scales[index]

    def to_sample(self, state: State) -> Tensor:
        """Return the solver's state as a sample; a copy, as samples get changed."""
        return state.x * self.scales[state.index]

    def resume(self, state: State, sample: Tensor) -> State:
        """Return the state to go on from; a sample that is no longer the state's counts as it is, uncorrected.

        The corrector would start from the state one step back, which knows nothing of the change.
        """
        if torch.equal(sample, self.to_sample(state).to(sample.dtype)):
            return state
        return replace(state, x=self.to_state(state.index, sample), anchor=None, kick=None)


def solver_path(solver: Solver, schedule: Schedule) -> Schedule:
    """Return the path whose times the solver takes for a network trained on the schedule."""
    return schedule if solver.own_time else MEAN_VELOCITY


def times_on(target: Schedule, times: tuple[float, ...], source: Schedule) -> tuple[float, ...]:
    """Return the times of the target path with the signal-to-noise ratios of these times of the source."""
    if source == target:
        return times
    return tuple(float(equal_snr_time(t, source, target)) for t in times)


def plan_on(schedule: Schedule, plan: Plan, solver: Solver) -> SchedulePlan:
    """Return the plan as the schedule sees it."""
    path = solver_path(solver, schedule)
    if path == schedule:
        return SchedulePlan(plan, plan.times, (1.0,) * len(plan.times))
    scales = tuple(float(equal_snr_scale(t, path, schedule)) for t in plan.times)
    first = scales[0] * float(equal_snr_scale(schedule.end, schedule, path))
    return SchedulePlan(plan, times_on(schedule, plan.times, path), scales, first)
