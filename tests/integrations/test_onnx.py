"""ONNX: the network in onnxruntime, and images by numpy and onnxruntime alone."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import mvm
from mvm import noise
from mvm.cli import run
from mvm.generate import Sampler
from mvm.integrations import onnx
from mvm.model import Model
from mvm.solver import solve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "onnx_sampler.py"
DOCUMENT = (ROOT / "docs" / "how-to/onnx.md").read_text()
COUNT = 20


@pytest.fixture(scope="module")
def model():
    return mvm.load("digits")


def typed(language):
    """The lines of a document's blocks, but for those that install."""
    blocks = re.findall(rf"```{language}\n(.*?)```", DOCUMENT.replace("\\\n", " "), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line and "pip" not in line]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The shipped model as ONNX, by the document's command: its sampler is guided and noisy."""
    (command, *options), (program, *_) = typed("bash")
    assert (command, program) == ("mvm", "python")
    place = options.index("--out") + 1
    out = tmp_path_factory.mktemp("onnx") / options[place]
    assert run([*options[:place], str(out), *options[place + 1 :]]) == 0
    return out


@pytest.fixture(scope="module")
def settings(model):
    """What the document's command asks for."""
    return replace(model.recipe.sample, nfe=13, rho=0.75, cfg=1.5, low=0.2, high=0.8)


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def inputs(model, batch):
    seeds = torch.arange(batch)
    return noise.initial(seeds, model.sample_shape), torch.linspace(0, 1, batch), seeds % (model.num_classes + 1)


def session_of(file):
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def tables_of(session):
    return json.loads(session.get_modelmeta().custom_metadata_map["mvm"])


@pytest.mark.parametrize("batch", [1, 5])
def test_onnx_is_the_network(model, file, batch):
    given = dict(zip(onnx.INPUTS, (value.numpy() for value in inputs(model, batch)), strict=True))
    (found,) = session_of(file).run([onnx.OUTPUT], given)
    assert np.abs(found - model.network(*inputs(model, batch)).prediction.numpy()).max() < 1e-4


def test_example_draws_mvms_noise(example):
    seeds = [0, 7, 2**40 + 3, noise.MAX_SEED]
    for stream, shape in ((noise.INITIAL, (3, 5)), (noise.STEP + 4, (1, 8, 8))):
        expected = noise.normal(torch.tensor(seeds), stream, shape).numpy()
        assert np.abs(example["normal"](seeds, stream, shape) - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("schedule", "T"),
    [("mean-velocity", 1.0), ("mean-velocity", 2.5), ("linear-flow", 1.0), ("variance-preserving", 1.0)],
)
@pytest.mark.parametrize(
    ("solver", "rho", "cfg"), [("adams", 0.0, 1.0), ("sa", 0.75, 1.5), ("euler-maruyama", 1.0, 1.5)]
)
def test_tables_make_the_native_samplers_images(model, example, schedule, T, solver, rho, cfg):
    """The loop of the example, over a session that asks the network itself."""
    recipe, kind = model.recipe, "u" if schedule == "mean-velocity" else "diffusion_v"
    path, objective = replace(recipe.path, schedule=schedule, T=T), replace(recipe.objective, kind=kind)
    other = Model(replace(recipe, path=path, objective=objective))
    other.network.load_state_dict(model.network.state_dict())
    other.eval().requires_grad_(False)
    settings = replace(recipe.sample, nfe=7, solver=solver, rho=rho, cfg=cfg, low=0.3, high=0.9)
    seeds, labels = list(range(4)), torch.arange(4)

    class Session:
        def run(self, names, given):
            values = (torch.from_numpy(given[name]) for name in onnx.INPUTS)
            return [other.network(*values).prediction.numpy()]

    x, how = noise.initial(torch.tensor(seeds), other.sample_shape), {"solver": solver, "nfe": 7, "rho": rho}
    native = solve(
        other, x, schedule=other.schedule, condition=labels, seeds=seeds, guidance=settings.guidance(), **how
    ).x
    found = example["sample"](Session(), onnx.sampler_tables(other, settings), labels.numpy(), seeds)
    assert np.abs(found - native.numpy()).max() < 2e-4 * max(1.0, float(native.abs().max()))


def test_example_makes_the_native_samplers_images(model, settings, file):
    """By the document's command, of the document's classes."""
    _, script, name, *options = typed("bash")[1]
    subprocess.run([sys.executable, str(ROOT / script), file.name, *options], cwd=file.parent, check=True)
    labels = torch.tensor([3, 7] * 4)
    native = Sampler(model).images(labels, torch.arange(8), settings, progress=False).images
    found = np.load(file.parent / "digits.npy").astype(int)
    assert (name, found.shape) == (file.name, (8, 8, 8, 1))
    assert np.abs(found - native.permute(0, 2, 3, 1).numpy().astype(int)).max() <= 1


def test_example_before_rounding(model, settings, file, example):
    session, seeds, labels = session_of(file), list(range(COUNT)), torch.arange(COUNT) % 10
    tables, x = tables_of(session), noise.initial(torch.tensor(seeds), model.sample_shape)
    native = solve(model, x, nfe=13, rho=0.75, condition=labels, seeds=seeds, guidance=settings.guidance()).x
    assert np.abs(example["sample"](session, tables, labels.numpy(), seeds) - native.numpy()).max() < 1e-4
    assert 0 < sum(step["guided"] for step in tables["steps"]) < 13


def test_example_refuses_classes_that_are_none(file):
    command = [sys.executable, str(EXAMPLE), file.name, "--classes", "3,10"]
    failed = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "--classes 3,10: this model has classes 0 to 9" in failed.stderr


def test_example_imports_neither_torch_nor_mvm():
    imported = re.findall(r"^(?:import|from) (\w+)", EXAMPLE.read_text(), re.MULTILINE)
    assert set(imported) == {"argparse", "json", "math", "numpy", "onnxruntime"}


def test_metadata_says_what_it_is(model, settings, file):
    tables = tables_of(session_of(file))
    assert tables == json.loads(json.dumps(onnx.sampler_tables(model, settings)))
    assert (tables["recipe"], tables["shape"], tables["null"], tables["codec"]) == ("digits", [1, 8, 8], 10, "pixels")
    assert tables["weights"] == model.origin["sha256"]
    assert len(tables["steps"]) == 13


def test_what_cannot_be_exported_is_refused(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "no.onnx"
    with pytest.raises(ValueError, match=r"internal=1.5: the exported network has no inner head"):
        onnx.write_onnx(model, out, replace(model.recipe.sample, internal=1.5))
    bright = Model(replace(model.recipe, codec=replace(model.recipe.codec, scale=2.0)))
    with pytest.raises(ValueError, match=r"codec.scale=2.0: the exported sampler takes pixels in"):
        onnx.write_onnx(bright, out, model.recipe.sample)
    assert run(["onnx", "digits", "--solver", "heun", "--out", str(out)]) == 2
    assert "use one of: adams, adams-power, sa, euler, euler-maruyama" in capsys.readouterr().err
    assert run(["onnx", "digits", "--solver", "deis", "--out", str(out)]) == 2
    assert "solver='deis' has no table in x0_hat" in capsys.readouterr().err
    assert run(["onnx", "digits", "--interval", "0.2,0.8", "--out", str(out)]) == 2
    assert "--interval 0.2,0.8 acts on guidance" in capsys.readouterr().err
    monkeypatch.setattr(onnx, "LIMIT", 1000)
    with pytest.raises(ValueError, match="do not fit in one ONNX file"):
        onnx.write_onnx(model, out)
    assert list(tmp_path.iterdir()) == []


def test_missing_library_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"pip install 'mean-velocity-matching\[onnx\]'"):
        onnx.write_onnx(model, tmp_path / "no.onnx")


def test_a_folder_is_never_replaced(model, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "keep").write_text("mine")
    for taken in (tmp_path / "models", Path(".")):
        with pytest.raises(ValueError, match=r"--out .* is a folder; give the name of a file"):
            onnx.write_onnx(model, taken)
    assert (tmp_path / "models" / "keep").read_text() == "mine"
