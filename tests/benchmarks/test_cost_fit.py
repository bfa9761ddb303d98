"""benchmarks/cost_fit.py: the fit against known costs and scipy's, the files it writes and reads, what it prints."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import RESULTS, imported

PROGRAM = imported("cost_fit")
GPU_TERMS, Work = PROGRAM.GPU_TERMS, PROGRAM.Work
PUBLISHED = RESULTS / "training-speed.json"
HOST = ("batch-16", "batch-64", "wide-batch-16", "tokens-64")
KNOWN = {"products": 2e-15, "attention": 3e-15, "elementwise": 2e-11, "states": 1e-12}  # made up
FLOOR = 1e-3  # seconds a block, made up: the cases of HOST have less to do, all others more


@pytest.fixture(scope="module")
def program():
    return PROGRAM


@pytest.fixture(scope="module")
def works(program):
    """The work of every case."""
    return {name: program.step_work(case.recipe(), case.batch) for name, case in program.CASES.items()}


@pytest.fixture(scope="module")
def points(program, works):
    """Every case as if steps took what KNOWN and FLOOR say."""
    return timed(program, works, program.Fit(KNOWN, FLOOR))


def timed(program, works, fit):
    return [program.Point(name, work, fit.seconds(work)) for name, work in works.items()]


def test_exactly_the_cases_called_so_are_host_bound(program, works):
    fit = program.Fit(KNOWN, FLOOR)
    assert {name for name, work in works.items() if fit.is_host_bound(work)} == {*HOST}


@settings(max_examples=50, deadline=None)
@given(times=st.tuples(*[st.floats(1, 300)] * len(GPU_TERMS)), floor=st.floats(1e-5, 1e-2))
def test_known_costs_and_floor_are_found_again(program, works, times, floor):
    costs = {term: factor / program.FASTEST[term] for term, factor in zip(GPU_TERMS, times, strict=True)}
    gpu = timed(program, {name: work for name, work in works.items() if name not in HOST}, program.Fit(costs))
    host = [program.Point(name, works[name], floor * works[name].blocks) for name in HOST]
    found = program.fitted(gpu + host, HOST)
    assert found.costs == pytest.approx(costs, rel=1e-6, abs=0)
    assert found.host == pytest.approx(floor)


@pytest.mark.parametrize("term", GPU_TERMS)
def test_no_cost_is_below_what_the_machine_allows(program, works, term):
    """If one cost alone would be, it is at its bound: otherwise that bound could go, and the exact costs be found."""
    least = {name: 1 / program.FASTEST[name] for name in GPU_TERMS}
    found = program.fitted(timed(program, works, program.Fit({**KNOWN, term: least[term] / 2})))
    assert found.costs[term] == least[term]
    assert all(cost >= least[name] for name, cost in found.costs.items())


def test_a_bound_that_does_not_hold_the_fit_changes_nothing(program, points):
    two = ("products", "elementwise")
    table = np.array([[getattr(p.work, term) / p.seconds for term in two] for p in points if p.name not in HOST])
    plain = np.linalg.lstsq(table, np.ones(len(table)))[0]
    assert list(program.fitted(points, HOST, two).costs.values()) == pytest.approx(plain.tolist(), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_fit_is_that_of_scipy(program, seed):
    lsq_linear = pytest.importorskip("scipy.optimize").lsq_linear
    draw = np.random.default_rng(seed)
    table, seconds = draw.normal(size=(9, 4)), draw.uniform(1, 2, 9)  # of costs in units of their bounds
    works = [Work(*row, blocks=1.0) for row in table * list(program.FASTEST.values())]
    found = program.fitted([program.Point("", work, time) for work, time in zip(works, seconds, strict=True)])
    expected = lsq_linear(table / seconds[:, None], np.ones(9), bounds=(1, np.inf), method="bvls").x
    np.testing.assert_allclose([found.costs[term] * program.FASTEST[term] for term in GPU_TERMS], expected, atol=1e-9)
    assert min(expected) == pytest.approx(1)  # or the bound was not tried


def test_the_floor_is_the_mean_and_the_costs_do_not_see_it(program, points):
    slow = [p._replace(seconds=3 * p.seconds) if p.name in HOST[:2] else p for p in points]
    found = program.fitted(slow, HOST)
    assert found.host == pytest.approx(2 * FLOOR)
    assert found.costs == program.fitted(points, HOST).costs
    assert program.fitted([p for p in points if p.name not in HOST]).host == 0


def test_a_host_bound_step_takes_the_floor(program, works):
    fit = program.Fit(KNOWN, FLOOR)
    assert fit.seconds(works["batch-16"]) == fit.seconds(works["wide-batch-16"]) == 12 * FLOOR
    by_hand = sum(KNOWN[term] * getattr(works["base"], term) for term in GPU_TERMS)
    assert fit.seconds(works["base"]) == pytest.approx(by_hand) != 12 * FLOOR


@pytest.mark.parametrize(("floor_in_images", "most"), [(50.5, 50), (0.5, 0), (1.5, 1)])
def test_where_the_floor_ends_by_hand(program, floor_in_images, most):
    a_block = 2 * 256 * 384  # bytes of an image's tokens in a block of S
    fit = program.Fit({"elementwise": 1e-11}, host=floor_in_images * 1e-11 * a_block)
    assert program.most_host_bound(fit, program.CASES["base"]) == most


def test_too_few_points_are_refused(program, points):
    with pytest.raises(ValueError, match=r"3 .*4 terms.*--terms"):
        program.fitted(points[:5], ("depth-6", "tokens-64"))


def test_left_out_errors(program, points):
    for point in points:
        assert program.left_out_error(point, points, HOST, GPU_TERMS) == pytest.approx(0, abs=1e-9)
    few = [p for p in points if p.name not in HOST][:4] + [p for p in points if p.name in HOST][:1]
    assert [program.left_out_error(point, few, HOST, GPU_TERMS) for point in few] == [None] * 5


@pytest.mark.parametrize("name", ["depth-6", "batch-64"])
def test_a_point_left_out_is_not_known_to_the_others(program, points, name):
    changed = [p._replace(seconds=2 * p.seconds) if p.name == name else p for p in points]
    (slow,) = (point for point in changed if point.name == name)
    assert program.left_out_error(slow, changed, HOST, GPU_TERMS) == pytest.approx(-0.5)
    assert -0.5 < program.fitted(changed, HOST).error(slow) < 0


def test_hours_of_a_recipe_by_hand(program):
    from mvm.recipes import load_recipe

    recipe = load_recipe("imagenet32-dit-b")
    floor = program.Fit({"elementwise": 1e-15}, host=1e-3)
    assert program.one_gpu_hours(floor, recipe) == pytest.approx(250228 * 4 * 12 * 1e-3 / 3600)  # four parts of 256
    work = program.Fit({"elementwise": 1e-11}, host=1e-3)
    assert program.one_gpu_hours(work, recipe) == pytest.approx(250228 * 1024 * 2 * 256 * 12 * 768 * 1e-11 / 3600)


def test_the_cases_tell_all_terms_apart(points):
    """No mix of the GPU's terms is nearly another term, at the made-up costs; L stays out of the fit."""
    measured = [point for point in points if point.name not in ("L", *HOST)]
    table = np.array([[getattr(point.work, term) / point.seconds for term in GPU_TERMS] for point in measured])
    assert np.linalg.cond(table / np.linalg.norm(table, axis=0)) < 20


def test_fit_prints_measured_held_and_predicted(program, points, tmp_path, capsys):
    path = tmp_path / "a.json"
    rows = [{"case": p.name, **asdict(program.CASES[p.name]), "step_ms": 1000 * p.seconds} for p in points]
    path.write_text(json.dumps({"rows": rows}))
    program.main(["fit", str(path), "--hold", "L", "--host", *HOST, "--check", str(PUBLISHED)])
    told = capsys.readouterr().out
    assert told.count("| +0.0 % | +0.0 % | GPU |") == len(program.CASES) - 1 - len(HOST)
    assert told.count("| 12.0 | 12.0 | +0.0 % | +0.0 % | host |") == len(HOST)
    assert told.count("| +0.0 % | not in the fit | GPU |") == 1  # L, timed as the others were
    assert [line.split(" | ")[0] for line in told.splitlines() if "not in the fit" in line] == [
        "| L", "| S", "| B", "| XL-half",
    ]  # fmt: skip
    assert "| states | bytes of weights, gradients, moments and averages | 1e-12 | 1e+12 | " in told
    assert "Host: 1.000 ms a block, the mean of batch-16, batch-64, wide-batch-16, tokens-64." in told
    assert "| L/2 | 24.0 | " in told
    assert "| `imagenet32-dit-l` | " in told


@pytest.mark.parametrize(("words", "message"), [
    (["fit", str(PUBLISHED)], "3 measured steps do not determine 4 terms"),
    (["fit", str(PUBLISHED), "--host", "S", "M"], "--host M: no such case was measured"),
    (["fit", str(PUBLISHED), "--host", "S", "--hold", "S"], "--host S: held out too"),
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


def test_fewer_terms_of_fewer_points(program, capsys):
    program.main(["fit", str(PUBLISHED), "--hold", "XL-half", "--terms", "products", "elementwise"])
    told = capsys.readouterr().out
    assert told.count("| +0.0 % | none | GPU |") == 2  # as many costs as points
    assert "| states |" not in told
    assert "Host:" not in told
