"""Is one source tree as fast as another? The same benchmark in both, in turn, on one machine.

    python benchmarks/two_trees.py OLD NEW --json speeds.json --gpu S-classic-kernels B-classic-kernels:128 sample:512
    OMP_NUM_THREADS=2 python benchmarks/two_trees.py OLD NEW --command "sample cifar10 --num 16 --nfe 13" --rounds 5

OLD and NEW: checkouts. --gpu: cases of the tree's own benchmarks/training_speed.py, CASE:BATCH for another batch;
shipped recipes on random data, RECIPE,OPTION=VALUE:BATCH, e.g. imagenet256-ddt-xl,engine.compile=blocks:64; and
sample:BATCH of sampling_speed.py with kernels. All compile at once, a process each (--stagger, where the GPU's memory
does not hold all of them: finished cases leave it). As soon as both trees are ready for a case, they are timed in turns
of about a second (OLD, NEW, NEW, OLD, ...), while all other processes are stopped.
--command: an `mvm` command, start and loading included, and whether the files it wrote are equal; a round is OLD, NEW,
NEW, OLD. Turns cancel a machine that slows down evenly. The figure is new over old of the medians; the range is the
smallest and largest ratio of neighbouring turns.
"""

import argparse
import json
import os
import selectors
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

TURN = 1.0  # seconds
ORDER = (0, 1, 1, 0) * 3  # the first turn of each is not counted
READY = "ready"
STDERR = 2  # the file descriptor: stdout is for the table


def environment(tree: Path) -> dict[str, str]:
    """Return the variables with which Python runs the tree's own package and benchmarks."""
    paths = os.pathsep.join(str((tree / part).resolve()) for part in ("src", "benchmarks"))
    return {**os.environ, "PYTHONPATH": paths}


# --- one process of one tree ---------------------------------------------------------------------------------------


def trained(case: str, batch: int) -> tuple[Callable[[], object], int]:
    """Return a training step of a case, and its batch."""
    import training_speed

    from mvm import bench

    if case in training_speed.CASES:
        recipe, _ = training_speed.CASES[case]
    else:
        from mvm.recipes import load_recipe, override

        name, *changes = case.split(",")
        recipe = bench.on_random_samples(override(load_recipe(name), dict(change.split("=", 1) for change in changes)))
    if batch:
        recipe = replace(recipe, train=replace(recipe.train, batch=batch))
    trainer = getattr(bench, "FieldTrainer", None) or bench.Trainer  # ty: ignore[unresolved-attribute]
    images = bench.random_images(recipe, 4 * recipe.train.batch)
    training = trainer(recipe, images, training_speed.Processes(device=device()), None)
    return training.advance, recipe.train.batch


def sampled(batch: int) -> tuple[Callable[[], object], int]:
    """Return the sampling of a batch, from seeds to bytes on the host."""
    import sampling_speed

    from mvm.recipes import SampleConfig

    way, settings = "kernels" if device().type == "cuda" else "eager", SampleConfig(nfe=26)
    if hasattr(sampling_speed, "build_sampler"):
        made = sampling_speed.build_sampler(way, sampling_speed.DEFAULT, device(), "bf16")
        return lambda: sampling_speed.seconds(made, batch, settings, 0), batch
    model = sampling_speed.sampler(way, sampling_speed.DEFAULT, device())  # before there was a Sampler
    return lambda: sampling_speed.seconds(model, batch, settings, "bf16", 0), batch


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronised() -> float:
    """Return the time, once the GPU has done all it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> float:
    """Return the most gigabytes that tensors of this process took on the GPU; 0 without one."""
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def serve(case: str) -> None:
    """Compile a case; then run as many steps as each line on stdin says, and print their images per second."""
    name, _, batch = case.partition(":")
    step, images = sampled(int(batch)) if name == "sample" else trained(name, int(batch or 0))
    answers, sys.stdout = sys.stdout, sys.stderr
    for _ in range(6):
        start = synchronised()
        step()
        last = synchronised() - start
    print(READY, last, peak_memory(), file=answers, flush=True)
    for line in sys.stdin:
        start = synchronised()
        for _ in range(int(line)):
            step()
        print(int(line) * images / (synchronised() - start), file=answers, flush=True)


# --- the turns -----------------------------------------------------------------------------------------------------


class Worker:
    """A process that serves one case of one tree."""

    def __init__(self, tree: Path, case: str, after: float) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", case, "--stagger", str(after)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment(tree), text=True, start_new_session=True, **pipes
        )
        self.last: float | None = None  # seconds of a step, once it is ready
        self.memory = 0.0  # GB of the GPU, then

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)  # compilers it has started, too

    def read(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.process.args} ended; see its messages above")
        return line

    def speed(self, steps: int) -> float:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        return float(self.read())


def in_turns(pair: tuple[Worker, Worker], others: Sequence[Worker]) -> list[list[float]]:
    """Return the speeds of both workers' turns, with all others stopped meanwhile."""
    for worker in others:
        worker.signal(signal.SIGSTOP)
    try:
        steps = max(1, round(TURN / max(worker.last or TURN for worker in pair)))
        speeds: list[list[float]] = [[], []]
        for which in ORDER:
            speeds[which].append(pair[which].speed(steps))
        return [each[1:] for each in speeds]
    finally:
        for worker in others:
            worker.signal(signal.SIGCONT)


def on_gpu(
    trees: tuple[Path, Path], cases: Sequence[str], stagger: float, seconds: float, keep: Callable[[list[dict]], None]
) -> None:
    """Hand the rows so far to `keep` after each case; stop after so many seconds."""
    deadline, rows = time.monotonic() + seconds, []
    workers = {
        (case, which): Worker(tree, case, number * stagger)
        for number, case in enumerate(cases)
        for which, tree in enumerate(trees)
    }
    watched = selectors.DefaultSelector()
    for key, worker in workers.items():
        watched.register(worker.process.stdout, selectors.EVENT_READ, key)
    try:
        while watched.get_map() and (left := deadline - time.monotonic()) > 0:
            for event, _ in watched.select(left):
                case, which = event.data
                watched.unregister(event.fileobj)
                line = workers[case, which].process.stdout.readline()
                if not line.startswith(READY):
                    print(f"{case}, {('old', 'new')[which]}: ended before it was ready", file=sys.stderr)
                    continue
                workers[case, which].last, workers[case, which].memory = map(float, line.split()[1:])
                pair = workers[case, 0], workers[case, 1]
                print(
                    f"{case}, {('old', 'new')[which]}: ready, {deadline - time.monotonic():.0f} s left", file=sys.stderr
                )
                if all(worker.last is not None for worker in pair):
                    old, new = in_turns(pair, [worker for worker in workers.values() if worker not in pair])
                    memory = {"memory_gb": [worker.memory for worker in pair]}
                    rows.append({**compared(f"{case}, images/s", old, new), **memory})
                    keep(rows)
                    for which in (0, 1):
                        workers.pop((case, which)).signal(signal.SIGKILL)
    finally:
        for worker in workers.values():
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGKILL)


def command(tree: Path, text: str) -> tuple[float, bytes]:
    """Return how often a second an mvm command could run, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npy"
        start = time.perf_counter()
        arguments = [sys.executable, "-m", "mvm", *shlex.split(text), "--out", str(out)]
        subprocess.run(arguments, cwd=tree, env=environment(tree), check=True, stdout=STDERR)
        return 1 / (time.perf_counter() - start), out.read_bytes()


def compared(case: str, old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """Return the medians and their ratio, new over old, with the range over neighbouring turns."""
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    medians = statistics.median(old), statistics.median(new)
    ends = {"least": min(ratios), "most": max(ratios)}
    return {"case": case, "old": medians[0], "new": medians[1], "ratio": medians[1] / medians[0], **ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--gpu", nargs="+", default=[], metavar="CASE[:BATCH]")
    parser.add_argument("--seconds", type=float, default=3600, help="of all GPU cases together")
    parser.add_argument("--stagger", type=float, default=0, help="seconds between the starts of GPU cases")
    parser.add_argument("--command", action="append", default=[], metavar="'sample cifar10 --num 16'")
    parser.add_argument("--rounds", type=int, default=2, help="of commands")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        time.sleep(options.stagger)
        sys.path.pop(0)  # the folder of this file: the tree has benchmarks of its own
        serve(options.serve)
        return
    if len(options.trees) != 2:
        parser.error("give two checkouts: OLD NEW")
    old, new = options.trees
    kept: list[dict] = []

    def keep(rows: list[dict]) -> None:
        kept[:] = rows
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")

    if options.gpu:
        on_gpu((old, new), options.gpu, options.stagger, options.seconds, keep)
    equal = True
    for text in options.command:
        runs: dict[Path, list[float]] = {old: [], new: []}
        written = set()
        for _ in range(options.rounds):
            for tree in (old, new, new, old):
                speed, out = command(tree, text)
                runs[tree].append(speed)
                written.add(out)
        equal = equal and len(written) == 1
        keep([*kept, compared(f"mvm {text}, runs/s", runs[old], runs[new])])
    print("| | old | new | new over old | range | GB, old and new |\n|---|---|---|---|---|---|")
    for row in kept:
        ratio = f"{row['ratio']:.3f} | {row['least']:.3f} to {row['most']:.3f}"
        memory = " and ".join(f"{value:.1f}" for value in row.get("memory_gb", ())) or "-"
        print(f"| {row['case']} | {row['old']:.4g} | {row['new']:.4g} | {ratio} | {memory} |")
    if options.command:
        print(f"\nwritten files equal: {'yes' if equal else 'no'}")


if __name__ == "__main__":
    main()
