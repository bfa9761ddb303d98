"""Do the tests see a wrong line? `python tools/mutants.py` breaks one at a time and runs the fast tests that should.

A mutant is a file of src/mvm, a text that stands in it exactly once, what to put there, and tests that must then fail.
Every mutant is made in a temporary copy of src that the tests import; the work tree is never touched. First the tests
are run on a copy as it is: they must pass. Exit code: 0 all killed, 1 some survived, 2 a mutant is no longer
of the code (its text is missing or there twice) or its tests do not run.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
# pytest and torch are imported once; each run of the tests is a fork of that process, which knows nothing of mvm
WORLD = multiprocessing.get_context("forkserver")
WORLD.set_forkserver_preload(["torch", "numpy", "scipy.stats", "scipy.integrate", "hypothesis", "pytest"])
LONGEST = 600  # seconds; a mutant that hangs is killed, too


class Mutant(NamedTuple):
    """A wrong line: `old` -> `new` in src/mvm/`file`, which `tests` (under tests/) must see."""

    file: str
    old: str
    new: str
    tests: str


def of(file: str, tests: str, *lines: tuple[str, str]) -> list[Mutant]:
    """Return the mutants of one file that the same tests must see."""
    return [Mutant(file, old, new, tests) for old, new in lines]


MUTANTS = [
    *of(
        "path/schedule.py",
        "path/test_schedule.py",
        ("return torch.sqrt(as_time(t) / self.T)", "return torch.sqrt(as_time(t)) / self.T"),
        ("torch.full_like(as_time(t), -1 / self.T)", "torch.full_like(as_time(t), -1.0)"),
        ("torch.log1p(-s) - 0.5 * torch.log(s)", "torch.log1p(-s) - torch.log(s)"),
        ("alpha**2 + 4 * sigma**2", "alpha**2 + 2 * sigma**2"),
        ("- 2 * self.sigma(t) * level * self.alpha_rate(t)", "+ 2 * self.sigma(t) * level * self.alpha_rate(t)"),
        (".clamp(max=(self.beta_min + self.beta_max) / 2)", ""),
        ("self.beta_min * t + 0.5 *", "self.beta_min * t +"),
    ),
    *of(
        "path/convert.py",
        "path/test_convert.py",
        ("at.sigma * x - at.alpha * at.T**0.5 * u", "at.sigma * x + at.alpha * at.T**0.5 * u"),
        ("- pair.eps / at.T**0.5", "- pair.eps / at.T"),
        ("(at.alpha * x - at.sigma * v) / at.of(at.schedule.norm(at.t) ** 2)", "(at.alpha * x - at.sigma * v)"),
        ("at.alpha * sigma_rate - at.sigma * alpha_rate", "at.alpha * sigma_rate + at.sigma * alpha_rate"),
        ("self.refuse(self.alpha == 0,", "self.refuse(self.alpha < 0,"),
    ),
    *of(
        "path/perturb.py",
        "path/test_perturb.py",
        ("- 0.5 * math.log(self.shift_dimension", "- math.log(self.shift_dimension"),
        ("t = schedule.t_from_lam(schedule.lam(t) - 0.5", "t = schedule.t_from_lam(schedule.lam(t) + 0.5"),
        ("return t.clamp(*(end * share for share in INSIDE))", "return t"),
        ("self.t_min + p * (1 - self.t_min)", "self.t_min + p"),
        ("noise.normal(seeds, noise.TRAIN,", "noise.normal(seeds, noise.TIME,"),
        ("t = end * torch.sigmoid(", "t = torch.sigmoid("),
    ),
    *of(
        "path/schedule.py",
        "path/test_field.py",
        (
            "target.norm(equal_snr_time(t, source, target)) / source.norm(t)",
            "source.norm(t) / target.norm(equal_snr_time(t, source, target))",
        ),
    ),
    *of(
        "solver/table.py",
        "solver/test_table.py",
        ("a = (1 + rho**2) / 2\n    return", "a = (1 + rho) / 2\n    return"),
        ("(a * r**-a + (1 - a) * r ** (1 - a))", "(a * r**-a - (1 - a) * r ** (1 - a))"),
        ("1 + rho**2 * (1 - r) / (1 + r)", "1 + rho**2 * (1 - r)"),
        ("std = (-t * np.expm1(-2 * tau2 * step)) ** 0.5", "std = (-t * np.expm1(-tau2 * step)) ** 0.5"),
        ('_piecewise(s, t, rho, s if tau == "start" else t)', "_piecewise(s, t, rho, t)"),
        ("past[: corrector - 1]", "past[:corrector]"),
    ),
    *of(
        "solver/base.py",
        "solver/test_adams.py solver/test_gradients.py",
        ("combine(before.decay, state.anchor, before.correct", "combine(before.decay, state.x, before.correct"),
    ),
    *of(
        "solver/base.py",
        "solver/test_adams.py solver/test_sampling.py",
        ("before.correct, history, state.kick)", "before.correct, history, None)"),
    ),
    *of(
        "solver/base.py",
        "solver/test_shift.py",
        ("(r - least) / (1 - r / highest)", "(r - least)"),
        ("if self.shift or own == 1 else", "if own == 1 else"),
    ),
    *of(
        "solver/variants.py",
        "solver/test_shift.py",
        ("(shift - 1) * least, 0.0), 0.0)", "shift * least, 0.0), 0.0)"),
    ),
    *of(
        "solver/adams.py",
        "solver/test_adams.py",
        ("ODE_C / max(nfe, MANY)", "ODE_C / nfe"),
        ("3 if nfe <= FEW else 1", "3"),
        ("max(SPREAD * size**0.5, SMALLEST_SPREAD)", "SPREAD * size**0.5"),
        ("max(END_B * last, END_FLOOR)", "END_B * last"),
    ),
    *of(
        "solver/variants.py",
        "solver/test_grid.py",
        ("times[0], times[-1] = start, end", "times[-1] = end"),
        ("np.linspace(first, last, nfe)", "np.linspace(first, last, nfe + 1)[:-1]"),
    ),
    *of(
        "solver/adams.py",
        "solver/test_grid.py",
        ("1 + np.sqrt(1 + 4 * r**2)", "1 + np.sqrt(1 + 2 * r**2)"),
    ),
    *of(
        "solver/onestep.py",
        "solver/test_grid.py",
        ("share ** (1 / schedule.sigma_power)", "share ** schedule.sigma_power"),
    ),
    *of(
        "solver/guidance.py",
        "solver/test_guidance.py",
        ("wrap(on_schedule(self.weak, schedule))", "wrap(self.weak)"),
        ("extrapolate(self.weak(x, t, condition), base(x, t, condition), self.scale)", "base(x, t, condition)"),
        ("weak + scale * (strong - weak)", "strong + scale * (strong - weak)"),
        (".clamp(0, 1)", ""),
        ("p <= self.high + _TOLERANCE", "p < self.high - _TOLERANCE"),
        ("extrapolate(inner, outer, self.scale)", "extrapolate(outer, inner, self.scale)"),
        ("for t in times if t > 0)", "for t in times)"),
    ),
    *of(
        "solver/sampling.py",
        "solver/test_sampling.py",
        ("x0.to(torch.promote_types(x0.dtype, x.dtype))", "x0"),
    ),
    *of(
        "solver/sampling.py",
        "solver/test_solvers.py -k 'schedule or unscaled'",
        ("return mapped, x * float(", "return mapped, x / float("),
        ("return evaluate(x * scale, float(", "return evaluate(x, float("),
    ),
    *of(
        "solver/sampling.py",
        "solver/test_sampling.py",
        ("counter_noise.STEP + index", "counter_noise.STEP"),
    ),
    *of(
        "solver/sampling.py",
        "solver/test_dopri5.py",
        ("meter.evaluations - plan.uncounted", "meter.evaluations"),
    ),
    *of(
        "solver/variants.py",
        "solver/test_sampling.py -k 'noise or warning'",
        ("NOISE_NFE * rho**2)", "NOISE_NFE * rho)"),
    ),
    *of(
        "solver/onestep.py",
        "solver/test_onestep.py",
        ("float(schedule.diffusion(t)) / (2 * sigma)", "float(schedule.diffusion(t)) / sigma"),
        ("at ** (1 - p) / p", "at ** (1 - p)"),
        ("(state.x + predicted + end) / 2", "state.x / 2 + end"),
        ("p = schedule.sigma_power * (1 + rho**2)", "p = schedule.sigma_power"),
    ),
    *of(
        "solver/adaptive.py",
        "solver/test_sampling.py -k adaptive",
        ("(1 / power - 1) / power", "(1 / power - 1)"),
    ),
    *of(
        "solver/adaptive.py",
        "solver/test_dopri5.py",
        ("min(max(float(c) ** (1 / power), self.t_min), 1.0)", "float(c) ** (1 / power)"),
    ),
    *of(
        "solver/peers.py",
        "solver/test_peers.py",
        ("moment[k - 1] = H * (1 - moment[k]) / k", "moment[k - 1] = H * (1 - moment[k]) / (k + 1)"),
        ("taken[2] *= curvature", "taken[2] *= 1"),
        ('(H if slope == "bh1" else taken[0]) / 2', '(taken[0] if slope == "bh1" else H) / 2'),
        ("min(self.corrector - 1, highest)", "self.corrector - 1"),
        ("(23 / 12, -16 / 12, 5 / 12)", "(23 / 12, -15 / 12, 4 / 12)"),
        ("weights(-h, [", "weights(h, ["),
    ),
    *of(
        "objective/weights.py",
        "objective/test_weights.py",
        ("Pair(-ratio, torch.ones_like(ratio))", "Pair(ratio, torch.ones_like(ratio))"),
        ("return per_noise(kind, t, schedule) ** -2", "return per_noise(kind, t, schedule) ** 2"),
        ("- 2 * variance * schedule.alpha_rate(t)", "- variance * schedule.alpha_rate(t)"),
        ("Pair(-sigma, alpha)", "Pair(sigma, alpha)"),
    ),
    *of(
        "objective/matching.py",
        "objective/test_matching.py",
        ("< self.config.label_drop", "> self.config.label_drop"),
        ("self.config.inner_weight * inner", "inner"),
        ("time = network_time(network.time, noised.t, self.schedule)", "time = noised.t"),
    ),
    *of(
        "objective/matching.py",
        "objective/test_loss.py",
        ("law.quantile(share, schedule)", "schedule.end * share"),
        ("eps = torch.randn(x0.shape, dtype", "eps = 2 * torch.randn(x0.shape, dtype"),
    ),
    *of(
        "path/field.py",
        "solver/test_sampling.py -k schedule",
        ("return own or MEAN_VELOCITY", "return MEAN_VELOCITY"),
        ("if own is not None and own != schedule", "if own is None and own != schedule"),
    ),
    *of(
        "objective/matching.py",
        "objective/test_matching.py objective/test_repa.py",
        ("total + self.repa.weight * repa", "total + repa"),
    ),
    *of(
        "objective/repa.py",
        "objective/test_repa.py",
        ("x - gamma * x.mean(1, keepdim=True)", "x - gamma * x.mean(2, keepdim=True)"),
        ("projected, target: 1 - cosine_similarity", "projected, target: -cosine_similarity"),
        ("step < self.stop", "step <= self.stop"),
    ),
    *of(
        "noise.py",
        "test_noise.py",
        ("(words.double() + 0.5) *", "words.double() *"),
        ("(seeds & _MASK, (seeds >> 32) & _MASK)", "((seeds >> 32) & _MASK, seeds & _MASK)"),
        ("torch.sqrt(-2 * torch.log(u[..., 0]))", "torch.sqrt(-2 * torch.log(u[..., 1]))"),
        ("((high & 0x7FFFFFFF) << 32) | low", "((high & 0x7FFFFFFF) << 31) | low"),
        ("return normal(seeds, INITIAL, shape, dtype)", "return normal(seeds, TRAIN, shape, dtype)"),
    ),
    *of(
        "likelihood.py",
        "test_likelihood.py",
        ("per_x0 = -(1 + c * c) / c", "per_x0 = -(1 - c * c) / c"),
        ("state[0].numel() / c + per_x0 * x0_divergence", "state[0].numel() / c - per_x0 * x0_divergence"),
        ("noise.HUTCHINSON + next(evaluation)", "noise.HUTCHINSON"),
        ("(images.double() + offset) / GREY_SCALE", "images.double() / GREY_SCALE"),
        ("math.log(GREY_SCALE / scale)", "math.log(GREY_SCALE)"),
        ("math.log(std * math.sqrt(2 * math.pi))", "math.log(math.sqrt(2 * math.pi))"),
    ),
    *of(
        "network/layers.py",
        "network/test_layers.py network/test_dit.py network/test_dropout.py",
        ("* (1 + scale) + shift", "* scale + shift"),
        ("scale * rates", "rates"),
        ("mask * (1 + scale) - 1", "mask * scale"),
        ("torch.cat((-sin, sin), dim=-1)", "torch.cat((sin, -sin), dim=-1)"),
        ("axis < count % len(grid)", "axis > count % len(grid)"),
        (
            "torch.cat(axis_angles(grid, head_width // 2, base)",
            "torch.cat(axis_angles(grid, head_width // 2, base)[::-1]",
        ),
        ("1, *(3 + 2 * axis for axis in axes)", "1, *(3 + 2 * axis for axis in axes[::-1])"),
    ),
    *of(
        "network/dit.py",
        "network/test_dropout.py",
        ("drawn >= self.dropout", "drawn < self.dropout"),
    ),
    *of(
        "network/dit.py",
        "network/test_dit.py",
        ("self.level(level) + self.label(condition)", "self.level(level)"),
    ),
    *of(
        "network/layers.py",
        "network/test_dit.py",
        ("len(self) + 1 - number", "len(self) - number"),
    ),
    *of(
        "optim/ema.py",
        "optim/test_optim_ema.py",
        ("(1 + step) / (10 + step)", "(1 + step) / (11 + step)"),
        ("1 - decay(step)", "decay(step)"),
    ),
    *of(
        "optim/power_ema.py",
        "optim/test_power_ema.py",
        ("(step / (step + 1)) ** (gamma + 1)", "(step / (step + 1)) ** gamma"),
    ),
    *of(
        "optim/optimizers.py",
        "optim/test_optim_ema.py",
        ("1 - momentum)", "momentum)"),
        ("rate * MATCH * math.sqrt(max(", "rate * MATCH * math.sqrt(min("),
        ('1 - rate * group["weight_decay"]', '1 - group["weight_decay"]'),
    ),
    *of(
        "optim/optimizers.py",
        "optim/test_muon.py -k split_steps",
        ('max(rows // group.get("parts", 1), columns)', "max(rows, columns)"),
    ),
    *of(
        "store.py",
        "optim/test_muon.py -k balanced",
        ("-work[number]", "work[number]"),
    ),
    *of(
        "optim/optimizers.py",
        "optim/test_optim_ema.py",
        ("config.lr * (step + 1) / config.warmup", "config.lr * step / config.warmup"),
        ("(1 - math.cos(math.pi * share)) / 2", "1 - math.cos(math.pi * share / 2)"),
        ('if p.ndim < 2], "weight_decay": 0.0', 'if p.ndim < 2], "weight_decay": config.weight_decay'),
    ),
]


class Verdict(NamedTuple):
    """What became of a mutant: "killed" by the test told, "survived", or an "error"."""

    fate: str
    told: str
    seconds: float


def broken(mutant: Mutant, source: Path) -> str:
    """Return the text of the mutant's file with its line broken; a ValueError where the line is not there once."""
    path = source / "mvm" / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        raise ValueError(
            f"{mutant.file}: {mutant.old!r} stands there {text.count(mutant.old)} times, not once; "
            "give the mutant the text that the code has now"
        )
    return text.replace(mutant.old, mutant.new)


def words(tests: str) -> list[str]:
    """Return pytest's arguments for `tests`: files under tests/, then perhaps -k '...'."""
    files, _, picked = tests.partition(" -k ")
    return [f"tests/{file}" for file in files.split()] + (["-k", picked.strip("'")] if picked else [])


def child(source: Path, arguments: list[str], told: Path) -> None:
    """Run pytest on a copy of src, in a process of its own; its output goes to a file."""
    with told.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}  # of processes that tests start
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(source))
    os.chdir(ROOT)
    import pytest

    code = pytest.main(["-x", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(int(code))


def judge(source: Path, arguments: list[str]) -> Verdict:
    """Run tests on a copy of src."""
    told, begun = source.parent / f"{source.name}.txt", time.monotonic()
    process = WORLD.Process(target=child, args=(source, arguments, told))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        return Verdict("killed", f"no end after {LONGEST} s", LONGEST)
    seconds, text = time.monotonic() - begun, told.read_text(encoding="utf-8", errors="replace")
    if process.exitcode == 0:
        return Verdict("survived", "", seconds)
    failed = re.search(r"^FAILED (\S+)", text, re.M)
    if process.exitcode == 1 and failed:
        return Verdict("killed", failed[1].removeprefix("tests/"), seconds)
    return Verdict("error", text.strip()[-300:], seconds)


def tried(mutant: Mutant, source: Path) -> Verdict:
    """Break the copy, run the mutant's tests, and make the copy whole for the next one."""
    path = source / "mvm" / mutant.file
    whole, wrong = path.read_text(encoding="utf-8"), broken(mutant, source)
    path.write_text(wrong, encoding="utf-8")
    try:
        return judge(source, words(mutant.tests))
    finally:
        path.write_text(whole, encoding="utf-8")


def run(mutants: list[Mutant], jobs: int) -> list[Verdict]:
    """Return a verdict for each mutant, `jobs` at once, each in its own copy of src; every one is told as it falls."""
    verdicts: dict[int, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copies.put(Path(shutil.copytree(ROOT / "src", Path(folder) / str(number))))

        def one(mutant: Mutant) -> Verdict:
            source = copies.get()
            try:
                return tried(mutant, source)
            finally:
                copies.put(source)

        waiting = {pool.submit(one, mutant): number for number, mutant in enumerate(mutants)}
        for done in tqdm(as_completed(waiting), total=len(mutants), desc="mutants", unit="mutant"):
            verdicts[waiting[done]] = done.result()
            tqdm.write(line(mutants[waiting[done]], done.result()))
    return [verdicts[number] for number in range(len(mutants))]


def unbroken(mutants: list[Mutant]) -> list[str]:
    """Return what all mutants' tests are, in few runs of pytest: whole files in one, and each that picks some."""
    files = {file for m in mutants if " -k " not in m.tests for file in m.tests.split()}
    picked = {m.tests for m in mutants if " -k " in m.tests and not set(m.tests.partition(" -k ")[0].split()) <= files}
    return ([" ".join(sorted(files))] if files else []) + sorted(picked)


def line(mutant: Mutant, verdict: Verdict) -> str:
    """Return a mutant's fate in a line."""
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return f"{verdict.fate:8} {verdict.seconds:5.1f} s  {mutant.file}: {old} -> {new}  [{verdict.told}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="only mutants whose file begins so, e.g. solver or path/convert.py")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--trust", action="store_true", help="do not run the tests on the code as it is first")
    parser.add_argument("--check", action="store_true", help="only see that every mutant is of the code; run nothing")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.only or m.file.startswith(tuple(options.only))]
    try:
        for mutant in mutants:
            broken(mutant, ROOT / "src")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.check or not mutants:
        print(f"{len(mutants)} mutants, all of the code")
        return 0 if mutants else 2
    begun = time.monotonic()
    for tests in tqdm([] if options.trust else unbroken(mutants), desc="unbroken", unit="run"):
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(Path(shutil.copytree(ROOT / "src", Path(folder) / "whole")), words(tests))
        if verdict.fate != "survived":
            print(f"{tests}: fails on code that is whole: {verdict.told}", file=sys.stderr)
            return 2
    fates = [verdict.fate for verdict in run(mutants, options.jobs)]
    print(f"{fates.count('killed')} of {len(mutants)} killed in {time.monotonic() - begun:.0f} s")
    return 2 if "error" in fates else int("survived" in fates)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
