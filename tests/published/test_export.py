"""From a run to a folder that only samples, and back: the same weights, all files or none, a card that is true."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mvm
from mvm import checkpoint
from mvm.generate import Sampler
from mvm.published import export, open_model, read_config, shipped_folder, write
from mvm.published.diffusers import misfit
from mvm.published.write import read_card
from mvm.recipes import SampleConfig
from mvm.solver import SOLVERS

yaml = pytest.importorskip("yaml", reason="comes with mean-velocity-matching[hub]")


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def drawn(model, count=6):
    seeds = torch.arange(count)
    return Sampler(model).images(seeds % model.num_classes, seeds, model.recipe.sample, progress=False).images


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("weights", "which"), [("ema", "latest"), ("model", "2")])
def test_round_trip_is_bit_equal(run, tmp_path, dtype, weights, which):
    export(run, tmp_path / "model", weights=weights, which=which, dtype=dtype)
    there, back = mvm.load(run, weights, which), mvm.load(tmp_path / "model")
    kind = getattr(torch, dtype)
    for name, value in there.network.state_dict().items():
        value.copy_(value.to(kind).float())
        found = back.network.state_dict()[name]
        assert found.dtype == torch.float32
        assert torch.equal(found, value), name
    assert torch.equal(drawn(there), drawn(back))
    assert back.recipe == there.recipe
    assert not back.training
    same = ("run", "recipe", "step", "weights", "data", "data_stamp")
    assert {key: back.origin[key] for key in same} == {key: there.origin[key] for key in same}
    assert read_config(tmp_path / "model").source.sha256 == there.origin["sha256"]


DIFFUSERS = ["model_index.json", "scheduler/scheduler_config.json", "transformer/config.json"]


def contents(folder):
    return {name: (folder / name).read_bytes() for name in names(folder)}


def test_the_folder_holds_one_set_of_weights_and_text_for_any_reader(run, folder):
    assert names(folder) == ["README.md", "config.json", "model.safetensors", *DIFFUSERS]
    assert all((folder / name).stat().st_mode & 0o777 == 0o644 for name in names(folder))
    told = json.loads((folder / "config.json").read_text())
    assert told["library_name"] == "mvm"
    assert told["classes"] == list("0123456789")
    assert told["source"]["step"] == 4
    assert told["source"]["mvm"] == mvm.__version__
    assert told["recipe"]["train"]["batch"] == 16
    head = (folder / "model.safetensors").read_bytes()[8:200]
    assert b'"format":"pt"' in head
    assert (folder / "model.safetensors").stat().st_size < 0.6 * (
        checkpoint.latest(run) / "ema.safetensors"
    ).stat().st_size


def test_one_set_of_weights_of_one_step(folder):
    assert mvm.load(folder, which="4").origin["step"] == 4
    with pytest.raises(ValueError, match=r"weights='model': .*model has no such weights; it has: ema$"):
        mvm.load(folder, "model")
    with pytest.raises(ValueError, match=r"checkpoint='2': .*model has that of step 4 alone"):
        mvm.load(folder, which="2")


def test_a_card_that_the_hub_and_people_can_read(folder):
    text = (folder / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    told = yaml.safe_load(header)
    assert told["license"] == "mit"
    assert told["library_name"] == "mvm"
    assert told["pipeline_tag"] == "unconditional-image-generation"
    assert {"mvm", "mean-velocity", "class-conditional", "diffusers"} <= set(told["tags"])
    assert "datasets" not in told
    assert "# model\n" in body
    assert "4 steps of 16 images: 64 images shown" in body
    assert re.search(r"Last logged loss: \d", body)
    assert "## Figures\n\nNot measured." in body
    assert "adams, 4 evaluations, rho 0, no guidance" in body
    assert "samples.png" not in body


def test_own_words_and_a_known_data_set(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "metrics.jsonl").unlink()
    export(copy, tmp_path / "model", words="Made in *autumn*.\n")
    text = (tmp_path / "model" / "README.md").read_text()
    assert "\n\nMade in *autumn*.\n\n## What it is" in text
    assert "Last logged loss: not logged" in text
    assert "license: unknown\n" in text
    assert "Of the weights: not stated." in text
    with pytest.raises(ValueError, match="header is made from the run"):
        export(copy, tmp_path / "model", words="---\nlicense: x\n---\n")


def test_a_torn_log(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    export(copy, tmp_path / "model")
    whole = tmp_path / "whole"
    export(run, whole)
    line = next(line for line in (whole / "README.md").read_text().splitlines() if "Last logged loss" in line)
    assert line in (tmp_path / "model" / "README.md").read_text()


def evaluation(sha256):
    sampler = {"solver": "adams", "nfe": 4, "rho": 1.0, "cfg": 1.5, "internal": 1.0, "low": 0.1, "high": 0.8}
    return {
        "metrics": {"fid": {"value": 3.14159, "error": 0.02, "note": ""}},
        "images": {"count": 1000, "sampler": sampler, "origin": {"sha256": sha256}, "draw": {"seed": 0, "labels": "x"}},
        "reference": {"name": "a|b", "count": 2000},
        "warnings": ["few images"],
        "software": {"mvm": "1", "device": "cpu"},
    }


def test_figures_of_these_weights_alone(run, tmp_path):
    file, folder = tmp_path / "eval.json", tmp_path / "model"
    sha = checkpoint.read_manifest(checkpoint.latest(run))["sha256"]["ema.safetensors"]
    file.write_text(json.dumps(evaluation(sha)))
    export(run, folder, figures=file)
    text = (folder / "README.md").read_text()
    sampler = "adams, 4 evaluations, rho 1, cfg 1.5, guided in [0.1, 0.8]"
    row = f"| fid | 3.142 ± 0.02 | {sampler} | 1,000 | a&#124;b, 2,000 images |"
    assert row in text
    assert "- few images." in text
    file.write_text(json.dumps(evaluation(read_config(folder).sha256)))  # measured on the export
    export(run, folder, figures=file)
    file.write_text(json.dumps(evaluation("0" * 64)))
    with pytest.raises(ValueError, match=r"eval\.json is of other weights \(sha256 000000000000"):
        export(run, folder, figures=file)
    no_table, no_number = {**evaluation(sha), "metrics": []}, evaluation(sha)
    no_number["metrics"]["fid"]["value"] = None
    for text in ("[]", "{}", "{", '{"results": []}', json.dumps(no_table), json.dumps(no_number)):
        file.write_text(text)
        with pytest.raises(ValueError, match="holds no figures of a sampled model"):
            export(run, folder, figures=file)
    assert row in (folder / "README.md").read_text()  # none of them replaced what was there


@pytest.mark.parametrize("stop", ["save_file", "_source", "_card", "check_all", "_edited_card"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_export_leaves_what_was_there(run, tmp_path, monkeypatch, stop, error):
    def fail(*args, **options):
        raise error

    export(run, tmp_path / "model", which="2")
    before = contents(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(write, stop, fail)
        for folder in ("model", "new"):
            with pytest.raises(type(error)):
                export(run, tmp_path / folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert contents(tmp_path / "model") == before
    export(run, tmp_path / "model")
    assert read_config(tmp_path / "model").source.step == 4


def test_only_an_export_is_replaced(run, folder, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("mine")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    (tmp_path / "link").symlink_to(folder)
    for taken in (tmp_path / "notes", folder, run, tmp_path / "link", folder / "config.json"):
        with pytest.raises(ValueError, match="exists and is not an exported model alone"):
            export(run, taken)
    assert (tmp_path / "notes" / "README.md").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export(run, tmp_path / "empty")
    assert names(tmp_path / "empty") == ["README.md", "config.json", "model.safetensors", *DIFFUSERS]


def test_refusals_of_export(run, tmp_path):
    out = tmp_path / "model"
    with pytest.raises(ValueError, match=r"dtype='int8' is unknown.*allowed: float16, bfloat16, float32"):
        export(run, out, dtype="int8")
    with pytest.raises(ValueError, match=r"license='Do: what' is no identifier"):
        export(run, out, license="Do: what")
    with pytest.raises(ValueError, match=r"weights='emma': .*it has: ema, model$"):
        export(run, out, weights="emma")
    with pytest.raises(ValueError, match=r"no checkpoint '3' yet; it has those of the steps 2, 4"):
        export(run, out, which="3")
    with pytest.raises(ValueError, match=r"is neither a run directory \(no recipe\.json in it\)"):
        export(tmp_path, out)
    with pytest.raises(ValueError, match=r"--out \. is no name of a folder"):
        export(run, Path("."))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def old(folder):
    """An export as it was before it told diffusers anything."""
    for name in DIFFUSERS:
        (folder / name).unlink()
    (folder / "scheduler").rmdir()
    (folder / "transformer").rmdir()
    return folder


def test_an_older_export_loads_and_is_brought_up_to_date(old, tmp_path):
    before = mvm.load(old)
    export(old, tmp_path / "new")
    assert names(tmp_path / "new") == ["README.md", "config.json", "model.safetensors", *DIFFUSERS]
    assert torch.equal(drawn(mvm.load(tmp_path / "new")), drawn(before))
    assert read_config(tmp_path / "new") == read_config(old)
    export(old, old, license="cc0-1.0")  # in its own place
    assert read_config(old).license == "cc0-1.0"
    assert "Weights: cc0-1.0." in (old / "README.md").read_text()


def test_a_shipped_model_keeps_what_its_card_tells(tmp_path):
    export("digits", tmp_path / "mine")
    ours, theirs = ((folder / "README.md").read_text() for folder in (tmp_path / "mine", shipped_folder("digits")))
    (words, sections), (told, parts) = read_card(ours), read_card(theirs)
    assert words == told
    assert "UCI Optical Recognition" in words
    assert {**sections, "How to use it": ""} == {**parts, "How to use it": ""}
    assert "fd-pixels | 0.5785" in sections["Figures"]
    assert read_config(tmp_path / "mine") == read_config(shipped_folder("digits"))
    export("digits", tmp_path / "mine", dtype="bfloat16", words="Other words.")  # other weights: nothing measured
    words, sections = read_card((tmp_path / "mine" / "README.md").read_text())
    assert words == "Other words."
    assert sections["Figures"] == "Not measured."
    assert read_config(tmp_path / "mine").source.dtype == "bfloat16"


def test_a_picture_stands_in_the_card(run, tmp_path):
    out, seen = tmp_path / "model", []

    def draw(folder):
        seen.append(mvm.load(folder).origin["step"])  # of the weights as they are stored
        return b"a picture"

    export(run, out, draw=draw, words="Words.")
    assert seen == [4]
    assert (out / "samples.png").read_bytes() == b"a picture"
    text = (out / "README.md").read_text()
    assert (
        "![Samples](samples.png)\\\nSeeds 0 to 9, not picked: adams, 4 evaluations, rho 0, no guidance.\n\nWords.\n"
        in text
    )
    export(out, out, draw=lambda folder: None)  # too large here: neither the picture nor a word of it stays
    assert "samples.png" not in names(out)
    assert "Samples" not in (out / "README.md").read_text()
    assert "Words." in (out / "README.md").read_text()


def snippets(folder):
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


def test_both_snippets_run_as_they_are_printed(folder, monkeypatch):
    pytest.importorskip("diffusers", reason="needs mean-velocity-matching[diffusers]")
    monkeypatch.chdir(folder.parent)
    made = []
    for code in snippets(folder):
        found: dict = {}
        exec(code, found)
        made.append(found)
    ours, theirs = made[0]["samples"].images, made[1]["images"]
    assert Path("grid.png").read_bytes()[:4] == b"\x89PNG"
    assert torch.equal(ours, drawn(mvm.load(folder), 4))
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(one[0].numpy().astype(int) - np.asarray(other).astype(int)).max() <= 1


def test_a_model_that_diffusers_cannot_sample_says_so(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    told = json.loads((copy / "recipe.json").read_text())
    told["sample"]["solver"] = "heun"
    (copy / "recipe.json").write_text(json.dumps(told))
    export(copy, tmp_path / "model")
    assert names(tmp_path / "model") == ["README.md", "config.json", "model.safetensors"]
    text = (tmp_path / "model" / "README.md").read_text()
    assert (
        "does not take this model: its scheduler evaluates the network once a step, and the solver heun does not."
        in text
    )
    assert "- diffusers\n" not in text
    assert len(snippets(tmp_path / "model")) == 1


def test_solvers_that_fit_are_those_of_the_scheduler():
    plans = pytest.importorskip("mvm.integrations.plans")
    recipe = mvm.load("digits").recipe
    for name in SOLVERS:
        if misfit(replace(recipe, sample=SampleConfig(solver=name))):
            with pytest.raises(ValueError, match=f"solver='{re.escape(name)}' does not evaluate the network once"):
                plans.build_solver(name, {})
        else:
            assert plans.build_solver(name, {}).name == name


@pytest.mark.parametrize("before", [True, False])
def test_of_two_exports_at_once_the_second_is_refused(run, tmp_path, before):
    """The earlier one, whole by then, was lost: both wrote into one temporary folder."""
    out, said = tmp_path / "model", []
    if before:
        export(run, out)

    def other(folder):
        with pytest.raises(ValueError, match=r"model' is in use by another process; wait for it") as refused:
            export(run, out, which="2")
        said.append(refused)

    export(run, out, draw=other)
    assert said
    assert read_config(out).source.step == 4
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_an_export_that_was_killed_left_goes_and_files_of_the_users_stay(run, tmp_path):
    """Hidden names that a user may have chosen were taken for our own, and removed."""
    (tmp_path / ".model.mvm-0123abcd.tmp" / "model").mkdir(parents=True)
    for name in (".model.old", ".model.tmp", ".model.0123abcd.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("mine")
    export(run, tmp_path / "model")
    export(run, tmp_path / "model", which="2")
    kept = [".model.0123abcd.tmp", ".model.old", ".model.tmp", "model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert all((tmp_path / name / "thesis.tex").read_text() == "mine" for name in kept[:-1])


def test_a_card_that_a_person_has_edited_is_kept(run, tmp_path):
    """It was written over."""
    out = tmp_path / "model"
    export(run, out, which="2", words="Generated.")
    export(run, out)  # as it was written: replaced
    assert "Generated." not in (out / "README.md").read_text()
    edited = (out / "README.md").read_text().replace("Not measured.", "I looked at 1,000 of them.")
    (out / "README.md").write_text(edited)
    for options in ({"words": "Other."}, {"license": "mit"}):
        with pytest.raises(ValueError, match=r"README\.md was edited by hand.* and would be lost; move it away"):
            export(run, out, which="2", **options)
    assert read_config(out).source.step == 4
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"README\.md was edited by hand.* and is kept"):
            export(run, out, which="2")
        assert (out / "README.md").read_text() == edited
        assert read_config(out).source.step == 2
    (out / "README.md").unlink()
    export(run, out)
    assert "Not measured." in (out / "README.md").read_text()


@pytest.mark.parametrize("line", ['{"loss": 1.0}', '{"step": 4, "loss": null}', '{"step": "x", "loss": {}}', "[1}"])
def test_a_damaged_log(run, tmp_path, line):
    """A line without a step was a KeyError."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    export(copy, tmp_path / "model")
    assert re.search(r"Last logged loss: \d", (tmp_path / "model" / "README.md").read_text())


def test_what_half_precision_cannot_hold(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newest = checkpoint.latest(copy)
    weights = checkpoint.load(newest, "ema")
    weights["embed.weight"][0, 0] = 1e6
    shutil.rmtree(newest)
    checkpoint.save(newest, {"ema": weights}, {"step": 4})
    with pytest.raises(ValueError, match=r"--dtype float16 cannot hold embed\.weight .*try bfloat16"):
        export(copy, tmp_path / "model")
    export(copy, tmp_path / "model", dtype="bfloat16")


def test_a_new_run_may_start_from_it(folder):
    opened = open_model(folder, "ema")
    assert opened.weights["embed.weight"].dtype == torch.float16
    assert opened.origin["sha256"] == read_config(folder).sha256
    assert (opened.origin["step"], opened.origin["weights"]) == (4, "ema")
    with pytest.raises(ValueError, match=r"weights='model': .* has no such weights; it has: ema"):
        open_model(folder, "model")
