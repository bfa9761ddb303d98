"""The report of a run: exact facts, whatever a run directory has or lacks; one file that needs nothing else."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_report import outside_requests, read

from mvm import files
from mvm.cli import app, run, split_overrides
from mvm.data import DATA_SETS
from mvm.evaluation.run_report import _rise, _thinned, smoothed, write_run_report
from mvm.recipes import FOLDER, DecoderRecipe, load_recipe, override, to_json
from test_demo import without_conclusion

NASTY = "<script>alert('x')</script> & `tick` \x1b[31m"
IMAGES = len(DATA_SETS["digits"].load("train").labels)


def recipe_of(name="digits", **changes):
    return override(load_recipe(name), {key.replace("_", ".", 1): value for key, value in changes.items()})


def line(step, loss, **more):
    return {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "skipped": 0, "images_per_second": 96.0, **more}


def make(folder, recipe=None, lines=(), checkpoints=(), previews=(), tail=""):
    """Write a run directory by hand; checkpoints: (step, quality)."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(to_json(recipe or recipe_of()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines) + tail)
    for step, quality in checkpoints:
        inside = folder / "checkpoints" / f"step-{step:08d}"
        inside.mkdir(parents=True)
        (inside / "ema.safetensors").write_bytes(b"x" * 2_000_000)
        manifest = {"step": step, "quality": quality, "sha256": {"ema.safetensors": "00"}}
        (inside / "manifest.json").write_text(json.dumps(manifest))
    for step in previews:
        (folder / "samples").mkdir(exist_ok=True)
        Image.new("L", (64, 64), step % 256).save(folder / "samples" / f"step-{step:08d}.png")
    return folder


def report(folder):
    text = write_run_report(folder).read_text(encoding="utf-8")
    assert without_conclusion(text) == []
    return read(text)


@pytest.fixture
def finished(tmp_path):
    """300 steps of 96 images in 300 seconds of training, with three previews."""
    lines = [line(100, 1.0), {"step": 100, "fd_pixels": 9.5}, line(200, 0.5), {"step": 200, "fd_pixels": 7.25}]
    lines += [line(300, 0.25), {"step": 300, "fd_pixels": 5.5}]
    recipe = recipe_of(train_steps="300", preview_every="100", preview_count="64")
    return make(tmp_path / "mine", recipe, lines, [(200, 7.25), (300, 5.5)], (100, 200, 300))


def test_facts_of_a_finished_run(finished):
    page = report(finished)
    assert page.of("h1") == ["mine: step 300 of 300, finished"]
    epochs = f"28,800 images seen ({300 * 96 / IMAGES:.3g} epochs of {IMAGES:,})"
    told = f"{epochs}, 5 minutes in training steps, loss 0.25, median throughput 96 images/s."
    assert page.of("p")[0] == f"8x8 handwritten digits on a CPU: the demo. {told}"
    assert page.of("p")[1] == "fd_pixels went from 9.5 (step 100) to 5.5 (step 300); its best so far."
    assert "The loss fell from 1 (step 100) to 0.25 (step 300)." in page.of("p")
    assert "Each point is a mean over 50 steps. No step was skipped." in page.of("p")
    assert re.search(r" 3 of \d+ options differ\.", page.text)
    assert page.of("figcaption") == [f"step {n}, fd_pixels {v}" for n, v in ((100, 9.5), (200, 7.25), (300, 5.5))]
    cells = page.of("td")
    assert cells[:9] == ["--train.steps", "300", "1500", "--preview.every", "100", "0", "--preview.count", "64", "1024"]
    assert cells[9:] == ["200", "2.0 MB", "7.25", "300", "2.0 MB", "5.5", "newest, best preview"]
    assert json.loads(page.of("pre")[-1]) == json.loads((finished / "recipe.json").read_text())
    assert page.of("h2") == [
        "Previews", "Loss", "Learning rate, gradients, throughput", "Next steps", "Settings", "Checkpoints kept",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "looks", "loss", "preview", "norm"),
    [
        ((1.0, 0.5, 0.25), (9.5, 7.25, 5.5), "The loss fell from 1 (step 100) to 0.25 (step 300).",
         "fd_pixels went from 9.5 (step 100) to 5.5 (step 300); its best so far.", "Constant at 1."),
        ((0.25, 0.5, 1.0), (5.5, 7.25, 9.5),
         "The loss went from 0.25 (step 100) to 1 (step 300), after a lowest of 0.25: it rises.",
         "fd_pixels went from 5.5 (step 100) to 9.5 (step 300); best: 5.5 (step 100).",
         "It went from 1 (step 100) to 3 (step 300); highest 4 (step 200)."),
    ],
)  # fmt: skip
def test_conclusions_follow_the_data(tmp_path, losses, looks, loss, preview, norm):
    norms = (1.0, 1.0, 1.0) if losses[0] == 1 else (1.0, 4.0, 3.0)
    lines = [line(100 * i, x, grad_norm=n) for i, (x, n) in enumerate(zip(losses, norms, strict=True), 1)]
    lines += [{"step": 100 * i, "fd_pixels": x} for i, x in enumerate(looks, 1)]
    folder = make(tmp_path / "run", recipe_of(train_steps="300"), lines, [(300, looks[-1])])
    said = report(folder).of("p")
    assert {loss, preview, norm} <= set(said)


def test_commands_of_a_finished_run_are_understood(finished):
    typed = report(finished).of("pre")[:-1]
    where = str(finished)
    assert typed == [
        f"mvm sample {where} --classes 0,1 --out mine.png",
        f"mvm sample {where} --solver adams --rho 0.75 --nfe 65 --out mine-sde.png",
        f"mvm eval {where} -n 10000 --json {where}/eval.json",
        f"mvm export {where} --out exports/mine",
        f"mvm train --resume {where} --train.steps 600",
        f"mvm train {where}/recipe.json --init-from {where} --data.name folder --data.path data/mine "
        "--train.lr 0.0002 --out runs/mine-tuned",
    ]
    for text in typed:
        rest, overrides = split_overrides(shlex.split(text)[1:])
        app.parse_args(rest, exit_on_error=False, print_error=False)
        if rest[0] == "train" and "--resume" not in rest:
            assert override(load_recipe(rest[1]), overrides).name == "digits"


@pytest.mark.parametrize(
    ("decay", "stretched"),
    [
        ({"train_decay": "constant"}, False),
        ({"train_decay": "piecewise", "train_decay_start": "10", "train_decay_end": "20"}, False),
        ({"train_decay": "linear"}, True),
    ],
)
def test_a_run_goes_on_and_a_schedule_may_be_stretched(tmp_path, decay, stretched):
    recipe = recipe_of(train_steps="40", train_warmup="5", **decay)
    folder = make(tmp_path / "run", recipe, [line(40, 1.0)], [(40, None)])
    found = report(folder)
    assert f"mvm train --resume {folder} --train.steps 80" in found.of("pre")
    assert ("is stretched to them" in found.text) == stretched


def test_nothing_outside_is_loaded(finished):
    text = write_run_report(finished).read_text(encoding="utf-8")
    assert outside_requests(text) == []
    assert text.count("data:image/png;base64,") == 3
    assert text.count("<svg") == 5  # loss, learning rate, gradient norm, throughput, fd_pixels


def test_a_run_that_trains_now_or_was_killed(tmp_path):
    """The log is ahead of the checkpoint, and its last line is cut."""
    lines = [line(50, 0.9), line(100, 0.8), line(150, 0.7)]
    folder = make(tmp_path / "run", recipe_of(train_steps="500"), lines, [(100, None)], tail='{"step": 200, "lo')
    page = report(folder)
    assert page.of("h1") == ["run: step 150 of 500, training or interrupted"]
    assert page.of("li")[0] == "Not finished, 350 steps to go. If no process trains it now, continue from step 100:"
    assert page.of("pre")[0] == f"mvm train --resume {folder}"


def test_a_paused_run(tmp_path):
    """Ctrl-C saved a checkpoint past the last line of the log."""
    folder = make(tmp_path / "run", recipe_of(train_steps="500"), [line(50, 0.9)], [(73, None)])
    page = report(folder)
    assert page.of("h1") == ["run: step 73 of 500, paused"]
    assert page.of("li")[0] == "Not finished, 427 steps to go. Continue from step 73:"
    assert [text.split()[1] for text in page.of("pre") if text.startswith("mvm")] == [
        "train", "train", "sample", "sample", "eval", "export", "train",
    ]  # fmt: skip


def test_a_run_without_checkpoint_preview_or_log(tmp_path):
    folder = make(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    page = report(folder)
    assert page.of("h1") == ["run: step 0 of 1,500, no checkpoint yet"]
    assert page.of("li") == ["No checkpoint is saved yet; a run that was stopped starts again from step 0:"]
    assert [text for text in page.of("pre") if text.startswith("mvm")] == [f"mvm train --resume {folder}"] * 2
    assert "metrics.jsonl has no loss yet" in page.text
    assert "This run draws none." in page.text
    assert "None yet; one is saved every 500 steps" in page.text
    assert "svg" not in page.seen


def test_warnings(tmp_path):
    lines = [line(50, 0.9), line(100, None, skipped=50), line(150, 0.4, skipped=52), line(200, 0.7, skipped=52)]
    lines += [{"step": 100, "fd_pixels": 2.0}, {"step": 150, "fd_pixels": 4.0}, {"step": 200, "fd_pixels": 2.5}]
    folder = make(tmp_path / "run", recipe_of(train_steps="200"), lines, [(100, 2.0), (200, 2.5)])
    (folder / "start.json").write_text('{"images": 100, "device": "cpu"}')
    (folder / "checkpoints" / "step-00000200" / "manifest.json").write_text("{")
    told = report(folder).text
    assert "52 of 200 steps were skipped because their gradient was not finite." in told
    assert "The loss was not finite in 1 of 4 log lines, first at step 100." in told
    assert "The loss rises: its lowest was 0.4, it is 0.7 now." in told
    assert "Previews have become worse: fd_pixels is 2.5, and was 2 at step 100. The checkpoint of that step" in told
    assert "--checkpoint 100" in told
    assert "Checkpoint step-00000200 is damaged" in told
    assert "each of 100 about 192 times. Watch for memorization" in told
    assert "No step was skipped" not in told


def test_previews_that_are_a_little_worse_are_no_warning(tmp_path):
    looks = [{"step": 50, "fd_pixels": 2.0}, {"step": 100, "fd_pixels": 2.1}]
    folder = make(tmp_path / "run", recipe_of(train_steps="100"), [line(100, 1.0), *looks], [(100, 2.1)])
    told = report(folder).text
    assert "become worse" not in told
    assert "fd_pixels went from 2 (step 50) to 2.1 (step 100); best: 2 (step 50)." in told


def test_what_the_optional_files_tell(finished):
    (finished / "init.json").write_text('{"run": "base", "step": 500, "weights": "ema", "sha256": "ab"}')
    change = {"step": 100, "option": "train.log_every", "old": 50, "new": 100}
    (finished / "changes.json").write_text(json.dumps([change]))
    (finished / "start.json").write_text('{"device": "NVIDIA H200", "images": 2880, "anything": [1, 2]}')
    page = report(finished)
    assert "Started from other weights (init.json): run base, step 500, weights ema." in page.of("li")
    cells = page.of("td")
    assert cells[9:19] == [
        "100", "train.log_every", "50", "100", "device", "NVIDIA H200", "images", "2880", "anything", "1,2",
    ]  # fmt: skip
    assert "(10 epochs of 2,880)" in page.of("p")[0]  # as told at the start
    for name in ("init.json", "changes.json", "start.json"):
        (finished / name).write_text("[[[")
    assert report(finished).of("td")[9] == "200"


def test_parts_of_the_loss_and_a_recipe_of_ones_own(tmp_path):
    recipe = recipe_of(train_steps="100")
    lines = [line(50, 0.9, repa=-0.2, mfu=0.4), line(100, 0.8, repa=-0.3, mfu=0.4)]
    folder = make(tmp_path / "run", recipe, lines, [(100, None)])
    stored = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps({**stored, "name": "mine"}))
    page = report(folder)
    assert "Further parts of the loss" in page.of("h2")
    assert page.of("h3")[0] == "repa"
    assert "It fell from -0.2 (step 50) to -0.3 (step 100); highest -0.2 (step 50)." in page.of("p")
    assert "What differs from the default" in page.of("h3")
    assert page.of("td")[:3] == ["--network.size", "tiny", "S"]


def test_a_decoder(tmp_path):
    recipe = override(load_recipe("imagenette-rae-s"), {"train.steps": "100", "train.log_every": "50"})
    assert isinstance(recipe, DecoderRecipe)
    lines = [line(50, 0.9, l1=0.3), {"step": 50, "psnr": 20.0}, line(100, 0.8, l1=0.2), {"step": 100, "psnr": 18.5}]
    folder = make(tmp_path / "stage1", recipe, lines, [(50, -20.0), (100, -18.5)], (50, 100))
    page = report(folder)
    assert page.of("h1") == ["stage1: step 100 of 100, finished"]
    assert page.of("figcaption") == ["step 50, psnr 20", "step 100, psnr 18.5"]
    assert "psnr is 18.5, and was 20 at step 50. The checkpoint of that step is kept" in page.text
    cells = page.of("td")
    assert cells[-8:] == ["50", "2.0 MB", "20", "best preview", "100", "2.0 MB", "18.5", "newest"]
    typed = [text for text in page.of("pre") if text.startswith("mvm")]
    assert typed[0] == f"mvm eval {folder}/rae --ref data/imagenette"
    assert typed[1] == f"mvm train imagenette-ddt-s --codec.kind rae --codec.path {folder}/rae"
    assert not any(text.startswith(("mvm sample", "mvm export")) for text in typed)


def test_data_of_ones_own_that_are_not_here(tmp_path):
    data = {"data.name": FOLDER, "data.path": "nowhere", "data.channels": "3", "data.size": "16", "data.classes": "2"}
    recipe = override(load_recipe("digits"), {**data, "train.steps": "10"})
    page = report(make(tmp_path / "run", recipe, [line(10, 1.0)], [(10, None)]))
    assert "960 images seen, 10 seconds in training steps, loss 1" in page.of("p")[0]  # epochs are not known
    assert page.of("pre")[-2].endswith(
        "--data.path data/mine --train.lr 0.0002 --out runs/run-tuned"
    )  # its shape is read again


def test_hostile_names_and_files(tmp_path):
    lines = [{**line(50, 0.9), NASTY: 1.0, "big": 10**400}, {"step": -5, "loss": 1}, {"step": 10**400, "loss": 1}]
    lines += [{"step": 60, "loss": "x", "lr": [1]}, line(100, 0.8)]
    folder = make(tmp_path / f"a b{NASTY.replace('/', '')}", recipe_of(train_steps="200"), lines, [(100, None)])
    stored = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps({**stored, "description": NASTY}))
    (folder / "start.json").write_text(json.dumps({NASTY: NASTY}))
    (folder / "changes.json").write_text(json.dumps([{"step": NASTY, "option": NASTY}, 7]))
    (folder / "init.json").write_text(json.dumps({"run": NASTY}))
    (folder / "samples").mkdir()
    (folder / "samples" / "step-00000050.png").write_bytes(b"\x89PNG none")
    (folder / "checkpoints" / "step-<b>").mkdir()
    page = report(folder)
    assert not set(page.seen) & {"script", "b"}
    assert "\x1b" not in page.text
    assert page.of("h1")[0].startswith("a b<script>alert('x')<script> & `tick` \\x1b[31m: step 100 of 200")
    shown = NASTY.replace("\x1b", "\\x1b")
    assert page.of("td").count(shown) == 4  # start.json twice, changes.json twice
    resume = page.of("pre")[0]
    assert shlex.split(resume)[:3] == ["mvm", "train", "--resume"]


def test_a_name_like_an_option_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "-x")
    assert report(Path("-x")).of("pre")[0] == "mvm train --resume ./-x"


def test_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run(["report", str(tmp_path / "none")]) == 2
    assert run(["report", str(tmp_path / "empty")]) == 2
    told = capsys.readouterr().err.splitlines()
    remedy = "give the folder that `mvm train` wrote, by default runs/RECIPE"
    assert told == [
        f"mvm: '{tmp_path}/none' does not exist; {remedy}",
        f"mvm: '{tmp_path}/empty' is no run directory: it has no recipe.json; {remedy}",
    ]
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_command_writes_where_it_is_told(finished, tmp_path, capsys):
    out = tmp_path / "pages" / "one.html"
    assert run(["report", str(finished), "--out", str(out)]) == 0
    assert run(["report", str(finished)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {out}; open it in a browser",
        f"wrote {finished}/report.html; open it in a browser",
    ]
    assert out.read_bytes() == (finished / "report.html").read_bytes()  # equal runs, equal pages


def test_without_matplotlib(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'mean-velocity-matching\[plots\]'"):
        write_run_report(finished)


def test_whole_or_not_at_all(finished, monkeypatch):
    path = write_run_report(finished)
    before = path.read_bytes()

    def crash(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "flush", crash)
        (finished / "metrics.jsonl").write_text(json.dumps(line(100, 3.0)) + "\n")
        with pytest.raises(OSError, match="No space"):
            write_run_report(finished)
    assert path.read_bytes() == before
    write_run_report(finished)
    assert path.read_bytes() != before


# Numbers


def test_smoothed_by_hand():
    few = np.array([3.0, 1.0, np.nan])
    assert np.array_equal(smoothed(few), few, equal_nan=True)
    values = np.arange(100.0)  # 100 // 50 = 2 on each side
    found = smoothed(values)
    assert found[:3].tolist() == [0, 1, 2]  # fewer at the start, on both sides
    assert found[-3:].tolist() == [97, 97.5, 98]  # at the end those before
    values[10] = np.nan
    assert smoothed(values)[10] == np.mean([8, 9, 11, 12])


def test_a_rise_is_told_from_noise():
    noise = np.random.default_rng(0).normal(0, 0.02, 500)
    assert _rise(1 + noise) is None
    assert _rise(np.linspace(2, 1, 500) + noise) is None
    low, last = _rise(np.concatenate([np.full(450, 1.0), np.full(50, 1.1)]) + noise)
    assert (low, last) == (pytest.approx(1, abs=0.01), pytest.approx(1.1, abs=0.01))
    assert _rise(np.array([1.0, 0.4, 0.59])) is None
    assert _rise(np.array([1.0, 0.4, 0.61])) == (0.4, 0.61)
    assert _rise(np.array([1.0, np.nan])) is None


def test_a_thinned_curve_keeps_its_spikes():
    values = np.sin(np.arange(5000.0))
    values[1234], values[77] = 9, np.nan
    shown = _thinned(values, 400)
    assert len(shown) <= 400
    assert 1234 in shown
    assert 77 not in shown
    assert _thinned(values[:300], 400).tolist() == list(range(300))


def test_a_long_run_makes_a_small_page(tmp_path):
    lines = [line(50 * i, 1 / i, repa=0.1) for i in range(1, 5001)]
    folder = make(tmp_path / "run", recipe_of(train_steps="250000", train_save_every="250000"), lines, [(250000, None)])
    page = write_run_report(folder)
    assert page.stat().st_size < 2_000_000
    averaged = np.mean([1 / i for i in range(4900, 5001)])
    assert f"loss {averaged:.4g} (mean of the last 101 log lines)" in read(page.read_text(encoding="utf-8")).text
