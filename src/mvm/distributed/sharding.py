"""Tensors that may be spread over processes (FSDP2's DTensor): parts, the whole, shared files and shared work."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from mvm import checkpoint
from mvm.distributed.processes import Processes
from mvm.store import balanced

Shape = tuple[int, ...]


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
            self.dtypes = {name: part[:0].dtype for name, part in slices.items() if math.prod(self.shapes[name]) > 1}
        sizes = [math.prod(self.shapes[name]) * dtype.itemsize for name, dtype in self.dtypes.items()]
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


def by_owners(
    compute: Callable[[dict[int, Tensor]], dict[int, Tensor]],
    parts: Sequence[Tensor],
    like: Sequence[Tensor],
    work: Sequence[float],
    copies: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Return this process's parts of what `compute` makes of whole tensors, each computed by one process alone.

    compute: from whole tensors by number to results of the same shapes and dtype. parts: this process's parts of the
    tensors, in the dtype that is sent; like: tensors placed and sharded (by rows) as they are; work: of each. copies:
    the processes that hold the same, where tensors are not sharded. All processes must ask, and get the same numbers.
    """
    shards = None
    if isinstance(like[0], DTensor):
        mesh, copies = like[0].device_mesh, None
        for axis, placement in enumerate(like[0].placements):
            if placement.is_shard(0):
                shards = mesh.get_group(axis)
            else:  # hybrid: copies, each with shards of its own
                assert placement.is_replicate()
                copies = mesh.get_group(axis)
    size, shard = (1, 0) if shards is None else (dist.get_world_size(shards), dist.get_rank(shards))
    count, copy = (1, 0) if copies is None else (dist.get_world_size(copies), dist.get_rank(copies))
    owned: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(count)]  # numbers, by copy and shard
    for number, place in enumerate(balanced(work, count * size)):
        owned[place // size][place % size].append(number)
    near, mine, empty = owned[copy], owned[copy][shard], parts[0].new_empty(0)
    rows = [_rows(len(each), size) for each in like]

    def shapes(numbers: list[int], shard: int) -> list[Shape]:
        return [(rows[number][shard], *like[number].shape[1:]) for number in numbers]

    if size == 1:
        results = compute({number: parts[number] for number in mine})
    else:
        sent = [[parts[number] for number in numbers] for numbers in near]
        pieces = _exchanged(sent, [shapes(mine, source) for source in range(size)], empty, shards)
        made = compute({number: torch.cat(each) for number, *each in zip(mine, *pieces, strict=True)})
        cut = [made[number].split(rows[number]) for number in mine]
        sent = [[each[target] for each in cut] for target in range(size)]
        pieces = _exchanged(sent, [shapes(numbers, shard) for numbers in near], empty, shards)
        results = dict(zip(chain(*near), chain(*pieces), strict=True))
    for source in range(count) if count > 1 else ():
        numbers = [*chain(*owned[source])]
        expected = shapes(numbers, shard)
        if source == copy:
            flat = _flat([results[number] for number in numbers], empty)
        else:
            flat = empty.new_empty(sum(map(math.prod, expected)))
        if len(flat):
            dist.broadcast(flat, group=copies, group_src=source)
        results |= zip(numbers, _shaped(flat, expected), strict=True)
    return [results[number] for number in range(len(parts))]


def _rows(rows: int, size: int) -> list[int]:
    """Return how many rows each shard has, as DTensor cuts them: the last ones may have fewer, or none."""
    each = math.ceil(rows / size)
    return [min(each, max(0, rows - shard * each)) for shard in range(size)]


def _flat(tensors: Iterable[Tensor], empty: Tensor) -> Tensor:
    return torch.cat([empty, *(each.reshape(-1) for each in tensors)])


def _shaped(flat: Tensor, shapes: list[Shape]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([*map(math.prod, shapes)]), shapes, strict=True)]


def _exchanged(
    sent: list[list[Tensor]], shapes: list[list[Shape]], empty: Tensor, group: dist.ProcessGroup | None
) -> list[list[Tensor]]:
    """Send each process of a group its tensors; return those, of these shapes, that each of them sent here."""
    going = [sum(each.numel() for each in tensors) for tensors in sent]
    coming = [sum(map(math.prod, each)) for each in shapes]
    received = empty.new_empty(sum(coming))
    dist.all_to_all_single(received, _flat(chain(*sent), empty), coming, going, group=group)
    return [_shaped(part, each) for part, each in zip(received.split(coming), shapes, strict=True)]
