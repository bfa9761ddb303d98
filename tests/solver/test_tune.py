"""Times fitted to one field, stored with a model, and used where nothing else is asked."""

import json

import pytest
import torch

import mvm
from mvm import noise
from mvm.cli import run
from mvm.path import MEAN_VELOCITY
from mvm.published.tuned import read_tuned
from mvm.solver import ClassifierFree, adams, sample
from mvm.solver.tune import tune
from mvm.verify import digits_oracle, rmse


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
    ((_, solver),) = model.tuned.items()
    assert model.origin["tuned"] == [4]
    x, labels = noise.initial(torch.arange(3), model.sample_shape), torch.arange(3)
    options = {"condition": labels, "seeds": [0, 1, 2]}
    assert torch.equal(sample(model, x, nfe=4, **options), sample(plain, x, nfe=4, solver=solver, **options))
    for other in (
        {"nfe": 5},
        {"nfe": 4, "rho": 0.5},
        {"nfe": 4, "guidance": ClassifierFree(1.5)},
        {"nfe": 4, "solver": adams(c=0.03)},
    ):
        assert torch.equal(sample(model, x, **other, **options), sample(plain, x, **other, **options))


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
