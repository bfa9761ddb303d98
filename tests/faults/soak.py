"""python -m tests.faults.soak: train, kill, resume, 200 times: memory, open files and the run stay as they are.

One process is killed at a random time in each cycle. Another one, which lives through all cycles, resumes the run by
two steps, as a notebook would, and tells what it holds.
"""

import argparse
import os
import random
import resource
import select
import sys
import tempfile
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from tests.faults.activities import half_written
from tests.faults.crashes import child, import_eagerly, kill

from mvm import checkpoint, cli

TRAIN = {
    "network.depth": "1", "network.heads": "2", "network.width": "16", "train.batch": "4", "train.steps": "1000000",
    "train.decay": "constant", "train.save_every": "1", "train.log_every": "1", "train.keep": "2", "preview.every": "0",
}  # fmt: skip
WORDS = ["train", "digits", *(word for name, value in TRAIN.items() for word in (f"--{name}", value))]
WARM_UP = 0.2  # of the cycles: allocators and caches have grown by then
MEMORY = 8 << 20  # bytes by which the process may grow afterwards
WAIT = 120  # seconds


class Held(NamedTuple):
    """What a process holds, and what lies in the run."""

    memory: int
    handles: int
    threads: int
    files: int


def held(run: Path) -> Held:
    """Return what this process holds; files: of the run, but for those of which each session has one."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [path for path in run.rglob("*") if "tensorboard" not in path.parts]
    handles = len(os.listdir("/proc/self/fd"))
    return Held(pages * resource.getpagesize(), handles, threading.active_count(), len(files))


def train(run: Path, *more: str) -> int:
    """Start the run or go on with it; return the exit code."""
    return cli.run([*WORDS, "--device", "cpu", "--no-report", "--out", str(run), "--auto-resume", *more])


def live(run: Path, line: Connection) -> int:
    """Resume the run by two steps whenever asked to; tell the exit code, and what this process holds then."""
    while line.recv():
        newest = checkpoint.latest(run)
        done = 0 if newest is None else checkpoint.read_manifest(newest)["step"]
        line.send((train(run, "--until", str(done + 2)), held(run)))
    return 0


def cycles(root: Path, count: int, seed: int) -> tuple[list[Held], list[str]]:
    """Return what the living process held after each cycle, and what was not as it should be."""
    run, log, found, seen = root / "run", root / "log.txt", [], []
    ours, theirs = Pipe()
    generator, living = random.Random(seed), child(lambda: live(run, theirs), log)
    for number in range(count):
        pid = child(lambda: train(run), log)
        time.sleep(0.05 + 0.25 * generator.random())
        kill(pid)
        found += [f"cycle {number}: half written: {told}" for told in half_written(run)]
        ours.send(True)
        if not select.select([ours], [], [], WAIT)[0]:
            return seen, [*found, f"cycle {number}: hangs"]
        code, holds = ours.recv()
        seen.append(holds)
        found += [] if code == 0 else [f"cycle {number}: exit code {code}: {log.read_text()[-600:]}"]
    ours.send(False)
    os.waitpid(living, 0)
    return seen, found


def grown(seen: list[Held]) -> list[str]:
    """Return what was not flat after the warm-up."""
    before, after = seen[int(WARM_UP * len(seen))], seen[-1]
    allowed = Held(MEMORY, 0, 0, 0)
    pairs = zip(Held._fields, before, after, allowed, strict=True)
    return [f"{name} grew from {old} to {new}" for name, old, new, more in pairs if new > old + more]


def main() -> int:
    """Return 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seen, found = cycles(Path(folder), asked.cycles, asked.seed)
        newest = checkpoint.latest(Path(folder) / "run")
    found += grown(seen)
    first, middle, last = seen[0], seen[int(WARM_UP * len(seen))], seen[-1]
    for name, *values in zip(Held._fields, first, middle, last, strict=True):
        shown = [f"{value / 2**20:.1f} MiB" if name == "memory" else f"{value}" for value in values]
        print(f"{name}: {shown[0]} after the first cycle, {shown[1]} after a fifth of them, {shown[2]} at the end")
    for told in found:
        print(f"  found: {told}")
    print(f"{len(seen)} cycles, {newest and newest.name}, {time.monotonic() - start:.0f} s, seed {asked.seed}")
    return int(bool(found))


if __name__ == "__main__":
    import_eagerly()
    sys.exit(main())
