"""Published checkpoints as our models: the same numbers as the published forward pass, sampled by our solvers."""

import argparse
import json
import pickle
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import layouts
import pytest
import torch
from safetensors.torch import save_file

import mvm
from mvm import noise
from mvm.cli import run
from mvm.network import build_network
from mvm.path import LinearFlow, VariancePreserving
from mvm.path.betas import ddpm
from mvm.published.foreign import (
    FORMATS,
    HEADS,
    ForeignTensors,
    Options,
    convert,
    convert_decoder,
    read_tensors,
    state_dict_in,
)
from mvm.solver import Heun
from mvm.solver.guidance import ClassifierFree, Internal


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """The width of the tiny networks here is known too, so that a file alone can be loaded."""
    monkeypatch.setitem(HEADS, 16, 2)


def write(path, state, **around):
    """A file of torch's, in float32; around: what a training script keeps beside the weights."""
    state = {name: value.float() for name, value in state.items()}
    torch.save({"ema": state, **around} if around else state, path)
    return path


def converted(format, state, **options):
    """The network in float64, and what was found."""
    found = FORMATS[format].convert(ForeignTensors(state, "'x'"), Options(**options))
    network = build_network(found.network, found.shape, found.classes).double()
    network.load_state_dict(found.weights)
    return network.eval().requires_grad_(False), found


def inputs(shape, times=(0.1, 0.37, 0.9)):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x, torch.tensor(times, dtype=torch.float64), torch.tensor([0, 3, 5])  # 5: the null class


# format, state dict, published forward pass, and the sign of its velocity beside ours
CASES = {
    "sit": ("sit", layouts.sit_state(), layouts.sit, -1),
    "sit, velocity alone": ("sit", layouts.sit_state(sigma=False, patch=1, channels=3), layouts.sit, -1),
    "dit": ("dit", layouts.sit_state(), layouts.sit, 1),
    "repa": ("repa", layouts.sit_state(sigma=False, projectors=True), layouts.sit, 1),
    "lightningdit": ("lightningdit", layouts.lightning_state(), layouts.lightning, -1),
    "lightningdit, patches": ("lightningdit", layouts.lightning_state(patch=2), layouts.lightning, -1),
    "rae": ("rae", layouts.rae_state(), layouts.rae, 1),
    "rae, one width": ("rae", layouts.rae_state(widths=(16, 16)), layouts.rae, 1),
    "rae without a wide head": ("rae", layouts.lightning_state(fourier=True), layouts.lightning, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_network_gives_what_the_published_one_gives(case):
    format, state, published, sign = CASES[case]
    network, found = converted(format, dict(state))
    x, t, y = inputs(found.shape, (3.5, 300, 999) if format == "dit" else (0.1, 0.37, 0.9))
    wanted = published(state, x, t, y)
    assert wanted.abs().max() > 1  # nothing is compared with zeros
    assert (sign * network(x, t, y).prediction - wanted).abs().max() < 1e-11
    if published is not layouts.sit:  # beside tables of positions that are not rounded
        assert (sign * network(x, t, y).prediction - published(state, x, t, y, tables=torch.float64)).abs().max() < 2e-5


def test_raev2_with_its_inner_head():
    state = layouts.raev2_state()
    network, found = converted("raev2", dict(state), inner_block=2)
    x, t, y = inputs(found.shape)
    wanted, inner = layouts.raev2(state, x, t, y)
    output = network(x, t, y)
    assert (output.prediction - wanted).abs().max() < 1e-11
    assert (output.inner - inner).abs().max() < 1e-11
    exact, _ = layouts.raev2(state, x, t, y, tables=torch.float64)
    assert (output.prediction - exact).abs().max() < 2e-5
    assert converted("raev2", layouts.raev2_state(inner=False))[0].inner_head is None


@pytest.mark.parametrize("changed", ["blocks.1.norm1.weight", "blocks.0.attn.proj.bias", "t_embedder.W"])
def test_parity_sees_every_tensor(changed):
    """The comparison above is no empty one: a tensor that is changed a little changes both alike."""
    state = layouts.rae_state()
    before = converted("rae", dict(state))
    state[changed] = state[changed] + 0.1
    network, found = converted("rae", dict(state))
    x, t, y = inputs(found.shape)
    assert (network(x, t, y).prediction - before[0](x, t, y).prediction).abs().max() > 1e-4
    assert (network(x, t, y).prediction - layouts.rae(state, x, t, y)).abs().max() < 1e-11


@pytest.mark.parametrize("format", ["rae", "raev2"])
def test_decoders(format, tmp_path):
    scaling = {"mean": (0.485, 0.456, 0.406), "deviation": (0.229, 0.224, 0.225)} if format == "rae" else {}
    state = layouts.decoder_state(dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    stats = {name: torch.rand(16, 4, 4, generator=generator) + 0.5 for name in ("mean", "var")}
    torch.save(stats, tmp_path / "stats.pt")
    codec = convert_decoder(format, write(tmp_path / "decoder.pt", state), stats=tmp_path / "stats.pt")
    z = torch.randn(2, 16, 4, 4, generator=generator)
    latents = (z * (stats["var"] + 1e-5).sqrt() + stats["mean"]).double()
    wanted = layouts.decoder({name: value.double() for name, value in state.items()}, latents, **scaling)
    found = codec.decoder.double()(latents)
    assert ((found + 1) / 2 - wanted).abs().max() < 2e-6  # weights in float32
    codec.decoder.float()
    codec.save(tmp_path / "rae")
    back = mvm.latent.load_decoder_only(tmp_path / "rae")
    assert torch.equal(back.decode(z), codec.decode(z))
    pixels = (wanted.clamp(0, 1) * 255).round()
    assert (back.decode(z).double() - pixels).abs().max() <= 1
    whole = {f"decoder.{name}": value for name, value in state.items()} | {"encoder.x": torch.zeros(2)}
    other = convert_decoder(format, write(tmp_path / "whole.pt", whole, step=1), stats=tmp_path / "stats.pt")
    assert torch.equal(other.decode(z), codec.decode(z))


def test_a_decoder_of_diffusers(tmp_path):
    """diffusers has the decoder too: its files are read, and its own forward pass is met."""
    found = pytest.importorskip("diffusers.models.autoencoders.autoencoder_rae", reason="needs a later diffusers")
    shape = {"decoder_hidden_size": 64, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4}
    other = found.RAEDecoder(
        16, **shape, decoder_intermediate_size=128, num_patches=256, patch_size=2, image_size=32
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    mean, std = (torch.rand(1, 16, 16, 16, generator=generator) + 0.5 for _ in range(2))
    scaling = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)
    state = {f"decoder.{name}": value for name, value in other.state_dict().items()}
    state |= {"_latents_mean": mean, "_latents_std": std, "encoder_mean": scaling[0], "encoder_std": scaling[1]}
    save_file({**state, "encoder.x": torch.zeros(3)}, tmp_path / "model.safetensors")
    codec = convert_decoder("rae", tmp_path / "model.safetensors")
    z = torch.randn(2, 16, 16, 16, generator=generator)
    with torch.no_grad():
        patches = other((z * (std + 1e-5) + mean).flatten(2).transpose(1, 2)).logits
    wanted = layouts.unpatched(patches, 2, 3) * scaling[1] + scaling[0]
    found_images = (codec.decode_float(z) + 1) / 2
    assert (found_images - wanted).abs().max() < 1e-5
    for change in ({"_latents_mean": torch.zeros(1)}, {"_latents_mean": torch.zeros(16, 8, 8)}):
        save_file({**state, **change}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"'_latents_mean' has shape .*; statistics of 16x16 latents are needed"):
            convert_decoder("rae", tmp_path / "model.safetensors")


# --- sampling -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sit(tmp_path):
    """A file of a SiT on 8 x 8 latents of 4 channels, and its state dict."""
    state = layouts.sit_state()
    return write(tmp_path / "SiT-tiny.pt", state), {name: value.float().double() for name, value in state.items()}


def published_ode(velocity, x, steps, first=0.0, last=1.0):
    """Heun's method on dx/dt = velocity(x, t) from first to last."""
    times = torch.linspace(first, last, steps + 1, dtype=torch.float64)
    for t, after in pairwise(times):
        here = velocity(x, t)
        there = velocity(x + (after - t) * here, after)
        x = x + (after - t) * (here + there) / 2
    return x


@pytest.mark.parametrize("format", ["sit", "repa"])
def test_a_sample_is_the_published_ode(sit, format):
    """Our solvers on the converted model end where Heun's method on the published velocity ends."""
    path, state = sit
    model = mvm.load(f"{format}:{path}")
    model.network.double()
    assert model.schedule == LinearFlow()
    labels, x = torch.tensor([1, 4]), noise.initial(torch.arange(2), model.sample_shape).double()
    ends = (0.0, 1.0) if format == "sit" else (1.0, 0.0)  # from noise to data
    wanted = published_ode(lambda x, t: layouts.sit(state, x, t.expand(2), labels), x, 400, *ends)
    ours = {nfe: mvm.sample(model, x, nfe=nfe, condition=labels) for nfe in (32, 64, 128)}
    ours["heun"] = mvm.sample(model, x, solver=Heun(), nfe=256, condition=labels)
    assert wanted.std() > 0.5
    for nfe, bound in ((32, 6e-3), (64, 4e-4), (128, 1e-4)):  # of which 5e-5 is Heun's
        assert (ours[nfe] - wanted).abs().max() < bound
    assert (ours["heun"] - wanted).abs().max() < 4e-3


def test_guidance_is_the_published_one(sit):
    path, state = sit
    model = mvm.load(f"sit:{path}")
    model.network.double()
    labels, x = torch.tensor([1, 4]), noise.initial(torch.arange(2), model.sample_shape).double()

    def guided(x, t):
        t = t.expand(2)
        null, conditional = layouts.sit(state, x, t, torch.full((2,), 5)), layouts.sit(state, x, t, labels)
        return null + 1.5 * (conditional - null)

    found = mvm.sample(model, x, nfe=128, condition=labels, guidance=ClassifierFree(1.5))
    assert (found - published_ode(guided, x, 400)).abs().max() < 2e-4


def test_dit_predicts_noise_at_its_training_steps(tmp_path):
    state = layouts.sit_state()
    model = mvm.load(f"dit:{write(tmp_path / 'dit.pt', state)}")
    model.network.double()
    assert model.schedule == VariancePreserving()
    steps = torch.tensor([3.0, 300.0, 990.0], dtype=torch.float64)
    square = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)[steps.long()]
    t = model.schedule.t_from_lam(0.5 * torch.log(square / (1 - square)))
    assert torch.allclose(ddpm().timestep(ddpm().t_from_lam(model.schedule.lam(t))), steps, atol=1e-9, rtol=0)
    x, _, y = inputs(model.sample_shape)
    eps = layouts.sit({name: value.float().double() for name, value in state.items()}, x, steps, y)
    alpha, sigma = (value.sqrt()[:, None, None, None] for value in (square, 1 - square))
    assert ((model(x, t, y) - (x - sigma * eps) / alpha) * alpha).abs().max() < 1e-5  # sinusoids of steps in float32


def test_raev2_samples_with_internal_guidance(tmp_path):
    path = write(tmp_path / "x.pt", layouts.raev2_state(depths=(9, 2)))
    model = mvm.load(f"raev2:{path}")
    assert (model.recipe.objective.kind, model.recipe.network.inner_block) == ("x0", 8)
    x, t, y = inputs(model.sample_shape)
    outer, inner = model.pair(x.float(), t, y)
    assert not torch.equal(outer, inner)
    guided = mvm.sample(model, x.float(), nfe=3, condition=y // 2, guidance=Internal(1.78))
    assert guided.isfinite().all()


# --- files --------------------------------------------------------------------------------------------------------


def test_recipes_say_what_files_show(tmp_path):
    recipe = mvm.load(f"sit:{write(tmp_path / 'a b;c.pt', layouts.sit_state())}").recipe
    assert (recipe.name, recipe.sample_shape, recipe.data.shape) == ("a-b-c", (4, 8, 8), (3, 64, 64))
    assert (recipe.codec.kind, recipe.network.dimensions, len(recipe.data.class_names)) == ("vae", (2, 16, 2), 5)
    assert recipe.objective.has_null
    recipe = convert("repa", write(tmp_path / "r.pt", layouts.sit_state(classes=1000, side=16, sigma=False))).recipe
    assert (recipe.data.name, recipe.codec.side) == ("imagenet256", 32)
    pixels = mvm.load(f"sit:{write(tmp_path / 'p.pt', layouts.sit_state(channels=3))}")
    assert pixels.recipe.codec.kind == "pixels"
    assert pixels.generate(2, nfe=2, classes=[0, 1], progress=False).images.shape == (2, 3, 8, 8)
    without = convert("sit", tmp_path / "p.pt", options=Options(classes=6)).recipe
    assert (without.objective.has_null, len(without.data.class_names)) == (False, 6)


def test_files_of_training_scripts(tmp_path):
    state = layouts.sit_state(dtype=torch.float32)
    raw = {f"module._orig_mod.{name}": value + 1 for name, value in state.items()}
    path = write(tmp_path / "x.pt", state, model=raw, opt={"state": {}}, args=argparse.Namespace(lr=1e-4), step=7)
    assert torch.equal(read_tensors(path)["pos_embed"], state["pos_embed"])
    assert torch.equal(read_tensors(path, "model")["pos_embed"], state["pos_embed"] + 1)
    save_file(state, tmp_path / "x.safetensors")
    a, b = (convert("sit", tmp_path / name) for name in ("x.pt", "x.safetensors"))
    assert all(torch.equal(a.weights[name], value) for name, value in b.weights.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_in_half_precision(tmp_path, dtype):
    state = layouts.lightning_state(dtype=dtype)
    save_file(state, tmp_path / "x.safetensors")
    found = convert("lightningdit", tmp_path / "x.safetensors")
    assert all(value.dtype == torch.float32 for value in found.weights.values())
    assert torch.equal(found.weights["label.weight"], state["y_embedder.embedding_table.weight"].float())
    # 8 bits, which torch promotes to nothing
    state["y_embedder.embedding_table.weight"] = table = torch.full_like(
        state["y_embedder.embedding_table.weight"], 0.125
    ).to(torch.float8_e4m3fn)
    torch.save(state, tmp_path / "x.pt")
    assert torch.equal(convert("lightningdit", tmp_path / "x.pt").weights["label.weight"], table.float())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.update(pos_embed=s["pos_embed"] * float("nan")), "'pos_embed' is not the published table"),
        (lambda s: s.pop("blocks.1.mlp.fc1.weight"), r"'blocks\.1\.mlp\.fc1\.weight' is missing; is it of another"),
        (lambda s: s.pop("pos_embed"), "'pos_embed' is missing"),
        (lambda s: s.update({"blocks.0.attn.q_norm.weight": torch.ones(8)}), r"1 tensors belong to no .*q_norm"),
        (lambda s: s.update(pos_embed=s["pos_embed"] + 1e-3), "'pos_embed' is not the published table"),
        (lambda s: s.update(pos_embed=s["pos_embed"][:, :3]), "3 tokens are no square"),
        (lambda s: s.update({"x_embedder.proj.bias": torch.ones(3)}), r"has shape \(3,\), not \(16,\)"),
        (lambda s: s.update({"final_layer.linear.weight": torch.ones(7, 16)}), "gives 7 numbers a patch of 4x2x2"),
        (lambda s: s.update({"blocks.5.mlp.fc1.weight": torch.ones(64, 16)}), r"'blocks\.2\..*is missing"),
    ],
)
def test_other_networks_are_refused(tmp_path, change, reason):
    state = layouts.sit_state(dtype=torch.float32)
    change(state)
    with pytest.raises(ValueError, match=reason):
        convert("sit", write(tmp_path / "x.pt", state))


def spoilt(state):
    """Every tensor of a state dict in turn: missing, with an axis more, longer, empty, flat, or a single number."""
    for name, value in state.items():
        yield name, {key: each for key, each in state.items() if key != name}
        for other in (value[None], torch.cat((value, value[:1])), value[:0], value.reshape(-1), torch.zeros(())):
            if other.shape != value.shape:
                yield name, {**state, name: other}


@pytest.mark.parametrize("case", [*CASES, "raev2"])
def test_no_wrong_shape_gets_through(case):
    """Whatever tensor is wrong, it is refused in words, here or where the network is built: none is broadcast."""
    format, state = CASES[case][:2] if case in CASES else ("raev2", layouts.raev2_state())
    classes = {} if case == "raev2" else {"classes": 5}  # else a longer table of labels is one of more classes
    kept = {name: value for name, value in state.items() if not name.startswith("projectors")}
    tried = 0
    for name, wrong in spoilt(kept):
        if "embedding_table" in name and not classes:
            continue
        tried += 1
        with pytest.raises((ValueError, RuntimeError), match=r"'x'|network\.|Error\(s\) in loading"):
            converted(format, wrong, heads=2, inner_block=1, **classes)
    assert tried > 100


def test_no_wrong_decoder_gets_through(tmp_path):
    state = {name: value.float() for name, value in layouts.decoder_state(depth=2).items()}
    for _, wrong in spoilt(state):
        torch.save(wrong, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=r"x\.pt"):
            convert_decoder("rae", tmp_path / "x.pt")


def test_other_formats_and_options_are_refused(tmp_path):
    sit, light = write(tmp_path / "s.pt", layouts.sit_state()), write(tmp_path / "l.pt", layouts.lightning_state())
    with pytest.raises(ValueError, match=r"'feat_rope\.freqs_cos' is missing; is it of another format"):
        convert("lightningdit", sit)
    with pytest.raises(ValueError, match="is missing; is it of another format"):
        convert("sit", light)
    with pytest.raises(ValueError, match="time is embedded as in another format"):
        convert("lightningdit", write(tmp_path / "f.pt", layouts.lightning_state(fourier=True)))
    with pytest.raises(
        ValueError, match=r"heads=0: a file .* width 32 is not published \(384, .*\); give them: mvm convert"
    ):
        convert("sit", write(tmp_path / "w.pt", layouts.sit_state(width=32)))
    with pytest.raises(ValueError, match=r"classes=9: .* has 6 rows of labels"):
        convert("sit", sit, options=Options(classes=9))
    with pytest.raises(ValueError, match="format='unet' is unknown"):
        convert("unet", sit)
    with pytest.raises(ValueError, match="FORMAT:FILE"):
        mvm.load("unet:x.pt")
    with pytest.raises(ValueError, match=r"'none\.pt' is no file"):
        mvm.load("sit:none.pt")
    with pytest.raises(ValueError, match="checkpoint='3'"):
        mvm.load(f"sit:{sit}", which="3")
    with pytest.raises(ValueError, match="is a decoder"):
        convert("rae", write(tmp_path / "d.pt", layouts.decoder_state()))
    with pytest.raises(ValueError, match="use --as rae or --as raev2"):
        convert_decoder("sit", tmp_path / "d.pt")
    with pytest.raises(ValueError, match="has no mean and var of latents"):
        convert_decoder("rae", tmp_path / "d.pt", stats=sit)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("went-off"),))


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = layouts.sit_state(dtype=torch.float32)
    torch.save({"ema": state, "args": Bomb()}, "zip.pt")
    Path("plain.ckpt").write_bytes(pickle.dumps({"ema": Bomb()}, protocol=2))
    torch.save({"ema": state, "args": argparse.Namespace(lr=subprocess.Popen)}, "named.pt")
    torch.save(Bomb(), "old.pth", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "plain.ckpt", "named.pt", "old.pth"):
        with pytest.raises(ValueError, match=f"'{name}' is no whole file of weights alone"):
            mvm.load(f"sit:{name}")
    assert not Path("went-off").exists()


def test_files_that_declare_more_than_they_hold(tmp_path):
    state = layouts.sit_state(dtype=torch.float32)
    state["pos_embed"] = torch.zeros(1).expand(1, 1 << 20, 1 << 20)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="something other than named tensors"):
        convert("sit", tmp_path / "x.pt")
    (tmp_path / "x.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"is no whole (safetensors )?file"):
        convert("sit", tmp_path / "x.safetensors")
    for found in ([], {}, {"a": 1}, {"ema": {}}, {"ema": {1: torch.ones(1)}}):
        with pytest.raises(ValueError, match="something other than named tensors"):
            state_dict_in(found, "x")


# --- folders ------------------------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_convert_writes_a_folder_that_load_opens(sit, tmp_path, capsys):
    path, _ = sit
    assert run(["convert", str(path), "--as", "sit", "--out", str(tmp_path / "model"), "--license", "mit"]) == 0
    assert "makes latents (4, 8, 8) alone; give their autoencoder with --codec" in capsys.readouterr().out
    folder = tmp_path / "model"
    assert names(folder) == ["README.md", "config.json", "model.safetensors"]
    there, back = mvm.load(f"sit:{path}"), mvm.load(folder)
    assert back.recipe == there.recipe
    assert back.origin["sha256"] != there.origin["sha256"]
    assert all(torch.equal(back.network.state_dict()[n], v) for n, v in there.network.state_dict().items())
    assert "Converted from weights of another project" in (folder / "README.md").read_text()
    x = noise.initial(torch.arange(2), back.sample_shape)
    assert torch.equal(*(mvm.sample(m, x, nfe=2, condition=torch.tensor([0, 1])) for m in (there, back)))
    with pytest.raises(ValueError, match=r"came without its autoencoder; give its folder: mvm\.load\(\.\.\., codec="):
        back.generate(1, nfe=1, progress=False)
    assert run(["sample", str(folder), "--num", "1", "--out", str(tmp_path / "x.png")]) == 2
    assert "codec=FOLDER" in capsys.readouterr().err
    (tmp_path / "model" / "x.pkl").write_text("x")
    with pytest.raises(ValueError, match="may hold pickled code"):
        mvm.load(folder)


def test_a_rae_in_two_files(tmp_path, capsys):
    decoder = write(tmp_path / "decoder.pt", layouts.decoder_state(channels=8))
    stage2 = write(tmp_path / "stage2.pt", layouts.rae_state())
    assert run(["convert", str(decoder), "--as", "rae", "--encoder", "dinov2", "--out", str(tmp_path / "rae")]) == 0
    convert_stage2 = ["convert", str(stage2), "--as", "rae", "--out", str(tmp_path / "m"), "--codec"]
    assert run([*convert_stage2, str(tmp_path / "rae")]) == 2
    assert "has latents and images ((8, 4, 4), (3, 16, 16)), the recipe" in capsys.readouterr().err
    decoder = write(tmp_path / "decoder.pt", layouts.decoder_state(channels=8, patch=16))
    assert run(["convert", str(decoder), "--as", "rae", "--out", str(tmp_path / "rae16")]) == 0
    assert run([*convert_stage2, str(tmp_path / "rae16")]) == 0
    assert [name for name in names(tmp_path / "m") if "codec" in name] == [
        f"codec/{name}" for name in ("decoder.safetensors", "rae.json", "statistics.safetensors")
    ]
    assert mvm.load(tmp_path / "m").generate(2, nfe=2, progress=False).images.shape == (2, 3, 64, 64)


@pytest.mark.parametrize(
    ("option", "value"),
    [("path", "/etc"), ("path", "../vae"), ("path", "stabilityai/sd-vae-ft-ema"), ("encoder", "facebook/dinov2"),
     ("latents", "/tmp")],
)  # fmt: skip
def test_a_folder_names_no_other(sit, tmp_path, option, value):
    path, _ = sit
    run(["convert", str(path), "--as", "sit", "--out", str(tmp_path / "model")])
    config = tmp_path / "model" / "config.json"
    table = json.loads(config.read_text())
    table["recipe"]["codec"][option] = value
    config.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=rf"codec\.{option}='{value}' must be empty"):
        mvm.load(tmp_path / "model")


def test_a_folder_names_no_text_encoder(sit, tmp_path):
    path, _ = sit
    run(["convert", str(path), "--as", "sit", "--out", str(tmp_path / "model")])
    config = tmp_path / "model" / "config.json"
    table = json.loads(config.read_text())
    table["recipe"]["condition"] = {"kind": "tokens", "width": 4, "length": 2, "encoder": "openai/clip"}
    config.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"condition\.encoder='openai/clip' must be empty"):
        mvm.load(tmp_path / "model")


WATCHED: list[str] | None = None


def watch(event, arguments):
    if WATCHED is not None and event in ("open", "socket.connect", "subprocess.Popen", "os.system", "exec"):
        WATCHED.append(f"{event} {arguments[0]}")


sys.addaudithook(watch)  # which cannot be taken back, and does nothing while WATCHED is None


def test_what_loading_a_folder_opens(sit, tmp_path, monkeypatch):
    """Of the disk its own files alone, nothing of the network; nothing is executed."""
    path, _ = sit
    run(["convert", str(path), "--as", "sit", "--out", str(tmp_path / "model")])
    mvm.load(tmp_path / "model")  # what Python imports late is imported now
    monkeypatch.setattr(sys.modules[__name__], "WATCHED", [])
    mvm.load(tmp_path / "model")
    seen = list(WATCHED or [])
    monkeypatch.undo()
    opened = {event.removeprefix("open ") for event in seen if event.startswith("open ")}
    assert str(tmp_path / "model" / "config.json") in opened
    assert [event for event in seen if not event.startswith("open ")] == []
    assert [name for name in opened if not name.isdigit() and not name.startswith(str(tmp_path / "model"))] == []


def test_sizes_of_the_published_networks():
    """The table of heads holds what the papers say: heads of 64 or 72 values, 128 in RAE's wide head."""
    published = {384: 64, 768: 64, 1024: 64, 1152: 72, 1440: 72, 2048: 128}
    assert {width: width // HEADS[width] for width in published} == published


# --- the page -----------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "how-to/published-checkpoints.md").read_text(encoding="utf-8")


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """The files that docs/how-to/published-checkpoints.md names, tiny and random."""
    diffusers = pytest.importorskip("diffusers", reason="needs mean-velocity-matching[diffusers]")
    monkeypatch.chdir(tmp_path)
    blocks = {
        f"{way.lower()}_block_types": (f"{way}{kind}Block2D",) * 4
        for way, kind in (("Down", "Encoder"), ("Up", "Decoder"))
    }
    vae = diffusers.AutoencoderKL(block_out_channels=(4,) * 4, norm_num_groups=2, **blocks)
    vae.save_pretrained("sd-vae-ft-ema")
    write("SiT-XL-2-256x256.pt", layouts.sit_state())
    write("decoder.pt", layouts.decoder_state(channels=8, patch=16))
    torch.save({"mean": torch.zeros(8, 4, 4), "var": torch.ones(8, 4, 4)}, "stats.pt")
    write("stage2.pt", layouts.rae_state())


def test_the_page_runs(downloaded):
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "published-checkpoints.md", "exec"), {})
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        assert run(shlex.split(line)[1:]) == 0, line
    assert all(Path(name).is_file() for name in ("grid.png", "sit.png", "rae.png"))


ROWS = {
    "sit": (layouts.sit_state(width=64, depth=6), layouts.sit, {}),
    "dit": (layouts.sit_state(width=64, depth=6), layouts.sit, {}),
    "repa": (layouts.sit_state(width=64, depth=6, sigma=False), layouts.sit, {}),
    "lightningdit": (layouts.lightning_state(width=64, depth=6), layouts.lightning, {}),
    "rae": (layouts.rae_state(widths=(64, 96), depths=(6, 2)), layouts.rae, {"depth": 6}),
    "raev2": (layouts.raev2_state(widths=(64, 96), depths=(6, 2)), layouts.raev2, {"depth": 6, "inner": 4}),
}


def parity(format):
    """The largest difference of outputs in float64 and in float32, and the largest output."""
    state, published, options = ROWS[format]
    state = {name: value.float().double() for name, value in state.items()}
    network, found = converted(format, dict(state), heads=2, inner_block=4)
    x, t, y = inputs(found.shape, (3, 300, 999) if format == "dit" else (0.1, 0.37, 0.9))
    wanted = published(state, x, t, y, **options)
    wanted = wanted[0] if format == "raev2" else wanted
    sign = -1 if format in ("sit", "lightningdit") else 1
    double = (sign * network(x, t, y).prediction - wanted).abs().max()
    single = (sign * network.float()(x.float(), t.float(), y).prediction - wanted).abs().max()
    return float(double), float(single), float(wanted.abs().max())


@pytest.mark.parametrize("format", FORMATS)
def test_the_figures_of_the_page(format):
    """Other machines may round three times as much."""
    double, single, size = parity(format)
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{format}`") and "stage 1" not in line]
    exact, rounded = row.strip("| ").split(" | ")[-2:]
    bound, shown = (float(number) for number in exact.split(" of "))
    assert double < 3 * bound
    assert single < 3 * float(rounded)
    assert abs(size - shown) < 0.06


def test_a_published_model_is_fine_tuned(sit, tmp_path, capsys):
    path, _ = sit
    shape = {"network.depth": 2, "network.heads": 2, "network.width": 16, "network.patch": 2, "train.steps": 1}
    options = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    short = ["--train.batch", "4", "--train.keep_best", "false", "--preview.every", "0", "--out", str(tmp_path / "run")]
    assert run(["train", "digits", "--init-from", f"sit:{path}", *options, *short]) == 2
    said = capsys.readouterr().err
    named = said[said.index("--network.design") :].split()
    assert named == ["--network.design", "classic", "--network.time", "1-t"]
    flow = ["--path.schedule", "linear-flow", "--objective.kind", "flow"]
    assert run(["train", "digits", "--init-from", f"sit:{path}", *options, *named, *flow, *short]) == 0
    assert "took 27 of 31 tensors" in "".join(capsys.readouterr())


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 80
