"""GPU kernels by hand, where the compiler's own make several passes over the tokens: a file each.

layers.py has the twins that run everywhere else and say what is computed; tests/network/test_kernels.py compares them
in Triton's interpreter where Triton is installed, benchmarks/device_parity.py on a GPU. Imported on a GPU alone.
"""

import torch

from mvm.network.kernels.attention import attend, fits
from mvm.network.kernels.residual import add_modulate, norm_modulate
from mvm.network.kernels.rotary import norm_rotate
from mvm.network.kernels.swiglu import gated

__all__ = ["add_modulate", "attend", "attend_op", "fits", "gated", "norm_modulate", "norm_rotate"]

attend_op = torch.ops.mvm.attend.default  # as the compiler knows it
