"""The programs of benchmarks/ that make tables and figures of studies: what they read, choose and draw."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mvm.path import LinearFlow, MeanVelocity, TimeLaw

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(scope="module")
def study():
    return imported("study_figures")


@pytest.fixture(scope="module")
def pictures():
    return imported("model_pictures")


@pytest.fixture(scope="module")
def terms():
    return imported("equal_terms")


@pytest.fixture
def told_runs():
    return imported("equal_terms_runs")


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return __import__(name)


def cell(solver="adams", nfe=26, rho=0.0, fid=10.0, cfg=1.0, low=0.0, high=1.0, error=None):
    from mvm.evaluation.sweep_findings import Result

    metrics = {"fid": {"value": fid, "error": error, "note": ""}}
    return Result(solver, nfe, rho, cfg, low, high, nfe, nfe if cfg == 1 else nfe + 5, 2.5, metrics, "")


# ---- study_figures


def test_results_come_back_from_csv(study, tmp_path):
    from mvm.evaluation.sweep_report import csv_text

    cells = [cell(fid=3.25, error=0.5), cell("sa, t_min 0.0001", 13, 0.75, 4.5, 1.2, 0.6, 0.8, 0.25)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.csv").write_text(csv_text(cells[:1]))
    (tmp_path / "b.csv").write_text(csv_text(cells[1:]))
    found = study.read_results([tmp_path / "a", tmp_path / "b.csv"])
    assert [study.table([r]) for r in found] == [study.table([r]) for r in cells]
    assert [(r.nfe, r.rho, r.cfg, r.low, r.high, r.passes) for r in found] == [
        (26, 0, 1, 0, 1, 26),
        (13, 0.75, 1.2, 0.6, 0.8, 18),
    ]
    assert study.table(found).splitlines()[-1] == (
        "| sa, t_min 0.0001 | SDE (rho 0.75) | 1.2 on [0.6, 0.8] | 13 | 18 | 4.50 ± 0.25 | 2.5 |"
    )


GRID, MANY = ("adams.csv", "grid-adams.json", "grid-sa.json"), ("table.json", "best.json")  # of the study that was run


@pytest.mark.parametrize(
    ("page", "files"),
    [
        *(("sde-ode", files) for files in (GRID, MANY, ("guidance.json",), ("guidance-more.json",))),
        *(("larger", files) for files in (("guidance.json",), ("best.json",))),
    ],
)
def test_the_page_of_a_study_says_what_was_measured(study, page, files):
    cells = study.read_results([RESULTS / page / name for name in files])
    assert study.table(cells) in (RESULTS / f"{page}.md").read_text("utf-8")


def test_the_page_of_the_larger_model_has_the_losses_that_were_logged(study):
    lines = (RESULTS / "larger" / "metrics.jsonl").read_text("utf-8").splitlines()
    logged = {row["step"]: row for row in map(json.loads, lines) if "loss" in row}
    page = (RESULTS / "larger.md").read_text("utf-8")
    for step in (500, 1200, 2000, 4000, 8000, 10000):
        row = logged[step]
        assert f"| {step:,} | {row['loss']:.4f} | {row['repa']:.3f} | {row['grad_norm']:.3f} |" in page
    alone = [row["images_per_second"] for row in logged.values() if row["images_per_second"] > 6900]
    assert f"{round(np.median(alone), -1):,.0f} images/s" in page
    assert sum(row["skipped"] for row in logged.values()) == 0


@pytest.mark.parametrize(
    ("file", "best", "other"),
    [
        *(("sde-ode/guidance-more", 3, other) for other in ((3, 0.6, 0.9), (4, 0.65, 0.8), (3, 0.65, 0.85))),
        *(("larger/guidance", 2.5, other) for other in ((2, 0.6, 0.8), (3, 0.6, 0.8))),
    ],
)
def test_the_page_says_what_other_guidance_costs(study, file, best, other):
    from mvm.evaluation.sweep_findings import gap, reading

    cells = {(r.cfg, r.low, r.high): r for r in study.read_results([RESULTS / f"{file}.json"])}
    found = gap(*(reading(cells[place], "fid") for place in ((best, 0.6, 0.8), other)))
    page = (RESULTS / f"{Path(file).parent}.md").read_text("utf-8").replace("95 %: ", "").replace("\n", " ")
    assert found.paired
    assert f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})" in page


@pytest.mark.parametrize("files", [GRID, MANY[:1]])
def test_differences_on_the_page_of_the_study_are_those_of_its_cells(study, files):
    found = study.differences(study.read_results([RESULTS / "sde-ode" / name for name in files]))
    page = (RESULTS / "sde-ode.md").read_text("utf-8")
    assert found
    assert [title for title, rows in found.items() if rows not in page] == []


def test_the_page_of_the_study_has_the_t_min_that_was_found(study):
    cells = study.read_results([RESULTS / "sde-ode" / "tmin.json"])
    page = (RESULTS / "sde-ode.md").read_text("utf-8")
    for t_min in {study.parse_solver(r.solver)[1] for r in cells}:
        of = {(r.nfe, r.rho): r for r in cells if study.parse_solver(r.solver)[1] == t_min}
        row = [f"{study.value(of[nfe, rho]):.2f}" for nfe in (13, 39) for rho in (0.0, 0.75)]
        assert f"| {t_min:.0e} | {' | '.join(row)} |".replace("e-0", "e-") in page
    assert study.best_t_min(cells) == 1e-4


SOLVERS = RESULTS / "solvers"


def test_the_page_of_the_solvers_has_the_errors_that_were_measured():
    near, page = imported("near_reference"), (RESULTS / "solvers.md").read_text("utf-8")
    files = sorted(SOLVERS.glob("near-*.json"))
    assert len(files) == 4
    for told in (json.loads(path.read_text("utf-8")) for path in files):
        assert (
            f"{near.named(told['facts'])[1:]}; floor {told['facts']['floor']:.4f}:\n\n{near.table(told, True)}\n"
            in page
        )
        for solver in ("adams", "ipndm, r 0.01 to 40"):
            assert f"| {solver} | " in near.table(told)


@pytest.mark.parametrize("name", ["cifar10", "second", "cifar10-guided", "cifar10-sde"])
def test_the_page_of_the_solvers_has_the_fids_that_were_measured(study, name):
    from mvm.evaluation.sweep_findings import gap, in_words, reading

    page, cells = (RESULTS / "solvers.md").read_text("utf-8"), study.read_results([SOLVERS / f"fid-{name}.json"])
    found = {(r.solver, r.nfe): reading(r, "fid") for r in cells}
    nfes = sorted({nfe for _, nfe in found})
    for solver in {solver for solver, _ in found}:
        assert f"| {solver} | {' | '.join(in_words(found[solver, nfe]) for nfe in nfes)} |" in page
    assert study.differences(cells)["less adams at as many evaluations"] in page
    for fewer, more in ((8, 13), (10, 13), (13, 26), (20, 26)) if name == "cifar10" else ():
        assert (
            f"| {fewer} | {more} | {study.gap_text(gap(found['adams-power', more], found['adams', fewer]))} |" in page
        )


def test_the_page_of_the_solvers_has_the_digits_that_were_measured(study):
    from mvm.evaluation.sweep_findings import Result, gap, reading

    told = json.loads((SOLVERS / "digits.json").read_text("utf-8"))["results"]
    found = {(r["solver"], r["rho"], r["nfe"]): reading(Result(**r), "fd-pixels") for r in told}
    page, nfes = (RESULTS / "solvers.md").read_text("utf-8"), (5, 8, 13, 26)
    values = [f"{found['adams', 0.0, nfe].value:.3f}" for nfe in nfes]
    assert f"`adams` has {', '.join(values)} by the ODE" in page
    for solver, rho, name in (("adams-power", 0.0, "ODE"), ("adams-power", 1.0, "SDE (rho 1)"), ("unipc", 0.0, "ODE")):
        gaps = [study.gap_text(gap(found["adams", rho, nfe], found[solver, rho, nfe])) for nfe in nfes]
        assert f"| `{solver}`, {name} | {' | '.join(gaps)} |" in page


def test_other_pages_quote_the_fids_that_were_measured(study):
    cells = study.read_results([SOLVERS / "fid-cifar10.json"])
    found = {(r.solver, r.nfe): f"{study.value(r):.2f}" for r in cells}
    page = (BENCHMARKS.parent / "docs" / "choose-a-sampler.md").read_text("utf-8")
    for solver in {r.solver for r in cells}:
        row = [found[solver, nfe] for nfe in (5, 8, 10, 13, 20, 26)]
        assert f"| `{solver}` | {' | '.join(f'**{v}**' if solver == 'adams' else v for v in row)} |" in page
    assert f"FID {found['adams', 13]}, {found['adams', 10]} and {found['adams', 8]} " in page
    promise = next(
        line for line in (BENCHMARKS.parent / "README.md").read_text("utf-8").splitlines() if "| accurate |" in line
    )
    for solver in ("adams", "adams-power", "unipc"):
        assert f"{found[solver, 8]} / {found[solver, 13]} / {found[solver, 26]}" in promise


def test_the_page_of_the_solvers_has_what_was_explored():
    page = (RESULTS / "solvers.md").read_text("utf-8")
    rows = {
        row["k"]: row for row in map(json.loads, (SOLVERS / "ending.jsonl").read_text().splitlines()) if row["n"] == 8
    }
    for orders, ending in (("P3C4", 1), ("P3C4", 2), ("P3C4", 3), ("P4C4", 3)):
        row = rows[f"c0.02 b1.0 {orders} E{ending} e0.1 sNone"]
        assert f" | {row['rmse0']:.4f} | {row['fid']:.2f} |" in page
    tags = [json.loads(line)["tag"] for line in (SOLVERS / "search.jsonl").read_text().splitlines()]
    assert f"{sum(isinstance(tag, list) for tag in tags)} candidates" in page


def test_figures_of_the_solvers(study, tmp_path):
    near = imported("near_reference")
    cells = [cell("adams", nfe, fid=20.0 - nfe / 2) for nfe in (8, 13)] + [cell("unipc", 8, fid=30.0)]
    panels = study.solver_panels([cells, cells[:1] + cells[2:]], ["a", "b"])
    assert [[curve.label for curve in curves] for curves, _ in panels] == [["adams", "unipc"]] * 2
    assert panels[0][0][1].style == panels[1][0][1].style != panels[0][0][0].style
    assert [axes.title for _, axes in panels] == ["a", "b"]
    ((curves, axes),) = study.solver_panels([cells], ["a"], study.SECONDS)
    assert axes.x == study.SECONDS.label
    assert list(curves[0].x) == [r.seconds for r in cells[:2]]
    near.figure([json.loads((SOLVERS / "near-latent.json").read_text("utf-8"))], tmp_path / "x.png")
    assert Image.open(tmp_path / "x.png").width > 1000


def test_seconds_that_were_not_noted_are_no_number(study, tmp_path):
    from mvm.evaluation.sweep_report import csv_text

    (tmp_path / "a.csv").write_text(csv_text([cell(fid=3.25)]).replace(",2.5,", ",,"))
    assert study.table(study.read_results([tmp_path / "a.csv"])).splitlines()[-1].endswith("| 3.250 | - |")


def test_differences_are_of_sdes_and_of_sa_at_as_many_evaluations_and_twice_as_many(study, tmp_path):
    cells = [
        cell(nfe=26, fid=3.0, error=0.1),
        cell(nfe=26, rho=1.0, fid=3.5, error=0.1),
        cell(nfe=13, rho=1.0, fid=9.0),
    ]
    cells += [cell("sa, t_min 0.0001", 52, 0.0, 3.1, error=0.1), cell("sa", 26, 0.0, 3.1), cell("sa", 52, 1.0, 2.0)]
    cells += [cell("sa", 52, 0.0, fid=math.nan)]  # failed
    written = {"results": [dataclasses.asdict(r) for r in cells]}
    (tmp_path / "results.json").write_text(json.dumps(written))
    (tmp_path / "results.csv").write_text("not read where both are there")
    found = study.differences(study.read_results([tmp_path]))
    assert {title: rows.splitlines()[2:] for title, rows in found.items()} == {
        "SDE less ODE": ["| adams | SDE (rho 1) | none | **+0.50 (+0.22 to +0.78)†** |"],
        "adams less sa at as many evaluations": ["| adams less sa | ODE (rho 0) | none | -0.10 (-0.30 to +0.10)† |"],
        "adams less sa at twice as many": [
            "| adams less sa, t_min 0.0001 | ODE (rho 0) | none | -0.10 (-0.38 to +0.18)† |",
            "| adams less sa | SDE (rho 1) | none | **+1.50 (+1.30 to +1.70)†** |",
        ],
        "less the same at 26 evaluations": ["| adams | SDE (rho 1) | none | **+5.50 (+5.30 to +5.70)†** |"],
    }


def test_parts_of_errors_are_read_from_json(study, tmp_path):
    parts = [0.1 * (-1) ** i for i in range(20)]
    cells = [cell(fid=3.0, error=0.45), cell(rho=1.0, fid=3.05, error=0.45)]
    for number, found in enumerate(cells):
        found.metrics["fid"]["parts"] = [part + number * 0.002 * (-1) ** (i // 2) for i, part in enumerate(parts)]
    (tmp_path / "results.json").write_text(json.dumps({"results": [dataclasses.asdict(r) for r in cells]}))
    found = study.differences(study.read_results([tmp_path]))["SDE less ODE"]
    assert found.endswith("| **+0.050 (+0.031 to +0.069)** |")


def test_sweeps_of_other_images_are_not_compared(study, tmp_path):
    facts = {"model": {"sha256": "a"}, "draw": {**dict.fromkeys(study.DRAWN, 1), "batch": 5}, "reference": {"count": 9}}
    others = {
        "batch": facts | {"draw": facts["draw"] | {"batch": 7}},
        "seed": facts | {"draw": facts["draw"] | {"seed": 2}},
    }
    for name, told in {"first": facts, **others}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"facts": told, "results": []}))
    study.check_alike([tmp_path / "first.json", tmp_path / "batch.json"])
    with pytest.raises(ValueError, match=r"seed\.json is of another model, draw or reference than .*first\.json"):
        study.check_alike([tmp_path / "first.json", tmp_path / "seed.json"])


def test_a_solver_is_read_as_a_sweep_tells_it(study):
    from mvm.evaluation.sweep import solver_name
    from mvm.recipes import SampleConfig

    for t_min in (1e-2, 1e-3, 3e-4, 1e-5):
        assert study.parse_solver(solver_name(SampleConfig("sa", t_min=t_min))) == ("sa", t_min)
    assert study.parse_solver("adams")[0] == "adams"


def test_the_best_t_min_is_best_on_the_whole(study):
    cells = [
        *(cell("sa", nfe, fid=fid) for nfe, fid in ((13, 40.0), (39, 9.0))),  # 360
        *(cell("sa, t_min 0.01", nfe, fid=fid) for nfe, fid in ((13, 20.0), (39, 11.0))),  # 220, though not best at 39
        *(cell("sa, t_min 0.0001", nfe, fid=fid) for nfe, fid in ((13, 90.0), (39, 8.0))),  # 720
    ]
    assert study.best_t_min([cell("adams", fid=1.0), *cells]) == 0.01
    assert study.best_t_min(cells[:2]) == 1e-3
    with pytest.raises(ValueError, match="finish the sweep first"):
        study.best_t_min(cells[:3])


def test_the_best_cell_as_options(study):
    cells = [cell(fid=5.0), cell(rho=0.75, fid=4.0, cfg=1.2, low=0.6, high=0.8), cell(fid=math.nan)]
    assert study.best_options(cells) == "--solvers adams --nfe 26 --rho 0.75 --cfg 1.2 --interval 0.6,0.8"
    assert (
        study.best_options([cell("sa, t_min 1e-05", 65, 1.0)]) == "--solvers sa --nfe 65 --rho 1 --cfg 1 --t-min 1e-05"
    )


def test_curves_tell_solver_by_dash_and_rho_by_colour(study, tmp_path):
    guided = {"cfg": 1.2, "low": 0.6, "high": 0.8}
    cells = [
        cell(solver, nfe, rho, 5 + rho + nfe / 100, **way)
        for way in ({}, guided)
        for solver in ("adams", "sa, t_min 0.0001")
        for rho in (0.0, 1.0)
        for nfe in (26, 13)
    ]
    panels = study.curve_panels(cells)
    assert [axes.title for _, axes in panels] == ["no guidance", "guidance 1.2 on [0.6, 0.8]"]
    assert panels[0][1].range_y == panels[1][1].range_y
    curves = panels[0][0]
    assert [curve.label for curve in curves] == [
        f"{solver}, {name}" for solver in ("adams", "sa, t_min 0.0001") for name in ("ODE (rho 0)", "SDE (rho 1)")
    ]
    assert [curve.style.dash for curve in curves] == ["-", "-", "--", "--"]
    assert curves[0].style.colour == curves[2].style.colour != curves[1].style.colour
    assert (curves[1].x, curves[1].y) == ([13, 26], [6.13, 6.26])
    study.write_figure(panels, tmp_path / "x.png")
    assert Image.open(tmp_path / "x.png").width > 1000


def test_a_figure_may_end_below_its_worst_cell(study):
    cells = [cell(fid=3.0), cell(nfe=13, fid=4.0), cell("sa", 13, fid=90.0), cell("sa", fid=3.5)]
    [(curves, axes)] = study.curve_panels(cells, top=5.0)
    assert axes.range_y[1] < 10 < study.curve_panels(cells)[0][1].range_y[1]
    assert max(curves[1].y) == 90.0  # the line goes there


def test_a_figure_of_another_kind_is_refused(study, tmp_path, monkeypatch, capsys):
    from mvm.evaluation.sweep_report import csv_text

    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text(csv_text([cell()]))
    monkeypatch.setattr("sys.argv", ["study_figures.py", "curves", "x.csv", "--out", "x.xyz"])
    with pytest.raises(SystemExit, match="2"):
        study.main()
    assert "--out x.xyz must end in .png or .svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "told"), [(None, "No such file or directory: 'x.csv'"), ("solver,nfe\n", "no cell of x.csv holds fid")]
)
def test_misuse_is_answered_in_a_line(study, written, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if written:
        Path("x.csv").write_text(written)
    monkeypatch.setattr("sys.argv", ["study_figures.py", "best", "x.csv"])
    with pytest.raises(SystemExit, match="2"):
        study.main()
    assert told in capsys.readouterr().err


def test_every_interval_begins_without_guidance(study):
    cells = [cell(fid=9.0), *(cell(fid=s, cfg=s, low=low) for low in (0.0, 0.3) for s in (3.0, 2.0))]
    ((curves, axes),) = study.guidance_panels(cells)
    assert [(curve.label, curve.x, curve.y) for curve in curves] == [
        (f"on [{low}, 1]", [1.0, 2.0, 3.0], [9.0, 2.0, 3.0]) for low in ("0", "0.3")
    ]
    assert axes.title == "adams, ODE (rho 0), NFE 26"


def test_an_interval_of_one_scale_is_a_point(study):
    cells = [cell(fid=9.0), *(cell(fid=s, cfg=s) for s in (2.0, 3.0)), cell(fid=5.0, cfg=4.0, low=0.3)]
    ((curves, _),) = study.guidance_panels(cells)
    assert [(curve.x, curve.y) for curve in curves] == [([1.0, 2.0, 3.0], [9.0, 2.0, 3.0]), ([4.0], [5.0])]


# ---- model_pictures


def test_pictures_of_the_shipped_digits(pictures, tmp_path, monkeypatch):
    import torch

    import mvm
    from mvm.demo import grid_of_classes
    from mvm.generate import generate_all
    from mvm.pictures import grid
    from mvm.recipes import SampleConfig

    model, settings = mvm.load("digits"), SampleConfig(nfe=2)
    picture = pictures.by_class(model, 3, settings)
    images = grid_of_classes(model, settings, rows=3)  # column = class
    rows = torch.cat([images[label::10] for label in range(10)])
    body = grid(rows, 3, 2, 2).convert("RGB")
    assert picture.crop((picture.width - body.width, 0, *picture.size)).tobytes() == body.tobytes()
    monkeypatch.setattr(pictures, "NOISE_NFES", (1, 2))
    picture = pictures.one_noise(model, (3, 5), {"cfg": 2.0, "low": 0.3, "high": 0.9})
    assert picture.height == 26 + 6 * (3 * 8 + 2) + 2
    monkeypatch.setattr(pictures, "SCALES", ((1.0, 0.0, 1.0), (2.0, 0.3, 0.9)))
    labels = torch.arange(10)
    rows = [
        generate_all(model, labels, labels, SampleConfig(nfe=2, **way), progress=False).images
        for way in ({}, {"cfg": 2.0, "low": 0.3, "high": 0.9})
    ]
    body = grid(torch.cat(rows), 10, 2, 2).convert("RGB")
    scales = pictures.scales(model, 2)
    assert scales.crop((scales.width - body.width, 26, *scales.size)).tobytes() == body.tobytes()
    pictures.write_picture(picture, tmp_path / "x.png")
    assert Image.open(tmp_path / "x.png").size == picture.size


def test_each_warp_is_shown_alone_and_then_all(pictures):
    import mvm
    from mvm.data import augmentation, augmented, digits
    from mvm.recipes import SampleConfig

    images, seeds = digits("train").images[:12], torch.arange(12)
    plain, flipped, *others, last = pictures.warps(images, seeds)
    assert torch.equal(plain, images)
    tossed = augmentation(seeds, 1.0)[:, 0] == 1
    assert 0 < tossed.sum() < 12
    assert torch.equal(flipped, torch.where(tossed[:, None, None, None], images.flip(2), images))
    assert torch.equal(last, augmented(images, augmentation(seeds, 1.0)).round().byte())
    assert len(others) == 4
    assert all((other != images).flatten(1).any(1).sum() > 8 for other in others)
    assert pictures.augment(mvm.load("digits"), SampleConfig(nfe=1)).height == 26 + 7 * (2 * 8 + 2) + 2


# ---- equal_terms


def told(method="mvm-u", seed=0, shift=0.0, **more):
    fids = {("adams", 0.0): (30, 20, 10), ("adams", 1.0): (33, 19, 9), ("heun", 0.0): (50, 25, 11)}
    cells = [
        {"solver": solver, "nfe": nfe, "rho": rho, "value": fid + shift}
        for (solver, rho), values in fids.items()
        for nfe, fid in zip((13, 26, 52), values, strict=True)
    ]
    part = {"mean": 0.5, "std": 0.05, "relative": 0.1, "largest": 0.7}
    facts = {
        "metric": "fid",
        "steps": 4,
        "images": 8,
        "seconds": 60,
        "images_per_second": 12_000.0,
        "loss": part,
        "grad_norm": part,
        "terms": {"train.lr": 0.001, "engine.kernels": False},
    }
    return {"method": method, "seed": seed, "cells": cells, **facts, **more}


def write_runs(folder, *runs):
    for run in runs:
        (folder / f"{run['method']}-{run['seed']}.json").write_text(json.dumps(run))


def test_a_trend_is_no_spread(terms):
    assert terms.spread([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, 0.0, 0.0, 4.0), abs=1e-12)
    found = terms.spread([1.0, -1.0, -1.0, 1.0, 10.0, 8.0, 8.0, 10.0])
    assert found.mean == 4.5
    assert 1 < found.std < 3
    assert terms.spread([2.0, 4.0]) == (3.0, 1.0, pytest.approx(1 / 3), 4.0)


def test_facts_of_a_training(terms):
    lines = [
        {"step": s, "loss": 100.0 / s, "grad_norm": 1.0 if s > 20 else 99.0, "images_per_second": float(s)}
        for s in (10, 20, 30, 40)
    ]
    found = terms.training_facts([{"step": 5, "fd_pixels": 1.0}, *lines])
    assert (found["steps"], found["loss_is_mean_of"], found["images_per_second"]) == (40, 10, 25.0)
    assert found["grad_norm"] == {"mean": 1.0, "std": 0.0, "relative": 0.0, "largest": 1.0}
    assert found["loss"]["mean"] == pytest.approx((100 / 30 + 100 / 40) / 2)


def test_seed_0_chooses_what_others_are_judged_by(terms, tmp_path):
    assert len(terms.ways_to_judge(tmp_path, "mvm-u", 0)) == 9
    with pytest.raises(ValueError, match=r"mvm-u-0.json is missing; run mvm-u:0 first"):
        terms.ways_to_judge(tmp_path, "mvm-u", 1)
    write_runs(tmp_path, told())
    common = [(nfe, ("adams", 0.0)) for nfe in (13, 26, 52)]
    assert terms.ways_to_judge(tmp_path, "mvm-u", 1) == [*common, (26, ("adams", 1.0)), (52, ("adams", 1.0))]


def test_every_way_can_be_sampled_on_every_path(terms):
    from mvm.path import SCHEDULES, schedule_named
    from mvm.recipes import SampleConfig

    for nfe, (solver, rho) in terms.ways_to_judge(Path(), "mvm-u", 0):
        for name in SCHEDULES:
            assert SampleConfig(solver, nfe, rho).build_solver().plan(schedule_named(name), nfe, rho).nfe == nfe


def test_the_table_has_mean_and_ends_over_seeds(terms, tmp_path):
    write_runs(tmp_path, told("vp-v"), told(seed=1, shift=2.0), told(seed=0), told(seed=2, shift=4.0))
    runs = terms.read_runs(tmp_path)
    assert [(method, [run["seed"] for run in found]) for method, found in runs.items()] == [
        ("mvm-u", [0, 1, 2]),
        ("vp-v", [0]),
    ]
    first, empty, *lines = terms.table(runs).splitlines()
    assert (first, empty) == ("4 steps; FID of 8 images", "")
    assert lines[2] == (
        "| MVM, u | 3 | 32.00 [30.00, 34.00] | 22.00 [20.00, 24.00] | 12.00 [10.00, 14.00] "
        "| 32.00 [30.00, 34.00], adams, rho 0 | 21.00 [19.00, 23.00], adams, rho 1 "
        "| 11.00 [9.00, 13.00], adams, rho 1 |"
    )
    assert lines[3].startswith("| VP, v | 1 | 30.00 | 20.00 | 10.00 | 30.00, adams, rho 0 |")
    assert lines[7] == "| MVM, u | 0.5000 | 0.1000 | 0.500 | 0.100 | 0.700 | 12,000 | 60 |"
    assert len({line.count("|") for line in lines[:4]}) == len({line.count("|") for line in lines[5:]}) == 1


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"steps": 5}, "steps"),
        ({"images": 9, "metric": "fd-pixels"}, "images, metric"),
        ({"terms": {"train.lr": 0.002, "engine.kernels": False}}, "train.lr"),
        ({"terms": {"train.lr": 0.001, "engine.kernels": True}}, "engine.kernels"),
    ],
)
def test_runs_on_other_terms_are_not_compared(terms, tmp_path, other, names):
    write_runs(tmp_path, told(), told(seed=1, **other))
    with pytest.raises(ValueError, match=f"mvm-u-0 and mvm-u-1 differ in {names}; equal ones are compared"):
        terms.read_runs(tmp_path)


def test_terms_are_all_but_a_method_s_own(terms, tmp_path):
    from mvm import load
    from mvm.evaluation.evaluate import open_side
    from mvm.evaluation.gather import Judge
    from mvm.evaluation.sweep import Sweep
    from mvm.samples import Draw

    def found(**changes):
        model = load("digits")
        recipe = model.recipe
        for place, change in changes.items():
            recipe = dataclasses.replace(recipe, **{place: dataclasses.replace(getattr(recipe, place), **change)})
        model.recipe = recipe
        side = open_side("data:digits:held-out")
        return terms.terms_of(Sweep(model, Draw(4, 0), Judge(), side, ("fd-pixels",), tmp_path))

    assert found()["train.lr"] == load("digits").recipe.train.lr
    assert found() == found(objective={"weight": "flow"}) == found(preview={"every": 7})
    assert found() != found(train={"lr": 0.5})
    assert found() != found(engine={"precision": "bf16"})
    law = load("digits").recipe.path.law
    lower = dataclasses.replace(law, mean=law.mean - math.log(2))
    assert found() == found(codec={"scale": 2.0}, path={"law": lower})  # twice the pixels are half the noise
    assert found() != found(codec={"scale": 2.0})


def test_runs_from_before_an_option_was_there_had_it_off(terms, tmp_path):
    write_runs(tmp_path, told(terms={"train.lr": 1.0}), told(seed=1, terms={"train.lr": 1.0, "data.augment": 0.0}))
    assert len(terms.read_runs(tmp_path)["mvm-u"]) == 2
    write_runs(tmp_path, told(seed=2, terms={"train.lr": 1.0, "data.augment": 0.1}))
    with pytest.raises(ValueError, match=r"mvm-u-0 and mvm-u-2 differ in data\.augment;"):
        terms.read_runs(tmp_path)


def test_a_reference_is_known_by_what_it_is_made_of(terms, tmp_path):
    from mvm.evaluation.evaluate import Side, open_side, write_statistics
    from mvm.evaluation.gather import Judge
    from mvm.evaluation.images import of_tensor

    told = []
    for name in ("a", "b", "c"):
        images = torch.full((6, 3, 8, 8), ord(name), dtype=torch.uint8)
        side = Side("x", of_tensor(images, "other" if name == "c" else "same"))
        write_statistics(Judge(progress=False), side, "pixels", tmp_path / f"{name}.npz")
        told.append(terms.reference_told(open_side(str(tmp_path / f"{name}.npz"))))
    assert told[0] == told[1] != told[2]


def test_distances_of_pixels_have_three_digits(terms, told_runs, tmp_path):
    write_runs(tmp_path, told(metric="fd-pixels"), told(seed=1, shift=0.5, metric="fd-pixels"))
    runs = terms.read_runs(tmp_path)
    assert terms.table(runs).splitlines()[4].startswith("| MVM, u | 2 | 30.250 [30.000, 30.500] |")
    assert told_runs.panels(runs)[0][1].y == "FD-pixels (lower is better)"


def test_differences_are_of_pairs_of_seeds(terms, told_runs, tmp_path):
    write_runs(tmp_path, *(told(seed=seed, shift=float(seed)) for seed in range(4)))
    gains = (0.5, 0.7, 0.9)
    write_runs(tmp_path, *(told("flow", seed, seed - gain) for seed, gain in enumerate(gains)), told("vp-v"))
    runs = terms.read_runs(tmp_path)
    found = told_runs.difference(runs["flow"], runs["mvm-u"], 26)
    reach = 4.3027 * 0.2 / 3**0.5  # Student's quantile of two degrees of freedom
    assert found[:3] == pytest.approx((-0.7, -0.7 - reach, -0.7 + reach), abs=1e-6)
    assert found.told
    assert told_runs.difference(runs["vp-v"], runs["mvm-u"], 26) is None
    lines = terms.differences(runs, "mvm-u").splitlines()
    cell = "**-0.70 (-1.20 to -0.20)**"
    assert lines[2:] == [f"| flow matching, linear | 3 | {cell} | {cell} | {cell} |"]


def test_stored_runs_are_the_runs_with_seven_digits(terms, tmp_path, monkeypatch):
    write_runs(tmp_path, told("flow", seconds=1 / 3), told(), told(seed=1, shift=2.0))
    monkeypatch.setattr(sys, "argv", ["equal_terms.py", "store", str(tmp_path), "--out", str(tmp_path / "all.json")])
    terms.main()
    folder, file = terms.read_runs(tmp_path), terms.read_runs(tmp_path / "all.json")
    assert file["mvm-u"] == folder["mvm-u"]
    assert file["flow"] == [{**folder["flow"][0], "seconds": 0.3333333}]
    assert len((tmp_path / "all.json").read_text().splitlines()) == 3 + 2


def test_seeds_go_on_from_stored_runs(terms, tmp_path, monkeypatch):
    write_runs(tmp_path, told("flow"), told(), told(seed=1))
    terms.store(terms.read_runs(tmp_path), tmp_path / "all.json")
    work = tmp_path / "W"
    work.mkdir()
    write_runs(work, told(seed=1, shift=5.0))  # judged again there: it stays
    monkeypatch.setattr(sys, "argv", ["equal_terms.py", "continue", str(tmp_path / "all.json"), "--out", str(work)])
    terms.main()
    runs = terms.read_runs(work)
    assert runs["flow"] == terms.read_runs(tmp_path / "all.json")["flow"]
    assert [run["cells"] for run in runs["mvm-u"]] == [told()["cells"], told(seed=1, shift=5.0)["cells"]]
    assert terms.ways_to_judge(work, "flow", 2)  # seed 0, which chooses them, is there


def test_a_figure_of_some_methods(terms, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(terms, "figure", lambda runs, out: drawn.append(list(runs)))
    write_runs(tmp_path, told("flow"), told(), told("vp-v"))
    for only in ([], ["--only", "vp-v", "mvm-u"]):
        monkeypatch.setattr(sys, "argv", ["equal_terms.py", "figure", str(tmp_path), "--out", "x.png", *only])
        terms.main()
    assert drawn == [["mvm-u", "flow", "vp-v"], ["mvm-u", "vp-v"]]


def test_the_figure_has_bars_over_seeds(terms, told_runs, tmp_path):
    write_runs(tmp_path, told("flow"), told(), told(seed=1, shift=2.0))
    runs = terms.read_runs(tmp_path)
    common, best = told_runs.panels(runs)
    assert [curve.label for curve in common[0]] == ["MVM, u", "flow matching, linear"]
    assert common[0][0].y == [31.0, 21.0, 11.0]
    assert best[0][0].y == [31.0, 20.0, 10.0]
    assert common[0][0].errors == [[1.0] * 3, [1.0] * 3]
    assert common[0][1].errors == ()
    terms.figure(runs, tmp_path / "x.png")
    assert Image.open(tmp_path / "x.png").width > 1000


def test_one_panel_where_the_common_sampler_is_the_best(told_runs):
    runs = {"mvm-u": [told()]}
    common = [cell for cell in told()["cells"] if (cell["solver"], cell["rho"]) == told_runs.COMMON]
    ((curves, axes),) = told_runs.panels({"mvm-u": [{**told(), "cells": common}]})
    assert [curve.label for curve in curves] == ["MVM, u"]
    assert axes.title == "adams, ODE (rho 0), for all: of each also the best"
    assert [axes.title for _, axes in told_runs.panels(runs)] == [told_runs.COMMON_TITLE, told_runs.BEST_TITLE]


def test_runs_are_judged_in_turn(terms, tmp_path):
    seen = []

    def second():
        with terms.in_turn(tmp_path):
            seen.append("second")

    with terms.in_turn(tmp_path):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        seen.append("first")
    waiting.join(10)
    assert seen == ["first", "second"]


@pytest.mark.parametrize(
    "name",
    [
        *("digits", "digits-weights", "digits-controls", "digits-4e-3", "digits-8e-3"),
        *("cifar10", "cifar10-6000", "cifar10-4e-3"),
    ],
)
def test_the_page_of_equal_terms_says_what_was_measured(terms, name):
    runs = terms.read_runs(RESULTS / "equal-terms" / f"{name}.json")
    said = (RESULTS / "equal-terms.md").read_text(encoding="utf-8").splitlines()
    figures = terms.table(runs).split("\n\n")[1].splitlines()
    assert len(figures) > 2
    assert set(figures) <= set(said)
    if "mvm-u" in runs:
        assert set(terms.differences(runs, "mvm-u").splitlines()) <= set(said)


def test_the_page_of_small_data_says_what_was_measured():
    lines = (RESULTS / "small-data.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in lines]
    rows = {}
    for run in runs:
        rows.setdefault((run["images"], run["option"]), {})[run["seed"]] = run
    for (images, option), found in rows.items():
        values = [run["distance"]["26"] for run in found.values()]
        mean, loss = np.mean(values), np.mean([run["loss"] for run in found.values()])
        base = rows[images, "none"]
        pairs = [f"{found[s]['distance']['26'] - base[s]['distance']['26']:+.3f}" for s in found if s in base]
        told = ", ".join(pairs) if option != "none" else ""
        ends = f"{mean:.3f} [{min(values):.3f}, {max(values):.3f}]"
        row = " | ".join([str(images), option, str(len(found)), ends, told, f"{loss:.3f}"]).replace("|  |", "| |")
        assert f"| {row} |" in (RESULTS / "small-data.md").read_text(encoding="utf-8")


def test_the_page_of_rates_says_what_was_measured():
    said = (RESULTS / "rates.md").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in (RESULTS / "rates.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(runs) > 10
    for run in runs:
        rest = "" if run["rest"] == run["rate"] else f", rest {run['rest']:g}"
        at = [f"{run['loss at'][step]:.4f}" if step in run["loss at"] else "" for step in ("300", "500", "1000")]
        row = " | ".join([str(run["width"]), run["optimizer"], f"{run['rate']:g}{rest}", *at, f"{run['loss']:.4f}"])
        assert f"| {row} |".replace("|  |", "| |") in said


def test_the_pages_say_what_the_kept_trials_had():
    lines = (RESULTS / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    trials = {run["trial"]: run for run in map(json.loads, lines)}
    fast, noisy = ([f"{trials[name][f'fid cfg {cfg}']:.2f}" for cfg in (1.0, 3.0)] for name in ("fast", "noisy"))
    assert f"| 2e-3 | {' | '.join(fast)} | " in (RESULTS / "rates.md").read_text(encoding="utf-8")
    log = (BENCHMARKS.parent / "docs" / "log.md").read_text(encoding="utf-8")
    assert all(figure in log for figure in noisy)


# ---- the shell programs


def equal_terms(work, *pairs, steps=3, **variables):
    command = ["bash", BENCHMARKS / "equal_terms.sh", "data", "ref", "weights", str(work), str(steps), *pairs]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # its python3 is the one that runs the tests
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)


@pytest.mark.parametrize(("name", "value"), [("STREAMS", "two"), ("UNTIL", "1h")])
def test_streams_and_seconds_are_numbers(tmp_path, name, value):
    found = equal_terms(tmp_path / "W", "flow:0", **{name: value})
    assert found.returncode == 2
    assert f"{name}='{value}' must be" in found.stderr


@pytest.mark.parametrize("streams", ["1", "2"])
def test_no_training_begins_when_the_time_is_up(tmp_path, streams):
    write_runs(tmp_path, told("flow", steps=3))
    found = equal_terms(tmp_path, "flow:0", "flow:1", "mvm-u:0", STREAMS=streams, UNTIL="0")
    assert "flow-0: finished before" in found.stdout
    assert "flow-1: not begun, 0 s are over" in found.stdout
    assert "mvm-u-0: not begun" in found.stdout
    assert not (tmp_path / "mvm-u-0.log").exists()
    assert "| flow matching, linear | 1 |" in found.stdout


def trained(tmp_path, method, extra):
    """The recipe's name and the options of the training that a call of equal_terms.sh would begin."""
    recorder = tmp_path / "bin" / "python3"  # trains nothing
    recorder.parent.mkdir()
    recorder.write_text('#!/bin/sh\n[ "$3" = train ] && printf "%s\\n" "$@" > "$TOLD"\nexit 1\n')
    recorder.chmod(0o755)
    path, told = f"{recorder.parent}:{os.environ['PATH']}", tmp_path / "told"
    equal_terms(tmp_path / "W", f"{method}:0", steps=2000, PATH=path, TOLD=str(told), EXTRA=extra)
    module, program, _, recipe, *tokens = told.read_text().splitlines()
    assert (module, program) == ("-m", "mvm")
    # --a.b=c or --a.b c
    tokens = [part for token in tokens if token != "--auto-resume" for part in token.split("=", 1)]
    return recipe, {name.removeprefix("--"): value for name, value in zip(tokens[::2], tokens[1::2], strict=True)}


@pytest.mark.parametrize(("method", "rate", "name"), [("mvm-u", "1e-3", "cifar10"), ("flow", "4e-3", "cifar10-4e-3")])
def test_the_program_still_trains_what_was_measured(tmp_path, method, rate, name):
    """Recipes change: the terms of kept runs are those that their command has today."""
    from mvm.recipes import load_recipe, options, override

    extra = "--engine.kernels true" if rate == "1e-3" else f"--engine.kernels true --train.lr {rate}"
    recipe, asked = trained(tmp_path, method, extra)
    asked = {key: value for key, value in asked.items() if key not in ("out", "data.path")}
    today = json.loads(json.dumps(options(override(load_recipe(recipe), asked))))
    runs = json.loads((RESULTS / "equal-terms" / f"{name}.json").read_text(encoding="utf-8"))
    kept = next(run["terms"] for run in runs if (run["method"], run["seed"]) == (method, 0))
    assert kept["train.lr"] == float(rate)
    assert {key: today[key] for key in kept if "." in key} == {key: value for key, value in kept.items() if "." in key}
    assert (today["name"], today["objective.weight"]) == (kept["name"], "none")


def test_every_method_of_the_table_can_be_run(terms, tmp_path):
    write_runs(tmp_path, told("flow", steps=3))
    found = equal_terms(tmp_path, *(f"{method}:1" for method in terms.METHODS), UNTIL="0")
    assert found.returncode == 0, found.stderr
    assert all(f"{method}-1: not begun" in found.stdout for method in terms.METHODS)


def test_a_folder_of_other_steps_is_refused(tmp_path):
    write_runs(tmp_path, told("flow", steps=30))
    found = equal_terms(tmp_path, "flow:0")
    assert found.returncode == 2
    assert "flow-0.json is of another number of steps than 3; give another WORK" in found.stderr


@pytest.mark.parametrize(
    ("name", "tokens", "words"),
    [
        ("sde_ode_study", ["model", "ref", "weights", "W", "grids"], "unknown part 'grids'"),
        ("equal_terms", ["data", "ref", "weights", "W", "3", "flow:0", "u:0"], "unknown method 'u'"),
        ("equal_terms", ["data", "ref", "weights", "W", "3", "mvm-w-as-flow:0"], "unknown method 'mvm-w'"),
    ],
)
def test_misuse_of_a_program_ends_it(tmp_path, name, tokens, words):
    tokens = [str(tmp_path / token) if token == "W" else token for token in tokens]
    found = subprocess.run(["bash", BENCHMARKS / f"{name}.sh", *tokens], capture_output=True, text=True, timeout=1200)
    assert found.returncode == 2
    assert words in found.stderr
    assert list((tmp_path / "W").iterdir()) == []


# ---- seen_and_unseen


@pytest.fixture(scope="module")
def seen():
    return imported("seen_and_unseen")


def answering(answer):
    """A model whose guess of x0 is a function of x, on flow matching's path."""
    model = lambda x, t: answer(x)  # noqa: E731
    model.schedule, model.recipe = LinearFlow(), SimpleNamespace(name="x")
    return model


def test_errors_are_of_u_whatever_the_path(seen):
    lams = seen.log_snrs(TimeLaw("lam-normal", 0.5, 1.5), 4)
    assert torch.all(lams.diff() < 0)
    assert float(lams.mean()) == pytest.approx(0.5)
    images = torch.full((5, 3, 2, 2), 0.5)
    found = seen.errors(answering(torch.zeros_like), images, lams, batch=2)
    torch.testing.assert_close(found, (0.25 / MeanVelocity().t_from_lam(lams)).expand(5, 4), rtol=1e-6, atol=0)
    assert float(seen.errors(answering(lambda x: torch.full_like(x, 0.5)), images, lams).max()) == 0
    once, again = (seen.errors(answering(torch.tanh), images, lams, batch=batch) for batch in (2, 5))
    assert torch.equal(once, again)  # noise is an image's own


def test_a_control_takes_out_how_hard_images_are(seen):
    torch.manual_seed(0)
    hard = [torch.rand(400, 6).add(0.1).double() for _ in range(2)]  # errors of any model on train and test images
    overfit = [hard[0] * 0.9, hard[1]]
    lams = torch.arange(6.0).flip(0)
    plain, controlled = (seen.table(overfit, control, lams).splitlines() for control in (None, hard))
    assert controlled[2] == f"| +0.00 to +5.00 | {math.log(1 / 0.9):+.4f} (+0.1054 to +0.1054) |"
    assert [line.split(" | ")[0] for line in controlled[3:]] == [
        "| +4.00 to +5.00",
        "| +2.00 to +3.00",
        "| +0.00 to +1.00",
    ]
    assert "(+0.1054 to +0.1054)" not in plain[2]


# ---- copies


@pytest.fixture(scope="module")
def copies():
    return imported("copies")


def photographs(count, seed):
    return torch.randint(256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_copy_is_found_also_when_mirrored(copies, monkeypatch):
    monkeypatch.setattr(copies, "PART", 7)  # parts that do not divide the images
    training = photographs(30, 0)
    images = torch.cat((training[11:12], training[23:24].flip(-1), photographs(3, 1)))
    found = copies.neighbours(images, training, k=5)
    assert found.numbers[:2, 0].tolist() == [11, 30 + 23]
    assert found.ratios[:2].tolist() == [0, 0]
    assert torch.equal(copies.originals(training, found.numbers[:2, 0]), images[:2])
    every = torch.cat((training, training.flip(-1))).double().flatten(1)
    want = torch.stack([(every - x).square().mean(1).sqrt() for x in images.double().flatten(1)])
    torch.testing.assert_close(found.distances.double(), want.sort(1).values[:, :5], rtol=1e-5, atol=1e-5)


def test_copies_far_from_grey_have_a_distance_of_nothing(copies):
    """By norms and products, in float32, large pixels would leave a copy some way off."""
    bright = torch.full((2, 3, 32, 32), 251, dtype=torch.uint8)
    bright[1, 0] = 7
    assert copies.neighbours(bright, bright, k=2).distances[:, 0].tolist() == [0, 0]


def near(copies, ratios):
    """Neighbours of such ratios, whose nearest are twice as far."""
    ratios = torch.as_tensor(ratios)
    return copies.Neighbours(torch.stack((2 * ratios, torch.full_like(ratios, 1), torch.full_like(ratios, 3)), 1), None)


def test_a_ratio_is_of_the_nearest_to_the_mean_of_the_others(copies):
    assert copies.Neighbours(torch.tensor([[2.0, 3.0, 5.0]]), None).ratios.tolist() == [0.5]
    assert near(copies, [0.25]).ratios.tolist() == [0.25]


def test_the_table_of_copies_counts_those_nearer_than_photographs_are(copies):
    photos = near(copies, torch.linspace(0, 1, 21))  # one in twenty lies below 0.05, one in four below 0.25
    samples = near(copies, [0.01, 0.02, 0.04, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9, 0.95])
    assert copies.table(samples, photos).splitlines() == [
        "| images | number | nearest, median | ratio, median | smallest | below 0.050 | below 0.250 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| samples | 10 | 0.6 | 0.300 | 0.010 | 3 (30.0%; 10.8% to 60.3%) | 4 (40.0%; 16.8% to 68.7%) |",
        "| held out | 21 | 1.0 | 0.500 | 0.000 | 1 (4.8%; 0.8% to 22.7%) | 5 (23.8%; 10.6% to 45.1%) |",
    ]
    assert copies.table(samples, None).splitlines()[-1] == "| samples | 10 | 0.6 | 0.300 | 0.010 |"


def test_a_share_has_wilson_s_interval(copies):
    assert copies.share(0, 100) == "0 (0.0%; 0.0% to 3.7%)"
    assert copies.share(5, 100) == "5 (5.0%; 2.2% to 11.2%)"


def cells(picture, size, gap, columns):
    """The images (rows, columns, H, W, 3) at the end of a picture, as they were before they were magnified by two."""
    body = np.asarray(picture)[-(2 * (size + gap) + gap) :, -(columns * (size + gap) + gap) :]
    corners = [[(gap + r * (size + gap), gap + c * (size + gap)) for c in range(columns)] for r in range(2)]
    return np.array([[body[y : y + size : 2, x : x + size : 2] for y, x in row] for row in corners])


def test_the_worst_are_shown_above_their_nearest(copies):
    training, samples = photographs(12, 0), photographs(4, 1)
    samples[2] = training[5].flip(-1)
    found = copies.neighbours(samples, training, k=3)
    order = found.ratios.argsort()
    shown = cells(copies.worst(samples, training, found), 8, copies.GAP, 4)
    assert order[0] == 2
    assert (shown[0] == samples[order].permute(0, 2, 3, 1).numpy()).all()
    assert (shown[1, 0] == shown[0, 0]).all()
    assert (shown[1, 1:] == copies.originals(training, found.numbers[order[1:], 0]).permute(0, 2, 3, 1).numpy()).all()


def test_copies_are_looked_for_in_files(copies, tmp_path, monkeypatch, capsys):
    from mvm.data.prepare import prepare

    photos = photographs(60, 0).repeat_interleave(2, -1).repeat_interleave(2, -2)
    (tmp_path / "source" / "a").mkdir(parents=True)
    for number, image in enumerate(photos):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "source" / "a" / f"{number:02}.png")
    prepare(tmp_path / "source", tmp_path / "data", size=8, progress=False)
    others = torch.randint(256, (30, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    copied = photos[7:9].permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "s.npz", arr_0=copied)
    np.savez(tmp_path / "p.npz", images=others.numpy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "s.npz", "--data", "data", "--held-out", "p.npz", "--out", "n.png"])
    copies.main()
    assert "| samples | 2 | 0.0 | 0.000 | 0.000 | 2 (100.0%; 34.2% to 100.0%) |" in capsys.readouterr().out
    assert (cells(Image.open("n.png"), 16, copies.GAP, 2)[0] == copied).all()
    with pytest.raises(ValueError, match=r"images are \[3, 4, 4\], the training images \[3, 8, 8\]"):
        copies.neighbours(photographs(1, 0), photos)


# ---- preconditioning


@pytest.fixture
def preconditioning():
    return imported("preconditioning")


LEVELS = torch.exp(torch.linspace(-5, 5, 21, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("kind", ["u", "flow"])
def test_the_exact_prediction_gives_the_image(preconditioning, kind, scale):
    x0, n = torch.full_like(LEVELS, 0.7), torch.full_like(LEVELS, -1.3)
    inner, skip, out = preconditioning.METHODS[f"{kind}{scale}"](LEVELS)
    z = x0 + LEVELS * n
    path = MeanVelocity() if kind == "u" else LinearFlow()
    t = path.t_from_lam(-torch.log(scale * LEVELS))
    x = path.alpha(t) * scale * x0 + path.sigma(t) * n
    target = (torch.sqrt(t) if kind == "u" else 1) * scale * x0 - n  # u = sqrt(t) x0 - eps, and flow's velocity, turned
    assert torch.allclose(inner * z, x, rtol=1e-12)
    assert torch.allclose(skip * z + out * target, x0, rtol=1e-10)


def test_the_coefficients_of_edm_have_unit_variance(preconditioning):
    inner, skip, out = preconditioning.METHODS["edm"](LEVELS)
    variance = 0.25 + LEVELS**2
    assert torch.allclose(inner**2 * variance, torch.ones_like(LEVELS))
    assert torch.allclose(((1 - skip) ** 2 * 0.25 + skip**2 * LEVELS**2) / out**2, torch.ones_like(LEVELS))


def test_all_methods_have_one_loss(preconditioning):
    """A network that restores the same image loses the same, whatever it put out: here the one that gives nothing."""
    network = lambda x, level, labels: SimpleNamespace(prediction=torch.zeros_like(x))  # noqa: E731
    x0, n, r = torch.full((4, 3, 2, 2), 0.4), torch.ones(4, 3, 2, 2), torch.tensor([0.1, 0.5, 1.0, 3.0]).double()
    for method, coefficients in preconditioning.METHODS.items():
        found = preconditioning.losses(network, method, x0, None, r, n)
        want = ((coefficients(r).skip * (0.4 + r) - 0.4) * (1 + r) / r) ** 2
        assert found.double().tolist() == pytest.approx(want.tolist(), rel=1e-5)


def test_preconditioning_is_compared_by_pairs(preconditioning):
    def run(method, seed, factor):
        held = {str(lam): factor * (seed + 1) for lam in preconditioning.LAMS}
        return {"method": method, "seed": seed, "train": factor * (seed + 1), "held": held}

    runs = [run("flow1", 0, 1.0), run("flow1", 1, 1.0), run("u2", 0, 0.99), run("u2", 1, 0.97), run("edm", 0, 1.02)]
    first, _, second, third = preconditioning.table(runs).splitlines()
    assert first.startswith("| % above flow1 | seeds | training | lam -2.5 |")
    assert second == "| u2 | 2 | " + " | ".join(["-2.00 ± 12.71"] * 8) + " |"  # Student's 12.706 x 0.01414 / 2^0.5
    assert third == "| edm | 1 | " + " | ".join(["+2.00"] * 8) + " |"


def test_the_page_of_preconditioning_says_what_was_measured(preconditioning):
    stored = (RESULTS / "preconditioning.jsonl").read_text(encoding="utf-8").splitlines()
    said = (RESULTS / "preconditioning.md").read_text(encoding="utf-8")
    assert preconditioning.table([json.loads(line) for line in stored]) in said


def test_preconditioning_runs_and_repeats(preconditioning, monkeypatch):
    monkeypatch.setattr(preconditioning, "HELD_OUT", 4)
    monkeypatch.setattr(preconditioning, "BATCH", 4)
    images = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    small, labels = preconditioning.halved(images), torch.arange(12) % 10
    assert small.shape == (12, 3, 8, 8)
    assert small[0, 1, 0, 0] == pytest.approx(round(float(images[0, :2, :2, 1].mean())) / 127.5 - 1, abs=0.008)
    first, again = (preconditioning.train(small, labels, "u2", 3, steps=2) for _ in range(2))
    assert first == again
    assert first["held"].keys() == {str(lam) for lam in preconditioning.LAMS}
