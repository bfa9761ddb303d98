"""Where a training step or a sampling pass spends its GPU time: kernels, and the share of matrix products.

    python benchmarks/kernel_profile.py train S        # a case of benchmarks/training_speed.py
    python benchmarks/kernel_profile.py sample S       # one compiled pass of 512 images

Kinds are told by the kernels' names: products (library and template matrix products), attention, the compiler's own
(elementwise, norms, sums), those written by hand, and the rest (copies, optimizer, memory).
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from training_speed import CASES  # beside this file

from mvm.bench import random_images
from mvm.distributed.processes import Processes, autocast
from mvm.network import build_network
from mvm.training.field_trainer import FieldTrainer

KINDS = {
    "attention": ("sdpa", "flash", "fmha", "attention", "cudnn_generated"),
    "product": ("gemm", "nvjet", "cutlass", "mm_", "_mm", "xmma", "splitk", "s16816", "bf16_"),
    "compiled": ("triton_",),
    "by hand": ("gated_", "modulate_", "place_", "gelu_kernel", "gelu_back", "join_kernel"),
}
PASSES = 3


def kind(name: str) -> str:
    """Return what sort of kernel has this name."""
    low = name.lower()
    return next((kind for kind, marks in KINDS.items() if any(mark in low for mark in marks)), "other")


def kernels(work: Callable[[], object], passes: int = PASSES) -> list[tuple[str, int, float]]:
    """Return (name, launches, microseconds) of each kernel in one pass, dearest first."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(passes):
            work()
        torch.cuda.synchronize()
    found = [
        (event.key, event.count / passes, event.self_device_time_total / passes)
        for event in seen.key_averages()
        if event.self_device_time_total > 0 and event.self_cpu_time_total == 0
    ]
    return sorted(found, key=lambda row: -row[2])


def training(case: str, place: Processes) -> Callable[[], object]:
    """Return one step of a case."""
    recipe, teacher = CASES[case]
    bank = None if teacher is None else teacher(recipe, place.device)
    trainer = FieldTrainer(recipe, random_images(recipe, 4 * recipe.train.batch), place, bank)
    return trainer.advance


def sampling(case: str, place: Processes, batch: int) -> Callable[[], object]:
    """Return one compiled pass of a case's network."""
    recipe, _ = CASES[case]
    network = build_network(*recipe.blueprint).to(place.device)
    network = network.eval().requires_grad_(False)
    network.compile(dynamic=False)
    x = torch.randn(batch, *recipe.sample_shape, device=place.device)
    level, labels = torch.rand(batch, device=place.device), torch.zeros(batch, dtype=torch.int64, device=place.device)

    @torch.no_grad()
    def one() -> object:
        with autocast(recipe.engine, place.device):
            return network(x, level, labels)

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "sample"))
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--top", type=int, default=40)
    options = parser.parse_args()
    place = Processes(device=torch.device("cuda"))
    work = training(options.case, place) if options.what == "train" else sampling(options.case, place, options.batch)
    for _ in range(6):
        work()
    torch.cuda.synchronize()
    rows = kernels(work)
    total = sum(time for *_, time in rows)
    told = {
        "what": options.what,
        "case": options.case,
        "kernels": sum(count for _, count, _ in rows),
        "ms": total / 1000,
    }
    for name in (*KINDS, "other"):
        told[name] = sum(time for key, _, time in rows if kind(key) == name) / total
    print(json.dumps(told), flush=True)
    for name, count, time in rows[: options.top]:
        print(f"{time:10.1f} us  {count:6.1f}x  {kind(name):10s} {name[:150]}")


if __name__ == "__main__":
    main()
