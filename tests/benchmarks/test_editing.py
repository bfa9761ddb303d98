"""The page of editing says what its program finds."""

import sys
from functools import partial
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return __import__("editing")


def said(task, method):
    """Return the errors of mean and covariance in the page's table of a task."""
    page = (BENCHMARKS / "results" / "editing.md").read_text(encoding="utf-8")
    table = next(part for part in page.split("\n## ") if part.lower().startswith(task))
    row = next(line for line in table.splitlines() if line.startswith(f"| {method} |"))
    return [float(cell) for cell in row.split("|")[2:4]]


@pytest.mark.parametrize("task", ["inpainting", "super-resolution x2", "super-resolution x4"])
def test_exact_draws_have_the_errors_of_the_page(study, task):
    assert list(study.errors(study.exact, task)[:2]) == pytest.approx(said(task, "512 exact draws"), abs=6e-3)


def test_the_page_says_what_is_computed(study):
    mean, covariance, cost = study.errors(partial(study.ours, 26, 1), "inpainting")
    assert [mean, covariance] == pytest.approx(said("inpainting", "mvm, 1 particle, NFE 26"), abs=6e-3)
    assert cost == (26, 78)
    mean, covariance, cost = study.errors(partial(study.dps, 52, 3.0), "inpainting")
    assert [mean, covariance] == pytest.approx(said("inpainting", "DPS, scale 3, 52 steps"), abs=6e-3)
    assert cost == (52, 52)
