"""A run with representation alignment, from a tiny Dinov2 on disk to the checkpoint and back."""

import json
import shutil

import pytest
import torch

from mvm import checkpoint
from mvm.data import Resident
from mvm.model import load
from mvm.network.pretrained import load_encoder
from mvm.recipes import load_recipe, override
from mvm.training.data import training_data
from mvm.training.features import LiveBank
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")

TINY = {
    "network.depth": "2",
    "network.heads": "2",
    "network.width": "16",
    "network.patch": "4",
    "data.mirror": "yes",
    "train.batch": "8",
    "train.steps": "5",
    "train.decay": "constant",
    "train.lr": "5e-3",
    "train.log_every": "1",
    "train.save_every": "5",
    "repa.resolution": "16",
    "repa.block": "1",
    "repa.weight": "0.5",
}
PARTS = ("model", "ema", "optimizer", "projector")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A Dinov2 of random weights that looks at 16x16 pixels in 4x4 patches: 4x4 tokens, twice the student's side."""
    config = transformers.Dinov2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=4, image_size=16
    )
    model, draw = transformers.Dinov2Model(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    folder = tmp_path_factory.mktemp("encoder") / "dinov2"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(encoder, monkeypatch):
    """Tiny recipes with the encoder; 64 of the digits, for there are features to compute of each."""
    few = training_data(load_recipe("digits"))[:64]
    monkeypatch.setattr("mvm.training.loop.training_store", lambda recipe, device, _: Resident(few, device))

    def make(**changes):
        told = {**TINY, "repa.encoder": str(encoder), **{k.replace("_", ".", 1): v for k, v in changes.items()}}
        return override(load_recipe("digits"), told)

    return make


def go(recipe, run, **options):
    return train(recipe, run, progress=False, **options)


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in found]


def stored(run, part):
    return checkpoint.load(checkpoint.latest(run), part)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_caches_give_the_same_run(recipe, tmp_path):
    """Memory and disk hold the same float16; without a cache features are float32: losses agree to 1e-3 of them."""
    for cache in ("device", "disk", "none"):
        go(recipe(repa_cache=cache), tmp_path / cache)
    for part in PARTS:
        assert same(stored(tmp_path / "device", part), stored(tmp_path / "disk", part)), part
    assert lines(tmp_path / "device") == lines(tmp_path / "disk")
    for name in ("loss", "repa"):
        held, live = ([line[name] for line in lines(tmp_path / cache)] for cache in ("device", "none"))
        assert held == pytest.approx(live, rel=1e-3)
    assert held != live
    assert not same(stored(tmp_path / "device", "model"), stored(tmp_path / "none", "model"))
    assert sorted(path.name for path in (tmp_path / "disk" / "features").iterdir()) == ["index.json", "part-00000.npy"]
    assert not (tmp_path / "none" / "features").exists()


def test_the_alignment_term_by_hand(recipe, encoder):
    """1 - cos of projected tokens and pooled features of the images as shown, mirrored ones too; total adds half."""
    chosen = recipe()
    data = training_data(chosen)[:64]
    teacher = LiveBank(load_encoder(str(encoder), 16), data.images, side=2)
    trainer = FieldTrainer(chosen, data, teacher=teacher)
    trainer.advance()  # gates open, so that tokens depend on all there is
    batch = trainer.batch()
    shown = ((batch.x0 + 1) * 127.5).round().to(torch.uint8)
    tokens = load_encoder(str(encoder), 16)(shown)  # (8, 16, 8) on 4x4
    pooled = tokens.reshape(8, 2, 2, 2, 2, 8).mean((2, 4)).reshape(8, 4, 8)
    assert torch.allclose(batch.features, pooled, atol=1e-5)
    seen = []
    trainer.learner.projector.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    with torch.no_grad():
        loss = trainer.engine(batch)
    cosine = torch.nn.functional.cosine_similarity(seen[0], pooled, dim=-1).mean()
    assert float(loss.parts["repa"]) == pytest.approx(1 - float(cosine), abs=1e-5)
    assert float(loss.total) == pytest.approx(float(loss.parts["loss"] + 0.5 * loss.parts["repa"]), rel=1e-6)
    plain = data.images[trainer.order.indices(trainer.positions(1))]
    assert not torch.equal(shown, plain)
    flipped = (shown != plain).flatten(1).any(1)
    assert torch.equal(torch.where(flipped[:, None, None, None], shown.flip(-1), shown), plain)


def test_alignment_moves_the_network_and_the_projector(recipe, tmp_path):
    go(recipe(), tmp_path / "with")
    go(recipe(repa_weight="0"), tmp_path / "weightless")
    go(recipe(repa_encoder=""), tmp_path / "without")
    assert same(stored(tmp_path / "weightless", "model"), stored(tmp_path / "without", "model"))
    assert not same(stored(tmp_path / "with", "model"), stored(tmp_path / "without", "model"))
    moved, begin = stored(tmp_path / "with", "projector"), stored(tmp_path / "weightless", "projector")
    assert not any(torch.equal(moved[name], value) for name, value in begin.items())
    assert all(name.startswith("projector.") for name in moved)
    assert all("repa" in line for line in lines(tmp_path / "with"))
    assert not any("repa" in line for line in lines(tmp_path / "without"))
    files = {path.name for path in checkpoint.latest(tmp_path / "without").iterdir()}
    assert "projector.safetensors" not in files


def test_weights_at_the_start_do_not_depend_on_alignment(recipe, encoder):
    data = training_data(recipe())[:64]
    teacher = LiveBank(load_encoder(str(encoder), 16), data.images, side=2)
    one, other = FieldTrainer(recipe(), data, teacher=teacher), FieldTrainer(recipe(repa_encoder=""), data)
    assert same(dict(one.model.network.named_parameters()), dict(other.model.network.named_parameters()))
    assert all(torch.equal(a, b) for a, b in zip(one.batch()[:3], other.batch()[:3], strict=True))
    torch.manual_seed(7)
    again = FieldTrainer(recipe(), data, teacher=teacher)
    assert same(dict(one.learner.named()), dict(again.learner.named()))
    reseeded = FieldTrainer(recipe(seed="1"), data, teacher=teacher)
    assert not torch.equal(one.learner.projector.layers[0].weight, reseeded.learner.projector.layers[0].weight)


@pytest.mark.parametrize("stop", [1, 3])
def test_alignment_ends_at_its_step(recipe, tmp_path, stop):
    go(recipe(repa_stop=str(stop)), tmp_path / "run")
    assert ["repa" in line for line in lines(tmp_path / "run")] == [step < stop for step in range(5)]
    go(recipe(repa_stop=str(stop), train_steps=str(stop)), tmp_path / "until then")
    assert same(stored(tmp_path / "run", "projector"), stored(tmp_path / "until then", "projector"))  # it rests


@pytest.mark.parametrize("projector", ["mlp", "conv"])
@pytest.mark.parametrize(("pause", "stop"), [(2, 0), (2, 2), (4, 3)])
def test_resume_is_exact(recipe, tmp_path, pause, stop, projector):
    chosen = recipe(repa_stop=str(stop), repa_projector=projector)
    go(chosen, tmp_path / "whole")
    go(chosen, tmp_path / "parts", until=pause)
    go(chosen, tmp_path / "parts", resume=True)
    for part in PARTS:
        assert same(stored(tmp_path / "whole", part), stored(tmp_path / "parts", part)), part
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


def test_the_projector_is_restored(recipe, encoder, tmp_path):
    go(recipe(), tmp_path / "run")
    data = training_data(recipe())[:64]
    trainer = FieldTrainer(recipe(), data, teacher=LiveBank(load_encoder(str(encoder), 16), data.images, side=2))
    found = stored(tmp_path / "run", "projector")
    assert not torch.equal(trainer.learner.projector.layers[0].weight, found["projector.layers.0.weight"])
    trainer.restore(checkpoint.latest(tmp_path / "run"))
    named = {name: value for name, value in trainer.learner.named() if name in found}
    assert same(named, found)
    moments = stored(tmp_path / "run", "optimizer")
    assert same(dict(trainer.optimizer_state()), moments)
    assert any(name.startswith("projector.") and name.endswith("/exp_avg") for name in moments)


def test_sampling_needs_no_projector(recipe, tmp_path):
    model = go(recipe(), tmp_path / "run")
    assert same(dict(load(tmp_path / "run").network.named_parameters()), dict(model.network.named_parameters()))
    with pytest.raises(ValueError, match=r"weights='projector'.*no such weights"):
        load(tmp_path / "run", weights="projector")


def test_weights_of_a_run_with_alignment_start_one_without_and_the_other_way(recipe, tmp_path):
    go(recipe(), tmp_path / "with")
    go(recipe(repa_encoder=""), tmp_path / "without", init=(tmp_path / "with", "ema"), until=1)
    go(recipe(), tmp_path / "again", init=(tmp_path / "without", "model"), until=1)
    assert "projector" in {path.stem for path in checkpoint.latest(tmp_path / "again").iterdir()}


def test_stored_features_of_another_encoder_are_refused(recipe, encoder, tmp_path):
    go(recipe(repa_cache="disk"), tmp_path / "run", until=2)
    other = tmp_path / "other"
    shutil.copytree(encoder, other)
    model = transformers.Dinov2Model.from_pretrained(other)
    with torch.no_grad():
        model.layernorm.weight.add_(1)
    model.save_pretrained(other)
    shutil.copytree(tmp_path / "run" / "features", tmp_path / "new" / "features")
    with pytest.raises(ValueError, match=r"holds features with other values of .*weights"):
        go(recipe(repa_cache="disk", repa_encoder=str(other)), tmp_path / "new")


def test_accumulation_cuts_features_along(recipe, tmp_path):
    go(recipe(), tmp_path / "one", until=1)
    go(recipe(engine_accumulate="3"), tmp_path / "three", until=1)
    one, three = lines(tmp_path / "one")[0], lines(tmp_path / "three")[0]
    assert one == pytest.approx(three, rel=1e-5)
