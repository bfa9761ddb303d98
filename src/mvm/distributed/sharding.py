"""Tensors that may be spread over processes (FSDP2's DTensor): their parts, and the whole."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(value: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded; every process must ask."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def like_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor placed and sharded as a parameter is, without communication: each process cuts its part."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def joined(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a process's part of a tensor as the sharded tensor it belongs to, shaped as a parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
