"""docs/how-to/latents.md: its commands, in order, with encoders, networks and steps of moments."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mvm.cli import run
from mvm.metrics.distances import shrunken_features
from mvm.metrics.extractors import EXTRACTORS, Extractor
from mvm.metrics.lpips import BACKBONES, LPIPS

PAGE = (Path(__file__).parents[2] / "docs" / "how-to/latents.md").read_text(encoding="utf-8")
BLOCKS = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")  # typed here alone
COMMANDS = [shlex.split(line, comments=True) for line in BLOCKS.splitlines()]
SIDE, PATCH, WIDTH = 224, 56, 16  # of images, and of an encoder with 4 x 4 latents

# What makes a command small, and no other one: sizes, and numbers of steps and images. By its first words.
TRAINED = "--train.batch 4 --train.steps 2 --train.warmup 0 --train.save_every 2 --preview.every 2 --preview.grid 2"
SMALL = {
    "data prepare": "--workers 1",
    "train imagenette-rae-s": f"{TRAINED} --preview.count 4 --held_out.count 4 --decoder.size tiny "
    f"--decoder.patch {PATCH} --encoder.layers 1,2 --train.keep_best false",
    "train imagenette-ddt-s": f"{TRAINED} --preview.count 2 --codec.channels {WIDTH} --codec.side {SIDE // PATCH} "
    "--network.size tiny --network.inner_block 1 --network.head_width 32 --network.head_heads 2 --sample.nfe 2",
    "sample runs/ddt": "--num 2 --nfe 4",
    "eval": "--batch 8",
    "sweep runs/ddt": "--num 4 --nfe 2",
}


def make_encoder(kind, folder):
    transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")
    size = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE}
    torch.manual_seed(0)
    if kind == "dinov2":
        model = transformers.Dinov2Model(transformers.Dinov2Config(**size, patch_size=PATCH))
    else:
        config = transformers.CLIPVisionConfig(**size, patch_size=PATCH, intermediate_size=32)
        model = transformers.CLIPVisionModel(config)
    model.save_pretrained(folder)


def changed(words, options):
    """Return the command with these options, in place of its own where it has them."""
    words, options = list(words), shlex.split(options)
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words


@pytest.mark.parametrize("kind", ["dinov2", "clip"])
def test_the_two_stages_as_the_page_types_them(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "pictures" / f"class-{number % 10}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (240, 230, 3), np.uint8)).save(path)
    make_encoder(kind, tmp_path / "encoder")
    lpips = LPIPS()
    save_file(lpips.state_dict(), tmp_path / "lpips.safetensors")
    monkeypatch.setitem(BACKBONES, "alex", replace(BACKBONES["alex"], fingerprint=lpips.fingerprint))

    def stand_in(name):
        compute = lambda images: {"pool": shrunken_features(images).float()}  # noqa: E731
        return lambda _, device: Extractor(name, compute, device, {"fingerprint": "stand-in"})

    for name in ("inception", "effnet"):
        monkeypatch.setitem(EXTRACTORS, name, stand_in(name))
    names = {"PHOTOS": "pictures", "ENCODER": str(tmp_path / "encoder"), "LPIPS": "lpips.safetensors"}
    small, done = dict(SMALL), []
    for command, *words in COMMANDS:
        assert command == "mvm"
        words = [names.get(word, word) for word in words]
        begin = next(begin for begin in SMALL if " ".join(words).startswith(begin))
        small.pop(begin, None)
        words = changed(words, SMALL[begin]) + (["--device", "cpu"] if begin != "data prepare" else [])
        assert run(words) == 0, shlex.join(words)
        done.append((begin, capsys.readouterr().out))
    assert not small
    told = dict(done)
    assert re.search(r"^rFID +\S+", told["eval"], re.MULTILINE)
    assert all(re.search(rf"^{name} +\S+ ± \S+ ", told["eval"], re.MULTILINE) for name in ("psnr", "ssim", "lpips"))
    assert Image.open("grid.png").size[0] > SIDE
    results = list(Path("runs/sweep-ddt/cells").glob("*.json"))
    # two values of rho, two of internal guidance; then adams and sa by two of rho, and heun's ODE, by two shifts, of
    # which adams with the model's own was there
    assert len(results) == 4 + 10 - 2
    # the figures of a latent run at 224 pixels against the data at 224
    assert run(shlex.split("eval runs/ddt --ref data/imagenette --num 4 --nfe 2 --device cpu --json x.json")) == 0
    found = json.loads(Path("x.json").read_text())
    assert found["images"]["shape"] == found["reference"]["shape"] == [3, SIDE, SIDE]
    assert found["reference"]["count"] == 20
