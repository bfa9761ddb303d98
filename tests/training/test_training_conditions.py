"""A recipe's condition and shapes come from its folder; memory and disk give the same; what contradicts is refused."""

import json

import numpy as np
import pytest
import torch

from mvm.data import OnHost
from mvm.data.prepare import prepare
from mvm.data.text import TextEncoder
from mvm.recipes import load_recipe, override
from mvm.training.data import completed, training_data, training_store
from mvm.training.loop import train
from text_encoders import WIDTH, tiny_encoder

COUNT = 10
CPU = torch.device("cpu")
DRAW = np.random.default_rng(0)
SIGNALS = DRAW.normal(size=(COUNT, 2, 16)).astype(np.float32)
TEXTS = [("a red circle", "two square", "zero")[number % 3] for number in range(COUNT)]
ARRAYS = {
    "images": SIGNALS,
    "labels": np.arange(COUNT) % 3,
    "vector": DRAW.normal(size=(COUNT, 5)).astype(np.float32),
    "tokens": DRAW.normal(size=(COUNT, 3, 4)).astype(np.float16),
    "levels": DRAW.integers(0, 256, (COUNT, 1, 16), dtype=np.uint8),
    "text": np.array(TEXTS),
}
WANT = {
    "vector:vector": ("vector", 5, 0),
    "tokens:tokens": ("tokens", 4, 3),
    "image:levels": ("image", 1, 0),
    "": ("labels", 0, 0),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The signals, prepared with each condition."""
    root = tmp_path_factory.mktemp("data")
    np.savez(root / "set.npz", **ARRAYS)
    conditions = [*WANT, "caption:text"]
    out = {text: root / (text.partition(":")[0] or "labels") for text in conditions}
    for text, folder in out.items():
        prepare(root / "set.npz", folder, condition=text, workers=1, progress=False, part_size=4)
    return out


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return tiny_encoder(tmp_path_factory.mktemp("encoder"), "t5")


def recipe(folder, **options):
    base = {"data.name": "folder", "data.path": str(folder), "network.patch": "4", "data.mirror": "no"}
    return override(load_recipe("digits"), {**base, **{name.replace("_", ".", 1): v for name, v in options.items()}})


def leaves(condition):
    return condition if isinstance(condition, dict) else {"": condition}


def same(one, other):
    one, other = leaves(one), leaves(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("text", WANT)
def test_a_folder_tells_its_condition_and_shape(folders, text):
    found = completed(recipe(folders[text]))
    assert (found.data.shape, found.data.size, found.data.space, found.data.values) == ((2, 16), 0, (16,), "float")
    assert (found.condition.kind, found.condition.width, found.condition.length) == WANT[text]
    assert completed(found) == found
    partly = override(found, {"condition.width": "0", "condition.length": "0"})  # and the data as a run keeps them
    assert completed(partly) == found


@pytest.mark.parametrize("text", WANT)
def test_memory_and_disk_give_the_same(folders, text):
    rows, key = torch.tensor([9, 0, 3, 9]), text.partition(":")[2] or "labels"
    stores = [
        training_store(completed(recipe(folders[text], engine_resident=where)), CPU) for where in ("device", "host")
    ]
    (samples, condition), (others, other) = (store.gather(rows) for store in stores)
    assert torch.equal(samples, torch.from_numpy(SIGNALS)[rows])
    assert torch.equal(samples, others)
    assert same(condition, other)
    want = torch.from_numpy(ARRAYS[key])[rows]
    if key == "levels":
        want = want / 127.5 - 1
    got = condition["tokens"] if key == "tokens" else condition
    assert got.dtype == (torch.int64 if key == "labels" else torch.float32)
    assert torch.equal(got, want.to(got.dtype))
    for store in stores:
        assert store.labels.tolist() == ARRAYS["labels"].tolist()
        assert store.stamp
    assert len({store.stamp for store in stores}) == 1


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("text", ["vector:vector", "caption:text", ""])
def test_nothing_is_given_where_that_is_asked_for(folders, text, where):
    chosen = completed(recipe(folders[text], condition_kind="none", engine_resident=where))
    assert chosen.condition.kind == "none"
    samples, condition = training_store(chosen, CPU).gather(torch.tensor([1]))
    assert torch.equal(samples, torch.from_numpy(SIGNALS)[1:2])
    assert condition is None
    assert training_data(override(load_recipe("digits"), {"condition.kind": "none"})).given is None


def captioned(folders, encoder, **options):
    return recipe(folders["caption:text"], condition_kind="tokens", condition_encoder=str(encoder), **options)


@pytest.mark.parametrize(("length", "tokens"), [("0", 4), ("3", 3), ("6", 6)])
def test_captions_are_embedded(folders, encoder, length, tokens):
    """The longest of them has three words and the end; float16 keeps eleven bits."""
    made = TextEncoder(encoder).embed(TEXTS, tokens)
    rows, found = torch.tensor([9, 0, 3, 9]), []
    for where in ("device", "host"):
        chosen = completed(captioned(folders, encoder, condition_length=length, engine_resident=where))
        assert (chosen.condition.width, chosen.condition.length) == (WIDTH, tokens)
        assert completed(chosen) == chosen
        store = training_store(chosen, CPU)
        assert isinstance(store, OnHost) == (where == "host")
        found.append(store.gather(rows))
        assert torch.equal(store[rows], torch.from_numpy(SIGNALS)[rows])
        assert (len(store), store.labels.tolist()) == (COUNT, ARRAYS["labels"].tolist())
    (samples, condition), (_, other) = found
    assert torch.equal(samples, torch.from_numpy(SIGNALS)[rows])
    assert same(condition, other)
    assert torch.equal(condition["mask"], made["mask"][rows])
    assert torch.equal(condition["tokens"], made["tokens"][rows].half().float())


TINY = {
    "network.depth": "1", "network.heads": "2", "network.width": "16", "network.inner_block": "0",
    "train.batch": "4", "train.steps": "3", "train.save_every": "3", "train.log_every": "1", "sample.nfe": "2",
}  # fmt: skip


@pytest.mark.parametrize("text", [*WANT, "caption:text"])
def test_a_prepared_folder_trains_and_is_sampled(folders, encoder, text, tmp_path):
    """From the folder alone: memory and disk train the same weights, whatever the condition."""
    losses = []
    for where in ("device", "host"):
        if text == "caption:text":
            chosen = captioned(folders, encoder, engine_resident=where)
        else:
            chosen = recipe(folders[text], engine_resident=where)
        model = train(override(chosen, TINY), tmp_path / where, progress=False)
        lines = [json.loads(line) for line in (tmp_path / where / "metrics.jsonl").open()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    given = {"captions": ["a red circle"]} if text == "caption:text" else {}
    made = model.generate(2, progress=False, **given)
    assert made.images.shape == (2, 2, 16)
    assert made.images.dtype == torch.float32


def test_what_contradicts_the_folder_is_named(folders, encoder):
    vector, tokens, kind = folders["vector:vector"], folders["tokens:tokens"], "condition_kind"
    cases = (
        (vector, {kind: "tokens"}, r"condition\.kind=tokens, and data\.path=.* holds vector of width 5; leave it out"),
        (vector, {kind: "vector", "condition_width": "4"}, r"condition\.width=4, and .*; leave it out, or set it to 5"),
        (tokens, {kind: "tokens", "condition_length": "4"}, r"condition\.length=4, and .* 3 tokens of width 4"),
        (tokens, {kind: "tokens", "condition_encoder": str(encoder)}, "holds 3 tokens of width 4, no captions"),
        (folders[""], {kind: "vector"}, "holds no condition but labels; .* --condition vector:KEY"),
        (
            folders["caption:text"],
            {},
            r"holds captions, and condition\.encoder is empty; .*--condition\.encoder FOLDER",
        ),
    )
    for folder, options, words in cases:
        with pytest.raises(ValueError, match=words):
            completed(recipe(folder, **options))
    whole = completed(recipe(folders["vector:vector"]))
    for options, words in (
        (
            {"condition.kind": "labels", "condition.width": "0"},
            r"condition\.kind=labels, and .* holds vector of width 5",
        ),
        ({"data.values": "uint8"}, r"data\.values=uint8, and .* holds float samples"),
        ({"data.space": "8"}, r"holds images \(2, 16\) .* needs \(2, 8\)"),
    ):
        for call in (training_data, lambda r: training_store(r, CPU)):
            with pytest.raises(ValueError, match=words):
                call(override(whole, options))
    with pytest.raises(ValueError, match=r"condition\.kind='vector': data\.name='digits' has labels alone"):
        training_data(override(load_recipe("digits"), {"condition.kind": "vector"}))


def test_images_that_are_not_square_have_a_space(tmp_path):
    np.savez(tmp_path / "set.npz", images=DRAW.integers(0, 256, (COUNT, 8, 16, 3), dtype=np.uint8))
    prepare(tmp_path / "set.npz", tmp_path / "out", size=(4, 8), workers=1, progress=False)
    found = completed(recipe(tmp_path / "out")).data
    assert (found.shape, found.size, found.space, found.values) == ((3, 4, 8), 0, (4, 8), "uint8")
    assert training_store(completed(recipe(tmp_path / "out")), CPU)[torch.arange(2)].shape == (2, 3, 4, 8)
