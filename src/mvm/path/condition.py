"""Conditions: None, a tensor with one row per sample, or mappings, lists and tuples of such.

A null condition is what a sample is given in place of its own, in a share of training and in guidance's unconditional
branch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mvm.untrusted import cut

Condition = Any
Null = Any  # a condition of one row, which serves all samples, or a callable: condition -> null condition


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
        forms = " and ".join(map(_form, conditions))
        raise ValueError(f"{name}: the structures differ here ({forms}); give both the same keys and lengths")
    return first


def _form(condition: Condition) -> str:
    """Return what a part of a structure is, in words."""
    if isinstance(condition, Tensor):
        return f"a tensor {tuple(condition.shape)}"
    if isinstance(condition, Mapping):
        return f"the keys {', '.join(map(repr, condition)) or 'none'}"
    return f"{len(condition)} entries" if isinstance(condition, list | tuple) else repr(condition)


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
        if not tensor.ndim or tensor.shape[0] == x.shape[0]:
            return tensor
        return tensor.expand(x.shape[0], *tensor.shape[1:])

    out = map_tensors(rows_of, condition, name=name)
    if not tensors:
        given = cut(repr(condition))
        raise ValueError(f"{name} must be a tensor with one row per sample, or a structure of such; got {given}")
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


def require_finite(condition: Condition, name: str = "condition") -> Condition:
    """Return the condition; one with NaN or Inf is refused."""

    def check(position: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{position} of shape {tuple(tensor.shape)} holds NaN or Inf; give finite values")
        return tensor

    return map_tensors(check, condition, name=name)


def check_labels(labels: Condition, x: Tensor, classes: int) -> Tensor:
    """Return labels for the rows of x; all that are not labels of so many classes are refused."""
    if not isinstance(labels, Tensor) or labels.shape != x.shape[:1] or labels.is_floating_point():
        raise ValueError(f"condition must be an int64 tensor of shape ({x.shape[0]},), one label per sample")
    if classes == 0:
        raise ValueError("condition is given, but this model knows no classes; leave it out")
    if not bool(((labels >= 0) & (labels < classes)).all()):
        raise ValueError(f"condition holds labels outside 0 to {classes - 1}, the classes of this model")
    return labels


def require_like(condition: Condition, null: Condition) -> None:
    """Refuse a condition of another structure, or with rows of another shape, than the null condition's."""

    def compare(position: str, one: Tensor, given: Tensor) -> Tensor:
        if one.ndim and (not given.ndim or one.shape[1:] != given.shape[1:]):
            wanted = ", ".join(map(str, ("B", *one.shape[1:])))
            raise ValueError(f"{position} is of shape {tuple(given.shape)}, and this model takes ({wanted})")
        if (one.dtype == torch.bool) != (given.dtype == torch.bool):
            wanted = "bool" if one.dtype == torch.bool else "numbers"
            raise ValueError(f"{position} is of {given.dtype}, and this model takes {wanted}")
        return given

    map_tensors(compare, null, condition)


def null_of(null: Null, condition: Condition, x: Tensor) -> Condition:
    """Return the null condition for the rows of x; None where `null` says nothing of it.

    null: a condition, of which one row serves all samples; a number, for labels; or a callable that makes it from the
    condition, e.g. torch.zeros_like.
    """
    if null is None:
        return None
    if isinstance(null, int):
        return torch.full((x.shape[0],), null, dtype=torch.int64, device=x.device)
    if isinstance(null, Mapping | list | tuple) or not callable(null):  # torch.compile cannot ask a mapping that
        return batched(null, x, "null")
    if condition is None:
        raise ValueError("null is a function of the condition, and condition=None; give one, or a null value")
    return batched(null(condition), x, "null(condition)")


def _require_shape(position: str, given: Tensor, instead: Tensor) -> Tensor:
    if given.shape[1:] != instead.shape[1:] or given.ndim != instead.ndim:
        raise ValueError(
            f"null has shape {tuple(instead.shape)} where {position} has {tuple(given.shape)}; give one row of "
            "the same shape (pad texts to one length), or a callable: condition -> null"
        )
    return given


def require_fit(condition: Condition, null: Condition) -> None:
    """Refuse a null condition of another structure, or with rows of another shape. Both are batched."""
    map_tensors(_require_shape, condition, null)


def dropped(condition: Condition, null: Condition, mask: Tensor) -> Condition:
    """Return the condition with the null condition in the rows of `mask`, bool (B,). Both are batched."""

    def pick(position: str, given: Tensor, instead: Tensor) -> Tensor:
        _require_shape(position, given, instead)
        here = mask.to(given.device).reshape(-1, *(1,) * (given.ndim - 1))
        return torch.where(here, instead.to(given.dtype), given) if given.ndim else given

    return map_tensors(pick, condition, null)
