"""A run that mvm 0.1.0 began: it is loaded, resumed to the weights that 0.1.0 reached, and drawn from."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import mvm
from mvm.cli import run as command

OLD = Path(__file__).with_name("run_of_0_1")


def test_it_is_resumed_and_sampled_as_it_was(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(OLD, run)
    assert command(["train", "--resume", str(run)]) == 0
    reached, then = mvm.load(run).network.state_dict(), load_file(OLD / "ema-of-step-6.safetensors")
    assert reached.keys() == then.keys()
    for name, value in then.items():
        torch.testing.assert_close(reached[name], value, rtol=1e-5, atol=1e-6)
    out = tmp_path / "x.npy"
    options = ["--num", "4", "--solver", "sa", "--nfe", "5", "--rho", "0.5", "--seed", "3", "--out", str(out)]
    assert command(["sample", str(run), *options]) == 0
    assert np.abs(np.load(out).astype(int) - np.load(OLD / "samples.npy")).max() <= 1


def test_its_checkpoint_is_loaded_as_it_is():
    stored = load_file(OLD / "checkpoints/step-00000004/ema.safetensors")
    loaded = mvm.load(OLD, which="4").network.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in stored.items())
