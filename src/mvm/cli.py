"""The `mvm` command. Errors name the option, the value and the remedy, and exit with code 2."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter, Token

import mvm

if TYPE_CHECKING:
    from mvm.recipes import SampleConfig

USAGE_ERROR = 2
INTERRUPTED = 130

app = App(
    name="mvm",
    version=mvm.__version__,
    help="Mean Velocity Matching: train, sample and compare generative models that are ODE and SDE at once.",
    help_format="plaintext",
)


def _whole(kind: type, tokens: Sequence[Token]) -> int:
    """Return a whole number; 2.5 is an error, not 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"'{tokens[0].value}' is not a whole number") from None


Whole = Annotated[int, Parameter(converter=_whole)]

# dotted options such as --train.lr, taken off the command line before it is parsed
Overrides = dict[str, str]


@app.command
def demo(*, out: Path = Path("runs/demo"), quick: bool = False, seed: Whole = 0) -> int:
    """Train on the embedded digits, sample with ODE and SDE, write OUT/report.html (about 3 minutes on 2 cores).

    Parameters
    ----------
    out
        Run directory; an earlier demo there is replaced when the new one is complete.
    quick
        A few seconds of everything, to see that it works; the digits will not be legible.
    seed
        Seed of the whole run.
    """
    from mvm.demo import demo as run_demo

    start = time.perf_counter()
    report = run_demo(out, quick=quick, seed=seed)
    print(f"wrote {report} in {time.perf_counter() - start:.0f} s; open it in a browser")
    return 0


@app.command
def train(
    recipe: str,
    /,
    *,
    out: Path | None = None,
    resume: bool = False,
    until: Whole | None = None,
    seed: Whole | None = None,
    device: str = "auto",
    overrides: Annotated[Overrides | None, Parameter(parse=False)] = None,
) -> int:
    """Train a recipe; any of its options can be changed as --section.option VALUE, e.g. --train.lr 3e-4.

    Parameters
    ----------
    recipe
        A shipped recipe (see: mvm recipes) or a .toml file.
    out
        Run directory; default runs/RECIPE.
    resume
        Continue the run in OUT from its newest checkpoint, bit for bit.
    until
        Pause at this step; --resume goes on.
    seed
        Seed of weights, data order and noise, instead of the recipe's.
    device
        cpu, cuda, or auto: cuda where there is one.
    """
    from mvm.model import choose_device
    from mvm.recipes import load_recipe, override
    from mvm.training.loop import train as run_training

    changes = dict(overrides or {}) | ({} if seed is None else {"seed": str(seed)})
    chosen = override(load_recipe(recipe), changes)
    folder = out or Path("runs") / chosen.name
    if resume and not (folder / "recipe.json").is_file():
        print(f"mvm: nothing to resume in {folder}; starting a new run there", file=sys.stderr)
    try:
        run_training(chosen, folder, resume=resume, until=until, device=choose_device(device))
    except KeyboardInterrupt:
        print("\nmvm: stopped; go on with the same command and --resume", file=sys.stderr)
        return INTERRUPTED
    steps = chosen.train.steps
    print(f"{folder} is at step {min(until or steps, steps)} of {steps}; sample: mvm sample {folder} --out grid.png")
    return 0


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--{option} {text}: whole numbers separated by commas are needed, e.g. 3,5") from None


def _interval(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--interval {text}: two numbers in [0, 1] are needed, e.g. 0.6,0.8") from None
    return low, high


def _settings(base: "SampleConfig", asked: Mapping[str, object], interval: str | None) -> "SampleConfig":
    """Return the recipe's settings with what was asked for; an option that would have no effect is an error."""
    given = {key: value for key, value in asked.items() if value is not None}
    if interval is not None:
        given["low"], given["high"] = _interval(interval)
    settings = replace(base, **given)
    adaptive = settings.solver == "adaptive"
    if interval is not None and settings.cfg == 1:
        raise ValueError(f"--interval {interval} acts on guidance; give its scale too, e.g. --cfg 1.5")
    if adaptive and "nfe" in given:
        raise ValueError(f"--nfe {given['nfe']}: the adaptive solver takes --tolerance and reports what it used")
    if "tolerance" in given and not adaptive:
        raise ValueError(f"--tolerance {given['tolerance']} belongs to --solver adaptive")
    return settings


@app.command
def sample(
    model: str,
    /,
    *,
    num: Whole = 16,
    nfe: Whole | None = None,
    solver: str | None = None,
    rho: float | None = None,
    cfg: float | None = None,
    interval: str | None = None,
    tolerance: float | None = None,
    classes: str = "",
    seed: Whole = 0,
    batch: Whole = 256,
    device: str = "auto",
    out: Path = Path("samples.png"),
) -> int:
    """Sample images from a run or a shipped model. Settings not given are those of its recipe.

    Parameters
    ----------
    model
        A run directory, or the name of a shipped model.
    num
        How many images.
    nfe
        Evaluations of the network per image.
    solver
        adams (default), sa, heun, euler, euler-maruyama or adaptive.
    rho
        Noise of the reverse process: 0 is the ODE, 1 the paper's SDE, 0.75 its best.
    cfg
        Classifier-free guidance scale; 1 is none.
    interval
        Where guidance acts, LOW,HIGH in log-SNR progress, e.g. 0.6,0.8.
    tolerance
        Of each step of the adaptive solver, in place of nfe; default 1e-5.
    classes
        Class numbers to go round, e.g. 3,5; all when empty.
    seed
        Image i has seed SEED + i: the same picture whatever NUM and BATCH.
    batch
        Images at a time.
    device
        cpu, cuda, or auto: cuda where there is one.
    out
        X.png is one grid; X.npz and X.npy are uint8 NHWC; X.zip or a folder holds PNG files.
    """
    from mvm.generate import check_output, cycle_labels, generate_all, write_images
    from mvm.model import choose_device, load
    from mvm.noise import as_seeds

    check_output(out)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    loaded = load(model).to(choose_device(device))
    asked = {"nfe": nfe, "solver": solver, "rho": rho, "cfg": cfg, "tolerance": tolerance}
    settings = _settings(loaded.recipe.sample, asked, interval)
    labels = cycle_labels(_numbers("classes", classes), num, loaded.num_classes)
    made = generate_all(loaded, labels, as_seeds(range(seed, seed + num), num), settings, batch=batch)
    write_images(out, made.images, labels)
    print(f"wrote {num} images to {out}; {settings.solver}, {made.nfe} evaluations, {made.passes} network passes each")
    return 0


@app.command
def verify(*, json_file: Annotated[Path | None, Parameter(name="--json")] = None) -> int:
    """Check the mathematics on exact oracles, on the CPU, in under a minute; exit code 1 if a check fails.

    Parameters
    ----------
    json_file
        Write the results there as well.
    """
    from mvm.files import write_text
    from mvm.verify import as_json
    from mvm.verify import verify as run_checks

    results = run_checks()
    for check in results:
        sign = ">=" if check.at_least else "<="
        print(f"{'pass' if check.passed else 'FAIL'}  {check.value:10.3g} {sign} {check.limit:<8.3g} {check.name}")
    summary = as_json(results)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(json_file, json.dumps(summary, indent=2) + "\n")
    failed = sum(not check.passed for check in results)
    print(f"{len(results) - failed} of {len(results)} checks passed")
    return 0 if summary["passed"] else 1


@app.command
def recipes(name: str = "", /) -> int:
    """List the shipped recipes, or show one with every option and its value.

    Parameters
    ----------
    name
        The recipe to show.
    """
    from mvm.recipes import load_recipe, options, shipped

    if name:
        shown = load_recipe(name)
        print(f"# {shown.name}: {shown.description}")
        for option, value in options(shown).items():
            if option not in ("name", "description"):
                print(f"--{option} {value}")
        return 0
    for known in shipped():
        print(f"{known:20s} {load_recipe(known).description}")
    return 0


def split_overrides(tokens: list[str]) -> tuple[list[str], Overrides]:
    """Return the command line without its dotted options, and those: {"train.lr": "3e-4"}."""
    rest: list[str] = []
    found: Overrides = {}
    waiting = iter(tokens)
    for token in waiting:
        name, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--") or "." not in name:
            rest.append(token)
            continue
        value = value if equals else next(waiting, None)
        if value is None:
            raise ValueError(f"--{name} needs a value")
        found[name] = value
    return rest, found


def run(tokens: list[str]) -> int:
    """Return the exit code of a command line."""
    options: dict[str, object] = {"exit_on_error": False, "print_error": False}
    try:
        rest, overrides = split_overrides(tokens)
        if overrides and rest[:1] != ["train"]:
            raise ValueError(f"unknown option '--{next(iter(overrides))}'; dotted options belong to: mvm train")
        command, bound, _ = app.parse_args(rest, **options)  # ty: ignore[invalid-argument-type]
        if overrides:
            bound.arguments["overrides"] = overrides
        return int(command(*bound.args, **bound.kwargs) or 0)
    except (CycloptsError, ValueError, FloatingPointError, OSError) as error:
        print(f"mvm: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("\nmvm: stopped", file=sys.stderr)
        return INTERRUPTED


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))
