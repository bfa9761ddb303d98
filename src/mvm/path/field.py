"""Fields: callables (x, t, condition) -> x0_hat, what else they may offer, and their conditions.

t is float64 (B,) on x's device. A condition of a trained model is its labels, int64 (B,); of another field it may be
any structure of mappings, lists, tuples and tensors (B, ...). None is the null class, guidance's unconditional branch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from mvm.path.schedule import MEAN_VELOCITY, Schedule, equal_snr_scale, equal_snr_time, like

Condition = Any
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
    # the type's own methods: `both` of a wrapper that forwards attributes (torch.compile's) would bypass it
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
    """A field that checks its own conditions; those of another trained field are labels."""

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

    Another one than its own is refused: a trained model would silently be wrong.
    """
    own = getattr(field, "schedule", None)
    own = own if isinstance(own, Schedule) else None
    if schedule is None:
        return own or MEAN_VELOCITY
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule={schedule!r} is no schedule; leave it out, or pass one of mvm.path")
    if own is not None and own != schedule:
        raise ValueError(f"schedule={schedule}: this model was trained on {own}; leave schedule out")
    return schedule


def equal_snr(field: Field, source: Schedule, target: Schedule) -> Field:
    """Return a field of `target` from a field of `source`: same SNR, rescaled state, same x0_hat."""

    def mapped(x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        scale = like(equal_snr_scale(t, target, source), x)
        return field(x * scale, equal_snr_time(t, target, source).to(x.device), condition)

    return mapped


def full_time(x: Tensor, t: float) -> Tensor:
    """Return t for every sample of x: float64 (B,)."""
    return torch.full((x.shape[0],), t, dtype=torch.float64, device=x.device)


def map_tensors(function: Callable[..., Tensor], *conditions: Condition, name: str = "condition") -> Condition:
    """Return the structure with function(name, *tensors) of the tensors at the same position in all `conditions`.

    All that is no tensor comes from the first. name: what the structure is called; a tensor's position is added to it,
    e.g. condition['text'].
    """
    first = conditions[0]
    if isinstance(first, Mapping) and all(isinstance(c, Mapping) and c.keys() == first.keys() for c in conditions):
        return {key: map_tensors(function, *(c[key] for c in conditions), name=f"{name}['{key}']") for key in first}
    if isinstance(first, list | tuple) and all(
        isinstance(c, list | tuple) and len(c) == len(first) for c in conditions
    ):
        parts = zip(*conditions, strict=True)
        mapped = [map_tensors(function, *part, name=f"{name}[{i}]") for i, part in enumerate(parts)]
        return mapped if isinstance(first, list) else tuple(mapped)
    if all(isinstance(c, Tensor) for c in conditions):
        return function(name, *conditions)
    if any(isinstance(c, Tensor | Mapping | list | tuple) for c in conditions):
        raise ValueError(f"{name}: the structures differ here; give both the same keys and lengths")
    return first


def batched(condition: Condition, x: Tensor, name: str = "condition") -> Condition:
    """Return the structure on x's device with one row per sample of x; one row alone is for all, a scalar stays one."""
    tensors = []

    def rows_of(position: str, tensor: Tensor) -> Tensor:
        tensors.append(position)
        if tensor.ndim and tensor.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"{position} of shape {tuple(tensor.shape)} has {tensor.shape[0]} rows for a batch of {x.shape[0]}; "
                "give one per sample, or one for all"
            )
        tensor = tensor.to(x.device)
        return tensor.expand(x.shape[0], *tensor.shape[1:]) if tensor.ndim else tensor

    out = map_tensors(rows_of, condition, name=name)
    if not tensors:
        raise ValueError(f"{name} must be a tensor with one row per sample, or a structure of such; got {condition!r}")
    return out


def rows(condition: Condition, index: Tensor | slice) -> Condition:
    """Return some rows of a structure that is batched."""
    return map_tensors(lambda _, tensor: tensor[index] if tensor.ndim else tensor, condition)


def cat(null: Condition, condition: Condition) -> Condition:
    """Return both batched structures as one: the rows of the first, then those of the second."""

    def both(position: str, one: Tensor, other: Tensor) -> Tensor:
        if one.shape[1:] != other.shape[1:] or one.ndim != other.ndim:
            raise ValueError(
                f"{position} of shape {tuple(other.shape)} cannot be joined with {tuple(one.shape)} of the "
                "unconditional branch; pad both to one length, or ask in two calls (joined=False)"
            )
        return torch.cat((one, other)) if one.ndim else one

    return map_tensors(both, null, condition)
