import pytest

import mvm
from mvm.cli import run


@pytest.fixture(scope="session")
def digits():
    return mvm.load("digits")


@pytest.fixture(scope="session")
def inner(tmp_path_factory):
    """Return the folder of a run with an inner head, trained as far as that its guidance shows."""
    folder = tmp_path_factory.mktemp("runs") / "inner"
    options = "--network.inner_block 1 --train.steps 20 --train.batch 32 --train.ema 0.5 --preview.every 0"
    assert run(["train", "digits", *options.split(), "--out", str(folder)]) == 0
    return str(folder)
