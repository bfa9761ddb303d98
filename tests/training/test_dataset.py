"""Data of the user's own: every form of a dataset is the same samples, streams keep their place, bad data are named."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mvm
from mvm import checkpoint
from mvm.data import Images, digits
from mvm.evaluation.images import of_model
from mvm.generate import Draw, Sampler
from mvm.training.dataset import StreamOrder, open_samples

X = torch.arange(24, dtype=torch.float32).reshape(8, 3) / 24
TEXT = torch.linspace(-1, 1, 8 * 4).reshape(8, 2, 2)
LABELS = torch.arange(8)
CPU = torch.device("cpu")


class ByIndex(torch.utils.data.Dataset):
    """A map-style dataset of any items."""

    def __init__(self, item, count=8):
        self.item, self.count = item, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.item(index)


class Stateful(IterableDataset):
    """A stream that knows its place."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 8:
            self.place += 1
            yield X[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def gathered(dataset, indices, **how):
    samples = open_samples(dataset, **how)
    return samples.store(CPU, "auto").gather(torch.tensor(indices))


# ---------------------------------------------------------------- forms

PAIRS = {
    "tuple of tensors": (X, LABELS),
    "mapping of tensors": {"x0": X, "condition": LABELS},
    "arrays": (X.double().numpy(), LABELS.numpy()),
    "TensorDataset": TensorDataset(X, LABELS),
    "pairs": ByIndex(lambda i: (X[i], int(i))),
    "mappings": ByIndex(lambda i: {"x0": X[i].numpy(), "condition": np.int64(i)}),
    "list": [(x, label) for x, label in zip(X, LABELS, strict=True)],
    "Images": Images(X, LABELS, tuple("01234567")),
}
STREAMS = {
    "loader": DataLoader(TensorDataset(X, LABELS), batch_size=3),
    "generator function": lambda: zip(X, LABELS, strict=True),
    "loader without batches": DataLoader(TensorDataset(X, LABELS), batch_size=None),
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_gives_the_same_samples(form):
    x0, condition = gathered(PAIRS[form], [5, 0, 5])
    assert torch.equal(x0, X[[5, 0, 5]])
    assert x0.dtype == torch.float32
    assert condition.tolist() == [5, 0, 5]


@pytest.mark.parametrize("form", STREAMS)
def test_a_stream_is_read_in_its_own_order_round_and_round(form):
    """Whatever the size of its batches: rows 0 to 19 of eight samples, in steps of five, in two shares of each step."""
    shares = []
    for part in (slice(0, 2), slice(2, 5)):  # of two processes, each of which reads the whole stream
        store = open_samples(STREAMS[form]).store(CPU, "auto")
        positions = [StreamOrder(0, 0).positions(step, 5)[part] for step in range(4)]
        shares.append([store.gather(each) for each in positions])
    labels = [torch.cat(pair).tolist() for pair in zip(*([c for _, c in share] for share in shares), strict=True)]
    assert list(itertools.chain(*labels)) == [i % 8 for i in range(20)]
    assert torch.equal(shares[1][1][0], X[[7, 0, 1]])


def test_conditions_are_any_structure():
    item = {"x0": X[0], "text": TEXT[0], "more": (1, 0.5)}
    _, condition = gathered(ByIndex(lambda i: {**item, "text": TEXT[i]}), [2, 3])
    assert torch.equal(condition["text"], TEXT[2:4])
    assert [part.tolist() for part in condition["more"]] == [[1, 1], [0.5, 0.5]]
    _, condition = gathered({"x0": X, "condition": {"text": TEXT, "label": LABELS}}, [2, 3])
    assert torch.equal(condition["text"], TEXT[2:4])
    assert gathered(X, [1])[1] is None


@pytest.mark.parametrize("resident", ["device", "host"])
def test_tensors_are_the_same_samples_wherever_they_lie(resident):
    store = open_samples((X, {"a": TEXT})).store(CPU, resident)
    store.expect(lambda: torch.tensor([3, 1]))
    x0, condition = store.gather(torch.tensor([3, 1]))
    assert torch.equal(x0, X[[3, 1]])
    assert torch.equal(condition["a"], TEXT[[3, 1]])


def test_a_loader_s_batch_is_the_default():
    loader = DataLoader(TensorDataset(X), batch_size=5)
    assert mvm.train(nn_of_3(), loader, steps=1, progress=False).recipe.train.batch == 5
    assert mvm.train(nn_of_3(), loader, steps=1, batch=3, progress=False).recipe.train.batch == 3


def test_mappings_reach_a_network_by_name():
    seen = {}

    class Named(nn.Linear):
        def forward(self, x, t, text=None, label=None):
            seen.update(text=text.shape, label=label.tolist())
            return super().forward(x)

    dataset = {"x0": X, "text": TEXT, "label": LABELS}
    mvm.train(Named(3, 3), dataset, steps=1, batch=8, progress=False)
    assert seen["text"] == (8, 2, 2)
    assert sorted(seen["label"]) == list(range(8))


def test_samples_are_read_one_step_ahead():
    read = []
    dataset = ByIndex(lambda i: (read.append(i), X[i])[1])
    mvm.train(nn_of_3(), dataset, steps=2, batch=4, progress=False)
    # the first sample (its shape), two steps, and of the one after them what was read when the training ended
    assert 1 + 1 + 4 * 2 <= len(read) <= 1 + 1 + 4 * 3


class Linear(nn.Linear):
    def forward(self, x, t):
        return super().forward(x)


def nn_of_3(kind=Linear, size=3):
    torch.manual_seed(0)
    return kind(size, size)


def test_what_a_model_is_asked_for_follows_the_data():
    """uint8 images come back as such, floats as floats; labels are classes where their number is known."""

    class Image(nn.Conv2d):
        def forward(self, x, t, condition=None):
            return super().forward(x)

    images = (torch.rand(8, 1, 4, 4) * 255).to(torch.uint8)
    how = {"steps": 1, "batch": 4, "progress": False}
    plain = mvm.train(Image(1, 1, 1), images, **how)
    assert plain.generate(2, progress=False).images.dtype == torch.uint8
    floats = mvm.train(Image(1, 1, 1), images / 127.5 - 1, **how)
    assert floats.generate(2, progress=False).images.dtype == torch.float32
    as_images = mvm.train(Image(1, 1, 1), images / 127.5 - 1, data_values="uint8", **how)
    assert as_images.generate(2, progress=False).images.dtype == torch.uint8
    assert as_images.generate(2, progress=False).pil()[0].size == (4, 4)
    classes = mvm.train(mvm.wrap(Image(1, 1, 1), null=10), digits(), **how)
    assert classes.generate(2, classes=["3"], cfg=2.0, progress=False).labels.tolist() == [3, 3]
    assert classes.generate(1, progress=False).images.shape == (1, 1, 8, 8)
    given = mvm.train(mvm.wrap(Image(1, 1, 1), null=torch.zeros(1, 2, 2)), (images, TEXT), **how)
    assert given.recipe.objective.label_drop == 0.1
    assert len(given.generate(2, condition=TEXT[:2], progress=False)) == 2
    assert float(as_images.recipe.objective.label_drop) == 1


def test_uint8_and_floats_in_the_unit_interval_are_the_same_images():
    images = (torch.rand(8, 1, 4, 4) * 255).to(torch.uint8)

    class Image(nn.Conv2d):
        def forward(self, x, t):
            return super().forward(x)

    models = []
    for dataset, values in ((images, "uint8"), (images / 127.5 - 1, "uint8")):
        torch.manual_seed(0)
        models.append(mvm.train(Image(1, 1, 3, padding=1), dataset, steps=3, batch=4, data_values=values, lr=1e-2,
                                progress=False))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_images_of_an_own_model_are_evaluated():
    class Image(nn.Conv2d):
        def forward(self, x, t):
            return super().forward(x)

    model = mvm.train(Image(1, 1, 1), (torch.rand(8, 1, 4, 4) * 255).to(torch.uint8), steps=1, batch=4, progress=False)
    draw = Draw(5, seed=3, batch=2)
    found = of_model(Sampler(model), draw, model.recipe.sample.asked(nfe=2))
    images = torch.cat([images for _, images in found.chunks(2, lambda number: True)])
    assert torch.equal(images, model.generate(5, seed=3, nfe=2, progress=False).images)


def test_a_network_of_float64_is_trained_in_float64():
    model = mvm.train(nn_of_3().double(), X, steps=2, batch=4, progress=False)
    assert {value.dtype for value in model.parameters()} == {torch.float64}
    assert mvm.sample(model, torch.randn(2, 3, dtype=torch.float64), nfe=2).dtype == torch.float64


def test_previews_of_images_and_of_points(tmp_path):
    class Image(nn.Conv2d):
        def forward(self, x, t, condition=None):
            self.modes.add(self.training)
            return super().forward(x)

    how = {"steps": 2, "batch": 4, "preview_every": 2, "preview_count": 4, "preview_grid": 4, "sample_nfe": 2}
    images, lines = (torch.rand(8, 1, 4, 4) * 255).to(torch.uint8), []
    network = Image(1, 1, 1)
    network.modes = set()
    mvm.train(network, (images, TEXT), tmp_path / "images", on_log=lines.append, **how, progress=False)
    assert lines[-1]["fd_pixels"] > 0
    assert [path.name for path in (tmp_path / "images" / "samples").iterdir()] == ["step-00000002.png"]
    assert network.modes == {True, False}  # trained in one mode, sampled in the other
    assert network.training
    manifest = checkpoint.read_manifest(checkpoint.latest(tmp_path / "images"))
    assert manifest["quality"] == lines[-1]["fd_pixels"]
    mvm.train(nn_of_3(), X, tmp_path / "points", on_log=lines.append, **how, progress=False)
    assert lines[-1]["fd_values"] > 0
    assert [path.name for path in (tmp_path / "points" / "samples").iterdir()] == ["step-00000002.npy"]
    mvm.train(nn_of_3(), lambda: iter(X), tmp_path / "stream", on_log=lines.append, **how, progress=False)
    assert lines[-1] == {"step": 2}


# ---------------------------------------------------------------- streams that are resumed


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_stream_that_knows_its_place_is_resumed_bit_for_bit(tmp_path, capsys):
    how = {"batch": 3, "log_every": 1, "steps": 6, "progress": False}
    mvm.train(nn_of_3(), Stateful(), tmp_path / "whole", **how)
    mvm.train(nn_of_3(), Stateful(), tmp_path / "parts", until=3, **how)
    place = checkpoint.read_manifest(checkpoint.latest(tmp_path / "parts"))["stream"]
    assert place == {"state": {"place": 8}, "used": 1}  # nine samples: all eight, and the one after
    mvm.train(nn_of_3(), Stateful(), tmp_path / "parts", resume=True, **how)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert "begins anew" not in capsys.readouterr().err


def test_another_stream_begins_anew_and_says_so(tmp_path, capsys):
    how = {"batch": 3, "log_every": 1, "steps": 4, "progress": False}
    mvm.train(nn_of_3(), lambda: iter(X), tmp_path / "run", until=2, **how)
    assert "stream" not in checkpoint.read_manifest(checkpoint.latest(tmp_path / "run"))
    mvm.train(nn_of_3(), lambda: iter(X), tmp_path / "run", resume=True, **how)
    said = [line for line in capsys.readouterr().err.splitlines() if "stream" in line]
    assert said == ["mvm: the dataset is a stream: it begins anew, and its place in the run before is not restored"]
    assert len(losses(tmp_path / "run")) == 4


# ---------------------------------------------------------------- bad input


def growing():
    dataset = ByIndex(lambda i: X[i % 8])
    dataset.item = lambda i: (setattr(dataset, "count", dataset.count + (i > 0)), X[i % 8])[1]
    return dataset


def none_of(value):
    return ByIndex(lambda i: X[i] if i < 5 else value)


NAN = X.clone()
NAN[5, 1] = torch.nan
BAD = {
    "empty tensor": (torch.zeros(0, 3), "dataset is empty: x0 has shape (0, 3)"),
    "empty dataset": (ByIndex(None, 0), "dataset is empty (its length is 0)"),
    "empty stream": (lambda: iter(()), "dataset is empty: the iterable gave no sample"),
    "generator": (iter(X[:5]), "dataset ended after 5 items and cannot begin again"),
    "scalars": (X[:, 0], "x0 of one sample has shape (); give one axis"),
    "whole numbers": (LABELS[:, None], "x0 is of type torch.int64; give floats, or images as uint8"),
    "text": (ByIndex(lambda i: (X[i], "a word")), "condition is of type str; embed it first"),
    "objects": (ByIndex(lambda i: object()), "x0 is of type object; turn it into a tensor"),
    "no x0": ({"image": X}, "dataset has the keys image, and no 'x0'"),
    "three parts": (TensorDataset(X, X, X), "dataset[0] has 3 parts; give x0, (x0, condition), or a mapping"),
    "rows": ((X, LABELS[:5]), "dataset: condition of shape (5,) must have 8 rows, one for each x0"),
    "NaN": (NAN, "dataset[5]: x0 of shape (3,) holds NaN or Inf"),
    "NaN item": (ByIndex(NAN.__getitem__), "dataset[5]: x0 of shape (3,) holds NaN or Inf"),
    "NaN in a stream": (lambda: iter(NAN), "dataset: sample 5: x0 of shape (3,) holds NaN or Inf"),
    "NaN condition": ((X, {"a": NAN}), "dataset[5]: condition['a'] of shape (3,) holds NaN or Inf"),
    "shapes": (none_of(X[0, :2]), " has x0 of shape (2,) (torch.float32), dataset[0] (3,) (torch.float32)"),
    "shapes in a stream": (lambda: iter([X[0], X[0, :2]]), "dataset: sample 1 has x0 of shape (2,)"),
    "structures": (none_of((X[0], X[0])), "dataset: condition: the structures differ here"),
    "longer": (growing(), "dataset had 8 samples when training began and has 1"),
    "nothing": (3, "dataset is of type int; give a torch Dataset, a tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_are_refused_by_name(name, tmp_path):
    dataset, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        mvm.train(nn_of_3(), dataset, tmp_path / "run", steps=4, batch=8, progress=False)


class Wide(nn.Linear):
    def forward(self, x, t):
        return super().forward(x)[:, :2]


class Infinite(nn.Linear):
    def forward(self, x, t):
        return super().forward(x) / 0


NETWORKS = {
    "no parameters": (nn.Identity(), "network (Identity) has no parameters; give a torch module"),
    "frozen": (nn_of_3().requires_grad_(False), "network has no parameters that require a gradient"),
    "another shape": (nn_of_3(Wide), "the network answers x of shape (2, 3) with (2, 2); it must be x's shape"),
    "another input": (nn_of_3(size=4), "network fails on x of shape (2, 3) and t of shape (2,)"),
    "infinite": (nn_of_3(Infinite), "network predicts NaN or Inf for x of shape (2, 3)"),
    "a function": (lambda x, t: x, "network is of type function; give a torch module, or a recipe"),
    "null for nothing": (mvm.wrap(nn_of_3(), null=3), "null is given to mvm.wrap, and the dataset gives no condition"),
    "custom path": (mvm.wrap(nn_of_3(), kind="x0", path=mvm.path.VariancePreserving(0.2)), "no recipe can name path="),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_bad_networks_are_refused_before_anything_is_written(name, tmp_path):
    network, message = NETWORKS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        mvm.train(network, X, tmp_path / "run", steps=1, batch=4, progress=False)
    assert not (tmp_path / "run").exists()


OPTIONS = {
    "drop without null": ((X, TEXT), {"drop": 0.1}, "puts the null condition in a condition's place"),
    "drop without condition": (X, {"drop": 0.1}, "the dataset gives no condition to drop; leave it out"),
    "batches of items": (ByIndex(X.__getitem__), {"batches": True}, "batches=True is for streams"),
    "float images": (2 * X + 1, {"data_values": "uint8"}, "takes float images in [-1, 1]; a value of x0 is"),
    "recompute": (X, {"recompute": 0.5}, "engine.recompute=0.5 is for network.kind dit or ddt"),
    "fp8": (X, {"fp8": "row"}, "engine.fp8=row is for network.kind dit or ddt"),
    "kernels": (X, {"kernels": True}, "engine.kernels=True is for network.kind dit or ddt"),
    "repa": (X, {"repa_encoder": "x"}, "repa.encoder"),
    "mirror": (X, {"data_mirror": True}, "data.mirror belongs to a recipe"),
    "muon": (X, {"optimizer": "muon"}, "needs matrices inside blocks, and this network has none"),
    "type": (X, {"steps": "ten"}, "train.steps='ten' must be of type int"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_fit_are_refused(name, tmp_path):
    dataset, options, message = OPTIONS[name]
    network = nn_of_3() if not isinstance(dataset, tuple) else Conditional(3, 3)
    with pytest.raises(ValueError, match=re.escape(message)):
        mvm.train(network, dataset, tmp_path / "run", **{"steps": 1, "batch": 4, "progress": False, **options})
    assert not (tmp_path / "run").exists()


class Conditional(nn.Linear):
    def forward(self, x, t, condition):
        return super().forward(x)


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_fails_in_its_first_step_leaves_nothing(there, tmp_path):
    run, bad = tmp_path / "run", X.clone()
    bad[1:] = torch.nan
    how = {"steps": 1, "batch": 4, "progress": False}
    if there:
        run.mkdir()
    with pytest.raises(ValueError, match="holds NaN or Inf"):
        mvm.train(nn_of_3(), ByIndex(bad.__getitem__), run, **how)
    assert list(run.iterdir()) == [] if there else not run.exists()  # a folder of the user's stays

    class PairsAlone(Linear):
        def forward(self, x, t):
            return super().forward(x.reshape(2, -1), t)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        mvm.train(nn_of_3(PairsAlone), X, run, **how)
    assert list(run.iterdir()) == [] if there else not run.exists()  # a folder of the user's stays
    mvm.train(nn_of_3(), X, run, until=1, **(how | {"steps": 3}))
    before = sorted(run.rglob("*"))
    with pytest.raises(ValueError, match="holds NaN or Inf"):
        mvm.train(nn_of_3(), ByIndex(bad.__getitem__), run, resume=True, **(how | {"steps": 3}))
    assert sorted(run.rglob("*")) == before


def test_another_dataset_on_resume_is_refused(tmp_path):
    how = {"steps": 2, "batch": 4, "progress": False}
    mvm.train(nn_of_3(), X, tmp_path / "run", until=1, **how)
    with pytest.raises(ValueError, match=re.escape("(8 samples: x0 3 float32) than dataset holds now (7 samples: ")):
        mvm.train(nn_of_3(), X[:7], tmp_path / "run", resume=True, **how)
    with pytest.raises(ValueError, match=r"data\.channels 3 there, 2 now"):
        mvm.train(nn_of_3(size=2), X[:, :2], tmp_path / "run", resume=True, **how)
    with pytest.raises(ValueError, match="dataset that was given in Python; give it again"):
        mvm.train(str(tmp_path / "run" / "recipe.json"), tmp_path / "run", resume=True, progress=False)
