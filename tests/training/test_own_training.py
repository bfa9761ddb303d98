"""mvm.train on a network and data of the user's: the recipe loop bit for bit, exact resume, any number of processes."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_recipe import NETWORK
from torch import nn

import mvm
from mvm import checkpoint
from mvm.data import digits
from mvm.network import build_network
from mvm.recipes import load_recipe, options, override
from mvm.training.own import SHORT, dotted

STEPS, HALF = 20, 10
LOG = {"log_every": 1, "progress": False}


class MLP(nn.Module):
    """(x (B, d), t (B,)) -> (B, d), with all that resume must restore: dropout, running means."""

    def __init__(self, size=2, width=16, dropout=0.2):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(size + 1, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Dropout(dropout), nn.Linear(width, size)
        )

    def forward(self, x, t):
        return self.layers(torch.cat((x, t[:, None]), 1))


class Points(torch.utils.data.Dataset):
    """Two clusters of points, by index."""

    def __init__(self, count=100):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, generator=generator) / 4 + (1 if index % 2 else -1)


def built(make=MLP, **arguments):
    torch.manual_seed(0)
    return make(**arguments)


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def looks(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["fd_values"]) for line in lines if "fd_values" in line]


def stored(run):
    folder = checkpoint.latest(run)
    return {
        f"{path.stem}/{name}": value
        for path in folder.glob("*.safetensors")
        for name, value in checkpoint.load(folder, path.stem).items()
    }


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# ---------------------------------------------------------------- the same loop


def test_own_network_and_data_are_the_recipe_loop_bit_for_bit(tmp_path):
    """The digits recipe's DiT, wrapped, on the digits, given: losses, weights and averages of mvm.train("digits")."""
    recipe = override(load_recipe("digits"), {**NETWORK, "train.steps": str(STEPS), "train.log_every": "1"})
    mvm.train(recipe, tmp_path / "recipe", progress=False)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network = build_network(*recipe.blueprint)
    own = mvm.wrap(network, null=10, time="level")
    model = mvm.train(own, digits("train"), tmp_path / "own", recipe="digits", steps=STEPS, **LOG)
    assert losses(tmp_path / "own") == losses(tmp_path / "recipe")
    assert len(losses(tmp_path / "own")) == STEPS
    mine, theirs = stored(tmp_path / "own"), stored(tmp_path / "recipe")
    assert_equal({name.replace("/network.", "/"): value for name, value in mine.items()}, theirs)
    # what is sampled from them too, but for the tiles in which a CPU computes a DiT
    options = {"classes": [3, 5], "nfe": 6, "cfg": 1.5, "progress": False}
    one, other = (m.generate(4, **options).images.int() for m in (model, mvm.load(tmp_path / "recipe")))
    assert (one - other).abs().max() <= 1


def test_options_are_the_recipes_by_their_own_names(tmp_path):
    run = tmp_path / "run"
    named = {"lr": 3e-3, "ema": 0.5, "decay": "linear", "preview_count": 8, "preview_grid": 4, "sample_nfe": 3}
    mvm.train(built(), Points(), run, steps=2, batch=4, until=1, timesteps="logit-normal", **named, **LOG)
    found = json.loads((run / "recipe.json").read_text())
    assert (found["train"]["lr"], found["train"]["ema"], found["sample"]["nfe"]) == (3e-3, [0.5], 3)
    assert (found["path"]["law"]["name"], found["preview"]["count"]) == ("logit-normal", 8)
    assert found["data"] | {"channels": 2, "space": [], "values": "float", "name": "own"} == found["data"]
    assert found["network"] == {"kind": "own", "arguments": {}, "name": "MLP", "time": "t", "null": "none"}
    with pytest.raises(ValueError, match=r"unknown option 'stepz' \(did you mean 'steps'\?\)"):
        mvm.train(built(), Points(), stepz=1)
    usual = {
        "learning_rate": "lr",
        "batch_size": "batch",
        "ema_decay": "ema",
        "cond_drop": "drop",
        "wd": "weight_decay",
    }
    for theirs, ours in usual.items():
        with pytest.raises(ValueError, match=rf"unknown option '{theirs}' \(did you mean '{ours}'\?\)"):
            mvm.train(built(), Points(), **{theirs: 1})
    with pytest.raises(ValueError, match="one is given twice"):
        mvm.train(built(), Points(), lr=1e-3, train_lr=1e-3)
    with pytest.raises(ValueError, match=r"network\.size belongs to a recipe"):
        mvm.train(built(), Points(), network_size="S")


def test_every_short_name_means_one_option():
    recipe = load_recipe("digits")
    short = [name.rpartition(".")[2] for name in options(recipe) if name.rpartition(".")[0] in SHORT]
    assert [name for name, count in Counter(short).items() if count > 1] == ["keep"]
    assert dotted({"keep": 3}, recipe) == {"train.keep": 3}
    assert dotted({"weight": "noise", "save_every": 3, "path_law_std": 2.0, "seed": 1}, recipe) == {
        "objective.weight": "noise",
        "train.save_every": 3,
        "path.law.std": 2.0,
        "seed": 1,
    }


# ---------------------------------------------------------------- resume


def test_ten_steps_and_ten_more_are_twenty(tmp_path):
    """With dropout, running means, a learning rate schedule, two averages, and a dataset that is read by index."""
    how = {"steps": STEPS, "batch": 24, "decay": "cosine", "ema": (0.9, 0.5), "lr": 1e-2, **LOG}
    whole = mvm.train(built(), Points(), tmp_path / "whole", **how)
    mvm.train(built(), Points(), tmp_path / "parts", until=HALF, **how)
    parts = mvm.train(built(make=lambda: MLP()), Points(), tmp_path / "parts", resume=True, **how)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_equal(stored(tmp_path / "parts"), stored(tmp_path / "whole"))
    assert_equal(parts.network.state_dict(), whole.network.state_dict())
    assert "ema/network.layers.1.running_mean" in stored(tmp_path / "whole")
    noise = torch.randn(5, 2)
    loaded = mvm.load(tmp_path / "parts", network=MLP())
    assert torch.equal(mvm.sample(loaded, noise, nfe=4), mvm.sample(whole, noise, nfe=4))
    assert not torch.equal(
        mvm.sample(mvm.load(tmp_path / "parts", "model", network=MLP()), noise, nfe=4), mvm.sample(loaded, noise, nfe=4)
    )


def test_dropout_is_new_at_every_step_and_leaves_the_callers_random_numbers_alone():
    seen = []

    class Noting(MLP):
        def forward(self, x, t):
            if self.training:
                seen.append(nn.functional.dropout(torch.ones(64), 0.5))
            return super().forward(x, t)

    torch.manual_seed(5)
    expected = torch.rand(3)
    network = built(make=Noting)
    torch.manual_seed(5)
    mvm.train(network, Points(), steps=3, batch=8, progress=False)
    assert torch.equal(torch.rand(3), expected)
    assert len({tuple(each.tolist()) for each in seen}) == 3


def test_ctrl_c_saves_and_resume_goes_on(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    how = {"steps": 6, "batch": 8, "save_every": 100, **LOG}

    def interrupt(line):
        if line["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            mvm.train(built(), Points(), tmp_path / "run", on_log=interrupt, **how)
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoint.latest(tmp_path / "run").name == checkpoint.step_name(3)
    mvm.train(built(), Points(), tmp_path / "run", resume=True, **how)
    mvm.train(built(), Points(), tmp_path / "whole", **how)
    assert_equal(stored(tmp_path / "run"), stored(tmp_path / "whole"))


def test_without_a_run_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    network, lines = built(), []
    field = mvm.train(network, Points(), steps=2, batch=8, on_log=lines.append, **LOG)
    assert [line["step"] for line in lines] == [1, 2]
    assert list(tmp_path.iterdir()) == []
    assert not torch.equal(network.layers[0].weight, field.network.network.layers[0].weight)  # trained, and its average
    assert network.layers[0].weight.requires_grad
    with pytest.raises(ValueError, match="resume=True continues a run, and run=None"):
        mvm.train(built(), Points(), resume=True)


# ---------------------------------------------------------------- processes

WATCHED = {
    "steps": 6, "batch": 9, "preview_every": 3, "preview_count": 11, "preview_grid": 4, "sample_nfe": 3, **LOG
}  # fmt: skip
PROGRAM = """
import os, sys
sys.path.insert(0, {here!r})
import torch
from test_own_training import WATCHED, Points, Plain, built
import mvm
network = built(Plain)
mvm.train(network, {data}, {run!r}, accumulate=2, **WATCHED{options})
os._exit(0)  # as the command ends: gloo's threads abort now and then while an interpreter is taken down
"""


class Plain(nn.Module):
    """A network with blocks, which nothing random is in."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, t):
        h = self.first(torch.cat((x, t[:, None]), 1))
        for block in self.blocks:
            h = h + nn.functional.silu(block(h))
        return self.last(h)


def stream():
    points = Points()
    for index in range(len(points)):
        yield points[index]


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [("ddp", "Points()", ""), ("fsdp-stream", "lambda: map(Points().__getitem__, range(100))", ", parallel='fsdp'")],
)
def test_two_processes_are_one_run(name, data, options, tmp_path):
    program = PROGRAM.format(here=str(Path(__file__).parent), data=data, run=str(tmp_path / "two"), options=options)
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, str(tmp_path / "program.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    mvm.train(built(Plain), Points() if name == "ddp" else stream, tmp_path / "one", **WATCHED)
    two, one = (looks(tmp_path / run) for run in ("two", "one"))
    assert two == [(step, pytest.approx(figure, abs=1e-5)) for step, figure in one]
    assert [step for step, _ in two] == ([3, 6] if name == "ddp" else [])
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert [step for step, *_ in two] == [1, 2, 3, 4, 5, 6]
    assert torch.allclose(torch.tensor(two), torch.tensor(one), atol=1e-5)
    mine, theirs = stored(tmp_path / "two"), stored(tmp_path / "one")
    assert mine.keys() == theirs.keys()
    assert max(float((mine[key].float() - theirs[key].float()).abs().max()) for key in mine) < 1e-5
