"""What tests of the command share: a tiny network, a run of it, refusals, and a folder of prepared pictures."""

import numpy as np
import pytest
from PIL import Image

from mvm.cli import run

CLASSES = 10
PER_CLASS = 3


@pytest.fixture(scope="session")
def small():
    """Options of a run of ten steps that takes a moment."""
    return [
        "--network.depth", "1", "--network.heads=2", "--network.width", "16", "--network.patch", "4",
        "--train.batch", "8", "--train.steps", "1e1", "--train.warmup", "0", "--train.log_every", "5", "--no-report",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def tiny(small):
    """The same for two steps on 32x32 images, by any recipe: no previews, to which keep_best belongs."""
    return [
        *small, "--network.size", "tiny", "--network.patch", "8", "--train.batch", "4", "--train.steps", "2",
        "--train.keep_best", "false", "--preview.every", "0", "--train.power", "", "--train.snapshot_every", "0",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory, small):
    """A run directory; not to be changed."""
    out = tmp_path_factory.mktemp("cli") / "run"
    assert run(["train", "digits", "--out", str(out), *small, "--train.lr", "3e-3", "--train.ema", "0.5"]) == 0
    return out


@pytest.fixture(scope="session")
def averaged(tmp_path_factory, small):
    """A run with snapshots of its power-function averages after steps 2, 4, ..., 10; not to be changed."""
    out = tmp_path_factory.mktemp("cli") / "averaged"
    kept = ["--train.power", "0.05,0.1", "--train.snapshot_every", "2", "--train.lr", "3e-2"]
    assert run(["train", "digits", "--out", str(out), *small, *kept]) == 0
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


@pytest.fixture
def done(capsys):
    """Run a command line that must succeed; return what it printed."""

    def check(*tokens):
        assert run([str(token) for token in tokens]) == 0
        return capsys.readouterr().out

    return check


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A folder of PNGs of several sizes, in ten class folders; not to be changed."""
    folder = tmp_path_factory.mktemp("pictures") / "photos"
    draw = np.random.default_rng(0)
    for number in range(CLASSES * PER_CLASS):
        path = folder / f"kind-{number % CLASSES}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (*draw.integers(20, 50, 2), 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="session")
def prepared(pictures, tmp_path_factory):
    """Those pictures prepared as `mvm train cifar10` wants them: 32x32, ten classes; not to be changed."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    assert run(["data", "prepare", str(pictures), "--out", str(out), "--size", "32", "--workers", "1"]) == 0
    return out
