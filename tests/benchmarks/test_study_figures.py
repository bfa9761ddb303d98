"""benchmarks/study_figures.py and model_pictures.py: what they read, choose and draw; figures: test_headline.py."""

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from programs import imported

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")


@pytest.fixture(scope="module")
def pictures():
    return imported("model_pictures")


def cell(solver="adams", nfe=26, rho=0.0, fid=10.0, cfg=1.0, low=0.0, high=1.0, error=None):
    from mvm.evaluation.cells import Result

    flat = {"solver": solver, "nfe": nfe, "rho": rho, "cfg": cfg, "low": low, "high": high}
    cost = {"evaluations": nfe, "passes": nfe if cfg == 1 else nfe + 5, "seconds": 2.5}
    return Result.read({**flat, **cost, "metrics": {"fid": {"value": fid, "error": error, "note": ""}}, "grid": ""})


# ---- study_figures


def test_results_come_back_from_csv(study, tmp_path):
    from mvm.evaluation.sweep_report import csv_text

    cells = [cell(fid=3.25, error=0.5), cell("sa, t_min 0.0001", 13, 0.75, 4.5, 1.2, 0.6, 0.8, 0.25)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.csv").write_text(csv_text(cells[:1]))
    (tmp_path / "b.csv").write_text(csv_text(cells[1:]))
    found = study.read_results([tmp_path / "a", tmp_path / "b.csv"])
    assert [study.table([r]) for r in found] == [study.table([r]) for r in cells]
    ways = [(r.settings, r.passes) for r in found]
    assert [(s.nfe, s.rho, s.cfg, s.low, s.high, passes) for s, passes in ways] == [
        (26, 0, 1, 0, 1, 26),
        (13, 0.75, 1.2, 0.6, 0.8, 18),
    ]
    assert study.table(found).splitlines()[-1] == (
        "| sa, t_min 0.0001 | SDE (rho 0.75) | 1.2 on [0.6, 0.8] | 13 | 18 | 4.50 ± 0.25 | 2.5 |"
    )


def test_adams_over_the_least_is_bold_up_to_3_percent_and_marked_near_the_floor():
    rmse = {4: (0.3, 0.2), 8: (0.103, 0.1), 13: (0.01, 0.02), 26: (0.0019, 0.001)}
    cells = [
        {"solver": solver, "nfe": nfe, "rmse": value}
        for nfe, both in rmse.items()
        for solver, value in zip(("adams", "unipc"), both, strict=True)
    ]
    facts = {"model": "third", "guided": True, "num": 8, "floor": 0.001}
    row = imported("near_reference").standing([{"facts": facts, "cells": cells}]).splitlines()[-1]
    assert row == "| small CIFAR-10 model, guided, 8 noises | 1.500 | **1.030** | **1.000** | 1.900† |"


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
    written = {"results": [r.as_dict() for r in cells]}
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
    (tmp_path / "results.json").write_text(json.dumps({"results": [r.as_dict() for r in cells]}))
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
    with pytest.raises(ValueError, match=r"seed\.json.*another.*first\.json"):
        study.check_alike([tmp_path / "first.json", tmp_path / "seed.json"])


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


# ---- model_pictures


def test_pictures_of_the_shipped_digits(pictures, tmp_path, monkeypatch):
    import torch

    import mvm
    from mvm.demo import grid_of_classes
    from mvm.generate import Sampler
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
        Sampler(model).images(labels, labels, SampleConfig(nfe=2, **way), progress=False).images
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
