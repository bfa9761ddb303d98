"""MVMTransformer2DModel: a network of mvm as a model of diffusers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin  # diffusers looks for it here when it loads a pipeline
from diffusers.utils import BaseOutput
from torch import Tensor

from mvm.model import Model
from mvm.network import AUGMENT_MAP, DiTConfig, build_network
from mvm.options import choose
from mvm.path import as_time, schedule_named
from mvm.recipes.reading import VARIANTS, from_dict


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
        kind = choose("network.kind", network_options.get("kind", DiTConfig.kind), VARIANTS[DiTConfig])
        shape = from_dict(kind, network_options, "network.")
        assert isinstance(shape, DiTConfig)
        self.network = build_network(shape, tuple(sample_shape), num_classes)

    @classmethod
    def from_mvm(cls, model: Model) -> "MVMTransformer2DModel":
        """Return the network of a model, its weights copied."""
        recipe = model.recipe
        made = cls(
            asdict(recipe.network),
            list(model.sample_shape),
            model.num_classes,
            prediction_type=recipe.objective.kind,
            schedule=recipe.path.schedule,
            conditional=recipe.objective.conditional,
            null=recipe.objective.has_null,
            T=recipe.path.T,
        )
        weights = model.network.state_dict()
        made.network.load_state_dict({name: value for name, value in weights.items() if name != AUGMENT_MAP})
        return made.to(model.device).eval().requires_grad_(False)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: float | Tensor,
        class_labels: Tensor | None = None,
        return_dict: bool = True,
    ) -> MVMTransformer2DOutput | tuple[Tensor]:
        """Return the prediction at times of the schedule, one for all or one per sample; no labels: the null class."""
        batch = hidden_states.shape[0]
        level = self.schedule.level(as_time(timestep)).to(hidden_states.device).expand(batch)
        if class_labels is None or not self.config["conditional"]:
            if not self.config["null"]:
                raise ValueError("class_labels=None is the null class, which this network never saw; give labels")
            class_labels = torch.full((batch,), self.network.null, dtype=torch.int64, device=hidden_states.device)
        output = self.network(hidden_states.to(self.dtype), level, class_labels)
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
