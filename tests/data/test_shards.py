"""The prepared format: what its files hold, both ways of reading, and damage told by name."""

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvm.data.prepare import describe, prepare
from mvm.data.shards import open_prepared

COUNT, PART = 23, 5
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 4, 4, 3), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, 3, COUNT)
WANT = torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    np.savez(folder / "set.npz", images=PIXELS, labels=LABELS)
    return prepare(folder / "set.npz", folder / "out", size=4, workers=1, part_size=PART, progress=False)


@pytest.fixture
def own(whole, tmp_path):
    """A copy to damage."""
    for file in whole.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return open_prepared(tmp_path)


def test_files_are_plain_numpy(whole):
    names = sorted(file.name for file in whole.folder.iterdir())
    numbers = [f"{i:05}" for i in range(5)]
    assert names == [*(f"images-{n}.npy" for n in numbers), "index.json", *(f"labels-{n}.npy" for n in numbers)]
    images = [np.load(whole.folder / f"images-{n}.npy") for n in numbers]
    labels = [np.load(whole.folder / f"labels-{n}.npy") for n in numbers]
    assert [len(piece) for piece in images] == [5, 5, 5, 5, 3]
    assert np.array_equal(np.concatenate(images), WANT.numpy())
    assert np.array_equal(np.concatenate(labels), LABELS)
    assert (images[0].dtype, labels[0].dtype) == (np.uint8, np.int64)


def test_index(whole):
    index = json.loads((whole.folder / "index.json").read_text())
    assert (index["format"], index["count"], index["shape"], index["resize"]) == (1, COUNT, [3, 4, 4], "box")
    assert index["classes"] == ["0", "1", "2"]
    assert index["class_counts"] == np.bincount(LABELS).tolist()
    assert index["source"] == {"name": "set.npz", "kind": "numpy"}
    assert index["skipped"] == {"count": 0, "first": []}
    assert index["empty_classes"] == []
    assert set(index["shards"][0]) == {"images", "labels", "count", "sha256"}
    assert str(whole.folder.parent) not in (whole.folder / "index.json").read_text()


def test_opening_gives_what_prepare_gave(whole):
    assert open_prepared(str(whole.folder)) == whole
    assert (len(whole), whole.count, whole.bytes) == (COUNT, COUNT, PIXELS.nbytes)


def test_load(whole):
    data = whole.load()
    assert torch.equal(data.images, WANT)
    assert data.images.is_contiguous()
    assert data.labels.tolist() == LABELS.tolist()
    assert data.classes == ("0", "1", "2")
    data.images.zero_()  # memory of one's own
    assert torch.equal(whole.load().images, WANT)


@settings(max_examples=50, deadline=None)
@given(indices=st.lists(st.integers(0, COUNT - 1), max_size=60))
def test_mapped_reads_any_indices_in_their_order(whole, indices):
    wanted = torch.tensor(indices, dtype=torch.int64)
    images, labels = whole.mapped().gather(wanted)
    assert torch.equal(images, WANT[wanted])
    assert labels.tolist() == LABELS[indices].tolist()
    assert images.dtype == torch.uint8


def test_mapped(whole):
    mapped = whole.mapped()
    assert len(mapped) == COUNT
    assert mapped.labels.tolist() == LABELS.tolist()
    other = pickle.dumps(mapped)
    assert len(other) < 5000  # names only
    assert torch.equal(pickle.loads(other).gather(torch.tensor([22]))[0], WANT[22:])
    for wrong in (-1, COUNT):
        with pytest.raises(IndexError, match=rf"leave 0..{COUNT - 1}"):
            mapped.gather(torch.tensor([0, wrong]))


def test_a_folder_that_is_none(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(
            ValueError, match=rf"holds no prepared data.*mvm data prepare SOURCE --out {folder} --size PIXELS$"
        ):
            open_prepared(folder)
    (tmp_path / "shard-00000.json").touch()
    with pytest.raises(ValueError, match="is not finished"):
        open_prepared(tmp_path)


@pytest.mark.parametrize("name", ["images-00003.npy", "labels-00000.npy"])
def test_verify_names_the_damaged_file(own, name):
    own.verify()
    path = own.folder / name
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=f"{name}' is damaged"):
        own.verify()
    assert f"{name}' is damaged" in describe(own.folder)[0]
    assert not describe(own.folder)[1]
    path.write_bytes(contents[:-1])
    for read in (own.load, own.mapped):
        with pytest.raises(ValueError, match=f"{name}' is damaged"):
            read()
    path.unlink()
    with pytest.raises(ValueError, match=f"index.json' is damaged \\({name} is missing"):
        open_prepared(own.folder)


def test_a_shard_of_another_shape_is_refused(own):
    np.save(own.folder / "images-00001.npy", np.zeros((5, 3, 4, 5), np.uint8))
    with pytest.raises(ValueError, match=r"images-00001.npy' is damaged \(uint8 \(5, 3, 4, 5\), not .*\(5, 3, 4, 4\)"):
        own.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format=3), "format 3; this version of mvm reads 1 and 2"),
        (lambda index: index.update(count=3), "counts contradict"),
        (lambda index: index.pop("classes"), "is damaged"),
        (lambda index: index.update(surprise=1), "is damaged"),
    ],
)
def test_wrong_index(own, change, message):
    path = own.folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        open_prepared(own.folder)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"index.json' is damaged"):
        open_prepared(own.folder)


def test_description(whole):
    text, good = describe(whole.folder)
    assert good
    counts = np.bincount(LABELS)
    size = sum(file.stat().st_size for file in whole.folder.glob("*.npy"))
    for line in (
        "shape      3x4x4",
        "images     23 in 5 shards",
        f"bytes      {size:,}",
        "resize     box",
        "source     set.npz (numpy)",
        "skipped    0",
        "checksums  good",
        "classes    3, 0 of them empty",
        f"images per class: min {counts.min()}, median {np.median(counts):g}, max {counts.max()}",
        f"  {counts[1]:>12}  1",
    ):
        assert line in text.splitlines()
