"""Commands that show: demo, verify, recipes."""

import json
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mvm.cli.app import Whole, app


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

    if json_file is not None:
        json_file.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    results = run_checks()
    for check in results:
        sign = ">=" if check.at_least else "<="
        print(f"{'pass' if check.passed else 'FAIL'}  {check.value:10.3g} {sign} {check.limit:<8.3g} {check.name}")
    summary = as_json(results)
    if json_file is not None:
        write_text(json_file, json.dumps(summary, indent=2) + "\n")
    failed = sum(not check.passed for check in results)
    print(f"{len(results) - failed} of {len(results)} checks passed")
    return 0 if summary["passed"] else 1


@app.command
def recipes(*words: str) -> int:
    """List the shipped recipes; `mvm recipes show NAME`: its page, what it costs, and every option with its value.

    Parameters
    ----------
    words
        show NAME, or NAME alone; nothing lists them.
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
