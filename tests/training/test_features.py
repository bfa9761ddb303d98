"""Banks of encoder features: the right image, the right mirror, the right data set, or an error."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from mvm.files import sha256
from mvm.network.pretrained import HALF, Encoder
from mvm.store import PartedArray
from mvm.training import features
from mvm.training.features import (
    DiskBank,
    LiveBank,
    TensorBank,
    bank_key,
    data_fingerprint,
    open_bank,
)
from mvm.untrusted import read_json

SIDE, WIDTH = 4, 6


class Patches(nn.Module):
    """A linear map of 4x4 patches: not symmetric, so that mirrored images have other features."""

    def __init__(self, seed=0, scale=1.0):
        super().__init__()
        weight = torch.randn(WIDTH, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) * scale
        self.weight = nn.Parameter(weight)
        self.images = 0

    def forward(self, pixels):
        self.images += len(pixels)
        return torch.conv2d(pixels, self.weight, stride=4).flatten(2).transpose(1, 2)


def make_encoder(**options):
    return Encoder("patches", Patches(**options), resolution=4 * SIDE, side=SIDE, width=WIDTH, scaling=HALF)


@pytest.fixture
def encoder():
    return make_encoder()


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (10, 3, 16, 16), generator=generator, dtype=torch.uint8)


@pytest.fixture
def labels():
    return torch.arange(10)


@pytest.fixture
def key(encoder, images, labels):
    return bank_key(encoder, images, labels)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(features, "PART", 4)  # ten images: three files, the last one shorter


@pytest.fixture
def build(tmp_path, encoder, images, labels):
    """build(cache, ...): the bank of these images, on the disk in tmp_path / "bank"."""

    def opened(cache="disk", encoder=encoder, images=images, labels=labels, **options):
        options = {"folder": tmp_path / "bank", "device": "cpu", "progress": False, **options}
        return open_bank(cache, encoder, images, labels, **options)

    return opened


INDICES = torch.tensor([9, 0, 4, 4, 3])
MIRRORED = torch.tensor([True, False, True, False, False])


def expected(encoder, images):
    chosen = [images[i].flip(-1) if flip else images[i] for i, flip in zip(INDICES, MIRRORED, strict=True)]
    return encoder(torch.stack(chosen))


@pytest.mark.parametrize("cache", ["device", "disk", "none"])
def test_lookup_gives_the_encoders_tokens(tmp_path, encoder, images, labels, cache):
    """Up to half a unit in the last of the 11 binary digits of float16."""
    options = {"batch": 3, "device": "cpu", "progress": False}
    bank = open_bank(cache, encoder, images, labels, folder=tmp_path / "bank", **options)
    assert isinstance(bank, {"device": TensorBank, "disk": DiskBank, "none": LiveBank}[cache])
    found, want = bank.lookup(INDICES, MIRRORED), expected(encoder, images)
    assert found.dtype == torch.float32
    assert not torch.allclose(bank.lookup(INDICES, ~MIRRORED), want, atol=0.5)
    error = ((found - want).abs() / want.abs().clamp_min(2**-14)).max()
    if cache == "none":
        assert torch.allclose(found, want, atol=1e-5)
    else:
        assert 0.1 * 2.0**-11 < error < 1.01 * 2.0**-11


def test_features_are_stored_on_the_students_grid(tmp_path, encoder, images, labels):
    for cache in ("device", "disk", "none"):
        options = {"folder": tmp_path, "side": 2, "device": "cpu", "progress": False}
        found = open_bank(cache, encoder, images, labels, **options).lookup(INDICES, MIRRORED)
        quarters = expected(encoder, images).reshape(5, 2, 2, 2, 2, WIDTH).mean((2, 4)).reshape(5, 4, WIDTH)
        assert torch.allclose(found, quarters, rtol=1e-3, atol=1e-3)


def test_kept_in_memory_and_on_disk(tmp_path, build, key):
    bank = build("device", batch=4)
    assert bank.features.dtype == torch.float16
    assert bank.features.nbytes == key.parts(tmp_path).bytes == 2 * 10 * 16 * 6 * 2
    stored = build()
    assert sorted(path.name for path in (tmp_path / "bank").iterdir()) == [
        "index.json",
        *(f"part-0000{n}.npy" for n in range(3)),
    ]
    assert torch.equal(stored.lookup(INDICES, MIRRORED), bank.lookup(INDICES, MIRRORED))


def test_images_may_come_from_anything_that_reads_by_index(build, encoder, images, labels, key):
    class Files:
        def __len__(self):
            return len(images)

        def __getitem__(self, indices):
            return torch.stack([images[int(i)] for i in indices])

    assert bank_key(encoder, Files(), labels) == key
    bank = build("device")
    for cache in ("device", "disk"):
        assert torch.equal(build(cache, images=Files()).lookup(INDICES, MIRRORED), bank.lookup(INDICES, MIRRORED))


def test_interrupted_writing_goes_on(tmp_path, build, encoder, images, key, monkeypatch):
    whole = PartedArray._write_part
    calls = []

    def stops_at_the_third(store, name, *rest):
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        whole(store, name, *rest)

    monkeypatch.setattr(PartedArray, "_write_part", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        build()
    with pytest.raises(ValueError, match=r"the features in .* are not finished \(part-00000\.npy is not in index"):
        DiskBank(key, tmp_path / "bank", "cpu")
    before = encoder.body.images
    bank = build()
    assert encoder.body.images - before == 2 * 2  # the last two images, both mirrors
    assert calls == ["part-00000.npy", "part-00001.npy", "part-00002.npy", "part-00002.npy"]
    assert torch.allclose(bank.lookup(INDICES, MIRRORED), expected(encoder, images), rtol=1e-3)
    build()
    assert len(calls) == 4


def test_features_that_an_earlier_version_left_unfinished_are_finished(tmp_path, build, encoder, images):
    """mvm 0.1 wrote no notes beside unfinished parts: the index grew with each of them."""
    want = build().lookup(INDICES, MIRRORED)
    folder = tmp_path / "bank"
    index = json.loads((folder / "index.json").read_text())
    before = encoder.body.images
    assert torch.equal(build().lookup(INDICES, MIRRORED), want)  # finished: nothing is made
    assert encoder.body.images == before
    (folder / "part-00002.npy").unlink()
    del index["sha256"]["part-00002.npy"]
    (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n")
    assert torch.equal(build().lookup(INDICES, MIRRORED), want)
    assert encoder.body.images - before == 2 * 2
    assert json.loads((folder / "index.json").read_text())["sha256"].keys() == {f"part-0000{n}.npy" for n in range(3)}


def test_features_of_something_else_are_refused(tmp_path, build, images, labels, key):
    build()
    changed = images.clone()
    changed[0, 0, 0, 0] ^= 1
    others = {
        "data": {"images": changed},
        "weights": {"encoder": make_encoder(seed=1)},
        "side": {"side": 2},
        "count": {"images": images[:9], "labels": labels[:9]},
    }
    for name, other in others.items():
        with pytest.raises(ValueError, match=rf"holds features with other values of .*{name} .*remove this one"):
            build(**other)
    for name, other in {**dict.fromkeys(("resolution", "width"), 5), "encoder": "other", "dtype": "bfloat16"}.items():
        with pytest.raises(ValueError, match=rf"holds features with other values of {name} "):
            DiskBank(dataclasses.replace(key, **{name: other}), tmp_path / "bank", "cpu")


def test_fingerprint_sees_labels_order_and_shape(images, labels):
    found = {
        data_fingerprint(images, labels),
        data_fingerprint(images, labels.flip(0)),
        data_fingerprint(images.flip(0), labels),
        data_fingerprint(images[:9], labels[:9]),
        data_fingerprint(images.reshape(10, 1, 24, 32), labels),
        data_fingerprint(images.flip(-1), labels),
    }
    assert len(found) == 6
    assert data_fingerprint(images.clone(), labels.clone()) in found
    with pytest.raises(ValueError, match="10 images and 9 labels"):
        data_fingerprint(images, labels[:9])


def test_a_damaged_part_is_made_again(tmp_path, build):
    build()
    path = tmp_path / "bank" / "part-00001.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    build()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" " * 400 + "{}", "larger than 400 bytes"),
        ("[" * 200, "too deeply nested|Expecting"),
        ("[]", "a table is needed"),
        ('{"key": [], "sha256": 3}', "not iterable"),
        (b"\xff", "no UTF-8"),
    ],
)
def test_an_index_made_to_harm_is_refused(tmp_path, build, monkeypatch, text, words):
    monkeypatch.setattr("mvm.store.read_json", lambda path: read_json(path, 400))
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank" / "index.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"index\.json' is damaged \(.*({words}).*; remove it"):
        build()


@pytest.mark.parametrize("damage", ["shape", "dtype", "object", "text", "header"])
def test_a_part_of_another_kind_under_its_checksum_is_refused(tmp_path, build, damage):
    build()
    path = tmp_path / "bank" / "part-00001.npy"
    rows = np.load(path)
    spoiled = {"shape": rows[:, :1], "dtype": rows.astype(np.int32), "object": np.array([{}])}
    if damage == "text":
        path.write_text("hello")
    elif damage == "header":  # found by the fuzzer: numpy raises a TokenError
        path.write_bytes(path.read_bytes().replace(b"), }", b"(, (", 1))
    else:
        np.save(path, spoiled[damage], allow_pickle=True)
    index = json.loads((tmp_path / "bank" / "index.json").read_text())
    index["sha256"][path.name] = sha256(path)
    (tmp_path / "bank" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"part-00001\.npy' is damaged .*; remove it"):
        build()


def test_files_are_plain_numpy(tmp_path, build, key):
    """(2, n, tokens, width): the bits of float16 as int16."""
    bank = build("device")
    build()
    part = np.load(tmp_path / "bank" / "part-00002.npy").view(np.float16)
    assert part.shape == (2, 2, 16, 6)
    assert np.array_equal(part, bank.features[:, 8:].numpy())
    assert json.loads((tmp_path / "bank" / "index.json").read_text())["key"] == dataclasses.asdict(key)


def test_numbers_beyond_float16_are_refused(build, images, labels):
    encoder = make_encoder(scale=1e6)
    with pytest.raises(ValueError, match=r"numbers are beyond float16; set repa\.cache='none'"):
        build("device", encoder=encoder)


@pytest.fixture
def huge(build, key, monkeypatch):
    """Opens a bank whose key says that it has a trillion images."""
    large = dataclasses.replace(key, count=10**12, side=16, width=768)
    monkeypatch.setattr(features, "bank_key", lambda *_: large)
    return build


def test_too_large_for_the_device(huge, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 2**30, 80 * 2**30))
    with pytest.raises(
        ValueError, match=r"features take .* GiB, and 8\.0 GiB are free.*repa\.cache='disk' or 'none'.*'device'"
    ):
        huge("device", device="cuda")


def test_too_large_for_the_disk(tmp_path, huge):
    with pytest.raises(ValueError, match=r"features take .* GiB.*repa\.cache='none' in place of 'disk'"):
        huge(folder=tmp_path / "new" / "bank")
    assert not (tmp_path / "new").exists()


def test_unknown_cache(build):
    with pytest.raises(ValueError, match=r"repa\.cache='gpu' is unknown"):
        build("gpu")
