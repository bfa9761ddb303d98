"""Checkpoints: whole or not at all, and no damage goes unnoticed."""

import hashlib
import json

import pytest
import torch

from mvm.training import checkpoint
from mvm.training.checkpoint import DamagedCheckpoint

PARTS = ("model", "ema", "optimizer")


def tensors(value=1.0):
    return {
        part: {"a.weight": torch.full((3, 2), value + i), "b": torch.arange(4.0) + value}
        for i, part in enumerate(PARTS)
    }


def saved(run, step=7, value=1.0):
    folder = checkpoint.step_folder(run, step)
    checkpoint.save(folder, tensors(value), {"step": step, "recipe": "digits"})
    return folder


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
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in left]
