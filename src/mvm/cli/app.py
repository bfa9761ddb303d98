"""The application and the kinds of argument that its commands share."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter, Token

import mvm
from mvm.process import INTERRUPTED as INTERRUPTED

USAGE_ERROR = 2

app = App(
    name="mvm",
    version=mvm.__version__,
    help="Mean Velocity Matching: train, sample and compare generative models that are ODE and SDE at once.",
    help_format="plaintext",
)


def _whole(kind: type, tokens: Sequence[Token]) -> int:
    """Return a whole number; 2.5 is an error, not 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"'{tokens[0].value}' is not a whole number") from None


Whole = Annotated[int, Parameter(converter=_whole)]

# dotted options such as --train.lr, taken off the command line before it is parsed
Overrides = dict[str, str]
Dotted = Annotated[Overrides | None, Parameter(parse=False)]


def say_from_first(text: str, *, error: bool = False) -> None:
    """Print, in the first of several processes alone."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr if error else sys.stdout)


def parse_interval(text: str) -> tuple[float, float]:
    """Return LOW and HIGH of "0.6,0.8"."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--interval {text}: two numbers in [0, 1] are needed, e.g. 0.6,0.8") from None
    return low, high
