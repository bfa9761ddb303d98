"""Models of other Gaussian paths as fields of MVM's samplers, and MVM's models for other samplers.

Incoming: `from_diffusers`, `from_flow`, `from_edm`, `from_model`. Outgoing: `as_eps`, `as_v`, `as_flow`, `as_denoiser`.
`sample_mvm` and `mvm_sigmas` are MVM's sampler as k-diffusion calls one.
"""

from mvm.bridge.diffusers import SCHEDULERS, beta_table, from_diffusers
from mvm.bridge.incoming import PATHS, BridgedField, VarianceExploding, from_edm, from_flow, from_model
from mvm.bridge.k_diffusion import mvm_sigmas, sample_mvm
from mvm.bridge.outgoing import as_denoiser, as_eps, as_flow, as_v
from mvm.path.betas import BetaTable

__all__ = [
    "PATHS", "SCHEDULERS", "BetaTable", "BridgedField", "VarianceExploding",
    "as_denoiser", "as_eps", "as_flow", "as_v", "beta_table",
    "from_diffusers", "from_edm", "from_flow", "from_model", "mvm_sigmas", "sample_mvm",
]  # fmt: skip
