"""JSON, TOML, safetensors and .pth made to harm: refused with a word and the file's name, and nothing is executed."""

import json
import pickle
import shutil
import struct

import fuzz_seeds
import numpy as np
import pytest
import torch
from fuzz_isolation import in_little_memory

from mvm import checkpoint, samples
from mvm.data.shards import open_prepared
from mvm.latent.cache import open_latents
from mvm.latent.encoder import load_statistics
from mvm.latent.rae import load_decoder_only
from mvm.metrics import weights
from mvm.metrics.moments import load_moments
from mvm.recipes import load_recipe
from mvm.untrusted import MOST_DIMENSIONS, MOST_RECIPE, MOST_TEXT, plain_name, read_json

STEP = "checkpoints/step-00000002"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    for name in ("run", "prepared", "latents", "autoencoder", "parts"):
        (folder / name).mkdir()
        getattr(fuzz_seeds, name)(folder / name)
    return folder


@pytest.fixture
def seeds(made, tmp_path):
    shutil.copytree(made, tmp_path / "seeds")
    return tmp_path / "seeds"


READERS = {
    "run/recipe.json": lambda folder: load_recipe(str(folder / "run/recipe.json")),
    f"run/{STEP}/manifest.json": lambda folder: checkpoint.read_manifest(folder / "run" / STEP),
    "prepared/index.json": lambda folder: open_prepared(folder / "prepared"),
    "latents/index.json": lambda folder: open_latents(folder / "latents"),
    "autoencoder/rae.json": lambda folder: load_decoder_only(folder / "autoencoder"),
    "parts/samples.json": lambda folder: samples.Parts(folder / "parts", 2, (1, 2, 2), 4, 4).provenance(),
    "parts/part-000000.json": lambda folder: list(samples.Parts(folder / "parts", 2, (1, 2, 2), 4, 4).batches()),
}
TEXTS = {
    "list": b"[]",
    "number": b"1",
    "nan": b"NaN",
    "huge integer": b'{"format": 1' + b"0" * 5000 + b"}",
    "deep lists": b"[" * 100_000,
    "deep tables": b'{"a":' * 100_000,
    "not UTF-8": b'{"a": "\xff"}',
    "nothing": b"",
    "nothing in it": b"{}",
}


EMPTY_IS_FINE = ("run/recipe.json", "parts/samples.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=f"{name}-{kind}")
        for name in READERS
        for kind, text in TEXTS.items()
        if not (name in EMPTY_IS_FINE and text == b"{}")
    ],
)
def test_tables_that_are_none(seeds, name, text):
    READERS[name](seeds)
    (seeds / name).write_bytes(text)
    with pytest.raises(ValueError, match=name.split("/")[-1].replace(".", r"\.")):
        READERS[name](seeds)


def test_tables_that_may_be_empty(seeds):
    for name in EMPTY_IS_FINE:
        (seeds / name).write_bytes(b"{}")
    assert READERS["run/recipe.json"](seeds).name == "unnamed"  # every option has a default
    told = READERS["parts/samples.json"](seeds)
    assert told == {"images": 2, "nfe": 4, "passes": 4}  # what the parts themselves say


def test_a_text_without_end(tmp_path):
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(MOST_TEXT + 1)
    with pytest.raises(ValueError, match=r"x\.json' is larger than"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 10_000, "too deeply nested"),
        ("x." * MOST_RECIPE + "y = 1", "which no recipe is"),
        (f"[train]\nlr = {'9' * 400}", "beyond all numbers of type float"),
        ("[train]\nlr = nan", "train.lr=nan"),
        ("[train]\nsteps = 'many'", "must be of type int"),
        ("base = ['digits']", "base"),
        (f"name = 5\ndescription = '{'a' * 9000}'", "must be of type str"),
    ],
)
def test_recipes_that_are_none(tmp_path, text, words):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ValueError, match=r"x\.toml: ") as caught:
        load_recipe(str(tmp_path / "x.toml"))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".", "..", "a/b", "a\0b", "\x1b[2J", "a" * 256, 5, None])
def test_names_that_lead_elsewhere(name):
    with pytest.raises(ValueError, match="is no name of a file in this folder"):
        plain_name(name)


@pytest.mark.parametrize("name", ["../labels-00000.npy", "/etc/passwd"])
def test_an_index_that_points_out_of_its_folder(seeds, name):
    path = seeds / "prepared/index.json"
    told = json.loads(path.read_text())
    shard = told["shards"][0]
    shard["sha256"][name] = shard["sha256"].pop(shard["labels"])
    shard["labels"] = name
    path.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"index\.json' is damaged .*is no name of a file in this folder"):
        open_prepared(seeds / "prepared")


def test_an_index_that_claims_a_large_shape_takes_no_memory(seeds):
    path = seeds / "prepared/index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shape": [3, 1 << 20, 1 << 20]}))
    said = in_little_memory(lambda: open_prepared(seeds / "prepared").load())
    assert said.startswith("ValueError: ")
    assert "not uint8 (" in said


def test_labels_outside_the_classes(seeds):
    path = seeds / "prepared/labels-00000.npy"
    np.save(path, np.array([0, 1, 2, 1]))
    with pytest.raises(ValueError, match=r"labels-00000\.npy' holds labels outside 0\.\.1"):
        open_prepared(seeds / "prepared").mapped()


def test_latents_that_claim_a_trillion_images(seeds):
    path = seeds / "latents/index.json"
    told = json.loads(path.read_text())
    told["key"] |= {"count": 10**12, "shard": 1}
    path.write_text(json.dumps(told))
    said = in_little_memory(lambda: open_latents(seeds / "latents"))
    assert "3 checksums for 1000000000000 images" in said


@pytest.mark.parametrize("change", [{"latent_shape": [3, 10**6, 10**6]}, {"decoder": {"size": "XL", "patch": 10**6}}])
def test_decoders_that_claim_memory(seeds, change):
    path = seeds / "autoencoder/rae.json"
    told = json.loads(path.read_text())
    change = {**change, **({"decoder": {**told["decoder"], **change["decoder"]}} if "decoder" in change else {})}
    path.write_text(json.dumps({**told, **change}))
    said = in_little_memory(lambda: load_decoder_only(seeds / "autoencoder"))
    assert said.startswith("ValueError: ")
    assert "holds no decoder that suits its rae.json" in said


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 1 << 31, 0])
def test_safetensors_whose_header_claims_its_length(seeds, length):
    data = struct.pack("<Q", length) + b"{}"
    (seeds / "autoencoder/statistics.safetensors").write_bytes(data)
    said = in_little_memory(lambda: load_statistics(seeds / "autoencoder/statistics.safetensors"))
    assert said.startswith("ValueError: ")
    (seeds / "x.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.safetensors' is no whole file of weights alone"):
        weights.read_tensors([seeds / "x.safetensors"], ValueError, lambda _: True)


def test_a_manifest_that_vouches_for_rubbish(seeds):
    folder = seeds / "run" / STEP
    (folder / "ema.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    told = json.loads((folder / "manifest.json").read_text())
    told["sha256"]["ema.safetensors"] = checkpoint.sha256(folder / "ema.safetensors")
    (folder / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"ema\.safetensors is no whole safetensors file"):
        checkpoint.load(folder, "ema")


@pytest.mark.parametrize("quality", ["good", [1], float("nan"), None, True])
def test_a_quality_that_is_no_number_is_none(seeds, quality):
    path = seeds / "run" / STEP / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quality": quality}))
    assert checkpoint.best(seeds / "run") is None


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("save", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing))])
def test_weights_that_would_execute_are_refused_unrun(tmp_path, suffix, save):
    save({"a": torch.ones(1), "b": Evil(tmp_path / "pwned")}, tmp_path / f"x{suffix}")
    with pytest.raises(ValueError, match="is no whole file of weights alone"):
        weights.read_tensors([tmp_path / f"x{suffix}"], ValueError, lambda _: True)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("load", [load_moments, lambda path: open_prepared(path.parent)])
def test_no_pickle_is_loaded_where_none_is_expected(tmp_path, load):
    for name in ("x.npz", "index.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil(tmp_path / "pwned")))
    np.save(tmp_path / "y.npy", np.array([Evil(tmp_path / "pwned")], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"x\.npz|index\.json"):
        load(tmp_path / "x.npz")
    assert not (tmp_path / "pwned").exists()


def test_weights_of_terabytes_in_a_few_bytes(tmp_path):
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "x.pth")
    assert (tmp_path / "x.pth").stat().st_size < 5000
    read = lambda: weights.read_tensors([tmp_path / "x.pth"], ValueError, lambda _: True)  # noqa: E731
    assert "holds something other than named tensors" in in_little_memory(read)


def test_weights_with_names_that_are_none(tmp_path):
    torch.save({5: torch.ones(1)}, tmp_path / "x.pth")
    with pytest.raises(ValueError, match="other than named tensors"):
        weights.read_tensors([tmp_path / "x.pth"], ValueError, lambda name: not name.endswith("x"))


@pytest.mark.parametrize("names", [[5], ["../x.safetensors"], [["x"]], "x", {"a": "/etc/passwd"}])
def test_an_index_of_shards_that_points_elsewhere(tmp_path, names):
    found = names if isinstance(names, dict | str) else dict(enumerate(names))
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
    with pytest.raises(ValueError, match=r"index\.json' is no index of shards"):
        weights.load_inception(tmp_path)


def test_moments_of_too_many_dimensions(tmp_path):
    side = MOST_DIMENSIONS + 1
    np.savez_compressed(tmp_path / "x.npz", mu=np.zeros(side), sigma=np.zeros((side, 1)))
    with pytest.raises(
        ValueError, match=rf"x\.npz' is no whole \.npz \(mu is .*at most {MOST_DIMENSIONS:,} dimensions"
    ):
        load_moments(tmp_path / "x.npz")


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "nonsense"])
def test_a_provenance_that_is_none(tmp_path, text):
    np.savez(tmp_path / "x.npz", mu=np.zeros(2), sigma=np.eye(2), provenance=np.str_(text))
    with pytest.raises(ValueError, match=r"x\.npz' holds a provenance that is no JSON table"):
        load_moments(tmp_path / "x.npz")
