"""The command line as such: help, versions, mistakes. Every mistake: exit code 2, no traceback, the nearest name."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import mvm
from mvm import checkpoint, demo, verify
from mvm.cli import run, split_overrides

COMMANDS = (
    "demo",
    "train",
    "sample",
    "verify",
    "recipes",
    "options",
    "data",
    "bench",
    "ema",
    "eval",
    "sweep",
    "compare",
)


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
        "train": (
            "RECIPE",
            "--out",
            "--resume",
            "--until",
            "--init-from",
            "--init-weights",
            "--train.lr",
            "mvm options",
        ),
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
        "options": ("PATTERN", "--recipe"),
        "data": ("prepare", "info", "stats"),
        "bench": ("RECIPE", "--steps", "--samples", "--grow", "--json", "--device"),
        "ema": ("RUN", "--width", "--out", "--step"),
        "eval": ("IMAGES", "--ref", "--metrics", "--inception", "--num", "--jackknife", "--kid-size", "--json"),
        "sweep": ("MODEL", "--ref", "--metrics", "--solvers", "--nfe", "--rho", "--cfg", "--interval", "--repeats"),
        "compare": ("MODEL_A", "MODEL_B", "--ref", "--metrics", "--num", "--blocks", "--json"),
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
        (["qqqq"], "Available commands: data, edit, eval, sweep, compare, demo, "),
        (["evla", "x"], 'Did you mean "eval"'),
        (["compar", "x", "y"], 'Did you mean "compare"'),
        (["data", "stat"], 'Did you mean "stats"'),
        (["eval"], "IMAGES"),
        (["sweep", "digits", "--train.lr", "1"], "dotted options belong to: mvm train, mvm bench"),
        (["--nope"], "--nope"),
        (["sample", "digits", "--nfee", "3"], "--nfe"),
        (["sample", "digits", "--slover", "sa"], "--solver"),
        (["sample"], "MODEL"),
        (["train"], "RECIPE"),
        (["train", "digts"], "did you mean 'digits'"),
        (["train", "nothere.toml"], "nothere.toml does not exist"),
        (["train", "digits", "--train.lrr", "3"], "did you mean --train.lr?"),
        (["train", "digits", "--trainn.steps=3"], "did you mean --train.steps?"),
        (["train", "digits", "--train.lr"], "--train.lr needs a value"),
        (["train", "digits", "--data.mirror", "--out", "x"], "--data.mirror needs a value, as in --data.mirror VALUE"),
        (["train", "digits", "--train.lr", "fast"], "--train.lr fast: a value of type float is needed"),
        (["train", "digits", "--train.steps", "1.5"], "--train.steps 1.5: a value of type int is needed"),
        (["train", "digits", "--train.lr", "-1"], "train.lr=-1"),
        (["train", "digits", "--resum"], "--resume"),
        (["sample", "digits", "--sample.nfe", "3"], "unknown option '--sample.nfe'"),
        (["verify", "--train.lr", "3"], "unknown option '--train.lr'"),
        (["recipes", "digit"], "did you mean 'digits'"),
        (["recipes", "show"], "mvm recipes show needs a name"),
        (["recipes", "show", "digit"], "did you mean 'digits'"),
        (["recipes", "digits", "cifar10"], "one recipe at a time"),
        (["recipes", "show", "digits", "cifar10"], "one recipe at a time"),
        (["bench"], "RECIPE"),
        (["bench", "digts"], "did you mean 'digits'"),
        (["bench", "digits", "--train.lrr", "1"], "did you mean --train.lr?"),
        (["bench", "digits", "--steps", "-1"], "steps=-1"),
        (["bench", "digits", "--samples", "-1"], "samples=-1"),
        (["ema"], "RUN"),
        (["ema", "nothing", "--out", "x"], "--width"),
        (["ema", "nothing", "--width", "0.1"], "--out"),
        (["ema", "nothing", "--width", "0.1", "--out", "x"], "nothing is not a run directory"),
        (["data", "prepar"], 'Did you mean "prepare"'),
        (["data", "info", "nothing"], "'nothing' holds no prepared data"),
        (["data", "prepare", "x", "--train.lr", "1"], "dotted options belong to: mvm train, mvm bench"),
        (["train", "digits", "--train.ema", "0.9,high"], "--train.ema high: a value of type float is needed"),
        (["train", "digits", "--train.snapshot_every", "5"], "train.snapshot_every=5 stores train.power averages"),
        (["train", "digits", "--data.name", "folder"], "data.name='folder' needs data.path"),
        (["train", "digits", "--until", "0"], "until=0"),
        (["train", "digits", "--init-weights", "model"], "--init-weights model belongs to --init-from"),
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
        (["sample", "digits", "--cfg", "nan"], "cfg=nan is out of range"),
        (["sample", "digits", "--interval", "0.8,0.6"], "interval=[0.8, 0.6]"),
        (["sample", "digits", "--cfg", "2", "--interval", "0.8,0.6"], "interval=[0.8, 0.6]"),
        (["sample", "digits", "--interval", "0.6"], "--interval 0.6: two numbers"),
        (["sample", "digits", "--interval", "a,b"], "--interval a,b: two numbers"),
        (["sample", "digits", "--interval", "0,2"], "interval=[0.0, 2.0]"),
        (["sample", "digits", "--classes", "10"], "classes=10 out of range; this model has classes 0 to 9"),
        (["sample", "digits", "--classes", "3,-1"], "classes=-1 out of range"),
        (["sample", "digits", "--classes", "three"], "classes=three is unknown; give numbers or names of this model"),
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


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["train", "digits", "--lr", "1e-3"], "'--lr'; did you mean --train.lr? See: mvm options lr"),
        (["train", "--lr", "1e-3", "digits"], "'--lr'; did you mean --train.lr? See: mvm options lr"),
        (["train", "--lr=1e-3"], "'--lr'; did you mean --train.lr? See: mvm options lr"),
        (["bench", "digits", "--lr", "1e-3"], "'--lr'; did you mean --train.lr? See: mvm options lr"),
        (
            ["train", "digits", "--learning-rate", "1"],
            "'--learning-rate'; did you mean --train.lr? See: mvm options lr",
        ),
        (
            ["train", "digits", "--epochs", "10"],
            "'--epochs'; did you mean --train.steps (steps = epochs * images / train.batch)? See: mvm options steps",
        ),
        (
            ["train", "digits", "--batch_size", "64"],
            "'--batch_size'; did you mean --train.batch? See: mvm options batch",
        ),
        (["train", "digits", "--batch", "64"], "'--batch'; did you mean --train.batch? See: mvm options batch"),
        (["train", "digits", "--steps", "5"], "'--steps'; did you mean --train.steps? See: mvm options steps"),
        (["train", "digits", "--ema", "0.9"], "'--ema'; did you mean --train.ema? See: mvm options ema"),
        (["train", "digits", "--bf16"], "'--bf16'; did you mean --engine.precision? See: mvm options precision"),
        (["train", "digits", "--compile"], "'--compile'; did you mean --engine.compile? See: mvm options compile"),
        (["train", "digits", "--cfg", "2"], "'--cfg'; did you mean --sample.cfg? See: mvm options cfg"),
        (["train", "digits", "--depth", "2"], "'--depth'; did you mean --network.depth? See: mvm options depth"),
        (
            ["train", "digits", "--data_dir", "x"],
            "'--data_dir'; did you mean --data.path (with --data.name folder)? See: mvm options path",
        ),
        (["train", "digits", "--output_dir", "x"], "'--output_dir'; did you mean --out? See: mvm train --help"),
        (
            ["train", "digits", "--num_workers", "4"],
            "'--num_workers'; did you mean --workers of mvm data prepare "
            "(training reads one step ahead, without workers)? See: mvm train --help",
        ),
        (["sample", "digits", "--steps", "4"], "'--steps'; did you mean --nfe? See: mvm sample --help"),
        (
            ["sample", "digits", "--num-inference-steps", "4"],
            "'--num-inference-steps'; did you mean --nfe? See: mvm sample --help",
        ),
        (["sample", "digits", "--guidance_scale=4"], "'--guidance_scale'; did you mean --cfg? See: mvm sample --help"),
        (["sample", "digits", "--n", "4"], "'--n'; did you mean --num? See: mvm sample --help"),
        (["sample", "digits", "--count", "4"], "'--count'; did you mean --num? See: mvm sample --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_by_other_projects_names(tokens, words, refused):
    assert refused(*tokens) == f"mvm: unknown option {words}"


def test_misspelt_options_of_a_command_are_its_own(refused):
    assert refused("train", "digits", "--resum") == "mvm: Unknown option: --resum. Did you mean --resume?"
    assert refused("sample", "digits", "--class", "3") == "mvm: Unknown option: --class. Did you mean --classes?"
    assert refused("demo", "--lr", "3").startswith("mvm: Unknown option: --lr.")


@pytest.mark.parametrize("part", ["ema", "manifest"])
def test_damaged_checkpoint_is_named(trained, tmp_path, refused, part, small):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (path,) = checkpoint.latest(copy).glob(f"{part}.*")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert str(path) in refused("sample", copy, "--out", tmp_path / "x.png")
    assert str(path) in refused(
        "train", "digits", "--out", copy, "--resume", *small, "--train.lr", "3e-3", "--train.ema", "0.5"
    )
    assert path.read_bytes() == bytes(data)


def test_run_without_checkpoint(trained, tmp_path, refused):
    shutil.copy(trained / "recipe.json", tmp_path / "recipe.json")
    assert "no checkpoint" in refused("sample", tmp_path, "--out", tmp_path / "x.png")


def test_a_run_is_not_overwritten(trained, refused, small):
    assert "--resume" in refused("train", "digits", "--out", trained, *small)
    assert "train.lr" in refused("train", "digits", "--out", trained, "--resume", *small, "--train.ema", "0.5")


def test_divergence_is_a_message(tmp_path, refused, small):
    said = refused("train", "digits", "--out", tmp_path / "run", *small, "--train.lr", "1e30", "--train.log_every", "1")
    assert "not finite in 3 steps in a row" in said
    assert "Try a lower --train.lr" in said


@pytest.mark.parametrize(
    "command", ["train", "demo", "sample", "verify", "bench", "ema", "data", "stats", "eval", "sweep"]
)
def test_an_output_that_cannot_be_made_is_a_message(command, tmp_path, monkeypatch, small, averaged, pictures):
    """A file stands where a folder is needed: like a full disk or a folder without permission, no traceback."""
    monkeypatch.setattr(verify, "ALL", (verify.theorems.check_score,))
    monkeypatch.setattr(demo, "QUICK", replace(demo.QUICK, steps=1, nfes=(2,), likelihood_images=1, likelihood_steps=2))
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "x"
    tokens = {
        "train": ["train", "digits", *small, "--out", out],
        "demo": ["demo", "--quick", "--out", out],
        "sample": ["sample", "digits", "--num", "1", "--nfe", "1", "--out", out.with_suffix(".png")],
        "verify": ["verify", "--json", out],
        "bench": ["bench", "digits", *small, "--steps", "1", "--samples", "0", "--json", out / "y.json"],
        "ema": ["ema", averaged, "--width", "0.07", "--out", out],
        "data": ["data", "prepare", pictures, "--size", "8", "--workers", "1", "--out", out],
        "stats": ["data", "stats", "data:digits", "--features", "pixels", "--out", out.with_suffix(".npz")],
        "eval": ["eval", "data:digits", "--ref", "data:digits", "--metrics", "fd-pixels", "--json", out],
        "sweep": ["sweep", "digits", "--num", "2", "--nfe", "1", "--rho", "0", "--out", out],
    }[command]
    try:
        code = run([str(token) for token in tokens])
    except OSError as error:
        pytest.fail(f"traceback for the user: {error!r}")
    assert code != 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileExistsError(17, "File exists", "x"), "'x': File exists; a file is in the way; name another path"),
        (NotADirectoryError(20, "Not a directory", "x/y"), "'x/y': Not a directory; a file is in the way; name"),
        (IsADirectoryError(21, "Is a directory", "x"), "'x': Is a directory; a folder is in the way; name another"),
        (FileNotFoundError(2, "No such file or directory", "x"), "'x': No such file or directory; check the path"),
        (PermissionError(13, "Permission denied", "x"), "'x': Permission denied; name another path, or get"),
        (
            OSError(28, "No space left on device", "x"),
            "'x': No space left on device; free some space, and run",
        ),
        (OSError(30, "Read-only file system", "x"), "'x': Read-only file system; name another path"),
        (OSError(5, "Input/output error", "x"), "'x': Input/output error"),
        (OSError("torn"), "torn"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_system_refuses_has_a_remedy(error, words, monkeypatch, refused):
    def fail():
        raise error

    monkeypatch.setattr(verify, "verify", fail)
    assert refused("verify").startswith(f"mvm: {words}")


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


def test_options_outside_any_section_can_be_given_as_shown(tmp_path, small):
    """`mvm options` shows --seed 0 like every other option."""
    assert run(["train", "digits", "--out", str(tmp_path / "run"), *small, "--train.steps", "1", "--seed", "3"]) == 0
    assert mvm.load(tmp_path / "run").recipe.seed == 3


def test_an_allocation_that_fails_ends_in_one_line(monkeypatch, capsys):
    """torch's CPU allocator raises a plain RuntimeError; any other one is still a bug that shows itself."""
    import torch

    monkeypatch.setattr("mvm.verify.verify", lambda: torch.empty(1 << 60, dtype=torch.uint8))
    assert run(["verify"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mvm: out of memory (")
    assert said.count("\n") == 1
    monkeypatch.setattr("mvm.verify.verify", lambda: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        run(["verify"])
