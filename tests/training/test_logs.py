"""What a run tells: windows, speed, metrics.jsonl and trackers, each against numbers worked out by hand."""

import json
import math
import shutil
import sys
import time

import pytest
import torch
from tiny_recipe import NETWORK, recipe_with

from mvm import checkpoint
from mvm.checkpoint import read_metrics
from mvm.distributed.processes import Processes
from mvm.network import multiply_adds
from mvm.recipes import options
from mvm.training.logs import (
    Log,
    StepRecord,
    TensorBoard,
    ThroughputMeter,
    Window,
    keep_metrics,
    matrix_ceiling,
    parse_trackers,
    training_flops,
)
from mvm.training.loop import train

TINY = {
    **NETWORK,
    "train.batch": "8",
    "train.steps": "6",
    "train.decay": "constant",
    "train.log_every": "2",
    "train.save_every": "2",
}


def tiny(**changes):
    return recipe_with(TINY, **changes)


def record(step, loss, norm=1.0):
    return StepRecord(step, {"loss": loss, "grad_norm": norm, "lr": 0.1})


def bad(step):
    return record(step, math.nan, math.nan)


# Window


def test_mean_of_a_window():
    window = Window(start=10)
    for step, loss in ((11, 4.0), (12, 1.0), (13, 1.0)):
        window.add(record(step, loss))
    assert window.mean(13) == 2.0
    assert window.next(13) == Window(start=13)


def test_skipped_steps_count_neither_above_nor_below_the_line():
    window = Window()
    for entry in (record(1, 3.0), bad(2), record(3, 5.0), bad(4)):
        window.add(entry)
    assert window == Window(start=0, total=8.0, left_out=2, skipped=2, in_a_row=1)
    assert window.mean(4) == 4.0
    assert window.next(4) == Window(start=4, skipped=2, in_a_row=1)


def test_a_window_of_skipped_steps_has_no_mean():
    window = Window()
    window.add(bad(1))
    assert math.isnan(window.mean(1))
    assert math.isnan(Window(start=5).mean(5))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_a_skipped_step(norm):
    assert record(1, 0.5, norm).skipped
    assert not record(1, 0.5, 1e38).skipped


def test_three_skipped_in_a_row_stop_across_windows():
    window = Window()
    window.add(bad(1))
    window = window.next(1)
    window.add(bad(2))
    window = Window(**vars(window.next(2)))  # as a checkpoint stores it
    with pytest.raises(FloatingPointError, match="3 steps in a row, up to step 3"):
        window.add(bad(3))


def test_a_good_step_ends_the_row():
    window = Window()
    for step in range(1, 30):
        window.add(record(step, 1.0) if step % 3 == 0 else bad(step))
    assert (window.skipped, window.in_a_row) == (20, 2)


# Meter


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes when it is told to: clock[0] += seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_images_per_second(clock):
    meter = ThroughputMeter(tiny(), Processes(), None, step=10)
    clock[0] += 4
    assert meter.read(20) == {"images_per_second": 10 * 8 / 4}
    clock[0] += 1
    assert meter.read(23) == {"images_per_second": 3 * 8}
    assert math.isfinite(meter.read(24)["images_per_second"])  # no time at all


def test_a_pause_is_not_counted(clock):
    meter = ThroughputMeter(tiny(), Processes(), None, step=0)
    clock[0] += 1
    with meter.paused():
        clock[0] += 100
    clock[0] += 1
    assert meter.read(1) == {"images_per_second": 8 / 2}
    with meter.paused():
        clock[0] += 50
    clock[0] += 4
    assert meter.read(2) == {"images_per_second": 8 / 4}


@pytest.mark.parametrize("world", [1, 4])
def test_mfu(clock, world):
    """6 multiply-adds an image, over what all the processes' devices could do in the time."""
    recipe, ceiling = tiny(), 1e9
    meter = ThroughputMeter(recipe, Processes(0, world), ceiling, step=0)
    clock[0] += 2
    flops = 5 * 8 * 6 * multiply_adds(recipe.network, (1, 8, 8), 10)
    assert training_flops(recipe) == 6 * multiply_adds(recipe.network, (1, 8, 8), 10)
    found = meter.read(5)
    assert found.keys() == {"images_per_second", "mfu"}
    assert found["mfu"] == pytest.approx(flops / 2 / (ceiling * world), rel=1e-12)


def test_a_cpu_has_no_ceiling():
    assert matrix_ceiling(torch.device("cpu")) is None


# Lines


def make_log(run, every=2, last=5, window=None, step=0, on_line=None, trackers=()):
    run.mkdir(exist_ok=True)
    log = Log(run, every, last, window or Window(), ThroughputMeter(tiny(), Processes(), None, step), on_line)
    log.trackers = list(trackers)
    return log


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_lines_by_hand(tmp_path, clock):
    log = make_log(tmp_path)
    clock[0] += 4
    window = log.add([record(1, 3.0), record(2, 5.0, norm=2.0), record(3, 7.0)])
    assert window == log.window == Window(start=2, total=7.0)
    log.add([])
    clock[0] += 2
    log.add([bad(4)])
    log.add([record(5, 9.0)])
    log.close()
    speed = "images_per_second"
    assert read(tmp_path) == [
        {"step": 2, "loss": 4.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0, speed: 4.0},
        {"step": 4, "loss": 7.0, "grad_norm": None, "lr": 0.1, "skipped": 1, speed: 8.0},
        {"step": 5, "loss": 9.0, "grad_norm": 1.0, "lr": 0.1, "skipped": 1, speed: read(tmp_path)[2][speed]},
    ]


def test_numbers_that_json_lacks_become_null(tmp_path):
    log = make_log(tmp_path)
    log.write({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": null, "b": null, "c": null, "d": 0.5}\n'


def test_other_processes_write_nothing(tmp_path):
    seen = []
    log = Log(tmp_path, 1, 9, Window(), ThroughputMeter(tiny(), Processes(1, 2), None, 0), seen.append)
    window = log.add([record(1, 2.0), bad(2)])
    log.close()
    assert list(tmp_path.iterdir()) == seen == []
    assert window == Window(start=2, skipped=1, in_a_row=1)  # but they count, and would stop together


def test_keep_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    keep_metrics(path, 5)
    assert not path.exists()
    lines = ['{"step": 2, "loss": 1.0}', '{"step": 4, "loss": null}', '{"step": 4, "fd_pixels": 0.5}', '{"step": 6}']
    path.write_text("".join(f"{line}\n" for line in lines) + '{"step": 8, "lo')
    keep_metrics(path, 4)
    assert path.read_text() == "".join(f"{line}\n" for line in lines[:3])
    keep_metrics(path, 1)
    assert path.read_text() == ""


def test_read_metrics_leaves_out_what_is_not_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(b'{"step": 2, "loss": 1.0}\n\xff\n[1]\n{"loss": 2.0}\n{"step": 4, "loss": null}\n{"step": 6, "lo')
    assert read_metrics(path) == [{"step": 2, "loss": 1.0}, {"step": 4, "loss": None}]


# TensorBoard


def scalars(run):
    """name -> [(step, value)] as TensorBoard itself reads it."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def expected(run):
    """The same from metrics.jsonl; TensorBoard holds float32."""
    found = {}
    for line in read(run):
        step = line.pop("step")
        for name, value in line.items():
            found.setdefault(name, []).append((step, pytest.approx(math.nan if value is None else value, nan_ok=True)))
    return found


def test_tensorboard_tells_what_the_file_tells(tmp_path):
    train(tiny(preview_every="2", preview_grid="2", preview_count="4", sample_nfe="2"), tmp_path, progress=False)
    found = scalars(tmp_path)
    assert found == expected(tmp_path)
    assert found.keys() == {"loss", "lr", "grad_norm", "skipped", "images_per_second", "fd_pixels"}
    assert [step for step, _ in found["fd_pixels"]] == [2, 4, 6]


@pytest.mark.parametrize("log_every", ["1", "2"])
def test_tensorboard_forgets_what_a_restart_does_again(tmp_path, monkeypatch, log_every):
    """Steps 3 to 6 are done twice: as in the file, nothing of the first time may be left."""
    recipe = tiny(train_log_every=log_every, train_keep="9")
    train(recipe, tmp_path, progress=False)
    for step in (4, 6):
        shutil.rmtree(checkpoint.step_folder(tmp_path, step))
    later = time.time() + 5  # the names of event files hold the second they were opened in
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        train(recipe, tmp_path, progress=False, resume=True)
    assert [step for step, _ in scalars(tmp_path)["loss"]] == list(range(int(log_every), 7, int(log_every)))
    assert scalars(tmp_path) == expected(tmp_path)


def test_without_tensorboard_there_is_the_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert parse_trackers("auto") == ()
    train(tiny(), tmp_path / "run", progress=False)
    assert [line["step"] for line in read(tmp_path / "run")] == [2, 4, 6]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_run_with_nothing_to_tell_opens_no_board(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(TensorBoard, "open", lambda self, _: opened.append(self.step) or (Recorder(), Recorder()))
    log = make_log(tmp_path, every=5, last=9, step=3, trackers=[TensorBoard(tmp_path, tiny(), 3)])
    log.add([record(4, 1.0)])
    log.close()
    assert opened == []
    log.add([record(5, 1.0), record(9, 1.0)])
    assert opened == [3]  # once, and from the step the run began at


# Trackers


class Recorder:
    """Stands in for a module, a writer or a session: notes what is called, by dotted name, and returns itself."""

    def __init__(self, calls=None, name=""):
        self.calls, self.name = [] if calls is None else calls, name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(self.calls, f"{self.name}.{name}" if self.name else name)

    def __call__(self, *arguments, **options):
        self.calls.append((self.name, arguments, options))
        return self


class Run:
    """What mlflow.start_run returns."""

    class info:
        run_id = "abc"


LINES = ({"step": 2, "loss": 4.0, "lr": 0.1}, {"step": 2, "fd_pixels": 0.5})


def sent(monkeypatch, name, run, step=0):
    """Return the calls that a tracker makes of its package for two lines and the end."""
    package = Recorder()
    if name == "mlflow":
        package.start_run = lambda **options: package.calls.append(("start_run", (), options)) or Run()
    monkeypatch.setitem(sys.modules, name, package)
    (kind,) = parse_trackers(name)
    tracker = kind(run, tiny(), step)
    assert package.calls == []  # nothing is opened before there is a line
    for line in LINES:
        tracker(line)
    tracker.close()
    return package.calls


def test_names_of_trackers(monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, Recorder())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder())
    names = ("auto", "none", "wandb", "mlflow, wandb,mlflow")
    found = [[tracker.__name__ for tracker in parse_trackers(name)] for name in names]
    assert found == [["TensorBoard"], [], ["WandB"], ["MLflow", "WandB"]]
    for wrong in ("", "wandb,none", "comet"):
        with pytest.raises(ValueError, match=r"is unknown.*allowed: tensorboard, wandb, mlflow"):
            parse_trackers(wrong)
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        parse_trackers("wanbd")


@pytest.mark.parametrize(
    ("name", "package", "command"),
    [
        ("tensorboard", "torch.utils.tensorboard", "pip install 'mean-velocity-matching[track]'"),
        ("wandb", "wandb", "pip install wandb"),
        ("mlflow", "mlflow", "pip install mlflow"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_before_the_run_begins(
    tmp_path, monkeypatch, name, package, command
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match="needs") as refusal:
        train(tiny(), tmp_path / "run", progress=False, track=name)
    assert str(refusal.value) == f"track='{name}' needs {name}; install it with: {command}"
    assert not (tmp_path / "run").exists()


def test_wandb_gets_the_lines_the_recipe_and_one_id(tmp_path, monkeypatch):
    run = tmp_path / "mine"
    run.mkdir()
    first, second = (sent(monkeypatch, "wandb", run, step) for step in (0, 2))
    (name, _, opened), *lines = first
    assert name == "init"
    assert json.loads((run / "trackers.json").read_text()) == {"wandb": opened["id"]}
    assert opened == {
        "project": "mvm", "name": "mine", "id": opened["id"], "resume": "allow", "dir": str(run),
        "config": options(tiny()),
    }  # fmt: skip
    assert lines == [
        ("init.log", ({"loss": 4.0, "lr": 0.1},), {"step": 2}),
        ("init.log", ({"fd_pixels": 0.5},), {"step": 2}),
        ("init.finish", (), {}),
    ]
    assert second == first  # a resumed run goes on under the same id
    other = tmp_path / "elsewhere" / "mine"
    other.mkdir(parents=True)
    assert sent(monkeypatch, "wandb", other)[0][2]["id"] != opened["id"]


def test_mlflow_gets_the_lines_the_recipe_once_and_one_id(tmp_path, monkeypatch):
    run = tmp_path / "mine"
    run.mkdir()
    (run / "trackers.json").write_text('{"wandb": "kept"}')
    lines = [
        ("log_metrics", ({"loss": 4.0, "lr": 0.1},), {"step": 2}),
        ("log_metrics", ({"fd_pixels": 0.5},), {"step": 2}),
        ("end_run", (), {}),
    ]
    assert sent(monkeypatch, "mlflow", run) == [
        ("set_experiment", ("mvm",), {}),
        ("start_run", (), {"run_name": "mine"}),
        ("log_params", (options(tiny()),), {}),
        *lines,
    ]
    assert json.loads((run / "trackers.json").read_text()) == {"wandb": "kept", "mlflow": "abc"}
    assert sent(monkeypatch, "mlflow", run, step=2) == [
        ("set_experiment", ("mvm",), {}),
        ("start_run", (), {"run_id": "abc"}),
        *lines,
    ]


def test_training_tells_its_tracker_the_lines_of_the_file(tmp_path, monkeypatch):
    package = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", package)
    train(tiny(), tmp_path / "run", progress=False, track="wandb")
    told = [{"step": options["step"], **values} for name, (values, *_), options in package.calls[1:-1]]
    assert told == read(tmp_path / "run")
    assert [name for name, *_ in package.calls] == ["init", *["init.log"] * 3, "init.finish"]
    assert not (tmp_path / "run" / "tensorboard").exists()


class Broken:
    """A tracker whose server is away: at its lines, or at the end alone."""

    def __init__(self, error, at):
        self.error, self.at, self.lines = error, at, 0

    def __call__(self, line):
        self.lines += 1
        if self.at == "line":
            raise self.error

    def close(self):
        if self.at == "close":
            raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a\x1bb"), KeyError()])
def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path, capsys, error):
    broken, seen = Broken(error, "line"), Broken(error, "never")
    log = make_log(tmp_path, every=1, trackers=[broken, seen])
    log.add([record(1, 1.0), record(2, 1.0), record(3, 1.0)])
    log.close()
    assert (broken.lines, seen.lines, len(read(tmp_path))) == (1, 3, 3)
    (warning,) = capsys.readouterr().err.splitlines()
    told = {"OSError": "[Errno 28] No space left on device", "RuntimeError": "a\\x1bb", "KeyError": "KeyError"}
    assert warning == f"mvm: Broken failed ({told[type(error).__name__]}); training goes on without it"


def test_a_tracker_that_fails_at_the_end_keeps_no_other_from_ending(tmp_path, capsys):
    ends = Recorder()
    make_log(tmp_path, trackers=[Broken(OSError("gone"), "close"), ends]).close()
    assert ends.calls == [("close", (), {})]
    assert capsys.readouterr().err == "mvm: Broken failed (gone); its last lines may be missing\n"


# Resume


@pytest.mark.parametrize("pause", [1, 2, 3, 5])
def test_lines_go_on_without_gap_or_duplicate(tmp_path, pause):
    for name in ("whole", "parts"):
        until = pause if name == "parts" else None
        train(tiny(), tmp_path / name, progress=False, until=until)
    train(tiny(), tmp_path / "parts", progress=False, resume=True)
    both = [read(tmp_path / name) for name in ("whole", "parts")]
    for line in both[0] + both[1]:
        assert line.pop("images_per_second") > 0
    assert both[0] == both[1]
    assert [line["step"] for line in both[0]] == [2, 4, 6]
