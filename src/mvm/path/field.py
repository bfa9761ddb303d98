"""Fields: callables (x, t, condition) -> x0_hat, and the equal-SNR map between schedules."""

from collections.abc import Callable
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from mvm.path.condition import Condition
from mvm.path.schedule import Schedule, like

# t is float64 (B,) on x's device; trained models take int64 labels (B,) for a condition, None is the null class.
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
    """A field that may answer for the null class and for a condition in one call, where that is faster than two."""

    def __call__(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor: ...

    def joins(self, x: Tensor) -> bool:
        """Return whether one call is to be made for x: by its device and shape alone, no value is looked at."""
        ...

    def both(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Return (null, conditional) x0_hat."""
        ...


def joined_for(field: Field, x: Tensor) -> TypeGuard[JoinedField]:
    """Return whether to ask this field for both answers to x in one call."""
    # the type's own methods: `both` of what lies within a wrapper that hands on names (torch.compile's) goes past it
    return isinstance(field, JoinedField) and issubclass(type(field), JoinedField) and field.joins(x)


@runtime_checkable
class TrainedField(Protocol):
    """A field that knows the schedule it was trained on and its number of classes."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def num_classes(self) -> int: ...


@runtime_checkable
class ConditionedField(Protocol):
    """A field that says itself which conditions it takes; of another trained field they are labels."""

    def check_condition(self, condition: Condition, x: Tensor) -> Condition:
        """Return the condition with one row per sample of x; one that it does not take is a ValueError."""
        ...


@runtime_checkable
class SizedField(Protocol):
    """A field that takes samples of one shape."""

    @property
    def sample_shape(self) -> tuple[int, ...]: ...


def require_schedule(field: Field, schedule: Schedule) -> None:
    """Raise if a trained model is used on another path than its own: it would answer noise without a word."""
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule={schedule!r} is no schedule; pass model.schedule, or one of mvm.path")
    if isinstance(field, TrainedField) and field.schedule != schedule:
        raise ValueError(
            f"schedule={schedule}: this model was trained on {field.schedule}; pass schedule=model.schedule"
        )


def equal_snr_time(t: Tensor | float, source: Schedule, target: Schedule) -> Tensor:
    """Return the target's time with the signal-to-noise ratio the source has at t."""
    return target.t_from_lam(source.lam(t))


def equal_snr_scale(t: Tensor | float, source: Schedule, target: Schedule) -> Tensor:
    """Return c such that c * (state of source at t) is a state of target at equal SNR."""
    return target.norm(equal_snr_time(t, source, target)) / source.norm(t)


def equal_snr(field: Field, source: Schedule, target: Schedule) -> Field:
    """Return a field of `target` from a field of `source`: same SNR, rescaled state, same x0_hat."""

    def mapped(x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        scale = like(equal_snr_scale(t, target, source), x)
        return field(x * scale, equal_snr_time(t, target, source).to(x.device), condition)

    return mapped


def full_time(x: Tensor, t: float) -> Tensor:
    """Return t for every sample of x: float64 (B,)."""
    return torch.full((x.shape[0],), t, dtype=torch.float64, device=x.device)
