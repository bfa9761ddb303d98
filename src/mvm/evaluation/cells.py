"""The cells of a sweep: combinations of sampler settings, what they are called, and what was measured of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from mvm.settings import OPTIONS, SampleConfig

USUAL: dict[str, tuple[Any, ...]] = {"nfe": (8, 13, 26), "rho": (0.0, 1.0)}  # of an axis that is not given


DIGITS = 8  # of a fingerprint, in names


def combinations(**given: Sequence[Any]) -> list[SampleConfig]:
    """Return the settings of every cell, each once: all combinations of the given options' values that make sense.

    Where nothing guides there is no interval, only sa has values of t_min, and an ODE solver has the cells of rho = 0
    alone, unless there are none. A solver that is named is used as given, the default with a model's tuned times.
    """
    axes = {**dict.fromkeys(OPTIONS, (None,)), **USUAL, **given}
    names = sorted(axes, key=lambda name: (name == "nfe", name == "rho"))  # those vary fastest, the solver slowest
    cells = []
    for values in product(*(axes[name] for name in names)):
        settings = SampleConfig().asked(**dict(zip(names, values, strict=True)))
        if settings.rho and 0 in axes["rho"] and not settings.takes_noise:
            continue
        cells.append(settings.canonical())
    return list(dict.fromkeys(cells))


def file_name(settings: SampleConfig, tuned: bool = False, auto: str = "") -> str:
    """Return the name of a cell's files: adams-nfe26-rho0.75-cfg1.2-0.6-0.8.

    tuned: by times fitted to the model; auto: the fingerprint of the weights that guide by autoguidance.
    """
    cost = "tolerance" if settings.takes_tolerance else "nfe"
    parts, labels = [settings.solver + "-tuned" * tuned], {"t_min": "end", "auto_scale": "auto"}
    for name in ("shift", "t_min", "share", cost, "rho", "cfg", "internal", "auto_scale"):
        value = getattr(settings, name)
        if name in (cost, "rho") or value != getattr(SampleConfig, name):
            parts.append(f"{labels.get(name, name)}{value:g}")
    if auto:
        parts.append(f"by{auto[:DIGITS]}")
    if settings.guided:
        parts.append(f"{settings.low:g}-{settings.high:g}")
    return "-".join(parts)


def auto_name(facts: Mapping[str, Any]) -> str:
    """Return weights that guide by autoguidance as a report calls them: small@5000 [1a2b3c4d]; "" for none."""
    if not facts:
        return ""
    known = f"{facts['run']}@{facts['step']} " if "run" in facts else ""
    return f"{known}[{facts['sha256'][:DIGITS]}]"


# What a report adds to a solver's name, where it is not the default.
_REMARKS = {"shift": "shift {:g}", "tolerance": "tolerance {:g}", "t_min": "t_min {:g}", "share": "{:.0%} shared"}


def solver_name(settings: SampleConfig, tuned: bool = False) -> str:
    """Return the solver as a report calls it: "sa, t_min 0.0001, 50% shared"; tuned: by times fitted to the model."""
    remarks = [
        text.format(value)
        for name, text in _REMARKS.items()
        if (value := getattr(settings, name)) != getattr(SampleConfig, name)
    ]
    return ", ".join([settings.solver, *["tuned"] * tuned, *remarks])


def _read_solver(name: str) -> dict[str, Any]:
    """Return the settings in a solver's name, "tuned" among them."""
    solver, *remarks = name.split(", ")
    settings: dict[str, Any] = {"solver": solver.removesuffix("-tuned"), "tuned": solver.endswith("-tuned")}
    for remark in remarks:
        match remark.split(" "):
            case ["tuned"]:
                settings["tuned"] = True
            case [percent, "shared"]:
                settings["share"] = float(percent.removesuffix("%")) / 100
            case [field, value]:
                settings[field] = float(value)
            case _:
                raise ValueError(f"solver='{name}': '{remark}' is no setting")
    return settings


# Settings in files; others are in the solver's name.
_COLUMNS = ("nfe", "rho", "cfg", "internal", "low", "high", "auto_scale")


@dataclass(frozen=True)
class Result:
    """One cell of a sweep: what was asked, what it cost per image, and what it is worth.

    seconds: of sampling all images.
    metrics: name -> {"value": float, "error": float or None, "note": str, "parts": of the error by blocks of images}.
    grid: a PNG of the first images, relative to the sweep's folder; "" if none.
    tuned: whether the solver's times are those fitted to the model. auto: the weights that guide, see `auto_name`.
    """

    settings: SampleConfig
    evaluations: float
    passes: float
    seconds: float
    metrics: dict[str, dict]
    grid: str = ""
    tuned: bool = False
    auto: str = ""

    @property
    def solver(self) -> str:
        """The solver as a report calls it."""
        return solver_name(self.settings, self.tuned)

    def as_dict(self) -> dict[str, Any]:
        """Return the cell as results.json and results.csv have it: flat."""
        settings = {name: getattr(self.settings, name) for name in _COLUMNS}
        own = {e.name: getattr(self, e.name) for e in fields(self) if e.name not in ("settings", "tuned")}
        return {"solver": self.solver, **settings, **own}

    @classmethod
    def read(cls, flat: Mapping[str, Any]) -> "Result":
        """Return the cell of such a table; older files may lack internal guidance and autoguidance."""
        named = _read_solver(flat["solver"])
        settings = {name: flat[name] for name in _COLUMNS if name in flat}
        own = {name: value for name, value in flat.items() if name not in ("solver", *_COLUMNS)}
        return cls(SampleConfig(**named, **settings), **own, tuned=named["tuned"])
