"""Conditions of a field: class labels, or any structure of tensors that has one row per sample."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# int64 labels (B,); a tensor (B, ...); mappings, lists and tuples of tensors, numbers, strings and None, however deep.
# None stands for the null class, the unconditional branch of guidance.
Condition = Any


def map_tensors(function: Callable[..., Tensor], *conditions: Condition, name: str = "condition") -> Condition:
    """Return the structure with function(name, *tensors) of the tensors that have one place in all of `conditions`.

    Whatever else there is comes from the first. name: what the structure is called, its place added: condition['text'].
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
    found = []

    def rows_of(place: str, tensor: Tensor) -> Tensor:
        found.append(place)
        if tensor.ndim and tensor.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"{place} of shape {tuple(tensor.shape)} has {tensor.shape[0]} rows for a batch of {x.shape[0]}; give "
                "one per sample, or one for all"
            )
        tensor = tensor.to(x.device)
        return tensor.expand(x.shape[0], *tensor.shape[1:]) if tensor.ndim else tensor

    out = map_tensors(rows_of, condition, name=name)
    if not found:
        raise ValueError(f"{name} must be a tensor with one row per sample, or a structure of such; got {condition!r}")
    return out


def rows(condition: Condition, index: Tensor | slice) -> Condition:
    """Return some rows of a structure that is batched."""
    return map_tensors(lambda _, tensor: tensor[index] if tensor.ndim else tensor, condition)


def cat(null: Condition, condition: Condition) -> Condition:
    """Return both batched structures as one: the rows of the first, then those of the second."""

    def both(place: str, one: Tensor, other: Tensor) -> Tensor:
        if one.shape[1:] != other.shape[1:] or one.ndim != other.ndim:
            raise ValueError(
                f"{place} of shape {tuple(other.shape)} cannot be joined with {tuple(one.shape)} of the unconditional "
                "branch; pad both to one length, or ask in two calls (joined=False)"
            )
        return torch.cat((one, other)) if one.ndim else one

    return map_tensors(both, null, condition)
