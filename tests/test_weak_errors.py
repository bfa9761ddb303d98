"""Exact errors of samplers on Gaussians: the pages of weak errors and of the search say what the programs find."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mvm.path import MEAN_VELOCITY
from mvm.solver import adams, solver_named
from mvm.verify.solvers import image_stds, spectrum_error

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return __import__(name)


@pytest.fixture(scope="module")
def study():
    return imported("weak_errors")


def tables_of(name):
    """The page's tables, each a list of rows of cells."""
    page = (BENCHMARKS / "results" / name).read_text(encoding="utf-8")
    parts = [part.splitlines() for part in page.split("\n\n") if part.startswith("|")]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in part] for part in parts]


@pytest.fixture(scope="module")
def tables():
    return tables_of("weak-errors.md")


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


@pytest.mark.parametrize(("name", "shift", "rho"), [("adams", 8.0, 0.0), ("sa", 1.0, 0.75), ("heun", 8.0, 0.0)])
def test_the_page_says_what_shifted_times_do(name, shift, rho):
    """And a field that is known at every level it is asked at is the exact one."""
    search = imported("solver_search")
    rows = tables_of("solver-search.md")[-1]
    said = next(row for row in rows if row[:3] == [f"{rho:g}", f"`{name}`", f"{shift:g}"])
    solver = replace(solver_named(name).for_size(search.XL.shift_dimension), shift=shift)
    plan, fields = solver.plan(MEAN_VELOCITY, 13, rho), search.latent_spectra()
    exact, trained = (search.energy(plan, fields, limit) for limit in (lambda field: field, search.trained))
    assert said[rows[0].index("13")] == f"{exact:.2g} / {trained:.2g}"
    assert " | ".join(said[-2:]) == search.outside(solver.plan(MEAN_VELOCITY, 90, rho))
    noisy = solver.plan_times(MEAN_VELOCITY, (0.98, 0.9, 0.8, 0.7, 0.0), rho)  # sigma/alpha from 2.8 up
    assert search.energy(noisy, fields, search.trained) == search.energy(noisy, fields, lambda field: field)
    assert all(float((count * stds**2).sum() / count.sum()) == pytest.approx(1) for stds, count in fields)


@pytest.mark.parametrize(("rho", "nfe"), [(0.0, 5), (1.0, 8)])
def test_the_page_of_the_search_says_what_is_found(rho, nfe):
    search = imported("solver_search")
    said = next(row for row in tables_of("solver-search.md")[0][2:] if row[:2] == [f"{rho:g}", str(nfe)])
    scores = [float(cell.split(":")[0].split(",")[0]) for cell in said[2:]]
    assert scores[:3] == sorted(scores[:3])
    best = next(one for one in search.CANDIDATES if said[2].endswith(str(one)))
    makers = {0: best.solver, 3: search.default, 4: search.default_near}
    for place, made in makers.items():
        assert search.score(made, rho, nfe) == pytest.approx(scores[place], abs=0.006)
