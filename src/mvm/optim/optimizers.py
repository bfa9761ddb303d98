"""How long, how fast and with which optimizer: the `train` section of a recipe."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mvm.optim.power_ema import exponent
from mvm.options import between, check

# How far the learning rate has gone from lr to final * lr, for the share in [0, 1] of the decay steps that is done.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 0.0,
    "linear": lambda share: share,
    "cosine": lambda share: (1 - math.cos(math.pi * share)) / 2,
    "trapezoid": lambda share: share,  # as linear, but the fall begins late
    "piecewise": lambda share: share,  # as linear, between two steps
}
FIXED = ("constant", "piecewise")  # the decays that do not depend on the number of steps
OPTIMIZERS = ("adamw", "muon")
LARGEST_DECAY = 0.9999999
MATCH = 0.2  # root mean square of an AdamW step, in learning rates: the published match


@dataclass(frozen=True)
class TrainConfig:
    """Length of training, optimizer, learning rate schedule, weight averages and checkpoints.

    The learning rate warms up linearly over `warmup` steps, then goes from lr to final * lr as `decay` says.
    """

    steps: int = 1000
    """Training steps (optimizer updates)."""
    batch: int = 256
    """Images per step, over all processes and parts of gradient accumulation together (global batch size)."""
    optimizer: str = "adamw"
    """Optimizer; muon updates the matrices of the blocks by Muon and all other weights by AdamW, at one learning rate.
    One of: adamw, muon."""
    lr: float = 1e-4
    """Learning rate: the peak, after warm-up and before decay."""
    warmup: int = 0
    """Steps over which the learning rate rises linearly to train.lr (warm-up); 0: none."""
    decay: str = "constant"
    """Learning rate schedule after the warm-up; trapezoid is constant, then linear over train.cooldown; piecewise is
    linear from train.decay_start to train.decay_end. One of: constant, linear, cosine, trapezoid, piecewise."""
    final: float = 0.1
    """Learning rate at the end of the decay, as a fraction of train.lr; unused by train.decay constant."""
    cooldown: float = 0.2
    """Fraction of all steps over which the learning rate falls, at the end; for train.decay trapezoid."""
    decay_start: int = 0
    """Step (0-based) up to which the learning rate stays train.lr; for train.decay piecewise."""
    decay_end: int = 0
    """Step from which the learning rate stays train.final * train.lr; for train.decay piecewise."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors such as biases have none."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient (first moment)."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient (second moment)."""
    clip: float = 1.0
    """Largest norm of the gradient, beyond which it is scaled down (gradient clipping); 0: no clipping."""
    ema: tuple[float, ...] = (0.9999,)
    """Decays per step of exponential moving averages of the weights; the first is the one sampled from.
    0 is the weights themselves."""
    power: tuple[float, ...] = ()
    """Relative widths (sigma_rel, as in EDM2) of power-function averages of the weights; empty: none."""
    snapshot_every: int = 0
    """Steps between stored power-function averages, from which `mvm ema` makes other widths afterwards; 0: none."""
    log_every: int = 50
    """Steps between entries of the log (metrics.jsonl)."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """How many of the newest checkpoints are kept."""
    keep_best: bool = False
    """Also keep the checkpoint with the best preview; preview.every must divide train.save_every."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"train.lr={self.lr} is out of range; it must be positive and finite")
        if not 0 < self.cooldown <= 1:
            raise ValueError(f"train.cooldown={self.cooldown} is out of range; it must lie in (0, 1]")
        check("train", self, steps=1, batch=1, log_every=1, save_every=1, keep=1, decay=DECAYS, optimizer=OPTIMIZERS)
        check("train", self, weight_decay=0, warmup=0, clip=0, snapshot_every=0, final=(0, 1))
        check("train", self, decay_start=0, decay_end=0)
        if self.decay == "piecewise" and not self.warmup <= self.decay_start < self.decay_end:
            raise ValueError(
                f"train.decay='piecewise' needs train.warmup={self.warmup} <= train.decay_start={self.decay_start} < "
                f"train.decay_end={self.decay_end}; give the steps between which the learning rate falls"
            )
        check("train", self, beta1=(0, LARGEST_DECAY), beta2=(0, LARGEST_DECAY))
        for decay in self.ema:
            between("train.ema", decay, 0, LARGEST_DECAY)
        for width in self.power:
            exponent(width)
        for option in ("ema", "power"):
            values = getattr(self, option)
            if len({f"{value:g}" for value in values}) < len(values):  # names in a checkpoint have six digits
                raise ValueError(f"train.{option}={values} holds one value twice; give each once")
        if not self.ema:
            raise ValueError("train.ema is empty; give at least one decay (0 is the weights themselves)")
        if self.snapshot_every and not self.power:
            raise ValueError(f"train.snapshot_every={self.snapshot_every} stores train.power averages; give widths")


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of step `step` (0-based): a pure function, so resume needs no state."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    begin, end = config.warmup, config.steps
    if config.decay == "trapezoid":
        begin = max(begin, config.steps - round(config.cooldown * config.steps))
    if config.decay == "piecewise":
        begin, end = config.decay_start, config.decay_end
    share = max(0, step - begin) / max(1, end - begin)
    return config.lr * (1 + (config.final - 1) * DECAYS[config.decay](min(1.0, share)))


def product_dtype(device: torch.device) -> torch.dtype:
    """Return what the products are computed in: bf16, as published; on a CPU float32.

    On a CPU without instructions for bf16 a whole step took about 20 times as long with it (benchmarks/LOG.md).
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonal(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return matrices (k, m, n) with their singular values brought near 1 by Newton-Schulz steps."""
    a, b, c = coefficients
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).to(product_dtype(stack.device))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Muon):
    """torch.optim.Muon, its formulas and its state, for all matrices of one shape at a time.

    torch's own steps them one by one: thousands of small kernels a step.

    found_inf: None, or a number on the device: where it is not 0, weights and momentum stay as they are, as AdamW's do.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                    alike[p.shape, p.dtype].append(p)
            for matrices in alike.values():
                self._move(matrices, group)

    def _move(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Step matrices of one shape."""
        rate, momentum = float(group["lr"]), group["momentum"]
        buffers = [self.state[p]["momentum_buffer"] for p in matrices]
        gradient = torch.stack([p.grad for p in matrices if p.grad is not None])  # (k, m, n)
        before = torch.stack(buffers)
        average = before.lerp(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        update = orthogonal(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        weights = torch.stack(matrices)
        length = rate * MATCH * math.sqrt(max(update.shape[-2:]))
        moved = (weights * (1 - rate * group["weight_decay"])).add_(update, alpha=-length)
        if self.found_inf is not None:
            bad = self.found_inf != 0
            moved, average = torch.where(bad, weights, moved), torch.where(bad, before, average)
        torch._foreach_copy_(matrices, list(moved.unbind()))
        torch._foreach_copy_(buffers, list(average.unbind()))


def optimizers(config: TrainConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Return [AdamW], or [Muon, AdamW], over the named parameters that are trained, at one learning rate.

    Muon takes the matrices of blocks, no vectors, embeddings or heads: first and last layers do better with AdamW,
    which is fused: that kernel alone of torch's skips a step on the device where `found_inf` is 1; our Muon does too.
    """
    hidden, others = [], []
    for name, p in parameters:
        inside = not {"blocks", "skips"}.isdisjoint(name.split("."))  # a wrapper may have put its own name in front
        if p.requires_grad:
            (hidden if config.optimizer == "muon" and inside and p.ndim == 2 else others).append(p)
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    if config.optimizer == "adamw":
        return [adamw]
    if not hidden:
        raise ValueError("train.optimizer='muon' needs matrices inside blocks, and this network has none; use adamw")
    # steps about as long as AdamW's (0.2 lr a value), so that one learning rate serves both
    how: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    return [Muon(hidden, lr=config.lr, weight_decay=config.weight_decay, **how), adamw]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def step_unless(optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
    """Step, or leave weights and state as they are where `bad` (a bool on the device) is true; nobody waits for it."""
    optimizer.found_inf = bad.float()  # ty: ignore[missing-attribute]  # what torch's own GradScaler sets
    optimizer.step()
