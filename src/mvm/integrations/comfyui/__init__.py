"""mvm in ComfyUI: a SAMPLER node and a SIGMAS node for SamplerCustom and SamplerCustomAdvanced.

Install: a file in ComfyUI's custom_nodes that says `from mvm.integrations.comfyui import *`. ComfyUI itself is imported
only when a node runs.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mvm.bridge.k_diffusion import multistep_solvers, mvm_sigmas, sample_mvm
from mvm.noise import MAX_SEED, derive
from mvm.solver import DEFAULT_NFE, MAX_RHO

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "MVMSampler", "MVMSigmas"]

_NOISE = {"default": 0.0, "min": 0.0, "max": MAX_RHO, "step": 0.05, "tooltip": "0: the ODE; 1: the paper's SDE"}
_HOW: dict[str, Any] = {"rho": ("FLOAT", _NOISE), "solver": (multistep_solvers(),)}


def _comfy(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"comfy.{name}")
    except ImportError as error:
        raise ImportError(f"comfy.{name} cannot be imported: the nodes of mvm run in ComfyUI's own process") from error


def _path(model_sampling: Any) -> str:
    """Return the path of a model: rectified flows are CONST, all others x0 + sigma eps."""
    return "flow" if isinstance(model_sampling, _comfy("model_sampling").CONST) else "ve"


def sample_by_seed(
    model: Any, x: Tensor, sigmas: Tensor, extra_args: Mapping[str, Any] | None = None, *args: Any, **options: Any
) -> Tensor:
    """Return `sample_mvm`'s state; the noise of an image comes from ComfyUI's seed and its place in the batch alone."""
    seed = (extra_args or {}).get("seed")
    places = torch.arange(len(x), device=x.device)
    seeds = None if seed is None else derive(seed & MAX_SEED, places)
    path = _path(model.inner_model.inner_model.model_sampling)
    return sample_mvm(model, x, sigmas, extra_args, *args, seeds=seeds, path=path, **options)


class MVMSampler:
    """A SAMPLER: MVM's ODE or SDE through any sigmas."""

    RETURN_TYPES = ("SAMPLER",)
    FUNCTION = "build"
    CATEGORY = "sampling/custom_sampling/samplers"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs, as ComfyUI asks for them."""
        return {"required": _HOW}

    def build(self, rho: float, solver: str) -> tuple[Any]:
        """Return the sampler."""
        return (_comfy("samplers").KSAMPLER(sample_by_seed, {"rho": rho, "solver": solver}),)


class MVMSigmas:
    """SIGMAS: the solver's own grid, from the noisiest level that the model knows to the cleanest, then 0."""

    RETURN_TYPES = ("SIGMAS",)
    FUNCTION = "build"
    CATEGORY = "sampling/custom_sampling/schedulers"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs, as ComfyUI asks for them."""
        count = {"default": DEFAULT_NFE, "min": 1, "max": 10_000, "tooltip": "evaluations of the model"}
        latent = {"tooltip": "what is sampled: its size fits the grid of adams; without it, the grid of large images"}
        return {
            "required": {"model": ("MODEL",), "nfe": ("INT", count), **_HOW},
            "optional": {"latent_image": ("LATENT", latent)},
        }

    def build(
        self, model: Any, nfe: int, rho: float, solver: str, latent_image: Mapping[str, Any] | None = None
    ) -> tuple[Tensor]:
        """Return the sigmas, float32 as ComfyUI's own."""
        knows = model.get_model_object("model_sampling")
        ends = float(knows.sigma_min), float(knows.sigma_max)
        size = 0 if latent_image is None else latent_image["samples"][0].numel()
        return (mvm_sigmas(nfe, *ends, path=_path(knows), solver=solver, rho=rho, size=size).float(),)


NODE_CLASS_MAPPINGS: dict[str, type] = {"MVMSampler": MVMSampler, "MVMSigmas": MVMSigmas}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {"MVMSampler": "MVM Sampler", "MVMSigmas": "MVM Sigmas"}
