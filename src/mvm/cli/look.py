"""Commands that show: demo, verify, recipes, options, report, app, bench."""

import secrets
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from mvm.cli.app import (
    INPUT,
    JUDGE,
    MEASUREMENT,
    OUTPUT,
    SAMPLE,
    SERVER,
    START,
    TRAIN,
    TRAINING,
    Device,
    Dotted,
    Download,
    JsonFile,
    SamplerOptions,
    Whole,
    command,
    json_writer,
    on_device,
    say_from_first,
)
from mvm.options import at_least, between, closest, needs

MOST_PORT = 65_535


@command(
    START,
    "mvm demo  # 2 to 4 minutes on 2 cores",
    "mvm demo --quick --out runs/quick  # about a minute, a check",
)
def demo(
    *,
    out: Annotated[Path, OUTPUT] = Path("runs/demo"),
    quick: Annotated[bool, TRAINING] = False,
    seed: Annotated[Whole, TRAINING] = 0,
) -> int:
    """Train on the embedded digits, sample as ODE and SDE, and write a report (2 to 4 minutes on 2 cores).

    Parameters
    ----------
    out
        Run directory; the report is OUT/report.html. An earlier demo there is replaced once the new one is complete.
    quick
        Do a little of everything in about a minute, as a check; the digits will not be legible.
    seed
        Seed of the whole run.
    """
    from mvm.demo import demo as run_demo

    start = time.perf_counter()
    report = run_demo(out, quick=quick, seed=seed)
    print(f"wrote {report} in {time.perf_counter() - start:.0f} s; open it in a browser")
    return 0


@command(
    JUDGE,
    "mvm verify  # check the installation",
    "mvm verify --json checks.json  # store the results",
)
def verify(*, json_file: JsonFile = None) -> int:
    """Check the mathematics on exact oracles, on a CPU in under a minute.

    Exit code 1 if a check fails.
    """
    from mvm.verify import as_json
    from mvm.verify import verify as run_checks

    write, results = json_writer(json_file), run_checks()
    for check in results:
        sign = ">=" if check.at_least else "<="
        print(f"{'pass' if check.passed else 'FAIL'}  {check.value:10.3g} {sign} {check.limit:<8.3g} {check.name}")
    summary = as_json(results)
    write(summary)
    failed = sum(not check.passed for check in results)
    print(f"{len(results) - failed} of {len(results)} checks passed")
    return 0 if summary["passed"] else 1


@command(
    TRAIN,
    "mvm recipes  # list the shipped recipes",
    "mvm recipes show cifar10  # cost and options of one",
    "mvm recipes show cifar10 > mine.toml  # a recipe to change",
)
def recipes(*words: str) -> int:
    """List the shipped recipes, or show what one costs and what its options mean.

    The page of a recipe is a TOML file that `mvm train` takes.

    Parameters
    ----------
    words
        show NAME, or NAME alone: a shipped recipe, a .toml file or RUN/recipe.json. Default: list the shipped recipes.
    """
    from mvm.recipes import load_recipe, shipped
    from mvm.recipes.page import page

    if words == ("show",):
        raise ValueError("mvm recipes show needs a name; for the names see: mvm recipes")
    name, *rest = words[1:] if words[:1] == ("show",) else words or [""]
    if rest:
        raise ValueError(f"mvm recipes {' '.join(words)}: give one recipe at a time; see: mvm recipes")
    if name:
        print(page(name))
        return 0
    width = max(map(len, shipped()))
    for known in shipped():
        print(f"{known:{width}s} {load_recipe(known).description}")
    return 0


@command(
    TRAIN,
    "mvm options learning rate  # find options by words",
    "mvm options --recipe runs/a/recipe.json  # all options of a run",
)
def options(*pattern: str, recipe: Annotated[str, INPUT] = "cifar10") -> int:
    """List the options of a recipe, with values and meanings: all, or those found by words.

    `mvm train` and `mvm bench` take them. Exit code 1 if nothing is found.

    Parameters
    ----------
    pattern
        Words that must all occur in an option's name or meaning, e.g. learning rate.
    recipe
        The recipe: a shipped one, a .toml file or RUN/recipe.json.
    """
    from mvm.recipes import load_recipe
    from mvm.recipes import options as values_of
    from mvm.recipes.docs import as_typed, meant, option_docs, table_docs
    from mvm.untrusted import printable

    words = " ".join(pattern).lower().split()
    chosen = load_recipe(recipe)
    values = values_of(chosen)
    docs = {name: doc for name, doc in option_docs(chosen).items() if name not in ("name", "description")}
    matching = [name for name, doc in docs.items() if all(word in f"--{name} {doc.meaning}".lower() for word in words)]
    if not matching:
        leaves = {name.rpartition(".")[2]: name for name in docs}
        near = [option for word in words for option, _ in meant(word, docs)]
        near = near or [leaves[leaf] for word in words for leaf in closest(word, leaves)]
        said = f"no option has '{' '.join(words)}' in its name or meaning" + "; nearest: " * bool(near)
        print(f"mvm: {printable(said)}{', '.join(near)}", file=sys.stderr)
        return 1
    for number, (table, about) in enumerate(table_docs(chosen).items()):
        here = [name for name in matching if name.rpartition(".")[0] == table]
        if not words:
            print("\n" * bool(number) + (f"[{table}] {about}" if table else f"Options of {printable(chosen.name)}"))
        for name in here:
            value, default = as_typed(values[name]), as_typed(docs[name].default)
            text = f"{docs[name].meaning} ({docs[name].type}{'' if value == default else f'; default {default}'})"
            left = f"{f'--{name} {printable(value)}':30s}  "
            print(textwrap.fill(text, 100, initial_indent=left, subsequent_indent=" " * 32, break_on_hyphens=False))
    return 0


@command(TRAIN, "mvm report runs/a  # write runs/a/report.html")
def report(run: Path, /, *, out: Annotated[Path | None, OUTPUT] = None) -> int:
    """Write one offline page about a training run: curves, previews, settings, warnings and next steps.

    Works at any time: during training, after a crash, and at the end.

    Parameters
    ----------
    run
        Run directory.
    out
        The file to write. Default: RUN/report.html.
    """
    from mvm.evaluation.run_report import write_run_report

    print(f"wrote {write_run_report(run, out)}; open it in a browser")
    return 0


@command(
    SAMPLE,
    "mvm app  # the shipped models, in the browser",
    "mvm app runs/a --port 8000 --no-open  # also a run of your own",
    name="app",
)
def web(
    *models: str,
    host: Annotated[str | None, SERVER] = None,
    port: Annotated[Whole | None, SERVER] = None,
    share_on_network: Annotated[bool, SERVER] = False,
    queue: Annotated[Whole, SERVER] = 8,
    device: Device = "auto",
    open: Annotated[bool, SERVER] = True,
    allow_download: Download = False,
) -> int:
    """Open a local page that samples by ODE and SDE side by side, and edits images. Works offline.

    Parameters
    ----------
    models
        Run directories, exported folders, or folders of them. The shipped models are always offered.
    host
        Address to listen on. Default: 127.0.0.1; with --share-on-network 0.0.0.0, all addresses of this machine.
    port
        Port to listen on. Default: the first free one from 7860.
    share_on_network
        Let other machines open the page by the printed address, which has a token. The connection is not encrypted.
    queue
        Largest number of visitors at once; others are asked to return later.
    open
        Open the page in a browser on this machine.
    """
    from mvm.app.service import Shelf, offered
    from mvm.model import choose_device

    at_least("queue", queue, 1)
    if port is not None:
        between("port", port, 1, MOST_PORT)
    try:
        from mvm.app.page import serve
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ValueError(needs("the page", "gradio", "web")) from None
    token = secrets.token_urlsafe(16) if share_on_network else ""
    host = host or ("0.0.0.0" if token else "127.0.0.1")
    shelf = Shelf(offered(models), choose_device(device), allow_download)
    serve(shelf, queue, host, port, token=token, inbrowser=open)
    return 0


@command(
    TRAIN,
    "mvm bench cifar10  # training and sampling",
    "mvm bench cifar10 --train.batch 128 --samples 0  # training alone",
)
def bench(
    recipe: str,
    /,
    *,
    steps: Annotated[Whole, MEASUREMENT] = 30,
    samples: Annotated[Whole, MEASUREMENT] = 64,
    sampler: SamplerOptions = SamplerOptions(),
    grow: Annotated[bool, MEASUREMENT] = False,
    device: Device = "auto",
    json_file: JsonFile = None,
    overrides: Dotted = None,
) -> int:
    """Measure the speed of a recipe on this machine: images/s, MFU and memory, on random images.

    MFU is 6 x the multiply-adds of one forward pass per image, over the speed of a large matrix product measured in the
    same run (on a GPU alone). Recomputed blocks do not count. Options of the recipe are changed as in `mvm train`.

    Parameters
    ----------
    recipe
        A shipped recipe (see `mvm recipes`) or a .toml file.
    steps
        Training steps to measure, after a warm-up. 0: none.
    samples
        Number of images to sample. 0: none.
    grow
        Also double resolution, depth and batch size, one at a time, and show how the cost grows.
    """
    from mvm.bench import bench as run_bench
    from mvm.bench import growth, table
    from mvm.recipes import load_recipe, override, require_field_recipe
    from mvm.training.data import completed

    at_least("steps", steps, 0)
    at_least("samples", samples, 0)
    chosen = completed(override(require_field_recipe(load_recipe(recipe), recipe), overrides or {}))
    chosen = replace(chosen, sample=sampler.settings(chosen.sample))
    write = json_writer(json_file)
    with on_device(device) as processes:
        figures = run_bench(chosen, processes, steps=steps, num=samples, progress=processes.main)
        if steps:
            say_from_first(table([{"training": chosen.name, **figures["training"]}], "training"))
        memory = figures["memory_estimate_gb"]
        say_from_first(f"memory estimated beforehand: {memory:.4g} GB (bf16, compiled, on one GPU)")
        if samples:
            sampling = figures["sampling"]
            say_from_first(f"sampling: {sampling['images_per_second']:.4g} images/s at {sampling['nfe']} evaluations")
        if grow:
            figures["growth"] = growth(chosen, processes, progress=processes.main)
            say_from_first(table(figures["growth"], "change"))
    if processes.main:
        write(figures)
    return 0
