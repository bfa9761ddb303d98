"""Spoil valid files of every format and hand them to mvm's readers: they must read, or refuse in words.

    python tests/faults/fuzz.py --cases 100000 --seed 0 --seconds 600

Case n of a format depends on seed, format and n alone: `--only FORMAT --first n --cases 1` does it again. A finding is
any error but a user's one, an error that does not name the file, more memory or time than allowed, anything run or
written outside the target folder. One process at a time; each format has one of its own.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # the others reserve gigabytes of address space

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from fuzz_format import Format
from fuzz_formats import FORMATS
from fuzz_isolation import SECONDS, Progress, Result, be_a_child, judged, peak

PATIENCE = 3 * SECONDS  # for a child that hangs where no signal reaches it
MOST_DEATHS = 20  # of one format's child


class Share(NamedTuple):
    """Cases of one format."""

    kind: type[Format]
    first: int
    stop: int
    seed: int
    ends: float  # by time.monotonic


def _child(share: Share, folder: Path, progress: Progress, answer) -> None:
    warnings.simplefilter("ignore")  # not what is judged here
    torch.set_num_threads(1)
    target = folder / "target"
    target.mkdir(exist_ok=True)
    made = share.kind(target)
    for seed in made.seeds:  # all must be read; and what libraries do at their first use is no finding
        made.put(seed)
        made.read()
    os.chdir(folder)
    watch = be_a_child(target)
    counts, findings = Counter(), []
    for case in range(share.first, share.stop):
        if time.monotonic() > share.ends:
            break
        progress.set(case)
        made.put(made.case(random.Random(f"{share.seed} {share.kind.__name__} {case}")))
        watch.take()
        outcome, words = judged(made.read, made.named)
        if seen := watch.take():
            outcome, words = "finding", seen[0]
        counts[outcome] += 1
        if outcome == "finding":
            findings.append((case, words))
    answer.send(Result(counts, findings, peak()))
    answer.close()


def _wait(process, progress: Progress, answer) -> Result | str:
    """Return the child's result, or how it died."""
    case, since = -1, time.monotonic()
    while not answer.poll(0.2):
        if progress.get() != case:
            case, since = progress.get(), time.monotonic()
        if not process.is_alive() and not answer.poll():
            return f"the process died, exit code {process.exitcode}"
        if time.monotonic() - since > PATIENCE:
            process.kill()
            return f"hung for {PATIENCE} s"
    try:
        return answer.recv()
    except EOFError:
        process.join()
        return f"the process died, exit code {process.exitcode}"


def judge(share: Share, folder: Path) -> Result:
    """Return what became of a format's cases; a child that dies is a finding, and another goes on after it."""
    context = multiprocessing.get_context("fork")  # libraries are imported once
    counts, findings, most = Counter(), [], 0
    for _ in range(MOST_DEATHS):
        progress, (answer, theirs) = Progress(), context.Pipe(False)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            process = context.Process(target=_child, args=(share, Path(place), progress, theirs))
            process.start()
            theirs.close()
            found = _wait(process, progress, answer)
            process.join()
        if isinstance(found, Result):
            return Result(counts + found.counts, findings + found.findings, max(most, found.peak))
        dead = progress.get()
        counts += Counter(finding=1, lost=dead - share.first)
        findings.append((dead, found))
        share = share._replace(first=dead + 1)
    return Result(counts, findings, most)


def shares(cases: int, seed: int, seconds: float, only: str, first: int) -> list[Share]:
    """Return the cases of each format."""
    kinds = [kind for kind in FORMATS if only in ("", kind.__name__)]
    total = sum(kind.share for kind in kinds)
    ends = time.monotonic() + seconds
    return [Share(kind, first, first + -(-cases * kind.share // total).__int__(), seed, ends) for kind in kinds]


def row(name: str, result: Result, seconds: float) -> str:
    """Return a line of the table."""
    counts = result.counts
    total = counts.total()
    return (
        f"| {name:<32} | {total:>7,} | {counts['read']:>7,} | {counts['refused']:>7,} | {counts['finding']:>8,} "
        f"| {result.peak:>8,} | {seconds:>7.1f} |"
    )


def main() -> int:
    """Print the table and the findings; return 1 where there are any, or where time ran out."""
    with torch.device("meta"):  # what this imports, it imports once and not in every child
        torch.arange(3.0).sin()
    parser = argparse.ArgumentParser(description="Hostile files for mvm's readers.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", default="", choices=["", *(kind.__name__ for kind in FORMATS)])
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    asked = parser.parse_args()
    print("| format                           |   cases |    read | refused | findings | peak MiB | seconds |")
    print("|----------------------------------|--------:|--------:|--------:|---------:|---------:|--------:|")
    total, told, began = Counter(), [], time.monotonic()
    peaks = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        for share in shares(asked.cases, asked.seed, asked.seconds, asked.only, asked.first):
            start = time.monotonic()
            result = judge(share, Path(folder))
            print(row(share.kind.name, result, time.monotonic() - start), flush=True)
            total += result.counts
            peaks.append(result.peak)
            told += [f"{share.kind.__name__} case {case}: {words}" for case, words in result.findings]
    print(row("all", Result(total, [], max(peaks)), time.monotonic() - began))
    print("\n".join(told))
    short = total.total() < asked.cases
    if short:
        print(f"only {total.total():,} of {asked.cases:,} cases in {asked.seconds:g} s")
    return 1 if told or short else 0


if __name__ == "__main__":
    sys.exit(main())
