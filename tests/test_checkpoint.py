"""Checkpoints: whole or not at all, and no damage goes unnoticed; a disk that is full stops no training."""

import errno
import hashlib
import json
import shutil
import threading
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from mvm import checkpoint
from mvm.checkpoint import DamagedCheckpoint
from mvm.distributed.processes import Processes
from mvm.recipes import load_recipe, override
from mvm.training.loop import Saver, train

PARTS = ("model", "ema", "optimizer")


def tensors(value=1.0):
    return {
        part: {"a.weight": torch.full((3, 2), value + i), "b": torch.arange(4.0) + value}
        for i, part in enumerate(PARTS)
    }


def saved(run, step=7, value=1.0, **info):
    folder = checkpoint.step_folder(run, step)
    checkpoint.save(folder, tensors(value), {"step": step, "recipe": "digits", **info})
    return folder


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_round_trip(tmp_path):
    folder = saved(tmp_path)
    assert folder == tmp_path / "checkpoints" / "step-00000007"
    for part, weights in tensors().items():
        found = checkpoint.load(folder, part)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_transposed_tensors_are_stored_as_they_read(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3).T
    checkpoint.save(tmp_path / "step-00000000", {"model": {"w": weight}}, {"step": 0})
    assert torch.equal(checkpoint.load(tmp_path / "step-00000000", "model")["w"], weight)


def test_manifest_lists_the_sha256_of_every_file(tmp_path):
    folder = saved(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert manifest["recipe"] == "digits"
    assert sorted(manifest["sha256"]) == sorted(f"{part}.safetensors" for part in PARTS)
    for name, digest in manifest["sha256"].items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert sorted(p.name for p in folder.iterdir()) == sorted([*manifest["sha256"], "manifest.json"])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("where", [0, 9, 0.5, -1])
def test_a_flipped_bit_is_named(tmp_path, part, where):
    folder = saved(tmp_path)
    path = folder / f"{part}.safetensors"
    data = bytearray(path.read_bytes())
    data[int(where * len(data)) if isinstance(where, float) else where] ^= 1
    path.write_bytes(data)
    before = contents(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=rf"{part}\.safetensors is damaged"):
        checkpoint.load(folder, part)
    for other in set(PARTS) - {part}:
        checkpoint.load(folder, other)
    assert contents(tmp_path) == before


def bytes_hashed(monkeypatch):
    """The number of bytes that are hashed from now on, by file and first byte."""
    hashed, real = {}, checkpoint.sha256

    def counted(path, part=None):
        part = range(path.stat().st_size) if part is None else part
        hashed[path.name, part.start] = len(part)
        return real(path, part)

    monkeypatch.setattr(checkpoint, "sha256", counted)
    return hashed


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_processes_share_the_checking(tmp_path, monkeypatch, blocks, world):
    """Every byte is hashed by one process; without blocks, as in older checkpoints, a file by one."""
    monkeypatch.setattr(checkpoint, "BLOCK", 32 if blocks else 1 << 20)
    folder = saved(tmp_path)
    sizes = {part: (folder / f"{part}.safetensors").stat().st_size for part in PARTS}
    assert ("blocks" in checkpoint.read_manifest(folder)) == blocks
    shares = []
    for rank in range(world):
        with monkeypatch.context() as patch:
            hashed = bytes_hashed(patch)
            checkpoint.check(folder, PARTS, rank, world)
        shares.append(hashed)
    every = [piece for hashed in shares for piece in hashed.items()]
    covered = {part: sorted((start, size) for (name, start), size in every if name.startswith(part)) for part in PARTS}
    for part, pieces in covered.items():
        ends = [0, *accumulate(size for _, size in pieces)]
        assert [start for start, _ in pieces] == ends[:-1]
        assert ends[-1] == sizes[part]
    largest = max(size for _, size in every)
    assert max(sum(hashed.values()) for hashed in shares) <= sum(sizes.values()) / world + largest


def damage(folder, rank, world):
    """What one of several processes says of a checkpoint; "" where it finds nothing."""
    try:
        checkpoint.check(folder, PARTS, rank, world)
    except DamagedCheckpoint as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", [0, 40, 0.5, -1])
def test_a_flipped_bit_is_found_by_one_of_the_processes(tmp_path, monkeypatch, where):
    monkeypatch.setattr(checkpoint, "BLOCK", 32)
    path = saved(tmp_path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[int(where * len(data)) if isinstance(where, float) else where] ^= 1
    path.write_bytes(data)
    found = [damage(path.parent, rank, 3) for rank in range(3)]
    assert sorted("model.safetensors is damaged" in message for message in found) == [False, False, True]
    assert sorted(found)[:2] == ["", ""]


@pytest.mark.parametrize("change", [-33, -1, 1, 33])
def test_another_length_is_found(tmp_path, monkeypatch, change):
    monkeypatch.setattr(checkpoint, "BLOCK", 32)
    path = saved(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    found = {damage(path.parent, rank, 2) for rank in range(2)} - {""}
    assert found
    assert all("model.safetensors is damaged" in message for message in found)


BROKEN_BLOCKS = [3, {}, {"bytes": 0, "sha256": {}}, {"bytes": 8, "sha256": {"model.safetensors": [1]}}]


@pytest.mark.parametrize("blocks", BROKEN_BLOCKS, ids=str)
def test_broken_blocks_in_a_manifest_are_named(tmp_path, blocks):
    folder = saved(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "blocks": blocks}))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing or damaged"):
        checkpoint.check(folder, PARTS, 0, 2)


@pytest.mark.parametrize("length", [0, 4, -1])
def test_a_truncated_file_is_named(tmp_path, length):
    path = saved(tmp_path) / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedCheckpoint, match=r"ema\.safetensors is damaged"):
        checkpoint.load(path.parent, "ema")


def test_a_missing_file_is_named(tmp_path):
    folder = saved(tmp_path)
    (folder / "ema.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"ema\.safetensors is missing"):
        checkpoint.load(folder, "ema")
    with pytest.raises(DamagedCheckpoint, match=r"lists no other\.safetensors"):
        checkpoint.load(folder, "other")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        '"x"',
        '{"step": 3}',
        '{"sha256": {}}',
        '{"sha256": [], "step": 3}',
        '{"sha256": {}, "step": "3"}',
    ],
)
def test_a_missing_or_broken_manifest_is_named(tmp_path, text):
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing or damaged"):
        checkpoint.load(folder, "model")


def test_a_manifest_that_is_not_text_is_named(tmp_path):
    folder = saved(tmp_path)
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing or damaged"):
        checkpoint.load(folder, "model")


def test_a_flipped_bit_in_the_manifest_step_is_noticed(tmp_path):
    """7 is 6 with one bit flipped: the step decides data order and learning rate, and the folder's name knows it."""
    folder = saved(tmp_path, step=7)
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 6'))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        checkpoint.read_manifest(folder)


@pytest.mark.parametrize("fail_at", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True])
def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path, monkeypatch, fail_at, again):
    """again: the same step is saved a second time; else a later one."""
    folder = saved(tmp_path, step=7)
    before = contents(folder)
    real, calls = checkpoint.save_file, []

    def breaks(weights, path):
        calls.append(path)
        if len(calls) == fail_at:
            path.write_bytes(b"half a fi")
            raise OSError("No space left on device")
        real(weights, path)

    monkeypatch.setattr(checkpoint, "save_file", breaks)
    with pytest.raises(OSError, match="No space"):
        saved(tmp_path, step=7 if again else 8, value=5.0)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000007"]  # the half of it that was written is gone: it would fill the disk
    assert contents(folder) == before
    assert checkpoint.latest(tmp_path) == folder
    # and the next save is not disturbed by what was left behind
    newer = saved(tmp_path, step=7 if again else 8, value=5.0)
    assert float(checkpoint.load(newer, "model")["b"][0]) == 5.0
    assert sorted(p.name for p in newer.iterdir()) == [
        "ema.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]


def test_saving_again_replaces_the_checkpoint(tmp_path):
    saved(tmp_path, value=1.0)
    folder = saved(tmp_path, value=9.0)
    assert float(checkpoint.load(folder, "model")["b"][0]) == 9.0
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_latest_is_by_number(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (10, 9, 2000, 100):
        saved(tmp_path, step)
    assert checkpoint.latest(tmp_path).name == "step-00002000"


def test_half_written_folders_are_not_the_latest(tmp_path):
    folder = saved(tmp_path, 5)
    (folder.parent / ".step-00000009.tmp").mkdir()
    (folder.parent / ".step-00000008.old").mkdir()
    assert checkpoint.latest(tmp_path) == folder


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
def test_prune_keeps_the_newest(tmp_path, keep, left):
    for step in (3, 1, 4, 2):
        saved(tmp_path, step)
    checkpoint.prune(tmp_path, keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


QUALITIES = {1: 0.7, 2: 0.3, 3: None, 4: 0.5, 5: 0.3, 6: None}


@pytest.fixture
def judged(tmp_path):
    """Six checkpoints, two of them without a quality; 2 and 5 are equally good."""
    for step, quality in QUALITIES.items():
        saved(tmp_path, step, **({} if quality is None else {"quality": quality}))
    return tmp_path


def test_best_has_the_lowest_quality_figure(judged):
    assert checkpoint.best(judged).name == "step-00000002"
    shutil.rmtree(checkpoint.step_folder(judged, 2))
    assert checkpoint.best(judged).name == "step-00000005"


def test_best_of_none(tmp_path):
    assert checkpoint.best(tmp_path) is None
    saved(tmp_path, 3)
    assert checkpoint.best(tmp_path) is None


@pytest.mark.parametrize(("keep", "left"), [(1, [2, 6]), (3, [2, 4, 5, 6]), (5, [2, 3, 4, 5, 6])])
def test_prune_keeps_the_best_if_asked(judged, keep, left):
    checkpoint.prune(judged, keep, keep_best=True)
    assert names(judged) == [f"step-{step:08d}" for step in left]


def test_prune_without_any_judged(tmp_path):
    for step in (1, 2):
        saved(tmp_path, step)
    checkpoint.prune(tmp_path, 1, keep_best=True)
    assert names(tmp_path) == ["step-00000002"]


def test_find(judged):
    assert checkpoint.find(judged, "latest") == checkpoint.step_folder(judged, 6)
    assert checkpoint.find(judged, "best") == checkpoint.step_folder(judged, 2)
    assert checkpoint.find(judged, "4") == checkpoint.find(judged, "00004") == checkpoint.step_folder(judged, 4)
    assert checkpoint.find(judged, "7") is None


@pytest.mark.parametrize("which", ["latest", "best", "1"])
def test_find_where_nothing_is(tmp_path, which):
    assert checkpoint.find(tmp_path, which) is None


@pytest.mark.parametrize("which", ["newest", "", "-1", "1e3", "step-00000002", "1.0"])
def test_find_nonsense(judged, which):
    with pytest.raises(ValueError, match=rf"checkpoint='{which}'.*latest, best, or a step number"):
        checkpoint.find(judged, which)


# The writer


@pytest.fixture
def saver(tmp_path):
    return Saver(SimpleNamespace(processes=Processes()), tmp_path, True)


def test_writes_go_on_in_the_background_one_after_another(saver, tmp_path):
    go, order = threading.Event(), []

    def first(run):
        go.wait(10)
        order.append((run, "first"))

    saver.submit(first)
    assert order == []
    threading.Timer(0.1, go.set).start()
    saver.submit(lambda run: order.append((run, "second")))
    saver.finish()
    assert order == [(tmp_path, "first"), (tmp_path, "second")]


def test_a_failed_write_is_reported_once(saver, capsys):
    error = OSError(errno.ENOSPC, "No space left on device")

    def fails(run):
        raise error

    saver.report_failure()  # nothing was written yet
    saver.submit(fails)
    saver.submit(fails)
    assert capsys.readouterr().err.count("No space left on device") == 1
    with pytest.raises(OSError, match="No space"):
        saver.finish()
    saver.finish()
    saver.submit(lambda run: None)
    saver.finish()
    saver.report_failure()
    assert capsys.readouterr().err == ""


# A disk that is full while training

TINY = {
    "network.depth": "1",
    "network.heads": "2",
    "network.width": "16",
    "network.patch": "4",
    "train.batch": "4",
    "train.steps": "6",
    "train.lr": "5e-3",
    "train.log_every": "1",
    "train.save_every": "2",
    "train.keep": "9",
}


def go(run, **changes):
    recipe = override(load_recipe("digits"), {**TINY, **{k.replace("_", ".", 1): v for k, v in changes.items()}})
    return train(recipe, run, progress=False, resume=(run / "recipe.json").is_file())


def full_disk(monkeypatch, *calls):
    """Raise where the n-th file is written, half of it written; a checkpoint has three."""
    real, seen = checkpoint.save_file, []

    def breaks(weights, path):
        seen.append(path)
        if len(seen) in calls:
            path.write_bytes(b"half a fi")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(weights, path)

    monkeypatch.setattr(checkpoint, "save_file", breaks)


def same_weights(one, other):
    found = [{part: checkpoint.load(folder, part) for part in PARTS} for folder in (one, other)]
    return all(torch.equal(value, found[1][part][name]) for part in PARTS for name, value in found[0][part].items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    go(run)
    return run


@pytest.mark.parametrize("call", [4, 5, 6])
def test_training_goes_on_past_a_full_disk(undisturbed, tmp_path, monkeypatch, capsys, call):
    """The second checkpoint fails: the first stays, the third is written, and the weights never knew."""
    run = tmp_path / "run"
    full_disk(monkeypatch, call)
    go(run)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mvm:")]
    assert len(told) == 1
    for words in ("could not be saved", "No space left on device", "step-00000002 is whole", "training goes on"):
        assert words in told[0]
    assert names(run) == ["step-00000002", "step-00000006"]
    for name in names(run):
        assert same_weights(run / "checkpoints" / name, undisturbed / "checkpoints" / name)


def test_the_first_save_may_fail_too(undisturbed, tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, 1)
    go(tmp_path / "run")
    assert "there is no checkpoint before it" in capsys.readouterr().err
    assert names(tmp_path / "run") == ["step-00000004", "step-00000006"]


def test_a_last_save_that_fails_is_an_error_and_resume_does_it_again(undisturbed, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        full_disk(patch, 8)
        with pytest.raises(OSError, match="No space left on device"):
            go(run)
    assert "goes on" not in capsys.readouterr().err  # it does not, and the error itself is told
    assert names(run) == ["step-00000002", "step-00000004"]
    go(run)
    assert same_weights(checkpoint.latest(run), checkpoint.latest(undisturbed))
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_as_safetensors_tells_it_is_an_os_error(tmp_path, monkeypatch):
    """Its own error is no OSError, which is what the command line knows how to tell."""

    def breaks(weights, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", breaks)
    with pytest.raises(OSError, match=r"model\.safetensors: .*No space left on device"):
        saved(tmp_path)


def test_two_failures_are_told_twice(tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, 1, 2)
    go(tmp_path / "run")
    assert capsys.readouterr().err.count("could not be saved") == 2
    assert names(tmp_path / "run") == ["step-00000006"]


def test_old_checkpoints_that_cannot_be_removed_do_not_stop_training(undisturbed, tmp_path, monkeypatch, capsys):
    def refuses(run, keep, keep_best):
        if keep < len(checkpoint.folders(run)) < 3:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint, "prune", refuses)
    go(tmp_path / "run", train_keep="1")
    assert "Permission denied" in capsys.readouterr().err
    for name in ("step-00000002", "step-00000004", "step-00000006"):
        assert same_weights(tmp_path / "run" / "checkpoints" / name, undisturbed / "checkpoints" / name)


def test_a_checkpoint_is_the_state_at_its_step_however_slowly_it_is_written(undisturbed, tmp_path, monkeypatch):
    """Training goes on while a checkpoint is written: what it changes must not get into the file."""
    real, held = checkpoint.save, threading.Event()

    def slow(folder, *rest):
        if folder.name == "step-00000002":
            held.wait(10)
        real(folder, *rest)

    def release(line):
        if line["step"] == 4:
            held.set()

    monkeypatch.setattr(checkpoint, "save", slow)
    run = tmp_path / "run"
    recipe = override(load_recipe("digits"), TINY)
    train(recipe, run, progress=False, on_log=release)
    assert held.is_set()
    assert same_weights(checkpoint.step_folder(run, 2), checkpoint.step_folder(undisturbed, 2))
