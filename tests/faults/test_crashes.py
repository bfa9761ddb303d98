"""A sample of the crash matrix (`make faults` has all of it), and a test for each fault that it has found."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.faults.activities import train

from mvm import checkpoint, cli, files, samples
from mvm.training import logs

ROOT = Path(__file__).parents[2]


def test_a_sample_of_the_crash_matrix():
    words = [sys.executable, "-m", "tests.faults.crashes", "--kills", "1", "--most", "2", "--only", "train, resumed"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, "--workers", "1"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"\| all \| \| (\d+) \| (\d+) \| (\d+) \|", done.stdout)
    assert total is not None
    assert total.groups() == ("7", "7", "0")


# ---------------------------------------------------------------- what it has found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    assert train(folder, False) == 0
    return folder / "run"


def test_a_run_killed_before_its_recipe_had_a_name_starts_again(tmp_path):
    """The temporary was taken for someone else's file, and the folder refused for good."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".recipe.json.mvm-0123abcd.tmp").mkdir()
    (tmp_path / "run" / ".recipe.json.mvm-0123abcd.tmp" / "recipe.json").write_text('{"na')
    assert train(tmp_path, True, "--until", "1") == 0
    assert not list((tmp_path / "run").glob(".*"))


def test_the_last_snapshot_is_on_disk_before_the_last_checkpoint(tmp_path, monkeypatch):
    """A kill between the two lost it: a run that is at its last step has nothing left to do."""
    saved, real = [], checkpoint.save

    def noted(folder, *rest):
        saved.append(f"{folder.parent.name}/{folder.name}")
        real(folder, *rest)

    monkeypatch.setattr(checkpoint, "save", noted)
    assert train(tmp_path, False) == 0
    assert saved.index("snapshots/step-00000012") < saved.index("checkpoints/step-00000012")


def test_what_was_to_be_removed_goes_when_the_run_goes_on(run, tmp_path):
    """A kill between the last checkpoint and the removal of an old one left it for good."""
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.copytree(checkpoint.latest(copy), checkpoint.step_folder(copy, 4))
    manifest = json.loads((checkpoint.latest(copy) / "manifest.json").read_text())
    (checkpoint.step_folder(copy, 4) / "manifest.json").write_text(json.dumps({**manifest, "step": 4}))
    assert train(tmp_path, True) == 0
    assert [folder.name for folder in checkpoint.folders(copy)] == ["step-00000008", "step-00000012"]


def test_a_checkpoint_that_is_removed_loses_its_name_first(run, tmp_path, monkeypatch):
    """Half of it was found under its name."""
    copy = shutil.copytree(run, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda *_, **__: None)  # killed before the first file goes
        checkpoint.prune(copy, 1)
    assert list((copy / "checkpoints").glob(".step-*"))
    assert [folder.name for folder in checkpoint.folders(copy)] == ["step-00000012"]
    assert train(tmp_path, True) == 0
    assert not list((copy / "checkpoints").glob(".*"))


def test_a_checkpoint_that_stands_aside_comes_back(run, tmp_path):
    """A kill within the swap of a checkpoint that is written again: the newest one was lost."""
    copy = shutil.copytree(run, tmp_path / "run")
    newest = checkpoint.latest(copy)
    log = (copy / "metrics.jsonl").read_text()
    newest.rename(newest.with_name(f".{newest.name}.mvm-0123abcd.old"))
    assert train(tmp_path, True) == 0
    assert checkpoint.latest(copy) == newest
    assert (copy / "metrics.jsonl").read_text() == log  # no step was done again


def test_a_log_line_that_a_full_disk_has_cut_is_dropped(tmp_path):
    """The next line was written behind it; the run could not go on."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo{"step": 3, "loss": 1.0}\n\0\0\n{"step": 4}\n{"step": 5')
    logs.keep_metrics(path, 4)
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 4}\n'


@pytest.mark.parametrize("breaks", ["add_scalar", "close"])
def test_tensorboard_on_a_full_disk_does_not_stop_training(tmp_path, monkeypatch, capsys, breaks):
    """Its writer raised in the middle of a step."""

    class Board:
        def __getattr__(self, name):
            return lambda *arguments: self.fail() if name == breaks else None

        def fail(self):
            raise OSError(28, "No space left on device")

    package = SimpleNamespace(SummaryWriter=lambda *_, **__: Board())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    assert train(tmp_path, False) == 0
    assert capsys.readouterr().err.count("TensorBoard") == 1
    assert checkpoint.latest(tmp_path / "run").name == "step-00000012"


def sample(run, out):
    words = ["sample", str(run), "-n", "6", "--batch", "3", "--nfe", "2", "--device", "cpu", "--out", str(out)]
    return cli.run(words)


def test_a_folder_of_samples_killed_before_its_note_is_finished(run, tmp_path, monkeypatch):
    """The same command refused the folder that it had written itself."""
    real = samples.write_text

    def crash(path, text):
        if path.name == "out.json":
            raise OSError("killed")
        real(path, text)

    monkeypatch.setattr(samples, "write_text", crash)
    assert sample(run, tmp_path / "out") == 2
    assert len(list((tmp_path / "out").iterdir())) == 6
    monkeypatch.undo()
    assert sample(run, tmp_path / "out") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.json"]
    assert sample(run, tmp_path / "out") == 2  # finished: not to be mixed with


def test_samples_killed_in_the_removal_of_parts_are_finished(run, tmp_path, monkeypatch):
    """samples.json was gone and a part was not: the same command refused the folder."""
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        assert sample(run, tmp_path / "out.npy") == 0
    before = np.load(tmp_path / "out.npy")
    (left,) = (path for path in tmp_path.iterdir() if any(path.glob(".out.npy.parts/part-*.npy")))
    (left / ".out.npy.parts" / "samples.json").unlink()
    assert sample(run, tmp_path / "out.npy") == 0
    assert np.array_equal(np.load(tmp_path / "out.npy"), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy", "out.npy.json"]


def sweep(run, out, nfe):
    words = ["sweep", str(run), "--nfe", nfe, "--rho", "0", "-n", "20", "--batch", "20", "--device", "cpu"]
    return cli.run([*words, "--out", str(out)])


def test_half_a_cell_is_no_result_of_a_sweep(run, tmp_path):
    """Its temporary ends in .json, and the report of other cells took it for one of them."""
    out = tmp_path / "out"
    (out / "cells").mkdir(parents=True)
    half = out / "cells" / ".adams-nfe3-rho0.json.mvm-0123abcd.tmp" / "adams-nfe3-rho0.json"
    left = out / "work" / ".adams-nfe2-rho0.mvm-0123abcd.tmp"
    for folder in (half.parent, left):
        folder.mkdir(parents=True)
    half.write_text('{"settings": {"so')
    assert sweep(run, out, "2") == 0
    assert [path.name for path in (out / "cells").iterdir() if path.suffix == ".json"] == ["adams-nfe2-rho0.json"]
    assert not left.exists()
