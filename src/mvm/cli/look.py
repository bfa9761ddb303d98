"""Commands that show: demo, verify, recipes, options, report, app, bench."""

import secrets
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mvm.cli.app import Device, Dotted, JsonFile, SamplerOptions, Whole, app, json_writer, on_device, say_from_first
from mvm.options import at_least, between, closest, needs

MOST_PORT = 65_535


@app.command
def demo(*, out: Path = Path("runs/demo"), quick: bool = False, seed: Whole = 0) -> int:
    """Train on the embedded digits, sample with ODE and SDE, write OUT/report.html (about 3 minutes on 2 cores).

    Parameters
    ----------
    out
        Run directory; an earlier demo there is replaced when the new one is complete.
    quick
        A little of everything, under a minute, to see that it works; the digits will not be legible.
    seed
        Seed of the whole run.
    """
    from mvm.demo import demo as run_demo

    start = time.perf_counter()
    report = run_demo(out, quick=quick, seed=seed)
    print(f"wrote {report} in {time.perf_counter() - start:.0f} s; open it in a browser")
    return 0


@app.command
def verify(*, json_file: JsonFile = None) -> int:
    """Check the mathematics on exact oracles, on the CPU, in under a minute; exit code 1 if a check fails."""
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


@app.command
def recipes(*words: str) -> int:
    """List the shipped recipes; `mvm recipes show NAME`: what it costs, and every option explained.

    The page is a TOML file that `mvm train` takes: mvm recipes show NAME > mine.toml

    Parameters
    ----------
    words
        show NAME, or NAME alone, of a shipped recipe, a .toml file or RUN/recipe.json; nothing lists the shipped ones.
    """
    from mvm.recipes import load_recipe, shipped
    from mvm.recipes.page import page

    if words == ("show",):
        raise ValueError("mvm recipes show: which one? See: mvm recipes")
    name, *rest = words[1:] if words[:1] == ("show",) else words or [""]
    if rest:
        raise ValueError(f"mvm recipes {' '.join(words)}: one recipe at a time; see: mvm recipes")
    if name:
        print(page(name))
        return 0
    width = max(map(len, shipped()))
    for known in shipped():
        print(f"{known:{width}s} {load_recipe(known).description}")
    return 0


@app.command
def options(*pattern: str, recipe: str = "cifar10") -> int:
    """List the options of a recipe that `mvm train` takes, with values and meanings: all, or those found by words.

    Exit code 1 if nothing is found.

    Parameters
    ----------
    pattern
        Words that must all occur in an option's name or meaning, e.g. learning rate.
    recipe
        Whose options and values: a shipped recipe, a .toml file or RUN/recipe.json.
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


@app.command
def report(run: Path, /, *, out: Path | None = None) -> int:
    """Write one offline page about a training run: curves, previews, settings, warnings, what to do next.

    Works at any time: while the run trains, after a crash, after the end.

    Parameters
    ----------
    run
        Run directory.
    out
        The file to write; default RUN/report.html.
    """
    from mvm.evaluation.run_report import write_run_report

    print(f"wrote {write_run_report(run, out)}; open it in a browser")
    return 0


@app.command(name="app")
def web(
    *models: str,
    host: str | None = None,
    port: Whole | None = None,
    share_on_network: bool = False,
    queue: Whole = 8,
    device: Device = "auto",
    open: bool = True,
    allow_download: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Open a local page: pictures by ODE and SDE side by side, and the field on the plane. Needs no network.

    Parameters
    ----------
    models
        Run directories, exported models, or folders of them; the shipped models are always offered.
    host
        Address to listen on; 127.0.0.1 when not given, with --share-on-network 0.0.0.0: all of this machine's.
    port
        Port to listen on; the first free one from 7860 on when not given.
    share_on_network
        Let other machines in: those that open the address printed, which has a token. Not encrypted.
    queue
        Visitors served at once; more are asked to come again.
    open
        Show the page in the browser of this machine; --no-open only serves it.
    allow_download
        Open encoders that the models' files name outside of their folders, by a path or on the hub, to edit pictures.
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


@app.command
def bench(
    recipe: str,
    /,
    *,
    steps: Whole = 30,
    samples: Whole = 64,
    sampler: SamplerOptions = SamplerOptions(),
    grow: bool = False,
    device: Device = "auto",
    json_file: JsonFile = None,
    overrides: Dotted = None,
) -> int:
    """Measure a recipe's speed here: images/s, MFU and memory of training and sampling, on random images.

    MFU is 6 x multiply-adds of one forward pass per image, nothing computed twice, over the speed of a large
    matrix product measured beside it (GPU alone). Options of the recipe can be changed as in `mvm train`.

    Parameters
    ----------
    recipe
        A shipped recipe (see: mvm recipes) or a .toml file.
    steps
        Training steps timed, after a warm-up; 0: none.
    samples
        Images sampled; 0: none.
    grow
        Also double resolution, depth and batch, each alone: how the cost grows.
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
