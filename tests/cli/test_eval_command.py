"""mvm eval, mvm data stats: every kind of thing on either side, what is told, and mistakes."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mvm.cli import run
from mvm.metrics import extractors
from mvm.metrics.distances import shrunken_features
from mvm.metrics.extractors import EXTRACTORS, Extractor
from mvm.metrics.moments import load_moments

ASSETS = Path(os.environ.get("MVM_ASSETS", "no assets"))
PIXELS = ["--metrics", "fd-pixels,kd-pixels"]
FD = ["--metrics", "fd-pixels"]


def arrays(count=24, side=16, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a.npy, b.npz and the folder c of other pictures."""
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", arrays())
    np.savez("b.npz", arrays(30, seed=1) // 2)
    Path("c").mkdir()
    for number, array in enumerate(arrays(20, seed=2)):
        Image.fromarray(array).save(f"c/{number:02}.png")
    return tmp_path


@pytest.fixture
def inception(monkeypatch):
    """A stand-in for the FID network."""

    def compute(pictures):
        features = shrunken_features(pictures).float()
        named = {"pool": features[:, :12], "spatial": features[:, 12:22]}
        return {**named, "probabilities": features[:, 22:28].softmax(1)}

    facts = {"fingerprint": "stand-in"}
    monkeypatch.setitem(EXTRACTORS, "inception", lambda _, device: Extractor("inception", compute, device, facts))


def figures(said):
    """Names and figures as printed."""
    found = re.findall(r"^(\S+) +(-?[\d.e+-]+)(?: ± \S+)?(?:   \(.*\))?$", said, re.MULTILINE)
    return {name: float(value) for name, value in found if name != "seconds"}


# ---- what is told


def test_figures_and_what_they_compare(here, done):
    said = done("eval", "a.npy", "--ref", "b.npz", *PIXELS)
    lines = said.splitlines()
    assert [line.split()[0] for line in lines] == ["fd-pixels", "kd-pixels", "images", "reference", "seconds"]
    assert re.fullmatch(r"kd-pixels +\S+ ± \S+   \(100 subsets of 24.*\)", lines[1])
    assert lines[2] == "images     a.npy, 24 images"
    assert lines[3] == "reference  b.npz, 30 images"
    assert set(figures(said)) == {"fd-pixels", "kd-pixels"}


def test_warnings_go_to_the_other_stream(here, capsys):
    assert run(["eval", "a.npy", "--ref", "b.npz", *FD]) == 0
    captured = capsys.readouterr()
    warnings = [line for line in captured.err.splitlines() if line.startswith("mvm: ")]
    assert [warning.split(",")[0] for warning in warnings] == ["mvm: images", "mvm: reference"]
    assert all(re.search(r"Bias, if features were Gaussian: about [\d.]+$", warning) for warning in warnings)
    assert "Bias" not in captured.out


def test_everything_is_in_the_json(here, done):
    said = done("eval", "c", "--ref", "b.npz", *PIXELS, "--jackknife", "2", "--json", "x.json")
    found = json.loads((here / "x.json").read_text())
    assert set(found) >= {"metrics", "images", "reference", "networks", "warnings", "software", "seconds"}
    for name, value in figures(said).items():
        assert found["metrics"][name]["value"] == pytest.approx(value, rel=1e-5)
    assert found["metrics"]["fd-pixels"]["error"] > 0
    assert "jackknife over 2 blocks" in found["metrics"]["fd-pixels"]["note"]
    assert (found["images"]["kind"], found["images"]["count"]) == ("folder", 20)
    assert str(here) not in json.dumps(found)


def test_places_are_not_told(here, done):
    done("eval", here / "a.npy", "--ref", here / "c", *FD, "--json", "x.json")
    assert str(here) not in (here / "x.json").read_text()


def test_a_json_in_a_new_folder(here, done):
    done("eval", "a.npy", "--ref", "b.npz", *FD, "--json", "new/x.json")
    assert (here / "new" / "x.json").is_file()


# ---- either side


def test_a_run_is_compared_with_its_own_images(trained, tmp_path, done):
    said = done("eval", trained, "--num", "20", *FD, "--json", tmp_path / "x.json")
    assert "images     run, 20 images" in said
    assert "reference  digits, 1,400 images" in said
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["images"]["draw"]["num"] == 20
    assert found["images"]["origin"]["step"] == 10
    assert found["reference"]["split"] == "train"
    assert str(trained.parent) not in json.dumps(found)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # see tests/evaluation/test_images.py
def test_a_shipped_model_and_its_samples_give_the_same(tmp_path, monkeypatch, done):
    monkeypatch.chdir(tmp_path)
    done("sample", "digits", "--num", "20", "--batch", "20", "--out", "s.npz")
    stored = figures(done("eval", "s.npz", "--ref", "data:digits", *PIXELS))
    fresh = figures(done("eval", "digits", "--num", "20", *PIXELS))
    assert fresh == stored
    against = figures(done("eval", "data:digits:held-out", "--ref", "s.npz", *PIXELS))
    assert len(against) == 2


def test_sets_in_the_package(done):
    said = done("eval", "data:digits", "--ref", "data:digits:held-out", *FD)
    assert "reference  digits, 397 images" in said
    assert figures(said)["fd-pixels"] == pytest.approx(0.369389, abs=1e-5)


def test_num_belongs_to_a_run_on_either_side(done):
    assert "reference  digits, 20 images" in done("eval", "data:digits", "--ref", "digits", "--num", "20", *FD)


def test_num_has_a_short_name_for_torchrun(tmp_path, done):
    assert "20 images" in done("eval", "digits", "-n", "20", *FD)


@pytest.mark.usefixtures("inception")
def test_moments_and_images_in_one_file(here, done):
    done("data", "stats", "b.npz", "--out", "m.npz")
    plain = figures(done("eval", "a.npy", "--ref", "m.npz", "--metrics", "fid,sfid"))
    with np.load("m.npz") as stored:
        pairs = {name: stored[name] for name in ("mu", "sigma", "mu_s", "sigma_s")}
    np.savez("adm.npz", arr_0=arrays(30, seed=1) // 2, **pairs)
    both = figures(done("eval", "a.npy", "--ref", "adm.npz", "--metrics", "fid,sfid,kid"))
    want = figures(done("eval", "a.npy", "--ref", "b.npz", "--metrics", "fid,sfid,kid"))
    assert both == want
    assert {name: both[name] for name in plain} == plain


@pytest.mark.usefixtures("inception")
def test_the_inception_score_of_a_run(done):
    assert "is" in figures(done("eval", "digits", "--num", "20", "--metrics", "is"))


@pytest.mark.usefixtures("inception")
def test_the_inception_score_needs_no_reference(here, done):
    said = done("eval", "a.npy", "--metrics", "is")
    assert figures(said)["is"] > 1
    assert "reference" not in said


@pytest.mark.usefixtures("inception")
def test_moments_of_unknown_count(here, done):
    np.savez("old.npz", mu=np.zeros(12), sigma=np.eye(12))
    assert " 0 images" not in done("eval", "a.npy", "--ref", "old.npz", "--metrics", "fid")


def test_pictures_are_resized_on_both_sides(here, done):
    said = done("eval", "c", "--ref", "a.npy", "--size", "8", *FD, "--json", "x.json")
    assert "fd-pixels" in figures(said)
    found = json.loads((here / "x.json").read_text())
    assert found["images"]["shape"] == found["reference"]["shape"] == [3, 8, 8]


# ---- stats


def test_stats_are_a_reference_that_says_how_it_was_made(here, capsys):
    assert run(["data", "stats", "c", "--out", "deep/m.npz", "--features", "pixels"]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"deep/m\.npz: moments of 20 images by pixels, in \d+\.\d s\n", captured.out)
    assert "a covariance in 192 dimensions of 20 samples" in captured.err
    provenance = load_moments(here / "deep" / "m.npz").provenance
    assert provenance["images"]["name"] == "c"
    assert provenance["network"]["name"] == "pixels"
    assert str(here) not in json.dumps(provenance)


def test_stats_give_the_figure_of_the_images(here, done):
    done("data", "stats", "c", "--out", "m.npz", "--features", "pixels")
    want = figures(done("eval", "a.npy", "--ref", "c", *FD))
    assert figures(done("eval", "a.npy", "--ref", "m.npz", *FD)) == want
    assert figures(done("eval", "m.npz", "--ref", "a.npy", *FD)) == pytest.approx(want, rel=1e-5)


def test_stats_refuse(here, refused):
    assert "--out m.npy: moments are kept in an .npz file" in refused("data", "stats", "c", "--out", "m.npy")
    said = refused("data", "stats", "c", "--out", "m.npz", "--features", "pixel")
    assert "features='pixel' is unknown (did you mean 'pixels'?)" in said
    assert "--out" in refused("data", "stats", "c")


def test_stats_do_not_replace_the_images(here):
    before = (here / "b.npz").read_bytes()
    run(["data", "stats", "b.npz", "--out", "b.npz", "--features", "pixels"])
    assert (here / "b.npz").read_bytes() == before


# ---- mistakes


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["a.npy"], "fid compares with a reference; name it with --ref"),
        (["a.npy", "--ref", "b.npz", "--metrics", "fd-pixel"], "did you mean 'fd-pixels'"),
        (["a.npy", "--ref", "b.npz", "--metrics", ","], "--metrics ',' names none"),
        (
            ["a.npy", "--ref", "b.npz", *FD, "--num", "5"],
            "--num 5 is for sampling a run, and 'a.npy' is not a run; leave it out",
        ),
        (["a.npy", "--ref", "nothing", *FD], "source='nothing' does not exist"),
        (["nothing", "--ref", "a.npy", *FD], "source='nothing' does not exist"),
        (["a.npy", "--ref", "data:digts", *FD], "did you mean 'digits'"),
        (["a.npy", "--ref", "data:digits", *FD], "images and reference are 3x16x16 and 1x8x8"),
        (["digits", "--num", "4", "--ref", "a.npy", *FD], "images and reference are 1x8x8 and 3x16x16"),
        (["digits", "--num", "1", *FD], "num=1 is out of range; it must be at least 2"),
        (["a.npy", "--ref", "b.npz", *FD, "--device", "gpu"], "device='gpu'"),
        (["digits", "--num", "4", "--precision", "fp8", *FD], "precision='fp8'"),
        (["digits", "--num", "4", "--batch", "0", *FD], "batch=0"),
        (["a.npy", "--ref", "b.npz", "--channels", "2", *FD], "--channels 2 is not supported; allowed: 1, 3"),
        (["a.npy", "--ref", "b.npz", "--size", "8", "--resize", "crop", *FD], "resize='crop' is unknown"),
        (["a.npy", "--ref", "b.npz", "--kid-size", "1", "--metrics", "kd-pixels"], "size=1"),
        (["a.npy", "--reff", "b.npz"], "--ref"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(here, tokens, words, refused):
    before = sorted(here.rglob("*"))
    assert words in refused("eval", *tokens)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["a.npy", "--ref", "b.npz", *FD, "--batch", "0"], "batch=0"),
        (["a.npy", "--ref", "b.npz", *FD, "--jackknife", "-3"], "--jackknife -3"),
        (["a.npy", "--ref", "b.npz", *FD, "--jackknife", "1"], "jackknife"),
        (["data:digits", "--ref", "data:digits", "--split", "held-out", *FD], "split"),
        (["digts", "--ref", "data:digits", *FD], "did you mean 'digits'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_that_pass_or_are_told_badly(here, tokens, words, refused):
    assert words in refused("eval", *tokens)


def test_no_images_are_not_fifty_thousand(refused, monkeypatch):
    monkeypatch.setattr("mvm.generate.Sampler.launch", None)
    assert "num=0" in refused("eval", "digits", "--num", "0", *FD)


def test_missing_weights(here, refused, monkeypatch):
    monkeypatch.setenv("MVM_OFFLINE", "1")
    monkeypatch.setenv("MVM_CACHE", str(here / "cache"))
    said = refused("eval", "a.npy", "--ref", "b.npz")
    assert "FID needs the weights 'pt_inception-2015-12-05-6726825d.pth'" in said
    assert "--inception FILE_OR_FOLDER" in said
    assert "is not there" in refused("eval", "a.npy", "--ref", "b.npz", "--inception", "nothing.pth")


@pytest.mark.usefixtures("inception")
def test_a_moments_file_of_another_network(here, refused, done):
    done("data", "stats", "b.npz", "--out", "m.npz")
    said = refused("eval", "a.npy", "--ref", "m.npz", *FD)
    assert "'m.npz' was made with another feature network" in said
    assert "mvm data stats" in said
    assert "holds moments alone, and kid needs the images" in refused(
        "eval", "a.npy", "--ref", "m.npz", "--metrics", "kid"
    )


def test_the_weights_asked_for_are_taken(here, done, monkeypatch):
    asked = []

    def load(source):
        asked.append(source)
        raise ValueError("seen")

    monkeypatch.setattr(extractors, "load_inception", load)
    assert run(["eval", "a.npy", "--ref", "b.npz", "--inception", "w.pth"]) == 2
    assert asked == ["w.pth"]


# ---- published golden values


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (ASSETS / "inception").is_dir(), reason="MVM_ASSETS names no folder with inception/")
def test_golden_figures_through_the_command(tmp_path, done):
    with np.load(ASSETS / "inception" / "golden-256.npz") as golden:
        for name in ("train", "test"):
            np.save(tmp_path / f"{name}.npy", golden[name])
    tokens = ["--inception", ASSETS / "inception", "--kid-size", "64", "--batch", "32", "--json", tmp_path / "x.json"]
    done("eval", tmp_path / "train.npy", "--ref", tmp_path / "test.npy", "--metrics", "fid,kid", *tokens)
    found = json.loads((tmp_path / "x.json").read_text())["metrics"]
    assert found["fid"]["value"] == pytest.approx(110.2808262, abs=1e-3)
    assert found["kid"]["value"] == pytest.approx(-0.00067925, abs=1e-6)


def test_a_run_is_not_sampled_50_000_times_on_a_cpu_unasked(pictures, refused):
    """Neither as what is judged nor as the reference."""
    for sides in (["digits"], [pictures, "--ref", "digits", "--size", "8", "--channels", "1"]):
        said = refused("eval", *sides, "--metrics", "fd-pixels", "--device", "cpu")
        assert "'digits' would sample 50,000 images on a CPU, for hours; give a number, e.g. --num 1000" in said
