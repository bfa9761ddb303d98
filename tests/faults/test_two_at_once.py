"""Two processes, one folder: the second refuses at once, in words; a killed one leaves the folder free."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mvm import checkpoint, cli, demo
from mvm.files import claimed, private_beside

WAIT = 60
TINY = ["--network.depth", "1", "--network.heads", "2", "--network.width", "16", "--train.batch", "4"]
# each step is short and every one is saved: a checkpoint is being written most of the time
LONG = [*TINY, "--train.steps", "1000000", "--train.save_every", "1", "--train.keep", "2", "--train.decay", "constant"]


def train(run: Path, *more: str) -> list[str]:
    return ["train", "digits", *LONG, "--device", "cpu", "--out", str(run), *more]


def wait_for(found, process: subprocess.Popen) -> None:
    end = time.monotonic() + WAIT
    while not found():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_second_training_is_refused_and_a_killed_one_leaves_the_run_free(tmp_path, capsys):
    run, log = tmp_path / "run", tmp_path / "log"
    with log.open("w") as file:
        words = [sys.executable, "-m", "mvm", *train(run)]
        first = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for(lambda: checkpoint.latest(run), first)
        start = time.monotonic()
        assert cli.run(train(run, "--resume")) == 2
        assert time.monotonic() - start < 5
        assert f"mvm: '{run}' is in use by another process; wait for it" in capsys.readouterr().err
        newest = checkpoint.latest(run)
        assert cli.run(["sample", str(run), "--device", "cpu", "-n", "4", "--out", str(tmp_path / "x.npy")]) == 0
        assert first.poll() is None  # it never noticed
        wait_for(lambda: checkpoint.latest(run).name > newest.name, first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    done = checkpoint.read_manifest(checkpoint.latest(run))["step"]
    assert cli.run(train(run, "--resume", "--until", str(done + 2))) == 0
    assert checkpoint.read_manifest(checkpoint.latest(run))["step"] == done + 2
    assert len(checkpoint.folders(run)) == 2
    assert not list((run / "checkpoints").glob(".*"))


def test_a_run_begun_by_another_meanwhile_is_left_alone(tmp_path, monkeypatch, capsys):
    """Both found no folder; the other has made it, and ended, while this one read its data."""
    from mvm.training import loop

    real = loop.training_store

    def late(*arguments):
        store = real(*arguments)
        monkeypatch.setattr(loop, "training_store", real)
        assert cli.run(train(tmp_path / "run", "--until", "2")) == 0
        return store

    monkeypatch.setattr(loop, "training_store", late)
    assert cli.run(train(tmp_path / "run", "--until", "1", "--auto-resume")) == 2
    assert "already holds a run; give --resume to continue it" in capsys.readouterr().err
    assert [folder.name for folder in checkpoint.folders(tmp_path / "run")] == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("before", ["nothing", "a demo"])
def test_a_second_demo_is_refused(tmp_path, capsys, before):
    """It used to remove the first one's work below its feet."""
    out = tmp_path / "out"
    if before == "a demo":
        out.mkdir()
        (out / demo.REPORT).write_text("good")
    with claimed(out), private_beside(out) as work:
        work.mkdir()
        assert cli.run(["demo", "--quick", "--out", str(out)]) == 2
        assert f"mvm: '{out}' is in use by another process" in capsys.readouterr().err
        assert work.is_dir()
        assert out.is_dir()


def test_a_demo_that_fails_leaves_no_empty_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "train", lambda *a, **o: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert cli.run(["demo", "--quick", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_demo_killed_within_the_swap_comes_back(tmp_path, monkeypatch):
    old = tmp_path / ".out.mvm-0123abcd.old"
    old.mkdir()
    (old / demo.REPORT).write_text("good")
    monkeypatch.setattr(demo, "train", lambda *a, **o: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert cli.run(["demo", "--quick", "--out", str(tmp_path / "out")]) == 2
    assert (tmp_path / "out" / demo.REPORT).read_text() == "good"
