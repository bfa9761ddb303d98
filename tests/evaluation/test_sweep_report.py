"""A sweep's report: one page, and sentences that claim no more than the numbers say."""

import csv
import dataclasses
import math
import re
import shlex
import warnings

import numpy as np
import pytest
import scipy.stats
from PIL import Image
from test_report import outside_requests, read

from mvm.cli import app
from mvm.evaluation import sweep_report as findings
from mvm.evaluation.cells import Result
from mvm.evaluation.sweep_report import curves_figure, file_names, flatten, scale_of, write_report
from mvm.settings import SampleConfig
from test_demo import without_conclusion

NASTY = "<script>alert('x')</script> & $\\frac{$ \"q\""
NFES = (5, 9, 19, 39, 79)


def reading(value, error=None, note=""):
    return {"value": value, "error": error, "note": note}


def cell(nfe=19, rho=0.0, fid=3.0, error=None, *, solver="adams", cfg=1.0, low=0.0, high=1.0, grid="", **metrics):
    passes = nfe if cfg == 1 else nfe + 2
    found = {"fid": reading(fid, error)} | {name: reading(value) for name, value in metrics.items()}
    settings = SampleConfig(solver, nfe, rho, cfg, low, high, tuned=False)
    return Result(settings, float(nfe), float(passes), passes / 7, found, grid)


def curves(ode, sde, error=0.1, **kwargs):
    """Cells of an ODE and an SDE with FIDs by NFE."""
    pairs = ((rho, fids) for rho, fids in ((0.0, ode), (1.0, sde)))
    return [cell(nfe, rho, fid, error, **kwargs) for rho, fids in pairs for nfe, fid in zip(NFES, fids, strict=True)]


def only_sentence(results, metric="fid"):
    (text,) = findings.comparisons(results, metric).values()
    return text


ODE = (9.0, 5.0, 4.0, 3.5, 3.4)


@pytest.mark.parametrize(
    ("sde", "text"),
    [
        ((20.0, 9.0, 4.5, 3.0, 2.5), "below the ODE from NFE 39 on and above it up to NFE 19"),
        (
            (20.0, 9.0, 4.5, 3.5, 2.5),
            "below the ODE at NFE 79, above it up to NFE 19 and level with it at NFE 39",
        ),
        ((20.0, 9.0, 4.5, 4.0, 4.0), "above the ODE at every NFE tried (5 to 79)"),
        ((8.0, 4.0, 3.0, 2.0, 1.0), "below the ODE at every NFE tried (5 to 79)"),
        ((8.9, 5.1, 4.1, 3.4, 3.3), "level with the ODE at every NFE tried (5 to 79)"),
        (
            (8.0, 6.0, 3.0, 4.0, 3.4),
            "below the ODE at NFE 5 and 19, above it at NFE 9 and 39 and level with it at NFE 79",
        ),
    ],
)
def test_where_the_sde_passes_the_ode(sde, text):
    assert only_sentence(curves(ODE, sde)) == f"the SDE (rho 1) is {text}."


def test_better_side_comes_first_where_higher_is_better():
    values = {(5, 0.0): 0.5, (9, 0.0): 0.6, (5, 1.0): 0.4, (9, 1.0): 0.7}
    results = [cell(nfe, rho, precision=value) for (nfe, rho), value in values.items()]
    assert only_sentence(results, "precision") == "the SDE (rho 1) is above the ODE at NFE 9 and below it at NFE 5."


def test_curves_are_compared_within_solver_and_guidance_and_at_common_nfe():
    results = [cell(5, 0.0, 4.0), cell(9, 1.0, 1.0), cell(5, 1.0, 1.0, solver="sa"), cell(5, 1.0, 1.0, cfg=1.5)]
    assert findings.comparisons(results, "fid") == {}
    results.append(cell(9, 0.0, math.nan))
    assert findings.comparisons(results, "fid") == {}
    results.append(cell(5, 1.0, 9.0, low=0.3, high=0.4))  # without guidance these say nothing
    assert only_sentence(results) == "the SDE (rho 1) is above the ODE at NFE 5."


def test_lead_names_best_and_crossover_and_the_caution():
    lead = findings.main_finding(curves(ODE, (20.0, 9.0, 4.5, 3.0, 2.5)))
    assert lead == (
        "FID is best, 2.50 ± 0.10, with adams, SDE (rho 1), NFE 79, no guidance. With adams and no guidance, the SDE "
        "(rho 1) is below the ODE from NFE 39 on and above it up to NFE 19. Cells are level where the 95 % interval of "
        "their difference contains zero."
    )


def test_lead_without_errors_says_so():
    lead = findings.main_finding(curves(ODE, (20.0, 9.0, 4.5, 3.0, 2.5), error=None))
    assert lead.endswith("No error is stated for FID: differences are as measured and may be noise.")
    assert "level" not in lead


def test_ties_with_the_best_are_counted():
    results = [cell(5, fid=3.0, error=0.3), cell(9, fid=3.97, error=0.4), cell(19, fid=3.99, error=0.4)]
    top = findings.best(results, "fid")
    assert (top.cell, top.rivals) == (results[0], [results[1]])  # 1.96 times the root of 0.09 + 0.16 is 0.98
    assert "1 other cell is level with it." in findings.best_in_words(results, "fid")


def paired(fid, parts):
    return dataclasses.replace(cell(fid=fid), metrics={"fid": {**reading(fid, math.hypot(*parts)), "parts": parts}})


def test_cells_on_common_seeds_are_compared_block_by_block():
    """Two figures whose errors are nearly one and the same are told apart, far within either error."""
    shared = [0.1 * (-1) ** i for i in range(20)]  # an error of 0.45
    a, b = paired(3.0, shared), paired(3.05, [part + 0.002 * (-1) ** (i // 2) for i, part in enumerate(shared)])
    found = findings.gap(findings.reading(a, "fid"), findings.reading(b, "fid"))
    assert found.value == pytest.approx(0.05)
    assert found.high - found.value == pytest.approx(2.093 * 0.002 * 20**0.5, rel=1e-3)  # Student's t of 19
    assert found.significant
    assert findings.best([a, b], "fid").rivals == []
    alone = findings.gap(findings.reading(a, "fid"), findings.reading(cell(fid=3.05, error=0.45), "fid"))
    assert alone.high - alone.value == pytest.approx(1.96 * 0.45 * 2**0.5, rel=1e-2)
    assert not alone.significant
    assert (found.paired, alone.paired) == (True, False)


def test_intervals_of_repeats_are_students_of_their_differences():
    """As scipy's paired t-test of the repeats themselves."""
    a, b = np.array([3.0, 3.4, 3.1]), np.array([3.6, 3.9, 3.8])
    sides = [paired(float(x.mean()), list((x - x.mean()) / 6**0.5)) for x in (a, b)]
    found = findings.gap(*(findings.reading(side, "fid") for side in sides))
    want = scipy.stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((want.low, want.high), rel=1e-4)


def test_parts_that_are_no_numbers_are_none():
    broken = paired(3.0, [math.nan, 0.1])
    assert findings.reading(broken, "fid").parts == ()
    assert findings.gap(findings.reading(broken, "fid"), findings.reading(cell(), "fid")).paired is False


@pytest.mark.parametrize(
    ("value", "reach", "text"),
    [
        (0.524, 0.213, "+0.52 (+0.31 to +0.74)"),
        (-1e-9, 0.0213, "+0.000 (-0.021 to +0.021)"),
        (12.0, 25.0, "+12 (-13 to +37)"),
        (0.5, 0.0, "+0.5"),
    ],
)
def test_differences_in_words(value, reach, text):
    assert str(findings.Gap(value, value - reach, value + reach)) == text


def test_the_page_tells_how_far_sde_and_ode_are_apart(tmp_path):
    write_report(tmp_path, curves(ODE, (20.0, 9.0, 4.5, 3.5, 2.5)), {})
    text = (tmp_path / "report.html").read_text()
    read(text)
    assert "FID: SDE less ODE" in text
    assert "<b>+11.00 (+10.72 to +11.28)</b>" in text
    assert "<b>+0.00" not in text
    assert "+0.00 (-0.28 to +0.28)" in text
    assert "Errors are added in quadrature" in text
    write_report(tmp_path, curves(ODE, (20.0, 9.0, 4.5, 3.5, 2.5), error=None), {})
    assert "SDE less ODE" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("sde", "best_cell", "sides"),
    [
        ((20.0, 9.0, 4.5, 3.0, 2.5), "adams, SDE (rho 1), NFE 79, no guidance", (2, 3)),
        ((20.0, 9.0, 4.9, 4.5, 4.4), "adams, ODE (rho 0), NFE 79, no guidance", (0, 5)),
    ],
)
def test_conclusions_follow_the_cells(tmp_path, sde, best_cell, sides):
    write_report(tmp_path, curves(ODE, sde), {})
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    said = read(text).of("p")
    assert without_conclusion(text) == []
    assert f"The best cell is {best_cell}." in said
    assert any(one.startswith(f"FID is best, {min(*sde, *ODE):.2f} ± 0.10, with {best_cell}.") for one in said)
    below, above = sides
    assert f"The SDE is significantly below its ODE in {below} and above it in {above} of 5 comparisons." in said


def test_the_fewest_passes_level_with_the_best():
    results = [cell(39, fid=3.0, error=0.3), cell(9, fid=3.2, error=0.3), cell(5, fid=9.0, error=0.3)]
    assert "NFE 9, no guidance, takes the fewest passes: 9." in findings._cheapest(results, "fid")
    results[1] = cell(9, fid=6.0, error=0.3)
    assert "NFE 39, no guidance, takes the fewest passes: 39." in findings._cheapest(results, "fid")


@pytest.mark.parametrize(
    ("typed", "name", "model"),
    [
        ("mvm sweep runs/a --nfe 5", "a", "runs/a"), ("mvm sweep digits", "digits", "digits"),
        ("mvm sweep --nfe 5 runs/a", "a", "MODEL"), ("mvm sweep my runs/a", "a", "MODEL"), ("", "a", "MODEL"),
    ],
)  # fmt: skip
def test_next_steps_name_the_best_cell_and_are_understood(tmp_path, typed, name, model):
    better = cell(19, 0.75, fid=2.0, cfg=1.5, low=0.6, high=0.8)
    results = [cell(5, fid=3.0), better, cell(9, fid=4.0, solver="sa")]
    write_report(tmp_path, results, {"command": typed, "name": name})
    box = read((tmp_path / "report.html").read_text(encoding="utf-8")).of("pre")
    assert 4 <= len(box) <= 6
    how = "--solver adams --nfe 19 --rho 0.75 --cfg 1.5 --interval 0.6,0.8"
    assert box[0] == f"mvm sample {model} {how} --num 64 --out best.png"
    assert box[1] == f"mvm eval {model} {how} -n 10000 --json best.json"
    for text in box:
        app.parse_args(shlex.split(text)[1:], exit_on_error=False, print_error=False)
    tuned = dataclasses.replace(better, tuned=True)  # a solver that is named has not the model's own times
    assert "--solver" not in findings.next_steps([tuned], {})[0][1]


def test_best_follows_the_direction_and_unknown_metrics_have_none():
    results = [cell(5, fid=3.0, recall=0.5, odd=1.0), cell(9, fid=2.0, recall=0.4, odd=2.0)]
    assert findings.best(results, "fid").cell is results[1]
    assert findings.best(results, "recall").cell is results[0]
    assert findings.best(results, "odd") is None
    assert "no cell is called best" in findings.best_in_words(results, "odd")


def test_sparse_and_failed_leads():
    assert findings.main_finding([cell()]) == "FID is 3.000 (adams, ODE (rho 0), NFE 19, no guidance)."
    assert findings.main_finding([cell(fid=math.nan)]) == "FID failed in every cell."


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (2.3141, 0.0421, "2.314 ± 0.042"),
        (10.484, 0.13, "10.48 ± 0.13"),
        (123.44, 25.0, "123 ± 25"),
        (8.6e-05, 0.00012, "0.00009 ± 0.00012"),
        (-1e-06, 0.00012, "0.00000 ± 0.00012"),
        (3.1e-06, 2e-06, "3.1e-06 ± 2.0e-06"),
        (2.5, 1e-6, "2.500 ± 1e-06"),
        (0.69534, None, "0.6953"),
        (12345.6, None, "12346"),
        (math.nan, 0.1, "failed"),
        (math.inf, None, "failed"),
    ],
)
def test_numbers_in_words(value, error, text):
    result = dataclasses.replace(cell(), metrics={"fid": reading(value, error)})
    assert findings.in_words(findings.reading(result, "fid")) == text


@pytest.mark.parametrize(
    ("values", "log"), [([1, 9.9], False), ([1, 10.1], True), ([-1, 100], False), ([0, 5], False), ([], False)]
)
def test_log_only_beyond_a_decade_and_never_below_zero(values, log):
    assert scale_of(values, decades=1).log is log


def test_ticks_stand_at_the_nfes_and_do_not_touch():
    assert scale_of(NFES, math.log10(3), exact=True).ticks == NFES
    many = scale_of(range(1, 80), math.log10(3), exact=True).ticks
    assert 5 < len(many) < 17
    assert set(many) <= set(range(1, 80))
    assert scale_of([2.1, 190], decades=1).ticks == (2, 5, 10, 20, 50, 100, 200)
    assert scale_of([0.05, 4000], decades=1).ticks == (0.1, 1, 10, 100, 1000)


@pytest.fixture
def sweep(tmp_path):
    """A folder with grids, and cells: two ways, with and without guidance, one failed."""
    (tmp_path / "grids").mkdir()
    Image.new("RGB", (40, 40), "red").save(tmp_path / "grids/a.png")
    Image.new("RGB", (1200, 600), "blue").save(tmp_path / "grids/b.png")
    results = [
        cell(nfe, rho, 30 / nfe + rho, 0.1, cfg=cfg, low=0.6, high=0.8, grid=grid, **{"kid": -0.001, NASTY: 1.0})
        for cfg in (1.0, 1.2)
        for rho, grid in ((0.0, "grids/a.png"), (1.0, "grids/b.png"))
        for nfe in (5, 19)
    ]
    results.append(cell(39, 0.0, math.nan, grid="grids/lost.png"))
    return tmp_path, results


FACTS = {
    "name": NASTY,
    "images": 1000,
    "warnings": ["few <images>", NASTY],
    "model": {"weights": {"sha256": "ab" * 32}, "tags": []},
    "parts": [{"x": 1}, {"x": None}],
}


def test_page(sweep):
    folder, results = sweep
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(folder, results, FACTS)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert outside_requests(text) == []
    assert without_conclusion(text) == []
    reader = read(text)
    assert "script" not in reader.seen
    assert f"Warning: {NASTY}" in reader.texts
    assert reader.texts.index("Warning: few <images>") < reader.texts.index("All cells")
    assert {"model.weights.sha256", "ab" * 32, "parts.1.x", "failed"} <= set(reader.texts)
    # three metrics by three costs, four curves to a panel
    assert reader.seen.count("svg") == 9
    assert text.count("data:image/png;base64,") == 4
    assert text.count("data:image/jpeg;base64,") == 4  # grids wider than 960 pixels are reduced
    assert re.findall(r"<b>(.*?) ★</b>", text) == ["-0.001000", "1.58 ± 0.10"]
    assert {p.name for p in folder.iterdir()} == {"grids", "plots", "report.html", "results.csv"}


def test_every_metric_has_its_plots(sweep):
    folder, results = sweep
    write_report(folder, results, {})
    names = file_names(findings.metrics_of(results)).values()
    assert list(names)[:2] == ["fid", "kid"]
    assert {p.name for p in (folder / "plots").iterdir()} == {f"{n}.{kind}" for n in names for kind in ("svg", "png")}
    for name in names:
        assert outside_requests((folder / f"plots/{name}.svg").read_text(encoding="utf-8")) == []
        with Image.open(folder / f"plots/{name}.png") as image:
            assert image.width > image.height  # two panels


def test_same_input_same_bytes(sweep):
    folder, results = sweep
    found = []
    for order in (results, results, list(reversed(results))):
        write_report(folder, order, FACTS)
        found.append({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    assert found[0] == found[1] == found[2]


def test_csv_round_trip(sweep):
    folder, results = sweep
    write_report(folder, results, {})
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    back = []
    for row in rows:
        names = [name.removesuffix(" value") for name in row if name.endswith(" value") and row[name]]
        parts = {n: [row[f"{n} {part}"] for part in ("value", "error", "note")] for n in names}
        metrics = {n: reading(float(v), float(e) if e else None, note) for n, (v, e, note) in parts.items()}
        numbers = {name: float(row[name]) for name in list(row)[2:11]} | {"nfe": int(row["nfe"])}
        words = {name: row[name] for name in ("solver", "grid", "auto")}
        back.append(Result.read({**numbers, **words, "metrics": metrics}))
    assert repr(back) == repr(findings.in_order(results))  # by repr: a failed cell is NaN, which equals nothing


def test_many_curves_are_split_by_guidance(tmp_path):
    results = [cell(5, rho, cfg=cfg) for cfg in (1.0, 1.5, 2.0) for rho in (0.0, 0.5, 1.0)]
    write_report(tmp_path, results, {})
    assert read((tmp_path / "report.html").read_text(encoding="utf-8")).seen.count("svg") == 6  # by NFE and by passes


def test_one_failed_cell_still_has_a_page(tmp_path):
    write_report(tmp_path, [cell(fid=math.nan)], {"images": 10})
    assert "failed" in read((tmp_path / "report.html").read_text(encoding="utf-8")).texts
    assert (tmp_path / "plots/fid.svg").is_file()


def test_nothing_to_report_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 cells and no metric"):
        write_report(tmp_path, [], {})
    with pytest.raises(ValueError, match="metric='kid' is in no cell; there are fid"):
        curves_figure([cell()], "kid", tmp_path / "kid.svg")
    assert list(tmp_path.iterdir()) == []


def test_file_names_are_safe_and_differ():
    assert file_names(["fid", "FID", "../../x", "..", "/x"]) == {
        "fid": "fid",
        "FID": "FID-2",
        "../../x": "x",
        "..": "metric",
        "/x": "x-2",
    }


def test_flatten():
    facts = {"a": {"b": 1, "c": {}}, "d": [1, "x"], "e": [], "f": [{"g": None}]}
    assert flatten(facts) == [("a.b", "1"), ("a.c", "none"), ("d", "1, x"), ("e", "none"), ("f.0.g", "none")]
