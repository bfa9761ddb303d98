"""A latent model in a folder of its own: it samples without its encoder, and tells nothing of its machine."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import mvm
from mvm.data import open_prepared
from mvm.data.prepare import prepare
from mvm.generate import Sampler
from mvm.latent import load_decoder_only
from mvm.network import DDTConfig
from mvm.optim.optimizers import TrainConfig
from mvm.published import export, read_config
from mvm.recipes import CodecConfig, DataConfig, Recipe, SampleConfig
from mvm.training.loop import train


@pytest.fixture
def run(make_rae, encoders, tmp_path):
    """A run in the latents of an untrained decoder, on random pictures of two classes."""
    draw = np.random.default_rng(0)
    for number, image in enumerate(draw.integers(0, 256, (20, 16, 16, 3), np.uint8)):
        folder = tmp_path / "pictures" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    prepare(tmp_path / "pictures", tmp_path / "data", size=16, workers=1, progress=False)
    make_rae(encoders(layers="last-2"), open_prepared(tmp_path / "data").load().images).save(tmp_path / "rae")
    recipe = Recipe(
        name="latent",
        data=DataConfig("folder", str(tmp_path / "data"), channels=3, size=16, classes=2),
        codec=CodecConfig("rae", str(tmp_path / "rae"), channels=16, side=4),
        network=DDTConfig("tiny", depth=2, width=16, heads=2, head_width=32, head_heads=2),
        train=TrainConfig(steps=2, batch=8, lr=1e-2, warmup=0, ema=(0.5,), save_every=2),
        sample=SampleConfig(nfe=3),
    )
    train(recipe, tmp_path / "run", progress=False)
    return tmp_path / "run"


def drawn(model):
    seeds = torch.arange(4)
    return Sampler(model).images(seeds % 2, seeds, model.recipe.sample, progress=False).images


def test_round_trip_without_the_encoder(run, tmp_path, monkeypatch):
    there = mvm.load(run)
    export(run, tmp_path / "model", dtype="float32")
    (tmp_path / "rae").rename(tmp_path / "gone")
    (tmp_path / "data").rename(tmp_path / "gone-too")
    monkeypatch.setattr("mvm.latent.rae.load_latent_encoder", lambda *args: pytest.fail("opened the encoder"))
    (tmp_path / "model").rename(tmp_path / "moved")
    back = mvm.load(tmp_path / "moved")
    assert torch.equal(drawn(there), drawn(back))
    assert back.classes == ("cat", "dog")
    assert back.codec.identity == there.codec.identity
    with pytest.raises(ValueError, match=r"without its encoder .*: it decodes"):
        back.codec.encode(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    for path in (tmp_path / "moved").rglob("*"):
        assert path.is_dir() or str(tmp_path.parent).encode() not in path.read_bytes(), path
    card = (tmp_path / "moved" / "README.md").read_text()
    assert "Latents: 16x4x4, of the frozen encoder dinov2-0" in card


def test_half_precision_is_the_networks(run, tmp_path):
    export(run, tmp_path / "model")
    there, back = mvm.load(run), mvm.load(tmp_path / "model")
    for value in there.network.state_dict().values():
        value.copy_(value.half().float())
    assert torch.equal(drawn(there), drawn(back))


def test_a_codec_of_another_run_is_refused(run, tmp_path):
    folder, index = tmp_path / "model", tmp_path / "model" / "codec" / "rae.json"
    export(run, folder)
    whole = index.read_text()
    told = json.loads(whole)
    for change, reason in (
        ({"latent_shape": [16, 1 << 30, 1 << 30]}, "has latents and images"),
        ({"latent_shape": 3}, "is damaged"),
        ({"decoder": {**told["decoder"], "patch": 1 << 30}}, "has latents and images"),
        ({"decoder": {**told["decoder"], "size": "XL"}}, "does not fit"),
        ({"decoder": [1]}, "is damaged"),
        ({"encoder": {**told["encoder"], "evil": 1}}, "is damaged"),
        ({"statistics": None}, "no latent statistics"),
        ({"statistics": {"fingerprint": "0"}}, "has the fingerprint"),
    ):
        index.write_text(json.dumps({**told, **change}))
        with pytest.raises(ValueError, match=reason):
            mvm.load(folder)
    index.write_text(whole)
    config = folder / "config.json"
    config.write_text(config.read_text().replace(read_config(folder).source.codec, "0" * 64))
    with pytest.raises(ValueError, match="was trained in latents of fingerprint 000000000000"):
        mvm.load(folder)
    (folder / "codec" / "decoder.safetensors").unlink()
    with pytest.raises(ValueError, match=r"decoder\.safetensors is missing"):
        mvm.load(folder)


def test_an_autoencoder_that_is_not_the_runs(run, tmp_path):
    """Other statistics than it was trained with: nothing is written."""
    codec = load_decoder_only(run / "codec")
    codec.statistics.mean += 1
    codec.save(run / "codec")
    with pytest.raises(ValueError, match="restore the autoencoder it was trained with"):
        export(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()
