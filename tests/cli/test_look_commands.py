"""mvm verify, mvm demo, mvm recipes, mvm options: commands that show."""

import json
import re
import shlex
from dataclasses import replace

import pytest

import mvm
from mvm import demo, verify
from mvm.cli import run
from mvm.recipes import load_recipe, options, override, shipped

# --- verify and demo ------------------------------------------------------------------------------------------------


def test_verify_json(tmp_path, monkeypatch, capsys):
    def order():
        yield verify.Check("order", 2.0, 1.85, at_least=True)

    monkeypatch.setattr(verify, "ALL", (verify.theorems.check_score, verify.theorems.check_regression, order))
    out = tmp_path / "deep" / "verify.json"
    assert run(["verify", "--json", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary.keys() == {"passed", "checks"}
    assert summary["passed"] is True
    assert all(entry.keys() == {"name", "value", "limit", "passed", "comparison"} for entry in summary["checks"])
    said = capsys.readouterr().out
    count = len(summary["checks"])
    assert f"{count} of {count} checks passed" in said
    assert said.count("pass  ") == count


def test_verify_that_fails(tmp_path, monkeypatch, capsys):
    def wrong():
        yield verify.Check("one is at most nought", 1.0, 0.0)

    monkeypatch.setattr(verify, "ALL", (wrong, verify.theorems.check_score))
    assert run(["verify", "--json", str(tmp_path / "v.json")]) == 1
    assert json.loads((tmp_path / "v.json").read_text())["passed"] is False
    said = capsys.readouterr().out
    assert "FAIL           1 <= 0        one is at most nought" in said
    assert "2 of 3 checks passed" in said


@pytest.fixture(scope="module")
def quick_demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "quick"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SHIPPED_NFE", 2)  # .ci/run types the command as it is
        assert run(["demo", "--quick", "--out", str(out)]) == 0
    return out


def test_demo_writes_a_self_contained_report(quick_demo):
    text = (quick_demo / "report.html").read_text(encoding="utf-8")
    assert text.count("<svg") >= 2
    assert text.count("data:image/png;base64,") >= 5
    loads = re.findall(r"""(?:\ssrc|\shref|xlink:href)\s*=\s*["']?([^"'\s>]+)""", text)
    assert all(address.startswith(("#", "data:")) for address in loads)
    assert "<script" not in text
    for words in ("NFE 3", "NFE 8", "adams, ODE", "sa, SDE", "bits per dimension", "recipe.json", "Training loss"):
        assert words in text
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"base64,[^\"]+", "", text), re.IGNORECASE)


def test_demo_leaves_a_run_to_sample_from(quick_demo, tmp_path):
    assert mvm.load(quick_demo).recipe.train.steps == demo.QUICK.steps
    assert run(["sample", str(quick_demo), "--num", "1", "--nfe", "2", "--out", str(tmp_path / "x.png")]) == 0
    assert [p.name for p in quick_demo.parent.iterdir()] == ["quick"]


def test_demo_replaces_a_demo_and_nothing_else(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(demo, "QUICK", replace(demo.QUICK, steps=1, nfes=(2,), likelihood_images=1, likelihood_steps=2))
    monkeypatch.setattr(demo, "others_shipped", dict)
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    assert "no earlier demo" in refused("demo", "--quick", "--out", out)
    assert (out / "precious.txt").read_text() == "mine"
    (out / "report.html").write_text("an earlier demo")
    assert run(["demo", "--quick", "--out", str(out), "--seed", "2"]) == 0
    assert mvm.load(out).recipe.seed == 2
    assert {p.name for p in out.iterdir()} >= {"checkpoints", "metrics.jsonl", "recipe.json", "report.html"}
    assert (out / "report.html").read_text(encoding="utf-8") != "an earlier demo"
    assert not (out / "precious.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_demo_does_not_replace_a_trained_run(trained, refused):
    before = sorted(str(p) for p in trained.rglob("*"))
    assert "no earlier demo" in refused("demo", "--quick", "--out", trained)
    assert sorted(str(p) for p in trained.rglob("*")) == before


# --- recipes ------------------------------------------------------------------------------------------------------


def test_recipes(capsys):
    assert run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("digits ") and load_recipe("digits").description in line for line in lines)


def test_recipes_are_listed_in_columns(done):
    lines = done("recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(shipped())
    assert all(line.endswith(load_recipe(line.split()[0]).description) for line in lines)


@pytest.mark.parametrize("name", ["digits", "imagenette-ddt-s", "imagenette-rae-s"])
def test_recipe_shown_is_a_file_to_train(name, done, refused, tmp_path):
    """A step number that is refused last of all, so that nothing is trained."""
    said = done("recipes", "show", name)
    assert said == done("recipes", name)
    (tmp_path / "mine.toml").write_text(said)
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe(name)
    assert "until=0" in refused("train", tmp_path / "mine.toml", "--until", "0")


def test_recipe_page_of_a_file(tmp_path, done):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ndescription = "own"\n[train]\nsteps = 77\n')
    said = done("recipes", "show", path)
    assert said.startswith("# mine: own\n")
    assert "# Training steps (optimizer updates). Default: 1000.\nsteps = 77\n" in said
    path.write_text(said)
    assert done("recipes", "show", path) == said


def test_recipe_page_of_a_run(trained, done, tmp_path):
    (tmp_path / "mine.toml").write_text(done("recipes", "show", trained / "recipe.json"))
    assert load_recipe(str(tmp_path / "mine.toml")) == mvm.load(trained).recipe


# --- options ------------------------------------------------------------------------------------------------------


def shown(said):
    """The options of a listing with their values, as a shell would hand them on."""
    found = (shlex.split(line[:32] if line[31:32] == " " else line) for line in said.splitlines() if line[:2] == "--")
    return {words[0].removeprefix("--"): words[1] for words in found}


@pytest.mark.parametrize("name", ["cifar10", "imagenet256-ddt-xl", "imagenet256-rae-stage1"])
def test_all_options_are_listed_with_their_values(name, done):
    said = done("options", "--recipe", name)
    listed, recipe = shown(said), load_recipe(name)
    assert listed.keys() == options(recipe).keys() - {"name", "description"}
    assert override(recipe, listed) == recipe
    assert said.splitlines()[0] == f"Options of {name}"
    tables = re.findall(r"^\[(\S+)\] \S.*\.$", said, re.MULTILINE)
    assert tables == list(dict.fromkeys(option.rpartition(".")[0] for option in listed if "." in option))


def test_options_found_by_words(done):
    assert done("options", "PEAK", "learning rate") == (
        "--train.lr 0.003                Learning rate: the peak, after warm-up and before decay. (float;\n"
        "                                default 0.0001)\n"
    )
    assert shown(done("options", "guidance scale", "classifier-free")) == {"sample.cfg": "1.0"}
    assert shown(done("options", "train.beta")) == {"train.beta1": "0.9", "train.beta2": "0.95"}
    assert "--train.lr 0.002 " in done("options", "lr", "--recipe", "digits")
    assert shown(done("options", "lpips", "weights", "--recipe", "imagenette-rae-s")) == {
        "reconstruction.lpips_weights": ""
    }


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["batch_size"], "; nearest: train.batch"),
        (["epochs"], "; nearest: train.steps"),
        (["warmpu"], "; nearest: train.warmup"),
        (["betas"], "; nearest: train.beta1, train.beta2"),
        (["qq", "zz"], ""),
    ],
)
def test_no_option_is_found(words, near, capsys):
    assert run(["options", *words]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"mvm: no option has '{' '.join(words)}' in its name or meaning{near}\n"
