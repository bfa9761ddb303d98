"""Where a recipe's images come from and where they are kept: the run does not know the difference."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mvm import checkpoint
from mvm.data import IMAGENET, OnHost, Resident
from mvm.data.prepare import prepare
from mvm.recipes import DataConfig, load_recipe, override, parse_recipe, to_json
from mvm.training import data as training
from mvm.training.data import completed, training_data, training_store
from mvm.training.loop import train

COUNT, CLASSES = 30, 3
TINY = {
    "network.depth": "1",
    "network.heads": "2",
    "network.width": "16",
    "network.patch": "4",
    "data.mirror": "yes",
    "train.batch": "8",
    "train.steps": "9",
    "train.decay": "constant",
    "train.lr": "5e-3",
    "train.log_every": "1",
    "train.save_every": "9",
    "sample.nfe": "2",
    "preview.grid": "2",
    "preview.count": "4",
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8), np.arange(COUNT) % CLASSES


@pytest.fixture(scope="module")
def folder(arrays, tmp_path_factory):
    """30 colour images of 8x8 in four shards."""
    place = tmp_path_factory.mktemp("data")
    np.savez(place / "source.npz", images=arrays[0], labels=arrays[1])
    prepare(place / "source.npz", place / "prepared", size=8, workers=1, progress=False, part_size=9)
    return place / "prepared"


def recipe(folder, **changes):
    told = {**TINY, "data.name": "folder", "data.path": str(folder)}
    return override(load_recipe("digits"), {**told, **{k.replace("_", ".", 1): v for k, v in changes.items()}})


def test_a_folder_tells_its_own_shape_and_classes(folder):
    found = completed(recipe(folder))
    assert found.data.shape == (3, 8, 8)
    assert found.data.class_names == ("0", "1", "2")
    assert completed(found) == found
    nothing = {"data.channels": "0", "data.size": "0", "data.classes": "0", "data.names": ""}
    assert override(found, nothing) == recipe(folder)
    before = override(found, {"data.names": ""})  # of a run from before names were kept
    assert completed(before) == found


def test_a_run_keeps_absolute_paths(folder, monkeypatch):
    """So that it can be sampled, resumed and judged from any folder."""
    monkeypatch.chdir(folder.parent)
    found = completed(recipe(folder.name))
    assert found.data.path == str(folder.resolve())
    monkeypatch.chdir(folder)
    assert completed(found) == found
    Path("data").mkdir(exist_ok=True)
    known = load_recipe("cifar10")
    assert completed(known).data.path == ""  # not prepared yet: it is looked for when it is opened
    Path("data/cifar10").mkdir(exist_ok=True)
    assert completed(known).data.path == str(folder.resolve() / "data" / "cifar10")
    shutil.rmtree("data")


def test_other_recipes_are_complete_as_they_are():
    digits = load_recipe("digits")
    assert completed(digits) == digits


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no prepared data.*mvm data prepare"):
        completed(recipe(tmp_path))


def test_images_and_labels(folder, arrays):
    data = training_data(completed(recipe(folder)))
    assert torch.equal(data.images, torch.from_numpy(arrays[0]).permute(0, 3, 1, 2))
    assert torch.equal(data.labels, torch.from_numpy(arrays[1]))
    with pytest.raises(ValueError, match=r"split='held-out'.*prepare the other split apart"):
        training_data(completed(recipe(folder)), "held-out")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_size": "16", "data_channels": "3", "data_classes": "3"}, r"needs \(3, 16, 16\) of 3"),
        ({"data_size": "8", "data_channels": "1", "data_classes": "3"}, r"needs \(1, 8, 8\) of 3"),
        ({"data_size": "8", "data_channels": "3", "data_classes": "4"}, r"needs \(3, 8, 8\) of 4"),
    ],
)
def test_a_folder_of_something_else_is_named(folder, tmp_path, changes, words):
    for call in (training_data, lambda r: training_store(r, CPU), lambda r: train(r, tmp_path, progress=False)):
        with pytest.raises(ValueError, match=rf"data\.path=.*\(3, 8, 8\).*3 classes.*{words}"):
            call(recipe(folder, **changes))
    assert not (tmp_path / "recipe.json").exists()


def test_a_known_set_prepared_wrongly_is_named(folder):
    with pytest.raises(ValueError, match=r"\(3, 8, 8\).*3 classes.*data\.name='cifar10' needs"):
        training_store(override(load_recipe("cifar10"), {"data.path": str(folder)}), CPU)


@pytest.mark.parametrize(
    ("asked", "free", "kind"),
    [
        ("device", 0, Resident),
        ("host", 10**12, OnHost),
        ("auto", 2 * COUNT * 3 * 8 * 8 + 1, Resident),  # they may take half of what is free
        ("auto", 2 * COUNT * 3 * 8 * 8, OnHost),
    ],
)
def test_where_images_are_kept(folder, monkeypatch, asked, free, kind):
    monkeypatch.setattr(training, "free_memory", lambda device: free)
    store = training_store(completed(recipe(folder, engine_resident=asked)), CPU)
    assert type(store) is kind
    assert len(store) == len(store.labels) == COUNT


def test_free_memory_is_that_of_this_machine():
    assert 2**20 < training.free_memory(CPU) < 2**45


def test_embedded_images_are_always_on_the_device():
    assert type(training_store(override(load_recipe("digits"), {"engine.resident": "host"}), CPU)) is Resident


def test_both_stores_hold_the_same(folder, arrays):
    indices = torch.tensor([29, 0, 8, 9, 8, 17])
    for where in ("device", "host"):
        store = training_store(completed(recipe(folder, engine_resident=where)), CPU)
        images, labels = store.gather(indices)
        assert torch.equal(images, torch.from_numpy(arrays[0][indices]).permute(0, 3, 1, 2))
        assert torch.equal(labels, torch.from_numpy(arrays[1][indices]))
        assert torch.equal(store[indices], images)


def test_reading_ahead_is_used_once_and_only_for_what_was_expected():
    reads = []

    def read(indices):
        reads.append(indices.tolist())
        return indices * 10, indices * 100

    store = OnHost(read, torch.arange(50), "cpu")
    store.expect(lambda: torch.tensor([1, 2]))
    assert store.gather(torch.tensor([1, 2]))[0].tolist() == [10, 20]
    assert reads == [[1, 2]]
    assert store.gather(torch.tensor([1, 2]))[1].tolist() == [100, 200]
    assert reads == [[1, 2], [1, 2]]
    store.expect(lambda: torch.tensor([3]))
    assert store.gather(torch.tensor([4]))[0].tolist() == [40]
    assert reads[2:] == [[3], [4]]


def test_an_error_while_reading_ahead_arrives():
    def read(indices):
        raise OSError("the disk is gone")

    store = OnHost(read, torch.arange(5), "cpu")
    store.expect(lambda: torch.tensor([1]))
    with pytest.raises(OSError, match="the disk is gone"):
        store.gather(torch.tensor([1]))


@pytest.mark.parametrize("preview", ["0", "3"])
def test_a_run_from_the_disk_is_bit_equal_to_one_from_memory(folder, tmp_path, preview):
    """Nine batches of 8 go through two epochs and more; previews read the store in between."""
    for where in ("device", "host"):
        chosen = completed(recipe(folder, engine_resident=where, preview_every=preview))
        train(chosen, tmp_path / where, progress=False)
    for part in ("model", "ema", "optimizer"):
        one, other = (checkpoint.load(checkpoint.latest(tmp_path / name), part) for name in ("device", "host"))
        assert all(torch.equal(value, other[name]) for name, value in one.items()), part
    logs = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("device", "host")]
    assert [[line.get("loss"), line.get("fd_pixels")] for line in logs[0]] == [
        [line.get("loss"), line.get("fd_pixels")] for line in logs[1]
    ]


def test_a_run_may_move_from_memory_to_the_disk(folder, tmp_path):
    train(completed(recipe(folder)), tmp_path / "whole", progress=False)
    train(completed(recipe(folder, engine_resident="device")), tmp_path / "moved", progress=False, until=4)
    train(completed(recipe(folder, engine_resident="host")), tmp_path / "moved", progress=False, resume=True)
    one, other = (checkpoint.load(checkpoint.latest(tmp_path / name), "model") for name in ("whole", "moved"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "folder"}, r"data\.name='folder' needs data\.path"),
        ({"name": "digits", "size": 8}, r"data\.size belongs to data\.name='folder'"),
        ({"name": "folder", "path": "x", "classes": -1}, r"data\.classes=-1"),
        ({"name": "digit"}, r"data\.name='digit' is unknown \(did you mean 'digits'\?\)"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**options)


def test_a_run_does_not_go_on_with_other_images(folder, arrays, tmp_path):
    """Order, epochs and weights would be another run's; where the same images lie does not matter."""
    np.savez(tmp_path / "other.npz", images=arrays[0][::-1], labels=arrays[1])
    prepare(tmp_path / "other.npz", tmp_path / "other", size=8, workers=1, progress=False, part_size=9)
    train(completed(recipe(folder)), tmp_path / "run", until=2, progress=False)
    with pytest.raises(ValueError, match=r"was trained on other images than data\.path=.*other holds"):
        train(completed(recipe(tmp_path / "other")), tmp_path / "run", resume=True, until=3, progress=False)
    shutil.copytree(folder, tmp_path / "moved")
    train(completed(recipe(tmp_path / "moved")), tmp_path / "run", resume=True, until=3, progress=False)


def test_a_set_whose_classes_have_no_names_takes_those_of_its_folder(tmp_path):
    """ImageNet-32 of published batches has an order of its own, and numbers; of folders by WordNet id it has names."""
    raw, labels = np.zeros((1000, 4, 4, 3), np.uint8), np.arange(1000)
    for name, classes in {"ids": tuple(IMAGENET), "numbers": ()}.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "images.npy", raw)
        np.save(tmp_path / name / "labels.npy", labels)
        (tmp_path / name / "classes.txt").write_text("\n".join(classes))
        prepare(tmp_path / name, tmp_path / "data" / name, size=4, workers=1, progress=False)

    def of(name):
        recipe = completed(override(load_recipe("imagenet32-dit-b"), {"data.path": str(tmp_path / "data" / name)}))
        assert parse_recipe(to_json(recipe), ".json", "x") == recipe
        return recipe.data.class_names

    assert of("ids") == tuple(IMAGENET.values())
    assert of("numbers") == tuple(map(str, range(1000)))
    with pytest.raises(ValueError, match=r"data\.names has 1 names"):
        DataConfig("imagenet32", names=("one",))
    with pytest.raises(ValueError, match=r"data\.names has 10 names"):
        DataConfig("cifar10", names=tuple("abcdefghij"))
