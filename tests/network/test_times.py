"""What a network receives for time, in training, sampling and exports, and that Fourier frequencies are kept."""

import pytest
import torch

import mvm
from mvm.bridge import BetaTable
from mvm.model import Model
from mvm.network import DDTConfig, DiTConfig, build_network
from mvm.network.extras import TIMES, LightningAttention
from mvm.network.layers import rotary_table, rotary_waves
from mvm.objective import ObjectiveConfig
from mvm.optim.optimizers import TrainConfig
from mvm.path import VariancePreserving
from mvm.path.field import network_time
from mvm.recipes import DataConfig, Recipe
from mvm.recipes.schema import PathConfig
from mvm.training.loop import train

SMALL = {"size": "tiny", "depth": 1, "width": 16, "heads": 2, "patch": 4}


def recipe(time, **changes):
    vp = time == "step"
    return Recipe(
        data=DataConfig("digits"),
        path=PathConfig("variance-preserving" if vp else "linear-flow"),
        network=DiTConfig(**SMALL, time=time),
        objective=ObjectiveConfig("eps" if vp else "flow"),
        train=TrainConfig(steps=2, batch=8, lr=1e-2, warmup=0, ema=(0.5,), save_every=2),
        **changes,
    )


def shaken(model):
    torch.manual_seed(1)
    for parameter in model.network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("time", TIMES)
def test_a_model_gives_its_network_that_time(time):
    model = shaken(Model(recipe(time)))
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    received = {"level": model.schedule.level(t), "t": t, "1-t": 1 - t, "fourier": t}
    if time == "step":  # at the step's own time on the path, exactly
        table = BetaTable.from_betas(torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64))
        steps = torch.tensor([0.0, 17.0, 940.0], dtype=torch.float64)
        t = VariancePreserving().t_from_lam(table.lam(table.time(steps)))
        received = {"step": steps}
    assert torch.allclose(network_time(model.network.time, t, model.schedule), received[time], atol=1e-9)
    labels = torch.tensor([0, 4, 9])
    plain = model.network(x, received[time], labels).prediction
    assert torch.allclose(model(x, t, labels), mvm.path.to_x0(model.recipe.objective.kind, plain, x, t, model.schedule))
    assert not torch.equal(model.network(x, received[time] / 2, labels).prediction, plain)


@pytest.mark.parametrize("time", ["t", "1-t", "fourier"])
def test_a_run_with_it(time, tmp_path):
    train(recipe(time), tmp_path / "run", progress=False)
    model = mvm.load(tmp_path / "run")
    assert model.generate(2, nfe=2, progress=False).images.shape == (2, 1, 8, 8)
    if time == "fourier":
        rates = Model(recipe(time)).network.level.rates
        assert torch.equal(model.network.level.rates, rates)  # as they were drawn: they are not learned
        assert 0.8 < float(rates.std()) < 1.2


def test_a_step_needs_its_path():
    with pytest.raises(ValueError, match=r"network\.time='step' is of path\.schedule='variance-preserving'"):
        Recipe(network=DiTConfig(time="step"))
    with pytest.raises(ValueError, match=r"network\.time='s' is unknown"):
        DiTConfig(time="s")


def test_exports_know_it():
    pytest.importorskip("diffusers", reason="needs mean-velocity-matching[diffusers]")
    from mvm.integrations.diffusers import MVMTransformer2DModel
    from mvm.integrations.onnx import sampler_tables

    model = shaken(Model(recipe("1-t")))
    assert [step["level"] for step in sampler_tables(model, model.recipe.sample)["steps"]] == [
        1 - step["t"] for step in sampler_tables(model, model.recipe.sample)["steps"]
    ]
    x, labels = torch.randn(2, 1, 8, 8), torch.tensor([1, 2])
    found = MVMTransformer2DModel.from_mvm(model)(x, 0.3, labels).sample
    assert torch.allclose(found, model.network(x, torch.full((2,), 0.7), labels).prediction, atol=1e-6)


def test_rotary_positions_of_the_lightning_design():
    """Queries and keys turn: scores depend on the difference of two positions alone."""
    torch.manual_seed(0)
    attention = LightningAttention(16, 2).double()
    cos, sin = (wave.double() for wave in rotary_waves(rotary_table((3, 3), 8, 1e4)))
    token = torch.randn(1, 1, 16, dtype=torch.float64).expand(1, 9, 16)
    query, key, value = attention.placed(token, cos, sin)
    scores = torch.einsum("bnhd,bmhd->bhnm", query, key)
    assert torch.allclose(scores[..., 0, 1], scores[..., 4, 5], atol=1e-6)  # a column apart
    assert torch.allclose(scores[..., 1, 4], scores[..., 5, 8], atol=1e-6)  # a row apart
    assert not torch.allclose(scores[..., 0, 1], scores[..., 0, 3])
    assert torch.allclose(value[0, 0], value[0, 8])


def test_a_ddt_is_of_three_designs():
    with pytest.raises(ValueError, match=r"network\.design='classic' is for network\.kind='dit'; a ddt's is 'modern'"):
        DDTConfig(design="classic")
    for design in ("lightning", "raev2"):
        network = build_network(DDTConfig("tiny", depth=1, design=design), (3, 4, 4), 5)
        assert network.blocks[0].attention.qkv.bias is not None
        assert (network.positions is None) == (design == "raev2")
