"""How long, how fast and with which optimizer: the `train` section of a recipe."""

from dataclasses import dataclass

import torch
from torch import nn

from mvm.options import at_least, between, choose


@dataclass(frozen=True)
class TrainConfig:
    """AdamW; the rate warms up linearly over `warmup` steps, then is constant or falls linearly to final * lr."""

    steps: int = 1000
    batch: int = 256  # global, whatever the number of processes
    lr: float = 1e-4
    warmup: int = 0
    decay: str = "constant"
    final: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # of the gradient norm; 0 switches clipping off
    ema: float = 0.9999
    log_every: int = 50
    save_every: int = 1000
    keep: int = 2  # checkpoints kept

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"train.lr={self.lr} is out of range; it must be positive and finite")
        for option in ("steps", "batch", "log_every", "save_every", "keep"):
            at_least(f"train.{option}", getattr(self, option), 1)
        for option in ("weight_decay", "warmup", "clip"):
            at_least(f"train.{option}", getattr(self, option), 0)
        for option in ("beta1", "beta2", "ema"):
            between(f"train.{option}", getattr(self, option), 0, 0.9999999)
        between("train.final", self.final, 0, 1)
        choose("train.decay", self.decay, dict.fromkeys(("constant", "linear")))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of step `step` (0-based): a pure function, so resume needs no state."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.decay == "constant":
        return config.lr
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (1 + (config.final - 1) * min(1.0, share))


def adamw(config: TrainConfig, network: nn.Module) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
