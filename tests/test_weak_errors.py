"""The exact weak errors of samplers: the page says what the program finds."""

import sys
from pathlib import Path

import pytest
import torch

from mvm.solver import adams
from mvm.verify import image_stds, spectrum_error

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return __import__("weak_errors")


@pytest.fixture(scope="module")
def tables():
    """The page's tables, each a list of rows of cells."""
    page = (BENCHMARKS / "results" / "weak-errors.md").read_text(encoding="utf-8")
    parts = [part.splitlines() for part in page.split("\n\n") if part.startswith("|")]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in part] for part in parts]


@pytest.mark.parametrize(
    ("number", "rho", "name", "nfe"),
    [(0, 1.0, "adams", 13), (0, 1.0, "sa, t_min 1e-4", 8), (0, 1.0, "seeds3", 26), (2, 0.0, "deis", 10)],
)
def test_the_page_says_what_is_computed(study, tables, number, rho, name, nfe):
    solvers = (study.SDES, None, study.ODES)[number]
    table = tables[number]
    assert [row[0] for row in table[2:]] == list(solvers)
    said = next(row for row in table if row[0] == name)[table[0].index(str(nfe))].replace("*", "")
    assert [float(part) for part in said.split(" / ")] == pytest.approx(
        study.weak_errors(solvers[name](), rho, nfe), rel=6e-3
    )


def test_the_page_says_what_noise_does(study, tables):
    found = study.noise_table(nfes=(13,), rhos=(0.0, 3.0)).splitlines()[2]
    said = next(row for row in tables[1] if row[:2] == ["adams", "13"])
    assert [cell.strip() for cell in found.strip("|").split("|")] == [*said[:3], said[-1]]


def test_the_best_of_every_column_is_bold(tables):
    for table in (tables[0], tables[2]):
        for column in range(1, len(table[0])):
            for part in (0, 1):
                cells = [row[column].split(" / ")[part] for row in table[2:]]
                values = torch.tensor([float(cell.strip("*")) for cell in cells])
                assert [cell.startswith("**") for cell in cells] == (values == values.min()).tolist()


def test_energy_is_the_relative_frechet_distance(study, monkeypatch):
    monkeypatch.setattr(study, "SIDES", (32,))
    monkeypatch.setattr(study, "EXPONENTS", (1.3,))
    energy, _ = study.weak_errors(adams(), 1.0, 8)
    assert energy == pytest.approx(100 * spectrum_error(adams(), image_stds(32, 1.3), 1.0, 8), rel=1e-9)
