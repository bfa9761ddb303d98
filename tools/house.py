"""How easy is the code base to read? Counts that a review asks for, of a source tree, as a Markdown table.

    python tools/house.py [ROOT] [--trace]

ROOT: the repository, this one by default. Packages are those directly below mvm (a module counts as one). Counted from
the syntax tree: eager imports between packages and their cycles, modules with exactly one importer, private helpers
used once, lines of code. --trace runs `mvm sample`, `mvm train` to one step and `mvm sweep` at a tiny size under
sys.setprofile, and counts files, functions and call depth inside mvm (half a minute on a CPU).
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# what a reader opens to know path, loss, solver loop, guidance and DiT: the files that CONTRIBUTING.md sends one to
CORE = (
    "path/schedule.py", "path/convert.py", "path/perturb.py",
    "objective/matching.py",
    "solver/base.py", "solver/table.py", "solver/adams.py", "solver/sampling.py", "solver/guidance.py",
    "network/dit.py", "network/patches.py", "network/layers.py",
)  # fmt: skip


def modules(source: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every module below src, by dotted name."""
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in sorted(source.rglob("*.py"))
    }


def imports(tree: ast.AST, names: set[str], eager: bool) -> Iterator[str]:
    """Yield the modules of the package that a module imports; eager: only while it is itself imported."""
    for node in ast.iter_child_nodes(tree):
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if eager and (lazy or typing_only):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in names else node.module for name in whole if node.module.split(".")[0] == "mvm")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        yield from imports(node, names, eager)


def package(name: str) -> str:
    return ".".join(name.split(".")[:2])


def package_order(trees: dict[str, ast.Module]) -> tuple[list[str], list[str]]:
    """Return the packages, each after all that it imports, and the packages of a cycle (then the order is empty)."""
    below: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        if name not in ("mvm", "mvm.__main__"):
            below[package(name)] |= {package(found) for found in imports(tree, set(trees), True)} - {
                "mvm",
                package(name),
            }
    try:
        return list(TopologicalSorter(below).static_order()), []
    except CycleError as error:
        return [], error.args[1]


def code_lines(path: Path) -> int:
    """Return the lines of a file that are neither blank, comment nor docstring."""
    text = path.read_text()
    quiet: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for child in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                quiet |= set(range(child.lineno, child.end_lineno + 1))
    return sum(bool(re.match(r"\s*[^#\s]", x)) and n not in quiet for n, x in enumerate(text.splitlines(), 1))


def counts(root: Path) -> dict[str, str]:
    """Return what the syntax trees tell."""
    source = root / "src"
    trees = modules(source)
    importers: Counter[str] = Counter()
    for name, tree in trees.items():
        importers.update(set(imports(tree, set(trees), False)) - {name})
    text = "\n".join(path.read_text() for path in sorted(source.rglob("*.py")))
    code = sum(map(code_lines, source.rglob("*.py")))
    helpers = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and re.match(r"_[a-z]", node.name)
    )
    once = sum(len(re.findall(rf"\b{name}\b", text)) == 2 for name, many in helpers.items() if many == 1)
    core = [source / "mvm" / name for name in CORE if (source / "mvm" / name).is_file()]
    order, cycle = package_order(trees)
    return {
        "core files and raw lines": f"{len(core)}, {sum(len(path.read_text().splitlines()) for path in core):,}",
        "package cycle": " > ".join(each.removeprefix("mvm.") for each in cycle) or f"none ({len(order)} packages)",
        "modules with exactly one importer": f"{sum(many == 1 for many in importers.values())} of {len(trees)}",
        "private helpers used once": f"{once} of {sum(helpers.values())}",
        "code lines in src (no blanks, comments, docstrings)": f"{code:,}",
    }


TRACED = """
    import json, os, sys
    here = os.path.join("src", "mvm") + os.sep
    files, functions, depth, deepest = set(), set(), 0, 0
    def profile(frame, event, argument):
        global depth, deepest
        body = not frame.f_code.co_flags & 1  # of a module or a class, run by an import
        if body or event not in ("call", "return") or here not in frame.f_code.co_filename:
            return
        if event == "call":
            depth += 1
            deepest = max(deepest, depth)
            files.add(frame.f_code.co_filename)
            functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))
        else:
            depth -= 1
    from mvm.__main__ import main
    sys.setprofile(profile)
    try:
        main()
    except SystemExit:
        pass
    sys.setprofile(None)
    functions = {f for f in functions if not f[1].startswith("<")}
    print(json.dumps([len(files), len(functions), deepest]), file=sys.stderr)
"""

TRAIN = (
    "train digits --train.steps 1 --train.batch 8 --train.warmup 0 --network.depth 1 --preview.every 0 --out OUT/run"
)
COMMANDS = {
    "mvm sample to PNG": "sample digits --num 2 --nfe 2 --out OUT/x.png",
    "mvm train to one step": TRAIN,
    "mvm sweep to report": "sweep digits --solvers adams --nfe 2 --rho 0 --num 20 --metrics fd-pixels --out OUT/sweep",
}


def traces(root: Path) -> Iterator[tuple[str, str]]:
    """Yield files, functions and depth of each command, in an interpreter of its own."""
    for title, command in COMMANDS.items():
        with tempfile.TemporaryDirectory() as out:
            words = [word.replace("OUT", out) for word in command.split()]
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(TRACED), *words], capture_output=True, text=True, cwd=root,
                env={"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": out},
            )  # fmt: skip
        last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
        yield f"{title}: files / functions / depth", " / ".join(map(str, json.loads(last)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--trace", action="store_true", help="run the three commands as well")
    options = parser.parse_args()
    rows = counts(options.root.resolve()) | (dict(traces(options.root.resolve())) if options.trace else {})
    print("| | |\n|---|---|", *(f"| {name} | {found} |" for name, found in rows.items()), sep="\n")


if __name__ == "__main__":
    main()
