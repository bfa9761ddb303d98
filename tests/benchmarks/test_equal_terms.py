"""benchmarks/equal_terms.py and the shell programs: which runs are compared, what is told of them, what is begun."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from programs import BENCHMARKS, RESULTS, imported

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")


@pytest.fixture
def told_runs():
    return imported("equal_terms_runs")


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
    with pytest.raises(ValueError, match=f"mvm-u-0 and mvm-u-1 differ in {names}"):
        terms.read_runs(tmp_path)


def test_terms_are_all_but_a_method_s_own(terms, tmp_path):
    from mvm import load
    from mvm.evaluation.evaluate import Judge, open_side
    from mvm.evaluation.sweep import Sweep
    from mvm.generate import Draw, Sampler

    def found(**changes):
        model = load("digits")
        recipe = model.recipe
        for place, change in changes.items():
            recipe = dataclasses.replace(recipe, **{place: dataclasses.replace(getattr(recipe, place), **change)})
        model.recipe = recipe
        side = open_side("data:digits:held-out")
        return terms.terms_of(Sweep(Sampler(model), Draw(4, 0), Judge(), side, ("fd-pixels",), tmp_path))

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
    from mvm.evaluation.evaluate import ComparedSet, Judge, open_side, write_statistics
    from mvm.evaluation.images import of_tensor

    told = []
    for name in ("a", "b", "c"):
        images = torch.full((6, 3, 8, 8), ord(name), dtype=torch.uint8)
        side = ComparedSet("x", of_tensor(images, "other" if name == "c" else "same"))
        write_statistics(Judge(progress=False), side, "pixels", tmp_path / f"{name}.npz")
        told.append(terms.reference_told(open_side(str(tmp_path / f"{name}.npz"))))
    assert told[0] == told[1] != told[2]


def test_distances_of_pixels_have_three_digits(terms, tmp_path):
    write_runs(tmp_path, told(metric="fd-pixels"), told(seed=1, shift=0.5, metric="fd-pixels"))
    runs = terms.read_runs(tmp_path)
    assert terms.table(runs).splitlines()[4].startswith("| MVM, u | 2 | 30.250 [30.000, 30.500] |")


def test_differences_are_of_pairs_of_seeds(terms, told_runs, tmp_path):
    write_runs(tmp_path, *(told(seed=seed, shift=float(seed)) for seed in range(4)))
    gains = (0.5, 0.7, 0.9)
    write_runs(tmp_path, *(told("flow", seed, seed - gain) for seed, gain in enumerate(gains)), told("vp-v"))
    runs = terms.read_runs(tmp_path)
    found = told_runs.difference(runs["flow"], runs["mvm-u"], 26)
    reach = 4.3027 * 0.2 / 3**0.5  # Student's quantile of two degrees of freedom
    assert found[:3] == pytest.approx((-0.7, -0.7 - reach, -0.7 + reach), abs=1e-6)
    assert found.significant
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
