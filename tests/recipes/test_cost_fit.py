"""benchmarks/cost_fit.py: the fit against known costs and scipy's, the files it writes and reads, what it prints."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mvm.recipes.costs import TERMS, Work

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks" / "results" / "training-speed.json"
KNOWN = {"products": 2e-15, "attention": 3e-15, "elementwise": 2e-11, "states": 1e-12, "blocks": 1e-4}  # made up


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return __import__("cost_fit")


@pytest.fixture(scope="module")
def works(program):
    """The work of every case."""
    return {name: program.step_work(case.recipe(), case.batch) for name, case in program.CASES.items()}


@pytest.fixture(scope="module")
def points(program, works):
    """Every case as if steps took what KNOWN says."""
    return timed(program, works, KNOWN)


def timed(program, works, costs):
    fit = program.Fit(costs)
    return [program.Point(name, work, fit.seconds(work)) for name, work in works.items()]


@pytest.mark.parametrize("absent", [None, *TERMS])
def test_known_costs_are_found_again(program, works, absent):
    costs = {term: 0.0 if term == absent else cost for term, cost in KNOWN.items()}
    found = program.fitted(timed(program, works, costs))
    for term in TERMS:
        assert found.costs[term] == pytest.approx(costs[term], rel=1e-6, abs=1e-6 * KNOWN[term])


@pytest.mark.parametrize("seed", range(8))
def test_the_fit_is_that_of_scipy(program, seed):
    nnls = pytest.importorskip("scipy.optimize").nnls
    draw = np.random.default_rng(seed)
    table, seconds = draw.normal(size=(9, 5)), draw.uniform(1, 2, 9)
    found = program.fitted([program.Point("", Work(*row), time) for row, time in zip(table, seconds, strict=True)])
    expected, _ = nnls(table / seconds[:, None], np.ones(9))
    np.testing.assert_allclose(list(found.costs.values()), expected, atol=1e-9)
    assert min(expected) == 0  # or the bound was not tried


def test_too_few_points_are_refused(program, points):
    with pytest.raises(ValueError, match=r"4 measured steps do not determine 5 terms .* or name fewer with --terms"):
        program.fitted(points[:4])


def test_left_out_errors(program, points):
    assert program.left_out_errors(points[:5]) is None
    assert program.left_out_errors(points) == pytest.approx([0.0] * len(points), abs=1e-9)
    slow = points[3]._replace(seconds=2 * points[3].seconds)
    changed = [*points[:3], slow, *points[4:]]
    assert program.left_out_errors(changed)[3] == pytest.approx(-0.5)  # the others know nothing of it
    assert -0.5 < program.fitted(changed).error(slow) < 0


def test_hours_of_a_recipe_by_hand(program):
    from mvm.recipes import load_recipe

    recipe = load_recipe("imagenet32-dit-b")
    only = program.Fit({"blocks": 1e-3})
    assert program.one_gpu_hours(only, recipe) == pytest.approx(250228 * 4 * 12 * 1e-3 / 3600)  # four parts of 256


def test_the_cases_tell_all_terms_apart(points):
    """No mix of terms is nearly another term, at the made-up costs; L stays out of the fit."""
    measured = [point for point in points if point.name != "L"]
    table = np.array([[getattr(point.work, term) / point.seconds for term in TERMS] for point in measured])
    assert np.linalg.cond(table / np.linalg.norm(table, axis=0)) < 20


def test_fit_prints_measured_held_and_predicted(program, points, tmp_path, capsys):
    path = tmp_path / "a.json"
    rows = [{"case": p.name, **asdict(program.CASES[p.name]), "step_ms": 1000 * p.seconds} for p in points]
    path.write_text(json.dumps({"rows": rows}))
    program.main(["fit", str(path), "--hold", "L", "--check", str(PUBLISHED)])
    told = capsys.readouterr().out
    assert told.count("| +0.0 % | +0.0 % |") == len(program.CASES) - 1
    assert told.count("| +0.0 % | not in the fit |") == 1  # L, timed as the others were
    assert [line.split(" | ")[0] for line in told.splitlines() if "not in the fit" in line] == [
        "| L", "| S", "| B", "| XL-half",
    ]  # fmt: skip
    assert "| states | bytes of weights, gradients, moments and averages | 1e-12 | 1e+12 |" in told
    assert "| `imagenet32-dit-l` | " in told


@pytest.mark.parametrize(("words", "message"), [
    (["fit", str(PUBLISHED)], "3 measured steps do not determine 5 terms"),
    (["fit", str(PUBLISHED), "--hold", "M"], "--hold M: no such case was measured"),
    (["measure", "M", "--json", "a.json"], "no case is called M; choose from base"),
])  # fmt: skip
def test_mistakes_are_told(program, capsys, words, message):
    with pytest.raises(SystemExit):
        program.main(words)
    assert message in capsys.readouterr().err


def test_measure_keeps_what_it_has(program, tmp_path, capsys):
    path = tmp_path / "new" / "a.json"
    words = ["measure", "smoke", "--json", str(path), "--steps", "3", "--compile", "off", "--commit", "abc"]
    program.main(words)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["commit"], row["depth"], row["batch"]) == ("smoke", "abc", 1, 4)
    (point,) = program.read_points(path)
    assert point.seconds == row["step_ms"] / 1000 > 0
    before = path.read_bytes()
    program.main(words)
    assert "smoke: in" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_machines_are_not_mixed(program, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.json"
    for number, device in enumerate(("one", "two")):
        found = {"device": device, "torch": "2", "compile": "auto", "step_ms": 1.0}
        monkeypatch.setattr(program, "measured", lambda *_, found=found: found)
        if number == 0:
            program.main(["measure", "base", "--json", str(path)])
    with pytest.raises(SystemExit):
        program.main(["measure", "depth-6", "--json", str(path)])
    assert "would mix measurements of one, torch 2, compile auto and two" in capsys.readouterr().err
    assert [row["case"] for row in json.loads(path.read_text())["rows"]] == ["base"]


@pytest.mark.parametrize("second", ["elementwise", "blocks"])
def test_the_page_tells_what_s_and_b_say_of_xl(program, second):
    small, wide, held = program.read_points(PUBLISHED)
    assert (small.name, wide.name, held.name) == ("S", "B", "XL-half")
    fit = program.fitted([small, wide], ("products", second))
    measured, predicted = 1000 * held.seconds, 1000 * fit.seconds(held.work)
    told = f"| products, {second} | {measured:.1f} | {predicted:.1f} | {100 * fit.error(held):+.1f} % |"
    assert told in (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
