"""Sampling on a CPU without a compiler: the formulas of training (plain), the same with less traffic (lean), int8.

    OMP_NUM_THREADS=2 python benchmarks/cpu_sampling.py

The ways take turns, so that a machine shared with others slows all of them; seconds are medians of the rounds, over
plain is the median of the ratios within a round. A round is everything from seeds to bytes; the model is loaded before.
Pixel differences are of uint8 images of the same seeds from those of the plain way.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from mvm.generate import cycle_labels, generate_batch
from mvm.model import Model, load
from mvm.precision import CPU_WAYS, cpu_way
from mvm.recipes import SampleConfig


def sampled(model: Model, num: int, settings: SampleConfig, way: str) -> tuple[float, torch.Tensor]:
    """Return the seconds that the images took, and the images."""
    labels, seeds = cycle_labels((), num, model.num_classes), torch.arange(num)
    with cpu_way(way):
        start = time.perf_counter()
        images = generate_batch(model, labels, seeds, settings).images
        return time.perf_counter() - start, images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cifar10")
    parser.add_argument("--num", type=int, default=16)
    parser.add_argument("--nfe", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = load(options.model)
    settings = replace(model.recipe.sample, nfe=options.nfe)
    images = {way: sampled(model, options.num, settings, way)[1].int() for way in CPU_WAYS}  # warm besides
    rounds = [{way: sampled(model, options.num, settings, way)[0] for way in CPU_WAYS} for _ in range(options.rounds)]
    print(f"{torch.get_num_threads()} threads, {options.num} images of {options.model}, nfe {options.nfe}\n")
    print(
        "| way | seconds, median | fastest | over plain | largest pixel difference | mean |\n|---|---|---|---|---|---|"
    )
    for way in CPU_WAYS:
        times = [each[way] for each in rounds]
        faster = statistics.median(each["plain"] / each[way] for each in rounds)
        apart = (images[way] - images["plain"]).abs()
        seconds = f"{statistics.median(times):.2f} | {min(times):.2f} | {faster:.2f}"
        print(f"| {way} | {seconds} | {apart.max()} | {apart.float().mean():.4f} |", flush=True)


if __name__ == "__main__":
    main()
