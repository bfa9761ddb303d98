"""Fields: callables (x, t, condition) -> x0_hat, and what else they may offer.

t is float64 (B,) on x's device. condition: see mvm.path.condition; None is guidance's unconditional branch.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from mvm.path.betas import ddpm
from mvm.path.condition import Condition, batched, check_labels, require_finite
from mvm.path.schedule import MEAN_VELOCITY, Schedule, equal_snr_scale, equal_snr_time, like

Field = Callable[[Tensor, Tensor, Condition], Tensor]


@runtime_checkable
class PairedField(Protocol):
    """A field that also gives its inner (weaker) answer in the same pass."""

    def __call__(self, x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor: ...

    def pair(self, x: Tensor, t: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (outer, inner) x0_hat."""
        ...


@runtime_checkable
class JoinedField(Protocol):
    """A field that may itself answer for the null condition and for a condition, in one call where that is faster."""

    def __call__(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor: ...

    def joins(self, x: Tensor) -> bool:
        """Return whether `both` is to be asked for x: by its device and shape alone, no value is looked at."""
        ...

    def both(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Return (null, conditional) x0_hat."""
        ...


def joined_for(field: Field, x: Tensor) -> TypeGuard[JoinedField]:
    """Return whether to ask this field for both answers to x at once."""
    # the type's own methods: `both` of a wrapper that forwards attributes (torch.compile's) would bypass it
    return isinstance(field, JoinedField) and issubclass(type(field), JoinedField) and field.joins(x)


@runtime_checkable
class TrainedField(Protocol):
    """A field that knows the schedule it was trained on."""

    @property
    def schedule(self) -> Schedule: ...


@runtime_checkable
class ConditionedField(Protocol):
    """A field that checks its own conditions."""

    def check_condition(self, condition: Condition, x: Tensor) -> Condition:
        """Return the condition with one row per sample of x; one that it does not take is a ValueError."""
        ...


@runtime_checkable
class SizedField(Protocol):
    """A field that takes samples of one shape."""

    @property
    def sample_shape(self) -> tuple[int, ...]: ...


def require_schedule(field: Field, schedule: Schedule | None) -> Schedule:
    """Return the schedule to use a field on: None is the field's own, MeanVelocity where it names none.

    Another one than its own is refused: a trained model would silently be wrong. A part of its own is one of its own.
    """
    own = getattr(field, "schedule", None)
    own = own if isinstance(own, Schedule) else None
    if schedule is None:
        return own or MEAN_VELOCITY
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule={schedule!r} is no schedule; leave it out, or pass one of mvm.path")
    if own is not None and own != schedule.whole:
        raise ValueError(f"schedule={schedule}: this model was trained on {own}; leave schedule out")
    return schedule


def equal_snr(field: Field, source: Schedule, target: Schedule) -> Field:
    """Return a field of `target` from a field of `source`: same SNR, rescaled state, same x0_hat."""

    def mapped(x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        scale = like(equal_snr_scale(t, target, source), x)
        return field(x * scale, equal_snr_time(t, target, source).to(x.device), condition)

    return mapped


def on_schedule(field: Field, schedule: Schedule) -> Field:
    """Return a field on this schedule: itself, or through equal SNR where it names another one."""
    own = getattr(field, "schedule", None)
    return equal_snr(field, own, schedule) if isinstance(own, Schedule) and own != schedule.whole else field


def network_time(what: str | Callable[[Tensor], Tensor], t: Tensor, schedule: Schedule) -> Tensor:
    """Return what a network receives at times t (B,).

    what: "t", "1-t", the noise "level", the training "step" of DDPM at equal SNR (fractional), or a function of t.
    """
    if not isinstance(what, str):
        return what(t)
    if what == "level":
        return schedule.level(t)
    if what == "step":
        table = ddpm()
        return table.timestep(table.t_from_lam(schedule.lam(t)))
    return 1 - t if what == "1-t" else t


def checked_condition(field: Any, condition: Condition, x: Tensor) -> Condition:
    """Return the condition with one row per sample of x, checked by the field where it can; None stays None."""
    if condition is None:
        return None
    if isinstance(field, ConditionedField):
        return field.check_condition(condition, x)
    if (classes := getattr(field, "num_classes", None)) is not None:
        return check_labels(condition, x, classes)
    return require_finite(batched(condition, x))


def full_time(x: Tensor, t: float) -> Tensor:
    """Return t for every sample of x: float64 (B,)."""
    return torch.full((x.shape[0],), t, dtype=torch.float64, device=x.device)
