"""A run directory that is moved or removed while it trains: it stops, and writes nothing to a second place."""

import re
import shutil

import pytest
from tests.training.tiny_recipe import NETWORK, recipe_with

from mvm import checkpoint, cli
from mvm.training.loop import train

# TensorBoard's own thread may be writing the last line at that moment
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

SHORT = {"train.batch": "8", "train.steps": "8", "train.warmup": "0", "train.log_every": "1", "train.save_every": "2"}
PREVIEWS = {"preview.every": "2", "preview.count": "4", "preview.grid": "4", "sample.nfe": "1"}


def go(run, at=0, act=None, resume=False):
    """Train; act once the line of step `at` is written."""
    recipe = recipe_with(NETWORK | SHORT | PREVIEWS)
    train(recipe, run, resume=resume, progress=False, on_log=lambda line: act() if line["step"] == at else None)


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_is_moved_stops_and_goes_on_there(tmp_path, at, again):
    """It split in two, of which neither was whole, and the exit code was 0. again: another has its name by then."""
    run, moved = tmp_path / "run", tmp_path / "moved"

    def move():
        run.rename(moved)
        if again:
            run.mkdir()
            (run / "mine").touch()

    with pytest.raises(ValueError, match="was, while it trained, moved") as stopped:
        go(run, at, move)
    if str(moved) in str(stopped.value):  # where the system tells
        assert f"{run} was, while it trained, moved to {moved}; continue with: mvm train --resume" in str(stopped.value)
    assert [path.name for path in run.iterdir()] == ["mine"] if again else not run.exists()
    for folder in checkpoint.folders(moved):
        checkpoint.check(folder, checkpoint.sampled_from(checkpoint.read_manifest(folder)))
    go(moved, resume=True)
    assert checkpoint.latest(moved).name == "step-00000008"
    assert not any(path.name.startswith(".") for path in moved.rglob("*"))  # the write under way when it was moved


def test_a_run_that_is_removed_stops(tmp_path):
    def remove():
        (tmp_path / "run").rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)  # a file may be written at this moment

    with pytest.raises(ValueError, match="was, while it trained, moved"):
        go(tmp_path / "run", 3, remove)
    assert not (tmp_path / "run").exists()


def test_the_command_names_both_places(tmp_path, capsys, monkeypatch):
    from mvm.training import logs

    run, moved, real = tmp_path / "run", tmp_path / "a b", logs.Log.write

    def write(self, line):
        real(self, line)
        if line["step"] == 2:
            run.rename(moved)

    monkeypatch.setattr(logs.Log, "write", write)
    words = ["--network.depth", "1", "--network.heads", "2", "--network.width", "16", "--train.batch", "4"]
    more = ["--train.steps", "4", "--train.log_every", "1", "--train.save_every", "1", "--device", "cpu"]
    assert cli.run(["train", "digits", *words, *more, "--out", str(run)]) == 2
    said = capsys.readouterr().err
    assert str(run) in said
    assert re.search(r"continue with: mvm train --resume '.*/a b'\. Nothing was written since$", said.strip())
    assert not run.exists()
