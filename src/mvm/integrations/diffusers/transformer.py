"""MVMTransformer2DModel: a network of mvm as a model of diffusers."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin  # diffusers looks for it here when it loads a pipeline
from diffusers.utils import BaseOutput
from torch import Tensor

from mvm.model import Model, build
from mvm.network import AUGMENT_MAP, DiTConfig, build_network
from mvm.network.fast import cpu
from mvm.options import choose
from mvm.path import as_time, schedule_named
from mvm.path.field import network_time
from mvm.published import is_published, locate, open_published, shipped_models
from mvm.published.diffusers import transformer_options
from mvm.recipes.reading import NETWORKS, from_dict

# options of from_pretrained: those that the hub's library takes, and those without effect on one safetensors file
HUB, IDLE = ("cache_dir", "force_download", "local_files_only", "token"), ("low_cpu_mem_usage", "use_safetensors")


def published_model(
    name: str | os.PathLike[str], options: Mapping[str, Any], taken: Collection[str] = ()
) -> Model | None:
    """Return the model of a folder, shipped name or hub id in the layout of `mvm export`; None: not in that layout.

    options: of from_pretrained; one that has no meaning here, and is not in `taken`, is refused.
    """
    name, revision = os.fspath(name), options.get("revision")
    here = Path(name).is_dir()
    if here and not is_published(Path(name)) and name not in shipped_models():
        return None
    asked = {option: options[option] for option in HUB if options.get(option) is not None}
    folder, root = locate(name if here or revision is None else f"{name}@{revision}", **asked)
    if not is_published(folder):
        return None
    known = {*HUB, *IDLE, *taken, "revision", "dtype", "torch_dtype"}
    for option, value in options.items():
        if option not in known and value is not None:
            raise ValueError(
                f"{option}={value!r}: '{name}' has the layout of mvm export, which is read without it; leave it out, "
                "and move or change the loaded model"
            )
    return build(open_published(folder, root))


def asked_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that from_pretrained was asked for; default: float32."""
    dtype = options.get("dtype") or options.get("torch_dtype") or torch.float32
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} must be a torch.dtype, e.g. torch.bfloat16")
    return dtype


@dataclass
class MVMTransformer2DOutput(BaseOutput):
    """sample: the prediction; inner: the inner head's, where the network has one."""

    sample: Tensor
    inner: Tensor | None = None


class MVMTransformer2DModel(ModelMixin, ConfigMixin):
    """A network with the schedule and the kind it was trained for.

    network_options: as in a recipe's [network]. conditional: whether it ever saw a label; null: the null class. T: the
    mean-velocity path's.
    """

    @register_to_config
    def __init__(
        self,
        network_options: dict[str, Any],
        sample_shape: Sequence[int],
        num_classes: int,
        prediction_type: str = "u",
        schedule: str = "mean-velocity",
        conditional: bool = True,
        null: bool = True,
        T: float = 1.0,
    ) -> None:
        super().__init__()
        self.schedule = schedule_named(schedule, T)
        kind = choose("network.kind", network_options.get("kind", DiTConfig.kind), NETWORKS)
        shape = from_dict(kind, network_options, "network.")
        assert isinstance(shape, DiTConfig)
        self.network = build_network(shape, tuple(sample_shape), num_classes)
        cpu.apply(self.network)

    @classmethod
    def from_mvm(cls, model: Model) -> "MVMTransformer2DModel":
        """Return the network of a model, its weights copied."""
        transformer = cls(**transformer_options(model.recipe, model.num_classes))
        weights = model.network.state_dict()
        transformer.network.load_state_dict({name: value for name, value in weights.items() if name != AUGMENT_MAP})
        return transformer.to(model.device).eval().requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, **kwargs: Any
    ) -> "MVMTransformer2DModel":
        """Return the network of a folder or hub id: diffusers' own layout, or mvm's with subfolder="transformer"."""
        model = None
        if pretrained_model_name_or_path is not None and kwargs.get("subfolder") == "transformer":
            rest = {name: value for name, value in kwargs.items() if name != "subfolder"}
            model = published_model(pretrained_model_name_or_path, rest)
        if model is None:
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        transformer = cls.from_mvm(model)
        transformer.network.to(asked_dtype(kwargs))
        return transformer

    def forward(
        self,
        hidden_states: Tensor,
        timestep: float | Tensor,
        class_labels: Tensor | None = None,
        return_dict: bool = True,
    ) -> MVMTransformer2DOutput | tuple[Tensor]:
        """Return the prediction at times of the schedule, one for all or one per sample; no labels: the null class."""
        batch = hidden_states.shape[0]
        time = network_time(self.network.time, as_time(timestep), self.schedule).to(hidden_states.device).expand(batch)
        if class_labels is None or not self.config["conditional"]:
            if not self.config["null"]:
                raise ValueError("class_labels=None is the null class, which this network never saw; give labels")
            class_labels = torch.full((batch,), self.network.null, dtype=torch.int64, device=hidden_states.device)
        output = self.network(hidden_states.to(self.dtype), time, class_labels)
        return MVMTransformer2DOutput(output.prediction, output.inner) if return_dict else (output.prediction,)


@dataclass(frozen=True)
class PredictionField:
    """The transformer as a field of predictions: guidance is affine, so it may act on these as on x0_hat."""

    transformer: MVMTransformer2DModel

    def __call__(self, x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
        return self.transformer(x, t, condition).sample.to(x.dtype)

    def pair(self, x: Tensor, t: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the (outer, inner) predictions."""
        output = self.transformer(x, t, condition)
        if output.inner is None:
            raise ValueError("this network has no inner head for internal guidance")
        return output.sample.to(x.dtype), output.inner.to(x.dtype)
