"""What every solver is: a plan of times and a pure step from state to state."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mvm.path import Schedule

# x0_hat at (x, t); t is a host float, so that plans, tables and guidance are decided off the device.
Evaluate = Callable[[Tensor, float], Tensor]
# standard normal noise of the state's shape for a step index
NoiseSource = Callable[[int], Tensor]


@dataclass(frozen=True)
class State:
    """Everything a solver knows between steps; nothing is kept in the solver itself.

    x is the state at times[index] (for a predictor-corrector: the predicted one); history holds past
    x0_hat, newest first; anchor is the corrected state one step back and kick the noise added since,
    which the corrector starts from and adds again.
    """

    index: int
    x: Tensor
    history: tuple[Tensor, ...] = ()
    anchor: Tensor | None = None
    kick: Tensor | None = None


@dataclass(frozen=True)
class Plan(ABC):
    """A solver bound to its times and rho: `steps` calls of `step`, `nfe` evaluations in all."""

    times: tuple[float, ...]

    @property
    @abstractmethod
    def nfe(self) -> int:
        """Field evaluations of the whole plan; 0 where a tolerance decides."""

    @property
    def uncounted(self) -> int:
        """Evaluations that are passes, but do not count as evaluations."""
        return 0

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @abstractmethod
    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        """Return the state at times[state.index + 1]."""


@dataclass(frozen=True)
class Solver(ABC):
    """A rule that makes plans."""

    name: str

    @property
    @abstractmethod
    def order(self) -> int:
        """Order of convergence on a smooth ODE."""

    @property
    @abstractmethod
    def weak_order(self) -> int:
        """Order of convergence of the sampled law at rho > 0; 0 where only the ODE is solved."""

    @property
    def by_tolerance(self) -> bool:
        """Whether it takes a tolerance in place of a number of evaluations, and reports how many it took."""
        return False

    @property
    def per_sample(self) -> bool:
        """Whether each sample is solved by itself, with steps of its own."""
        return False

    @property
    def own_time(self) -> bool:
        """Whether times are those of the field's own schedule, not of MeanVelocity(T=1) at equal SNR."""
        return False

    def for_size(self, size: int) -> "Solver":
        """Return the solver for samples of so many values; itself, unless its times depend on that."""
        return self

    @abstractmethod
    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        """Return the plan of exactly nfe evaluations from noise to image."""

    @abstractmethod
    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        """Return the plan through given times; an end at t > 0 yields the state there."""


def require_ode(name: str, rho: float) -> None:
    """Refuse noise for a solver of the ODE alone; the message names those that take it."""
    if rho == 0:
        return
    from mvm.solver.sampling import SOLVERS  # where every solver is known; it imports this module

    noisy = [known for known, build in SOLVERS.items() if build().weak_order]
    raise ValueError(f"rho={rho}: solver '{name}' is an ODE solver; use rho=0, or one of: {', '.join(noisy)}")


def no_noise(index: int) -> Tensor:
    """The noise source of an ODE: there is none to draw."""
    raise AssertionError("the ODE draws no noise")


def run(
    plan: Plan,
    evaluate: Evaluate,
    start: Tensor | State,
    noise: NoiseSource,
    *,
    until: int | None = None,
    on_step: Callable[[State], None] | None = None,
) -> State:
    """Return the state after step `until` (default: the last); a State as `start` resumes from it."""
    state = start if isinstance(start, State) else State(0, start)
    last = plan.steps if until is None else until
    while state.index < last:
        state = plan.step(state, evaluate, noise)
        if on_step is not None:
            on_step(state)
    return state
