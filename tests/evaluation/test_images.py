"""Sets of images: every kind of storage gives the same pictures in the same order, and bad ones are named."""

import re
import zipfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from mvm.data import digits
from mvm.data.prepare import prepare
from mvm.distributed.processes import Processes
from mvm.evaluation import images as module
from mvm.evaluation.images import of_model, of_parts, of_tensor, of_training, open_images
from mvm.generate import Draw, Sampler
from mvm.model import load
from mvm.recipes import SampleConfig
from mvm.samples import sample_parts

COUNT = 23
KINDS = ("folder", "zip", "npz", "npy", "compressed", "nchw", "parquet", "prepared")
SETTINGS = SampleConfig(nfe=2)


def pictures(count=COUNT, side=16, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


def save_folder(folder, arrays):
    folder.mkdir(parents=True)
    for number, array in enumerate(arrays):
        Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(folder / f"{number:03}.png")
    return folder


def save(kind, arrays, path):
    """Write the pictures in one kind of storage and return where they are."""
    if kind == "folder":
        return save_folder(path / "folder", arrays)
    if kind == "zip":
        folder = save_folder(path / "unzipped", arrays)
        with zipfile.ZipFile(path / "x.zip", "w") as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, file.name)
        return path / "x.zip"
    if kind in ("npz", "compressed"):
        {"npz": np.savez, "compressed": np.savez_compressed}[kind](path / f"{kind}.npz", arrays)
        return path / f"{kind}.npz"
    if kind in ("npy", "nchw"):
        np.save(path / f"{kind}.npy", arrays if kind == "npy" else np.ascontiguousarray(arrays.transpose(0, 3, 1, 2)))
        return path / f"{kind}.npy"
    if kind == "parquet":
        return save_parquet(save_folder(path / "table", arrays), path / "x.parquet")
    options = {"size": arrays.shape[1], "channels": arrays.shape[3], "workers": 1, "progress": False}
    prepare(save_folder(path / "source", arrays), path / "prepared", **options)
    return path / "prepared"


def save_parquet(folder, path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": file.read_bytes(), "path": file.name} for file in sorted(folder.iterdir())]
    parquet.write_table(pa.table({"image": rows, "label": [0] * len(rows)}), path)
    return path


def everything(found, batch=7, place=None):
    """All images of a set, and their indices."""
    indices, images = zip(*found.read(batch, place), strict=True)
    return torch.cat(images), torch.cat(indices)


def as_tensor(arrays):
    return torch.from_numpy(arrays.transpose(0, 3, 1, 2).copy())


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # see below
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_every_pixel_in_order_in_any_batch(tmp_path, kind, channels):
    arrays = pictures(channels=channels)
    found = open_images(save(kind, arrays, tmp_path))
    assert found.shape == (channels, 16, 16)
    for batch in (1, 7, COUNT, 100):
        images, indices = everything(found, batch)
        assert images.dtype == torch.uint8
        assert torch.equal(images, as_tensor(arrays))
        assert indices.tolist() == list(range(COUNT))


@pytest.fixture
def every_warning():
    """torch tells some warnings once in a process; here, every time."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize(("kind", "channels"), [("npy", 3), ("npz", 3), ("npy", 1), ("nchw", 3)])
def test_arrays_are_read_without_a_warning(tmp_path, kind, channels):
    everything(open_images(save(kind, pictures(channels=channels), tmp_path)))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "batch"), [(2, 5), (4, 5), (4, 20)])
def test_processes_share_the_batches(tmp_path, kind, world, batch):
    """With batches of 20 there are two; two of four processes get none."""
    arrays = pictures()
    found = open_images(save(kind, arrays, tmp_path))
    shares = [list(found.read(batch, Processes(rank, world))) for rank in range(world)]
    numbers = -(-COUNT // batch)
    assert [len(share) for share in shares] == [len(range(rank, numbers, world)) for rank in range(world)]
    for indices, images in (piece for share in shares for piece in share):
        assert torch.equal(images, as_tensor(arrays)[indices])
    assert sorted(int(i) for share in shares for indices, _ in share for i in indices) == list(range(COUNT))


@pytest.mark.parametrize("kind", KINDS)
def test_facts_say_what_it_is_and_not_where(tmp_path, kind):
    path = save(kind, pictures(), tmp_path)
    facts = open_images(path).facts
    assert (facts["name"], facts["shape"]) == (path.name, [3, 16, 16])
    assert facts["kind"] == {"compressed": "numpy", "npz": "numpy", "npy": "numpy", "nchw": "numpy"}.get(kind, kind)
    assert str(tmp_path) not in repr(facts)


def test_an_array_is_never_read_whole(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", pictures())
    monkeypatch.setattr(np, "load", None)
    pieces = module.stream_rows(tmp_path / "x.npz", "arr_0", 5)
    assert [len(piece) for piece in pieces] == [5, 5, 5, 5, 3]


def test_an_array_that_ends_early_is_named(tmp_path):
    path = save("npy", pictures(), tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"npy\.npy' is no whole, plain numpy file .*more than the file holds"):
        everything(open_images(path))


# ---- what ships, and what is sampled


def test_known_sets():
    assert torch.equal(everything(open_images("data:digits"))[0], digits("train").images)
    held_out = open_images("data:digits:held-out")
    assert torch.equal(everything(held_out)[0], digits("held-out").images)
    assert held_out.facts["split"] == "held-out"
    assert held_out.facts["count"] == len(digits("held-out")) == 397
    with pytest.raises(ValueError, match=r"data='digts' is unknown \(did you mean 'digits'"):
        open_images("data:digts")
    with pytest.raises(ValueError, match="split='test' is unknown"):
        open_images("data:digits:test")


@pytest.fixture(scope="module")
def model():
    return load("digits")


def test_a_model_is_sampled_as_it_is_read_and_stored_alike(model, tmp_path):
    draw = Draw(11, seed=3, batch=4)
    parts = sample_parts(Sampler(model), draw, SETTINGS, tmp_path / "parts", progress=False)
    stored, indices = everything(of_parts(parts))
    fresh = of_model(Sampler(model), draw, SETTINGS, name="run")
    assert indices.tolist() == list(range(11))
    assert (everything(fresh)[0].int() - stored.int()).abs().max() <= 1  # the last part is filled up there
    assert torch.equal(everything(fresh)[0], everything(fresh)[0])
    facts = fresh.facts
    assert (facts["kind"], facts["count"], facts["draw"]["seed"], facts["sampler"]["nfe"]) == ("run", 11, 3, 2)
    assert len(facts["origin"]["sha256"]) == 64
    shares = [everything(fresh, place=Processes(rank, 2))[1].tolist() for rank in range(2)]
    assert shares == [[0, 1, 2, 3, 8, 9, 10], [4, 5, 6, 7]]


def test_the_images_of_a_recipe(model, tmp_path):
    assert torch.equal(everything(of_training(model))[0], digits("train").images)


def test_tensors_must_be_images():
    for wrong in (torch.zeros(2, 3, 4, 4), torch.zeros(3, 4, 4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"uint8 \(N, C, H, W\) is needed"):
            of_tensor(wrong)


# ---- sizes and colours


def test_mixed_sizes_are_refused_by_name_or_resized(tmp_path):
    folder = save_folder(tmp_path / "x", pictures())
    Image.fromarray(pictures(1, 20)[0]).save(folder / "011.png")
    message = r"'011\.png' is 3x20x20 \(channels x height x width\), the first picture 3x16x16; .*--size PIXELS"
    with pytest.raises(ValueError, match=message):
        everything(open_images(folder))
    found = open_images(folder, size=8)
    assert everything(found)[0].shape == (COUNT, 3, 8, 8)
    assert found.facts["resize"] == "box"
    boxes = as_tensor(pictures())[0].float().unfold(1, 2, 2).unfold(2, 2, 2).mean((3, 4))
    assert (everything(found)[0][0].float() - boxes).abs().max() <= 1  # Pillow rounds twice
    with pytest.raises(ValueError, match=r"'000\.png' is 16x16, not 8x8, and resize='none'"):
        open_images(folder, size=8, resize="none")


def test_a_colour_picture_among_grey_ones_is_refused_by_name(tmp_path):
    folder = save_folder(tmp_path / "x", pictures(channels=1))
    Image.fromarray(pictures(1)[0]).save(folder / "011.png")
    with pytest.raises(ValueError, match=r"'011\.png'.*colour.*--channels 3"):
        everything(open_images(folder))
    found = everything(open_images(folder, channels=3))[0]
    assert torch.equal(found[11], as_tensor(pictures(1))[0])
    assert torch.equal(found[0], as_tensor(pictures(channels=1))[0].expand(3, -1, -1))


def test_a_grey_picture_among_colours_has_three_equal_channels(tmp_path):
    folder = save_folder(tmp_path / "x", pictures())
    Image.fromarray(pictures(1)[0, ..., 0]).save(folder / "011.png")
    found = everything(open_images(folder))[0]
    assert torch.equal(found[11], as_tensor(pictures(1))[0, :1].expand(3, -1, -1))


def test_colours_are_made_grey_when_asked(tmp_path):
    arrays = pictures()
    found = everything(open_images(save("folder", arrays, tmp_path), channels=1))[0]
    want = np.stack([np.asarray(Image.fromarray(array).convert("L")) for array in arrays])[:, None]
    assert torch.equal(found, torch.from_numpy(want))


def test_transparency_is_dropped_from_pictures_and_refused_in_arrays(tmp_path):
    arrays = pictures(channels=4)
    assert torch.equal(everything(open_images(save("folder", arrays, tmp_path)))[0], as_tensor(arrays[..., :3]))
    for kind in ("npy", "npz"):
        path = save(kind, arrays, tmp_path)
        with pytest.raises(ValueError, match=re.escape(f"'{path}' has 4 channels; 3 (RGB) or 1 (grey) are needed")):
            open_images(path)


@pytest.mark.parametrize("name", ["000.png", "011.png"])
@pytest.mark.parametrize("content", [b"no picture", None], ids=["foreign", "cut"])
def test_a_broken_picture_is_named(tmp_path, name, content):
    path = save_folder(tmp_path / "x", pictures()) / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    with pytest.raises(ValueError, match=rf"'{name}' cannot be read \(.*\); repair or remove it"):
        everything(open_images(path.parent))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (np.zeros((4, 8, 8, 3), np.float32), "images are float32; they must be uint8"),
        (np.zeros((4, 8, 8, 5), np.uint8), "is neither NHWC, NCHW"),
    ],
)
def test_other_arrays_are_refused(tmp_path, arrays, words):
    np.save(tmp_path / "x.npy", arrays)
    with pytest.raises(ValueError, match=words):
        open_images(tmp_path / "x.npy")


def test_stored_sizes_are_kept(tmp_path):
    path = save("prepared", pictures(), tmp_path)
    assert open_images(path, size=16).shape == (3, 16, 16)
    with pytest.raises(ValueError, match=r"--size 8.*3x16x16"):
        open_images(path, size=8)
    assert open_images(save("npy", pictures(), tmp_path), size=8).shape == (3, 8, 8)
    with pytest.raises(ValueError, match="--channels 2 is not supported; allowed: 1, 3"):
        open_images(path, channels=2)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="does not exist; name a folder or a file of images"):
        open_images(tmp_path / "nothing")


def test_an_array_of_no_images_reads_as_none(tmp_path):
    np.save(tmp_path / "x.npy", pictures(0))
    assert list(open_images(tmp_path / "x.npy").read(5)) == []


def test_batches_of_a_folder_are_in_the_order_of_names(tmp_path):
    starts = [int(indices[0]) for indices, _ in open_images(save("folder", pictures(), tmp_path)).read(5)]
    assert all(b - a == 5 for a, b in pairwise(starts))
