"""Is one source tree as fast as another? The same benchmark in both, in turn, on one machine.

    python benchmarks/two_trees.py OLD NEW --json speeds.json --train S B XL-18-heads --sample --rounds 2   # a GPU
    OMP_NUM_THREADS=2 python benchmarks/two_trees.py OLD NEW --command "sample cifar10 --num 16 --nfe 13" --rounds 5

OLD and NEW: checkouts. A round is OLD, NEW, NEW, OLD: a machine that slows down evenly slows both. Each run is a
process of its own. --train and --sample: the tree's own benchmarks/training_speed.py and sampling_speed.py, images per
second; --command: an `mvm` command, seconds, start and loading included, and whether the files it wrote are equal. The
figure is new over old of the medians; the range is the smallest and largest ratio within half a round.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

STDERR = 2  # the file descriptor: stdout is for the table
Speeds = dict[str, float]  # images per second by case, or commands per second


def ran(tree: Path, *arguments: str) -> None:
    """Run Python in a tree, with the tree's own package."""
    environment = {**os.environ, "PYTHONPATH": str((tree / "src").resolve())}
    subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, check=True, stdout=STDERR)


def rows(tree: Path, script: str, arguments: Sequence[str]) -> list[dict]:
    """Return the rows that a benchmark of the tree writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        ran(tree, f"benchmarks/{script}", *arguments, "--json", str(out))
        return json.loads(out.read_text())["rows"]


def training(tree: Path, cases: Sequence[str], steps: int) -> Speeds:
    found = rows(tree, "training_speed.py", [*cases, "--steps", str(steps)])
    return {f"train {row['case']}": row["images_per_second"] for row in found}


def sampling(tree: Path) -> Speeds:
    found = rows(tree, "sampling_speed.py", ["--batches", "512", "1", "--ways", "kernels"])
    return {f"sample {row['batch']}": row["images_per_second"] for row in found}


def command(tree: Path, text: str) -> tuple[Speeds, bytes]:
    """Return the speed of an mvm command, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npy"
        start = time.perf_counter()
        ran(tree, "-m", "mvm", *shlex.split(text), "--out", str(out))
        return {f"mvm {text}": 1 / (time.perf_counter() - start)}, out.read_bytes()


def measured(tree: Path, options: argparse.Namespace, written: set[bytes]) -> Speeds:
    """Return all speeds of one tree, measured once; written: gets what the commands wrote."""
    found: Speeds = {}
    if options.train:
        found |= training(tree, options.train, options.steps)
    if options.sample:
        found |= sampling(tree)
    for text in options.command:
        speed, out = command(tree, text)
        written.add(text.encode() + out)
        found |= speed
    return found


def compared(old: Sequence[Speeds], new: Sequence[Speeds]) -> Iterator[dict]:
    """Yield a row for every case: the medians and their ratio, new over old, with its range."""
    for case in old[0]:
        before, after = ([each[case] for each in runs] for runs in (old, new))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        medians = statistics.median(before), statistics.median(after)
        ends = {"least": min(ratios), "most": max(ratios)}
        yield {"case": case, "old": medians[0], "new": medians[1], "ratio": medians[1] / medians[0], **ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--train", nargs="+", default=[], metavar="CASE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--command", action="append", default=[], metavar="'sample cifar10 --num 16'")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: dict[Path, list[Speeds]] = defaultdict(list)
    written: set[bytes] = set()
    for _ in range(options.rounds):
        for tree in (options.old, options.new, options.new, options.old):
            runs[tree].append(measured(tree, options, written))
            if options.json and len(runs[options.old]) == len(runs[options.new]):  # keeps what it has when cut short
                found = list(compared(runs[options.old], runs[options.new]))
                options.json.write_text(json.dumps({"rounds": options.rounds, "rows": found}, indent=1) + "\n")
    print("| | old | new | new over old | range |\n|---|---|---|---|---|")
    for row in compared(runs[options.old], runs[options.new]):
        ratio = f"{row['ratio']:.3f} | {row['least']:.3f} to {row['most']:.3f}"
        print(f"| {row['case']} | {row['old']:.4g} | {row['new']:.4g} | {ratio} |")
    if options.command:
        print(f"\nwritten files equal: {'yes' if len(written) == len(options.command) else 'no'}")


if __name__ == "__main__":
    main()
