"""Several averages at once, each against one tracked by hand; stored averages, and others rebuilt from them."""

import pytest
import torch
from tiny_recipe import NETWORK, recipe_with

from mvm import checkpoint
from mvm.model import load
from mvm.optim import power_ema
from mvm.optim.ema import profiles
from mvm.training.data import training_data
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train
from mvm.training.rundir import export_average, rebuild

TINY = {
    **NETWORK,
    "train.batch": "8",
    "train.steps": "24",
    "train.decay": "constant",
    "train.lr": "2e-2",
    "train.ema": "0.5,0.999,0",
    "train.power": "0.05,0.1",
    "train.log_every": "24",
    "train.save_every": "12",
}
NAMES = ["ema", "ema-0.999", "ema-0", "power-0.05", "power-0.1"]


def tiny(**changes):
    return recipe_with(TINY, **changes)


def raw(trainer):
    return {name: value.detach().double().clone() for name, value in trainer.model.network.named_parameters()}


def close(found, want, atol):
    assert found.keys() == want.keys()
    return max(float((found[name].double() - want[name].double()).abs().max()) for name in want) < atol


def distance(found, want):
    """Root of the mean square over all weights."""
    return torch.cat([(found[name] - want[name]).flatten() for name in want]).square().mean().sqrt()


# Averages


def test_names_and_the_one_sampled_from():
    assert list(profiles((0.5, 0.999, 0), (0.05, 0.1))) == NAMES
    assert list(profiles((0.99995,), ())) == ["ema"]


def test_every_average_equals_one_tracked_by_hand():
    """In float64, from the weights after each step: an EMA with its warm-up, and the power function's sum."""
    recipe = tiny()
    trainer = FieldTrainer(recipe, training_data(recipe))
    history = [raw(trainer)]
    for _ in range(12):
        trainer.advance()
        history.append(raw(trainer))
    wanted = {}
    for name, decay in (("ema", 0.5), ("ema-0.999", 0.999), ("ema-0", 0.0)):
        average = dict(history[0])
        for step, now in enumerate(history[1:]):
            keep = min(decay, (1 + step) / (10 + step))
            average = {key: keep * average[key] + (1 - keep) * now[key] for key in now}
        wanted[name] = average
    for name, width in (("power-0.05", 0.05), ("power-0.1", 0.1)):
        power = power_ema.exponent(width) + 1
        share = [(i**power - (i - 1) ** power) / 12**power for i in range(1, 13)]
        wanted[name] = {key: sum(s * now[key] for s, now in zip(share, history[1:], strict=True)) for key in history[0]}
    assert list(trainer.averages.profiles) == NAMES
    for name, want in wanted.items():
        assert close(trainer.averages.whole(name), want, 1e-6), name
        others = [other for other in wanted if other != name]
        assert not any(close(wanted[other], want, 1e-5) for other in others), name
    assert close(trainer.averages.whole("ema-0"), history[-1], 1e-7)


# A run with snapshots


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """24 steps, both widths stored every 4."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(tiny(train_snapshot_every="4"), folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def direct(tmp_path_factory):
    """The same run that tracks another width."""
    folder = tmp_path_factory.mktemp("runs") / "direct"
    train(tiny(train_power="0.08"), folder, progress=False)
    return folder


def test_every_average_is_loaded_by_name(run):
    folder = checkpoint.latest(run)
    seen = []
    for name in [*NAMES, "model"]:
        want = checkpoint.load(folder, name)
        model = load(run, weights=name)
        assert all(torch.equal(value, want[key]) for key, value in model.network.named_parameters()), name
        seen.append(model.network.embed.weight)
    assert torch.equal(seen[2], seen[5])  # decay 0 is the weights themselves
    assert len({tuple(value.flatten().tolist()) for value in seen}) == 5
    assert torch.equal(load(run).network.embed.weight, seen[0])


def test_an_average_that_is_not_there_is_named(run):
    with pytest.raises(ValueError, match=r"weights='power-0\.2': .*no such weights; it has: ") as error:
        load(run, weights="power-0.2")
    listed = str(error.value).partition("it has: ")[2].split(", ")
    assert sorted(listed) == sorted([*NAMES, "model"])


def test_resume_continues_every_average(run, tmp_path):
    recipe = tiny(train_snapshot_every="4")
    train(recipe, tmp_path, progress=False, until=10)
    train(recipe, tmp_path, progress=False, resume=True)
    for name in NAMES:
        one, other = (checkpoint.load(checkpoint.latest(folder), name) for folder in (run, tmp_path))
        assert all(torch.equal(value, other[key]) for key, value in one.items()), name
    for step in range(4, 25, 4):
        one, other = (folder / "snapshots" / checkpoint.step_name(step) for folder in (run, tmp_path))
        assert checkpoint.read_manifest(one) == checkpoint.read_manifest(other)  # sha256 of the contents among it


def test_snapshots_hold_the_power_averages_in_half_precision(run):
    folders = sorted(path.name for path in (run / "snapshots").iterdir())
    assert folders == [checkpoint.step_name(step) for step in range(4, 25, 4)]
    last = run / "snapshots" / folders[-1]
    assert sorted(checkpoint.read_manifest(last)["sha256"]) == ["power-0.05.safetensors", "power-0.1.safetensors"]
    for name in ("power-0.05", "power-0.1"):
        tracked = checkpoint.load(checkpoint.latest(run), name)
        assert all(torch.equal(v, tracked[k].half()) for k, v in checkpoint.load(last, name).items())


@pytest.mark.parametrize("width", [0.05, 0.1])
@pytest.mark.parametrize("step", [4, 12, 24])
def test_a_stored_average_is_given_back(run, width, step):
    found, error = rebuild(run, tiny(), width, step)
    stored = checkpoint.load(run / "snapshots" / checkpoint.step_name(step), f"power-{width:g}")
    assert error < 1e-6
    assert close(found, stored, 1e-5)
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_another_width_is_close_to_one_tracked_directly(run, direct):
    """Up to half precision: several times closer than the nearest width that was stored."""
    weights = [checkpoint.load(checkpoint.latest(folder), "model") for folder in (run, direct)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    found, error = rebuild(run, tiny(), 0.08, 24)
    want = checkpoint.load(checkpoint.latest(direct), "power-0.08")
    assert 1e-4 < error < 0.1
    nearest = checkpoint.load(checkpoint.latest(run), "power-0.1")
    assert distance(found, want) < 0.1 * distance(nearest, want)
    assert close(found, want, 1e-3)


def test_snapshots_past_the_step_are_not_looked_at(run, tmp_path):
    train(tiny(train_snapshot_every="4", train_steps="12"), tmp_path, progress=False)
    one, other = rebuild(run, tiny(), 0.08, 12)[0], rebuild(tmp_path, tiny(), 0.08, 12)[0]
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_export_is_a_run_that_samples(run, tmp_path):
    error = export_average(run, tmp_path / "out", 0.08)
    found, same = rebuild(run, tiny(), 0.08, 24)
    assert error == same
    model = load(tmp_path / "out")
    assert all(torch.equal(value, found[name].half().float()) for name, value in model.network.named_parameters())
    manifest = checkpoint.read_manifest(checkpoint.latest(tmp_path / "out"))
    assert (manifest["step"], manifest["width"], manifest["profile_error"]) == (24, 0.08, error)
    assert export_average(run, tmp_path / "early", 0.1, step=8) < 1e-6
    assert checkpoint.latest(tmp_path / "early").name == "step-00000008"


def test_what_cannot_be_rebuilt_is_named(run, direct, tmp_path):
    with pytest.raises(ValueError, match=r"no snapshots up to step 3; train with --train\.power"):
        rebuild(run, tiny(), 0.08, 3)
    with pytest.raises(ValueError, match="no snapshots up to step 24"):
        export_average(direct, tmp_path / "out", 0.08)
    with pytest.raises(ValueError, match="is not a run directory"):
        export_average(tmp_path, tmp_path / "out", 0.08)
    with pytest.raises(ValueError, match=r"relative width 0\.5.*--width"):
        export_average(run, tmp_path / "out", 0.5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_power": "", "train_snapshot_every": "4"}, r"train\.snapshot_every=4 stores train\.power averages"),
        ({"train_ema": ""}, r"train\.ema is empty"),
        ({"train_ema": "0.9,0.9"}, r"train\.ema=.*twice"),
        ({"train_power": "0.1,0.10"}, r"train\.power=.*twice"),
        ({"train_power": "0.5"}, r"0\.5"),
        ({"train_ema": "1"}, r"train\.ema=1"),
    ],
)
def test_bad_options_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        tiny(**changes)
