"""How much better a model restores images it was trained on than others: what dropout or augmentation could mend.

    python benchmarks/seen_and_unseen.py MODEL --images TWO.npz [--control MODEL] [--draws 9]

TWO.npz: uint8 arrays (N, H, W, 3) `train` and `test`. Every image is noised at the same log-SNRs, quantiles of the law
the model was trained with, and restored without a label. Images differ in difficulty by more than the gap: a control
that has seen its images less often (a short run) takes most of that out. Printed: the mean over images of the log of
the error, less the control's, test less train, with its 95 % interval, over all log-SNRs and for thirds of them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm import noise
from mvm.metrics.distances import NORMAL_95
from mvm.model import Model, load
from mvm.path import MeanVelocity, TimeLaw
from mvm.pixels import to_unit

PATH = MeanVelocity()
PARTS = 3


def log_snrs(law: TimeLaw, draws: int) -> Tensor:
    """Return log-SNRs (draws,), falling: the middles of equal parts of the law."""
    p = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    return PATH.lam(law.quantile(p, PATH)).sort(descending=True).values


@torch.no_grad()
def errors(model: Model, images: Tensor, lams: Tensor, batch: int = 64) -> Tensor:
    """Return the squared error of u (N, draws), whatever the model's own path and kind: that of x0, over t."""
    found = []
    for start in tqdm(range(0, len(images), batch), desc=model.recipe.name, unit="batch"):
        x0 = images[start : start + batch]
        rows = []
        for number, lam in enumerate(lams):
            seeds = torch.arange(start, start + len(x0)) + number * len(images)
            eps = noise.normal(seeds, noise.TRAIN, x0.shape[1:], x0.dtype)
            t = model.schedule.t_from_lam(lam)
            x = float(model.schedule.alpha(t)) * x0 + float(model.schedule.sigma(t)) * eps
            restored = model(x, t.expand(len(x0)))
            rows.append(((restored - x0) ** 2).mean((1, 2, 3)) / float(PATH.t_from_lam(lam)))
        found.append(torch.stack(rows, 1))
    return torch.cat(found).double()


def gap(seen: Tensor, unseen: Tensor) -> tuple[float, float]:
    """Return by how much the mean of (N,) is higher where unseen, and half of its 95 % interval."""
    error = sum(float(values.var()) / len(values) for values in (seen, unseen)) ** 0.5
    return float(unseen.mean() - seen.mean()), NORMAL_95 * error


def table(sides: Sequence[Tensor], controls: Sequence[Tensor] | None, lams: Tensor) -> str:
    """Return the gaps as Markdown, sides and controls (N, draws) of train and test."""
    lines = ["| log-SNR (lam) | test less train, log error |", "|---|---|"]
    parts = [torch.arange(len(lams)), *torch.arange(len(lams)).tensor_split(PARTS)]
    for part in parts:
        logs = [side[:, part].mean(1).log() for side in sides]
        if controls is not None:
            logs = [log - control[:, part].mean(1).log() for log, control in zip(logs, controls, strict=True)]
        value, reach = gap(*logs)
        where = f"{float(lams[part[-1]]):+.2f} to {float(lams[part[0]]):+.2f}"
        lines.append(f"| {where} | {value:+.4f} ({value - reach:+.4f} to {value + reach:+.4f}) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--control", default="")
    parser.add_argument("--draws", type=int, default=9)
    arguments = parser.parse_args()
    with np.load(arguments.images) as stored:
        sides = [to_unit(torch.from_numpy(stored[name]).permute(0, 3, 1, 2)) for name in ("train", "test")]
    model = load(arguments.model)
    lams = log_snrs(model.recipe.path.law, arguments.draws)
    found = [errors(model, images, lams) for images in sides]
    controls = [errors(load(arguments.control), images, lams) for images in sides] if arguments.control else None
    print(f"{arguments.model}: {len(sides[0])} train and {len(sides[1])} test images, {arguments.draws} log-SNRs each")
    print(f"mean squared error of u: {found[0].mean():.5f} train, {found[1].mean():.5f} test\n")
    print(table(found, controls, lams))


if __name__ == "__main__":
    main()
