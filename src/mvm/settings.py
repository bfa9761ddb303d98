"""How a model is sampled: one table of settings for recipes, commands, sweeps and the page.

The command reads names, types, defaults and docs of it before it imports torch: solvers are imported by what builds
them.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from mvm.options import DEFAULT_NFE, DEFAULT_T_MIN, MAX_RHO, MOST_NFE, MOST_SCALE, between, choose

if TYPE_CHECKING:
    from mvm.path import Field
    from mvm.solver import Guidance, Solver


@dataclass(frozen=True)
class SampleConfig:
    """Defaults of sampling, for previews and `mvm sample`."""

    solver: str = "adams"
    """Solver of the reverse process. One of: adams, adams-power, sa, heun, euler, euler-maruyama, adaptive, dopri5,
    dpm++2m, dpm++3m, unipc, deis, ipndm, sde-dpm++2m, sde-dpm++3m, sa-official, er-sde, seeds2, seeds3, edm-churn."""
    nfe: int = DEFAULT_NFE
    """Number of function evaluations (NFE): how often the solver evaluates the network per image (sampling steps)."""
    rho: float = 0.0
    """Noise of the reverse process: 0 is the probability-flow ODE, 1 the reverse SDE; the paper's SDE has 0.75."""
    cfg: float = 1.0
    """Classifier-free guidance scale; 1: no guidance."""
    low: float = 0.0
    """Start of the guidance interval, in log-SNR progress from 0 (noise) to 1 (image)."""
    high: float = 1.0
    """End of the guidance interval, in log-SNR progress from 0 (noise) to 1 (image)."""
    tolerance: float = 1e-5
    """Error tolerance per step of the adaptive solvers (adaptive, dopri5), which take it instead of NFE."""
    internal: float = 1.0
    """Scale of internal guidance, by the network's inner head (network.inner_block); 1: no guidance."""
    auto_scale: float = 1.0
    """Autoguidance scale, away from the weaker model that --auto names; 1: no guidance. In a recipe it must be 1."""
    share: float = 0.0
    """Fraction of the evaluations that reuse the backbone output of an earlier one, at steps chosen by similarity; for
    network.kind ddt. 0: none."""
    t_min: float = DEFAULT_T_MIN
    """Last time at which the solver sa evaluates the network; for sa alone."""
    tuned: bool = True
    """Use the time steps of adams that `mvm tune` fitted to the model, if it has some for this NFE and guidance. A
    solver that a command names keeps its own time steps."""
    shift: float = 0.0
    """Timestep shift: factor of sigma/alpha at the solver's times except the first and the last; above 1 puts more
    steps at high noise, as in SD3 and RAE. 0: the model's own (path.law.shift_dimension). 1: none."""

    def __post_init__(self) -> None:
        from mvm.solver import SOLVERS, Interval
        from mvm.solver.base import require_shift

        if not 0 <= self.share < 1:
            raise ValueError(f"share={self.share} is out of range; it must be at least 0 and less than 1")
        if self.share and self.takes_tolerance:
            raise ValueError(f"share={self.share} needs a fixed number of evaluations; '{self.solver}' is adaptive")
        choose("solver", self.solver, SOLVERS)
        between("nfe", self.nfe, 1, MOST_NFE)
        between("rho", self.rho, 0, MAX_RHO)
        for name in ("cfg", "internal", "auto_scale"):
            between(name, getattr(self, name), -MOST_SCALE, MOST_SCALE)
        require_shift(self.shift)
        Interval(self.low, self.high)
        self.build_solver()

    def build_solver(self) -> "Solver":
        """Return the solver; without a shift of its own it takes the field's."""
        from mvm.solver import Adaptive, LamGrid, PredictorCorrector, solver_named

        match solver := replace(solver_named(self.solver), shift=self.shift):
            case Adaptive():
                return replace(solver, rtol=self.tolerance, atol=self.tolerance)
            case PredictorCorrector(grid=LamGrid() as grid):
                return replace(solver, grid=replace(grid, t_min=self.t_min))
        return solver

    def guidance(self, weak: "Field | None" = None) -> "tuple[Guidance, ...]":
        """Return the rules of guidance, none at scale 1; innermost the inner head's, outermost that by a weaker field.

        So the weaker field, itself unguided, takes one pass, whatever guides the other.
        """
        from mvm.solver import Auto, ClassifierFree, Guidance, Internal, Interval

        interval, rules = Interval(self.low, self.high), list[Guidance]()
        if self.internal != 1:
            rules.append(Internal(self.internal, interval=interval))
        if self.cfg != 1:
            rules.append(ClassifierFree(self.cfg, interval=interval))
        if self.auto_scale != 1:
            if weak is None:
                raise ValueError(
                    f"auto_scale={self.auto_scale} needs a weaker model of the same data; name it: --auto RUN, or "
                    "auto= in Python"
                )
            rules.append(Auto(self.auto_scale, weak=weak, interval=interval))
        return tuple(rules)

    def asked(self, **given: Any) -> "SampleConfig":
        """Return the settings with the options that a call gives, not None; a solver that it names is used as given."""
        given = {name: value for name, value in given.items() if value is not None}
        if "interval" in given:
            given["low"], given["high"] = given.pop("interval")
        for name in given:
            choose("option", name, dict.fromkeys(field.name for field in fields(self)))
        return replace(self, **({"tuned": False} if "solver" in given else {}), **given)

    def canonical(self) -> "SampleConfig":
        """Return the settings with the defaults of what has no effect on them."""
        unused = [name for option, needed in NEEDS.items() if not getattr(self, needed) for name in OPTIONS[option]]
        return replace(self, **{name: getattr(SampleConfig, name) for name in unused})

    @property
    def unnamed(self) -> bool:
        """Whether the solver is the default that nobody asked for: its times may be those fitted to a model."""
        return self.tuned and self.solver == SampleConfig.solver and not self.shift

    @property
    def takes_tolerance(self) -> bool:
        """Whether the solver goes by tolerance and reports its nfe, instead of being given one."""
        return self.build_solver().by_tolerance

    @property
    def takes_nfe(self) -> bool:
        """Whether the solver is given its number of evaluations."""
        return not self.takes_tolerance

    @property
    def takes_noise(self) -> bool:
        """Whether the solver solves the SDE too."""
        return self.build_solver().weak_order > 0

    @property
    def takes_t_min(self) -> bool:
        """Whether the solver's last time can be chosen."""
        from mvm.solver import LamGrid

        return isinstance(getattr(self.build_solver(), "grid", None), LamGrid)

    @property
    def guided(self) -> bool:
        """Whether anything guides, so that the interval has a meaning."""
        return self.cfg != 1 or self.internal != 1 or self.auto_scale != 1


# The options of a command and the fields they set: the interval is one option, `tuned` is none.
OPTIONS: dict[str, tuple[str, ...]] = {
    entry.name: (entry.name,) for entry in fields(SampleConfig) if entry.name not in ("low", "high", "tuned")
} | {"interval": ("low", "high")}
# What must hold of settings for an option to have an effect; others always have one.
NEEDS = {
    "interval": "guided", "nfe": "takes_nfe", "tolerance": "takes_tolerance", "t_min": "takes_t_min",
    "shift": "takes_nfe",
}  # fmt: skip
