"""A run of moments, and an export of it."""

import pytest

from mvm.published import export
from mvm.recipes import load_recipe, override
from mvm.training.loop import train

TINY = {
    "network.depth": "2", "network.heads": "2", "network.width": "16", "network.patch": "4", "train.batch": "16",
    "train.steps": "4", "train.lr": "1e-2", "train.warmup": "0", "train.ema": "0.5", "train.save_every": "2",
    "train.log_every": "2", "sample.nfe": "4",
}  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run directory with checkpoints of steps 2 and 4; not to be changed."""
    folder = tmp_path_factory.mktemp("published") / "run"
    train(override(load_recipe("digits"), TINY), folder, progress=False)
    return folder


@pytest.fixture
def folder(run, tmp_path):
    """An export of it, to be changed at will."""
    export(run, tmp_path / "model", license="mit")
    return tmp_path / "model"
