"""MVMScheduler: the solvers of mvm behind the protocol of diffusers' schedulers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # diffusers looks for it here when it loads a pipeline
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Generator, Tensor

from mvm.integrations.course import Course, Trail, build_solver, course_of, solver_times
from mvm.noise import as_seeds
from mvm.options import at_least, between, choose
from mvm.path import KINDS, like, schedule_named, to_x0
from mvm.solver import NoiseSource, Plan, State
from mvm.solver.sampling import step_noise

CLOSE = 1e-5  # relative: what rounding to float32 may do to a timestep
Generators = Generator | list[Generator] | None


@dataclass
class MVMSchedulerOutput(BaseOutput):
    """prev_sample: the sample at the next timestep; pred_original_sample: x0_hat at this one."""

    prev_sample: Tensor
    pred_original_sample: Tensor


class MVMScheduler(SchedulerMixin, ConfigMixin):
    """A solver of mvm, one evaluation a step.

    solver, solver_options: a name in mvm.solver.SOLVERS and its options, e.g. "adams" with r, p, q, predictor,
    corrector. rho: 0 is the ODE, 1 the paper's SDE. prediction_type: what the network predicts, of mvm.path.KINDS.
    schedule: the path it was trained on, of mvm.path.SCHEDULES; T: the mean-velocity path's. seeds: one per sample, for
    mvm's own noise; None takes `generator`.

    Timesteps are the times t of the schedule, float64, from its end down. What a step needs to know of earlier ones is
    a `State` of mvm.solver; the timestep passed says which step it is, not a counter.
    """

    order = 1

    @register_to_config
    def __init__(
        self,
        solver: str = "adams",
        rho: float = 0.0,
        prediction_type: str = "u",
        schedule: str = "mean-velocity",
        solver_options: dict[str, Any] | None = None,
        seeds: list[int] | None = None,
        T: float = 1.0,
    ) -> None:
        choose("prediction_type", prediction_type, KINDS)
        at_least("rho", rho, 0)
        if not math.isfinite(rho):
            raise ValueError(f"rho={rho} must be finite; 0 is the ODE, 1 the paper's SDE")
        self.schedule = schedule_named(schedule, T)
        self.solver = build_solver(solver, dict(solver_options or {}))
        self.num_inference_steps: int | None = None
        self._course: Course | None = None
        self._timesteps: Tensor | None = None
        self._begin: int | None = None
        self._trail: Trail | None = None

    @classmethod
    def from_config(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler of a config; that of another scheduler, whose network has another path, is refused."""
        if isinstance(config, Mapping) and "num_train_timesteps" in config:
            raise ValueError(
                "config: it is of another scheduler, and its network knows neither the times nor the path of this one; "
                "sample that network with mvm.bridge.from_diffusers and mvm.sample"
            )
        return super().from_config(config, *args, **kwargs)

    def _planned(self) -> tuple[Course, Tensor]:
        if self._course is None or self._timesteps is None:
            raise ValueError("no timesteps yet: call scheduler.set_timesteps(num_inference_steps) first")
        return self._course, self._timesteps

    def _plan_through(self, times: tuple[float, ...]) -> Plan:
        end = self.schedule.end
        if len(times) < 2 or times[0] > end or not all(s > t for s, t in pairwise(times)):
            raise ValueError(f"timesteps={list(times[:-1])} must fall, from {end} at most, and stay above 0")
        return self.solver.plan_times(
            self.schedule, solver_times(times, self.solver, self.schedule), self.config["rho"]
        )

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Plan a new run: of so many evaluations, or through given times of the schedule (0, the image, is added)."""
        if timesteps is not None and num_inference_steps is None:
            plan = self._plan_through((*map(float, timesteps), 0.0))
        elif num_inference_steps is not None and timesteps is None:
            if not isinstance(num_inference_steps, Integral):
                raise ValueError(f"num_inference_steps={num_inference_steps!r} must be a whole number, at least 1")
            at_least("num_inference_steps", num_inference_steps, 1)
            plan = self.solver.plan(self.schedule, int(num_inference_steps), self.config["rho"])
        else:
            raise ValueError("set_timesteps: give num_inference_steps or timesteps, one of the two")
        self._course = course_of(plan, self.solver, self.schedule)
        self._timesteps = torch.tensor(self._course.times[:-1], dtype=torch.float64).to(device)
        self.num_inference_steps = plan.steps
        self._begin, self._trail = None, None

    @property
    def timesteps(self) -> Tensor:
        """The times of the evaluations, float64."""
        return self._planned()[1]

    @property
    def init_noise_sigma(self) -> float:
        """What standard normal noise is multiplied by to be the first sample."""
        return self._planned()[0].first

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
        times = self._planned()[0].times[:-1]
        t = _one_time(timestep)
        index = min(range(len(times)), key=lambda i: abs(times[i] - t))
        if abs(times[index] - t) > CLOSE * times[index]:
            raise ValueError(f"timestep={t} is none of scheduler.timesteps; the nearest is {times[index]}")
        return index

    def scale_model_input(self, sample: Tensor, timestep: float | Tensor | None = None) -> Tensor:
        """Return the sample: the network scales nothing."""
        return sample

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return alpha x0 + sigma eps at times of the schedule, one for all or one per sample."""
        if not timesteps.is_floating_point() or not bool(((timesteps >= 0) & (timesteps <= self.schedule.end)).all()):
            raise ValueError(
                f"timesteps={timesteps.tolist()} must be times in [0, {self.schedule.end}], as in scheduler.timesteps; "
                "there are no numbered training steps here"
            )
        alpha, sigma = self.schedule.alpha(timesteps), self.schedule.sigma(timesteps)
        return like(alpha, original_samples) * original_samples + like(sigma, original_samples) * noise

    def _course_from(self, begin: int) -> Course:
        """Return the course from that step on: its first steps know no past."""
        course, _ = self._planned()
        if begin == 0:
            return course
        plan = self.solver.plan_times(self.schedule, course.plan.times[begin:], self.config["rho"])
        return course_of(plan, self.solver, self.schedule)

    def _departure(self, index: int, sample: Tensor) -> tuple[Trail, State]:
        """Return the run and the state that this step starts from: a new run, the next step, or the last one again."""
        trail = self._trail
        begin = self._begin if self._begin is not None else (index if trail is None else trail.begin)
        if index == begin:
            course = self._course_from(begin)
            start = State(0, course.inward(0, sample))
            return Trail(begin, course, (start,)), start
        state = None if trail is None else trail.state_at(index)
        if trail is None or state is None:
            times, due = self._planned()[0].times, begin if trail is None else trail.due
            following = f"step {due}, t={times[due]}, comes next" if times[due] else "the run is over"
            raise ValueError(
                f"timestep={times[index]} is step {index}, but {following}; begin again with set_timesteps, "
                "or in the middle (image to image) with set_begin_index"
            )
        return trail, trail.course.met(state, sample)

    def _noise(self, x: Tensor, generator: Generators) -> NoiseSource:
        if self.config["seeds"] is not None:
            if generator is not None:
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
    ) -> MVMSchedulerOutput | tuple[Tensor, Tensor]:
        """Return the sample at the next timestep, and x0_hat at this one.

        The same step may be done again: it starts from the same past. generator: one, or one per sample.
        """
        if model_output.shape != sample.shape:
            raise ValueError(
                f"model_output of shape {tuple(model_output.shape)} must have that of the sample, {tuple(sample.shape)}"
            )
        trail, start = self._departure(self.index_for_timestep(timestep), sample)
        course = trail.course
        seen, t = course.outward(start), course.times[start.index]
        x0 = to_x0(self.config["prediction_type"], model_output.to(seen.dtype), seen, t, self.schedule)
        state = course.plan.step(start, lambda x, t: x0, self._noise(start.x, generator))
        self._trail = trail.after(start, state)
        previous, original = course.outward(state).to(sample.dtype), x0.to(sample.dtype, copy=True)
        return MVMSchedulerOutput(previous, original) if return_dict else (previous, original)


def _one_time(timestep: float | Tensor) -> float:
    """Return the timestep as a number."""
    whole = not timestep.is_floating_point() if isinstance(timestep, Tensor) else isinstance(timestep, int)
    if whole:
        raise ValueError(f"timestep={timestep} is a whole number; pass one of scheduler.timesteps, not its index")
    if not isinstance(timestep, Tensor):
        return float(timestep)
    if timestep.numel() > 1 and not bool((timestep == timestep.reshape(-1)[0]).all()):
        raise ValueError("timestep: the samples of a batch take their steps together; pass one of scheduler.timesteps")
    return float(timestep.reshape(-1)[0])


def check_generators(generator: Generators, batch: int) -> None:
    """Raise unless a list of generators has one per sample."""
    if isinstance(generator, list) and len(generator) != batch:
        raise ValueError(f"generator has {len(generator)} entries for a batch of {batch}; give one per sample, or one")
