"""The command: what it does, and what it says to every mistake: exit code 2, no traceback, the nearest name."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

import mvm
from mvm import demo, verify
from mvm.cli import run, split_overrides
from mvm.recipes import load_recipe, options, parse_recipe
from mvm.training import checkpoint

SMALL = [
    "--network.depth", "1", "--network.heads=2", "--network.width", "16", "--network.patch", "4",
    "--train.batch", "8", "--train.steps", "1e1", "--train.warmup", "0", "--train.log_every", "5",
]  # fmt: skip
COMMANDS = ("demo", "train", "sample", "verify", "recipes")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    assert run(["train", "digits", "--out", str(out), *SMALL, "--train.lr", "3e-3", "--train.ema", "0.5"]) == 0
    return out


@pytest.fixture
def refused(capsys):
    """Run a command line that must fail as a usage error; return what it said."""

    def check(*tokens):
        assert run([str(token) for token in tokens]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        return [line for line in captured.err.splitlines() if line.startswith("mvm: ")][-1]

    return check


def spawn(*tokens, cwd=None):
    command = [sys.executable, "-m", "mvm", *map(str, tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, env=environment)


# --- help -------------------------------------------------------------------------------------------------------


def test_help(capsys):
    for tokens in ([], ["--help"], ["-h"]):
        assert run(tokens) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command, capsys):
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"mvm {command}" in out
    wanted = {
        "demo": ("--out", "--quick", "--seed"),
        "train": ("RECIPE", "--out", "--resume", "--train.lr"),
        "sample": (
            "MODEL",
            "--num",
            "--nfe",
            "--solver",
            "--rho",
            "--cfg",
            "--interval",
            "--classes",
            "--seed",
            "--batch",
        ),
        "verify": ("--json",),
        "recipes": ("NAME",),
    }
    assert all(option in out for option in wanted[command])
    assert "overrides" not in out.lower()


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == mvm.__version__


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["smple", "x"], "sample"),
        (["trainn"], "train"),
        (["qqqq"], "demo, train, sample"),
        (["--nope"], "--nope"),
        (["sample", "digits", "--nfee", "3"], "--nfe"),
        (["sample", "digits", "--slover", "sa"], "--solver"),
        (["sample"], "MODEL"),
        (["train"], "RECIPE"),
        (["train", "digts"], "did you mean 'digits'"),
        (["train", "nothere.toml"], "nothere.toml does not exist"),
        (["train", "digits", "--train.lrr", "3"], "did you mean 'train.lr'"),
        (["train", "digits", "--trainn.steps=3"], "did you mean 'train.steps'"),
        (["train", "digits", "--train.lr"], "--train.lr needs a value"),
        (["train", "digits", "--train.lr", "fast"], "--train.lr fast: a value of type float is needed"),
        (["train", "digits", "--train.steps", "1.5"], "--train.steps 1.5: a value of type int is needed"),
        (["train", "digits", "--train.lr", "-1"], "train.lr=-1"),
        (["train", "digits", "--resum"], "--resume"),
        (["sample", "digits", "--sample.nfe", "3"], "unknown option '--sample.nfe'"),
        (["verify", "--train.lr", "3"], "unknown option '--train.lr'"),
        (["recipes", "digit"], "did you mean 'digits'"),
        (["demo", "--quik"], "--quick"),
        (["sample", "digits", "--nfe", "abc"], "--nfe"),
        (["sample", "digits", "extra"], "extra"),
        (["sample", "digts"], "did you mean 'digits'"),
        (["sample", "no/such/run"], "'no/such/run' is neither a run directory"),
        (["sample", "digits", "--nfe", "0"], "nfe=0"),
        (["sample", "digits", "--nfe", "-3"], "nfe=-3"),
        (["sample", "digits", "--num", "0"], "num=0"),
        (["sample", "digits", "--batch", "0"], "batch=0"),
        (["sample", "digits", "--seed", "-1"], "-1"),
        (["sample", "digits", "--rho", "-1"], "rho=-1"),
        (["sample", "digits", "--rho", "nan"], "rho=nan"),
        (["sample", "digits", "--rho", "inf"], "rho=inf"),
        (["sample", "digits", "--cfg", "nan"], "scale=nan"),
        (["sample", "digits", "--interval", "0.8,0.6"], "interval=[0.8, 0.6]"),
        (["sample", "digits", "--cfg", "2", "--interval", "0.8,0.6"], "interval=[0.8, 0.6]"),
        (["sample", "digits", "--interval", "0.6"], "--interval 0.6: two numbers"),
        (["sample", "digits", "--interval", "a,b"], "--interval a,b: two numbers"),
        (["sample", "digits", "--interval", "0,2"], "interval=[0.0, 2.0]"),
        (["sample", "digits", "--classes", "10"], "classes=10 out of range; this model has classes 0 to 9"),
        (["sample", "digits", "--classes", "3,-1"], "classes=-1 out of range"),
        (["sample", "digits", "--classes", "three"], "--classes three: whole numbers"),
        (["sample", "digits", "--solver", "adam"], "did you mean 'adams'"),
        (["sample", "digits", "--solver", "heun", "--rho", "1"], "ODE solver"),
        (["sample", "digits", "--device", "gpu"], "device='gpu'"),
        (["sample", "digits", "--out", "x.jpg"], "suffix '.jpg' is unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors(tokens, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*tokens)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["ema", "manifest"])
def test_damaged_checkpoint_is_named(trained, tmp_path, refused, part):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (path,) = checkpoint.latest(copy).glob(f"{part}.*")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert str(path) in refused("sample", copy, "--out", tmp_path / "x.png")
    assert str(path) in refused(
        "train", "digits", "--out", copy, "--resume", *SMALL, "--train.lr", "3e-3", "--train.ema", "0.5"
    )
    assert path.read_bytes() == bytes(data)


def test_run_without_checkpoint(trained, tmp_path, refused):
    shutil.copy(trained / "recipe.json", tmp_path / "recipe.json")
    assert "no checkpoint" in refused("sample", tmp_path, "--out", tmp_path / "x.png")


def test_a_run_is_not_overwritten(trained, refused):
    assert "--resume" in refused("train", "digits", "--out", trained, *SMALL)
    assert "train.lr" in refused("train", "digits", "--out", trained, "--resume", *SMALL, "--train.ema", "0.5")


def test_divergence_is_a_message(tmp_path, refused):
    said = refused("train", "digits", "--out", tmp_path / "run", *SMALL, "--train.lr", "1e30", "--train.log_every", "1")
    assert "try a lower --train.lr" in said


@pytest.mark.parametrize("command", ["train", "demo", "sample", "verify"])
def test_an_output_that_cannot_be_made_is_a_message(command, tmp_path, refused, monkeypatch):
    """A file stands where a folder is needed: like a full disk or a folder without permission, no traceback."""
    monkeypatch.setattr(verify, "ALL", (verify.check_score,))
    monkeypatch.setattr(demo, "QUICK", demo.Size(1, 100, (2,), 1, 2))
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "x"
    tokens = {
        "train": ["train", "digits", *SMALL, "--out", out],
        "demo": ["demo", "--quick", "--out", out],
        "sample": ["sample", "digits", "--num", "1", "--nfe", "1", "--out", out.with_suffix(".png")],
        "verify": ["verify", "--json", out],
    }[command]
    try:
        code = run([str(token) for token in tokens])
    except OSError as error:
        pytest.fail(f"traceback for the user: {error!r}")
    assert code != 0


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(["sample", "digits", "--nfee", "3"], "--nfe"), (["train", "digits", "--train.lrr", "1"], "train.lr")],
)
def test_usage_errors_of_the_process(tokens, words, tmp_path):
    done = spawn(*tokens, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert words in done.stderr
    assert done.stderr.startswith("mvm: ")


# --- recipes ------------------------------------------------------------------------------------------------------


def test_recipes(capsys):
    assert run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("digits ") and load_recipe("digits").description in line for line in lines)


def test_recipe_shown_is_a_command_line(capsys):
    assert run(["recipes", "digits"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--")]
    shown = dict(line.removeprefix("--").split(" ", 1) for line in lines)
    about = ("name", "description")  # not a setting
    assert {name: text for name, text in shown.items() if name not in about} == {
        name: str(value) for name, value in options(load_recipe("digits")).items() if name not in about
    }


# --- overrides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "rest", "found"),
    [
        (["train", "x", "--train.lr", "3e-4"], ["train", "x"], {"train.lr": "3e-4"}),
        (["train", "x", "--train.lr=3e-4", "--resume"], ["train", "x", "--resume"], {"train.lr": "3e-4"}),
        (["train", "--train.steps", "5", "x"], ["train", "x"], {"train.steps": "5"}),
        (["train", "x", "--path.law.mean", "-0.5"], ["train", "x"], {"path.law.mean": "-0.5"}),
        (["train", "x", "--out", "./a.b"], ["train", "x", "--out", "./a.b"], {}),
        (["train", "x", "--out=./a.b"], ["train", "x", "--out=./a.b"], {}),
        (["train", "x", "--a.b", "1", "--a.b", "2"], ["train", "x"], {"a.b": "2"}),
        (["train", "x", "--a.b="], ["train", "x"], {"a.b": ""}),
        ([], [], {}),
    ],
)
def test_split_overrides(tokens, rest, found):
    assert split_overrides(tokens) == (rest, found)


def test_a_forgotten_value_does_not_swallow_the_next_option(refused, tmp_path):
    """--train.lr --resume: whatever is said, nothing is trained."""
    assert "--train.lr" in refused("train", "digits", "--out", tmp_path / "run", "--train.lr", "--resume")
    assert list(tmp_path.iterdir()) == []


def test_options_outside_any_section_can_be_given_as_shown(tmp_path):
    """`mvm recipes digits` shows --seed 0 like every other option."""
    assert run(["train", "digits", "--out", str(tmp_path / "run"), *SMALL, "--train.steps", "1", "--seed", "3"]) == 0
    assert mvm.load(tmp_path / "run").recipe.seed == 3


# --- train and sample ---------------------------------------------------------------------------------------------


def test_train_with_overrides(trained):
    recipe = parse_recipe((trained / "recipe.json").read_text(), ".json", "x")
    assert recipe.train.steps == 10
    assert recipe.train.lr == 3e-3
    assert recipe.network.dimensions == (1, 16, 2)
    assert checkpoint.read_manifest(checkpoint.latest(trained))["step"] == 10
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10]


def test_default_folder_and_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    constant = [*SMALL, "--train.decay", "constant"]
    assert run(["train", "digits", *constant]) == 0
    assert "mvm sample runs/digits" in capsys.readouterr().out
    assert run(["train", "digits", "--resume", *constant, "--train.steps", "12"]) == 0
    assert checkpoint.latest(tmp_path / "runs" / "digits").name == "step-00000012"
    assert run(["sample", "runs/digits", "--num", "2", "--nfe", "2"]) == 0
    assert (tmp_path / "samples.png").is_file()


def test_recipe_file(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[network]\nsize = "tiny"\npatch = 4\ndepth = 1\n[train]\nsteps = 2\nbatch = 4\n'
    )
    assert run(["train", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "run")]) == 0
    assert mvm.load(tmp_path / "run").recipe.name == "mine"


@pytest.mark.parametrize("name", ["x.png", "x.npz", "x.npy", "x.zip", "folder"])
def test_sample_writes_what_the_suffix_says(trained, tmp_path, name, capsys):
    out = tmp_path / name
    assert run(["sample", str(trained), "--num", "4", "--nfe", "3", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"wrote 4 images to {out}; adams, 3 evaluations, 3 network passes each" in said
    assert out.exists()
    if name == "x.png":
        assert Image.open(out).size == (2 * 66 + 2, 2 * 66 + 2)


def sampled(out, *tokens):
    assert run(["sample", "digits", "--nfe", "4", "--out", str(out), *tokens]) == 0
    found = np.load(out)
    return found["arr_0"].astype(int), found["arr_1"].tolist()


def test_sample_options(tmp_path):
    base, labels = sampled(tmp_path / "a.npz", "--num", "6")
    assert labels == [0, 1, 2, 3, 4, 5]
    assert base.shape == (6, 8, 8, 1)
    for tokens in (["--batch", "4"], ["--batch", "1"]):
        again, _ = sampled(tmp_path / "b.npz", "--num", "6", *tokens)
        assert np.abs(again - base).max() <= 1
    more, _ = sampled(tmp_path / "c.npz", "--num", "8")
    assert np.abs(more[:6] - base).max() <= 1
    later, labels = sampled(tmp_path / "d.npz", "--num", "2", "--seed", "2", "--classes", "2,3")
    assert labels == [2, 3]
    assert np.abs(later - base[2:4]).max() <= 1
    for tokens in (["--rho", "1"], ["--cfg", "3"], ["--solver", "sa"], ["--seed", "9"], ["--classes", "7"]):
        changed, _ = sampled(tmp_path / "e.npz", "--num", "6", *tokens)
        assert np.abs(changed - base).max() > 8, tokens


def test_cost_is_told(tmp_path, capsys):
    out = tmp_path / "x.npy"
    tokens = [
        "sample",
        "digits",
        "--num",
        "1",
        "--nfe",
        "13",
        "--cfg",
        "1.5",
        "--interval",
        "0.6,0.8",
        "--out",
        str(out),
    ]
    assert run(tokens) == 0
    # r = 3.5: t_i = (1 - i/13)^3.5 lies in [0.0563, 0.6090] for i = 2..7
    inside = sum(0.0563 <= (1 - i / 13) ** 3.5 <= 0.6090 for i in range(13))
    assert f"adams, 13 evaluations, {13 + inside} network passes each" in capsys.readouterr().out


def test_recipe_settings_are_the_default(tmp_path, capsys):
    assert run(["sample", "digits", "--num", "1", "--out", str(tmp_path / "x.npy")]) == 0
    assert "adams, 26 evaluations, 26 network passes" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_leaves_a_run_to_resume(tmp_path):
    """A real process, a real signal: exit code 130, no traceback, and the run ends as if nothing had happened."""
    out = tmp_path / "run"
    tokens = ["train", "digits", "--out", str(out), *SMALL, "--train.log_every", "1", "--train.decay", "constant"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *tokens, "--train.steps", "100000"], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").is_file() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "--resume" in said
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
