"""The adapter of diffusers' VAEs: with a stand-in that has their interface, and with small ones of diffusers."""

import builtins
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mvm
from mvm import noise
from mvm.cli import run
from mvm.data.prepare import prepare
from mvm.latent import VAE, load_vae
from mvm.latent.vae import CONFIG, WEIGHTS, image_seeds
from mvm.network import DiTConfig
from mvm.optim.optimizers import TrainConfig
from mvm.published import export
from mvm.recipes import CodecConfig, DataConfig, Recipe, SampleConfig
from mvm.training.loop import train


class Stub(nn.Module):
    """Two by two pixels of three colours are a latent of twelve channels; the posterior is never sampled."""

    def __init__(self, shift=0.5):
        super().__init__()
        self.config = SimpleNamespace(
            scaling_factor=0.25, shift_factor=shift, block_out_channels=(8, 8), latent_channels=12
        )
        self.gain = nn.Parameter(torch.tensor(2.0))

    def encode(self, x):
        latents = self.gain * nn.functional.pixel_unshuffle(x, 2)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents, sample=lambda: pytest.fail("random")))

    def decode(self, z):
        return SimpleNamespace(sample=nn.functional.pixel_shuffle(z / self.gain, 2))


@pytest.mark.parametrize(("given", "shift"), [(0.5, 0.5), (None, 0.0)])
def test_there_and_back(images, given, shift):
    vae = VAE(Stub(given), 16)
    assert vae.latent_shape == (12, 8, 8)
    latents = vae.encode(images)
    plain = nn.functional.pixel_unshuffle(images / 127.5 - 1, 2)
    assert torch.allclose(latents, (2 * plain - shift) * 0.25, atol=1e-6)
    assert torch.equal(vae.decode(latents), images)
    assert not vae.train().training
    assert not latents.requires_grad


def test_fingerprint_and_size():
    assert VAE(Stub(), 16).fingerprint != VAE(Stub(None), 16).fingerprint
    with pytest.raises(ValueError, match="size=15 does not suit this VAE; it must be a multiple of 2"):
        VAE(Stub(), 15)


def test_missing_package(monkeypatch):
    real = builtins.__import__

    def refuse(wanted, *rest, **named):
        if wanted.partition(".")[0] == "diffusers":
            raise ImportError(wanted)
        return real(wanted, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"load_vae\(folder='x/y'\) needs diffusers; install"):
        load_vae("x/y", 16)


SMALL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 3,
    "block_out_channels": (4, 8), "norm_num_groups": 2, "layers_per_block": 1, "scaling_factor": 0.5,
}  # fmt: skip


def make(**changes):
    diffusers = pytest.importorskip("diffusers", reason="needs mean-velocity-matching[diffusers]")
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(**{**SMALL, **changes}).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small VAE with random weights, as diffusers writes one; not to be changed."""
    found = tmp_path_factory.mktemp("vae")
    make(shift_factor=0.1).save_pretrained(found)
    return found


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of it, to be changed at will."""
    (tmp_path / "vae").mkdir()
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "vae" / name).write_bytes((folder / name).read_bytes())
    return tmp_path / "vae"


def change(folder, **values):
    table = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**table, **values}))


@torch.no_grad()
def test_a_folder_is_what_diffusers_reads(folder, images):
    network, vae = make(shift_factor=0.1), load_vae(folder, 16)
    z = network.encode(images / 127.5 - 1).latent_dist.mean
    assert torch.allclose(vae.encode(images), (z - 0.1) * 0.5, atol=1e-6)
    shown = ((network.decode(z).sample.clamp(-1, 1) + 1) * 127.5).round()
    assert (vae.decode((z - 0.1) * 0.5) - shown).abs().max() <= 1
    assert (vae.latent_shape, vae.image_shape) == ((3, 8, 8), (3, 16, 16))
    assert load_vae(folder, 16).fingerprint == vae.fingerprint == vae.identity["codec"]


def test_names_of_before_2023(folder, copied, images):
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(folder / WEIGHTS)
    for name in list(state):
        for today, before in names.items():
            if f".attentions.0.{today}." in name:
                value = state.pop(name)
                value = value[..., None, None] if value.ndim == 2 and today == "to_q" else value
                state[name.replace(today, before)] = value.contiguous()
    assert sum("proj_attn" in name for name in state) == 4
    save_file(state, copied / WEIGHTS)
    assert torch.equal(load_vae(copied, 16).encode(images), load_vae(folder, 16).encode(images))


@torch.no_grad()
def test_factors_of_single_channels(copied, images):
    mean, std = [0.1, 0.2, 0.3], [1.0, 2.0, 4.0]
    change(copied, latents_mean=mean, latents_std=std, shift_factor=None)
    vae, plain = load_vae(copied, 16), load_vae(copied, 16).network.encode(images / 127.5 - 1).latent_dist.mean
    wanted = (plain - torch.tensor(mean)[:, None, None]) * 0.5 / torch.tensor(std)[:, None, None]
    assert torch.allclose(vae.encode(images), wanted, atol=1e-6)
    assert torch.allclose(vae.decode(vae.encode(images)).float(), vae.decode(wanted).float(), atol=1)
    shown = vae.network.decode(plain).sample
    assert (vae.decode(wanted) - ((shown.clamp(-1, 1) + 1) * 127.5).round()).abs().max() <= 1


def test_a_draw_from_the_posterior_is_the_images_own(folder, images):
    drawn, mean = load_vae(folder, 16, "draw"), load_vae(folder, 16)
    z = drawn.encode(images)
    assert torch.allclose(drawn.encode(images[3:5]), z[3:5], atol=1e-6)  # whatever the batch
    assert torch.equal(z, drawn.encode(images))
    std = mean.network.encode(images / 127.5 - 1).latent_dist.std
    standard = (z - mean.encode(images)) / (0.5 * std)
    assert torch.allclose(standard, noise.normal(image_seeds(images), noise.TRAIN, (3, 8, 8)), atol=1e-4)
    assert abs(float(standard.mean())) < 0.1
    assert abs(float(standard.std()) - 1) < 0.1
    assert drawn.fingerprint != mean.fingerprint
    seeds = image_seeds(torch.randint(0, 2, (5000, 1, 4, 4), generator=torch.Generator().manual_seed(0)).byte())
    assert int(seeds.min()) >= 0
    assert len(seeds.unique()) > 4500  # 2^16 pictures: 5000 draws have 190 twice
    with pytest.raises(ValueError, match=r"codec\.posterior='median' is unknown"):
        load_vae(folder, 16, "median")


def test_not_a_hub_name_and_no_pickle(folder, copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("stabilityai/sd-vae-ft-ema", tmp_path / "none"):
        with pytest.raises(ValueError, match=r"holds no VAE; a local folder with config\.json"):
            load_vae(name, 16)
    (copied / WEIGHTS).rename(copied / "diffusion_pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no VAE"):
        load_vae(copied, 16)


BIG = 1 << 40


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"_class_name": "EvilVAE"}, "_class_name is EvilVAE"),
        ({"layers_per_block": BIG}, "layers_per_block=1099511627776"),
        ({"block_out_channels": [4] * 1000}, "block_out_channels="),
        ({"block_out_channels": [4, BIG]}, "holds no VAE"),
        ({"latent_channels": BIG}, "holds no VAE"),
        ({"latent_channels": 4}, "missing, left over, or of another shape"),
        ({"down_block_types": ["os.system", "x"]}, "holds no VAE"),
        ({"act_fn": {"import": "os"}}, "act_fn=.* is no plain value"),
        ({"scaling_factor": "1"}, "scaling_factor=1"),
        ({"scaling_factor": float("nan")}, "scaling_factor=nan"),
        ({"scaling_factor": 0}, "scaling_factor=0"),
        ({"scaling_factor": 10**400}, "scaling_factor=1000"),
        ({"scaling_factor": None}, "scaling_factor=None"),
        ({"shift_factor": -(10**400)}, "shift_factor=-1000"),
        ({"latents_mean": [0.0] * 3, "latents_std": [1e300] * 3}, r"latents_std=\[1e\+300"),
        ({"latents_mean": [0.0]}, "latents_mean has 1 numbers"),
    ],
)
def test_hostile_configs(copied, values, reason):
    change(copied, **values)
    with pytest.raises(ValueError, match=reason):
        load_vae(copied, 16)


def test_what_a_config_says_besides_is_not_obeyed(copied, images, monkeypatch):
    before = load_vae(copied, 16).encode(images)
    change(copied, auto_map={"AutoModel": "x.y"}, quantization_config={"quant_method": "x"}, _name_or_path="a/b")
    assert torch.equal(load_vae(copied, 16).encode(images), before)


@pytest.fixture
def recipe(folder, tmp_path):
    """A tiny recipe on the VAE's latents of random pictures."""
    draw = np.random.default_rng(0)
    pictures = draw.integers(0, 256, (12, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "raw.npz", images=pictures, labels=np.arange(12) % 2)
    prepare(tmp_path / "raw.npz", tmp_path / "data", size=16, workers=1, progress=False)
    return Recipe(
        name="vae",
        data=DataConfig("folder", str(tmp_path / "data"), channels=3, size=16, classes=2),
        codec=CodecConfig("vae", str(folder), channels=3, side=8),
        network=DiTConfig("tiny", patch=4, depth=1, width=16, heads=2),
        train=TrainConfig(steps=2, batch=4, lr=1e-2, warmup=0, ema=(0.5,), save_every=2),
        sample=SampleConfig(nfe=2),
    )


def test_a_run_in_its_latents(recipe, folder, tmp_path):
    """Recipe, cached latents, samples, export: the folder brings the VAE."""
    train(recipe, tmp_path / "run", progress=False)
    (cache,) = [path for path in tmp_path.iterdir() if "latents" in path.name]
    assert cache.name.startswith("data-latents-")
    there = mvm.load(tmp_path / "run")
    assert there.origin["codec"] == load_vae(folder, 16).fingerprint
    images = there.generate(2, progress=False).images
    assert images.shape == (2, 3, 16, 16)
    export(tmp_path / "run", tmp_path / "model", dtype="float32")
    back = mvm.load(tmp_path / "model")
    assert back.recipe.codec.path == ""
    assert torch.equal(back.generate(2, progress=False).images, images)
    change(tmp_path / "model" / "codec", scaling_factor=0.25)
    with pytest.raises(ValueError, match="was trained in latents of fingerprint"):
        mvm.load(tmp_path / "model")
    export(tmp_path / "run", tmp_path / "other")
    (tmp_path / "other" / "codec" / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="holds no VAE"):
        mvm.load(tmp_path / "other")


def test_a_vae_of_another_shape_is_refused(recipe, tmp_path, capsys):
    make(latent_channels=4).save_pretrained(tmp_path / "four")
    text = {"codec.path": str(tmp_path / "four")}
    from mvm.recipes import override

    with pytest.raises(ValueError, match=r"makes latents \(4, 8, 8\), the recipe has \(3, 8, 8\)"):
        train(override(recipe, text), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"codec\.kind='vae' needs codec\.path"):
        train(override(recipe, {"codec.path": ""}), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"codec\.scale=2\.0 is for pixels"):
        override(recipe, {"codec.scale": "2"})


def test_a_converted_sit_with_its_vae(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "published")
    import layouts

    state = layouts.sit_state(channels=4, dtype=torch.float32, width=384, depth=1)
    torch.save(state, tmp_path / "sit.pt")
    changes = {"latent_channels": 4, "block_out_channels": (4,) * 4}
    changes |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    make(**changes).save_pretrained(tmp_path / "eight")
    (tmp_path / "eight" / WEIGHTS).rename(tmp_path / "eight" / "moved")
    (tmp_path / "eight" / WEIGHTS).symlink_to("moved")  # as the hub's cache has it: the user's own folder
    model = mvm.load(f"sit:{tmp_path / 'sit.pt'}", codec=tmp_path / "eight")
    images = model.generate(2, nfe=2, progress=False).images
    assert images.shape == (2, 3, 64, 64)
    command = ["convert", str(tmp_path / "sit.pt"), "--as", "sit", "--codec", str(tmp_path / "eight")]
    assert run([*command, "--out", str(tmp_path / "model")]) == 0
    assert "sample: mvm sample" in capsys.readouterr().out
    (tmp_path / "eight").rename(tmp_path / "gone")
    assert torch.equal(mvm.load(tmp_path / "model").generate(2, nfe=2, progress=False).images, images)
    weights = tmp_path / "model" / "codec" / WEIGHTS
    weights.unlink()
    weights.symlink_to(tmp_path / "gone" / "moved")
    with pytest.raises(ValueError, match="is a link that leads out of the folder"):
        mvm.load(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has latents and images|makes latents"):
        mvm.load(f"sit:{tmp_path / 'sit.pt'}", codec=folder)
