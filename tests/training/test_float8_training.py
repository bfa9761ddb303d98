"""Training with 8-bit products: it learns as without them, resumes to the bit, and refuses what it cannot do."""

from dataclasses import replace

import pytest
import torch
from tiny_recipe import recipe_with
from torch import nn

from mvm import checkpoint
from mvm.distributed.processes import EngineConfig, Processes
from mvm.network.fast.float8 import GRANULARITY
from mvm.network.layers import SwiGLU
from mvm.training.data import training_data
from mvm.training.engine import Engine
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train

TINY = {
    "network.depth": "2",
    "network.heads": "2",
    "network.width": "32",
    "network.patch": "2",
    "train.batch": "16",
    "train.steps": "30",
    "train.lr": "3e-3",
    "train.warmup": "0",
    "train.ema": "0.8",
    "train.log_every": "1",
}
both = pytest.mark.parametrize("fp8", GRANULARITY)
GPU = torch.device("cuda", 0)


def tiny(**changes):
    return recipe_with(TINY, **changes)


def after(steps, **changes):
    """Losses, and weights after some steps."""
    recipe = tiny(**changes)
    trainer = FieldTrainer(recipe, training_data(recipe))
    for _ in range(steps):
        trainer.advance()
    return [record.values["loss"] for record in trainer.read()], dict(trainer.learner.named())


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def full():
    """30 steps with nothing rounded."""
    return after(30)


@both
def test_the_loss_falls_as_without(full, fp8):
    losses, weights = after(30, engine_fp8=fp8)
    assert losses[0] == pytest.approx(full[0][0], rel=1e-3)  # gates are zero at first: nothing rounded is seen yet
    assert not same(weights, full[1])
    early, late = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert late < 0.9 * early
    assert late == pytest.approx(sum(full[0][-5:]) / 5, rel=0.02)


def test_off_is_a_network_of_plain_layers():
    recipe = tiny()
    mlp = FieldTrainer(recipe, training_data(recipe)).model.network.blocks[0].mlp
    x, (gate, up) = torch.randn(2, 16, 32), mlp.gate_up.weight.chunk(2)
    hidden = nn.functional.silu(x @ gate.T + mlp.gate_up.bias[: len(gate)]) * (x @ up.T + mlp.gate_up.bias[len(gate) :])
    assert isinstance(mlp, SwiGLU)
    torch.testing.assert_close(mlp(x), mlp.down(hidden), rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("keep", ["products", "nothing"])
def test_recompute_gives_the_same_bits(fp8, keep):
    want, found = (after(3, engine_fp8=fp8, **more) for more in ({}, {"engine_recompute": "1", "engine_keep": keep}))
    assert found[0] == want[0]
    assert same(found[1], want[1])


@both
def test_muon_and_bf16_train_too(fp8):
    losses, _ = after(4, engine_fp8=fp8, train_optimizer="muon", engine_precision="bf16")
    plain, _ = after(4, train_optimizer="muon", engine_precision="bf16")
    assert losses == pytest.approx(plain, rel=0.03)
    assert losses != plain


def go(run, steps, fp8, resume=False):
    recipe = tiny(engine_fp8=fp8, train_decay="constant", train_save_every="2")
    return train(replace(recipe, train=replace(recipe.train, steps=steps)), run, progress=False, resume=resume)


@both
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, fp8):
    go(tmp_path / "whole", 6, fp8)
    go(tmp_path / "parts", 4, fp8)
    go(tmp_path / "parts", 6, fp8, resume=True)
    for part in ("model", "ema", "optimizer"):
        one, other = (checkpoint.load(checkpoint.latest(tmp_path / run), part) for run in ("whole", "parts"))
        assert same(one, other)


def test_it_may_be_switched_on_and_off_on_resume(tmp_path):
    for steps, fp8 in ((2, "off"), (4, "tensor"), (6, "row"), (8, "off")):
        go(tmp_path / "run", steps, fp8, resume=steps > 2)
    assert checkpoint.latest(tmp_path / "run").name == "step-00000008"


# What is refused


def engine(place=None, **options):
    """An engine on a tiny network; place: of the processes, none of whom is asked for anything."""
    recipe = tiny(**{name: options.pop(name) for name in list(options) if name.startswith("network_")})
    learner = FieldTrainer(recipe, training_data(recipe)).learner
    return Engine(EngineConfig(**options), learner, learner.network, place or Processes(), False)


def test_an_unknown_granularity_is_named():
    with pytest.raises(ValueError, match=r"engine\.fp8='rows'.*'row'"):
        EngineConfig(fp8="rows")


def test_an_odd_width_is_named():
    with pytest.raises(ValueError, match=r"engine\.fp8='row' .* multiples of 16, .* 24 .*network\.width"):
        engine(fp8="row", network_width="24")
    engine(network_width="24")


def test_fsdp_is_refused():
    with pytest.raises(ValueError, match=r"engine\.fp8='tensor' .* engine\.parallel='fsdp'; use ddp"):
        engine(Processes(0, 2), fp8="tensor", parallel="fsdp")


def test_float32_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"engine\.fp8='tensor' .* engine\.precision='fp32' .*use bf16"):
        engine(Processes(device=GPU), fp8="tensor", precision="fp32")


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_a_gpu_that_has_float8_is_taken(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    engine(Processes(device=GPU), fp8="row", compile="off")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_an_old_gpu_is_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=rf"capability 8\.9.*8\.{capability[1]}.*off"):
        engine(Processes(device=GPU), fp8="row", compile="off")


def test_decoders_refuse_it():
    from mvm.recipes import DecoderRecipe

    with pytest.raises(ValueError, match=r"engine\.fp8='row' is not for decoders"):
        DecoderRecipe(engine=EngineConfig(fp8="row"))
