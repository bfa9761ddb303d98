"""mvm verify, mvm demo, mvm recipes: commands that show."""

import json
import re
import shlex

import pytest

import mvm
from mvm import demo, verify
from mvm.cli import run, split_overrides
from mvm.recipes import Recipe, load_recipe, options, override, shipped

# --- verify and demo ------------------------------------------------------------------------------------------------


def test_verify_json(tmp_path, monkeypatch, capsys):
    def order():
        yield verify.Check("order", 2.0, 1.85, at_least=True)

    monkeypatch.setattr(verify, "ALL", (verify.check_score, verify.check_regression, order))
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

    monkeypatch.setattr(verify, "ALL", (wrong, verify.check_score))
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
    monkeypatch.setattr(demo, "QUICK", demo.Size(1, 100, (2,), 1, 2))
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


@pytest.mark.parametrize("name", shipped())
def test_recipe_shown_is_a_command_line(name, done):
    """Every line after the head can be pasted behind a recipe of that task, into a shell: it makes this recipe."""
    said = done("recipes", "show", name)
    assert said == done("recipes", name)
    tokens = shlex.split(" ".join(line for line in said.splitlines() if line.startswith("--")))
    rest, overrides = split_overrides(tokens)
    assert rest == ["--seed", "0"]
    about = {"name": name, "description": load_recipe(name).description}  # no settings
    assert overrides.keys() | about.keys() | {"seed"} == options(load_recipe(name)).keys()
    other = load_recipe("digits" if isinstance(load_recipe(name), Recipe) else "imagenette-rae-s")
    assert override(other, {**overrides, **about, "seed": "0"}) == load_recipe(name)


@pytest.mark.parametrize("name", shipped())
def test_each_line_of_a_recipe_is_understood_by_train(name, done, refused):
    """All of them at once, and a step number that is refused last of all, so that nothing is trained."""
    tokens = shlex.split(" ".join(line for line in done("recipes", name).splitlines() if line.startswith("--")))
    assert "until=0" in refused("train", name, *tokens, "--until", "0")


def test_recipe_page_of_a_file(tmp_path, done):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ndescription = "own"\n[train]\nsteps = 77\n')
    said = done("recipes", "show", path)
    assert said.startswith("# mine: own\n")
    assert "--train.steps 77\n" in said
