"""Features and images that are not finite, and rates that explode: steps are skipped, counted, and stop the run."""

import json
import math

import numpy as np
import pytest
import torch

from mvm import checkpoint
from mvm.data import Resident
from mvm.data.prepare import prepare
from mvm.recipes import DecoderRecipe, load_recipe, override
from mvm.training.data import training_data, training_store
from mvm.training.decoder_trainer import DecoderTrainer
from mvm.training.features import TensorBank
from mvm.training.loop import train

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")

OPTIMIZERS = ["adamw", "muon"]
BAD = [math.nan, math.inf, -math.inf]
COMMON = {"train.batch": "8", "train.steps": "8", "train.lr": "1e-3", "train.decay": "constant"}
COMMON |= {"train.log_every": "1", "train.save_every": "2", "train.warmup": "0"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny ViT of random weights, as a folder."""
    torch.manual_seed(0)
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
    folder = tmp_path_factory.mktemp("encoder")
    transformers.Dinov2Model(transformers.Dinov2Config(**config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A prepared folder of 24 colour images."""
    place = tmp_path_factory.mktemp("data")
    images = np.random.default_rng(0).integers(0, 255, (24, 16, 16, 3), dtype=np.uint8)
    np.savez(place / "source.npz", images=images, labels=np.arange(24) % 2)
    prepare(place / "source.npz", place / "prepared", size=16, workers=1, progress=False)
    return place / "prepared"


@pytest.fixture
def aligned(encoder, monkeypatch):
    """Recipes with REPA on 64 digits."""
    few = training_data(load_recipe("digits"))[:64]
    monkeypatch.setattr("mvm.training.loop.training_store", lambda recipe, device, _: Resident(few, device))
    network = {"network.depth": "2", "network.heads": "2", "network.width": "16", "network.patch": "4"}
    told = {"repa.encoder": str(encoder), "repa.resolution": "16", "repa.block": "1"}
    return lambda **more: override(load_recipe("digits"), {**network, **told, **COMMON, **named(more)})


@pytest.fixture
def decoding(encoder, pictures):
    """Recipes of a decoder; adversarial from the first step."""
    told = {"data.name": "folder", "data.path": str(pictures), "held_out.count": "4", "preview.every": "0"}
    told |= {"encoder.name": str(encoder), "encoder.layers": "1,2", "encoder.resolution": "16"}
    told |= {"decoder.size": "tiny", "decoder.patch": "4", "data.channels": "3", "data.size": "16", "data.classes": "2"}
    told |= {"reconstruction.lpips": "0", "reconstruction.encoder": str(encoder), "reconstruction.resolution": "16"}
    told |= {"reconstruction.disc_start": "0", "reconstruction.gan_start": "0"}
    return lambda **more: override(DecoderRecipe(name="tiny"), {**told, **COMMON, **named(more)})


def named(options):
    return {name.replace("__", "."): value for name, value in options.items()}


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_whole(run):
    """Every tensor of every checkpoint of the run is finite, and there is one."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    assert folders
    for folder in folders:
        for path in folder.glob("*.safetensors"):
            assert all(bool(value.isfinite().all()) for value in checkpoint.load(folder, path.stem).values()), path


def poison_features(monkeypatch, value, calls):
    """Spoil one feature of the teacher's answers with these numbers, counted from 0."""
    lookup, count = TensorBank.lookup, iter(range(1000))

    def spoiled(self, *args):
        found = lookup(self, *args)
        if next(count) in calls:
            found[0, 0, 0] = value
        return found

    monkeypatch.setattr(TensorBank, "lookup", spoiled)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss", ["cosine", "mse"])
@pytest.mark.parametrize("value", BAD)
def test_one_bad_feature_is_a_skipped_step(aligned, monkeypatch, tmp_path, optimizer, loss, value):
    poison_features(monkeypatch, value, {1, 2, 4})
    train(aligned(train__optimizer=optimizer, repa__loss=loss), tmp_path / "run", progress=False)
    assert [line["skipped"] for line in lines(tmp_path / "run")] == [0, 1, 2, 2, 3, 3, 3, 3]
    assert_whole(tmp_path / "run")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bad_features_three_times_stop_the_run(aligned, monkeypatch, tmp_path, optimizer):
    poison_features(monkeypatch, math.inf, {3, 4, 5})
    with pytest.raises(FloatingPointError, match="3 steps in a row, up to step 6"):
        train(aligned(train__optimizer=optimizer), tmp_path / "run", progress=False)
    assert checkpoint.latest(tmp_path / "run").name == "step-00000004"
    assert_whole(tmp_path / "run")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_exploding_rate_leaves_the_last_good_checkpoint(aligned, monkeypatch, tmp_path, optimizer):
    """The rate explodes on the way, so that there is something good to keep."""
    monkeypatch.setattr("mvm.training.trainer.learning_rate", lambda config, step: 1e-3 if step < 4 else 1e30)
    with pytest.raises(FloatingPointError, match=r"Try a lower --train\.lr"):
        train(aligned(train__optimizer=optimizer, train__steps="40"), tmp_path / "run", progress=False)
    assert_whole(tmp_path / "run")


# ---- the decoder's stage


def poison_batches(monkeypatch, value, steps):
    batch = DecoderTrainer.batch

    def spoiled(self):
        found = batch(self)
        if self.step in steps:
            found.latents[0] = value
        return found

    monkeypatch.setattr(DecoderTrainer, "batch", spoiled)


def state(trainer):
    return {
        **{f"decoder.{name}": value.clone() for name, value in trainer.decoder.state_dict().items()},
        **{f"state.{name}": value.clone() for name, value in trainer.optimizer_state()},
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("value", BAD)
def test_bad_latents_move_neither_decoder_nor_discriminator(decoding, monkeypatch, optimizer, norm, value):
    poison_batches(monkeypatch, value, {2})
    recipe = decoding(train__optimizer=optimizer, reconstruction__norm=norm)
    trainer = DecoderTrainer(recipe, training_store(recipe, torch.device("cpu")))
    for _ in range(2):
        trainer.advance()
    before = state(trainer)
    trainer.advance()
    assert [record.skipped for record in trainer.read()] == [False, False, True]
    after = state(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.endswith((".0._u", ".0._v")) for name in moved), moved  # spectral norms look at weights alone
    assert all(bool(value.isfinite().all()) for value in after.values())
    trainer.advance()
    assert not trainer.read()[0].skipped


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_decoder_run_stops_after_three_and_spares_its_checkpoint(decoding, monkeypatch, tmp_path, optimizer):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        poison_batches(patch, math.nan, {4, 5, 6})
        with pytest.raises(FloatingPointError, match="3 steps in a row, up to step 7"):
            train(decoding(train__optimizer=optimizer), run, progress=False)
    assert_whole(run)
    assert [line["skipped"] for line in lines(run)][-1] == 2  # the third stopped the run before its line
    train(decoding(train__optimizer=optimizer), run, progress=False, resume=True)
    assert lines(run)[-1]["step"] == 8
    assert_whole(run)
