"""Lines of user code for five tasks, by mvm and by three other libraries; every program is run.

    python benchmarks/user_code.py --json benchmarks/results/user-code.json

A line is one that is neither empty nor a comment, formatted alike (120 columns). Networks and data are the user's own
and the same for all (benchmarks/user_code/networks.py, not counted). The others' programs are as their documentation
has them: a DataLoader, torch's or diffusers' averages, a ready solver or pipeline where there is one. flow_matching,
torchcfm and diffusers must be importable; --libraries mvm runs ours alone. Tasks: points of two moons by an MLP;
images by a UNet of diffusers from an own Dataset, with an average of the weights and a picture; embedded captions
with guidance; 1-D signals; inpainting.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent / "user_code"
TASKS = ("moons", "images", "text", "signal", "inpaint")
LIBRARIES = ("mvm", "flow_matching", "torchcfm", "diffusers")


def lines(program: Path) -> int:
    """Return how many lines are neither empty nor comments."""
    stripped = (line.strip() for line in program.read_text().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def run(program: Path) -> None:
    """Run a program in a folder of its own; one that fails is an error."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, program], cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True)


def table(counts: dict[str, dict[str, int]], libraries: Sequence[str]) -> str:
    """Return the counts as a Markdown table."""
    rows = ["| task | " + " | ".join(libraries) + " |", "|---" * (len(libraries) + 1) + "|"]
    rows += [f"| {task} | " + " | ".join(str(counts[task][name]) for name in libraries) + " |" for task in counts]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts: dict[str, dict[str, int]] = {}
    for task in options.tasks:
        counts[task] = {}
        for library in options.libraries:
            program = HERE / f"{task}_{library}.py"
            run(program)
            counts[task][library] = lines(program)
    if options.json:
        versions = {name: importlib.metadata.version(name) for name in options.libraries if name != "mvm"}
        options.json.write_text(json.dumps({"lines": counts, "versions": versions}, indent=1) + "\n")
    print(table(counts, options.libraries))


if __name__ == "__main__":
    main()
