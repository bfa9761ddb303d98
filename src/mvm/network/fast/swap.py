"""Modules swapped for faster ones in place: by their class, so that weights, hooks and the state dict stay.

A class of this package goes by its name into copies and pickles, as any other.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Swaps = Mapping[type[nn.Module], type[nn.Module]]


def plain_class(module: nn.Module) -> type:
    """Return the class that a module has without this package."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(__package__ or "mvm"))


def swap(network: nn.Module, swaps: Swaps, **settings: Any) -> None:
    """Give each module the class that `swaps` has for its plain one, and these settings as its attributes."""
    for module in network.modules():
        faster = swaps.get(plain_class(module))
        if faster is not None:
            module.__class__ = faster
            vars(module).update(settings)


def plain(network: nn.Module) -> None:
    """Undo every swap: the network is again what it was built as."""
    for module in network.modules():
        kind, now = plain_class(module), type(module)
        for setting in getattr(now, "SETTINGS", ()):
            vars(module).pop(setting, None)
        if now is not kind:
            module.__class__ = kind


@contextmanager
def swapped(network: nn.Module, swaps: Swaps) -> Generator[None]:
    """Swap for a while; every module leaves with the class it came with.

    All threads see the swap. Where it changes nothing, because it was applied before, threads may share the network.
    """
    before = [(module, type(module)) for module in network.modules()]
    swap(network, swaps)
    try:
        yield
    finally:
        for module, kind in before:
            if type(module) is not kind:
                module.__class__ = kind
