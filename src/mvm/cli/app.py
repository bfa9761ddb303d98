"""The application and the kinds of argument that its commands share."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter, Token

import mvm

USAGE_ERROR = 2
INTERRUPTED = 130

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
