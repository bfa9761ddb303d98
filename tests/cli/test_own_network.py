"""Networks of the user's by name: trained, resumed, sampled, exported; and never imported because a file names them."""

import json
import re
import sys

import numpy as np
import pytest
import torch

import mvm
from mvm import checkpoint
from mvm.cli import run
from mvm.published import export
from mvm.recipes import Recipe, load_recipe, override

CODE = """
import pathlib
import torch
from torch import nn
pathlib.Path({mark!r}).write_text("imported")

class Net(nn.Module):
    time = "level"

    def __init__(self, sample_shape, num_classes, width=8, act="SiLU", null=True):
        super().__init__()
        channels = sample_shape[0]
        self.null = num_classes if null else None
        self.label = nn.Embedding(num_classes + 1, width)
        self.first = nn.Conv2d(channels + 1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = getattr(nn, act)()
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x, t, condition):
        h = self.first(torch.cat((x, t[:, None, None, None].expand(-1, 1, *x.shape[2:])), 1))
        return self.last(self.act(self.norm(h) + self.label(condition)[:, :, None, None]))

def fails(sample_shape):
    return sample_shape
"""
KIND = "module:own_net_of_tests:Net"
OPTIONS = [
    "--network.kind", KIND, "--network.arguments.width", "4", "--train.batch", "8", "--train.steps", "4",
    "--train.warmup", "0", "--train.log_every", "1", "--no-report",
]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the user's module in it, which notes that it was imported."""
    (tmp_path / "own_net_of_tests.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    sys.modules.pop("own_net_of_tests", None)
    yield tmp_path
    sys.modules.pop("own_net_of_tests", None)


def forget(place):
    sys.modules.pop("own_net_of_tests", None)
    (place / "mark").unlink()


def weights(folder):
    found = checkpoint.latest(folder)
    return {f"{part}/{n}": v for part in ("model", "ema") for n, v in checkpoint.load(found, part).items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_named_network_is_trained_sampled_and_exported(place, done, refused, capsys):
    assert "sample: mvm sample run --network module:own_net_of_tests:Net" in done(
        "train", "digits", *OPTIONS, "--out", "run"
    )
    found = json.loads((place / "run" / "recipe.json").read_text())["network"]
    assert found == {"kind": KIND, "arguments": {"width": 4}, "name": "", "time": "t", "null": "none"}
    # the recipe, written as TOML, is the same run
    (place / "mine.toml").write_text(
        f'base = "digits"\nname = "mine"\n[network]\nkind = "{KIND}"\n[network.arguments]\nwidth = 4\n'
        "[train]\nbatch = 8\nsteps = 4\nwarmup = 0\nlog_every = 1\n"
    )
    assert "continue with: mvm train --resume toml" in done("train", "mine.toml", "--out", "toml", "--until", "2")
    done("train", "mine.toml", "--out", "toml", "--resume", "--no-report")
    assert_equal(weights(place / "toml"), weights(place / "run"))
    # and so is the class, given as an object in Python
    from own_net_of_tests import Net

    recipe = load_recipe("digits")
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network = Net((1, 8, 8), 10, width=4)
    how = {"steps": 4, "batch": 8, "warmup": 0, "progress": False}
    mvm.train(network, mvm.data.digits("train"), place / "python", recipe=recipe, **how)
    assert_equal(weights(place / "python"), weights(place / "run"))

    done("sample", "run", "--network", KIND, "--num", "2", "--nfe", "2", "--out", "two.npy")
    model = mvm.load("run", network=KIND)
    images = model.generate(2, nfe=2, progress=False).images
    assert (place / "two.npy").is_file()
    assert images.dtype == torch.uint8
    said = done("export", "run", "--out", "folder", "--dtype", "float32")
    assert f"sample: mvm sample folder --network {KIND} --out grid.png; send: mvm push folder" in said
    card = (place / "folder" / "README.md").read_text()
    assert 'model = mvm.load("folder", network=network)' in card
    assert "network.kind='module:own_net_of_tests:Net', which is not part of mvm" in card
    exported = mvm.load("folder", network=KIND)
    assert torch.equal(exported.generate(2, nfe=2, progress=False).images, images)
    assert exported.network.network.norm.num_batches_tracked == 4
    assert "would send folder to me/mine" in done("push", "folder", "me/mine", "--dry-run")
    assert "mvm onnx takes dit and ddt" in refused("onnx", "run", "--network", KIND)
    assert "mvm bench measures dit and ddt" in refused("bench", "mine.toml", "--device", "cpu")


def test_nothing_is_imported_because_a_file_names_it(place, done, refused):
    done("train", "digits", *OPTIONS, "--out", "run")
    done("export", "run", "--out", "folder")
    forget(place)
    untyped = "imported only if the command names it; if you trust it, add --network.kind module:own_net_of_tests"
    assert untyped in refused("train", "--resume", "run", "--train.steps", "5")
    assert untyped in refused("train", "run/recipe.json", "--out", "other")
    with pytest.raises(ValueError, match="which no file holds"):
        mvm.train("run/recipe.json", "other", progress=False)
    for name in ("run", "folder"):
        with pytest.raises(ValueError, match=r"was trained with network\.kind='module:own_net_of_tests:Net', which no"):
            mvm.load(name)
        assert "which no file holds: give network=" in refused("sample", name, "--num", "1")
    assert not (place / "mark").exists()
    # typed again it is
    assert "is at step 5 of 5" in done("train", "--resume", "run", "--train.steps", "5", "--network.kind", KIND)
    assert (place / "mark").exists()


def test_what_does_not_fit_is_refused(place, refused, done):
    new = ["train", "digits", "--out", "new", "--train.steps", "1", "--device", "cpu"]
    said = "--network.kind"
    assert "names no class; write module:PACKAGE.MODULE:CLASS" in refused(*new, said, "module:os.path")
    assert "network.kind='resnet' is unknown" in refused(*new, said, "resnet")
    assert "cannot be imported (No module named 'own_nothing')" in refused(*new, said, "module:own_nothing:Net")
    assert "cannot be imported (module 'own_net_of_tests' has" in refused(*new, said, "module:own_net_of_tests:No")
    assert "makes a tuple; it must make a torch module" in refused(*new, said, "module:own_net_of_tests:fails")
    assert "unexpected keyword argument 'wide'" in refused(*new, said, KIND, "--network.arguments.wide", "4")
    none = refused(*new, said, KIND, "--network.arguments.null", "false")
    assert "objective.label_drop=0.1 puts the null condition" in none
    assert "engine.recompute=0.5 is for network.kind dit or ddt" in refused(
        *new, said, KIND, "--engine.recompute", "0.5"
    )
    assert "repa.encoder=efficientnet-lite0 is for" in refused(*new, said, KIND, "--repa.encoder", "efficientnet-lite0")
    assert "unknown option '--network.width'" in refused(*new, said, KIND, "--network.width", "4")
    assert "unknown option '--network.arguments.width'" in refused(*new, "--network.arguments.width", "4")
    assert not (place / "new").exists()
    done("train", "digits", *OPTIONS, "--out", "run")
    from own_net_of_tests import Net

    with pytest.raises(ValueError, match=re.escape("first.bias is (8,) in the network and (4,) there (8 differ)")):
        mvm.load("run", network=Net((1, 8, 8), 10))
    with pytest.raises(ValueError, match=r"network is given, and .* has network\.kind='dit'; leave network out"):
        mvm.load("digits", network=Net((1, 8, 8), 10))
    with pytest.raises(ValueError, match="predicts x0 on"):
        mvm.load("run", network=mvm.wrap(Net((1, 8, 8), 10, width=4), kind="x0"))
    assert run(["sample", "run", "--network", "module:own_net_of_tests:fails"]) == 2


def test_arguments_are_numbers_text_and_truth():
    recipe = load_recipe("digits")
    typed = {"width": "4", "ratio": "0.5", "name": "abc", "on": "true", "word": "'4'"}
    made = override(recipe, {"network.kind": KIND} | {f"network.arguments.{n}": text for n, text in typed.items()})
    assert isinstance(made, Recipe)
    assert made.network.arguments == {"width": 4, "ratio": 0.5, "name": "abc", "on": True, "word": "4"}
    assert override(made, {"network.kind": "dit"}).network == type(recipe.network)()
    with pytest.raises(ValueError, match=r"network\.arguments\.x=\[1\] must be a number, text, true or false"):
        type(made.network)(KIND, {"x": [1]})
    with pytest.raises(ValueError, match=r"network\.name='.x1b\[31m' must be printable text"):
        type(made.network)(name="\x1b[31m")
    with pytest.raises(ValueError, match=r"give the class of network\.kind='module:.*' attributes null and time"):
        override(made, {"network.time": "level"})


def test_a_network_given_in_python_is_asked_for_with_its_time_and_null(tmp_path):
    torch.manual_seed(0)
    points = (torch.randn(16, 3), torch.randn(16, 2))

    class Given(torch.nn.Linear):
        def forward(self, x, t, condition):
            return super().forward(x)

    network = Given(3, 3)
    wrapped = mvm.wrap(network, kind="flow", path="linear-flow", time=lambda t: 1000 * t, null=torch.zeros(1, 2))
    made = mvm.train(wrapped, points, tmp_path / "run", steps=2, batch=8, progress=False)
    assert (made.recipe.objective.kind, made.recipe.path.schedule) == ("flow", "linear-flow")
    with pytest.raises(
        ValueError, match=r"time 't' and null 'none', .* trained with 'function' and 'value'; give mvm\.w"
    ):
        mvm.load(tmp_path / "run", network=Given(3, 3))
    again = mvm.wrap(Given(3, 3), kind="flow", path="linear-flow", time=lambda t: 1000 * t, null=torch.zeros(1, 2))
    noise = torch.randn(2, 3)
    for name in ("run", "folder"):
        loaded = mvm.load(tmp_path / name, network=again) if name == "run" else None
        if loaded is None:
            export(tmp_path / "run", tmp_path / "folder", dtype="float32")
            loaded = mvm.load(tmp_path / "folder", network=again)
        assert torch.equal(mvm.sample(loaded, noise, nfe=3), mvm.sample(made, noise, nfe=3))
    tuned = mvm.train(again, points, tmp_path / "tuned", steps=1, batch=8, init=(tmp_path / "folder", "ema"),
                      lr=1e-30, progress=False)  # fmt: skip
    assert torch.allclose(mvm.sample(tuned, noise, nfe=3), mvm.sample(made, noise, nfe=3))


PYTHON_CODE = """
import torch
from torch import nn

class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, t, condition=None):
        return self.layer(torch.cat((x, t[:, None]), 1))

class Nulled(Bare):
    time, null = "level", torch.zeros(1, 1)
"""


@pytest.mark.parametrize("name", ["Bare", "Nulled"])
def test_a_run_trained_in_python_is_sampled_by_the_name_of_its_class(name, tmp_path, monkeypatch, done, refused):
    (tmp_path / "python_net_of_tests.py").write_text(PYTHON_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import python_net_of_tests

    network, kind = getattr(python_net_of_tests, name)(), f"module:python_net_of_tests:{name}"
    data = (torch.randn(8, 2), torch.randn(8, 1)) if name == "Nulled" else torch.randn(8, 2)
    mvm.train(network, data, "run", steps=2, batch=4, progress=False)
    x, t = torch.randn(3, 2), torch.full((3,), 0.5)
    model = mvm.load("run", network=kind)
    assert torch.equal(model(x, t), mvm.load("run", network=network)(x, t))
    assert "give network=" in refused("sample", "run", "--num", "2", "--out", "two.npy")
    more = ("--condition", "given.npy") if name == "Nulled" else ()
    np.save("given.npy", np.zeros((2, 1), np.float32))
    done("sample", "run", "--network", kind, "--num", "2", "--nfe", "2", "--out", "two.npy", *more)
    other = "module:python_net_of_tests:" + {"Bare": "Nulled", "Nulled": "Bare"}[name]
    assert "or the class attributes time and null" in refused("sample", "run", "--network", other, "--num", "2")
    sys.modules.pop("python_net_of_tests")
