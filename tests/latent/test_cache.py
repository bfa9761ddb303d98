"""Latents on the disk: the right image, the right mirror, whole shards, or an error that names one."""

import json
import threading

import numpy as np
import pytest
import torch

from mvm.latent.cache import open_latents, write_latents
from mvm.store import Share


class Patches:
    """A codec: sums over 4 x 4 pixels, weighted so that mirrored images have other latents."""

    latent_shape = (3, 4, 4)

    def __init__(self, name="patches", scale=1.0):
        self.fingerprint, self.scale, self.seen = name, scale, 0
        self.weight = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.1

    def encode(self, images):
        self.seen += len(images)
        return self.scale * torch.conv2d(images / 127.5 - 1, self.weight, stride=4)


OPTIONS = {"stamp": "data", "batch": 3, "shard": 4, "progress": False}  # ten images: three shards, the last of two
NAMES = [f"latents-0000{number}.npy" for number in range(3)]
INDICES = torch.tensor([9, 0, 4, 4, 3])
MIRRORED = torch.tensor([True, False, True, False, False])


@pytest.fixture
def codec():
    return Patches()


@pytest.fixture
def folder(tmp_path, codec, images):
    assert write_latents(tmp_path / "latents", codec, images, **OPTIONS) == NAMES
    return tmp_path / "latents"


def expected(codec, images):
    chosen = [images[i].flip(-1) if flip else images[i] for i, flip in zip(INDICES, MIRRORED, strict=True)]
    return codec.encode(torch.stack(chosen))


def test_gather_gives_the_codecs_latents(folder, codec, images):
    latents = open_latents(folder, codec="patches", data="data", shape=(3, 4, 4))
    assert (len(latents), latents.shape) == (10, (3, 4, 4))
    found, want = latents.gather(INDICES, MIRRORED), expected(codec, images)
    assert (found.shape, found.dtype) == ((5, 3, 4, 4), torch.float32)
    assert torch.allclose(found, want, rtol=2**-11, atol=1e-6)
    assert not torch.allclose(latents.gather(INDICES, ~MIRRORED), want, atol=0.1)
    loaded = latents.load()
    assert (len(loaded), loaded.shape, loaded.values.dtype) == (10, (3, 4, 4), torch.float16)
    assert torch.equal(loaded.gather(INDICES, MIRRORED), found)
    assert latents.gather(INDICES[:0], MIRRORED[:0]).shape == (0, 3, 4, 4)
    with pytest.raises(IndexError, match=r"10\.\.10 leave 0\.\.9"):
        latents.gather(torch.tensor([10]), torch.tensor([False]))
    latents.verify()


def test_an_autoencoders_latents(tmp_path, make_rae, encoders, images):
    rae = make_rae(encoders("dinov3", layers="last-2"), images)
    write_latents(tmp_path, rae, images, **OPTIONS)
    latents = open_latents(tmp_path, codec=rae.fingerprint, data="data", shape=rae.latent_shape)
    every = torch.arange(10)
    for flip in (False, True):
        want = rae.encode(images.flip(-1) if flip else images)
        assert torch.allclose(latents.gather(every, torch.full((10,), flip)), want, rtol=2**-10, atol=1e-3)


def test_files_are_plain_numpy(folder, codec, images):
    part = np.load(folder / NAMES[2])
    assert (part.shape, part.dtype) == ((2, 2, 3, 4, 4), np.float16)
    assert np.array_equal(part[1], codec.encode(images[8:].flip(-1)).half().numpy())
    index = json.loads((folder / "index.json").read_text())
    assert index["key"] == {"codec": "patches", "data": "data", "count": 10, "shape": [3, 4, 4], "shard": 4}
    assert list(index["sha256"]) == NAMES


def test_interrupted_writing_goes_on(tmp_path, codec, images):
    class Stops(Patches):
        def encode(self, images):
            if self.seen >= 11:  # in the middle of the second shard
                raise KeyboardInterrupt
            return super().encode(images)

    with pytest.raises(KeyboardInterrupt):
        write_latents(tmp_path, Stops(), images, **OPTIONS)
    assert (tmp_path / NAMES[0]).is_file()
    assert not (tmp_path / NAMES[1]).exists()
    with pytest.raises(ValueError, match=r"are not there, or not finished \(no index\.json\)"):
        open_latents(tmp_path)
    assert write_latents(tmp_path, codec, images, **OPTIONS) == NAMES[1:]
    assert codec.seen == 2 * 6  # the last six images, both mirrors
    assert torch.allclose(
        open_latents(tmp_path).gather(INDICES, MIRRORED), expected(codec, images), rtol=1e-3, atol=1e-6
    )
    assert not list(tmp_path.glob(".*"))
    before = codec.seen
    assert write_latents(tmp_path, codec, images, **OPTIONS) == []
    assert codec.seen == before


@pytest.mark.parametrize("remove", [False, True])
def test_a_shard_cut_short_is_named_and_made_alone(folder, codec, images, remove):
    path = folder / NAMES[1]
    whole, others = path.read_bytes(), {name: (folder / name).stat().st_mtime_ns for name in (NAMES[0], NAMES[2])}
    path.unlink() if remove else path.write_bytes(whole[: len(whole) // 2])
    state = "is missing" if remove else "is damaged"
    with pytest.raises(ValueError, match=rf"{NAMES[1]}' {state}.*the other parts are kept"):
        open_latents(folder)
    before = codec.seen
    assert write_latents(folder, codec, images, **OPTIONS) == [NAMES[1]]
    assert codec.seen - before == 2 * 4
    assert path.read_bytes() == whole
    assert {name: (folder / name).stat().st_mtime_ns for name in others} == others
    open_latents(folder).verify()


def test_a_flipped_bit_is_found(folder, codec, images):
    path = folder / NAMES[2]
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=rf"{NAMES[2]}' is damaged"):
        open_latents(folder).verify()
    assert write_latents(folder, codec, images, **OPTIONS) == [NAMES[2]]
    open_latents(folder).verify()


@pytest.mark.parametrize("remove", [False, True])
def test_rebuilding_that_is_interrupted_leaves_latents_that_are_refused(folder, images, remove):
    class Fails(Patches):
        def encode(self, images):
            raise RuntimeError("no device")

    (folder / NAMES[1]).unlink() if remove else (folder / NAMES[1]).write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="no device"):
        write_latents(folder, Fails(), images, **OPTIONS)
    with pytest.raises(ValueError, match=rf"{NAMES[1]}' is missing"):
        open_latents(folder)


def test_latents_of_something_else_are_refused(folder, codec, images):
    attempts = {
        "codec": (Patches("other"), images, {}),
        "data": (codec, images, {"stamp": "another"}),
        "count": (codec, images[:9], {}),
        "shard": (codec, images, {"shard": 5}),
    }
    for _ in ("finished", "unfinished"):
        for name, (other, shown, options) in attempts.items():
            with pytest.raises(
                ValueError, match=rf"holds latents with other values of .*{name} \(.*, now .*another folder"
            ):
                write_latents(folder, other, shown, **{**OPTIONS, **options})
        (folder / "index.json").unlink(missing_ok=True)
    write_latents(folder, codec, images, **OPTIONS)
    for wrong in ({"codec": "other"}, {"data": "another"}, {"shape": (3, 4, 5)}):
        with pytest.raises(ValueError, match=rf"with other values of {next(iter(wrong))} \(.*, now "):
            open_latents(folder, **wrong)


def test_numbers_beyond_float16_are_refused(tmp_path, images):
    with pytest.raises(ValueError, match=r"numbers are beyond float16; normalise the latents of images 0\.\.2"):
        write_latents(tmp_path, Patches(scale=1e6), images, **OPTIONS)
    assert not list(tmp_path.glob("latents*"))


def test_no_room(tmp_path, codec, images, monkeypatch):
    monkeypatch.setattr("mvm.store.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(ValueError, match=r"the latents take 0\.0 GiB, and 0\.0 GiB are free"):
        write_latents(tmp_path, codec, images, **OPTIONS)


def test_damaged_index(folder):
    (folder / "index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json' is damaged"):
        open_latents(folder)
    (folder / "index.json").write_text('{"format": 1, "key": {"codec": ""}}')
    with pytest.raises(ValueError, match=r"index\.json' is damaged"):
        open_latents(folder)
    with pytest.raises(ValueError, match="are not there"):
        open_latents(folder / "nowhere")


def test_processes_share_the_shards(make_rae, encoders, images, tmp_path):
    """Threads stand for processes: each makes every third shard, and the bytes are those of one process."""
    rae = make_rae(encoders(), images)
    alone, together = tmp_path / "alone", tmp_path / "together"
    write_latents(alone, rae, images, stamp="x", shard=2, progress=False)
    barrier, made = threading.Barrier(3), {}

    def work(rank):
        share = Share(rank, 3, barrier.wait)
        made[rank] = write_latents(together, rae, images, stamp="x", shard=2, progress=False, share=share)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {rank: [f"latents-0000{number}.npy" for number in range(rank, 5, 3)] for rank in range(3)}
    assert sorted(path.name for path in together.iterdir()) == sorted(path.name for path in alone.iterdir())
    assert all(path.read_bytes() == (alone / path.name).read_bytes() for path in together.iterdir())
