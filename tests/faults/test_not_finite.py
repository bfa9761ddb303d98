"""Weights and guidance that end in NaN or Inf are an error that names the step; absurd options, too."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import mvm
from mvm import checkpoint
from mvm.app.walk import side_by_steps
from mvm.cli import run as command
from mvm.distributed.processes import Processes
from mvm.files import sha256
from mvm.generate import Draw, Sampler, require_patience
from mvm.latent import Pixels
from mvm.model import Model
from mvm.options import MOST_IMAGES, MOST_NFE, MOST_SCALE
from mvm.published import export
from mvm.recipes import SampleConfig, load_recipe, override, to_json
from mvm.solver import ClassifierFree, sample

TINY = {"network.depth": "1", "network.heads": "1", "network.width": "8", "network.patch": "4", "sample.nfe": "4"}


def spoiled(value, name="head.linear.weight"):
    """Return a model one of whose tensors holds a value."""
    model = Model(override(load_recipe("digits"), TINY)).eval().requires_grad_(False)
    parameters = dict(model.network.named_parameters())
    tensor = parameters.get(name, next(reversed(parameters.values())))
    tensor.data.flatten()[0] = value
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("solver", ["adams", "heun", "euler"])
def test_weights_that_are_not_finite(value, solver):
    with pytest.raises(FloatingPointError, match=r"after step 1 the samples hold NaN or Inf.*check the weights"):
        spoiled(value).generate(2, solver=solver, nfe=4, progress=False)


@pytest.mark.parametrize("solver", ["adaptive", "dopri5"])
def test_weights_that_are_not_finite_and_solvers_with_a_tolerance(solver):
    pytest.importorskip("torchdiffeq", reason="needs mean-velocity-matching[adaptive]")
    with pytest.raises(FloatingPointError, match=f"solver='{solver}' found no step that is small enough"):
        spoiled(math.nan).generate(2, solver=solver, progress=False)


def test_the_step_is_the_one_where_it_began():
    """A field that answers Inf in the last steps alone; it is asked once a step."""
    times = []

    def field(x, t, condition):
        times.append(float(t[0]))
        return x * 0 if times[-1] > 0.5 else x * math.inf

    with pytest.raises(FloatingPointError) as error:
        sample(field, torch.randn(2, 3), nfe=8)
    first = next(number for number, t in enumerate(times, 1) if t <= 0.5)
    assert 1 < first < 8
    assert f"after step {first} the samples hold NaN or Inf" in str(error.value)


def test_a_decoder_that_is_not_finite():
    class Broken(Pixels):
        def decode_float(self, samples):
            return samples * math.nan

    model = Model(override(load_recipe("digits"), TINY)).eval()
    model.codec = Broken((1, 8, 8))
    with pytest.raises(FloatingPointError, match="the last step's samples are finite, and what is made of them is not"):
        model.generate(1, progress=False)


def test_the_command_writes_nothing(tmp_path, capsys):
    recipe = override(load_recipe("digits"), TINY)
    weights = {name: value.clone() for name, value in spoiled(math.nan).network.state_dict().items()}
    (tmp_path / "run").mkdir()
    checkpoint.save(tmp_path / "run" / "checkpoints" / "step-00000001", {"ema": weights}, {"step": 1})
    (tmp_path / "run" / "recipe.json").write_text(to_json(recipe))
    for suffix in ("png", "npy"):
        out = tmp_path / f"x.{suffix}"
        assert command(["sample", str(tmp_path / "run"), "--num", "2", "--device", "cpu", "--out", str(out)]) == 2
        assert "after step 1 the samples hold NaN or Inf" in capsys.readouterr().err
        assert not out.exists()


def test_an_export_that_was_spoiled(tmp_path):
    recipe = override(load_recipe("digits"), TINY)
    weights = Model(recipe).network.state_dict()
    (tmp_path / "run").mkdir()
    checkpoint.save(tmp_path / "run" / "checkpoints" / "step-00000001", {"ema": weights}, {"step": 1})
    (tmp_path / "run" / "recipe.json").write_text(to_json(recipe))
    export(tmp_path / "run", tmp_path / "model", license="mit")
    path = tmp_path / "model" / "model.safetensors"
    save_file({name: torch.full_like(value, 60_000) for name, value in load_file(path).items()}, path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sha256": sha256(path)}))
    with pytest.raises(FloatingPointError, match="after step 1 the samples hold NaN or Inf"):
        mvm.load(tmp_path / "model").generate(1, progress=False)


def test_the_page_says_so():
    with pytest.raises(FloatingPointError, match="after step 1"):
        list(itertools.islice(side_by_steps(spoiled(math.nan), Draw(2), SampleConfig(nfe=4)), 10))


def test_a_batch_is_looked_at_once(monkeypatch):
    """No step waits for the device: the answer is read with the images."""
    model, looked = Model(override(load_recipe("digits"), TINY)).eval(), []
    truth = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: looked.append(1) or truth(tensor))
    how = {"condition": torch.zeros(2, dtype=torch.int64), "seeds": torch.arange(2)}
    for nfe in (4, 16):
        looked.clear()
        begun = Sampler(model).launch(how["condition"], how["seeds"], SampleConfig(nfe=nfe, tuned=False))
        at_launch = len(looked)
        begun()
        assert len(looked) == at_launch + 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cfg", "1e308"], rf"cfg=1e+308 is out of range; it must lie in [-{MOST_SCALE}, {MOST_SCALE}]"),
        (["--cfg", "-1e30"], "cfg=-1e+30 is out of range"),
        (["--nfe", "100000000"], f"nfe=100000000 is out of range; it must lie in [1, {MOST_NFE}]"),
        (["--num", "1000000000000"], f"num=1000000000000 is out of range; it must lie in [1, {MOST_IMAGES}]"),
        (["--shift", "1e308"], "shift=1e+308 is out of range; it must be positive, at most 1,000,000"),
        (["--solver", "adaptive", "--tolerance", "1e300"], "tol=1e+300 is out of range"),
        (["--solver", "sa", "--t-min", "1e300"], "t_min=1e+300"),
    ],
)
def test_absurd_options_name_their_bound(options, words, tmp_path, capsys):
    assert command(["sample", "digits", *options, "--device", "cpu", "--out", str(tmp_path / "x.npz")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("scale", [1e308, -1e30, math.nan])
def test_absurd_guidance_in_python(scale):
    with pytest.raises(ValueError, match=r"guidance scale=.* is out of range; it must lie in"):
        ClassifierFree(scale)


# --- work ---------------------------------------------------------------------------------------------------------


def test_hours_of_work_are_asked_for(tmp_path, capsys, monkeypatch):
    """1024 pixels a side with the weights of small images: as few weights, and days of work."""
    large = {"data.name": "folder", "data.path": "x", "data.channels": "1", "data.size": "1024", "data.classes": "10"}
    recipe = override(load_recipe("digits"), TINY | large)
    (tmp_path / "run").mkdir()
    checkpoint.save(
        tmp_path / "run" / "checkpoints" / "step-00000001", {"ema": Model(recipe).network.state_dict()}, {"step": 1}
    )
    (tmp_path / "run" / "recipe.json").write_text(to_json(recipe))
    options = ["--num", "16", "--nfe", "1000", "--device", "cpu", "--out", str(tmp_path / "x.png")]
    assert command(["sample", str(tmp_path / "run"), *options]) == 2
    assert "num=16: this takes about " in (said := capsys.readouterr().err)
    assert "give --yes to begin" in said
    monkeypatch.setattr("mvm.samples.sample_parts", lambda *args, **options: (_ for _ in ()).throw(ValueError("begun")))
    assert command(["sample", str(tmp_path / "run"), "--yes", *options]) == 2
    assert "begun" in capsys.readouterr().err


def test_little_work_is_not_measured(monkeypatch):
    monkeypatch.setattr("mvm.generate.speed", None)
    require_patience(Sampler(mvm.load("digits")), 1000, SampleConfig(nfe=26), False, Processes())
