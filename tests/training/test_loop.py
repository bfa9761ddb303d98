"""The training loop: a run is one function of its recipe, however often it is stopped."""

import contextlib
import json
import math
import shutil
import signal
from dataclasses import replace
from importlib import resources

import pytest
import torch
from tiny_recipe import NETWORK, recipe_with

import mvm
from mvm import checkpoint, noise
from mvm.generate import Sampler
from mvm.model import Model, load
from mvm.optim.ema import Averages
from mvm.optim.optimizers import learning_rate
from mvm.pixels import to_uint8
from mvm.recipes import parse_recipe
from mvm.solver import sample
from mvm.training.data import training_data
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train

TINY = {
    **NETWORK,
    "train.batch": "8",
    "train.steps": "4",
    "train.warmup": "2",
    "train.decay": "constant",
    "train.lr": "5e-3",
    "train.ema": "0.8",
    "train.log_every": "1",
    "train.save_every": "2",
}
PARTS = ("model", "ema", "optimizer")


def tiny(**changes):
    return recipe_with(TINY, **changes)


def go(recipe, run, **options):
    return train(recipe, run, progress=False, **options)


def metrics(run):
    """Log lines without the one figure that is a measurement."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("images_per_second") > 0
    return lines


def stored(run):
    folder = checkpoint.latest(run)
    return {part: checkpoint.load(folder, part) for part in PARTS}


def snapshot(run):
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def assert_same_run(a, b):
    assert checkpoint.latest(a).name == checkpoint.latest(b).name
    first, second = stored(a), stored(b)
    for part in PARTS:
        assert first[part].keys() == second[part].keys()
        for name, value in first[part].items():
            assert torch.equal(value, second[part][name]), f"{part} {name}"
    assert metrics(a) == metrics(b)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps in one go."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    go(tiny(), run)
    return run


@pytest.fixture(autouse=True)
def ctrl_c():
    """A process started in the background ignores SIGINT: here it counts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(monkeypatch, owner, name, at, times=1):
    """Press Ctrl-C inside the n-th call of owner.name, `times` times: real signals, as a person sends them."""
    inner, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_a_run_in_scaled_pixels(whole, tmp_path):
    run = tmp_path / "run"
    go(tiny(codec_scale="2"), run)
    assert metrics(run)[0]["loss"] != metrics(whole)[0]["loss"]
    model = load(run)
    assert model.codec.encode(torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)).unique().tolist() == [2.0]
    labels, seeds = torch.arange(4), torch.arange(4)
    made = Sampler(model).images(labels, seeds, model.recipe.sample, progress=False).images
    x = noise.initial(seeds, model.sample_shape)
    samples = sample(model, x, schedule=model.schedule, nfe=model.recipe.sample.nfe, condition=labels, seeds=seeds)
    assert torch.equal(made, to_uint8(samples / 2))


def test_a_run_describes_itself(whole):
    assert parse_recipe((whole / "recipe.json").read_text(), ".json", "x") == tiny()
    assert [line["step"] for line in metrics(whole)] == [1, 2, 3, 4]
    assert all(line.keys() == {"step", "loss", "lr", "grad_norm", "skipped"} for line in metrics(whole))
    assert [line["lr"] for line in metrics(whole)] == pytest.approx([2.5e-3, 5e-3, 5e-3, 5e-3])
    names = sorted(p.name for p in (whole / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]
    assert checkpoint.read_manifest(checkpoint.latest(whole))["step"] == 4
    optimizer = stored(whole)["optimizer"]
    assert all(float(value) == 4 for name, value in optimizer.items() if name.endswith("/step"))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_two_and_two_are_four(whole, tmp_path, first):
    run = tmp_path / "parts"
    go(tiny(train_steps=str(first)), run)
    go(tiny(), run, resume=True)
    assert_same_run(whole, run)


@pytest.mark.parametrize("pause", [1, 2, 3])
def test_a_pause_changes_nothing_not_even_with_a_falling_rate(tmp_path, pause):
    recipe = tiny(train_decay="linear")
    go(recipe, tmp_path / "whole")
    go(recipe, tmp_path / "parts", until=pause)
    assert checkpoint.read_manifest(checkpoint.latest(tmp_path / "parts"))["step"] == pause
    go(recipe, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("until", [0, -1])
def test_a_pause_before_the_first_step_is_refused(tmp_path, until):
    with pytest.raises(ValueError, match=f"until={until}"):
        go(tiny(), tmp_path / "run", until=until)


def test_a_fresh_run_is_the_same_run(whole, tmp_path):
    torch.manual_seed(12345)  # the global generator has no say
    go(tiny(), tmp_path / "again")
    assert_same_run(whole, tmp_path / "again")


def test_another_seed_is_another_run(whole, tmp_path):
    go(tiny(seed="1"), tmp_path / "other")
    a, b = stored(whole)["model"], stored(tmp_path / "other")["model"]
    assert not any(torch.equal(a[name], b[name]) for name in a if a[name].ndim == 2)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_interrupt_while_logging(whole, tmp_path, step):
    run = tmp_path / "stopped"

    def stop(line):
        if line["step"] == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tiny(), run, on_log=stop)
    assert checkpoint.read_manifest(checkpoint.latest(run))["step"] == step
    go(tiny(), run, resume=True)
    assert_same_run(whole, run)


PLACES = {"before the step": (FieldTrainer, "batch"), "between optimizer and average": (Averages, "update")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_interrupt_within_a_step(whole, tmp_path, monkeypatch, place, at):
    """Ctrl-C comes at any instant: what is saved must be a state between two steps, not within one.

    Before its update a step is given up, and the state is that of the step before; then it is finished first.
    """
    run = tmp_path / "stopped"
    interrupted(monkeypatch, *PLACES[place], at)
    with pytest.raises(KeyboardInterrupt):
        go(tiny(), run)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    saved = at - 1 if place == "before the step" else at
    newest = checkpoint.latest(run)
    assert (checkpoint.read_manifest(newest)["step"] if newest else 0) == saved
    go(tiny(), run, resume=True)
    assert_same_run(whole, run)


def test_interrupt_within_the_last_step_finds_the_run_complete(whole, tmp_path, monkeypatch):
    run = tmp_path / "stopped"
    interrupted(monkeypatch, Averages, "update", 4)
    with contextlib.suppress(KeyboardInterrupt):
        go(tiny(), run)
    go(tiny(), run, resume=True)
    assert_same_run(whole, run)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [1, 3])
def test_two_interrupts_within_a_step_save_no_half_step(whole, tmp_path, monkeypatch, place, at):
    """The second stops at once, within the step: then the last whole state is all there is to go on from."""
    run = tmp_path / "stopped"
    interrupted(monkeypatch, *PLACES[place], at, times=2)
    with pytest.raises(KeyboardInterrupt):
        go(tiny(), run)
    go(tiny(), run, resume=True)
    assert_same_run(whole, run)


def test_interrupt_between_two_log_lines(tmp_path, monkeypatch):
    """A log line is the mean over its whole window, also when a restart falls into it."""
    recipe = tiny(train_steps="6", train_log_every="3", train_save_every="6")
    go(recipe, tmp_path / "whole")
    interrupted(monkeypatch, Averages, "update", 5)  # two steps since the last line
    with pytest.raises(KeyboardInterrupt):
        go(recipe, tmp_path / "stopped")
    go(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_resume_from_an_earlier_checkpoint(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(checkpoint.latest(run))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.')  # cut off by a crash
    go(tiny(), run, resume=True)
    assert_same_run(whole, run)


def test_resume_of_a_finished_run_changes_nothing(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = snapshot(run)
    model = go(tiny(), run, resume=True)
    assert snapshot(run) == before
    weights = stored(run)["ema"]
    assert all(torch.equal(p, weights[name]) for name, p in model.network.named_parameters())


def test_resume_where_nothing_is_is_refused(whole, tmp_path, capsys):
    run = tmp_path / "new"
    with pytest.raises(ValueError, match=r"resume=True: there is no run in .*new; check the path, leave resume out"):
        go(tiny(), run, resume=True)
    assert not run.exists()
    run.mkdir()
    go(tiny(), run, resume=True, until=1)
    assert "was stopped before its first step; starting it anew" in capsys.readouterr().err
    shutil.rmtree(run)
    for until in (1, None):  # as the message says
        go(tiny(), run, resume=run.is_dir(), until=until)
    assert_same_run(whole, run)


def test_crash_while_saving_can_be_resumed(whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    real, calls = checkpoint.save_file, []

    def breaks(weights, path):
        calls.append(path)
        if len(calls) == 5:  # the second file of the second checkpoint
            raise OSError("No space left on device")
        real(weights, path)

    monkeypatch.setattr(checkpoint, "save_file", breaks)
    with pytest.raises(OSError, match="No space"):
        go(tiny(), run)
    monkeypatch.undo()
    assert checkpoint.latest(run).name == "step-00000002"
    go(tiny(), run, resume=True)
    assert_same_run(whole, run)


def test_a_run_is_not_overwritten(whole):
    before = snapshot(whole)
    with pytest.raises(ValueError, match="--resume"):
        go(tiny(), whole)
    assert snapshot(whole) == before


def test_checkpoints_without_a_recipe_are_not_continued_unasked(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "recipe.json").unlink()
    before = snapshot(run)
    with pytest.raises(ValueError, match=r"no recipe\.json"):
        go(tiny(train_steps="6"), run)
    assert snapshot(run) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train_lr": "1e-3"}, ["train.lr"]),
        ({"seed": "3"}, ["seed"]),
        ({"network_width": "32", "objective_label_drop": "0.2"}, ["network.width", "objective.label_drop"]),
        ({"codec_scale": "2"}, ["codec.scale"]),
        ({"path_law.name": "logit-normal"}, ["path.law.name"]),
    ],
)
def test_resume_with_another_recipe_names_what_changed(whole, changes, named):
    before = snapshot(whole)
    with pytest.raises(ValueError, match="other values: ") as error:
        go(tiny(**changes), whole, resume=True)
    told = str(error.value).partition("other values: ")[2].split("; ")
    assert [part.split()[0] for part in told] == named
    assert snapshot(whole) == before


def test_resume_may_change_length_and_logging(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    go(tiny(train_steps="6", train_log_every="2", train_save_every="1", train_keep="1"), run, resume=True)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000006"]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 6]


def test_a_learning_rate_that_falls_is_stretched_to_more_steps(tmp_path):
    recipe = tiny(train_decay="linear", train_steps="2", train_log_every="1")
    go(recipe, tmp_path / "run")
    longer = tiny(train_decay="linear", train_log_every="1")
    go(longer, tmp_path / "run", resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [learning_rate(recipe.train, step) for step in (0, 1)]
    rates += [learning_rate(longer.train, step) for step in range(2, longer.train.steps)]
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx(rates)


@pytest.mark.parametrize("part", PARTS)
def test_resume_from_a_damaged_checkpoint_changes_nothing(whole, tmp_path, part):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = checkpoint.latest(run) / f"{part}.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
    before = snapshot(run)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=rf"{part}\.safetensors is damaged"):
        go(tiny(train_steps="6"), run, resume=True)
    assert snapshot(run) == before


def test_log_is_the_mean_since_the_last_line(whole, tmp_path):
    go(tiny(train_log_every="3"), tmp_path / "run")
    each = [line["loss"] for line in metrics(whole)]
    found = metrics(tmp_path / "run")
    assert [line["step"] for line in found] == [3, 4]
    assert [line["loss"] for line in found] == pytest.approx([sum(each[:3]) / 3, each[3]], rel=1e-12)


def test_on_log_sees_every_line_in_order(tmp_path):
    seen = []
    go(tiny(train_log_every="2"), tmp_path / "run", on_log=seen.append)
    assert [line["step"] for line in seen] == [2, 4]
    assert seen == [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_keep(tmp_path):
    go(tiny(train_steps="5", train_save_every="1", train_keep="3"), tmp_path / "run")
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004", "step-00000005"]


def test_the_model_returned_has_the_averaged_weights(tmp_path):
    model = go(tiny(), tmp_path / "run")
    found = stored(tmp_path / "run")
    assert not model.training
    for name, p in model.network.named_parameters():
        assert not p.requires_grad
        assert torch.equal(p, found["ema"][name])
    assert any(not torch.equal(found["ema"][name], found["model"][name]) for name in found["ema"])


def test_batch_is_a_pure_function_of_the_step():
    data = training_data(tiny())
    one, other = FieldTrainer(tiny(), data), FieldTrainer(tiny(), data)
    for step in (5, 0, 400, 5):
        one.step = other.step = step
        a, b = one.batch(), other.batch()
        assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
        assert a.features is None
        positions = torch.arange(step * 8, step * 8 + 8)
        assert torch.equal(a.seeds, noise.derive(0, positions))
        chosen = data[one.order.indices(positions)]
        assert torch.equal(a.condition, chosen.labels)
        assert torch.allclose(a.x0, chosen.images.double().div(127.5).sub(1).float(), atol=1e-6)


def test_one_step_by_hand():
    """Forward, backward, clip at 1, AdamW, EMA, done with torch's own parts."""
    recipe = tiny(train_clip="0.05", train_warmup="0")
    trainer = FieldTrainer(recipe, training_data(recipe))
    network = Model(recipe).network
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), trainer.model.network.parameters(), strict=True))
    start = [p.detach().clone() for p in network.parameters()]
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    trainer.learner.objective(network, trainer.batch()).total.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in network.parameters()))
    for p in network.parameters():
        p.grad.mul_(min(1.0, 0.05 / (norm + 1e-6)))
    optimizer.step()
    trainer.advance()
    line = trainer.read()[0].values
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.05
    moved = zip(network.parameters(), trainer.model.network.named_parameters(), start, strict=True)
    for p, (name, q), begin in moved:
        assert torch.allclose(p, q, atol=1e-6), name
        assert torch.allclose(trainer.averages.tensors["ema"][name], 0.1 * begin + 0.9 * p, atol=1e-6), name


def test_clip_zero_is_no_clipping():
    recipe = tiny(train_clip="0")
    trainer = FieldTrainer(recipe, training_data(recipe))
    trainer.advance()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in trainer.model.network.parameters()))
    assert norm == pytest.approx(trainer_norm(tiny(train_clip="1e9")), rel=1e-5)


def trainer_norm(recipe):
    return first_step(recipe)["grad_norm"]


def first_step(recipe):
    trainer = FieldTrainer(recipe, training_data(recipe))
    trainer.advance()
    return trainer.read()[0].values


def test_loss_falls(tmp_path):
    """At the start the loss is E|u|^2 = 1 + E[t] E[x0^2] > 1; half a hundred tiny steps take a third off."""
    seen = []
    recipe = tiny(
        train_steps="40", train_batch="64", train_lr="1e-2", train_log_every="10", train_save_every="40",
        network_width="32", network_depth="2",
    )  # fmt: skip
    x0 = training_data(recipe).images.double() / 127.5 - 1
    start = first_step(replace(recipe, train=replace(recipe.train, batch=1400)))["loss"]
    assert start == pytest.approx(1 + 0.5 * float((x0**2).mean()), rel=0.02)
    go(recipe, tmp_path / "run", on_log=seen.append)
    losses = [line["loss"] for line in seen]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.67 * start


def test_inner_head_is_logged_and_trained(tmp_path):
    go(tiny(network_depth="2", network_inner_block="1"), tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert all("inner" in line for line in lines)
    assert lines[-1]["inner"] != lines[-1]["loss"]
    assert float(stored(tmp_path / "run")["model"]["inner_head.linear.weight"].abs().max()) > 0


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match=r"3 steps in a row, up to step \d+ .*Try a lower --train\.lr"):
        go(tiny(train_lr="1e30", train_warmup="0", train_steps="20"), tmp_path / "run")
    assert all(line["loss"] is None or math.isfinite(line["loss"]) for line in metrics(tmp_path / "run"))


def test_a_diverged_run_leaves_no_ruined_checkpoint(tmp_path):
    """Between two log lines, too: else the last good checkpoint is pruned, and --resume goes on from NaN."""
    recipe = tiny(train_lr="1e30", train_warmup="0", train_steps="20", train_log_every="20", train_save_every="2")
    with pytest.raises(FloatingPointError):
        go(recipe, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):
        weights = checkpoint.load(folder, "model")
        assert all(bool(torch.isfinite(w).all()) for w in weights.values()), folder.name


@pytest.mark.parametrize(
    "changes",
    [
        {"path_schedule": "linear-flow"},  # with objective.kind = "u", which belongs to the mean-velocity path
        {"network_patch": "3"},  # 8 pixels
    ],
    ids=["kind and schedule", "patch"],
)
def test_a_recipe_that_cannot_work_leaves_no_run_behind(tmp_path, changes):
    """Else the corrected command is refused: the directory already holds a run."""
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"kind|patch"):
        go(tiny(**changes), run)
    go(tiny(), run)


def test_a_recipe_goes_by_name_file_or_object(tmp_path):
    named = mvm.train("digits", str(tmp_path / "named"), until=1, progress=False)
    file = tmp_path / "digits.toml"
    shutil.copy(resources.files("mvm") / "recipes" / "digits.toml", file)
    for run, recipe in (("file", file), ("object", named.recipe)):
        other = mvm.train(recipe, tmp_path / run, until=1, progress=False)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), named.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"recipe='digitss' is unknown.*'digits'"):
        mvm.train("digitss", tmp_path / "none")
    assert not (tmp_path / "none").exists()
