"""MVMScheduler: the solvers of mvm behind the protocol of diffusers' schedulers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # diffusers looks for it here when it loads a pipeline
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Generator, Tensor

from mvm.bridge.diffusers import PREDICTIONS
from mvm.integrations.course import Course, build_solver, course_of, solver_path, times_on
from mvm.integrations.diffusers.trained import KNOWN, Training, described, is_flow, training_of
from mvm.noise import as_seeds
from mvm.options import at_least, between, choose
from mvm.path import KINDS, like, schedule_named, to_x0
from mvm.published.tuned import read_entry
from mvm.recipes import SampleConfig
from mvm.solver import NoiseSource, Plan, State
from mvm.solver.sampling import step_noise
from mvm.untrusted import refusal

CLOSE = 1e-5  # relative: what rounding to float32 may do to a timestep
# config.beta_schedule: other schedulers that are made from this one's config (DDIMPipeline does so) say they lack it
NOT_THEIRS = "MVMScheduler (the config of its network's own scheduler is config['trained'])"
LEARNED = ("learned", "learned_range")  # variance_type: a network's second half of channels, which no solver here needs
Generators = Generator | list[Generator] | None


@dataclass
class MVMSchedulerOutput(BaseOutput):
    """prev_sample: the sample at the next timestep; pred_original_sample: x0_hat at this one."""

    prev_sample: Tensor
    pred_original_sample: Tensor


@dataclass(frozen=True)
class Trail:
    """A run: where it began, its course from there, and its last two states (the first is for a step done again)."""

    begin: int
    course: Course
    states: tuple[State, ...]

    @property
    def due(self) -> int:
        """The step of the whole plan that comes next."""
        return self.begin + self.states[-1].index


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
            shown = {option: value for option, value in trained.items() if option != "trained_betas"}
            self.register_to_config(**{**shown, "use_flow_sigmas": is_flow(trained), **self.config})
        with refusal("config: tuned holds no times of mvm tune", "leave it out"):
            self.tuned = {entry.key: entry for entry in map(read_entry, tuned or ())}
        if round_timesteps and self.training.first == 0:
            raise ValueError("round_timesteps=True: only a table of betas has whole timesteps; leave it False")
        self.register_to_config(beta_schedule=NOT_THEIRS)
        self.schedule = self.training.schedule
        self.solver = build_solver(solver, dict(solver_options or {}))
        self.num_inference_steps: int | None = None
        self._course: Course | None = None
        self._timesteps = torch.empty(0)
        self._begin: int | None = None
        self._trail: Trail | None = None

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
                ours, theirs = {}, described(config)
            if theirs is not None:
                shown = theirs.keys() & config.keys() - own - {"beta_schedule"}  # changed by a scheduler in between
                theirs = {**theirs, **{name: config[name] for name in shown if name != "trained_betas"}}
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

    def _planned(self) -> Course:
        if self._course is None:
            raise ValueError("no timesteps yet: call scheduler.set_timesteps(num_inference_steps) first")
        return self._course

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

    def _plan(self, nfe: int, mu: float | None) -> Plan:
        """Return the plan of so many evaluations: the solver's grid, on a flow shifted, or moved to whole timesteps."""
        plan = self.training.plan(self.solver, nfe, self.config["rho"])
        times = course_of(plan, self.solver, self.schedule).times[:-1]
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
            plan = self._plan(int(num_inference_steps), mu)
        self._course = course_of(plan, self.solver, self.schedule)
        planned = self.training.timestep(self._course.times[:-1])
        if self.config["round_timesteps"]:
            planned = planned.round().long()
        elif self.training.steps is not None:
            planned = planned.float()  # of float64 some networks make float64 embeddings, which their weights refuse
        self._timesteps = planned.to(device)
        self.num_inference_steps = plan.steps
        self._begin, self._trail = None, None

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
        return None if self._trail is None else self._trail.due

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Begin at that step, e.g. with an image noised to timesteps[begin_index]; set_timesteps undoes it."""
        between("begin_index", begin_index, 0, len(self.timesteps) - 1)
        self._begin, self._trail = int(begin_index), None

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

    def _departure(self, index: int, sample: Tensor) -> tuple[Trail, State]:
        """Return the run and the state that this step starts from: a new run, the next step, or the last one again."""
        trail = self._trail
        begin = self._begin if self._begin is not None else (index if trail is None else trail.begin)
        if index == begin:
            course = self._planned()
            if begin > 0:  # the first steps from there know no past
                plan = self.solver.plan_times(self.schedule, course.plan.times[begin:], self.config["rho"])
                course = course_of(plan, self.solver, self.schedule)
            start = State(0, course.inward(0, sample))
            return Trail(begin, course, (start,)), start
        states = {} if trail is None else {trail.begin + state.index: state for state in trail.states}
        if trail is None or index not in states:
            timesteps, due = self.timesteps, begin if trail is None else trail.due
            following = f"step {due}, t={timesteps[due]}, comes next" if due < len(timesteps) else "the run is over"
            raise ValueError(
                f"timestep={timesteps[index]} is step {index}, but {following}; begin again with set_timesteps, "
                "or in the middle (image to image) with set_begin_index"
            )
        return trail, trail.course.met(states[index], sample)

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
        trail, start = self._departure(self.index_for_timestep(timestep), sample)
        course = trail.course
        seen, t = course.outward(start), course.times[start.index]
        level = min(max(t, self.training.first), self.training.last)  # a rounding of t beyond them
        x0 = to_x0(self.training.kind, model_output.to(seen.dtype), seen, level, self.schedule)
        state = course.plan.step(start, lambda x, t: x0, self._noise(start.x, generator))
        self._trail = replace(trail, states=(start, state))
        previous, original = course.outward(state).to(sample.dtype), x0.to(sample.dtype, copy=True)
        return MVMSchedulerOutput(previous, original) if return_dict else (previous, original)


def check_generators(generator: Generators, batch: int) -> None:
    """Raise unless a list of generators has one per sample."""
    if isinstance(generator, list) and len(generator) != batch:
        raise ValueError(f"generator has {len(generator)} entries for a batch of {batch}; give one per sample, or one")
