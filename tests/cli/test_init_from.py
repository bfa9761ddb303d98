"""mvm train --init-from: another run's weights, and nothing else of it."""

import json
import shutil

import pytest
import torch

from mvm.training import checkpoint


def stored(run, name="ema", step=None):
    folder = checkpoint.latest(run) if step is None else checkpoint.step_folder(run, step)
    return checkpoint.load(folder, name)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


STILL = ["--train.lr", "1e-30", "--train.steps", "1", "--train.ema", "0.5"]  # one step that moves nothing


@pytest.mark.parametrize("name", ["ema", "model"])
def test_a_run_starts_from_the_weights_of_another(name, trained, tmp_path, small, done):
    out = tmp_path / "run"
    done("train", "digits", "--out", out, *small, *STILL, "--init-from", trained, "--init-weights", name)
    assert checkpoint.latest(out).name == "step-00000001"  # its own steps, from 0
    assert same(stored(out, "model"), stored(trained, name))
    assert all(torch.allclose(value, stored(trained, name)[key]) for key, value in stored(out, "ema").items())
    assert not same(stored(trained, "ema"), stored(trained, "model"))


def test_where_a_run_started_is_written_down(trained, tmp_path, small, done):
    done("train", "digits", "--out", tmp_path / "run", *small, *STILL, "--init-from", trained)
    manifest = checkpoint.read_manifest(checkpoint.latest(trained))
    assert json.loads((tmp_path / "run" / "init.json").read_text()) == {
        "run": trained.name,
        "step": 10,
        "weights": "ema",
        "sha256": manifest["sha256"]["ema.safetensors"],
    }


def test_it_is_not_a_resumed_run(trained, tmp_path, small, done):
    """A fresh optimizer, a fresh log, the data from the first on: unlike --resume, other options are allowed."""
    out = tmp_path / "run"
    changed = [
        "--train.lr",
        "1e-2",
        "--train.ema",
        "0.9",
        "--train.steps",
        "4",
        "--train.log_every",
        "1",
        "--seed",
        "5",
    ]
    done("train", "digits", "--out", out, *small, *changed, "--init-from", trained)
    lines = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4]
    counters = [float(value) for key, value in stored(out, "optimizer").items() if key.endswith("/step")]
    assert set(counters) == {4.0}
    assert not same(stored(out, "model"), stored(trained, "ema"))


def test_a_plain_run_has_no_origin(trained):
    assert not (trained / "init.json").exists()


def test_a_run_of_its_own_goes_on_where_it_was(trained, tmp_path, small, done):
    """The same command with --resume: its own checkpoint goes before the other's weights."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tokens = [*small, "--train.lr", "1e-2", "--train.steps", "4", "--init-from", trained]
    done("train", "digits", "--out", whole, *tokens)
    done("train", "digits", "--out", cut, *tokens, "--until", "2")
    origin = (cut / "init.json").read_bytes()
    done("train", "digits", "--out", cut, *tokens, "--resume")
    assert same(stored(whole, "model"), stored(cut, "model"))
    assert (cut / "init.json").read_bytes() == origin


def test_other_shapes_are_named(trained, tmp_path, small, refused):
    tokens = ["train", "digits", "--out", tmp_path / "run", *small, "--init-from", trained]
    said = refused(*tokens, "--network.width", "32")
    assert "embed.weight has shape (16, 16), the recipe's network (32, 16)" in said
    said = refused(*tokens, "--network.depth", "2")
    assert "do not fit the recipe's network: blocks.1." in said
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_unknown_weights_are_named(trained, tmp_path, small, refused):
    tokens = ["train", "digits", "--out", tmp_path / "run", *small, "--init-from", trained]
    said = refused(*tokens, "--init-weights", "nonsense")
    assert f"--init-weights nonsense: {trained} has no such weights; it has: ema, model" in said
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_folder_without_weights_is_named(tmp_path, small, refused):
    said = refused("train", "digits", "--out", tmp_path / "run", *small, "--init-from", tmp_path / "nothing")
    assert f"--init-from {tmp_path / 'nothing'}: no checkpoint there" in said


def test_another_average_can_be_chosen(averaged, tmp_path, small, done):
    out = tmp_path / "run"
    done("train", "digits", "--out", out, *small, *STILL, "--init-from", averaged, "--init-weights", "power-0.1")
    assert same(stored(out, "model"), stored(averaged, "power-0.1"))


def test_a_damaged_source_is_named(trained, tmp_path, small, refused):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    path = checkpoint.latest(copy) / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in refused("train", "digits", "--out", tmp_path / "run", *small, "--init-from", copy)
