"""The loss: regression of the scaled mean velocity u (paper section 3.2) or of another kind, weighted by t or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mvm import noise
from mvm.network import Output
from mvm.objective.repa import RepaConfig, alignment, match_grid, spatial_norm
from mvm.objective.weights import WEIGHTS
from mvm.options import between, check
from mvm.path import KINDS, MEAN_VELOCITY, Condition, Noised, Null, Schedule, TimeLaw, like, noised, perturb
from mvm.path.condition import batched, dropped, null_of, require_finite, require_fit, rows
from mvm.path.field import network_time
from mvm.wrapped import NetworkField, wrap


class Network(Protocol):
    """What an objective asks of a network: time and null are what it receives for t, and for no condition."""

    time: Any
    null: Any

    def __call__(
        self, x: Tensor, time: Tensor, condition: Condition, taps: Sequence[int] = (), **inputs: Tensor
    ) -> Output: ...


class Batch(NamedTuple):
    """Encoded samples (B, ...), their condition (labels, or any structure), one seed each for everything random.

    features (B, M, z): tokens of a frozen encoder (the teacher) on its own grid; None: no alignment.
    augment (B, 8): the parameters of mvm.data.augmentation for each image; None: there is no augmentation.
    """

    x0: Tensor
    condition: Condition
    seeds: Tensor
    features: Tensor | None = None
    augment: Tensor | None = None

    def cut(self, part: slice) -> "Batch":
        """Return some of the samples."""
        return Batch._make(rows(value, part) for value in self)


class Loss(NamedTuple):
    """total: what is minimised; parts: named values for the log."""

    total: Tensor
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class ObjectiveConfig:
    """Training objective: what the network predicts, and how its error is weighted over timesteps.

    The weight changes which errors count, not the optimum.
    """

    kind: str = "u"
    """What the network predicts: scaled mean velocity (u), mean velocity (v), image (x0), noise (eps), diffusion's v,
    flow matching's velocity (flow), or the score. One of: u, v, x0, eps, diffusion_v, flow, score."""
    label_drop: float = 0.1
    """Label dropout for classifier-free guidance: fraction of samples trained with the null class. 1: unconditional
    model. 0: no null class, and no guidance."""
    inner_weight: float = 0.5
    """Weight of the inner head's loss, where the network has one (network.inner_block)."""
    weight: str = "none"
    """Loss weighting over timesteps: none is the plain squared error of the prediction; the others weight it as noise
    prediction, maximum likelihood or flow matching do. One of: none, noise, likelihood, flow."""

    @property
    def conditional(self) -> bool:
        """Whether the network ever saw a label."""
        return self.label_drop < 1

    @property
    def has_null(self) -> bool:
        """Whether the network ever saw the null class."""
        return self.label_drop > 0

    def require_guidance(self, option: str, scale: float) -> None:
        """Refuse classifier-free guidance of a network that has never seen what it goes between."""
        if scale == 1 or (self.conditional and self.has_null):
            return
        missing = "null class to guide from" if self.conditional else "classes to guide to"
        raise ValueError(f"{option}={scale}: objective.label_drop={self.label_drop:g} trains no {missing}; use cfg 1")

    def __post_init__(self) -> None:
        check("objective", self, kind=KINDS, weight=WEIGHTS, label_drop=(0, 1), inner_weight=(0, 100))


def _square_error(prediction: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    square = (prediction.to(target.dtype) - target) ** 2
    return torch.mean(square if weight is None else like(weight, target) * square)


@dataclass(frozen=True)
class Matching:
    """objective(network, batch) -> Loss: mean squared error, and what the network's other heads learn.

    repa takes part where a projector is given and the batch has a teacher's features; `block` is the block aligned.
    dropout: whether the network has any, and needs the seeds from which it draws.
    """

    config: ObjectiveConfig
    schedule: Schedule
    law: TimeLaw
    repa: RepaConfig = field(default_factory=RepaConfig)
    block: int = 0
    dropout: bool = False

    def __post_init__(self) -> None:
        self.law.require(self.schedule)
        if self.config.weight == "likelihood" and self.law.name == "uniform" and not self.law.t_min:
            raise ValueError(
                "objective.weight='likelihood' goes as 1/t, whose mean is infinite over path.law.name='uniform' from "
                f"path.law.t_min={self.law.t_min}; use a t_min above 0, e.g. 1e-5"
            )

    def __call__(self, network: Network, batch: Batch, projector: Callable[[Tensor], Tensor] | None = None) -> Loss:
        states = perturb(batch.x0, batch.seeds, self.schedule, self.law, self.config.kind)
        return self.loss(network, batch, states, None, projector)

    def drop(self, batch: Batch, null: Null, drawn: Tensor | None = None) -> Condition:
        """Return the condition with the null one in a share of the rows: where drawn (B,), by default a function of
        each sample's seed, is below label_drop."""
        if batch.condition is None or not self.config.has_null:
            return batch.condition
        drawn = noise.uniform(batch.seeds, noise.LABEL, (1,))[:, 0] if drawn is None else drawn
        return dropped(batch.condition, null_of(null, batch.condition, batch.x0), drawn < self.config.label_drop)

    def loss(
        self,
        network: Network,
        batch: Batch,
        noised: Noised,
        drawn: Tensor | None = None,
        projector: Callable[[Tensor], Tensor] | None = None,
    ) -> Loss:
        """Return the loss of noised samples; drawn: see `drop`."""
        features = None if projector is None else batch.features
        time = network_time(network.time, noised.t, self.schedule)
        condition = self.drop(batch, network.null, drawn)
        # inputs that a network has in training alone
        inputs = {"augment": batch.augment, "seeds": batch.seeds if self.dropout else None}
        given = {name: value for name, value in inputs.items() if value is not None}
        output = network(noised.x, time, condition, () if features is None else (self.block,), **given)
        weigh = WEIGHTS[self.config.weight]
        weight = None if weigh is None else weigh(self.config.kind, noised.t, self.schedule)
        total = _square_error(output.prediction, noised.target, weight)
        parts = {"loss": total.detach()}
        if output.inner is not None:
            inner = _square_error(output.inner, noised.target, weight)
            total, parts["inner"] = total + self.config.inner_weight * inner, inner.detach()
        if projector is not None and features is not None:
            tokens = output.features[self.block]
            target = spatial_norm(match_grid(features.float(), round(tokens.shape[1] ** 0.5)), self.repa.normalise)
            repa = alignment(projector(tokens), target, self.repa.loss)
            total, parts["repa"] = total + self.repa.weight * repa, repa.detach()
        return Loss(total, parts)


def loss(
    network: Callable[..., Any],
    x0: Tensor,
    condition: Condition = None,
    *,
    path: Schedule | str | None = None,
    kind: str | None = None,
    null: Null = None,
    drop: float = 0.0,
    timesteps: TimeLaw | str = "uniform",
    weight: str = "none",
    generator: torch.Generator | None = None,
    seeds: Sequence[int] | Tensor | None = None,
    step: int | None = None,
) -> Tensor:
    """Return the training loss of any network(x, t, condition) on clean samples x0 (B, ...): a scalar.

        mvm.loss(network, x0, labels).backward()

    network: see `mvm.wrap`, which also says what path, kind and null are; or what that returns, with its own.
    condition: a tensor (B, ...), or mappings, lists and tuples of them, e.g. {"text": (B, N, d), "mask": (B, N)}; None:
    the null condition.
    drop: the share of samples that are given the null condition, for classifier-free guidance. timesteps: their
    distribution, a TimeLaw or its name. weight: over timesteps, a name in mvm.objective.weights.WEIGHTS. Times and
    noise are new at every call, by torch's generator or the one given; or a function of (seeds, step), one seed for
    each sample.
    """
    if not isinstance(x0, Tensor) or not x0.is_floating_point() or x0.ndim < 2 or not x0.numel():
        shape = f"{x0.dtype} of shape {tuple(x0.shape)}" if isinstance(x0, Tensor) else type(x0).__name__
        raise ValueError(f"x0 is {shape}; give floating-point samples (B, ...)")
    law = TimeLaw(timesteps) if isinstance(timesteps, str) else timesteps
    if not isinstance(network, NetworkField):
        network = wrap(network, kind=kind or "u", path=path or MEAN_VELOCITY, null=null)
    elif not (path is None and kind is None and null is None):
        raise ValueError("path, kind and null are those of mvm.wrap's call; leave them out here")
    looks = not x0.is_cuda  # on a GPU a look at values would wait for all that was launched
    if looks:
        require_finite(x0, "x0")
    if condition is not None:
        condition, null = batched(condition, x0), network.network.null
        if looks:
            require_finite(condition)
        if not (null is None or callable(null)):
            require_fit(condition, null_of(null, condition, x0))
    between("drop", drop, 0, 1)
    if drop and (condition is None or network.network.null is None):
        missing = "condition is None" if condition is None else "null is None"
        raise ValueError(f"drop={drop}: {missing}, and drop puts the null condition in its place; give both")
    if condition is None:  # as fields do
        condition = null_of(network.network.null, None, x0)
    schedule = network.schedule
    objective = Matching(ObjectiveConfig(network.kind, label_drop=drop, weight=weight), schedule, law)
    if (seeds is None) != (step is None):
        raise ValueError("seeds and step go together: by seeds alone every step would have the same times and noise")
    if seeds is not None and step is not None:
        own = noise.derive(step, noise.as_seeds(seeds, len(x0), x0.device))
        return objective(network.network, Batch(x0, condition, own)).total
    device = x0.device if generator is None else generator.device
    share, drawn = torch.rand(2, len(x0), dtype=torch.float64, device=device, generator=generator).to(x0.device)
    eps = torch.randn(x0.shape, dtype=x0.dtype, device=device, generator=generator).to(x0.device)
    states = noised(x0, eps, law.quantile(share, schedule), schedule, network.kind)
    # `share` stands for seeds: all that they would decide is drawn here
    return objective.loss(network.network, Batch(x0, condition, share), states, drawn).total
