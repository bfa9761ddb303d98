"""Signals held back to the end of a step; what is saved then, and what is not lost by it."""

import signal
import sys
import threading

import pytest
from tiny_recipe import NETWORK, recipe_with

from mvm import checkpoint
from mvm.optim.ema import Averages
from mvm.training.data import training_data
from mvm.training.field_trainer import FieldTrainer
from mvm.training.interrupt import SIGNALS, Terminated, deferred_interrupt
from mvm.training.loop import train
from mvm.training.preview import FieldPreview

TINY = {
    **NETWORK,
    "train.batch": "4",
    "train.steps": "4",
    "train.log_every": "1",
    "train.save_every": "2",
    "train.keep": "1",
    "train.keep_best": "yes",
    "preview.every": "2",
    "preview.grid": "2",
    "preview.count": "4",
    "sample.nfe": "2",
}


class Pressed(Exception):
    """What the outer handler of these tests raises."""


@pytest.fixture(autouse=True)
def outer():
    """Handlers of our own around every test: a signal that comes through is an exception."""

    def handler(number, frame):
        raise KeyboardInterrupt if number == signal.SIGINT else Pressed

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    yield handler
    for number, old in before.items():
        signal.signal(number, old)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_only_sets_the_event(number, outer):
    with deferred_interrupt() as asked:
        assert not asked.is_set()
        signal.raise_signal(number)
        assert asked.is_set()
    assert [signal.getsignal(each) for each in SIGNALS] == [outer, outer]


@pytest.mark.parametrize(
    ("first", "second", "raised"),
    [
        (signal.SIGINT, signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, signal.SIGINT, KeyboardInterrupt),
        (signal.SIGINT, signal.SIGTERM, Pressed),
    ],
)
def test_the_second_acts_at_once(first, second, raised, outer):
    with deferred_interrupt() as asked:
        signal.raise_signal(first)
        with pytest.raises(raised):
            signal.raise_signal(second)
        assert asked.is_set()
    assert [signal.getsignal(each) for each in SIGNALS] == [outer, outer]


@pytest.mark.parametrize(
    ("sent", "torchrun", "terminated"),
    [
        ([signal.SIGTERM], False, True),
        ([signal.SIGINT], False, False),
        ([], False, False),  # a KeyboardInterrupt that is no signal of ours
        ([signal.SIGTERM, signal.SIGTERM], True, True),  # sent to all, and passed on by torchrun
        ([signal.SIGINT, signal.SIGTERM], True, False),
        ([signal.SIGINT], True, False),
        ([], True, True),  # another process was asked
    ],
)
def test_only_sigterm_ends_well(sent, torchrun, terminated, monkeypatch):
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")

    def work():
        with deferred_interrupt():
            for number in sent:
                signal.raise_signal(number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert raised.type is (Terminated if terminated else KeyboardInterrupt)


def test_ctrl_c_after_sigterm_is_no_good_end(outer):
    """It cuts the saving short: what SIGTERM promises was not done."""

    def work():
        with deferred_interrupt():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert raised.type is KeyboardInterrupt
    assert [signal.getsignal(each) for each in SIGNALS] == [outer, outer]


def test_handlers_come_back_after_an_error(outer):
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        raise ZeroDivisionError
    assert [signal.getsignal(each) for each in SIGNALS] == [outer, outer]


def test_another_thread_leaves_handlers_alone(outer):
    """Only the main thread may set them; training in another one goes without."""
    seen = []

    def work():
        with deferred_interrupt() as asked:
            seen.append((asked.is_set(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, outer)]


def tiny(**changes):
    return recipe_with(TINY, **changes)


def press(monkeypatch, owner, name, at, number=signal.SIGINT, times=1):
    """Send the signal inside the n-th call of owner.name, before it does anything."""
    inner, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == at:
            for _ in range(times):
                signal.raise_signal(number)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def manifest(run):
    return checkpoint.read_manifest(checkpoint.latest(run))


@pytest.mark.parametrize("number", SIGNALS)
def test_sigterm_saves_as_ctrl_c_does(tmp_path, monkeypatch, number):
    press(monkeypatch, Averages, "update", 3, number)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, progress=False)
    assert manifest(tmp_path)["step"] == 3


@pytest.mark.parametrize("where", [(Averages, "update", 2), (FieldPreview, "__call__", 1)], ids=["step", "preview"])
def test_a_stop_right_after_a_judged_save_does_not_lose_its_quality(tmp_path, monkeypatch, where):
    """The checkpoint of that step is written once more: it must stay the best one."""
    press(monkeypatch, *where)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, progress=False)
    assert manifest(tmp_path)["step"] == 2
    assert manifest(tmp_path)["quality"] > 0
    assert checkpoint.best(tmp_path) == checkpoint.latest(tmp_path)


def test_a_stop_at_an_unjudged_step_borrows_no_quality(tmp_path, monkeypatch):
    press(monkeypatch, Averages, "update", 3)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, progress=False)
    assert "quality" not in manifest(tmp_path)


def test_a_stop_within_a_preview_puts_the_weights_back(tmp_path, monkeypatch):
    """Twice pressed while the average is swapped in: the weights that are saved are those trained."""
    train(tiny(), tmp_path / "whole", progress=False)
    press(monkeypatch, FieldPreview, "_images", 1, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "stopped", progress=False)
    monkeypatch.undo()
    train(tiny(), tmp_path / "stopped", progress=False, resume=True)
    found = [checkpoint.load(checkpoint.latest(tmp_path / name), "model") for name in ("whole", "stopped")]
    assert all(value.equal(found[1][name]) for name, value in found[0].items())


# ---------------------------------------------------------------- a step that is given up


def stop_in(recipe, run, monkeypatch, place, step=2):
    """Train until a signal that arrives in the forward or backward pass of a step."""
    advance = FieldTrainer.advance

    def pressed(trainer):
        if trainer.step == step:
            if place == "forward":
                trainer.model.network.blocks[0].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
            else:
                hook = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
                next(trainer.model.network.parameters()).register_hook(hook)
        advance(trainer)

    monkeypatch.setattr(FieldTrainer, "advance", pressed)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, run, progress=False)
    monkeypatch.setattr(FieldTrainer, "advance", advance)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_signal_in_a_step_gives_it_up_and_nothing_is_lost(place, tmp_path, monkeypatch, capfd):
    """What is saved is the step before; resumed, the run ends with the bits of one that was never stopped."""
    recipe = recipe_with(TINY, preview_every="0", train_keep_best="no", train_save_every="3")
    train(recipe, tmp_path / "whole", progress=False)
    stop_in(recipe, tmp_path / "cut", monkeypatch, place)
    assert "mvm: stopping; once more to leave without saving" in capfd.readouterr().err
    newest = checkpoint.latest(tmp_path / "cut")
    assert newest.name == "step-00000002"
    train(recipe, tmp_path / "cut", resume=True, progress=False)
    files = [checkpoint.latest(tmp_path / run) / "ema.safetensors" for run in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_backward_pass_comes_by_python_at_every_block():
    """Else a signal on a CPU would wait for the whole pass: only Python runs its handler."""
    recipe = recipe_with(TINY, network_depth="3")
    trainer, visits = FieldTrainer(recipe, training_data(recipe)), []
    inside = []  # the backward pass

    def seen(frame, event, argument):
        name = frame.f_code.co_name
        if name == "backward" and event in ("call", "return"):
            inside.append(1) if event == "call" else inside.pop()
        if inside and event == "call" and frame.f_globals.get("__name__") == "mvm.training.engine":
            visits.append(name)

    sys.setprofile(seen)
    try:
        trainer.advance()
    finally:
        sys.setprofile(None)
    assert len(visits) == 3
