"""Networks: network(x, level, condition, taps) -> Output. They know nothing of paths or solvers."""

from mvm.network.config import SIZES, ConditionConfig, DDTConfig, DiTConfig
from mvm.network.cost import multiply_adds, parameters
from mvm.network.ddt import DDT, Condition, blocks_of, build_network
from mvm.network.dit import AUGMENT_MAP, DiT, Output
from mvm.network.own import Own, OwnConfig

__all__ = [
    "AUGMENT_MAP",
    "DDT",
    "SIZES",
    "Condition",
    "ConditionConfig",
    "DDTConfig",
    "DiT",
    "DiTConfig",
    "Output",
    "Own",
    "OwnConfig",
    "blocks_of",
    "build_network",
    "multiply_adds",
    "parameters",
]
