"""Networks: network(x, level, condition, taps) -> Output. They know nothing of paths or solvers."""

from mvm.network.cost import multiply_adds, parameters
from mvm.network.dit import SIZES, DiT, DiTConfig, Output

__all__ = ["SIZES", "DiT", "DiTConfig", "Output", "multiply_adds", "parameters"]
