"""Moving averages of the weights, several at once: what is sampled from."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mvm.distributed.sharding import joined, like_parameter, local, whole
from mvm.optim import power_ema

MAIN = "ema"  # the average that is sampled from unless another is asked for


def decay_at(decay: float, step: int) -> float:
    """Return min(decay, (1 + step)/(10 + step)): early weights are forgotten quickly."""
    return min(decay, (1 + step) / (10 + step))


def power_name(sigma_rel: float) -> str:
    """Return the name of a power-function average."""
    return f"power-{sigma_rel:g}"


def profiles(decays: Sequence[float], powers: Sequence[float]) -> dict[str, Callable[[int], float]]:
    """Return name -> decay of step: "ema" for the first decay, "ema-D" for others, "power-S" for relative widths."""
    named: dict[str, Callable[[int], float]] = {}
    for decay in decays:
        named[f"{MAIN}-{decay:g}" if named else MAIN] = lambda step, decay=decay: decay_at(decay, step)
    for width in powers:
        gamma = power_ema.exponent(width)
        named[power_name(width)] = lambda step, gamma=gamma: power_ema.decay_at(gamma, step)
    return named


def copy_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the network's weights by name, detached and copied (this process's part of them)."""
    return {name: local(value.detach()).clone() for name, value in network.named_parameters()}


class Averages:
    """average += (1 - decay) (weights - average) for every profile, after every step."""

    def __init__(self, network: nn.Module, decays: Sequence[float], powers: Sequence[float] = ()) -> None:
        self.network = network
        self.profiles = profiles(decays, powers)
        self.tensors = {name: copy_weights(network) for name in self.profiles}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step` (0-based)."""
        weights = [local(value.detach()) for value in self.network.parameters()]
        for name, decay in self.profiles.items():
            torch._foreach_lerp_(list(self.tensors[name].values()), weights, 1 - decay(step))

    def parts(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield one average tensor by tensor, sharded as the weights are."""
        parameters = dict(self.network.named_parameters())
        for key, value in self.tensors[name].items():
            yield key, joined(value, parameters[key])

    def whole(self, name: str) -> dict[str, Tensor]:
        """Return one average, gathered where it is sharded; every process must ask."""
        return {key: whole(value) for key, value in self.parts(name)}

    @torch.no_grad()
    def restore(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set one average from whole tensors."""
        for key, parameter in self.network.named_parameters():
            self.tensors[name][key].copy_(local(like_parameter(weights[key], parameter)))

    @contextmanager
    def swapped_in(self, name: str = MAIN) -> Generator[None]:
        """Inside, the network has the averaged weights."""
        own = copy_weights(self.network)
        _copy(self.tensors[name].values(), self.network)
        try:
            yield
        finally:
            _copy(own.values(), self.network)


@torch.no_grad()
def _copy(values: Iterable[Tensor], network: nn.Module) -> None:
    for value, parameter in zip(values, network.parameters(), strict=True):
        local(parameter.detach()).copy_(value)
