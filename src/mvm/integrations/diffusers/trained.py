"""What a network was trained on, as far as a scheduler must know it: of mvm, or by another scheduler's config."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

from mvm.bridge.diffusers import BETA_SCHEDULERS, FLOW_SCHEDULERS, PREDICTIONS, beta_table
from mvm.bridge.incoming import from_model
from mvm.integrations.course import solver_path, times_on
from mvm.options import choose
from mvm.path import MEAN_VELOCITY, LinearFlow, Schedule
from mvm.path.betas import BetaTable
from mvm.solver import Adams, Multistep, Plan, Solver, adams

Times = Tensor | Sequence[float] | float
KNOWN = (*BETA_SCHEDULERS, *FLOW_SCHEDULERS)
TABLE = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")  # what no table of betas can do without
REFUSED = {  # of another scheduler's options, those that neither network nor grid can make up for
    "thresholding": (True, "it changes x0_hat at every step, which a multistep solver must not see; set it to False"),
    "invert_sigmas": (True, "its network gets the time of data, not of noise; use mvm.bridge.from_diffusers"),
    "timestep_type": ("continuous", "its network gets log(sigma)/4; use mvm.bridge.from_diffusers"),
}


@dataclass(frozen=True)
class Training:
    """A network's path, what it predicts, and its clock; it is asked at times from `first` to `last`.

    steps: its training timesteps, or None for a network of mvm, which gets t itself. The rest shifts the grid of a
    flow: by `shift`, or where `dynamic` names how by the mu of a call; `terminal` is the last time asked.
    """

    schedule: Schedule
    kind: str
    first: float
    last: float
    steps: int | None = None
    shift: float = 1.0
    dynamic: str | None = None
    terminal: float | None = None

    @property
    def is_flow(self) -> bool:
        """Whether it is another library's flow, whose grid gets shifted."""
        return self.steps is not None and not isinstance(self.schedule, BetaTable)

    def timestep(self, t: Times) -> Tensor:
        """Return the timestep that the network receives at times of the schedule, float64."""
        t = torch.as_tensor(t, dtype=torch.float64)
        return self.schedule.timestep(t) if isinstance(self.schedule, BetaTable) else t * (self.steps or 1)

    def time(self, timestep: Times) -> Tensor:
        """Return the time of the schedule at a timestep."""
        timestep = torch.as_tensor(timestep, dtype=torch.float64)
        return self.schedule.time(timestep) if isinstance(self.schedule, BetaTable) else timestep / (self.steps or 1)

    def sigmas(self, times: Times) -> Tensor:
        """Return diffusers' sigmas: sigma/alpha of a table of betas, sigma of any other path."""
        t = torch.as_tensor(times, dtype=torch.float64)
        sigma = self.schedule.sigma(t)
        return sigma / self.schedule.alpha(t) if isinstance(self.schedule, BetaTable) else sigma

    def times_at(self, sigmas: Sequence[float], mu: float | None) -> tuple[float, ...]:
        """Return the times of diffusers' sigmas; a flow's are shifted, as FlowMatchEulerDiscreteScheduler does."""
        if self.steps is None:
            raise ValueError("sigmas: a network of mvm has times of its schedule; give timesteps")
        if self.is_flow:
            return self.shifted(tuple(sigmas), mu)
        return tuple(self.schedule.t_from_lam(-torch.tensor(sigmas, dtype=torch.float64).log()).tolist())

    def shifted(self, times: tuple[float, ...], mu: float | None) -> tuple[float, ...]:
        """Return a flow's times moved to where the config has them; once."""
        factor = self.shift
        if self.dynamic is not None:
            if mu is None:
                raise ValueError("mu=None: this config has use_dynamic_shifting=True; give set_timesteps its mu")
            factor = math.exp(mu) if self.dynamic == "exponential" else mu
        moved = tuple(factor * t / (1 + (factor - 1) * t) for t in times)
        if not self.terminal or moved[-1] == 1:
            return moved
        stretch = (1 - self.terminal) / (1 - moved[-1])
        return tuple(1 - (1 - t) * stretch for t in moved)

    def plan(self, solver: Solver, nfe: int, rho: float) -> Plan:
        """Return the solver's plan; in a table of betas from its noisiest level to its cleanest, asked last."""
        if not isinstance(self.schedule, BetaTable):
            return solver.plan(self.schedule, nfe, rho)
        high, low = times_on(MEAN_VELOCITY, (self.last, self.first), self.schedule)
        named = solver if isinstance(solver, Multistep) else adams()
        times = (named.ending_at(low) if isinstance(named, Adams) else named).times(nfe, high, rho)
        if times[-2] < low:
            raise ValueError(
                f"solver_options: the last of {nfe} times of '{solver.name}' is {times[-2]:.3g}, but training step 0 "
                f"of this network stands at {low:.3g}; use a larger t_min, or 'adams'"
            )
        return solver.plan_times(self.schedule, times_on(solver_path(solver, self.schedule), times, MEAN_VELOCITY), rho)


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in another scheduler's config, with its class's defaults where it names its class."""
    name = config.get("_class_name")
    if name is not None:
        choose("config: scheduler", name, dict.fromkeys(KNOWN))
    defaults = {} if name is None else _options(name)
    found = {**defaults, **{key: value for key, value in config.items() if not key.startswith("_")}}
    betas = found.get("trained_betas")
    return found if betas is None else {**found, "trained_betas": [float(beta) for beta in betas]}


def _options(name: str) -> dict[str, Any]:
    """Return the options of a scheduler of diffusers with their defaults."""
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    return {option.name: option.default for option in parameters if option.default is not option.empty}


def is_flow(config: Mapping[str, Any]) -> bool:
    """Return whether these options are of the straight path."""
    return bool(config.get("use_flow_sigmas")) or ("shift" in config and "beta_schedule" not in config)


def training_of(config: Mapping[str, Any], prediction_type: str) -> Training:
    """Return what `described` options say of the network; what this scheduler cannot do right is refused."""
    allowed = {option for name in KNOWN if hasattr(diffusers, name) for option in _options(name)}
    for option, value in config.items():
        if option not in allowed and value is not None:  # old configs have empty options that are no more
            raise ValueError(
                f"config: '{option}={value}' is no option of the schedulers whose networks are known here; if it plays "
                f"no part in the training of yours, leave it out. They are: {', '.join(KNOWN)}"
            )
        if option in REFUSED and value == REFUSED[option][0]:
            raise ValueError(f"config: {option}={value!r}: {REFUSED[option][1]}")
    flow = is_flow(config)
    missing = [option for option in (TABLE[:1] if flow else TABLE) if config.get(option) is None]
    if missing:
        raise ValueError(f"config: {', '.join(missing)} is missing; pass the whole scheduler.config of the pipeline")
    kind = choose("prediction_type", prediction_type, PREDICTIONS)
    if flow != (kind == "flow"):
        path = "a straight path, where it is flow_prediction" if flow else "a table of betas; set use_flow_sigmas=True"
        raise ValueError(f"prediction_type='{prediction_type}': this config is of {path}")
    if flow:
        dynamic = config.get("time_shift_type", "exponential") if config.get("use_dynamic_shifting") else None
        shift = config.get("flow_shift" if config.get("use_flow_sigmas") and "flow_shift" in config else "shift")
        steps, terminal = config["num_train_timesteps"], config.get("shift_terminal")
        return Training(LinearFlow(), "flow", 0.0, 1.0, steps, shift or 1.0, dynamic, terminal)
    options = (*TABLE, "trained_betas", "rescale_betas_zero_snr")
    try:
        made = diffusers.DDPMScheduler(**{option: config[option] for option in options if option in config})
    except NotImplementedError as error:
        raise ValueError(f"beta_schedule='{config['beta_schedule']}' is not one of DDPMScheduler's") from error
    table = beta_table(made)
    asked = from_model(lambda x, t: x, table, kind, path="own")  # never called: which levels a network of it knows
    return Training(table, kind, asked.first, asked.last, table.steps)
