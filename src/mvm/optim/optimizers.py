"""How long, how fast and with which optimizer: the `train` section of a recipe."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvm.distributed.processes import Processes
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
PARTS = {"qkv": 3, "gate_up": 2}  # layers, by name, whose matrix is several of one shape, below each other
NS_STEPS = 5  # of Newton-Schulz
MATCH = 0.2  # root mean square of an AdamW step, in learning rates: the published match


@dataclass(frozen=True)
class TrainConfig:
    """Length of training, optimizer, learning rate schedule, weight averages and checkpoints.

    The learning rate warms up linearly over `warmup` steps, then goes from lr to final * lr as `decay` says.
    """

    steps: int = 1000
    """Training steps (optimizer updates)."""
    batch: int = 256
    """Global batch size: images per step, over all processes and parts of gradient accumulation."""
    optimizer: str = "adamw"
    """Optimizer; muon updates the matrices of the blocks by Muon and all other weights by AdamW, at one learning rate.
    One of: adamw, muon."""
    muon_split: bool = False
    """For muon: update queries, keys and values (layers named qkv), and gate and up (gate_up), as separate matrices;
    false: each layer as one matrix."""
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
    """Gradient clipping: largest norm of the gradient, above which it is scaled down; 0: no clipping."""
    ema: tuple[float, ...] = (0.9999,)
    """Decays per step of exponential moving averages (EMA) of the weights; the first is used for sampling. 0 is the
    weights themselves."""
    power: tuple[float, ...] = ()
    """Relative widths (sigma_rel, as in EDM2) of power-function averages of the weights; empty: none."""
    snapshot_every: int = 0
    """Steps between stored power-function averages, from which `mvm ema` makes other widths afterwards; 0: none."""
    log_every: int = 50
    """Steps between entries of the log (metrics.jsonl)."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Number of the newest checkpoints to keep."""
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
    x = stack.mT if tall else stack
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_parts(config: TrainConfig, name: str, parameter: Tensor) -> int:
    """Return for how many matrices Muon takes a parameter; 0: AdamW has it."""
    words = name.split(".")  # a wrapper may have put its own name in front
    if config.optimizer != "muon" or {"blocks", "skips"}.isdisjoint(words) or parameter.ndim != 2:
        return 0
    parts = PARTS.get(words[-2:][0], 1) if config.muon_split else 1
    if len(parameter) % parts:
        raise ValueError(
            f"train.muon_split=True cuts {name} of {len(parameter)} rows into {parts} equal parts; name that layer "
            "otherwise, or leave train.muon_split false"
        )
    return parts


def newton_schulz_flops(shape: Sequence[int], parts: int = 1, steps: int = NS_STEPS) -> int:
    """Return the FLOP of `orthogonal` on the parts of a matrix: three products a step, two of them of Gram matrices."""
    short, long = sorted((shape[0] // parts, shape[1]))
    return parts * steps * (4 * short**2 * long + 2 * short**3)


class Muon(torch.optim.Muon):
    """torch.optim.Muon, its formulas and its state, for all matrices of one shape at a time, by one process each.

    torch's own steps them one by one: thousands of small kernels a step; and it takes shards for whole matrices.

    found_inf: None, or a number on the device: where it is not 0, weights and momentum stay as they are, as AdamW's do.
    copies: whether all processes hold the same weights and gradients (DDP); sharded ones (FSDP2) know theirs. A group's
    `parts`: its matrices are so many, below each other, that are orthogonalised apart.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Any, *, copies: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self.copies = copies

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Move every matrix that has a gradient."""
        from mvm.distributed.sharding import by_owners  # not above: half a second, and recipes read this file

        alike: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    alike[number, p.shape, p.dtype].append(p)
        stacks = [(self.param_groups[number], matrices) for (number, *_), matrices in alike.items()]
        if not stacks:
            return
        directions = [each for group, matrices in stacks for each in self._directions(matrices, group).unbind()]
        matrices, parts = zip(*((p, group.get("parts", 1)) for group, alike in stacks for p in alike), strict=True)
        work = [newton_schulz_flops(*each) for each in zip((p.shape for p in matrices), parts, strict=True)]
        copies = dist.group.WORLD if self.copies else None  # asked for each time: who holds a group may outlive it
        updates = iter(by_owners(lambda whole: self._orthogonal(whole, parts), directions, matrices, work, copies))
        for group, matrices in stacks:
            self._move(matrices, torch.stack([next(updates) for _ in matrices]), group)

    def _directions(self, matrices: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Take in the gradients of matrices of one shape; return what is to be orthogonal, (k, rows held here, n)."""
        momentum = group["momentum"]
        gradient = torch.stack(_held([p.grad for p in matrices if p.grad is not None]))
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = _held([self.state[p]["momentum_buffer"] for p in matrices])
        before = torch.stack(buffers)
        average = before.lerp(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        torch._foreach_copy_(buffers, list(self._unless_bad(average, before).unbind()))
        return direction.to(product_dtype(direction.device))

    def _orthogonal(self, whole: dict[int, Tensor], parts: Sequence[int]) -> dict[int, Tensor]:
        """Return matrices, or each of their parts, made orthogonal; those of one shape at a time."""
        how = (self.defaults["ns_coefficients"], self.defaults["ns_steps"], self.defaults["eps"])
        cut = {number: matrix.chunk(parts[number]) for number, matrix in whole.items()}
        alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for part in chain(*cut.values()):
            alike[part.shape].append(part)
        made = {shape: iter(orthogonal(torch.stack(each), *how)) for shape, each in alike.items()}
        return {number: torch.cat([next(made[part.shape]) for part in each]) for number, each in cut.items()}

    def _move(self, matrices: list[Tensor], update: Tensor, group: dict[str, Any]) -> None:
        """Step matrices of one shape by their updates, (k, rows held here, n)."""
        rate, (rows, columns), held = float(group["lr"]), matrices[0].shape, _held(matrices)
        weights = torch.stack(held)
        length = rate * MATCH * math.sqrt(max(rows // group.get("parts", 1), columns))
        moved = (weights * (1 - rate * group["weight_decay"])).add_(update, alpha=-length)
        torch._foreach_copy_(held, list(self._unless_bad(moved, weights).unbind()))

    def _unless_bad(self, after: Tensor, before: Tensor) -> Tensor:
        return after if self.found_inf is None else torch.where(self.found_inf != 0, before, after)


def _held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this process's parts of tensors that may be sharded."""
    from mvm.distributed.sharding import local

    return [local(each) for each in tensors]


def optimizers(
    config: TrainConfig, parameters: Iterable[tuple[str, nn.Parameter]], processes: Processes | None = None
) -> list[torch.optim.Optimizer]:
    """Return [AdamW], or [Muon, AdamW], over the named parameters that are trained, at one learning rate.

    Muon takes the matrices of blocks, no vectors, embeddings or heads: first and last layers do better with AdamW,
    which is fused: that kernel alone of torch's skips a step on the device where `found_inf` is 1; our Muon does too.
    processes: those that hold the same parameters, or shards of them.
    """
    by_parts: dict[int, list[nn.Parameter]] = defaultdict(list)
    for name, p in parameters:
        if p.requires_grad:
            by_parts[muon_parts(config, name, p)].append(p)
    others = by_parts.pop(0, [])
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    if config.optimizer == "adamw":
        return [adamw]
    if not by_parts:
        raise ValueError("train.optimizer='muon' needs matrices inside blocks, and this network has none; use adamw")
    # steps about as long as AdamW's (0.2 lr a value), so that one learning rate serves both
    how: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    copies = processes is not None and processes.world > 1
    matrices = [{"params": each, "parts": parts} for parts, each in by_parts.items()]
    how |= {"lr": config.lr, "weight_decay": config.weight_decay, "ns_steps": NS_STEPS, "copies": copies}
    return [Muon(matrices, **how), adamw]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def step_unless(optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
    """Step, or leave weights and state as they are where `bad` (a bool on the device) is true; nobody waits for it."""
    optimizer.found_inf = bad.float()  # ty: ignore[missing-attribute]  # what torch's own GradScaler sets
    optimizer.step()
