"""benchmarks/results/headline.json: every figure is what was measured, and pages show it; figures are drawn from it."""

import json
import math
import re
import struct
import sys

import pytest
from programs import RESULTS, ROOT, imported

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")

FIGURES = json.loads((RESULTS / "headline.json").read_text("utf-8"))["figures"]
KEYS = [told["key"] for told in FIGURES]


def decimals(number: float) -> int:
    return len(f"{number}".partition(".")[2])


def cell_value(path, at):
    found = [
        cell
        for cell in json.loads(path.read_text("utf-8"))["results"]
        if all(cell[name] == value for name, value in at["cell"].items())
    ]
    (cell,) = found
    return cell["metrics"][at["field"]]["value"] if at["field"] in cell["metrics"] else cell[at["field"]]


def table_value(path, at):
    """The first number of a cell of the first Markdown table that has the row and the column."""
    header: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        row = [part.strip() for part in line.strip("|").split("|")] if line.startswith("|") else []
        if at["column"] in row:
            header = row
        elif row and row[0] == at["row"] and header:
            return float(re.search(r"[\d.,]+", row[header.index(at["column"])])[0].replace(",", ""))
    raise ValueError(f"{path}: no row {at['row']!r} under {at['column']!r}")


def trained(path, method):
    from_runs = imported("equal_terms_runs")
    return from_runs.over_seeds(from_runs.read_runs(path)[method], 26, from_runs.COMMON).mean


def tensors(path, unit):
    with path.open("rb") as file:
        described = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(math.prod(told["shape"]) for name, told in described.items() if name != "__metadata__") / unit


def measured(told):
    """What the source holds; of a phrase the figure itself, if the words are there and have it."""
    path, at = ROOT / told["source"]["file"], told["source"]["at"]
    if "cell" in at:
        return cell_value(path, at)
    if "row" in at:
        return table_value(path, at)
    if "mean" in at:
        return trained(path, at["mean"])
    if "less" in at:
        return trained(path, at["less"][0]) - trained(path, at["less"][1])
    if "tensors" in at:
        return tensors(path, at["tensors"])
    assert at["phrase"] in path.read_text("utf-8")
    numbers = [
        float(part.replace(",", "")) for part in re.findall(r"\d[\d,]*(?:\.\d+)?", at["phrase"].replace(", ", " "))
    ]
    if "seconds" in at:
        assert at["seconds"] in numbers
        return at["seconds"] / 60
    assert told["value"] in numbers
    return told["value"]


def blocks(text):
    """Paragraphs, items of lists and rows of tables, each on one line."""
    parts = re.split(r"\n\s*\n|\n(?=\s*[-*] )|\n(?=\|)", text)
    return [" ".join(part.split()) for part in parts]


def shown(text, block):
    """Whether a block has this number, not as a part of another."""
    return re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d]|[.,]\d)", block) is not None


@pytest.mark.parametrize("told", FIGURES, ids=KEYS)
def test_a_headline_figure_is_what_was_measured(told):
    assert round(measured(told), decimals(told["value"])) == told["value"]
    places = decimals(told["text"].replace(",", ""))
    assert abs(float(told["text"].replace(",", "")) - told["value"]) <= 0.5 * 10.0**-places + 1e-9
    assert all(told[name] for name in ("what", "command", "unit"))


@pytest.mark.parametrize("told", FIGURES, ids=KEYS)
def test_pages_show_the_headline_figure(told):
    for page, words in told["pages"].items():
        text = (ROOT / page).read_text("utf-8")
        near = [text] if page == "README.md" else [block for block in blocks(text) if words in block]
        assert any(shown(told["text"], block) for block in near), f"{page}: {told['text']} beside {words!r}"


def test_keys_are_unique_and_a_wrong_figure_is_found():
    assert len(set(KEYS)) == len(KEYS)
    assert shown("4.79", "FID 4.79, 37 passes")
    assert not shown("4.79", "FID 14.79, and 4.791")
    assert blocks("a\nb\n\n- c\n  d\n- e\n| f |\n| g |") == ["a b", "- c d", "- e", "| f |", "| g |"]
    with pytest.raises(ValueError, match="no row 'XXL'"):
        table_value(RESULTS / "training-speed.md", {"row": "XXL", "column": "images/s"})


# ---- benchmarks/figures.py


@pytest.fixture(scope="module")
def figures():
    return imported("figures")


@pytest.mark.parametrize(
    "name", ["solvers-fid-nfe", "solvers-rmse", "cifar10-fid-nfe", "cifar10-equal-terms", "results-speed"]
)
def test_a_figure_is_drawn_from_stored_results(figures, name, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(sys, "argv", ["figures.py", "--out", str(tmp_path), "--only", name])
    figures.main()
    assert Image.open(tmp_path / f"{name}.png").width > 1000


def test_every_drawn_figure_is_in_the_documents(figures):
    assert [name for name in figures.FIGURES if not (ROOT / "docs" / "assets" / f"{name}.png").is_file()] == []
    assert all(path.is_file() for _, paths in figures.FIGURES.values() for path in paths)


def test_curves_have_95_percent_intervals_and_solvers_one_look(figures, study):
    from mvm.metrics.distances import student_95

    cells = study.read_results([RESULTS / "solvers" / "fid-cifar10-guided.json"])
    plot = figures.by_solver(cells, "guided", names=["adams", "adams-power", "deis", "dpm++2m", "unipc"])
    ours = plot.lines[0]
    assert ([line.label for line in plot.lines], ours.ours) == (["adams", "adams-power", "dpm++2m", "unipc"], True)
    assert list(ours.x) == [5, 8, 13, 26]
    error = next(c for c in cells if (c.solver, c.settings.nfe) == ("adams", 8)).metrics["fid"]["error"]
    assert ours.errors[1] == (student_95(20) * error,) * 2
    assert len({(line.colour, line.marker) for line in plot.lines}) == 4


def test_bars_end_within_the_axis_and_what_is_above_is_left_out(figures):
    line = figures.Line("a", [1, 2], [3.0, 90.0], [(1.0, 2.0), (1.0, 1.0)])
    assert figures._reach(figures.Plot("t", [line], top=4.5)) == [2.0, 4.5]
    assert figures._reach(figures.Plot("t", [line])) == [2.0, 5.0, 89.0, 91.0]


def test_other_results_are_drawn_for_one_figure_alone(figures, tmp_path, monkeypatch, capsys):
    stored = RESULTS / "sde-ode" / "guidance.json"
    command = ["figures.py", "--out", str(tmp_path), "--of", str(stored), "--only", "cifar10-guidance"]
    monkeypatch.setattr(sys, "argv", command)
    figures.main()
    assert (tmp_path / "cifar10-guidance.png").is_file()
    monkeypatch.setattr(sys, "argv", [*command, "solvers-rmse"])
    with pytest.raises(SystemExit, match="2"):
        figures.main()
    assert "--of draws one figure" in capsys.readouterr().err
