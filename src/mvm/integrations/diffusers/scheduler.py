"""MVMScheduler: the solvers of mvm behind the protocol of diffusers' schedulers."""

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # diffusers looks for it here when it loads a pipeline
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Generator, Tensor, nn

from mvm.bridge.diffusers import BETA_SCHEDULERS, FLOW_SCHEDULERS, PREDICTIONS, beta_table
from mvm.bridge.incoming import from_model
from mvm.integrations.diffusers.transformer import MVMTransformer2DModel
from mvm.integrations.plans import SchedulePlan, build_solver, plan_on, solver_path, times_on
from mvm.noise import as_seeds
from mvm.options import at_least, between, choose
from mvm.path import KINDS, MEAN_VELOCITY, LinearFlow, Schedule, like, schedule_named, to_x0
from mvm.path.betas import BetaTable
from mvm.published.tuned import read_entry
from mvm.recipes import SampleConfig
from mvm.solver import Adams, Multistep, NoiseSource, Plan, Solver, State, adams
from mvm.solver.sampling import step_noise
from mvm.untrusted import refusal

Times = Tensor | Sequence[float] | float
KNOWN = (*BETA_SCHEDULERS, *FLOW_SCHEDULERS)
TABLE = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")  # what no table of betas can do without
REFUSED = {  # of another scheduler's options, those that neither network nor grid can make up for
    "thresholding": (True, "it changes x0_hat at every step, which a multistep solver must not see; set it to False"),
    "invert_sigmas": (True, "its network gets the time of data, not of noise; use mvm.bridge.from_diffusers"),
    "timestep_type": ("continuous", "its network gets log(sigma)/4; use mvm.bridge.from_diffusers"),
}
CLOSE = 1e-5  # relative: what rounding to float32 may do to a timestep
# config.beta_schedule: other schedulers that are made from this one's config (DDIMPipeline does so) say they lack it
NOT_THEIRS = "MVMScheduler (the config of its network's own scheduler is config['trained'])"
LEARNED = ("learned", "learned_range")  # variance_type: a network's second half of channels, which no solver here needs
Generators = Generator | list[Generator] | None


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


def _options(name: str) -> dict[str, Any]:
    """Return the options of a scheduler of diffusers with their defaults."""
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    return {option.name: option.default for option in parameters if option.default is not option.empty}


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in another scheduler's config, with its class's defaults where it names its class."""
    options = {key: value for key, value in config.items() if not key.startswith("_")}
    if (name := config.get("_class_name")) is not None:
        choose("config: scheduler", name, dict.fromkeys(KNOWN))
        options = _options(name) | options
    if (betas := options.get("trained_betas")) is not None:
        options["trained_betas"] = [float(beta) for beta in betas]
    return options


def is_flow(config: Mapping[str, Any]) -> bool:
    """Return whether these options are of the straight path."""
    return bool(config.get("use_flow_sigmas")) or ("shift" in config and "beta_schedule" not in config)


def training_of(config: Mapping[str, Any], prediction_type: str) -> Training:
    """Return what `complete_config`'s options say of the network; what this scheduler cannot do right is refused."""
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
        scheduler = diffusers.DDPMScheduler(**{option: config[option] for option in options if option in config})
    except NotImplementedError as error:
        raise ValueError(f"beta_schedule='{config['beta_schedule']}' is not one of DDPMScheduler's") from error
    table = beta_table(scheduler)
    asked = from_model(lambda x, t: x, table, kind, path="own")  # never called: which levels a network of it knows
    return Training(table, kind, asked.first, asked.last, table.steps)


@dataclass
class MVMSchedulerOutput(BaseOutput):
    """prev_sample: the sample at the next timestep; pred_original_sample: x0_hat at this one."""

    prev_sample: Tensor
    pred_original_sample: Tensor


@dataclass(frozen=True)
class SchedulerRun:
    """A run: where it began, its plan from there, and its last two states (the first is for a step done again)."""

    begin: int
    plan: SchedulePlan
    states: tuple[State, ...]

    @property
    def next_step(self) -> int:
        """The step of the whole plan that comes next."""
        return self.begin + self.states[-1].index


def calling_pipeline(scheduler: Any) -> DiffusionPipeline | None:
    """Return the pipeline that is being called with this scheduler of its, or None.

    No pipeline tells its scheduler: it is found among the callers, each of which names its object self.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, DiffusionPipeline) and any(part is scheduler for part in vars(caller).values()):
            return caller
        frame = frame.f_back
    return None


class MVMScheduler(SchedulerMixin, ConfigMixin):
    """A solver of mvm, one evaluation a step.

    solver, solver_options: a name in mvm.solver.SOLVERS and its options, e.g. "adams" with spread.
    rho: 0 is the ODE, 1 the paper's SDE. seeds: one per sample, for mvm's own noise; None takes `generator`.

    For a network of mvm: prediction_type is of mvm.path.KINDS (or diffusers' name for it), schedule the path it was
    trained on, of mvm.path.SCHEDULES, T the mean-velocity path's; the first two have no default. Timesteps are times t
    of the schedule, float64, from its end down.

    For any other network: `MVMScheduler.from_config(pipe.scheduler.config)`, which keeps that config as `trained`.
    Samples are in the coordinates of its own path; timesteps are its training timesteps, fractional and float32, or
    with round_timesteps whole and int64, for networks that look them up in a table.

    tuned: entries of tuned.json, for `MVMPipeline`, which knows the guidance they were fitted for; from_config with a
    solver or its options leaves them out.

    What a step needs to know of earlier ones is a `State` of mvm.solver; the timestep passed says which step it is, not
    a counter.
    """

    order = 1
    _compatibles = list(KNOWN)  # noqa: RUF012 (as of SchedulerMixin)

    @register_to_config
    def __init__(
        self,
        solver: str = "adams",
        rho: float = 0.0,
        prediction_type: str | None = None,
        schedule: str | None = None,
        solver_options: dict[str, Any] | None = None,
        seeds: list[int] | None = None,
        trained: dict[str, Any] | None = None,
        round_timesteps: bool = False,
        T: float = 1.0,
        tuned: list[dict[str, Any]] | None = None,
    ) -> None:
        at_least("rho", rho, 0)
        if not math.isfinite(rho):
            raise ValueError(f"rho={rho} must be finite; 0 is the ODE, 1 the paper's SDE")
        if trained is None:
            # by default a network of another library would get times in [0, 1], which it takes without an error
            if prediction_type is None or schedule is None:
                missing = [name for name in ("prediction_type", "schedule") if self.config[name] is None]
                raise ValueError(
                    f"MVMScheduler without {' and '.join(missing)}: what the network was trained on must be said. In a "
                    "pipeline of another model use MVMScheduler.from_config(pipe.scheduler.config), also to change "
                    "options of MVMPipeline's; for a network of mvm alone give both, e.g. prediction_type='u', "
                    "schedule='mean-velocity'"
                )
            path = schedule_named(schedule, T)
            kind = PREDICTIONS.get(prediction_type, prediction_type)
            choose("prediction_type", kind, KINDS)
            self.training = Training(path, kind, 0.0, path.end)
        else:
            self.training = training_of(trained, str(prediction_type))
            options = {option: value for option, value in trained.items() if option != "trained_betas"}
            self.register_to_config(**{**options, "use_flow_sigmas": is_flow(trained), **self.config})
        with refusal("config: tuned holds no times of mvm tune", "leave it out"):
            self.tuned = {entry.key: entry for entry in map(read_entry, tuned or ())}
        if round_timesteps and self.training.first == 0:
            raise ValueError("round_timesteps=True: only a table of betas has whole timesteps; leave it False")
        self.register_to_config(beta_schedule=NOT_THEIRS)
        self.schedule = self.training.schedule
        self.solver = build_solver(solver, dict(solver_options or {}))
        self.num_inference_steps: int | None = None
        self._plan: SchedulePlan | None = None
        self._timesteps = torch.empty(0)
        self._begin: int | None = None
        self._run: SchedulerRun | None = None

    @classmethod
    def from_config(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler of a config: one of its own, or that of the scheduler that another network came with.

        Options of either may be given besides; with another solver the config's solver_options are left out. What
        cannot be done right for that network is refused.
        """
        if isinstance(config, Mapping):
            if kwargs.get("solver", config.get("solver")) != config.get("solver"):
                config = {option: value for option, value in config.items() if option != "solver_options"}
            if {"solver", "solver_options"} & kwargs.keys():  # a solver that is named keeps its own times
                config = {option: value for option, value in config.items() if option != "tuned"}
            own = cls._get_init_keys(cls)
            ours = {option: value for option, value in config.items() if option in own or option.startswith("_")}
            theirs = ours.get("trained")
            if not config.keys() & {"solver", "trained"} and not ours.keys() >= config.keys():
                ours, theirs = {}, complete_config(config)
            if theirs is not None:
                changed = theirs.keys() & config.keys() - own - {"beta_schedule"}  # changed by a scheduler in between
                theirs = {**theirs, **{name: config[name] for name in changed if name != "trained_betas"}}
                mixed = {"return_unused_kwargs", *own} - {"prediction_type"}
                theirs = {**theirs, **{name: kwargs.pop(name) for name in list(kwargs) if name not in mixed}}
                default = "flow_prediction" if is_flow(theirs) else "epsilon"  # as their classes have it
                config = {**ours, "trained": theirs, "prediction_type": theirs.get("prediction_type", default)}
        return super().from_config(config, *args, **kwargs)

    def tuned_options(self, settings: SampleConfig) -> dict[str, Any]:
        """Return the option by which this config has the times fitted for a call's settings; none where there are none.

        As in `mvm.sample`: for the ODE, with this number of evaluations under this guidance.
        """
        entry = None if self.config["rho"] else self.tuned.get((settings.nfe, settings.guidance()))
        if entry is None:
            return {}
        return {"solver_options": {**entry.solver_options(), "given": list(entry.solver.given)}}

    def __len__(self) -> int:
        """Return the number of training timesteps."""
        if self.training.steps is None:
            raise TypeError("MVMScheduler of a network of mvm: time is continuous, there are no training timesteps")
        return self.training.steps

    def __bool__(self) -> bool:
        return True

    def _planned(self) -> SchedulePlan:
        if self._plan is None:
            raise ValueError("no timesteps yet: call scheduler.set_timesteps(num_inference_steps) first")
        return self._plan

    def _plan_through(self, times: tuple[float, ...], said: str) -> Plan:
        """Return the plan through times of the schedule (of whole timesteps, where those are asked for), then 0."""
        if self.config["round_timesteps"]:
            times = tuple(self.training.time(self.training.timestep(times).round()).tolist())
        training, slack = self.training, 1 + CLOSE / 10  # what a float32 may be beyond an end that it means
        low = training.first / slack
        falling = all(s > t for s, t in pairwise((*times, 0.0)))
        if not times or not falling or times[0] > training.last * slack or times[-1] < low:
            first, last = (float(training.timestep(t)) for t in (training.first, training.last))
            least = f"stay above {first:g}" if training.first == 0 else f"end at {first:g} at least"
            raise ValueError(f"{said} must fall, from timestep {last} at most, and {least}")
        within = (*(min(max(t, training.first), training.last) for t in times), 0.0)
        planned = times_on(solver_path(self.solver, self.schedule), within, self.schedule)
        return self.solver.plan_times(self.schedule, planned, self.config["rho"])

    def _plan_of(self, nfe: int, mu: float | None) -> Plan:
        """Return the plan of so many evaluations: the solver's grid, on a flow shifted, or moved to whole timesteps."""
        plan = self.training.plan(self.solver, nfe, self.config["rho"])
        times = plan_on(self.schedule, plan, self.solver).times[:-1]
        if self.config["round_timesteps"]:
            between("num_inference_steps", nfe, 1, len(self))
            steps = [len(self)]
            for i, step in enumerate(self.training.timestep(times).round().tolist()):
                steps.append(max(min(int(step), steps[-1] - 1), nfe - 1 - i))  # all differ, down to 0
            times = tuple(self.training.time(steps[1:]).tolist())
            return self._plan_through(times, f"num_inference_steps={nfe}: whole timesteps")
        if not self.training.is_flow:
            return plan
        return self._plan_through(self.training.shifted(times, mu), f"mu={mu}: shifted, the times")

    def _check_network(self) -> None:
        """Raise where a pipeline's network would get times in [0, 1] and knows training timesteps."""
        pipe = None if self.training.steps is not None else calling_pipeline(self)
        if pipe is None:
            return
        parts = [part for part in vars(pipe).values() if isinstance(part, nn.Module)]
        # below wrappers, too: a compiled network is a module around it
        if any(isinstance(module, MVMTransformer2DModel) for part in parts for module in part.modules()):
            return
        said = ", ".join(f"{name}={self.config[name]!r}" for name in ("prediction_type", "schedule"))
        raise ValueError(
            f"MVMScheduler({said}) tells times in [0, 1], which networks of mvm take; {type(pipe).__name__} has "
            "none: give it MVMScheduler.from_config(pipe.scheduler.config) of the scheduler that it came with"
        )

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
    ) -> None:
        """Plan a new run: of so many evaluations, or through given timesteps or sigmas (the image, at 0, is added).

        timesteps: as the network gets them. sigmas: sigma/alpha of a table of betas; those of a flow are shifted, as
        its own scheduler does. mu: the shift of a config with use_dynamic_shifting.
        """
        self._check_network()
        if sum(given is not None for given in (num_inference_steps, timesteps, sigmas)) != 1:
            raise ValueError("set_timesteps: give one of num_inference_steps, timesteps and sigmas")
        if mu is not None and not self.training.is_flow:
            raise ValueError(f"mu={mu} shifts the times of a flow, and this network is of another path; leave it out")
        if timesteps is not None:
            asked = [float(timestep) for timestep in timesteps]
            plan = self._plan_through(tuple(self.training.time(asked).tolist()), f"timesteps={asked}")
        elif sigmas is not None:
            asked = [float(sigma) for sigma in sigmas]
            asked = asked[:-1] if asked and asked[-1] == 0 else asked
            plan = self._plan_through(self.training.times_at(asked, mu), f"sigmas={asked}")
        else:
            if not isinstance(num_inference_steps, Integral):
                raise ValueError(f"num_inference_steps={num_inference_steps!r} must be a whole number, at least 1")
            at_least("num_inference_steps", num_inference_steps, 1)
            plan = self._plan_of(int(num_inference_steps), mu)
        self._plan = plan_on(self.schedule, plan, self.solver)
        planned = self.training.timestep(self._plan.times[:-1])
        if self.config["round_timesteps"]:
            planned = planned.round().long()
        elif self.training.steps is not None:
            planned = planned.float()  # of float64 some networks make float64 embeddings, which their weights refuse
        self._timesteps = planned.to(device)
        self.num_inference_steps = plan.steps
        self._begin, self._run = None, None

    @property
    def timesteps(self) -> Tensor:
        """What the network receives at each evaluation."""
        self._planned()
        return self._timesteps

    @property
    def sigmas(self) -> Tensor:
        """The sigmas of the evaluations and of the image, 0: sigma/alpha for a table of betas."""
        return self.training.sigmas(self._planned().times).float()

    @property
    def init_noise_sigma(self) -> float:
        """What standard normal noise is multiplied by to be the first sample."""
        first = self._planned().first
        return first if self.training.steps is None else 1.0  # half of diffusers' pipelines do not look here

    @property
    def begin_index(self) -> int | None:
        """The step that a run begins with, where one was set."""
        return self._begin

    @property
    def step_index(self) -> int | None:
        """The step that comes next, or None before the first."""
        return None if self._run is None else self._run.next_step

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Begin at that step, e.g. with an image noised to timesteps[begin_index]; set_timesteps undoes it."""
        between("begin_index", begin_index, 0, len(self.timesteps) - 1)
        self._begin, self._run = int(begin_index), None

    def index_for_timestep(self, timestep: float | Tensor) -> int:
        """Return which of the timesteps it is."""
        timesteps = self.training.timestep(self._planned().times[:-1]).tolist()
        whole = not timestep.is_floating_point() if isinstance(timestep, Tensor) else isinstance(timestep, int)
        if whole and self.training.steps is None:
            raise ValueError(f"timestep={timestep} is a whole number; pass one of scheduler.timesteps, not its index")
        given = torch.as_tensor(timestep, dtype=torch.float64, device="cpu").reshape(-1)
        if len(given) > 1 and not bool((given == given[0]).all()):
            raise ValueError(
                "timestep: the samples of a batch take their steps together; pass one of scheduler.timesteps"
            )
        t = float(given[0])
        index = min(range(len(timesteps)), key=lambda i: abs(timesteps[i] - t))
        if abs(timesteps[index] - t) > (0.5 if self.config["round_timesteps"] else CLOSE * timesteps[index]):
            raise ValueError(f"timestep={t} is none of scheduler.timesteps; the nearest is {timesteps[index]}")
        return index

    def scale_model_input(self, sample: Tensor, timestep: float | Tensor | None = None) -> Tensor:
        """Return the sample: it is in the coordinates that the network was trained in."""
        return sample

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return alpha x0 + sigma eps at timesteps, one for all or one per sample; training timesteps may be whole."""
        numbered, end = self.training.steps is not None, float(self.training.timestep(self.schedule.end))
        known = timesteps.is_floating_point() or numbered
        if not known or not bool(((timesteps >= 0) & (timesteps <= end)).all()):
            hint = "" if numbered else ", as in scheduler.timesteps; there are no numbered training steps here"
            raise ValueError(f"timesteps={timesteps.tolist()} must be times in [0, {end}]{hint}")
        times = self.training.time(timesteps.cpu())  # not every device has float64
        alpha, sigma = self.schedule.alpha(times), self.schedule.sigma(times)
        return like(alpha, original_samples) * original_samples + like(sigma, original_samples) * noise

    def scale_noise(self, sample: Tensor, timestep: float | Tensor, noise: Tensor) -> Tensor:
        """Return `add_noise`, as pipelines of flow matching call it."""
        return self.add_noise(sample, noise, torch.as_tensor(timestep, dtype=torch.float32))

    def _start(self, index: int, sample: Tensor) -> tuple[SchedulerRun, State]:
        """Return the run and the state that this step starts from: a new run, the next step, or the last one again."""
        run = self._run
        begin = self._begin if self._begin is not None else (index if run is None else run.begin)
        if index == begin:
            planned = self._planned()
            if begin > 0:  # the first steps from there know no past
                plan = self.solver.plan_times(self.schedule, planned.plan.times[begin:], self.config["rho"])
                planned = plan_on(self.schedule, plan, self.solver)
            start = State(0, planned.to_state(0, sample))
            return SchedulerRun(begin, planned, (start,)), start
        if run is not None:
            for state in run.states:
                if begin + state.index == index:
                    return run, run.plan.resume(state, sample)
        timesteps, due = self.timesteps, begin if run is None else run.next_step
        following = f"step {due}, t={timesteps[due]}, comes next" if due < len(timesteps) else "the run is over"
        raise ValueError(
            f"timestep={timesteps[index]} is step {index}, but {following}; begin again with set_timesteps, "
            "or in the middle (image to image) with set_begin_index"
        )

    def _noise(self, x: Tensor, generator: Generators) -> NoiseSource:
        if self.config["seeds"] is not None:
            if generator is not None and self.training.steps is None:  # other pipelines pass what made the first noise
                raise ValueError("generator: this scheduler draws its noise by config.seeds; give one of the two")
            return step_noise(as_seeds(self.config["seeds"], len(x), x.device), x)
        check_generators(generator, len(x))
        return lambda index: randn_tensor(x.shape, generator=generator, device=x.device, dtype=x.dtype)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generators = None,
        return_dict: bool = True,
        **others: Any,
    ) -> MVMSchedulerOutput | tuple[Tensor, Tensor]:
        """Return the sample at the next timestep, and x0_hat at this one.

        The same step may be done again: it starts from the same past. generator: one, or one per sample.
        """
        if others:
            raise ValueError(
                f"step: {', '.join(others)} is an option of other samplers; noise is set by rho here. "
                "DDIMPipeline passes such options: use DDPMPipeline with the same network"
            )
        if self.config.get("variance_type") in LEARNED and model_output.shape[1] == 2 * sample.shape[1]:
            model_output = model_output[:, : sample.shape[1]]
        if model_output.shape != sample.shape:
            raise ValueError(
                f"model_output of shape {tuple(model_output.shape)} must have that of the sample, {tuple(sample.shape)}"
            )
        run, start = self._start(self.index_for_timestep(timestep), sample)
        seen, t = run.plan.to_sample(start), run.plan.times[start.index]
        level = min(max(t, self.training.first), self.training.last)  # a rounding of t beyond them
        x0 = to_x0(self.training.kind, model_output.to(seen.dtype), seen, level, self.schedule)
        state = run.plan.plan.step(start, lambda x, t: x0, self._noise(start.x, generator))
        self._run = replace(run, states=(start, state))
        previous, original = run.plan.to_sample(state).to(sample.dtype), x0.to(sample.dtype, copy=True)
        return MVMSchedulerOutput(previous, original) if return_dict else (previous, original)


def check_generators(generator: Generators, batch: int) -> None:
    """Raise unless a list of generators has one per sample."""
    if isinstance(generator, list) and len(generator) != batch:
        raise ValueError(f"generator has {len(generator)} entries for a batch of {batch}; give one per sample, or one")
