"""mvm train --init-from: another run's weights, and nothing else of it."""

import json
import shutil

import numpy as np
import pytest
import torch

from mvm import checkpoint
from mvm.data.prepare import prepare
from mvm.published import open_model


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
    assert "do not fit the recipe's network; give the recipe its network: --network.width 16" in refused(
        *tokens, "--network.width", "32"
    )
    said = refused(*tokens, "--network.depth", "2")
    assert "--init-from: blocks.1." in said
    assert "--network.depth 1" in said
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_unknown_weights_are_named(trained, tmp_path, small, refused):
    tokens = ["train", "digits", "--out", tmp_path / "run", *small, "--init-from", trained]
    said = refused(*tokens, "--init-weights", "nonsense")
    assert f"weights='nonsense': {trained} has no such weights; it has: ema, model" in said
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_folder_without_weights_is_named(tmp_path, small, refused):
    said = refused("train", "digits", "--out", tmp_path / "run", *small, "--init-from", tmp_path / "nothing")
    assert f"--init-from {tmp_path / 'nothing'}: '{tmp_path / 'nothing'}' is neither a run directory" in said


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


# ---------------------------------------------------------------- what differs is fitted


def folder_of(path, shape, classes, count=6):
    """A prepared folder of noise."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(count):
        place = path / "photos" / classes[number % len(classes)] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(place)
    channels, size, _ = shape
    prepare(path / "photos", path / "data", size=size, channels=channels, workers=1, progress=False)
    return ["--data.name", "folder", "--data.path", path / "data"]


def tune(done, out, small, data, source, *more):
    start = ["--init-from", source, "--init-weights", "model"]
    done("train", "digits", "--out", out, *small, *STILL, *data, *start, *more)
    return stored(out, "model")


def test_other_classes_get_a_table_of_their_own(trained, tmp_path, small, done, capsys):
    """All else is taken over; a new class starts as the null class, and one of the same name keeps its row."""
    first = tmp_path / "first"
    letters = folder_of(tmp_path / "letters", (1, 8, 8), ("a", "b", "c"))
    begin = tune(done, first, small, letters, trained)
    old = stored(trained, "model")
    assert all(torch.equal(begin[name], old[name]) for name in old if name != "label.weight")
    assert torch.equal(begin["label.weight"], old["label.weight"][-1].repeat(4, 1))
    begin["label.weight"].copy_(torch.arange(4.0)[:, None].expand(4, 16))
    newest = checkpoint.latest(first)
    checkpoint.save(newest, {"model": begin}, checkpoint.read_manifest(newest))
    capsys.readouterr()
    again = tune(done, tmp_path / "second", small, folder_of(tmp_path / "more", (1, 8, 8), ("x", "c")), first)
    assert torch.equal(again["label.weight"][:, 0], torch.tensor([2.0, 3.0, 3.0]))  # c's own; x and null


def test_what_was_taken_and_made_anew_is_printed(trained, tmp_path, small, capsys):
    from mvm.cli import run

    data = folder_of(tmp_path, (3, 16, 16), ("a", "b"))
    tokens = ["train", "digits", "--out", tmp_path / "run", *small, *STILL, *data, "--init-from", trained]
    assert run([str(token) for token in tokens]) == 0
    said = capsys.readouterr().err
    count = len(stored(trained))
    assert f"--init-from {trained}: took {count - 4} of {count} tensors, step 10 of run" in said
    assert "made anew: embed.weight, head.linear.weight, head.linear.bias, label.weight for 2 classes" in said
    found, old = stored(tmp_path / "run"), stored(trained)
    assert all(torch.allclose(found[name], old[name]) for name in old if name.startswith("blocks."))
    assert found["embed.weight"].shape == (16, 3 * 4 * 4)


def test_another_size_alone_takes_every_weight(trained, tmp_path, small, done):
    digits = tuple(map(str, range(10)))
    begin = tune(done, tmp_path / "run", small, folder_of(tmp_path, (1, 16, 16), digits, count=10), trained)
    assert same(begin, stored(trained, "model"))


def test_a_shipped_model_is_a_start(tmp_path, done):
    out = tmp_path / "run"
    done("train", "digits", "--out", out, *STILL, "--train.batch", "2", "--init-from", "digits")
    shipped = open_model("digits").weights
    assert all(torch.equal(value, shipped[name].float()) for name, value in stored(out, "model").items())
    assert json.loads((out / "init.json").read_text())["step"] == 1500


def test_another_meaning_of_the_output_is_a_warning(trained, tmp_path, small, capsys):
    from mvm.cli import run

    tokens = ["train", "digits", "--out", tmp_path / "run", *small, *STILL, "--init-from", trained]
    assert run([*map(str, tokens), "--objective.kind", "x0"]) == 0
    assert (
        "warning: what the network reads or predicts differs: objective.kind u there, x0 now" in capsys.readouterr().err
    )
