"""Work on a GPU recorded once and replayed: the thousands of launches of a sampling loop become one.

    replays = Replays()
    images = replays(key, function, labels, seeds)  # same key: same function, same shapes

The first call with a key is plain (compilers and libraries settle then), the second records, later ones replay. Where
there is no GPU every call is plain: what is computed is the same in all three.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

KEPT = 4  # recordings at a time; each holds the memory of its whole loop

Work = Callable[..., Tensor]
Record = Callable[[Work, tuple[Tensor, ...]], Work]


class Recording:
    """A function as a CUDA graph, with tensors of its own to read from and to write to.

    The function must be a stream of launches alone: it may look at no value on the device.
    """

    def __init__(self, function: Work, examples: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(example.clone() for example in examples)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.output.clone()  # the next replay writes over it


def _shapes(inputs: tuple[Tensor, ...]) -> Hashable:
    return tuple((tuple(value.shape), value.dtype, value.device) for value in inputs)


def surroundings(module: nn.Module, device: torch.device) -> Hashable:
    """Return what a recording depends on besides its inputs: where the weights are, and the arithmetic around it."""
    arithmetic = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    weights = tuple(value.data_ptr() for value in module.parameters())
    return weights, arithmetic, torch.get_float32_matmul_precision()


class Replays:
    """Recordings by key, the last few used; `record` makes one."""

    def __init__(self, record: Record = Recording) -> None:
        self.record = record
        self.seen: OrderedDict[Hashable, Work | None] = OrderedDict()  # None: called once, not recorded yet
        self.failed = False

    def __call__(self, key: Hashable, function: Work, *inputs: Tensor) -> Tensor:
        """Return function(*inputs)."""
        known = (key, _shapes(inputs))
        if self.failed or not self.possible(inputs):
            return function(*inputs)
        if known not in self.seen:
            self._keep(known, None)
            return function(*inputs)
        recorded = self.seen[known]
        if recorded is None:
            recorded = self._recorded(function, inputs)
        self._keep(known, recorded)
        return recorded(*inputs)

    def possible(self, inputs: tuple[Tensor, ...]) -> bool:
        """Return whether these can be recorded: all on a GPU, unless another way of recording was given."""
        return self.record is not Recording or all(value.is_cuda for value in inputs)

    def _keep(self, known: Hashable, value: Work | None) -> None:
        self.seen[known] = value
        self.seen.move_to_end(known)
        while len(self.seen) > KEPT:
            self.seen.popitem(last=False)

    def _recorded(self, function: Work, inputs: tuple[Tensor, ...]) -> Work:
        try:
            return self.record(function, inputs)
        except RuntimeError as error:
            self.failed = True  # of this model, for good: what could not be recorded once will not be later
            warnings.warn(
                f"the sampling loop could not be recorded ({str(error).splitlines()[0]}); it runs step by step",
                stacklevel=4,
            )
            return function


def arriving(images: Tensor) -> Callable[[], Tensor]:
    """Return a wait for these on the host: their copy is under way, behind it the device is free for other work."""
    if not images.is_cuda:
        return lambda: images
    host: Any = torch.empty(images.shape, dtype=images.dtype, pin_memory=True)
    host.copy_(images, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait
