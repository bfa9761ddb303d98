"""Looks at a run: always the same seeds, the averaged weights, a figure worked out by hand, and no trace in the run."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_recipe import NETWORK, recipe_with

from mvm import checkpoint, noise
from mvm.data import Images, Resident
from mvm.distributed.processes import Processes
from mvm.generate import Sampler
from mvm.metrics.distances import frechet_distance, moments, shrunken_features
from mvm.model import Model, load
from mvm.recipes import PreviewConfig
from mvm.training import preview
from mvm.training.data import training_data
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train
from mvm.training.preview import FieldPreview, reference_moments

TINY = {
    **NETWORK,
    "train.batch": "8",
    "train.steps": "6",
    "train.decay": "constant",
    "train.lr": "1e-2",
    "train.ema": "0.5",
    "train.log_every": "1",
    "train.save_every": "2",
    "train.keep": "9",
    "preview.every": "2",
    "preview.grid": "6",
    "preview.count": "20",
    "sample.nfe": "3",
}


def tiny(**changes):
    return recipe_with(TINY, **changes)


def read(run, key):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(tiny(), folder, progress=False)
    return folder


def by_hand(model, recipe):
    """Images and figure of a model, with the package's public parts alone."""
    labels = torch.arange(20) % 10
    seeds = noise.derive(recipe.seed, torch.arange(20) + 2**40)
    images = Sampler(model).images(labels, seeds, recipe.sample, progress=False).images
    reference = moments(shrunken_features(training_data(recipe).images))
    return images, frechet_distance(moments(shrunken_features(images)), reference)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_quality_is_that_of_the_averaged_weights(run, step):
    _, quality = by_hand(load(run, which=str(step)), tiny())
    assert read(run, "fd_pixels")[step] == pytest.approx(quality, rel=1e-9)
    assert checkpoint.read_manifest(checkpoint.step_folder(run, step))["quality"] == read(run, "fd_pixels")[step]
    _, raw = by_hand(load(run, weights="model", which=str(step)), tiny())
    assert raw != pytest.approx(quality, rel=1e-6)


def test_looks_come_when_due_and_have_a_line_of_their_own(run):
    assert list(read(run, "fd_pixels")) == [2, 4, 6]
    assert list(read(run, "loss")) == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (run / "samples").iterdir()) == [f"step-0000000{n}.png" for n in (2, 4, 6)]


def test_the_grid_shows_the_first_images(run):
    """Six of 8x8 of six classes, magnified eight times, in two columns and three rows, each above its class's name."""
    with Image.open(run / "samples" / "step-00000004.png") as picture:
        assert picture.size == (2 * 66 + 2, 3 * 84)
        pixels = np.asarray(picture.convert("L"))
    images, _ = by_hand(load(run, which="4"), tiny())
    for i in range(6):
        y, x = 2 + 84 * (i // 2), 2 + 66 * (i % 2)
        assert np.array_equal(pixels[y : y + 64 : 8, x : x + 64 : 8], images[i, 0].numpy())


def looker(model, config=None, **place):
    store = Resident(training_data(model.recipe), "cpu")
    return lambda folder: FieldPreview(config or model.recipe.preview, model, store, folder, Processes(**place))


def test_the_same_weights_look_the_same_each_time(tmp_path):
    look = looker(Model(tiny()))(tmp_path)
    torch.manual_seed(1)
    first = look(1)
    torch.manual_seed(2)
    assert look(2) == first
    assert (tmp_path / "step-00000001.png").read_bytes() == (tmp_path / "step-00000002.png").read_bytes()


def test_seeds_are_apart_from_those_of_training(tmp_path):
    look = looker(Model(tiny()))(tmp_path)
    trained = noise.derive(0, torch.arange(100_000))
    assert not set(look.seeds.tolist()) & set(trained.tolist())
    assert look.labels.tolist() == [i % 10 for i in range(20)]
    other = looker(Model(tiny(seed="1")))(tmp_path)
    assert not torch.equal(look.seeds, other.seeds)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_of_any_number_of_processes_are_the_same_images(tmp_path, world):
    model = Model(tiny())
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    whole = looker(model)(tmp_path)._images()
    looks = [looker(model, rank=rank, world=world)(tmp_path) for rank in range(world)]
    shares = []
    for look in looks:
        object.__setattr__(look.processes, "gather", lambda mine: shares.append(mine) or mine)
        look._images()
    assert len({len(share) for share in shares}) == 1  # equally many calls, or fsdp would wait for ever
    assert torch.equal(torch.cat(shares)[:20], whole)


def test_looks_leave_no_trace_in_the_weights(run, tmp_path):
    train(tiny(preview_every="0"), tmp_path / "blind", progress=False)
    for step in (2, 4, 6):
        for part in ("model", "ema", "optimizer"):
            found = [checkpoint.load(checkpoint.step_folder(r, step), part) for r in (run, tmp_path / "blind")]
            assert all(torch.equal(value, found[1][name]) for name, value in found[0].items()), (step, part)
    assert read(run, "loss") == read(tmp_path / "blind", "loss")
    assert not (tmp_path / "blind" / "samples").exists()


def test_the_weights_come_back_bit_for_bit_also_after_an_error():
    recipe = tiny()
    trainer = FieldTrainer(recipe, training_data(recipe))
    trainer.advance()
    network, average = trainer.model.network, trainer.averages.tensors["ema"]
    own = {name: value.detach().clone() for name, value in network.named_parameters()}
    storage = [value.data_ptr() for value in network.parameters()]
    with trainer.averages.swapped_in():
        assert all(torch.equal(value, average[name]) for name, value in network.named_parameters())
        assert any(not torch.equal(value, own[name]) for name, value in network.named_parameters())
    with pytest.raises(ZeroDivisionError), trainer.averages.swapped_in():
        raise ZeroDivisionError
    assert all(torch.equal(value, own[name]) for name, value in network.named_parameters())
    assert [value.data_ptr() for value in network.parameters()] == storage  # a CUDA graph reads them there


def test_keep_best_keeps_the_one_with_the_lowest_figure(tmp_path, monkeypatch):
    figures = {1: 5.0, 2: 3.0, 3: 4.0, 4: 1.0, 5: 2.0, 6: 6.0}
    monkeypatch.setattr(FieldPreview, "__call__", lambda self, step: {"fd_pixels": figures[step]})
    options = {"preview_every": "1", "train_save_every": "1", "train_keep": "1", "train_keep_best": "yes"}
    recipe = tiny(**options)
    train(recipe, tmp_path, progress=False, until=3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003"]
    train(recipe, tmp_path, progress=False, resume=True)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]
    best, newest = (load(tmp_path, which=which).network.state_dict() for which in ("best", "latest"))
    want = checkpoint.load(checkpoint.step_folder(tmp_path, 4), "ema")
    assert all(torch.equal(best[name], value) for name, value in want.items())
    assert any(not torch.equal(newest[name], value) for name, value in want.items())
    with pytest.raises(ValueError, match=r"no checkpoint '5'"):
        load(tmp_path, which="5")


def test_best_without_looks_is_named(run, tmp_path):
    train(tiny(preview_every="0", train_steps="1"), tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"no checkpoint 'best'"):
        load(tmp_path, which="best")


def test_reference_is_spread_evenly_over_the_data(monkeypatch):
    monkeypatch.setattr(preview, "REFERENCE", 5)
    levels = torch.arange(101, dtype=torch.uint8)[:, None, None, None].expand(101, 1, 8, 8)
    store = Resident(Images(levels, torch.zeros(101, dtype=torch.int64), ("x",)), "cpu")
    found = reference_moments(store)
    assert found.count == 5
    want = moments(shrunken_features(levels[[0, 25, 50, 75, 100]]))
    assert torch.equal(found.mean, want.mean)
    assert torch.equal(found.covariance, want.covariance)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": -1}, r"preview\.every=-1"),
        ({"grid": 0}, r"preview\.grid=0"),
        ({"grid": 9, "count": 8}, r"preview\.count=8 .*at least 9"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        PreviewConfig(**options)


@pytest.mark.parametrize("every", ["0", "3"])
def test_keep_best_needs_a_look_at_every_save(every):
    with pytest.raises(ValueError, match=rf"train\.keep_best .*preview\.every={every} must divide train\.save_every=2"):
        tiny(preview_every=every, train_keep_best="yes")
