"""Tensors that may be spread over processes (FSDP2's DTensor): their parts, and the whole; files read together."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from mvm import checkpoint
from mvm.distributed.processes import Processes


class SharedFile(Mapping[str, Tensor]):
    """The tensors of a .safetensors file, each read by one process and sent to the others, to their devices.

    Each reads about its share of the bytes. All processes must ask for the same tensors in the same order.
    """

    def __init__(self, path: Path, processes: Processes) -> None:
        self.path, self.processes = path, processes
        with checkpoint.whole_file(path):
            self.file = safe_open(path, "pt")
            slices = {name: self.file.get_slice(name) for name in self.file.keys()}  # noqa: SIM118 (no mapping)
            self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            # of single numbers every process reads its own: a message costs more
            self.dtypes = {name: part[:0].dtype for name, part in slices.items() if prod(self.shapes[name]) > 1}
        sizes = [prod(self.shapes[name]) * dtype.itemsize for name, dtype in self.dtypes.items()]
        middles = (stop - size / 2 for stop, size in zip(accumulate(sizes), sizes, strict=True))
        each = sum(sizes) / processes.world
        self.owners = {name: int(middle / each) for name, middle in zip(self.dtypes, middles, strict=True)}

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # a mapping's own would read the tensor

    def _read(self, name: str) -> Tensor:
        with checkpoint.whole_file(self.path):
            return self.file.get_tensor(name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        if self.processes.world == 1 or name not in self.owners:
            return self._read(name)
        owner, device = self.owners[name], self.processes.device
        if owner == self.processes.rank:
            values = self._read(name).to(device)
        else:
            values = torch.empty(self.shapes[name], dtype=self.dtypes[name], device=device)
        return self.processes.share_tensor(values, owner)


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
