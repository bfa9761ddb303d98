"""Speed of evaluation: images through Inception with statistics, a Frechet distance of 2048-d moments, memory.

    python benchmarks/evaluation_speed.py --inception WEIGHTS --commit HASH     # one GPU; tables on standard output

Images are random 32x32 pixels already in memory; the time of each count is that of features, both streams of moments
(pool and spatial, float64) and all host work. --variants times layouts and cuDNN's search on a few images first.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch

from mvm.bench import machine
from mvm.distributed.processes import Processes
from mvm.evaluation.evaluate import Judge
from mvm.evaluation.images import of_tensor
from mvm.metrics import inception
from mvm.metrics.distances import frechet_distance
from mvm.metrics.extractors import Sources
from mvm.metrics.measures import Key

KEYS = {Key("inception", "pool"): False, Key("inception", "spatial"): False}


def seconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def variants(judge: Judge, count: int) -> None:
    """Print images per second by memory layout, cuDNN's search, and batch."""
    for layout, search, batch in product((False, True), (False, True), (250, 500)):
        inception.CHANNELS_LAST["cuda"] = layout
        torch.backends.cudnn.benchmark = search
        judge.batch = batch
        pictures = of_tensor(images(count))
        judge.gather(pictures, KEYS)
        took = seconds(lambda p=pictures: judge.gather(p, KEYS))
        print(f"channels_last={layout} benchmark={search} batch={batch}: {count / took:,.0f} images/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inception", default="")
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 50_000])
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--variants", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    judge = Judge(Sources(options.inception), Processes(device=device), options.batch, progress=False)
    judge.extractor("inception")
    if options.variants:
        variants(judge, options.variants)
        return
    print(f"# Evaluation speed\n\n{machine(device)}, commit {options.commit}\n")
    judge.gather(of_tensor(images(options.batch)), KEYS)  # warm
    print("| images | seconds | images/s | peak GPU memory, GB |\n|---|---|---|---|")
    found = []
    for count in options.counts:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        pictures = of_tensor(images(count))
        took = seconds(lambda p=pictures: found.append(judge.gather(p, KEYS)))
        peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")
        print(f"| {count:,} | {took:.2f} | {count / took:,.0f} | {peak:.2f} |", flush=True)
    key = Key("inception", "pool")
    a, b = found[0].moments(key), found[-1].moments(key)
    times = [seconds(lambda: frechet_distance(a, b)) for _ in range(4)]
    print(
        f"\nFrechet distance of 2048-d moments: first {times[0]:.2f} s, then {sorted(times[1:])[1]:.2f} s (median of 3)"
    )


if __name__ == "__main__":
    main()
