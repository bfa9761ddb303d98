"""Times fitted to one field, stored with a model, and used where nothing else is asked."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import mvm
from mvm import noise
from mvm.app.form import ODE, SampleForm
from mvm.app.lines import command
from mvm.app.walk import side_by_steps
from mvm.cli import run
from mvm.evaluation.images import of_model
from mvm.generate import Draw, Sampler, solver_record
from mvm.path import MEAN_VELOCITY
from mvm.pixels import to_uint8
from mvm.published.tuned import read_tuned
from mvm.recipes import SampleConfig
from mvm.solver import ClassifierFree, adams, sample
from mvm.solver.tune import tune
from mvm.verify.solvers import digits_oracle, rmse


@pytest.fixture(scope="module")
def digits_field():
    return digits_oracle().field(MEAN_VELOCITY)


def test_tuning_comes_nearer_on_noises_it_was_not_fitted_to(digits_field):
    x = noise.initial(torch.arange(128), (64,), torch.float64)
    fitted, others = x[:24], x[64:]
    seen = []
    found = tune(digits_field, fitted, 8, rounds=3, on_solve=lambda number, error: seen.append((number, error)))
    exact = sample(digits_field, others, nfe=100)

    def median(solver):
        return float((sample(digits_field, others, nfe=8, solver=solver) - exact).square().mean(1).sqrt().median())

    assert median(found.solver) < 0.8 * median(adams())
    assert [number for number, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[0][1] == pytest.approx(found.before)
    times = found.solver.given
    assert (len(times), times[0], times[-1]) == (9, 1.0, 0.0)


def test_tuning_a_field_that_is_exact_already_changes_nothing_much():
    x = torch.randn(4, 3, dtype=torch.float64)
    found = tune(lambda x, t, c: torch.zeros_like(x), x, 4, rounds=1)
    assert found.after <= found.before < 1e-12


@pytest.mark.parametrize(
    ("options", "words"), [({"nfe": 1}, "nfe=1"), ({"nfe": 9, "reference_nfe": 9}, "reference_nfe=9")]
)
def test_what_cannot_be_tuned_is_named(digits_field, options, words):
    with pytest.raises(ValueError, match=words):
        tune(digits_field, torch.randn(1, 64), **options)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder of the shipped digits with times for four evaluations."""
    folder = tmp_path_factory.mktemp("tuned") / "mine"
    assert run(["export", "digits", "--out", str(folder), "--no-grid"]) == 0
    assert run(["tune", str(folder), "--nfe", "4", "--num", "6", "--rounds", "2", "--reference-nfe", "30"]) == 0
    return folder


def test_tuned_times_are_used_by_default_and_nowhere_else(tuned):
    model, plain = mvm.load(tuned), mvm.load("digits")
    ((_, entry),) = model.tuned.items()
    assert model.origin["tuned"] == [4]
    x, labels = noise.initial(torch.arange(3), model.sample_shape), torch.arange(3)
    options = {"condition": labels, "seeds": [0, 1, 2]}
    assert torch.equal(sample(model, x, nfe=4, **options), sample(plain, x, nfe=4, solver=entry.solver, **options))
    for other in (
        {"nfe": 5},
        {"nfe": 4, "rho": 0.5},
        {"nfe": 4, "guidance": ClassifierFree(1.5)},
        {"nfe": 4, "solver": adams(c=0.03)},
        {"nfe": 4, "solver": adams()},
    ):
        assert torch.equal(sample(model, x, **other, **options), sample(plain, x, **other, **options))


def _images(model, settings):
    return Sampler(model).images(torch.arange(3), torch.arange(3), settings, progress=False).images


def test_a_solver_that_is_named_keeps_its_own_times(tuned, tmp_path, capsys):
    model, plain = mvm.load(tuned), mvm.load("digits")
    x, options = noise.initial(torch.arange(3), model.sample_shape), {"nfe": 4, "condition": torch.arange(3)}
    fitted = sample(model, x, **options)
    for solver in ("adams", adams()):
        assert torch.equal(sample(model, x, solver=solver, **options), sample(plain, x, **options))
        assert not torch.equal(sample(model, x, solver=solver, **options), fitted)
    unnamed = SampleConfig(nfe=4)
    named = unnamed.asked(solver="adams", rho=None)
    assert torch.equal(_images(model, named), _images(plain, unnamed))
    assert not torch.equal(_images(model, unnamed), _images(plain, unnamed))
    assert "given=(1.0," in solver_record(model, unnamed)
    assert solver_record(model, named) == solver_record(plain, unnamed)
    for words, of in (((), fitted), (("--solver", "adams"), sample(plain, x, **options))):
        out = tmp_path / f"{len(words)}.npy"
        assert (
            run(["sample", str(tuned), "--num", "3", "--nfe", "4", "--device", "cpu", "--out", str(out), *words]) == 0
        )
        assert ("adams, tuned, 4 evaluations" in capsys.readouterr().out) == (not words)
        assert np.array_equal(np.load(out), to_uint8(of).permute(0, 2, 3, 1).numpy())
        assert ("given=()" in json.loads(Path(f"{out}.json").read_text())["solver"]) == bool(words)


def test_a_sweep_holds_tuned_and_named_apart(tuned, tmp_path):
    options = ["--nfe", "4", "--rho", "0", "--num", "20", "--metrics", "fd-pixels", "--out", str(tmp_path / "sweep")]
    for words in ([], ["--solvers", "adams"]):
        assert run(["sweep", str(tuned), *options, *words, "--device", "cpu"]) == 0
    cells = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "sweep" / "cells").glob("*.json")}
    assert {name: cell["result"]["solver"] for name, cell in cells.items()} == {
        "adams-nfe4-rho0": "adams",
        "adams-tuned-nfe4-rho0": "adams, tuned",
    }
    assert len({cell["result"]["metrics"]["fd-pixels"]["value"] for cell in cells.values()}) == 2


def test_an_evaluation_records_whether_times_were_tuned(tuned):
    model, draw = mvm.load(tuned), Draw(2)
    for settings, expected in ((SampleConfig(nfe=4), True), (SampleConfig(nfe=5), False)):
        assert of_model(Sampler(model), draw, settings).facts["sampler"]["tuned"] is expected


def test_the_page_makes_what_its_command_makes(tuned):
    model, form = mvm.load(tuned), SampleForm(str(tuned), images=2, nfe=4)
    assert "--solver" not in command(form, ODE, model)
    assert "--solver adams" in command(form, ODE, mvm.load("digits"))
    *_, side = side_by_steps(model, form.draw(), form.settings(ODE))
    assert torch.equal(side.images, Sampler(model).images(side.labels, torch.arange(2), SampleConfig(nfe=4)).images)


def test_times_are_not_fitted_where_nothing_would_use_them(tuned, tmp_path, capsys):
    assert run(["export", "digits", "--out", str(tmp_path / "sa"), "--no-grid"]) == 0
    config = json.loads((tmp_path / "sa" / "config.json").read_text())
    config["recipe"]["sample"]["tuned"] = False
    (tmp_path / "sa" / "config.json").write_text(json.dumps(config))
    assert run(["tune", str(tmp_path / "sa"), "--nfe", "4"]) == 2
    assert "sample.tuned=False" in capsys.readouterr().err


def test_tuned_times_are_nearer_and_recorded(tuned):
    (entry,) = read_tuned(tuned, mvm.load(tuned).origin["sha256"]).values()
    assert entry.tuned < entry.default
    model = mvm.load("digits")
    x, labels = noise.initial(torch.arange(40, 60), model.sample_shape), torch.arange(20) % 10
    exact = sample(model, x, nfe=60, condition=labels)
    near, far = (rmse(sample(model, x, nfe=4, condition=labels, solver=s), exact) for s in (entry.solver, adams()))
    assert near < far


def test_an_export_takes_the_times_along(tuned, tmp_path):
    assert run(["export", str(tuned), "--out", str(tmp_path / "again"), "--no-grid"]) == 0
    assert mvm.load(tmp_path / "again").tuned == mvm.load(tuned).tuned


def test_times_of_other_weights_are_left_alone(tuned):
    assert read_tuned(tuned, "0" * 64) == {}


def test_a_shipped_model_is_exported_first(capsys):
    assert run(["tune", "digits"]) == 2
    assert "first: mvm export digits --out DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"times": [1.0, 0.5, 0.0]}, "do not go with nfe=4"),
        ({"times": [1.0, 0.5, 0.6, 0.1, 0.0]}, "times must fall"),
        ({"times": [1.5, 0.5, 0.3, 0.1, 0.0]}, "times must fall"),
        ({"times": [1.0, 0.5, 0.3, 0.1, 0.01]}, "times must fall"),
        ({"spread": 1e999}, "not finite"),
        ({"spread": -1.0}, "spread=-1.0"),
        ({"b": "x"}, "holds no tuned times"),
        ({"nfe": None}, "do not go with nfe=None"),
    ],
)
def test_a_spoiled_file_is_refused(tuned, tmp_path, change, words):
    told = json.loads((tuned / "tuned.json").read_text())
    told["tuned"][0] |= change
    (tmp_path / "tuned.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=words):
        read_tuned(tmp_path, told["weights"])
