"""mvm train: new runs, resumed ones, and what a signal leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import mvm
from mvm import checkpoint
from mvm.cli import run
from mvm.recipes import parse_recipe


def test_train_with_overrides(trained):
    recipe = parse_recipe((trained / "recipe.json").read_text(), ".json", "x")
    assert recipe.train.steps == 10
    assert recipe.train.lr == 3e-3
    assert recipe.network.dimensions == (1, 16, 2)
    assert checkpoint.read_manifest(checkpoint.latest(trained))["step"] == 10
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10]


def test_default_folder_and_resume(tmp_path, monkeypatch, capsys, small):
    monkeypatch.chdir(tmp_path)
    constant = [*small, "--train.decay", "constant"]
    assert run(["train", "digits", *constant]) == 0
    assert "mvm sample runs/digits" in capsys.readouterr().out
    assert run(["train", "digits", "--resume", *constant, "--train.steps", "12"]) == 0
    assert checkpoint.latest(tmp_path / "runs" / "digits").name == "step-00000012"
    assert run(["sample", "runs/digits", "--num", "2", "--nfe", "2"]) == 0
    assert (tmp_path / "samples.png").is_file()


def test_a_run_is_resumed_by_its_name_alone_and_extended(tmp_path, monkeypatch, small, done, capsys):
    """Bit for bit the run that never stopped; more steps need no other option, whatever the schedule."""
    monkeypatch.chdir(tmp_path)
    done("train", "digits", "--out", "whole run", *small)
    done("train", "digits", "--out", "cut run", *small, "--until", "4")
    assert "is at step 10 of 10" in done("train", "--resume", "cut run")
    same = [checkpoint.load(checkpoint.latest(tmp_path / run), "ema") for run in ("whole run", "cut run")]
    assert all(same[0][name].equal(same[1][name]) for name in same[0])
    assert "is at step 12 of 12" in done("train", "--resume", "--out", "cut run", "--train.steps", "12")
    assert run(["train", "cut run", "--resume", "--train.steps", "13"]) == 0
    assert "from step 12 on: train.steps 12 there, 13 now" in capsys.readouterr().err
    told = json.loads((tmp_path / "cut run" / "changes.json").read_text())
    assert [(line["step"], line["old"], line["new"]) for line in told] == [(10, 10, 12), (12, 12, 13)]


def test_what_cannot_be_resumed_is_told(trained, tmp_path, monkeypatch, small, refused):
    monkeypatch.chdir(tmp_path)
    assert "--resume: 'runs/typo' does not exist; give the folder that" in refused("train", "--resume", "runs/typo")
    assert "is no run directory (no recipe.json in it)" in refused("train", "--resume", trained / "checkpoints")
    assert "name the run alone, which holds its recipe: mvm train --resume" in refused(
        "train", "digits", "--resume", trained
    )
    assert "is already at step 10; give more steps" in refused("train", "--resume", trained, "--train.steps", "3")
    assert "there is no run in runs/digits; check the path, or leave --resume out" in refused(
        "train", "digits", "--resume", *small
    )
    assert "mvm train needs a RECIPE; for the names see: mvm recipes" in refused("train")
    assert "no run is named; give a run directory" in refused("train", "--resume")
    assert f"{trained} is a run; continue it with: mvm train --resume {trained}" in refused("train", trained)
    assert "--allow-change belongs to --resume" in refused("train", "digits", "--allow-change")
    said = refused("train", "--resume", trained, "--train.lr", "1e-3", "--train.steps", "20")
    assert "train.lr 0.003 there, 0.001 now. --allow-change changes them from here on" in said
    assert "train.batch 8 there, 9 now" in refused("train", "--resume", trained, "--train.batch", "9", "--allow-change")
    assert list(tmp_path.iterdir()) == []


def test_a_scheduler_s_job_starts_or_continues(tmp_path, small, done):
    tokens = ["train", "digits", "--out", tmp_path / "run", *small, "--auto-resume"]
    assert "is at step 6 of 10;" in done(*tokens, "--until", "6")
    assert "is at step 10 of 10;" in done(*tokens)


def test_pausing_tells_where_the_run_is(tmp_path, small, done):
    tokens = ["train", "digits", "--out", tmp_path / "run", *small]
    assert "is at step 6 of 10;" in done(*tokens, "--until", "6")
    assert "is at step 6 of 10;" in done(*tokens, "--until", "3", "--resume")  # it was there already
    assert "is at step 10 of 10;" in done(*tokens, "--until", "99", "--resume")


def test_recipe_file(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[network]\nsize = "tiny"\npatch = 4\ndepth = 1\n[train]\nsteps = 2\nbatch = 4\n'
    )
    assert run(["train", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "run")]) == 0
    assert mvm.load(tmp_path / "run").recipe.name == "mine"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_leaves_a_run_to_resume(tmp_path, small, number, code):
    """A real process, a real signal: its exit code, no traceback, and the run ends as if nothing had happened."""
    out = tmp_path / "run"
    tokens = ["train", "digits", "--out", str(out), *small, "--train.log_every", "1", "--train.decay", "constant"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *tokens, "--train.steps", "100000"], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 1200
        while not (out / "metrics.jsonl").is_file() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=1200)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in said
    assert f"mvm: stopped; continue with: mvm train --resume {out}" in said
    step = checkpoint.read_manifest(checkpoint.latest(out))["step"]
    lines = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, step + 1))
    assert run([*tokens, "--resume", "--train.steps", str(step + 2)]) == 0
    assert run([*tokens[:3], str(tmp_path / "whole"), *tokens[4:], "--train.steps", str(step + 2)]) == 0
    files = [checkpoint.latest(folder) / "ema.safetensors" for folder in (out, tmp_path / "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


# one thread, as in this process: else sums may be ordered otherwise. SIGINT counts, also in the background.
START = (
    "import signal, sys, torch; signal.signal(signal.SIGINT, signal.default_int_handler); torch.set_num_threads(1);"
    "from mvm.cli import run; sys.exit(run(sys.argv[1:]))"
)
