"""A network of the user's: as objectives and models call one, as recipes name one, and what checkpoints hold of it."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mvm.network.dit import Output

OWN, MODULE = "own", "module:"  # network.kind: an object given in Python, or the beginning of a class by name
CLASS = re.compile(r"module:([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def is_own(kind: Any) -> bool:
    """Return whether a network.kind stands for a network of the user's."""
    return isinstance(kind, str) and (kind == OWN or kind.startswith(MODULE))


@dataclass(frozen=True)
class OwnConfig:
    """Network: one of the user's, which a recipe names and never imports by itself."""

    kind: str = OWN
    """module:PACKAGE.MODULE:CLASS, the class (or function) that makes the network; own: an object given in Python."""
    arguments: dict = field(default_factory=dict)
    """Arguments of the class: numbers, text, true or false. Those named sample_shape and num_classes need none."""
    name: str = ""
    """Class of a network given in Python, for the record."""
    time: str = "t"
    """What a network given in Python receives for t: t, level, or function; for the record."""
    null: str = "none"
    """What stands for no condition with a network given in Python: none, value, or function; for the record."""

    # what a DiT has and a network that nobody has looked into has not
    inner_block: ClassVar[int] = 0
    dropout: ClassVar[float] = 0.0
    patch: ClassVar[int] = 1
    size: ClassVar[str] = ""
    dimensions: ClassVar[tuple[int, int, int]] = (0, 0, 0)

    def __post_init__(self) -> None:
        if self.kind != OWN and not CLASS.fullmatch(self.kind):
            raise ValueError(f"network.kind='{self.kind}' names no class; write module:PACKAGE.MODULE:CLASS")
        if self.kind != OWN and (self.name, self.time, self.null) != ("", "t", "none"):
            raise ValueError(
                f"network.name, network.time and network.null are of networks given in Python; give the class of "
                f"network.kind='{self.kind}' attributes null and time"
            )
        if not self.name.isprintable():  # it goes to terminals, which obey escape sequences
            raise ValueError(f"network.name={self.name!r} must be printable text")
        for name, value in self.arguments.items():
            if not isinstance(value, int | float | str):  # bool is an int
                raise ValueError(f"network.arguments.{name}={value!r} must be a number, text, true or false")

    @property
    def described(self) -> str:
        """What it is, in words."""
        return f"a network of class {self.name}" if self.kind == OWN else f"network.kind='{self.kind}'"


def named_network(config: OwnConfig, sample_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Import the class of network.kind and return its network; for a name that the user typed, never one from a file.

    sample_shape and num_classes are given to a class whose signature has them.
    """
    match = CLASS.fullmatch(config.kind)
    if match is None:
        raise ValueError(f"network='{config.kind}' names no class; write module:PACKAGE.MODULE:CLASS")
    if os.getcwd() not in sys.path and "" not in sys.path:  # last: nothing there hides a package
        sys.path.append(os.getcwd())
    try:
        make = getattr(importlib.import_module(match[1]), match[2])
    except (ImportError, AttributeError) as error:
        raise ValueError(f"network.kind='{config.kind}' cannot be imported ({error}); check both names") from error
    try:
        names = inspect.signature(make).parameters
        known = {"sample_shape": tuple(sample_shape), "num_classes": num_classes}
        network = make(**{name: value for name, value in known.items() if name in names} | config.arguments)
    except TypeError as error:
        raise ValueError(f"network.kind='{config.kind}': {error}; see network.arguments") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"network.kind='{config.kind}' makes a {type(network).__name__}; it must make a torch module")
    return network


def adapted(network: nn.Module) -> "Own":
    """Return a network as Own, with the null condition and the time that it has as its attributes, if it has."""
    if isinstance(network, Own):
        return network
    null, time = getattr(network, "null", None), getattr(network, "time", "t")
    return Own(network, null, time if isinstance(time, str) or inspect.isroutine(time) else "t")


def buffers_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a network by name, e.g. the running means of batch norms; each once."""
    stored = network.state_dict(keep_vars=True)
    return {name: value for name, value in network.named_buffers() if name in stored}


@torch.no_grad()
def load_weights(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Set parameters and persistent buffers; others than the network's, or of other shapes, are refused."""
    own = {**dict(network.named_parameters()), **buffers_of(network)}
    mine, theirs = ({name: tuple(value.shape) for name, value in each.items()} for each in (own, weights))
    if wrong := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
        one = wrong[0]
        raise ValueError(
            f"network does not fit {source}: {one.removeprefix('network.')} is {mine.get(one, 'not there')} in the "
            f"network and {theirs.get(one, 'not there')} there ({len(wrong)} differ); give the one it was trained with"
        )
    for name, value in own.items():
        value.copy_(weights[name])


class Own(nn.Module):
    """network(x, time, condition, taps) -> Output, by any callable (x, t, condition) or (x, t).

    The callable returns its prediction, of x's shape; the pair (prediction, inner prediction), where it has an inner
    head; or an object that has the prediction as `sample`, as diffusers' networks do. t is (B,), of x's dtype and
    float32 at least. A condition that is a mapping of the callable's own arguments is given by name, any other as its
    third argument. null, time: see mvm.wrap.
    """

    def __init__(self, network: Callable[..., Any], null: Any = None, time: Any = "t") -> None:
        super().__init__()
        if not callable(network):
            raise ValueError(f"network={network!r} cannot be called; give a torch module or function (x, t, condition)")
        self.network, self.null, self.time = network, null, time
        inner = getattr(network, "_orig_mod", network)  # of torch.compile
        try:
            signature = inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner)
        except (TypeError, ValueError):  # some builtins have none
            self.names, self.takes_condition = (), True
            return
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        positional = sum(kind <= kind.POSITIONAL_OR_KEYWORD for kind in kinds)
        self.names = tuple(signature.parameters)
        self.takes_condition = positional >= 3 or inspect.Parameter.VAR_POSITIONAL in kinds

    def forward(self, x: Tensor, time: Tensor, condition: Any = None, taps: Sequence[int] = ()) -> Output:
        time = time.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(condition, Mapping) and all(name in self.names[2:] for name in condition):
            answer = self.network(x, time, **condition)
        elif self.takes_condition:
            answer = self.network(x, time, condition)
        elif condition is None:
            answer = self.network(x, time)
        else:
            takes = ", ".join(self.names)
            raise ValueError(f"condition is given, and the network takes ({takes}); give it a third argument")
        if isinstance(answer, Output):  # of a network of this package
            answer = (answer.prediction, answer.inner)
        answer = getattr(answer, "sample", answer)
        prediction, inner = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        for value in (prediction,) if inner is None else (prediction, inner):
            if not isinstance(value, Tensor) or value.shape != x.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"the network answers x of shape {tuple(x.shape)} with {shape}; it must be x's shape")
        return Output(prediction, inner, {})

    @property
    def time_words(self) -> str:
        """What it receives for t, for the record: "t", "level" or "function"."""
        return self.time if isinstance(self.time, str) else "function"

    @property
    def null_words(self) -> str:
        """What stands for no condition, for the record: "none", "value" or "function"."""
        return "none" if self.null is None else "function" if callable(self.null) else "value"

    @property
    def blocks(self) -> list[nn.Module]:
        """Its `blocks`, if it has a ModuleList or Sequential of that name: what is compiled and sharded one by one."""
        blocks = getattr(self.network, "blocks", None)
        return list(blocks) if isinstance(blocks, nn.ModuleList | nn.Sequential) else []
