"""python -m tests.faults.load: the page under many visitors, memory over many requests, memory over many images.

Everything over HTTP on loopback, as a browser does it, with the shipped digits model; nothing is left behind.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from tests.faults.visitors import FULL, Answer, Page, Visitor, served

from mvm.app.form import SampleForm

SEATS = 8  # as many as `mvm app` has
GROWTH = 25  # MiB that the requests after the first ones, or ten times as many images, may add
TRY_AGAIN = 0.2  # seconds
SOON = 5.0  # seconds within which seats are free again
FOREIGN = {"origin": "https://evil.example"}


def forms(count: int, nfe: int = 4) -> list[SampleForm]:
    """Return requests that all differ in their pictures, and differ in everything that a page lets one choose."""
    found = []
    for place in range(count):
        draw = random.Random(place)
        options = {"solver": draw.choice(["adams", "sa", "heun"]), "rho": draw.choice([0.5, 1.0]), "nfe": nfe}
        options |= {"cfg": draw.choice([1.0, 2.0]), "images": draw.randint(1, 6)}
        found.append(SampleForm("digits", (place % 10,), seed=str(1000 * place), **options))
    return found


def client() -> httpx.AsyncClient:
    """Return a client that keeps connections for 1 s: the server ends them after 5, perhaps just when one is reused."""
    return httpx.AsyncClient(timeout=1200, limits=httpx.Limits(max_connections=None, keepalive_expiry=1))


@dataclass(frozen=True)
class Crowd:
    """What visitors got who all came at once: right answers, refusals in words, anything else; seconds until all left.

    tries: requests until everybody was served.
    """

    right: int
    refused: int
    wrong: int
    tries: int
    seconds: float


async def lone_answers(page: Page, asked: Sequence[SampleForm]) -> list[Answer]:
    """Return what each request gets from a page that serves nobody else."""
    async with client() as line:
        return [await Visitor(page, line).get(form) for form in asked]


async def crowd(page: Page, asked: Sequence[SampleForm], expected: Sequence[Answer], *, again: bool = True) -> Crowd:
    """Let all visitors ask at once, those who are refused again and again, unless told not to; count what they get."""

    async def visit(form: SampleForm, right: Answer) -> list[str]:
        visitor, found = Visitor(page, line), []
        while not found or (again and found[-1] == "refused"):
            answer = await visitor.get(form)
            full = FULL in answer["mvm-problem"]
            found.append("refused" if full else "right" if answer == right else "wrong")
            await asyncio.sleep(TRY_AGAIN * full)
        return found

    start = time.perf_counter()
    async with client() as line:
        found = await asyncio.gather(*(visit(form, right) for form, right in zip(asked, expected, strict=True)))
    first, last = [one[0] for one in found], [one[-1] for one in found]
    wrong = first.count("wrong") + (last.count("wrong") if "wrong" not in first else 0)
    seconds = time.perf_counter() - start
    return Crowd(last.count("right"), first.count("refused"), wrong, sum(map(len, found)), seconds)


async def leave_in_the_middle(page: Page, count: int) -> None:
    """Let visitors ask for much, see the first of it, and close the window."""

    async def visit(place: int) -> None:
        visitor = Visitor(page, line)
        await visitor.ask(SampleForm("digits", seed=str(place), nfe=100, images=16))
        async for message in visitor.told():
            if message["msg"] == "process_generating":
                return

    async with client() as line:
        await asyncio.gather(*(visit(place) for place in range(count)))


async def silent(page: Page, count: int) -> float:
    """Let visitors ask for much and never listen; return how many seconds later another one is served."""
    async with client() as line:
        await asyncio.gather(
            *(Visitor(page, line).ask(SampleForm("digits", seed=str(i), nfe=100, images=16)) for i in range(count))
        )
        start = time.perf_counter()
        while FULL in (await Visitor(page, line).get(SampleForm("digits", nfe=1, images=1)))["mvm-problem"]:
            await asyncio.sleep(TRY_AGAIN)
    return time.perf_counter() - start


async def flood(page: Page, count: int) -> list[Answer]:
    """Let one visitor ask so often that nothing was answered before; return the answers, oldest first."""
    async with client() as line:
        visitor = Visitor(page, line)
        asked = forms(count)
        events = await asyncio.gather(*(visitor.ask(form, number) for number, form in enumerate(asked, 1)))
        found = await visitor.answers(set(events))
        return [found[event] for event in events]


@dataclass(frozen=True)
class Memory:
    """MiB and open files of the page's process after the first requests and after all, and requests in a second."""

    before: float
    after: float
    rate: float
    files_before: int
    files_after: int


async def memory(page: Page, requests: int, warm: int, visitors: int = SEATS) -> Memory:
    """Ask many times, a few visitors at once, each request a visitor of its own; return what it does to memory.

    Of ten requests seven are answered, one is absurd, one has no listener, one sends a picture from elsewhere.
    """

    async def work(count: int) -> None:
        for place in range(count):
            visitor, form = Visitor(page, line), SampleForm("digits", seed=str(place), images=1, nfe=2)
            if place % 10 == 7:
                answer = await visitor.get(replace(form, nfe=1e308))
                assert "NFE is 1e+308; it must be" in answer["mvm-problem"], answer
            elif place % 10 == 8:
                await visitor.ask(form)
            elif place % 10 == 9:
                reply = await line.post(f"{page.address}picture", content=bytes(1 << 20), headers=FOREIGN)
                assert reply.status_code == 403
            else:
                answer = await visitor.get(form)
                assert not answer["mvm-problem"], answer["mvm-problem"]
                assert "mvm-save" in answer["mvm-sde"]

    async def spread(count: int) -> None:
        await asyncio.gather(*(work(count // visitors) for _ in range(visitors)))

    async with client() as line:
        await spread(warm)
        before, files, start = page.resident, page.files, time.perf_counter()
        await spread(requests)
        rate = requests // visitors * visitors / (time.perf_counter() - start)
        return Memory(before, page.resident, rate, files, page.files)


# the command, then the most memory that its process ever had
MEASURED = (
    "import re, sys; from mvm.cli import run; code = run(sys.argv[1:]);"
    "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(code)"
)


def sampling_peak(num: int, out: Path) -> tuple[float, float]:
    """Return the peak memory of `mvm sample digits` in MiB, and its seconds."""
    words = ["sample", "digits", "-n", str(num), "--nfe", "2", "--device", "cpu", "--out", str(out)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1024, time.perf_counter() - start


def report(words: str, good: bool) -> bool:
    """Print a line; return whether it is a good one."""
    print(f"{'good' if good else 'BAD '}  {words}", flush=True)
    return good


def crowds(count: int) -> list[bool]:
    """Fill a page of few seats and one of many; return what was good."""
    good, asked = [], forms(count)
    for seats in (SEATS, count):
        with served(seats) as page:
            expected = asyncio.run(lone_answers(page, asked))  # before anybody may sit in the way of it
            found = asyncio.run(crowd(page, asked, expected))
            words = f"{count} visitors at once, {seats} seats: {found.right} got their own pictures after "
            words += f"{found.tries} requests and {found.seconds:.1f} s, {found.refused} were refused first, "
            good.append(
                report(
                    f"{words}{found.wrong} got anything else",
                    found.right == count and not found.wrong and bool(found.refused) == (seats < count),
                )
            )
            asyncio.run(leave_in_the_middle(page, seats))
            after = asyncio.run(crowd(page, asked[:1], expected[:1]))
            good.append(report(f"after {seats} visitors left in the middle: {after.seconds:.1f} s", after.right == 1))
            free = asyncio.run(silent(page, 4 * count))
            good.append(report(f"{4 * count} requests that nobody listens to: served after {free:.1f} s", free < SOON))
            many = 2 * count  # more than gradio has threads
            answers = asyncio.run(flood(page, many))
            last = asyncio.run(lone_answers(page, forms(many)[-1:]))[0]
            good.append(report(f"{many} requests of one visitor at once: the last is answered", answers[-1] == last))
    return good


def many_requests(count: int) -> list[bool]:
    """Ask a page many times; return whether its memory stays."""
    with served(SEATS) as page:
        found = asyncio.run(memory(page, count, warm=max(400, count // 5)))  # until gradio keeps as many as it may
    words = f"{count} requests: {found.rate:.1f} a second, {found.before:.0f} MiB before, {found.after:.0f} MiB after, "
    words += f"{found.files_before} open files before, {found.files_after} after"
    flat = found.after - found.before < GROWTH and found.files_after - found.files_before <= SEATS
    return [report(words, flat)]


def many_images(count: int) -> list[bool]:
    """Sample a tenth and all of the images into each kind of set; return whether memory stays."""
    good = []
    for name in ("set.npz", "set"):
        with tempfile.TemporaryDirectory() as folder:
            few, _ = sampling_peak(count // 10, Path(folder) / f"few-{name}")
            all_, seconds = sampling_peak(count, Path(folder) / name)
        kind = Path(name).suffix or "a folder"
        words = f"{count} images into {kind}: {seconds:.0f} s, peak {all_:.0f} MiB"
        good.append(report(f"{words}; of {count // 10} images {few:.0f} MiB", all_ - few < GROWTH))
    return good


def main() -> int:
    """Return 0 where all was good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--images", type=int, default=50_000)
    asked = parser.parse_args()
    good = [*crowds(asked.visitors), *many_requests(asked.requests), *many_images(asked.images)]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
