"""Checks of options and arguments: every error names the option, the value and the remedy."""

import difflib
import logging
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

DISTRIBUTION = "mean-velocity-matching"  # the name to install by; "mvm" on the package index is another project


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def needs(what: str, package: str, extra: str = "") -> str:
    """Return the message that `what` needs a package, and how to install it: by our extra, else by its own name."""
    return f"{what} needs {package}; install it with: {install(extra) if extra else f'pip install {package}'}"


def closest(name: str, choices: Iterable[str]) -> list[str]:
    """Return the choice that is spelt most alike, in a list; empty when none is close."""
    return difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)


def quiet_torchao() -> None:
    """Keep torchao from listing missing GPU libraries; diffusers and transformers import it where it is installed."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the hint " (did you mean 'x'?)", or "" when nothing is close."""
    close = closest(name, choices)
    return f" (did you mean '{close[0]}'?)" if close else ""


def choose(option: str, name: str, choices: Mapping[str, T]) -> T:
    """Return choices[name]; an unknown name is a ValueError with the nearest valid one."""
    if name not in choices:
        raise ValueError(f"{option}='{name}' is unknown{nearest(name, choices)}; allowed: {', '.join(choices)}")
    return choices[name]


def at_least(option: str, value: float, low: float) -> None:
    """Raise unless value >= low (NaN fails too)."""
    if not value >= low:
        raise ValueError(f"{option}={value} is out of range; it must be at least {low}")


def finite(option: str, value: float) -> None:
    """Raise where value is no finite number."""
    if not math.isfinite(value):
        raise ValueError(f"{option}={value} must be a finite number")


def between(option: str, value: float, low: float, high: float) -> None:
    """Raise unless low <= value <= high (NaN fails too)."""
    if not low <= value <= high:
        raise ValueError(f"{option}={value} is out of range; it must lie in [{low}, {high}]")
