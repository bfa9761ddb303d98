"""python -m tests.faults.crashes: kill everything that writes, at every moment that matters and at random ones.

One process imports torch and never computes; every command runs in a fork of it, so that a run of some seconds costs
tenths of one. A killed command is given again, and its results must be those of a command that was never killed.
"""

import argparse
import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from tests.faults.activities import Activity, activities, fingerprint, half_written, leftovers, train
from tests.faults.strike import Striker, jump_clock
from tests.faults.tables import Row, table

# what a command says that had done all but its last act, tidying up, when it was struck
FINISHED = ("is a folder that is not empty", "already holds a run; give another folder")
HANG = 120  # seconds after which a command counts as hung


# imported before the first fork, where a second of each child would go into it
EAGER = ("torch._dynamo", "torch.utils.tensorboard", "mvm.training.loop", "mvm.evaluation.sweep", "matplotlib.figure")


def import_eagerly() -> None:
    """Import what children would each import."""
    torch.set_num_threads(1)
    for module in EAGER:
        importlib.import_module(module)


def child(work: Callable[[], int], log: Path) -> int:
    """Start work in a process of its own; return its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setsid()
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = work()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def end(pid: int, within: float = HANG) -> int | None:
    """Return the exit code of a child, negative for a signal; None, and kill it, where it does not end in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    kill(pid)
    return None


def kill(pid: int) -> None:
    """kill -9, as the out-of-memory killer does: the one process, not those it started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@dataclass
class Undisturbed:
    """What a command does when nothing happens to it."""

    results: dict[str, str]
    seconds: float
    moments: int


@dataclass
class Bench:
    """Where commands are struck: a folder, made anew for each."""

    root: Path
    plain: dict[str, Undisturbed] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    def fresh(self, activity: Activity) -> Path:
        """Return the folder as it is before the command; always of one name, since some results tell it."""
        begun, folder = self.root / "begun" / activity.name, self.root / "folder"
        if not begun.exists():
            begun.mkdir(parents=True)
            assert end(child(lambda: int(bool(activity.begin(begun))), self.log)) == 0, self.log.read_text()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(begun, folder)
        self.log.unlink(missing_ok=True)
        return folder

    def undisturbed(self, activity: Activity) -> Undisturbed:
        """Return what the command does, from one run."""
        if activity.name not in self.plain:
            folder, count, start = self.fresh(activity), self.root / "moments", time.monotonic()

            def counted() -> int:
                striker = Striker("count", 0)
                striker.arm()
                code = activity.run(folder, False)
                with count.open("w") as file:
                    file.write(str(striker.seen))
                return code

            assert end(child(counted, self.log)) == 0, self.log.read_text()
            seconds = time.monotonic() - start
            self.plain[activity.name] = Undisturbed(fingerprint(folder), seconds, int(count.read_text()))
        return self.plain[activity.name]

    def again(self, activity: Activity, folder: Path) -> list[str]:
        """Give the command again; return what is not as it should be."""
        code = end(child(lambda: activity.run(folder, True), self.log))
        told = self.log.read_text()[-1500:]
        if code == 2 and any(said in told for said in FINISHED):
            code = 0
        found = [] if code == 0 else ["hangs" if code is None else f"exit code {code}: {told}"]
        now, expected = fingerprint(folder), self.undisturbed(activity).results
        other = sorted(name for name in now.keys() | expected.keys() if now.get(name) != expected.get(name))
        other = [name for name in other if not name.startswith("out/work/")]
        found += [f"differs: {', '.join(other[:3])}"] if other else []
        return found + [f"left over: {name}" for name in leftovers(folder)]

    def strike(self, activity: Activity, kind: str, at: int) -> list[str]:
        """Strike a command at a moment, give it again; return what is not as it should be."""
        self.undisturbed(activity)
        folder = self.fresh(activity)

        def struck() -> int:
            Striker(kind, at).arm()
            return activity.run(folder, False)

        code = end(child(struck, self.log))
        damage = [f"half written: {told}" for told in half_written(folder)]
        if kind == "full" and (code not in (0, 2) or "Traceback" in self.log.read_text()):
            damage.append(f"not told in words (exit code {code}): {self.log.read_text()[-1500:]}")
        return damage + self.again(activity, folder)

    def kill_after(self, activity: Activity, seconds: float) -> list[str]:
        """Kill a command after some time, give it again; return what is not as it should be."""
        self.undisturbed(activity)
        folder = self.fresh(activity)
        pid = child(lambda: activity.run(folder, False), self.log)
        time.sleep(seconds)
        kill(pid)
        return [f"half written: {told}" for told in half_written(folder)] + self.again(activity, folder)

    def jump(self, activity: Activity, days: float) -> list[str]:
        """Run a command, and give it again, under a clock that jumps; return what is not as it should be."""
        self.undisturbed(activity)
        folder = self.fresh(activity)

        def jumping() -> int:
            jump_clock(days)
            return activity.run(folder, False)

        code = end(child(jumping, self.log))
        now = fingerprint(folder)
        same = now == self.undisturbed(activity).results
        return [] if code == 0 and same else [f"exit code {code}, results {'the same' if same else 'differ'}"]


def spaced(moments: int, most: int) -> list[int]:
    """Return at most so many of the moments 1..N, evenly spread; all of them where most is 0."""
    every = 1 if not most else max(1, -(-moments // most))
    return list(range(1, moments + 1, every))


class Job(NamedTuple):
    """One activity, struck in one way."""

    activity: str
    how: str
    root: Path
    model: Path
    kills: int
    seed: int
    most: int

    def chosen(self) -> Activity:
        """Return the activity; at random times it is 2,000 images that are sampled, else 40."""
        found = activities(self.model, 2000 if self.how == RANDOM else 40)
        return next(activity for activity in found if activity.name == self.activity)

    def strikes(self, bench: Bench) -> Iterator[list[str]]:
        """Yield the findings of each strike."""
        activity, plain = self.chosen(), bench.undisturbed(self.chosen())
        generator = random.Random(f"{self.seed} {self.activity}")
        most = {KILL: self.most, FULL: self.most or FULL_MOST}.get(self.how)
        for at in spaced(plain.moments, most) if most is not None else []:
            yield bench.strike(activity, self.how, at)
        for days in (400, -400) if self.how == CLOCK else []:
            yield bench.jump(activity, days)
        for _ in range(self.kills) if self.how == RANDOM else []:
            yield bench.kill_after(activity, generator.random() * plain.seconds)


FULL_MOST = 30  # a full disk is told by the few functions that write
KILL, FULL, CLOCK, RANDOM = "kill", "full", "clock", "random"
SAID = {
    KILL: "killed before each of its renames, flushes, removals, and at half of each file",
    FULL: "disk full from some of these moments on",
    CLOCK: "clock jumps by 400 days",
    RANDOM: "killed at a random time",
}


def do(job: Job) -> Row:
    """Return the row of one job; runs in a process of its own."""
    row, bench = Row(job.activity, SAID[job.how]), Bench(Path(tempfile.mkdtemp(dir=job.root)))
    for findings in job.strikes(bench):
        row.add(findings)
    shutil.rmtree(bench.root)
    return row


def jobs(root: Path, kills: int, seed: int, most: int, only: str) -> list[Job]:
    """Return all jobs; random kills go round the activities."""
    model = root / "model"
    assert end(child(lambda: train(model, False), root / "log.txt")) == 0, (root / "log.txt").read_text()
    names = [activity.name for activity in activities(model / "run", 1) if only in activity.name]
    share = {name: len(range(place, kills, len(names))) for place, name in enumerate(names)}
    # worker processes are out of the reach of replaced functions
    systematic = [name for name in names if "workers" not in name]
    pairs = [(name, how) for how in (KILL, FULL, CLOCK) for name in systematic]
    pairs += [(name, RANDOM) for name in names if share[name]]
    return [Job(name, how, root, model / "run", share[name], seed, most) for name, how in pairs]


def main() -> int:
    """Return 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="random kills, over all activities")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=0, help="moments struck in each activity; 0: all")
    parser.add_argument("--only", default="", help="activities with this in their names")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    rows, start = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        todo = jobs(Path(folder), asked.kills, asked.seed, asked.most, asked.only)
        with ProcessPoolExecutor(asked.workers, multiprocessing.get_context("fork")) as pool:
            for row in pool.map(do, todo):
                print(row, *(f"  found: {told}" for told in row.findings), sep="\n", flush=True)
                rows.append(row)
    print("", table(rows), f"{time.monotonic() - start:.0f} s, seed {asked.seed}", sep="\n")
    return int(any(row.findings for row in rows))


if __name__ == "__main__":
    import_eagerly()
    sys.exit(main())
