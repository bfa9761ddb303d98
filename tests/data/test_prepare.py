"""Preparation: the same bytes however it is run or interrupted, and clear words about bad input."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mvm import files
from mvm.data import DATA_SETS, IMAGENET
from mvm.data.prepare import describe, prepare
from mvm.data.resize import box
from mvm.data.shards import open_prepared
from mvm.generate import class_numbers
from preparing import contents, flushes_until_done, interrupt, png

NAMES = ("ant", "bee", "cat")
ASSETS = Path(os.environ.get("MVM_ASSETS", "no assets"))


def pictures(count, seed=0):
    """Pictures of all sizes."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(4, 12, (count, 2))
    return [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in sizes]


@pytest.fixture
def images(tmp_path):
    """A class folder of 12 pictures, and where to prepare it."""
    for number, pixels in enumerate(pictures(12)):
        path = tmp_path / "images" / NAMES[number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels))
    return tmp_path / "images"


def run(source, out, **options):
    return prepare(source, out, **{"size": 4, "workers": 1, "progress": False, "part_size": 5, **options})


def test_pixels_and_labels(images, tmp_path):
    prepared = run(images, tmp_path / "out")
    data = prepared.load()
    order = [number for label in range(3) for number in range(label, 12, 3)]
    want = [np.asarray(box(Image.fromarray(pictures(12)[number]), 4)).transpose(2, 0, 1) for number in order]
    assert np.array_equal(data.images.numpy(), np.stack(want))
    assert data.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert prepared.classes == NAMES
    assert prepared.class_counts == (4, 4, 4)
    assert [shard.count for shard in prepared.shards] == [5, 5, 2]
    prepared.verify()


def test_grey(images, tmp_path):
    prepared = run(images, tmp_path / "out", channels=1)
    assert prepared.shape == (1, 4, 4)
    want = np.asarray(Image.fromarray(pictures(12)[0]).convert("L").resize((4, 4), Image.Resampling.BOX))
    assert np.array_equal(prepared.load().images[0, 0].numpy(), want)


def test_processes_make_the_same_bytes(images, tmp_path):
    run(images, tmp_path / "one")
    run(images, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_errors_of_workers_arrive(images, tmp_path):
    with pytest.raises(ValueError, match=r"'\w+/\d+.png' is \d+x\d+, not 4x4, and resize='none'"):
        run(images, tmp_path / "out", workers=2, resize="none")


def test_a_worker_that_dies_is_told(images, tmp_path, monkeypatch):
    monkeypatch.setattr("mvm.data.prepare._follow_parent", partial(os._exit, 1))
    with pytest.raises(OSError, match=r"a worker was killed .*finished shards are kept"):
        run(images, tmp_path / "out", workers=2)
    monkeypatch.undo()
    assert run(images, tmp_path / "out").count == 12


def test_killed_at_any_flush_and_run_again(images, tmp_path):
    (images / "ant" / "bad.png").write_bytes(b"no image")
    run(images, tmp_path / "whole")
    # three shards of three files and the index, each flushed twice
    assert flushes_until_done(partial(run, images), tmp_path / "whole", tmp_path) == 20


def test_finished_shards_are_kept_and_damaged_ones_made_again(images, tmp_path, monkeypatch):
    run(images, tmp_path / "whole")
    landed, put = [], files.put_in_place

    def stop_at_the_index(temporary, path):
        if path.name == "index.json":
            raise KeyboardInterrupt
        put(temporary, path)
        landed.append(path.name)

    monkeypatch.setattr(files, "put_in_place", stop_at_the_index)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(images, out)
    assert len(landed) == 9
    assert not (out / "index.json").exists()
    (out / "images-00001.npy").write_bytes(b"damaged")
    landed.clear()
    with pytest.raises(KeyboardInterrupt):
        run(images, out)
    assert landed == ["images-00001.npy", "labels-00001.npy", "shard-00001.json"]
    monkeypatch.undo()
    run(images, out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_set_is_returned_untouched(images, tmp_path):
    first = run(images, tmp_path / "out")
    times = {file: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    assert run(images, tmp_path / "out", workers=2) == first
    assert {file: file.stat().st_mtime_ns for file in first.folder.iterdir()} == times


NO_SHARD = {
    "shard": {"images": "images-00000.npy", "labels": "labels-00000.npy", "count": 0, "sha256": {}},
    "class_counts": [],
    "skipped": {"count": 0, "first": []},
}


def test_leftovers_of_a_kill_after_the_index_are_swept(images, tmp_path):
    run(images, tmp_path / "out")
    want = contents(tmp_path / "out")
    settings = json.loads(want["index.json"])["settings"]
    (tmp_path / "out/shard-00000.json").write_text(json.dumps({"settings": settings, **NO_SHARD}))
    (tmp_path / "out/.labels-00000.npy.mvm-0123abcd.tmp").mkdir()
    (tmp_path / "out/.mine").write_text("notes")
    run(images, tmp_path / "out")
    assert contents(tmp_path / "out") == {**want, ".mine": b"notes"}


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_need_another_folder(images, tmp_path, monkeypatch, finished):
    out = tmp_path / "out"
    if finished:
        run(images, out)
    else:
        monkeypatch.setattr("mvm.data.prepare._accept", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(images, out)
        monkeypatch.undo()
    before = contents(out)
    for options, change in (
        ({"size": 5}, r"size \(4, now 5\)"),
        ({"resize": "centre-crop"}, r"resize \(box, now centre-crop\)"),
        ({"channels": 1}, r"channels \(3, now 1\)"),
        ({"part_size": 6}, r"part_size \(5, now 6\)"),
    ):
        with pytest.raises(ValueError, match=f"holds images with other values of .*{change}.*choose another --out"):
            run(images, out, **options)
    assert run(images, out, resize="box", workers=2 if finished else 1).count == 12  # auto is box
    (images / "ant/00.png").write_bytes(b"changed")
    with pytest.raises(ValueError, match=r"holds images with other values of contents \("):
        run(images, out)
    assert {name: before[name] for name in before if name.endswith("npy")} == {
        name: text for name, text in contents(out).items() if name.endswith("npy")
    }


def test_a_full_disk_leaves_nothing_half_written(images, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run(images, tmp_path / "out")
    assert not (tmp_path / "out").exists()


SCRIPT = """
import sys
from mvm.data.prepare import prepare
if __name__ == "__main__":
    prepare(sys.argv[1], sys.argv[2], size=16, workers=2, part_size=20, progress=False)
"""


def children(process):
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc")
def test_sigkill_takes_the_workers_along_and_loses_nothing(tmp_path):
    """A real kill -9 of the parent in the middle of a parallel run."""
    np.savez(tmp_path / "big.npz", images=np.random.default_rng(0).integers(0, 256, (2000, 64, 64, 3), dtype=np.uint8))
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "out"
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "big.npz"), str(out)]
    victim = subprocess.Popen(command)
    while len(list(out.glob("shard-*.json"))) < 3:
        assert victim.poll() is None
        time.sleep(0.005)
    workers = children(victim.pid)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(workers) >= 2
    assert not any(map(alive, workers))  # no orphan goes on writing
    assert not (out / "index.json").exists()
    options = {"size": 16, "part_size": 20, "workers": 1, "progress": False}
    prepare(tmp_path / "big.npz", out, **options)
    prepare(tmp_path / "big.npz", tmp_path / "whole", **options)
    assert contents(out) == contents(tmp_path / "whole")


def test_bad_images_are_skipped_counted_and_named(images, tmp_path):
    whole = (images / "bee/01.png").read_bytes()
    (images / "bee/01.png").write_bytes(whole[: len(whole) // 2])
    (images / "ant/text.jpg").write_bytes(b"no image")
    prepared = run(images, tmp_path / "out")
    assert prepared.count == 11
    assert prepared.class_counts == (4, 3, 4)
    assert prepared.skipped["count"] == 2
    (text, not_image), (cut, truncated) = prepared.skipped["first"]
    assert (text, not_image, cut) == ("ant/text.jpg", "not an image", "bee/01.png")
    assert "truncated" in truncated
    assert "  ant/text.jpg: not an image" in describe(tmp_path / "out")[0]
    for out in ("out", "strict"):  # prepared before, or now
        with pytest.raises(ValueError, match=r"'ant/text.jpg': not an image.*without strict"):
            run(images, tmp_path / out, strict=True)


def test_only_the_first_hundred_are_named(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(130):
        (tmp_path / f"images/{number:03}.png").write_bytes(b"no image")
    (tmp_path / "images/good.png").write_bytes(png(pictures(1)[0]))
    skipped = run(tmp_path / "images", tmp_path / "out").skipped
    assert (skipped["count"], len(skipped["first"])) == (130, 100)
    assert [name for name, _ in skipped["first"]] == [f"{number:03}.png" for number in range(100)]


def test_a_part_without_any_good_image_leaves_no_shard(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(15):
        (tmp_path / f"images/{number:02}.png").write_bytes(b"" if 5 <= number < 10 else png(pictures(1)[0]))
    prepared = run(tmp_path / "images", tmp_path / "out")
    assert [shard.images for shard in prepared.shards] == ["images-00000.npy", "images-00002.npy"]
    assert not (tmp_path / "out/images-00001.npy").exists()
    assert len(prepared.load()) == 10


def test_no_usable_image(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no usable image; 1 were skipped \(first: 'a.png': not an image\)"):
        run(tmp_path / "images", tmp_path / "out")
    with pytest.raises(ValueError, match="is not finished"):
        open_prepared(tmp_path / "out")


def arrays(path, labels):
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 4, 4, 3), dtype=np.uint8)
    np.savez(path, images=pixels, labels=np.array(labels))
    return path


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([0, 1, -1], None, r"'set.npz\[2\]' has label -1; allowed: 0..1"),
        ([0, 1, 5], 3, r"'set.npz\[2\]' has label 5; allowed: 0..2"),
        ([-1, -1], None, r"'set.npz\[0\]' has label -1; allowed: 0 or more"),
    ],
)
def test_labels_outside(labels, classes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(arrays(tmp_path / "set.npz", labels), tmp_path / "out", classes=classes)


def test_number_of_classes(images, tmp_path):
    prepared = run(arrays(tmp_path / "set.npz", [0, 1]), tmp_path / "out", classes=4)
    assert prepared.classes == ("0", "1", "2", "3")
    assert prepared.empty_classes == ("2", "3")
    assert run(images, tmp_path / "named", classes=3).classes == NAMES
    with pytest.raises(ValueError, match="classes=4, but 'images' names 3"):
        run(images, tmp_path / "four", classes=4)


def test_empty_classes_are_told(images, tmp_path):
    (images / "aaa").mkdir()
    prepared = run(images, tmp_path / "out")
    assert (prepared.classes, prepared.class_counts) == (NAMES, (4, 4, 4))
    assert prepared.empty_classes == ("aaa",)
    assert prepared.load().labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert "  no images of class aaa: it is left out" in describe(tmp_path / "out")[0].splitlines()
    for out in ("out", "strict"):  # prepared before, or now
        with pytest.raises(ValueError, match="classes without images: aaa"):
            run(images, tmp_path / out, strict=True)


def test_mixed_sizes_need_a_resize(tmp_path):
    (tmp_path / "images").mkdir()
    for name, side in (("a", 4), ("b", 6)):
        (tmp_path / f"images/{name}.png").write_bytes(png(np.zeros((side, side, 3), np.uint8)))
    with pytest.raises(ValueError, match="b\\.png' is 6x6, not 4x4, and resize='none'"):
        run(tmp_path / "images", tmp_path / "out", resize="none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0 is out of range"),
        ({"workers": 0}, "workers=0 is out of range"),
        ({"classes": 0}, "classes=0 is out of range"),
        ({"channels": 4}, "channels=4 is not supported; allowed: 1, 3"),
        ({"resize": "bx"}, r"resize='bx' is unknown \(did you mean 'box'\?\)"),
        ({"split": "train"}, "split='train' is not in"),
    ],
)
def test_wrong_options(images, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(images, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_out_must_be_a_place_of_its_own(images, tmp_path):
    with pytest.raises(ValueError, match="lies in the source"):
        run(images, images / "out")
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"is a folder with other files in it \(images\); choose another --out"):
        run(images, tmp_path)


def test_two_at_a_time(images, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="is in use by another process"):
        run(images, out)
    os.close(handle)
    assert run(images, out).count == 12


@pytest.mark.skipif(not (ASSETS / "cifar10").is_dir(), reason="MVM_ASSETS names no folder with cifar10/")
def test_cifar10(tmp_path):
    prepared = prepare(ASSETS / "cifar10", tmp_path / "out", size=32, workers=2, resize="none", progress=False)
    assert (prepared.count, prepared.shape) == (50_000, (3, 32, 32))
    assert prepared.class_counts == (5_000,) * 10
    assert prepared.classes[0] == "airplane"
    data = prepared.load()
    # the published means of the training set, 125.3, 123.0, 113.9
    means = data.images.to(torch.float32).mean((0, 2, 3))
    assert torch.allclose(means, torch.tensor([125.3, 123.0, 113.9]), atol=0.1)
    assert data.labels[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile


def test_a_link_to_nothing_is_a_bad_image(images, tmp_path):
    (images / "ant/gone.png").symlink_to(tmp_path / "nowhere.png")
    prepared = run(images, tmp_path / "out")
    assert prepared.count == 12
    assert [name for name, _ in prepared.skipped["first"]] == ["ant/gone.png"]


def test_folders_named_by_wordnet_ids_get_the_names_of_imagenet(tmp_path):
    """The ids in their order are the usual numbers; where one folder is no such id, all keep their names."""
    assert len(IMAGENET) == len(set(IMAGENET.values())) == 1000
    assert list(IMAGENET) == sorted(IMAGENET)
    names = DATA_SETS["imagenet256"].classes
    assert {number: names[number] for number in (0, 207, 474, 517, 999)} == {
        0: "tench", 207: "golden retriever", 474: "cardigan", 517: "crane", 999: "toilet tissue"
    }  # fmt: skip
    ids = {name: id for id, name in IMAGENET.items()}
    assert all(name in ids for name in DATA_SETS["imagenette"].classes)
    assert class_numbers("Golden Retriever, crane bird,5", names) == (207, 134, 5)
    for name, source in {"a": ("n02099601", "n01440764"), "b": ("n02099601", "mine")}.items():
        for folder in source:
            (tmp_path / name / folder).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / name / folder / "x.png")
        prepare(tmp_path / name, tmp_path / f"{name}-out", size=8, workers=1, progress=False)
    assert open_prepared(tmp_path / "a-out").classes == ("tench", "golden retriever")
    assert open_prepared(tmp_path / "b-out").classes == ("mine", "n02099601")
    again = prepare(tmp_path / "a", tmp_path / "a-out", size=8, workers=1, progress=False)  # the same set
    assert again.classes == ("tench", "golden retriever")
