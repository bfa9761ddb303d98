"""Other ways out and other networks: torch.export, and the ONNX of a DDT."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import mvm
from mvm import noise
from mvm.integrations import onnx
from mvm.model import Model
from mvm.network import DDTConfig, DiTConfig

DOCUMENT = (Path(__file__).parents[2] / "docs" / "how-to/onnx.md").read_text()


def inputs(model, batch):
    seeds = torch.arange(batch)
    return noise.initial(seeds, model.sample_shape), torch.linspace(0, 1, batch), seeds % (model.num_classes + 1)


@pytest.fixture(scope="module")
def model():
    return mvm.load("digits")


def test_torch_export_is_the_network(model, tmp_path):
    torch.export.save(onnx.export_network(model), tmp_path / "network.pt2")
    program = torch.export.load(tmp_path / "network.pt2").module()
    for batch in (1, 5):
        expected = model.network(*inputs(model, batch)).prediction
        assert torch.allclose(program(*inputs(model, batch)), expected, atol=1e-5)


DDT = DDTConfig(size="tiny", patch=2, depth=1, width=16, heads=2, head_depth=1, head_width=16, head_heads=2)
DROPPING = DiTConfig(size="tiny", patch=2, depth=1, width=16, heads=2, dropout=0.5)


@pytest.mark.parametrize(("network", "augment"), [(DDT, 0.0), (DROPPING, 0.3)], ids=["ddt", "augmented and dropping"])
def test_onnx_of_another_network_is_that_network(model, tmp_path, network, augment):
    data = replace(model.recipe.data, augment=augment)
    other = Model(replace(model.recipe, network=network, data=data)).eval().requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in other.network.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    onnx.write_onnx(other, tmp_path / "other.onnx")
    given = dict(zip(onnx.INPUTS, (value.numpy() for value in inputs(other, 3)), strict=True))
    (found,) = onnxruntime.InferenceSession(str(tmp_path / "other.onnx"), providers=["CPUExecutionProvider"]).run(
        None, given
    )
    expected = other.network(*inputs(other, 3)).prediction.numpy()
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() < 1e-4


def test_document_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    exec(compile(code, "onnx.md", "exec"), {})
