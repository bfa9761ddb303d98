"""Sampling on a CPU without a compiler: the formulas of training (plain), the same with less traffic (lean), int8.

    OMP_NUM_THREADS=2 python benchmarks/cpu_sampling.py
    python benchmarks/cpu_sampling.py --command        # the whole command, start and loading included
    python benchmarks/cpu_sampling.py --waiting --busy 4   # by how threads wait, beside busy processes

The ways take turns, so that a machine shared with others slows all of them; seconds are medians of the rounds, over
plain is the median of the ratios within a round. A round is everything from seeds to bytes; the model is loaded before.
Pixel differences are of uint8 images of the same seeds from those of the plain way. With --command plain also gives
its memory back to the system as it frees it, as every process does that is not told otherwise (mvm.process).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch

from mvm.generate import Sampler, cycle_labels
from mvm.model import Model, load
from mvm.network.fast import swap
from mvm.recipes import SampleConfig


def sampled(model: Model, num: int, settings: SampleConfig, way: str) -> tuple[float, torch.Tensor]:
    """Return the seconds that the images took, and the images."""
    labels, seeds = cycle_labels((), num, model.num_classes), torch.arange(num)
    model.fast = way != "plain"
    swap.plain(model.network)  # what `load` applied; a fast model applies it again
    sampler = Sampler(model, "int8" if way == "int8" else "fp32")
    start = time.perf_counter()
    images = sampler.batch(labels, seeds, settings).images
    return time.perf_counter() - start, images


PLAIN = "import mvm.process, mvm.model; mvm.process.keep_freed_memory = bool; mvm.model.Model.fast = False; "
COMMANDS = {"plain": (PLAIN, "fp32"), "lean": ("", "fp32"), "int8": ("", "int8")}


# How OpenMP's threads wait, by environment; what `mvm` sets by itself is left to it in the first.
WAITING = {
    "mvm as it is": {},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def command_seconds(way: str, model: str, num: int, nfe: int, folder: str, **environment: str) -> float:
    """Return the seconds of `mvm sample` in a process of its own."""
    before, precision = COMMANDS[way]
    code = before + "import sys; sys.argv[0] = 'mvm'; from mvm.cli import main; main()"
    asked = [
        "sample",
        model,
        "--num",
        str(num),
        "--nfe",
        str(nfe),
        "--precision",
        precision,
        "--out",
        f"{folder}/x.png",
    ]
    start = time.perf_counter()
    env = {**os.environ, **environment}
    subprocess.run([sys.executable, "-c", code, *asked], check=True, capture_output=True, env=env)
    return time.perf_counter() - start


def whole_commands(options: argparse.Namespace) -> None:
    """Print the seconds of the whole command in each way, by turns."""
    print("| way | seconds, median | fastest | slowest | over plain |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        given = (options.model, options.num, options.nfe, folder)
        rounds = [{way: command_seconds(way, *given) for way in COMMANDS} for _ in range(options.rounds)]
    for way in COMMANDS:
        times = [each[way] for each in rounds]
        faster = statistics.median(each["plain"] / each[way] for each in rounds)
        print(f"| {way} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} | {faster:.2f} |")


def waiting(options: argparse.Namespace) -> None:
    """Print the seconds of the whole command by how its threads wait, by turns, beside busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            given = ("lean", options.model, options.num, options.nfe, folder)
            rounds = [
                {name: command_seconds(*given, **environment) for name, environment in WAITING.items()}
                for _ in range(options.rounds)
            ]
    finally:
        for process in busy:
            process.kill()
    print(f"{options.busy} busy processes, {os.cpu_count()} cores, {options.num} images, nfe {options.nfe}\n")
    print("| threads | seconds, median | fastest | slowest | over one thread |\n|---|---|---|---|---|")
    for name in WAITING:
        times = [each[name] for each in rounds]
        ratio = statistics.median(each[name] / each["one thread"] for each in rounds)
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cifar10")
    parser.add_argument("--num", type=int, default=16)
    parser.add_argument("--nfe", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--waiting", action="store_true")
    parser.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    if options.waiting:
        waiting(options)
        return
    if options.command:
        whole_commands(options)
        return
    model = load(options.model)
    settings = replace(model.recipe.sample, nfe=options.nfe)
    images = {way: sampled(model, options.num, settings, way)[1].int() for way in COMMANDS}  # warm besides
    rounds = [{way: sampled(model, options.num, settings, way)[0] for way in COMMANDS} for _ in range(options.rounds)]
    print(f"{torch.get_num_threads()} threads, {options.num} images of {options.model}, nfe {options.nfe}\n")
    print(
        "| way | seconds, median | fastest | over plain | largest pixel difference | mean |\n|---|---|---|---|---|---|"
    )
    for way in COMMANDS:
        times = [each[way] for each in rounds]
        faster = statistics.median(each["plain"] / each[way] for each in rounds)
        apart = (images[way] - images["plain"]).abs()
        seconds = f"{statistics.median(times):.2f} | {min(times):.2f} | {faster:.2f}"
        print(f"| {way} | {seconds} | {apart.max()} | {apart.float().mean():.4f} |", flush=True)


if __name__ == "__main__":
    main()
