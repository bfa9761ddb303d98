"""mvm bench: its figures in print and in JSON."""

import json

import pytest

from mvm.network import multiply_adds, parameters
from mvm.recipes import load_recipe, override

SAMPLING = {"images", "nfe", "rho", "share", "batches", "seconds", "spread", "images_per_second"}
SPEED = {"warm_up_s", "step_ms", "spread", "images_per_second"}
CHANGES = ["as it is", "resolution x 2", "depth x 2", "batch x 2"]


@pytest.fixture(scope="session")
def small(small):
    """The options of a short training but for those of `mvm train` alone."""
    return [token for token in small if token != "--no-report"]


@pytest.fixture(scope="session")
def tiny(tiny):
    return [token for token in tiny if token != "--no-report"]


@pytest.fixture(scope="module")
def quick(small):
    return [*small, "--steps", "3"]


def test_figures_of_a_recipe(quick, tmp_path, done):
    out = tmp_path / "deep" / "bench.json"
    said = done("bench", "digits", *quick, "--samples", "4", "--grow", "--json", out)
    found = json.loads(out.read_text())
    changes = {"network.depth": "1", "network.heads": "2", "network.width": "16", "network.patch": "4"}
    network = override(load_recipe("digits"), changes).network
    facts = {
        "recipe": "digits",
        "network": {"size": "tiny", "patch": 4, "input": [1, 8, 8]},
        "tokens": 4,
        "parameters": parameters(network, (1, 8, 8), 10),
        "multiply_adds": multiply_adds(network, (1, 8, 8), 10),
        "batch": 8,
        "recompute": 0.0,
    }
    assert {key: found[key] for key in facts} == facts
    assert found.keys() >= {"precision", "compile", "machine", "training", "sampling", "growth"}
    assert found["machine"].keys() == {"device", "torch", "python"}
    assert found["training"].keys() >= SPEED
    assert found["training"]["images_per_second"] == pytest.approx(8000 / found["training"]["step_ms"])
    assert found["sampling"].keys() == SAMPLING
    assert (found["sampling"]["images"], found["sampling"]["nfe"]) == (4, 26)
    assert found["sampling"]["images_per_second"] == pytest.approx(4 / found["sampling"]["seconds"])
    assert [row["change"] for row in found["growth"]] == CHANGES
    for row in found["growth"]:
        assert row.keys() >= {"times_step", *SPEED}
        assert row["times_step"] == pytest.approx(row["step_ms"] / found["growth"][0]["step_ms"])
    batches = [row["images_per_second"] * row["step_ms"] / 1000 for row in found["growth"]]
    assert batches == pytest.approx([8, 8, 8, 16])
    assert all(f"| {change} |" in said for change in ["digits", *CHANGES])
    assert "sampling: " in said
    assert "at 26 evaluations" in said


def test_no_samples_and_no_growth_unless_asked_for(quick, tmp_path, done):
    said = done("bench", "digits", *quick, "--samples", "0", "--json", tmp_path / "x.json")
    assert not {"sampling", "growth"} & json.loads((tmp_path / "x.json").read_text()).keys()
    assert "sampling" not in said
    assert "x 2" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]  # and no run


def test_a_known_set_needs_no_images(tiny, tmp_path, monkeypatch, done):
    monkeypatch.chdir(tmp_path)
    assert "| cifar10 |" in done("bench", "cifar10", *tiny, "--steps", "1", "--samples", "0")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_tells_its_shape(prepared, tiny, tmp_path, done):
    out = tmp_path / "x.json"
    folder = ["--data.name", "folder", "--data.path", prepared]
    done("bench", "digits", *tiny, *folder, "--steps", "1", "--samples", "0", "--json", out)
    assert json.loads(out.read_text())["network"]["input"] == [3, 32, 32]


def test_a_bad_place_for_the_figures_is_told_before_the_work(tmp_path, refused):
    """Full size: it would take long."""
    (tmp_path / "file").write_text("mine")
    assert "file" in refused("bench", "imagenet32-dit-l", "--json", tmp_path / "file" / "x.json")


def test_sampling_alone(tiny, done, tmp_path):
    out = tmp_path / "bench.json"
    said = done("bench", "digits", *tiny, "--steps", "0", "--samples", "3", "--json", out)
    assert "| training |" not in said
    assert "sampling: " in said
    assert "training" not in json.loads(out.read_text())
