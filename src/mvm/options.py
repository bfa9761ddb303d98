"""Checks on what users hand in: every error names the option, the value and the remedy. And what options mean."""

import ast
import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DISTRIBUTION = "mean-velocity-matching"  # the name to install by; "mvm" on the package index is another project

# of sampling; here, as the command has them in its options before it imports torch
DEFAULT_NFE = 26
DEFAULT_T_MIN = 1e-3  # the last time a LamGrid evaluates
MOST_NFE = 20_000  # their plan takes two seconds; 1,000 is the most that anything published takes
MOST_SCALE = 1000.0  # of guidance, either way: published ones are below 20
MOST_SHIFT = 1e6  # published ones are below 20
MOST_IMAGES = 10_000_000  # in one call: figures take 50,000; their seeds and labels alone take gigabytes beyond
MAX_RHO = 5.0  # beyond it the noise of a step drowns the state, and tables overflow


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def needs(what: str, package: str, extra: str = "") -> str:
    """Return the message that `what` needs a package, and how to install it: by our extra, else by its own name."""
    return f"{what} needs {package}; install it with: {install(extra) if extra else f'pip install {package}'}"


def closest(name: str, choices: Iterable[str]) -> list[str]:
    """Return the choice that is spelt most alike, in a list; empty when none is close."""
    import difflib

    return difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)


def quiet_torchao() -> None:
    """Keep torchao from listing missing GPU libraries; diffusers and transformers import it where it is installed."""
    import logging

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the hint " (did you mean 'x'?)", or "" when nothing is close."""
    close = closest(name, choices)
    return f" (did you mean '{close[0]}'?)" if close else ""


def choose(option: str, name: str, choices: Mapping[str, T]) -> T:
    """Return choices[name]; an unknown name is a ValueError with the nearest valid one."""
    if name not in choices:
        likely = nearest(name, choices) if isinstance(name, str) else ""
        raise ValueError(f"{option}='{name}' is unknown{likely}; allowed: {', '.join(choices)}")
    return choices[name]


def at_least(option: str, value: float, low: float) -> None:
    """Raise unless value >= low (NaN fails too)."""
    if not value >= low:
        raise ValueError(f"{option}={value} is out of range; it must be at least {low}")


def between(option: str, value: float, low: float, high: float) -> None:
    """Raise unless low <= value <= high (NaN fails too)."""
    if not low <= value <= high:
        raise ValueError(f"{option}={value} is out of range; it must lie in [{low}, {high}]")


def check(table: str, config: object, **rules: float | tuple[float, float] | Iterable[str]) -> None:
    """Raise unless the options of a table obey their rules: one of some names, (low, high), or a lower bound."""
    for name, rule in rules.items():
        option, value = f"{table}.{name}", getattr(config, name)
        match rule:
            case int() | float():
                at_least(option, value, rule)
            case (int() | float() as low, int() | float() as high):
                between(option, value, low, high)
            case names:
                choose(option, value, dict.fromkeys(names))


@cache
def meanings(table: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, its bases' included, on one line."""
    docs: dict[str, str] = {}
    for owner in reversed(table.__mro__[:-1]):  # all but object
        module = ast.parse(Path(inspect.getfile(owner)).read_text(encoding="utf-8"))  # a tenth of inspect.getsource
        written = next(n for n in ast.walk(module) if isinstance(n, ast.ClassDef) and n.name == owner.__name__)
        for entry, below in pairwise(ast.iter_child_nodes(written)):
            match entry, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    docs[name] = " ".join(words.split())
    return docs
