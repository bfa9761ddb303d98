"""Run directories: what may change when a run goes on, and what a run that starts from another's weights takes over."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_recipe import NETWORK, recipe_with

from mvm import checkpoint
from mvm.published import export, open_model
from mvm.recipes import options, override, parse_recipe
from mvm.training.data import training_data
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train
from mvm.training.rundir import open_run

TINY = {
    **NETWORK,
    "train.batch": "8",
    "train.steps": "4",
    "train.decay": "constant",
    "train.warmup": "2",
    "train.lr": "5e-3",
    "train.ema": "0.5,0.9",
    "train.power": "0.1",
    "train.log_every": "1",
    "train.save_every": "2",
}


def tiny(**changes):
    return recipe_with(TINY, **changes)


def go(recipe, run, **given):
    return train(recipe, run, progress=False, **given)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "source"
    go(tiny(), run)
    return run


@pytest.fixture
def run(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


def stored(run, part="model"):
    return checkpoint.load(checkpoint.latest(run), part)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# What may change

FREE = {
    "engine.parallel": "fsdp",
    "engine.shard": "2",
    "engine.precision": "bf16",
    "engine.compile": "blocks",
    "engine.recompute": "0.5",
    "engine.keep": "nothing",
    "engine.accumulate": "2",
    "engine.resident": "host",
    "preview.every": "2",
    "preview.grid": "4",
    "preview.count": "99",
    "train.log_every": "3",
    "train.save_every": "4",
    "train.snapshot_every": "2",
    "train.keep": "7",
    "train.steps": "9",
    "sample.solver": "euler",
    "sample.nfe": "3",
    "sample.rho": "1",
    "sample.cfg": "2",
    "sample.low": "0.1",
    "sample.high": "0.9",
    "sample.tolerance": "1e-3",
}
BOUND = {
    "seed": "1",
    "data.mirror": "yes",
    "path.law.name": "logit-normal",
    "path.T": "2",
    "network.heads": "1",
    "network.patch": "2",
    "objective.label_drop": "0.3",
    "objective.inner_weight": "0.3",
    "repa.weight": "0.3",
    "train.batch": "16",
    "train.optimizer": "muon",
    "train.muon_split": "yes",
    "train.weight_decay": "0.1",
    "train.beta1": "0.8",
    "train.clip": "2",
    "train.ema": "0.5,0.99",
    "train.power": "0.1,0.05",
}


SCHEDULE = {
    "train.lr": "1e-3",
    "train.warmup": "1",
    "train.decay": "linear",
    "train.final": "0.5",
    "train.cooldown": "1",
    "train.decay_start": "3",
    "train.decay_end": "5",
}


@pytest.mark.parametrize("name", FREE)
def test_how_a_run_is_executed_watched_and_kept_may_change(run, name):
    recipe = override(tiny(), {name: FREE[name]})
    assert options(recipe)[name] != options(tiny())[name]
    changed = [("train.steps", 4, 9)] if name == "train.steps" else []
    newest, found = open_run(recipe, run, resume=True)
    assert newest == checkpoint.latest(run)
    assert [change[1:] for change in found] == changed


def test_keeping_the_best_may_begin_later(run):
    assert open_run(tiny(preview_every="1", train_keep_best="yes"), run, resume=True)[0] is not None


@pytest.mark.parametrize("name", BOUND)
def test_what_decides_the_weights_may_not(run, name):
    old, new = options(tiny())[name], options(override(tiny(), {name: BOUND[name]}))[name]
    told = re.escape(f"other values: {name} {old} there, {new} now. They decide its weights: use another --out")
    with pytest.raises(ValueError, match=told):
        open_run(override(tiny(), {name: BOUND[name]}), run, resume=True, allow_change=True)


@pytest.mark.parametrize("name", SCHEDULE)
def test_the_schedule_may_change_where_it_is_allowed(run, name):
    recipe = override(tiny(), {name: SCHEDULE[name]})
    old, new = options(tiny())[name], options(recipe)[name]
    told = re.escape(f"other values: {name} {old} there, {new} now. --allow-change changes them from here on")
    with pytest.raises(ValueError, match=told):
        open_run(recipe, run, resume=True)
    assert open_run(recipe, run, resume=True, allow_change=True)[1] == [(4, name, old, new)]


def test_steps_may_be_raised_but_not_lowered_unasked(tmp_path):
    falling = {"train_decay": "linear"}
    go(tiny(**falling), tmp_path / "run", until=2)
    assert open_run(tiny(**falling, train_steps="9"), tmp_path / "run", resume=True)[1] == [(2, "train.steps", 4, 9)]
    with pytest.raises(ValueError, match=r"train\.steps 4 there, 3 now\. --allow-change"):
        open_run(tiny(**falling, train_steps="3"), tmp_path / "run", resume=True)


def test_changes_are_recorded_in_order_and_the_run_is_what_they_say(source, tmp_path):
    """Until the change the run is as it was; after it, as one step by hand at the new learning rate."""
    go(tiny(), tmp_path, until=2)
    go(tiny(train_lr="1e-2"), tmp_path, resume=True, allow_change=True, until=3)
    go(tiny(train_lr="1e-2", train_steps="6"), tmp_path, resume=True)
    assert json.loads((tmp_path / "changes.json").read_text()) == [
        {"step": 2, "option": "train.lr", "old": 5e-3, "new": 1e-2},
        {"step": 3, "option": "train.steps", "old": 4, "new": 6},
    ]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["lr"]) for line in lines] == [
        *((1, 2.5e-3), (2, 5e-3)),
        *((step, 1e-2) for step in (3, 4, 5, 6)),
    ]
    assert not (source / "changes.json").exists()


def test_all_that_changed_is_named_and_nothing_else(run):
    recipe = override(tiny(), {"train.lr": "1", "engine.accumulate": "2", "seed": "3"})
    with pytest.raises(ValueError, match=r"other values: seed 0 there, 3 now\. They"):
        open_run(recipe, run, resume=True)


@pytest.mark.parametrize(
    "changes", [{"engine_accumulate": "3"}, {"engine_recompute": "1"}, {"preview_every": "3", "sample_nfe": "2"}]
)
def test_a_run_that_goes_on_otherwise_is_the_same_run(source, tmp_path, changes):
    small = {"preview_grid": "2", "preview_count": "4"}
    go(tiny(), tmp_path, until=2)
    go(tiny(**small, **changes), tmp_path, resume=True)
    found, want = stored(tmp_path), stored(source)
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in want.items())
    kept = parse_recipe((tmp_path / "recipe.json").read_text(), ".json", "x")
    assert kept == tiny(**small, **changes)  # the run describes itself as it is now


# Another run's weights


@pytest.mark.parametrize("weights", ["ema", "model", "ema-0.9", "power-0.1"])
def test_init_takes_the_weights_and_nothing_else(source, tmp_path, weights):
    """One step by hand: fresh moments, step 0 of the data order, the first rate of the warm-up."""
    recipe = tiny(seed="5")
    begin = stored(source, weights)
    trainer = FieldTrainer(recipe, training_data(recipe))
    trainer.load_weights(begin)
    trainer.advance()
    go(recipe, tmp_path / "new", init=(source, weights), until=1)
    assert checkpoint.latest(tmp_path / "new").name == "step-00000001"
    assert same(stored(tmp_path / "new"), dict(trainer.learner.named()))
    assert {float(v) for k, v in stored(tmp_path / "new", "optimizer").items() if k.endswith("/step")} == {1}
    line = json.loads((tmp_path / "new" / "metrics.jsonl").read_text())
    assert (line["step"], line["lr"]) == (1, pytest.approx(2.5e-3))


def test_averages_start_at_the_given_weights(source):
    recipe = tiny(seed="5")
    trainer = FieldTrainer(recipe, training_data(recipe))
    fresh = {name: value.clone() for name, value in trainer.averages.whole("ema").items()}
    begin = stored(source, "model")
    trainer.start_from(begin)
    assert trainer.step == 0
    for name in ("ema", "ema-0.9", "power-0.1"):
        assert same(trainer.averages.whole(name), begin)
    assert not same(fresh, begin)
    trainer.advance()
    now = dict(trainer.model.network.named_parameters())
    for name, value in trainer.averages.whole("ema").items():
        assert torch.allclose(value, 0.1 * begin[name] + 0.9 * now[name], atol=1e-6), name
    assert all(torch.equal(value, begin[name]) for name, value in stored(source).items())  # theirs did not move


def test_where_the_weights_came_from_is_written_down(source, tmp_path):
    go(tiny(), tmp_path / "new", init=(source, "ema-0.9"), until=1)
    manifest = checkpoint.read_manifest(checkpoint.latest(source))
    assert json.loads((tmp_path / "new" / "init.json").read_text()) == {
        "run": "source",
        "step": 4,
        "weights": "ema-0.9",
        "sha256": manifest["sha256"]["ema-0.9.safetensors"],
    }
    assert not (source / "init.json").exists()


def test_resume_goes_on_from_its_own_checkpoint(source, tmp_path):
    go(tiny(seed="5"), tmp_path / "whole", init=(source, "ema"))
    go(tiny(seed="5"), tmp_path / "parts", init=(source, "ema"), until=3)
    go(tiny(seed="5"), tmp_path / "parts", init=(source, "model"), resume=True)
    assert same(stored(tmp_path / "whole"), stored(tmp_path / "parts"))
    assert json.loads((tmp_path / "parts" / "init.json").read_text())["weights"] == "ema"


def test_a_run_may_start_from_an_export(source, tmp_path):
    """Half precision: the weights begin there, in float32."""
    export(source, tmp_path / "export")
    opened = open_model(tmp_path / "export", "ema")
    assert opened.origin["step"] == 4
    trainer = FieldTrainer(tiny(), training_data(tiny()))
    trainer.start_from(opened.weights)
    for name, value in trainer.learner.named():
        assert value.dtype == torch.float32
        assert torch.equal(value, stored(source, "ema")[name].half().float())
    assert {value.dtype for value in trainer.averages.whole("ema").values()} == {torch.float32}


def test_bad_sources_are_named(source, tmp_path):
    with pytest.raises(ValueError, match=r"--init-from .* is neither a run directory .* nor a shipped one"):
        go(tiny(), tmp_path / "new", init=(tmp_path, "ema"))
    with pytest.raises(ValueError, match=r"--init-from .*weights='emma': .*no such weights; it has: .*ema-0\.9"):
        go(tiny(), tmp_path / "new", init=(source, "emma"))
    with pytest.raises(ValueError, match=r"give the recipe its network: --network\.width 16$"):
        go(tiny(network_width="32"), tmp_path / "new", init=(source, "ema"))
    with pytest.raises(ValueError, match=r"do not fit the recipe's network; .*: --network\.depth 1$"):
        go(tiny(network_depth="2"), tmp_path / "new", init=(source, "ema"))
    with pytest.raises(ValueError, match=r"weights='optimizer': .*no such weights"):
        go(tiny(), tmp_path / "new", init=(source, "optimizer"))
    go(tiny(), tmp_path / "new", init=(source, "ema"), until=1)  # none of them left a run behind


def test_a_run_longer_than_its_recipe_is_named(run):
    recipe = tiny()
    with pytest.raises(ValueError, match=r"train\.steps=3: .* is already at step 4"):
        go(replace(recipe, train=replace(recipe.train, steps=3)), run, resume=True, allow_change=True)


def test_two_trainings_cannot_share_a_run(tmp_path):
    """The second would cut the first one's log and prune its checkpoints."""
    seen = []

    def intrude(line):
        if line["step"] == 2:
            with pytest.raises(ValueError, match="is in use by another process"):
                go(tiny(), tmp_path / "run", resume=True)
            seen.append(line)

    go(tiny(), tmp_path / "run", on_log=intrude)
    assert seen
    go(tiny(), tmp_path / "run", resume=True)  # free again


def test_a_folder_with_other_files_is_no_run(tmp_path):
    (tmp_path / "photo.png").touch()
    with pytest.raises(ValueError, match="other files in it"):
        go(tiny(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]
