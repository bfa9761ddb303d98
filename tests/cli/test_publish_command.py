"""mvm export, push, models: by the command; what they make serves wherever a run does."""

import numpy as np
import pytest
import torch
from PIL import Image

import mvm
from mvm.cli import run
from mvm.generate import Sampler
from mvm.published import read_config, shipped_folder, shipped_models


@pytest.fixture
def model(trained, tmp_path, done):
    said = done("export", trained, "--out", tmp_path / "model", "--license", "mit")
    assert said.startswith(f"wrote {tmp_path / 'model'}: ema of step 10, 0.0 MB; sample: mvm sample ")
    return tmp_path / "model"


def test_options(trained, tmp_path, done, refused):
    (tmp_path / "words.md").write_text("Hand-made.")
    out = tmp_path / "model"
    done(
        "export", trained, "--out", out, "--weights", "model", "--which", "10", "--dtype", "float32",
        "--card", tmp_path / "words.md",
    )  # fmt: skip
    source = read_config(out).source
    assert (source.weights, source.step, source.dtype) == ("model", 10, "float32")
    assert "Hand-made." in (out / "README.md").read_text()
    assert "--card nowhere cannot be read" in refused("export", trained, "--out", out, "--card", "nowhere")
    assert "--figures nowhere holds no figures" in refused("export", trained, "--out", out, "--figures", "nowhere")
    assert "is neither a run directory" in refused("export", tmp_path, "--out", tmp_path / "new")
    assert "dtype='int8' is unknown" in refused("export", trained, "--out", out, "--dtype", "int8")


def test_an_export_samples_and_is_judged_as_a_run_is(model, tmp_path, done):
    short = ["--nfe", "3", "--device", "cpu"]
    done("sample", model, "-n", "4", "--out", tmp_path / "a.npz", *short)
    assert np.load(tmp_path / "a.npz")["arr_0"].shape == (4, 8, 8, 1)
    json_file = tmp_path / "eval.json"
    said = done("eval", model, "-n", "8", "--metrics", "fd-pixels", "--device", "cpu", "--json", json_file)
    assert "fd-pixels" in said
    assert "fd-pixels" in done("compare", model, "digits", "-n", "40", *short)


def test_figures_by_the_command(trained, tmp_path, done):
    file, out = tmp_path / "eval.json", tmp_path / "model"
    done("eval", trained, "-n", "8", "--metrics", "fd-pixels", "--device", "cpu", "--json", file)
    done("export", trained, "--out", out, "--figures", file)
    assert "| fd-pixels | " in (out / "README.md").read_text()
    pytest.importorskip("matplotlib")
    few = ["--nfe", "2,3", "--rho", "0", "-n", "8", "--metrics", "fd-pixels", "--device", "cpu"]
    done("sweep", out, "--out", tmp_path / "sweep", *few)
    done("export", trained, "--out", out, "--figures", tmp_path / "sweep" / "results.json")
    assert "| adams, 3 evaluations, rho 0, no guidance | 8 | digits, train, 1,400 images |" in (
        (out / "README.md").read_text()
    )


def test_a_picture_of_the_stored_weights(model, tmp_path, done, capsys, monkeypatch):
    with Image.open(model / "samples.png") as picture:
        assert picture.size == (2 + 5 * 66, 2 * 84)  # ten digits of 64 pixels in two rows, each above its name
        first = torch.tensor(np.asarray(picture.convert("L").crop((2, 2, 66, 66))))
    loaded = mvm.load(model)
    image = Sampler(loaded).images(torch.arange(10), torch.arange(10), loaded.recipe.sample, progress=False).images[0]
    assert torch.equal(first, image[0].repeat_interleave(8, 0).repeat_interleave(8, 1))
    assert "![Samples](samples.png)" in (model / "README.md").read_text()
    done("export", model, "--out", tmp_path / "plain", "--no-grid")
    assert not (tmp_path / "plain" / "samples.png").exists()
    monkeypatch.setattr("mvm.cli.publish.MOST_WORK", 1)
    assert run(["export", str(model), "--out", str(tmp_path / "large")]) == 0
    said = capsys.readouterr().err
    assert said.splitlines() == ["mvm: the card has no samples: 10 images take 0 T multiply-adds, too many for a CPU"]
    assert not (tmp_path / "large" / "samples.png").exists()


def test_shipped_models_are_exported_by_name(tmp_path, done):
    for name in shipped_models():
        said = done("export", name, "--out", tmp_path / name, "--no-grid")
        assert said.startswith(f"wrote {tmp_path / name}: ema of step ")
        assert read_config(tmp_path / name) == read_config(shipped_folder(name))


def test_a_dry_run_sends_nothing(model, done, refused, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs mean-velocity-matching[hub]")
    monkeypatch.setattr(hub, "HfApi", lambda **options: pytest.fail("asked the hub"))
    monkeypatch.setenv("HF_TOKEN", "")
    before = (model / "README.md").read_bytes()
    head, *files, last = done("push", model, "owner/name", "--dry-run", "--private", "--revision", "v1").splitlines()
    assert head == f"would send {model} to owner/name, branch v1 (private):"
    sizes = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in files}
    there = {path.relative_to(model).as_posix(): path.stat().st_size for path in model.rglob("*") if path.is_file()}
    grown = 3 * (len("owner/name@v1") - len("model"))  # the card's snippets name the hub id
    assert sizes == {**there, "README.md": there["README.md"] + grown}
    assert last.split()[0] == f"{sum(sizes.values()):,}"
    assert "nothing was sent" in last
    assert "(public, unless" in done("push", model, "owner/name", "--dry-run")
    (model / "x.pkl").write_bytes(b"")
    assert "'x.pkl' may hold pickled code" in refused("push", model, "owner/name", "--dry-run")
    assert (model / "README.md").read_bytes() == before


def test_models(done):
    lines = done("models").splitlines()
    assert [line.split()[0] for line in lines] == shipped_models()
    digits = next(line for line in lines if line.startswith("digits "))
    assert " 1.5 MB  8x8 handwritten digits" in digits
    assert digits.endswith("classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; licence: apache-2.0")


def test_push_says_what_is_wrong(model, refused, tmp_path):
    assert "'name' is no hub id; give OWNER/NAME" in refused("push", model, "name")
    assert "holds no published model" in refused("push", tmp_path / "nowhere", "owner/name")
