"""Images and their originals: PSNR, SSIM and LPIPS beside the distances, from one pass; and refusals."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_images import as_tensor, pictures
from torchmetrics.functional.image import peak_signal_noise_ratio
from torchmetrics.functional.image import structural_similarity_index_measure as similarity

from mvm.cli import run
from mvm.evaluation.evaluate import ComparedSet, Judge, evaluate
from mvm.evaluation.images import of_restored, of_tensor, with_originals
from mvm.latent import load_vae
from mvm.metrics.distances import shrunken_features
from mvm.metrics.extractors import EXTRACTORS, Extractor, Sources
from mvm.metrics.lpips import BACKBONES, LPIPS, load_lpips
from threads import in_threads

COUNT, SIDE = 23, 32
NAMES = ("fd-pixels", "psnr", "ssim", "lpips")


class Codec(torch.nn.Module):
    """Restores images but for some noise that is the image's own; `exact` of them as they are."""

    image_shape, identity = (3, SIDE, SIDE), {"codec": "stand-in"}

    def __init__(self, exact=False):
        super().__init__()
        self.one, self.exact, self.calls = torch.nn.Parameter(torch.ones(1)), exact, 0

    def restore(self, images):
        self.calls += len(images)
        return images if self.exact else (images.int() + (images.int() * 7) % 31 - 15).clamp(0, 255).to(torch.uint8)


@pytest.fixture
def originals():
    return as_tensor(pictures(COUNT, SIDE))


@pytest.fixture
def lpips(tmp_path, monkeypatch):
    """A file of LPIPS weights, drawn at random, which are taken for the published ones."""
    torch.manual_seed(0)
    network = LPIPS()
    for name, parameter in network.named_parameters():
        parameter.data = parameter.abs() if name.startswith("lin") else 2 * parameter
    save_file(network.state_dict(), tmp_path / "lpips.safetensors")
    monkeypatch.setitem(BACKBONES, "alex", replace(BACKBONES["alex"], fingerprint=network.fingerprint))
    return str(tmp_path / "lpips.safetensors")


@pytest.fixture
def judge(lpips):
    return Judge(Sources(lpips=lpips), batch=7, progress=False)


def judged(judge, codec, originals, names=NAMES):
    images = of_tensor(originals, "data")
    return evaluate(judge, ComparedSet("rae", of_restored(codec, images, "rae")), ComparedSet("data", images), names)


def values(found):
    return {name: figure.value for name, figure in found.metrics.items()}


def test_figures_are_means_of_independent_ones(judge, originals, lpips):
    codec = Codec()
    found, restored = judged(judge, codec, originals), Codec().restore(originals)
    assert codec.calls == COUNT  # one pass gives all
    pairs = list(zip(restored.double(), originals.double(), strict=True))
    options = {"data_range": 255.0, "return_full_image": True}
    want = {
        "psnr": [float(peak_signal_noise_ratio(a, b, data_range=255.0)) for a, b in pairs],
        # torchmetrics pads the images; windows inside them are 5 pixels from the border
        "ssim": [float(similarity(a[None], b[None], **options)[1][..., 5:-5, 5:-5].mean()) for a, b in pairs],
        "lpips": [float(load_lpips(lpips).measure(a[None], b[None])) for a, b in zip(restored, originals, strict=True)],
    }
    for name, each in want.items():
        exact = 1e-5 if name == "lpips" else 1e-7  # float32: the network, and constants of torchmetrics
        assert found.metrics[name].value == pytest.approx(np.mean(each), rel=exact), name
        assert found.metrics[name].error == pytest.approx(np.std(each, ddof=1) / COUNT**0.5, rel=100 * exact), name
    assert 1 < values(found)["psnr"] < 60
    assert 0.1 < values(found)["ssim"] < 1
    assert found.images["count"] == found.reference["count"] == COUNT
    assert found.images["codec"] == "stand-in"
    assert found.networks["lpips"]["fingerprint"] == BACKBONES["alex"].fingerprint
    alone = evaluate(judge, ComparedSet("x", of_tensor(restored)), ComparedSet("y", of_tensor(originals)), NAMES)
    assert values(alone) == values(found)  # the same pairs, from two sets of one order


def test_an_identity_is_infinitely_good_and_json_can_say_so(judge, originals):
    found = judged(judge, Codec(exact=True), originals)
    assert values(found) == {
        "fd-pixels": pytest.approx(0, abs=1e-6), "psnr": math.inf, "ssim": pytest.approx(1, abs=1e-12), "lpips": 0
    }  # fmt: skip
    told = json.loads(json.dumps(found.as_dict()), parse_constant=lambda name: pytest.fail(name))
    assert told["metrics"]["psnr"]["value"] is None
    assert told["metrics"]["psnr"]["note"] == f"mean over the images, {COUNT} of them equal to their originals"


@pytest.mark.parametrize("world", [2, 5])
def test_any_number_of_processes_gives_the_same(judge, originals, world):
    want = judged(judge, Codec(), originals)

    def work(place):
        return judged(Judge(judge.sources, place, batch=7, progress=False), Codec(), originals)

    for found in in_threads(world, work):
        # of a singular covariance, roots of rounding are worth 1e-7
        assert values(found) == pytest.approx(values(want), rel=1e-9, abs=1e-7)


def test_what_the_usual_figures_are(judge, tmp_path, monkeypatch):
    monkeypatch.setenv("MVM_CACHE", str(tmp_path / "nothing"))
    assert judge.usual_of_restored((3, 32, 32)) == (("fid", "psnr", "ssim", "lpips"), [])
    names, (small, smaller) = judge.usual_of_restored((1, 8, 8))
    assert names == ("fd-pixels", "psnr")
    assert small == "ssim is left out: it needs images of 11 pixels a side or more"
    assert smaller.startswith("lpips is left out: it needs images of 31 pixels")
    names, (note,) = Judge(progress=False).usual_of_restored((3, 32, 32))
    assert names == ("fid", "psnr", "ssim")
    assert "lpips is left out: '" in note
    assert "LPIPS needs the AlexNet features" in note
    with pytest.raises(ValueError, match="'gone' is not there"):
        Judge(Sources(lpips="gone"), progress=False).usual_of_restored((3, 32, 32))


def test_pairs_that_are_none(originals):
    few, many = of_tensor(originals[:20], "few"), of_tensor(originals, "many")
    for one, other in ((few, many), (many, few)):
        with pytest.raises(ValueError, match="hold different numbers of images; pairs need as many"):
            list(with_originals(one, other).read(7, paired=True))
    judge = Judge(progress=False)
    with pytest.raises(ValueError, match="'few' has no originals to compare with; name them with --ref"):
        evaluate(judge, ComparedSet("few", few), None, ("psnr",))
    with pytest.raises(ValueError, match=r"images and reference are 3x32x32 and 3x16x16"):
        evaluate(judge, ComparedSet("few", few), ComparedSet("x", of_tensor(as_tensor(pictures(20)))), ("psnr",))


# ---- the command


@pytest.fixture
def here(tmp_path, monkeypatch, originals):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MVM_CACHE", str(tmp_path / "cache"))
    facts = {"fingerprint": "stand-in"}
    compute = lambda images: {"pool": shrunken_features(images).float()}  # noqa: E731
    monkeypatch.setitem(EXTRACTORS, "inception", lambda _, device: Extractor("inception", compute, device, facts))
    np.save("data.npy", originals.permute(0, 2, 3, 1).numpy())
    np.save("other.npy", pictures(30, SIDE, seed=5))
    return tmp_path


@pytest.fixture
def vae(here):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    size = {"block_out_channels": [8, 8], "norm_num_groups": 4, "latent_channels": 4, "layers_per_block": 1}
    diffusers.AutoencoderKL(**blocks, **size, sample_size=SIDE).save_pretrained("vae")
    return "vae"


def test_a_vae_is_judged_by_the_command(vae, here, originals, lpips, capsys):
    told = {}
    for name, words in {
        "ref": ["--ref", "data.npy"], "images": ["data.npy"], "both": ["data.npy", "--ref", "other.npy"]
    }.items():  # fmt: skip
        options = ["--reconstruct", vae, "--lpips", lpips, "--device", "cpu", "--json", f"{name}.json"]
        assert run(["eval", *words, *options]) == 0
        told[name] = json.loads((here / f"{name}.json").read_text())
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:4]] == ["rFID", "psnr", "ssim", "lpips"]
    assert "images     vae, 23 images" in said
    assert [said.count(f"reference  {name}.npy, {count} images") for name, count in (("data", 23), ("other", 30))] == [
        2, 1
    ]  # fmt: skip
    figures = {name: {key: each["value"] for key, each in one["metrics"].items()} for name, one in told.items()}
    assert figures["ref"] == figures["images"]
    differ = {key for key in figures["ref"] if figures["ref"][key] != figures["both"][key]}
    assert differ == {"fid"}  # originals are what was restored, whatever the reference
    codec = load_vae(vae, SIDE)
    want = [float(peak_signal_noise_ratio(a.double(), b.double(), data_range=255.0))
            for a, b in zip(codec.decode(codec.encode(originals)), originals, strict=True)]  # fmt: skip
    assert figures["ref"]["psnr"] == pytest.approx(np.mean(want), rel=1e-4)  # batches move a level here and there
    assert told["ref"]["images"]["codec"] == codec.fingerprint


def test_refusals_of_the_command(vae, here, capsys):
    def refused(*words):
        assert run([*map(str, words), "--device", "cpu"]) == 2
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("mvm: ")][-1]

    assert "'vae' is an autoencoder; give images for it to restore: --ref" in refused("eval", "--reconstruct", vae)
    assert "name the images to judge: mvm eval IMAGES" in refused("eval")
    words = ("--reconstruct", "data.npy", "--ref", "other.npy")
    assert "'data.npy' holds no autoencoder; give RUN/rae" in refused("eval", *words)
    words = ("--num", 4, "--metrics", "psnr", "--out", "sweep")
    assert "psnr is of images and their originals; samples have none" in refused("sweep", "digits", *words)
    assert "features='psnr' is unknown" in refused("data", "stats", "data.npy", "--features", "psnr", "--out", "x.npz")
