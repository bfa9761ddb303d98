"""python -m tests.faults.pairs: every two commands that write, on one target, interleaved at their renames.

Before each of its renames a command waits for its turn. Either one is stopped before its n-th rename until the other
has ended, for every n; or the turns are drawn at random. At the end one result is whole and one command was refused in
words; or both succeeded, and what is there is what one after the other leaves.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from tests.faults import activities
from tests.faults.activities import fingerprint, half_written, leftovers
from tests.faults.crashes import HANG, child, end, import_eagerly, spaced
from tests.faults.strike import Turns
from tests.faults.tables import Row, table
from tests.published.layouts import sit_state

from mvm import cli, demo

Choose = Callable[[list[int]], int]  # which of those that wait goes on
DEMO = demo.DemoSize(steps=1, samples=20, nfes=(2,), likelihood_images=1, likelihood_steps=1)


class Command(NamedTuple):
    """A command, and what it writes: OUT stands for the target."""

    name: str
    words: Sequence[str]

    def run(self, folder: Path, target: str) -> int:
        """Run it in the folder; return its exit code."""
        os.chdir(folder)
        demo.QUICK, demo.others_shipped = DEMO, dict
        return cli.run([target if word == "OUT" else word for word in self.words])


CPU = ("--device", "cpu")
DRAWN = ("-n", "20", "--batch", "10", *CPU)
SHORT = activities.TRAIN | {"train.steps": "4", "train.save_every": "2", "train.snapshot_every": "2"}
TRAIN = ("train", "digits", *(w for name, value in SHORT.items() for w in (f"--{name}", value)), *CPU, "--no-report")
BOX = ("--resize", "box", "--nfe", "1", *CPU)
FOLDERS = (
    Command("train", (*TRAIN, "--preview.every", "4", "--out", "OUT")),
    Command("train, resumed", (*TRAIN, "--preview.every", "0", "--out", "OUT", "--auto-resume", "--train.steps", "6")),
    Command("ema", ("ema", "run", "--width", "0.1", "--out", "OUT")),
    Command("data prepare", ("data", "prepare", "pictures", "--size", "8", "--workers", "1", "--out", "OUT")),
    Command("sample", ("sample", "run", "--nfe", "1", *DRAWN, "--out", "OUT")),
    Command("sweep", ("sweep", "run", "--nfe", "1", "--rho", "0", *DRAWN, "--out", "OUT")),
    Command("demo", ("demo", "--quick", "--out", "OUT")),
    Command("export", ("export", "run", "--no-grid", "--out", "OUT")),
    Command("convert", ("convert", "sit.pt", "--as", "sit", "--heads", "2", "--out", "OUT")),
)  # fmt: skip
MODELS = (
    Command("tune", ("tune", "OUT", "--nfe", "2", "--num", "1", "--rounds", "1", "--reference-nfe", "8", *CPU)),
    Command("export again", ("export", "OUT", "--no-grid", "--dtype", "float32", "--out", "OUT")),
)
RUNS = (
    Command("train, resumed", (*TRAIN, "--out", "OUT", "--resume", "--preview.every", "0", "--train.steps", "6")),
    Command("report", ("report", "OUT")),
)
FILES = (
    Command("sample", ("sample", "run", "--nfe", "1", *DRAWN, "--out", "OUT")),
    Command("edit", ("edit", "inpaint", "run", "pictures/class-1/1.png", "--box", "2,2,6,6", *BOX, "--out", "OUT")),
)
JSON = (
    Command("eval", ("eval", "run", *DRAWN, "--nfe", "1", "--metrics", "fd-pixels", "--json", "OUT")),
    Command("compare", ("compare", "run", "run", *DRAWN, "--nfe", "1", "--metrics", "fd-pixels", "--json", "OUT")),
)


class Group(NamedTuple):
    """Commands on one target; made: what makes it first, None where it is not there."""

    name: str
    target: str
    made: Command | None
    commands: Sequence[Command]


BY_NAME = {command.name: command for command in FOLDERS}
TUNE, AGAIN = MODELS
GROUPS = (
    Group("a new folder", "out", None, FOLDERS),
    Group("an exported model", "out", BY_NAME["export"], (*MODELS, *FOLDERS)),
    Group("a run", "out", BY_NAME["train"], (*RUNS, TUNE, *FOLDERS)),
    Group("an empty file", "out.npz", None, FILES),
    Group("a picture", "out.png", FILES[0], FILES),
    Group("a report", "out.json", None, JSON),
)


@dataclass
class Scene:
    """Where pairs run: a folder, made anew for each; what a command, and one after another, leave in it."""

    root: Path
    group: Group
    known: dict[tuple[str, ...], tuple[list[int | None], dict[str, str]]] = field(default_factory=dict)
    renames: dict[str, int] = field(default_factory=dict)

    def fresh(self) -> Path:
        """Return the folder as it is before the commands; always of one name, since some results tell it."""
        folder = self.root / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root / "begun" / self.group.name, folder)
        return folder

    def log(self, place: int) -> Path:
        return self.root / f"log-{place}.txt"

    def play(self, commands: Sequence[Command], choose: Choose) -> tuple[list[int | None], list[int], Path]:
        """Run commands, one at a time between any two renames; return their exit codes and counts of turns."""
        folder, pids, told, go = self.fresh(), [], [], []
        for place, command in enumerate(commands):
            self.log(place).unlink(missing_ok=True)
            (hear, tell), (heed, bid) = os.pipe(), os.pipe()

            def work(command: Command = command, tell: int = tell, heed: int = heed) -> int:
                turns = Turns(tell, heed)
                turns.wait()
                turns.arm()
                return command.run(folder, self.group.target)

            pids.append(child(work, self.log(place)))
            os.close(tell), os.close(heed)
            told.append(hear), go.append(bid)
        waiting, counts = set[int](), [0] * len(pids)
        living = set(range(len(pids)))
        while living:
            for place in sorted(living - waiting):  # all wait, or have ended
                heard = os.read(told[place], 1) if select.select([told[place]], [], [], HANG)[0] else b""
                (waiting.add if heard else living.remove)(place)
            if ready := sorted(waiting):
                chosen = choose(ready)
                waiting.remove(chosen)
                counts[chosen] += 1
                with contextlib.suppress(BrokenPipeError):
                    os.write(go[chosen], b".")
        codes = [end(pid, 10) for pid in pids]
        for handle in (*told, *go):
            os.close(handle)
        return codes, counts, folder

    def after(self, *commands: Command) -> tuple[list[int | None], dict[str, str]]:
        """Return the exit codes of commands one after another, and what they leave."""
        names = tuple(command.name for command in commands)
        if names not in self.known:
            codes, counts, folder = self.play(commands, min)
            self.known[names] = codes, left_in(folder)
            self.renames.setdefault(names[0], counts[0])
        return self.known[names]

    def findings(self, pair: Sequence[Command], choose: Choose) -> list[str]:
        """Run two commands; return what is not as it should be."""
        codes, _, folder = self.play(pair, choose)
        names, said = [command.name for command in pair], [self.log(place).read_text() for place in range(2)]
        found = [f"half written: {told}" for told in half_written(folder)]
        now, alone = left_in(folder), [self.after(command) for command in pair]
        if codes == [0, 0]:
            wanted = [self.after(*pair), self.after(*reversed(pair))]
        else:
            wanted = [alone[place] for place in range(2) if codes[place] == 0] or [(codes, self.begun)]
            if not any(code == 0 for code in codes) and any(sole == [0] for sole, _ in alone):
                found.append(f"neither of them succeeds: {said[0][-300:]} {said[1][-300:]}")
        if not any(now == state for _, state in wanted):
            name = next(iter(sorted(n for n in now.keys() | wanted[0][1].keys() if now.get(n) != wanted[0][1].get(n))))
            found.append(f"{codes}: differs from one after the other in {name}")
        for name, code, words in zip(names, codes, said, strict=True):
            last = (words.strip().splitlines() or [""])[-1]
            if code not in (0, 2) or "Traceback" in words:
                found.append(f"{name}: exit code {code}: {words[-600:]}")
            elif code == 2 and (self.group.target not in last or "No such file" in last):
                found.append(f"{name}: the refusal does not name the target: {last}")
        if 2 not in codes:  # what a refused one had made before is kept for the next time
            found += [f"left over: {name}" for name in leftovers(folder)]
        return found

    @property
    def begun(self) -> dict[str, str]:
        return left_in(self.root / "begun" / self.group.name)


def left_in(folder: Path) -> dict[str, str]:
    """Return the sha256 of every result; of fitted times, whose last digits may differ, that they are there."""
    return {name: "" if name.endswith("tuned.json") else digest for name, digest in fingerprint(folder).items()}


def stopped_before(number: int) -> Choose:
    """Let the first run until its n-th rename, then the other to its end."""
    given = 0

    def choose(ready: list[int]) -> int:
        nonlocal given
        if 0 in ready and (given < number or ready == [0]):
            given += 1
            return 0
        return ready[-1]

    return choose


class Job(NamedTuple):
    """All ways to interleave one pair that are tried."""

    group: int
    first: Command
    second: Command
    root: Path
    most: int
    drawn: int
    seed: int


def do(job: Job) -> Row:
    """Return the row of one job; runs in a process of its own."""
    group = GROUPS[job.group]
    row = Row(f"{group.name}: {job.first.name}, {job.second.name}", "interleaved")
    scene = Scene(Path(tempfile.mkdtemp(dir=job.root)), group)
    (scene.root / "begun").symlink_to(job.root / "begun")
    pair, generator = (job.first, job.second), random.Random(f"{job.seed} {row.activity}")
    scene.after(job.first)
    ways = [stopped_before(number) for number in spaced(scene.renames[job.first.name], job.most)]
    for choose in [*ways, *[generator.choice] * job.drawn]:
        row.add([f"{row.activity}: {told}" for told in scene.findings(pair, choose)])
    shutil.rmtree(scene.root)
    return row


def begin(root: Path) -> None:
    """Make what commands start from: a run, pictures, weights of another project, and the targets that are there."""

    base, log = root / "base", root / "log.txt"

    def made() -> int:
        base.mkdir()
        os.chdir(base)
        activities.sources(base)
        (base / "source").rename("pictures")
        torch.save(sit_state(), "sit.pt")
        return cli.run([*TRAIN, "--out", "run"])

    assert end(child(made, log)) == 0, log.read_text()
    for group in GROUPS:
        there = root / "begun" / group.name
        shutil.copytree(base, there)
        if group.made is not None:
            command = group.made
            assert end(child(lambda c=command, t=there, g=group: c.run(t, g.target), log)) == 0, log.read_text()


def jobs(root: Path, most: int, drawn: int, seed: int, only: str, share: int) -> list[Job]:
    """Return the jobs of every ordered pair of each group; share: one of so many of them."""
    found = [
        Job(number, first, second, root, most, drawn, seed)
        for number, group in enumerate(GROUPS)
        for first in group.commands
        for second in group.commands
        if only in f"{group.name}: {first.name}, {second.name}"
    ]
    return found[seed % share :: share]


def main() -> int:
    """Return 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=0, help="renames of each command at which it is stopped; 0: all")
    parser.add_argument("--drawn", type=int, default=2, help="random interleavings of each pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=int, default=1, help="try one pair of so many, others by another seed")
    parser.add_argument("--only", default="", help="pairs with this in their names")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    rows, start = [], time.monotonic()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        begin(root)
        todo = jobs(root, asked.most, asked.drawn, asked.seed, asked.only, asked.share)
        with ProcessPoolExecutor(asked.workers, multiprocessing.get_context("fork")) as pool:
            for row in pool.map(do, todo):
                print(row, *(f"  found: {told}" for told in row.findings), sep="\n", flush=True)
                rows.append(row)
    print("", table(rows), f"{time.monotonic() - start:.0f} s, seed {asked.seed}", sep="\n")
    return int(any(row.findings for row in rows))


if __name__ == "__main__":
    import_eagerly()
    sys.exit(main())
