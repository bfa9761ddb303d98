"""Muon over stacks of matrices of one shape: torch's own steps one by one, thousands of small kernels a step."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

MATCH = 0.2  # root mean square of an AdamW step, in learning rates: the published match


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

    found_inf: None, or a number on the device: where it is not 0, weights and momentum stay as they are, as AdamW's do.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            for p in moving:
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
            alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
            for p in moving:
                alike[p.shape, p.dtype].append(p)
            for matrices in alike.values():
                self._move(matrices, group)

    def _move(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Step matrices of one shape."""
        rate, momentum = float(group["lr"]), group["momentum"]
        kept = [self.state[p]["momentum_buffer"] for p in matrices]
        gradient = torch.stack([p.grad for p in matrices if p.grad is not None])  # (k, m, n)
        before = torch.stack(kept)
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
        torch._foreach_copy_(kept, list(average.unbind()))
