"""Sampling speed of DiT-S/2 at 32x32: eager, with a compiled network, with the whole loop replayed, and so
with kernels by hand: norm and positions of queries and keys, and on Hopper the SwiGLU's product with its gate.

    python benchmarks/sampling_speed.py --batches 512 1 --nfe 26 --json benchmarks/results/sampling-speed.json

Random weights (speed does not depend on them), bf16, no guidance. Ways take turns, so that a drifting clock meets
all; the figure is the median of the rounds, spread is slowest over fastest. A batch is everything from seeds to bytes
on the host.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from mvm.bench import machine
from mvm.generate import Sampler, cycle_labels
from mvm.model import Model
from mvm.recipes import SampleConfig, load_recipe, override, require_field_recipe

DEFAULT = "cifar10"
WAYS = ("eager", "compiled", "replayed", "kernels")


def build_sampler(way: str, recipe: str, device: torch.device, precision: str) -> Sampler:
    """Return what samples that way."""
    found = load_recipe(recipe)
    if recipe == DEFAULT:  # a plain S/2, as SiT's is
        found = override(found, {"network.skip": "false", "network.local": "false"})
    model = Model(require_field_recipe(found, recipe)).to(device).eval().requires_grad_(False)
    replay, kernels = way in ("replayed", "kernels"), way == "kernels"
    return Sampler(model, precision, compile=way != "eager", replay=replay, kernels=kernels)


def seconds(sampler: Sampler, batch: int, settings: SampleConfig, round_: int) -> float:
    """Return the time of one batch, of other seeds in every round."""
    labels, seeds = cycle_labels((), batch, sampler.model.num_classes), torch.arange(batch) + round_ * batch
    start = time.perf_counter()
    sampler.batch(labels, seeds, settings)
    return time.perf_counter() - start


def measure(samplers: dict[str, Sampler], batch: int, settings: SampleConfig, rounds: int) -> list[dict]:
    """Return a row for every way at one batch size."""
    for sampler in samplers.values():
        for round_ in range(3):  # compiled, recorded, replayed once
            seconds(sampler, batch, settings, round_)
    times: dict[str, list[float]] = {way: [] for way in samplers}
    for round_ in range(rounds):
        for way, sampler in samplers.items():
            times[way].append(seconds(sampler, batch, settings, round_))
    rows = []
    for way, found in times.items():
        median = statistics.median(found)
        spread = max(found) / min(found) - 1
        told = {"batch": batch, "nfe": settings.nfe, "rho": settings.rho, "way": way, "ms": 1000 * median}
        rows.append({**told, "spread": spread, "images_per_second": batch / median})
    plain = next((row["ms"] for row in rows if row["way"] == "compiled"), rows[0]["ms"])
    return [{**row, "over_compiled": plain / row["ms"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 1])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--nfe", type=int, default=26)
    parser.add_argument("--rho", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recipe", default=DEFAULT)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    samplers = {way: build_sampler(way, options.recipe, device, options.precision) for way in options.ways}
    rows = []
    for batch in options.batches:
        for rho in options.rho:
            settings = SampleConfig(nfe=options.nfe, rho=rho)
            rows += measure(samplers, batch, settings, options.rounds)
            for row in rows[-len(samplers) :]:
                print(json.dumps(row), flush=True)
    if options.json is not None:
        told = {"commit": options.commit, "machine": machine(device), "precision": options.precision, "rows": rows}
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
