"""diffusers' models and schedulers as fields. Known by name and config: diffusers itself is never imported here."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mvm.bridge.incoming import BridgedField, Network, fits, from_edm, from_flow, from_model
from mvm.options import choose
from mvm.path import Condition, LinearFlow, like
from mvm.path.betas import BetaTable
from mvm.path.condition import map_tensors

# A table of betas; how a scheduler steps through it is no matter of the model.
BETA_SCHEDULERS = (
    "DDPMScheduler", "DDPMParallelScheduler", "DDIMScheduler", "DDIMParallelScheduler", "PNDMScheduler",
    "DEISMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "DPMSolverSDEScheduler",
    "UniPCMultistepScheduler", "SASolverScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler", "LMSDiscreteScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler",
)  # fmt: skip
FLOW_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
EDM_SCHEDULERS = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")

PREDICTIONS = {"epsilon": "eps", "sample": "x0", "v_prediction": "diffusion_v", "flow_prediction": "flow"}
EDM_SIGNS = {"epsilon": 1, "v_prediction": -1}  # of c_out

# Networks that take a timestep in [0, 1] and multiply it by 1000 themselves: their pipelines divide the scheduler's.
UNIT_TIME = (
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "ChromaTransformer2DModel", "LongCatImageTransformer2DModel",
    "OvisImageTransformer2DModel",
)  # fmt: skip
UNIT = 1000

TEXT = "encoder_hidden_states"  # what networks of diffusers call the embedded text
_DENOISERS = ("unet", "transformer")  # names of the network among a pipeline's components


def _family(scheduler: Any, known: Mapping[str, Any]) -> Any:
    """Return what is known of the scheduler's class, or of one it descends from; an unknown one is named."""
    for kind in type(scheduler).__mro__:
        if kind.__name__ in known:
            return known[kind.__name__]
    raise ValueError(f"scheduler={type(scheduler).__name__} is not one this bridge knows; it knows: {', '.join(known)}")


def beta_table(scheduler: Any) -> BetaTable:
    """Return the path of a scheduler with a table of betas, its own numbers.

    With rescale_betas_zero_snr the network was trained up to pure noise; schedulers that divide by alpha write 2^-24
    in place of that 0, which is more than the step before has.
    """
    _family(scheduler, dict.fromkeys(BETA_SCHEDULERS))
    if scheduler.config.get("use_flow_sigmas", False):
        raise ValueError("use_flow_sigmas=True: the scheduler runs on the straight path, not on its betas; use as_flow")
    table = scheduler.alphas_cumprod.double().tolist()
    return BetaTable((*table[:-1], 0.0) if scheduler.config.get("rescale_betas_zero_snr", False) else tuple(table))


def _unpacked(pipe_or_model: Any, scheduler: Any) -> tuple[nn.Module, Any]:
    """Return network and scheduler; a pipeline brings its own."""
    if isinstance(pipe_or_model, nn.Module):
        if scheduler is None:
            raise ValueError("scheduler=None: a network alone does not say its path; pass the scheduler it belongs to")
        return pipe_or_model, scheduler
    parts = getattr(pipe_or_model, "components", None)
    if not isinstance(parts, Mapping):
        raise ValueError(f"{type(pipe_or_model).__name__} is neither a network nor a pipeline of diffusers")
    networks = [parts[name] for name in _DENOISERS if isinstance(parts.get(name), nn.Module)]
    if len(networks) != 1:
        raise ValueError(f"{type(pipe_or_model).__name__} has no single unet or transformer; pass the network itself")
    return networks[0], scheduler if scheduler is not None else parts["scheduler"]


def _network(model: Any, arguments: Mapping[str, Any], num_classes: int, rounded: bool) -> Network:
    """Return (x, timestep, condition) -> prediction, all in the model's dtype; learned variances are left out.

    The third argument is class labels or, where there are no classes, the text: encoder_hidden_states. rounded: the
    network gets the nearest whole timestep.
    """
    parameters = inspect.signature(model.forward).parameters
    unit = UNIT if any(kind.__name__ in UNIT_TIME for kind in type(model).__mro__) else 1

    def cast(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(model.dtype) if tensor.is_floating_point() else tensor

    def predict(x: Tensor, timestep: Tensor, /, *condition: Condition, **named: Any) -> Tensor:
        if condition and condition[0] is None:
            raise ValueError("condition=None: this model has classes and no null label; pass condition or null_label")
        if condition:
            named["class_labels" if num_classes else TEXT] = condition[0]
        named = map_tensors(cast, {**arguments, **named})
        fits(model, x, timestep=timestep, **named)
        if TEXT in parameters and TEXT not in named and not num_classes:  # optional in a signature, needed all the same
            raise ValueError(
                f"condition: {type(model).__name__} needs {TEXT}; name it in condition={{...}} of mvm.sample and, for "
                "the unconditional branch of guidance, in null_arguments={...}"
            )
        timestep = timestep.round() if rounded else timestep
        out = model(x.to(model.dtype), timestep=(timestep / unit).float(), **named).sample
        learned_variance = out.shape[1] == 2 * x.shape[1]
        return (out[:, : x.shape[1]] if learned_variance else out).to(x.dtype)

    return predict


def _by_log_sigma(scheduler: Any) -> bool:
    """Return whether an EulerDiscreteScheduler gives its network log(sigma)/4: EDM's network with sigma_data = 1."""
    return scheduler.config.get("timestep_type", "discrete") == "continuous"


def _from_preconditioned(network: Network, config: Any, sigma_data: float, **options: Any) -> BridgedField:
    """Return the field of EDM's D(x; sigma) = c_skip x + c_out F(c_in x; log(sigma)/4)."""
    sign = choose("prediction_type", config.prediction_type, EDM_SIGNS)

    def denoise(x: Tensor, sigma: Tensor, /, *condition: Condition, **named: Any) -> Tensor:
        square = sigma**2 + sigma_data**2
        c_skip, c_out, c_in = sigma_data**2 / square, sign * sigma * sigma_data / square**0.5, square**-0.5
        answer = network(x * like(c_in, x), torch.log(sigma) / 4, *condition, **named)
        return like(c_skip, x) * x + like(c_out, x) * answer

    return from_edm(denoise, sigma_min=config.sigma_min, sigma_max=config.sigma_max, **options)


def _from_beta_scheduler(network: Network, scheduler: Any, **options: Any) -> BridgedField:
    config = scheduler.config
    kind = choose("prediction_type", config.prediction_type, PREDICTIONS)
    if config.get("use_flow_sigmas", False):
        return from_model(network, LinearFlow(), kind, timestep=lambda t: t * config.num_train_timesteps, **options)
    if _by_log_sigma(scheduler):
        if config.prediction_type != "v_prediction" or not (config.sigma_min and config.sigma_max):
            raise ValueError("timestep_type='continuous' needs prediction_type='v_prediction', sigma_min and sigma_max")
        return _from_preconditioned(network, config, 1.0, **options)
    if kind == "flow":
        raise ValueError("prediction_type='flow_prediction' is of the straight path; set use_flow_sigmas=True with it")
    return from_model(network, beta_table(scheduler), kind, **options)


def _from_flow_scheduler(network: Network, scheduler: Any, **options: Any) -> BridgedField:
    data_at = int(scheduler.config.get("invert_sigmas", False))
    return from_flow(network, data_at=data_at, time_scale=scheduler.config.num_train_timesteps, **options)


def _from_edm_scheduler(network: Network, scheduler: Any, **options: Any) -> BridgedField:
    return _from_preconditioned(network, scheduler.config, scheduler.config.sigma_data, **options)


SCHEDULERS: dict[str, Callable[..., BridgedField]] = {
    **dict.fromkeys(BETA_SCHEDULERS, _from_beta_scheduler),
    **dict.fromkeys(FLOW_SCHEDULERS, _from_flow_scheduler),
    **dict.fromkeys(EDM_SCHEDULERS, _from_edm_scheduler),
}


def from_diffusers(
    pipe_or_model: Any,
    scheduler: Any = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    null_label: int | None = None,
    null_arguments: Condition = None,
    joined: bool = False,
    round_timesteps: bool = False,
    path: str = "mvm",
) -> BridgedField:
    """Return a Field by a diffusers pipeline, or by its network and the scheduler it was trained with (put in eval).

    condition of `mvm.sample`: class labels; or keyword arguments of the network, as a mapping; or one tensor, its
    encoder_hidden_states. null_arguments: the same for the unconditional branch of guidance; a row of one sample is
    for all. joined: as of `from_model`. arguments: more keywords for every call as they are, those without a row per
    sample among them; a condition's go before. num_classes, null_label: by default from the network's config (DiT's
    null label is the one behind its classes). round_timesteps: give the network the nearest whole training step.
    path: as of `from_model`. The scheduler's grid, clipping and thresholding are its sampler's and play no part.
    """
    model, scheduler = _unpacked(pipe_or_model, scheduler)
    build = _family(scheduler, SCHEDULERS)
    config: Any = getattr(model, "config", None)
    if not isinstance(config, Mapping):
        raise ValueError(f"{type(model).__name__} is no network of diffusers (it has no config); use from_model")
    if round_timesteps and (build is _from_edm_scheduler or _by_log_sigma(scheduler)):
        raise ValueError("round_timesteps=True: this scheduler gives its network log(sigma)/4; leave it False")
    if config.get("norm_type") == "ada_norm_zero":  # DiT's null label stands behind its classes
        known = null = int(config["num_embeds_ada_norm"])
    else:
        known, null = int(config.get("num_class_embeds") or 0), None
    num_classes = known if num_classes is None else num_classes
    if null_label is None and null_arguments is None:
        null_label = null
    options = {"null_label": null_label, "null_arguments": null_arguments, "joined": joined, "path": path}
    network = _network(model.eval(), dict(arguments or {}), num_classes, round_timesteps)
    return build(network, scheduler, num_classes=num_classes, **options)
