"""Solvers of the reverse family: rho = 0 is the probability-flow ODE, rho = 1 the paper's reverse SDE."""

from mvm.solver.adams import PredictorCorrector, adams, default_times, sa
from mvm.solver.adaptive import Adaptive
from mvm.solver.base import Evaluate, NoiseSource, Plan, Solver, State, no_noise, run
from mvm.solver.grid import DEFAULT_T_MIN, Grid, LamGrid, PowerGrid
from mvm.solver.guidance import (
    Auto,
    ClassifierFree,
    Guidance,
    Internal,
    Interval,
    Rules,
    guided,
    guided_evaluations,
    progress,
)
from mvm.solver.onestep import Euler, EulerMaruyama, Heun
from mvm.solver.peers import PEERS, DataMultistep, NoiseMultistep, SigmaGrid, deis, dpm, ipndm, unipc
from mvm.solver.sampling import (
    DEFAULT_NFE,
    MAX_RHO,
    SOLVERS,
    Solution,
    check_request,
    integrate,
    sample,
    solve,
    solver_named,
)
from mvm.solver.table import LamVariable, PowerVariable, Variable

__all__ = [
    "DEFAULT_NFE",
    "DEFAULT_T_MIN",
    "MAX_RHO",
    "PEERS",
    "SOLVERS",
    "Adaptive",
    "Auto",
    "ClassifierFree",
    "DataMultistep",
    "Euler",
    "EulerMaruyama",
    "Evaluate",
    "Grid",
    "Guidance",
    "Heun",
    "Internal",
    "Interval",
    "LamGrid",
    "LamVariable",
    "NoiseMultistep",
    "NoiseSource",
    "Plan",
    "PowerGrid",
    "PowerVariable",
    "PredictorCorrector",
    "Rules",
    "SigmaGrid",
    "Solution",
    "Solver",
    "State",
    "Variable",
    "adams",
    "check_request",
    "default_times",
    "deis",
    "dpm",
    "guided",
    "guided_evaluations",
    "integrate",
    "ipndm",
    "no_noise",
    "progress",
    "run",
    "sa",
    "sample",
    "solve",
    "solver_named",
    "unipc",
]
