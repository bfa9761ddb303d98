"""What the scale of the data does to the task of a network: paths and predictions at one and the same loss.

    python benchmarks/preconditioning.py train IMAGES.npz METHOD SEED [--steps 1500] >> RUNS.jsonl     6 minutes, a core
    python benchmarks/preconditioning.py table RUNS.jsonl

IMAGES.npz: uint8 `images` (N, H, W, 3) and `labels`; the last 2,000 are held out. METHOD: u1, flow1: MVM's u, flow
matching's velocity on pixels in [-1, 1]; u2, flow2: on [-2, 2]; edm: EDM's coefficients for a std of 0.5.

An image with noise is z = x0 + r n, lam = -log(r). At equal lam a path and a prediction are coefficients of r alone:
x0_hat = skip(r) z + out(r) F(in(r) z). All methods minimise |x0_hat - x0|^2 (1 + r)^2 / r^2, which is flow matching's
loss on [-1, 1], under lam ~ N(0.5, 1.5^2), with the same weights at first, images, noise and steps; the network is
told the same level. So they differ by the three coefficients, and their losses compare.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm.metrics.distances import student_95
from mvm.network import DiT, DiTConfig
from mvm.path import LinearFlow, MeanVelocity, Schedule
from mvm.pixels import to_unit

HELD_OUT, CLASSES, BATCH, RATE, WARMUP, AVERAGED = 2000, 10, 96, 1e-3, 100, 0.005
LAMS = (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5)
BASE = "flow1"


class Coefficients(NamedTuple):
    """x0_hat = skip z + out F(inner z), each (B,)."""

    inner: Tensor
    skip: Tensor
    out: Tensor


def of_path(schedule: Schedule, scale: float) -> Callable[[Tensor], Coefficients]:
    """Return the coefficients of a path whose prediction is (x0 - x) / sigma: MVM's u, and flow's x0 - eps.

    On data of that scale x = alpha scale x0 + sigma eps = alpha scale z, where r = sigma / (alpha scale).
    """

    def found(r: Tensor) -> Coefficients:
        t = schedule.t_from_lam(-torch.log(scale * r))
        alpha, sigma = schedule.alpha(t), schedule.sigma(t)
        return Coefficients(alpha * scale, alpha, sigma / scale)

    return found


def of_edm(std: float) -> Callable[[Tensor], Coefficients]:
    """Return EDM's coefficients: input and target of unit variance, the error amplified least (Karras et al. 2022)."""

    def found(r: Tensor) -> Coefficients:
        norm = torch.sqrt(r**2 + std**2)
        return Coefficients(1 / norm, (std / norm) ** 2, r * std / norm)

    return found


METHODS: dict[str, Callable[[Tensor], Coefficients]] = {
    **{f"u{scale}": of_path(MeanVelocity(), scale) for scale in (1, 2)},
    **{f"flow{scale}": of_path(LinearFlow(), scale) for scale in (1, 2)},
    "edm": of_edm(0.5),
}


def over_images(values: Tensor) -> Tensor:
    return values.float().reshape(-1, 1, 1, 1)


def losses(network: DiT, method: str, x0: Tensor, labels: Tensor, r: Tensor, n: Tensor) -> Tensor:
    """Return the loss of each image (B,)."""
    inner, skip, out = map(over_images, METHODS[method](r))
    z = x0 + over_images(r) * n
    level = MeanVelocity().level(MeanVelocity().t_from_lam(-torch.log(r)))
    restored = skip * z + out * network(inner * z, level.float(), labels).prediction
    return ((over_images((1 + r) / r) * (restored - x0)) ** 2).mean((1, 2, 3))


def halved(images: np.ndarray) -> Tensor:
    """Return uint8 (N, H, W, 3) as (N, 3, H/2, W/2) in [-1, 1], means of 2 x 2 pixels rounded to grey levels."""
    count, height, width, channels = images.shape
    small = images.astype(np.float32).reshape(count, height // 2, 2, width // 2, 2, channels).mean((2, 4))
    return to_unit(torch.from_numpy(np.round(small).astype(np.uint8)).permute(0, 3, 1, 2).contiguous())


def rate(step: int, steps: int) -> float:
    """Return the rate: a short rise, constant, and a straight fall over the second half."""
    return RATE * min(1, (step + 1) / WARMUP) * max(0.02, min(1, (steps - step) / (0.5 * steps)))


def train(images: Tensor, labels: Tensor, method: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, and return the loss of the last 300 steps and, by log-SNR, that of the average on images held out."""
    torch.manual_seed(seed)
    network = DiT(DiTConfig(size="tiny", width=128, patch=4, skip=True, local=True), tuple(images.shape[1:]), CLASSES)
    average = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    drawn, seen = torch.Generator().manual_seed(1000 + seed), []
    for step in tqdm(range(steps), desc=f"{method} {seed}", unit="step"):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        chosen = torch.randint(len(images) - HELD_OUT, (BATCH,), generator=drawn)
        x0 = images[chosen].flip(3) if torch.rand((), generator=drawn) < 0.5 else images[chosen]
        n = torch.randn(x0.shape, generator=drawn)
        r = torch.exp(-(0.5 + 1.5 * torch.randn(BATCH, generator=drawn, dtype=torch.float64)))
        loss = losses(network, method, x0, labels[chosen], r, n).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        seen.append(loss.item())
        for name, value in network.state_dict().items():
            average[name].lerp_(value, AVERAGED)
    network.load_state_dict(average)
    held = held_out(network, method, images[-HELD_OUT:], labels[-HELD_OUT:])
    return {"method": method, "seed": seed, "steps": steps, "train": float(np.mean(seen[-300:])), "held": held}


@torch.no_grad()
def held_out(network: DiT, method: str, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the mean loss by log-SNR; every method and seed has the same noise."""
    drawn, found = torch.Generator().manual_seed(7), {}
    for lam in LAMS:
        n = torch.randn(images.shape, generator=drawn)
        r = torch.full((len(images),), float(np.exp(-lam)), dtype=torch.float64)
        parts = (slice(start, start + 200) for start in range(0, len(images), 200))
        told = [losses(network, method, images[part], labels[part], r[part], n[part]) for part in parts]
        found[str(lam)] = float(torch.cat(told).mean())
    return found


def excess(runs: Sequence[Mapping[str, Any]], method: str, value: Callable[[Mapping[str, Any]], float]) -> str:
    """Return by how many per cent a figure is above the base's, pairs of equal seeds, with Student's 95 % interval."""
    base = {run["seed"]: value(run) for run in runs if run["method"] == BASE}
    ratios = [100 * (value(r) / base[r["seed"]] - 1) for r in runs if r["method"] == method and r["seed"] in base]
    if len(ratios) < 2:
        return f"{ratios[0]:+.2f}" if ratios else "-"
    reach = student_95(len(ratios)) * float(np.std(ratios, ddof=1)) / len(ratios) ** 0.5
    return f"{np.mean(ratios):+.2f} ± {reach:.2f}"


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return how much more each method loses than flow matching on [-1, 1], in per cent, as Markdown."""
    lines = [f"| % above {BASE} | seeds | training | {' | '.join(f'lam {lam:g}' for lam in LAMS)} |"]
    lines.append("|---" * (3 + len(LAMS)) + "|")
    for method in (name for name in METHODS if name != BASE):
        count = sum(run["method"] == method for run in runs)
        cells = [excess(runs, method, lambda run: run["train"])]
        cells += [excess(runs, method, lambda run, lam=lam: run["held"][str(lam)]) for lam in LAMS]
        if count:
            lines.append(f"| {' | '.join([method, str(count), *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training, tabling = commands.add_parser("train"), commands.add_parser("table")
    training.add_argument("images", type=Path)
    training.add_argument("method", choices=METHODS)
    training.add_argument("seed", type=int)
    training.add_argument("--steps", type=int, default=1500)
    tabling.add_argument("runs", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table([json.loads(line) for line in arguments.runs.read_text(encoding="utf-8").splitlines()]))
        return
    torch.set_num_threads(1)
    with np.load(arguments.images) as stored:
        images, labels = halved(stored["images"]), torch.from_numpy(stored["labels"].astype(np.int64))
    print(json.dumps(train(images, labels, arguments.method, arguments.seed, arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
