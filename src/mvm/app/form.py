"""What a visitor asks for, as it comes from the fields of the page: odd values are refused field by field, in words."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from mvm.generate import Draw
from mvm.noise import MAX_SEED
from mvm.recipes import SampleConfig
from mvm.solver import PEERS, SOLVERS
from mvm.untrusted import cut

ODE, SDE = "ODE", "SDE"
GUIDED = "progress from noise (0) to image (1)"


def shown(value: Any) -> str:
    """Return a value of a field for a message."""
    if value is None or value == "":
        return "empty"
    return f"{value:g}" if isinstance(value, float) else cut(value, 40)


def choice_problem(label: str, value: Any, choices: Iterable[str]) -> str:
    """Return what is wrong with a choice, or ""."""
    choices = list(choices)
    return "" if value in choices else f"{label} is {shown(value)}; it must be one of {', '.join(choices)}"


def label_problem(label: str, value: Any) -> str:
    """Return what is wrong with the number of a class, or ""; which there are is the model's matter."""
    return (
        ""
        if type(value) is int and abs(value) < 1 << 31
        else f"{label} is {shown(value)}; it must be the number of a class"
    )


@dataclass(frozen=True)
class NumberRange:
    """The numbers a field takes, ends included; start: what it holds at first."""

    label: str
    low: float
    high: float
    start: float
    step: float
    meaning: str
    whole: bool = False

    @property
    def words(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}"

    def problem(self, value: Any) -> str:
        """Return what is wrong with a value, or ""."""
        number = isinstance(value, Real) and not isinstance(value, bool)
        if number and self.low <= value <= self.high and (not self.whole or value == int(value)):
            return ""
        return f"{self.label} is {shown(value)}; it must be {self.words}"


RANGES = {
    "images": NumberRange("Pictures", 1, 16, 4, 1, "how many", whole=True),
    "nfe": NumberRange("NFE", 1, 100, 13, 1, "evaluations of the network, each side", whole=True),
    "rho": NumberRange("rho", 0, 2, 1.0, 0.05, "noise of the SDE side; 0: none, 1: the reverse SDE"),
    "cfg": NumberRange("Guidance", 0, 10, 1.0, 0.1, "scale of classifier-free guidance; 1: none"),
    "internal": NumberRange("Internal guidance", 0, 10, 1.0, 0.1, "scale of guidance by the inner head; 1: none"),
    "auto_scale": NumberRange("Autoguidance", 0, 10, 1.0, 0.1, "scale away from the weaker model; 1: none"),
    "low": NumberRange("Guide from", 0, 1, 0.0, 0.05, GUIDED),
    "high": NumberRange("Guide to", 0, 1, 1.0, 0.05, GUIDED),
}


COMPARED = {*PEERS, "adams-power"}  # solvers to compare with, not to choose from


def step_solvers() -> list[str]:
    """Return our solvers with a number of evaluations, whose steps can be shown; published peers are for sweeps."""
    return [name for name, build in SOLVERS.items() if name not in COMPARED and not build().by_tolerance]


def takes_noise(solver: str) -> bool:
    """Return whether a solver solves the SDE too."""
    return SampleConfig(solver).takes_noise


def seed_problem(text: Any, images: int = 1) -> str:
    """Return what is wrong with the text of a seed, or ""."""
    last, text = MAX_SEED - images + 1, str(text).strip()
    if text.isdecimal() and len(text) <= len(str(last)) and int(text) <= last:
        return ""
    return f"Seed is {shown(text)}; it must be a whole number from 0 to {last}"


@dataclass(frozen=True)
class SampleForm:
    """The fields as they are; `problems` must be empty before anything else is asked of it.

    auto: the name of the weaker model of autoguidance, "" for none.
    """

    model: str
    classes: tuple[int, ...] = ()
    images: Any = RANGES["images"].start
    seed: Any = "0"
    solver: str = "adams"
    nfe: Any = RANGES["nfe"].start
    rho: Any = RANGES["rho"].start
    cfg: Any = RANGES["cfg"].start
    internal: Any = RANGES["internal"].start
    auto: str = ""
    auto_scale: Any = RANGES["auto_scale"].start
    low: Any = RANGES["low"].start
    high: Any = RANGES["high"].start
    reference: bool = False

    def problems(self) -> dict[str, str]:
        """Return what is wrong, by field."""
        problems = {name: bounds.problem(getattr(self, name)) for name, bounds in RANGES.items()}
        problems["solver"] = choice_problem("Solver", self.solver, step_solvers())
        if isinstance(self.classes, list | tuple):
            problems["classes"] = next(filter(None, (label_problem("Classes", label) for label in self.classes)), "")
        else:
            problems["classes"] = f"Classes is {shown(self.classes)}; it must be a list, each the number of a class"
        problems["seed"] = seed_problem(self.seed, 1 if problems["images"] else int(self.images))
        if not problems["low"] and not problems["high"] and self.low > self.high:
            problems["high"] = (
                f"Guide to is {self.high:g}, below Guide from ({self.low:g}); it must be {self.low:g} to 1"
            )
        return {name: words for name, words in problems.items() if words}

    @property
    def sides(self) -> tuple[str, ...]:
        """Return what can be made: an ODE solver has no SDE."""
        return (ODE, SDE) if takes_noise(self.solver) else (ODE,)

    def draw(self) -> Draw:
        """Return which pictures."""
        return Draw(int(self.images), int(self.seed), classes=tuple(self.classes))

    def settings(self, side: str) -> SampleConfig:
        """Return the sampler settings of one side; without guidance the interval is left out."""
        rho = 0.0 if side == ODE else float(self.rho)
        scales: dict[str, Any] = {
            "internal": float(self.internal),
            "auto_scale": float(self.auto_scale) if self.auto else 1.0,
        }
        how = SampleConfig(self.solver, int(self.nfe), rho, float(self.cfg), **scales)
        return replace(how, low=float(self.low), high=float(self.high)) if how.guided else how
