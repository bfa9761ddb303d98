"""Augmentation and dropout in a run: pure functions of (recipe, step), told to the network, and never in a sample."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_recipe import NETWORK, recipe_with

import mvm
from mvm import checkpoint
from mvm.data import Images, augmentation, augmented, mirror, mirrored
from mvm.generate import Sampler
from mvm.model import load
from mvm.pixels import to_unit
from mvm.published import export, open_model
from mvm.recipes import load_recipe, override
from mvm.training.data import training_data
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train

BOTH = {"data.augment": "0.3", "network.dropout": "0.2"}
TINY = {
    **NETWORK,
    "train.batch": "8",
    "train.steps": "4",
    "train.warmup": "2",
    "train.decay": "constant",
    "train.lr": "5e-3",
    "train.ema": "0.8",
    "train.power": "0.1",
    "train.log_every": "1",
    "train.save_every": "2",
}
PARTS = ("model", "ema", "power-0.1", "optimizer")


def tiny(**changes):
    return recipe_with({**TINY, **BOTH}, **changes)


def trainer_of(recipe):
    return FieldTrainer(recipe, training_data(recipe))


def stored(run):
    return {part: checkpoint.load(checkpoint.latest(run), part) for part in PARTS}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps in one go."""
    folder = tmp_path_factory.mktemp("small") / "run"
    train(tiny(), folder, progress=False)
    return folder


def drawn(model, count=8):
    labels, seeds = torch.arange(count) % 10, torch.arange(count)
    return Sampler(model).images(labels, seeds, replace(model.recipe.sample, nfe=4), progress=False).images


# The batch


@pytest.mark.parametrize("scale", ["1", "2"])
def test_a_batch_is_warped_as_the_network_is_told(scale):
    trainer = trainer_of(tiny(data_mirror="true", codec_scale=scale))
    trainer.step = 3
    batch, positions = trainer.batch(), torch.arange(24, 32)
    seeds = trainer.order.seeds(positions)
    images = mirror(trainer.store.gather(trainer.order.indices(positions))[0], mirrored(seeds))
    assert torch.equal(batch.augment, augmentation(seeds, 0.3))
    assert torch.equal(batch.x0, to_unit(augmented(images, batch.augment)) * float(scale))
    untouched = ~batch.augment.any(1)
    assert 0 < int(untouched.sum()) < 8
    plain = trainer_of(tiny(data_mirror="true", codec_scale=scale, data_augment="0"))
    plain.step = 3
    assert torch.equal(plain.batch().x0[untouched], batch.x0[untouched])
    assert plain.batch().augment is None


def test_a_batch_is_the_same_on_any_number_of_processes():
    trainer, parts = trainer_of(tiny()), []
    whole = trainer.batch()
    for share in (slice(0, 3), slice(3, 8)):
        trainer.mine = share
        parts.append(trainer.batch())
    for name in ("x0", "augment", "seeds", "condition"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_without_them_the_weights_have_no_map_and_the_steps_no_mask():
    """A step without them is what the objective says of the bare batch; either of them changes it."""
    found = []
    for changes in ({"data_augment": "0", "network_dropout": "0"}, {"data_augment": "0"}, {"network_dropout": "0"}):
        trainer = trainer_of(tiny(**changes))
        with torch.no_grad():
            for parameter in trainer.model.network.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        plain = trainer.learner.objective(trainer.model.network, trainer.batch()._replace(augment=None)).total.detach()
        trainer.advance()
        found.append((trainer.read()[0].values["loss"], float(plain)))
        assert ("augment.weight" in trainer.model.network.state_dict()) == ("data_augment" not in changes)
    (off, same), (dropped, _), (warped, _) = found
    assert off == same
    assert len({off, dropped, warped}) == 3


# A run


@pytest.mark.parametrize("first", [1, 2, 3])
def test_resume_is_bit_exact(run, tmp_path, first):
    parts = tmp_path / "parts"
    train(tiny(train_steps=str(first)), parts, progress=False)
    train(tiny(), parts, resume=True, progress=False)
    one, other = stored(run), stored(parts)
    for part in PARTS:
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items()), part
    losses = [[json.loads(line)["loss"] for line in (p / "metrics.jsonl").open()] for p in (run, parts)]
    assert losses[0] == losses[1]
    assert torch.count_nonzero(one["model"]["augment.weight"])


@pytest.mark.parametrize(("option", "value"), [("data_augment", "0.2"), ("network_dropout", "0.1")])
def test_resume_with_another_share_is_refused(run, option, value):
    with pytest.raises(ValueError, match=f"other values: {option.replace('_', '.')} "):
        train(tiny(**{option: value}), run, resume=True, progress=False)


def test_a_run_from_before_goes_on(tmp_path):
    """Its recipe.json knows neither option."""
    recipe, folder = tiny(data_augment="0", network_dropout="0"), tmp_path / "run"
    train(replace(recipe, train=replace(recipe.train, steps=2)), folder, progress=False)
    told = json.loads((folder / "recipe.json").read_text())
    del told["data"]["augment"], told["network"]["dropout"]
    (folder / "recipe.json").write_text(json.dumps(told))
    assert load(folder).recipe.data.augment == 0
    train(recipe, folder, resume=True, progress=False)
    assert checkpoint.latest(folder).name == "step-00000004"


# What comes of it


@pytest.mark.parametrize("weights", ["ema", "model", "power-0.1"])
def test_it_loads_and_samples_as_if_never_told(run, weights):
    """The same weights without the map, in a network without one, draw the same bits."""
    model = load(run, weights)
    plain = mvm.model.Model(tiny(data_augment="0", network_dropout="0")).eval().requires_grad_(False)
    values = model.network.state_dict()
    assert torch.count_nonzero(values.pop("augment.weight"))
    plain.network.load_state_dict(values)
    assert torch.equal(drawn(model), drawn(plain))


def test_it_is_exported_and_says_so(run, tmp_path):
    export(run, tmp_path / "model", dtype="float32")
    assert torch.equal(drawn(load(tmp_path / "model")), drawn(load(run)))
    assert "`digits`; warped by augmentation, which samples are not." in (tmp_path / "model" / "README.md").read_text()


def test_weights_may_start_a_run_of_the_other_kind(run, tmp_path):
    """A map that is not there starts at zero, as that of any new network; one that is not wanted is left."""
    weights = open_model(run, "ema").weights
    augmented_, plain = trainer_of(tiny()), trainer_of(tiny(data_augment="0"))
    augmented_.start_from(weights)
    assert all(torch.equal(value, weights[name]) for name, value in augmented_.learner.named())
    plain.start_from(weights)
    others = dict(plain.learner.named())
    assert weights.keys() - others.keys() == {"augment.weight"}
    assert all(torch.equal(value, weights[name]) for name, value in others.items())
    augmented_.start_from({name: value.detach() for name, value in others.items()})
    assert torch.count_nonzero(dict(augmented_.learner.named())["augment.weight"]) == 0
    assert torch.count_nonzero(augmented_.averages.tensors["ema"]["augment.weight"]) == 0


# It does not leak

LEAK = {
    **TINY,
    "network.depth": "2",
    "network.width": "32",
    "train.batch": "64",
    "train.steps": "600",
    "train.decay": "linear",
    "train.lr": "2e-2",
    "data.augment": "0.5",
}


def bright_above(count=256):
    """Images that are bright in the upper half and dark in the lower, and differ in brightness."""
    images = torch.full((count, 1, 8, 8), 30.0)
    images[:, :, :4] = 200
    images += 25 * torch.randn(count, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(count, dtype=torch.int64)
    return Images(images.round().clamp(0, 255).to(torch.uint8), labels, tuple("0123456789"))


def brighter_above(tell):
    """How much brighter the upper half of 64 samples is, after training on turned and flipped images."""
    recipe = override(load_recipe("digits"), LEAK)
    trainer = FieldTrainer(recipe, bright_above())
    batch = trainer.batch
    if not tell:
        trainer.batch = lambda: batch()._replace(augment=None)
    for _ in range(recipe.train.steps):
        trainer.advance()
    settings, none = replace(recipe.sample, cfg=1.0), torch.zeros(64, dtype=torch.int64)
    images = Sampler(trainer.model.eval()).images(none, torch.arange(64), settings, progress=False).images.float()
    return images[:, :, :4].mean((1, 2, 3)) - images[:, :, 4:].mean((1, 2, 3))


def test_augmentation_does_not_leak_into_samples():
    """Half of the images are turned by any angle and a quarter is flipped; samples are all as the data were."""
    assert float(brighter_above(tell=True).min()) > 40  # of 170 in the data


def test_it_would_leak_if_the_network_were_not_told():
    """What the test above would look like if it failed."""
    seen = brighter_above(tell=False)
    assert float((seen > 40).float().mean()) < 0.7
    assert float((seen < -40).float().mean()) > 0.1
