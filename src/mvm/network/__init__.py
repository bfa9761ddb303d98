"""Networks: network(x, level, condition, taps) -> Output. They know nothing of paths or solvers."""

from mvm.network.dit import SIZES, DiT, DiTConfig, Output

__all__ = ["SIZES", "DiT", "DiTConfig", "Output"]
