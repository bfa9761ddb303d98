"""Every kind of storage gives back the pixels and labels that were put in, in a known order."""

import collections
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mvm.data.resize import decode
from mvm.data.sources import open_source
from mvm.data.sources.arrays import _runs, load_batch
from mvm.data.sources.records import listed_names, natural, split_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COUNT, SIDE, NAMES = 23, 6, ("ant", "bee", "cat")
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
LABELS = np.sort(np.random.default_rng(1).integers(0, 3, COUNT))
ROWS = PIXELS.transpose(0, 3, 1, 2).reshape(COUNT, -1)  # channel planes
PNGS = []
for picture in PIXELS:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    PNGS.append(buffer.getvalue())


def named():
    """(name in its class folder, contents)."""
    return [(f"{NAMES[label]}/{i:03}.png", png) for i, (png, label) in enumerate(zip(PNGS, LABELS, strict=True))]


def into_folder(path):
    for name, png in named():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(png)
    (path / "notes.txt").write_text("no class")
    (path / ".cache").mkdir()
    return path


def into_zip(path):
    with zipfile.ZipFile(path / "z.zip", "w") as archive:
        for name, png in reversed(named()):
            archive.writestr(name, png)
        archive.writestr("__MACOSX/ant/._000.png", b"rubbish")
    return path / "z.zip"


def into_wrapped_zip(path):
    """As `zip -r insects.zip insects` makes it."""
    with zipfile.ZipFile(path / "insects.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("insects")
        for name, png in named():
            archive.writestr(f"insects/{name}", png)
    return path / "insects.zip"


def into_zip_with_manifest(path):
    names = [f"{i // 10:05}/img{i:08}.png" for i in range(COUNT)]
    labels = [[name, int(label)] for name, label in zip(names, LABELS, strict=True)]
    with zipfile.ZipFile(path / "edm.zip", "w") as archive:
        for name, png in zip(names, PNGS, strict=True):
            archive.writestr(name, png)
        archive.writestr("dataset.json", json.dumps({"labels": labels[::-1]}))
    return path / "edm.zip"


def hub_table(image="image", label="label", nested=True, names=NAMES):
    images = [{"bytes": png, "path": f"{i}.png"} for i, png in enumerate(PNGS)] if nested else pa.array(PNGS)
    table = pa.table({image: images, label: LABELS, "other": np.arange(COUNT)})
    told = {"info": {"features": {label: {"names": list(names), "_type": "ClassLabel"}}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(told)}) if names else table


def into_parquet(path):
    pq.write_table(hub_table(), path / "d.parquet", row_group_size=4)
    return path / "d.parquet"


def into_parquet_files(path):
    """Plain binary under `img`, other column names, names in classes.txt, one group larger than a part."""
    table = hub_table("img", "fine_label", nested=False, names=())
    (path / "classes.txt").write_text("ant bee cat\n")
    pq.write_table(table.slice(0, 15), path / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(15), path / "train-00001-of-00002.parquet", row_group_size=3)
    return path


def tar_of(path, samples):
    with tarfile.open(path, "w") as tar:
        for name, contents in samples:
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            tar.addfile(member, io.BytesIO(contents))
    return path


def into_tar(path):
    samples = []
    for i, (png, label) in enumerate(zip(PNGS, LABELS, strict=True)):
        samples += [(f"a.b/{i:03}.cls", b"%d\n" % label), (f"a.b/{i:03}.png", png), (f"a.b/{i:03}.seg.png", b"mask")]
    (path / "classes.txt").write_text("\n".join(f"{i}\tn{i}\t{name}" for i, name in enumerate(NAMES)))
    return tar_of(path / "t.tar", samples)


def into_tars(path):
    for part, span in enumerate((range(9), range(9, COUNT))):
        samples = [(f"{i:03}.json", json.dumps({"label": int(LABELS[i]), "caption": "x"}).encode()) for i in span]
        samples += [(f"{i:03}.PNG", PNGS[i]) for i in span]
        tar_of(path / f"train-{part + 9:02}.tar", sorted(samples))
    return path


def into_npz(path):
    np.savez_compressed(path / "n.npz", images=PIXELS, labels=LABELS.astype(np.uint8))
    return path / "n.npz"


def into_npz_of_rows(path):
    np.savez(path / "n.npz", arr_0=ROWS, arr_1=LABELS)
    return path / "n.npz"


def into_npy(path):
    np.save(path / "images.npy", np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2)))
    np.save(path / "labels.npy", LABELS)
    return path / "images.npy"


def into_cifar(path):
    for number, span in ((10, slice(12, None)), (2, slice(0, 12))):
        batch = {b"data": ROWS[span], b"labels": LABELS[span].tolist(), b"batch_label": b"x"}
        (path / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=2))
    names = {b"label_names": [name.encode() for name in NAMES]}
    (path / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    return path


def into_imagenet(path):
    for number, span in ((10, slice(12, None)), (9, slice(0, 12))):
        batch = {"data": ROWS[span], "labels": (LABELS[span] + 1).tolist(), "mean": ROWS.mean(0)}
        (path / f"train_data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=4))
    return path


def into_imagenet_npz(path):
    np.savez(path / "val_data.npz", data=ROWS, labels=LABELS + 1)
    return path / "val_data.npz"


NUMBERS, THOUSAND = ("0", "1", "2"), tuple(map(str, range(1000)))
KINDS = {
    "folder": (into_folder, "folder", NAMES),
    "zip": (into_zip, "zip", NAMES),
    "zip in a folder": (into_wrapped_zip, "zip", NAMES),
    "zip with dataset.json": (into_zip_with_manifest, "zip", NUMBERS),
    "parquet": (into_parquet, "parquet", NAMES),
    "parquet files": (into_parquet_files, "parquet", NAMES),
    "tar": (into_tar, "webdataset", NAMES),
    "tars": (into_tars, "webdataset", ()),
    "npz": (into_npz, "numpy", NUMBERS),
    "npz of rows": (into_npz_of_rows, "numpy", NUMBERS),
    "npy": (into_npy, "numpy", NUMBERS),
    "cifar": (into_cifar, "batches", NAMES),
    "imagenet": (into_imagenet, "batches", THOUSAND),
    "imagenet npz": (into_imagenet_npz, "batches", THOUSAND),
}


def contents(source):
    records = [record for part in source.parts for record in part.read()]
    pixels = np.stack([np.asarray(decode(record.image, 3)) for record in records])
    return pixels, [record.label for record in records], [record.name for record in records]


@pytest.mark.parametrize("part_size", [1, 5, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind, part_size, tmp_path):
    write, expected, names = KINDS[kind]
    source = open_source(write(tmp_path), part_size=part_size)
    pixels, labels, record_names = contents(source)
    assert np.array_equal(pixels, PIXELS)
    assert labels == LABELS.tolist()
    assert (source.kind, source.classes) == (expected, names)
    assert len(set(record_names)) == COUNT
    assert len({part.name for part in source.parts}) == len(source.parts)
    sent = tuple(pickle.loads(pickle.dumps(part)) for part in source.parts)  # as to a worker
    assert contents(replace(source, parts=sent))[2] == record_names
    assert len(list(source.parts[0].read())) <= part_size or expected == "webdataset"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 20))
def test_parquet_runs_cover_every_row_once(groups, part_size):
    seen = []
    for run, at, start, stop in _runs(groups, part_size):
        assert at == sum(groups[: run[0]])
        assert 0 < stop - start <= part_size
        assert stop <= sum(groups[group] for group in run)
        seen += range(at + start, at + stop)
    assert seen == list(range(sum(groups)))


def test_nested_files_belong_to_their_class(tmp_path):
    for name in ("b/x/2.png", "b/1.PNG", "a/y/z/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(PNGS[0])
    (tmp_path / "c").mkdir()
    source = open_source(tmp_path)
    assert source.classes == ("a", "b", "c")
    records = list(source.parts[0].read())
    assert [(record.name, record.label) for record in records] == [("a/y/z/3.png", 0), ("b/1.PNG", 1), ("b/x/2.png", 1)]


def test_flat_folder_is_one_class(tmp_path):
    for name in ("b.png", "a.jpeg"):
        (tmp_path / name).write_bytes(PNGS[0])
    source = open_source(tmp_path)
    assert source.classes == ("0",)
    assert [(record.name, record.label) for record in source.parts[0].read()] == [("a.jpeg", 0), ("b.png", 0)]
    (tmp_path / "sub").mkdir()
    assert open_source(tmp_path).classes == ("0",)
    (tmp_path / "sub/c.png").write_bytes(PNGS[0])
    with pytest.raises(ValueError, match=r"both in class folders and beside them \(first: a.jpeg\)"):
        open_source(tmp_path)


def test_folders_named_as_splits_are_no_classes(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        (tmp_path / split / "ant" / f"{split}.png").write_bytes(PNGS[0])
    with pytest.raises(ValueError, match="several splits; choose one with split: train, val"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match=r"split='test' is not in .*allowed: train, val"):
        open_source(tmp_path, split="test")
    source = open_source(tmp_path, split="val")
    assert source.classes == ("ant",)
    assert contents(source)[2] == ["val/ant/val.png"]


def test_stamps_tell_that_contents_changed(tmp_path):
    stamp = open_source(into_folder(tmp_path)).parts[0].stamp
    assert open_source(tmp_path).parts[0].stamp == stamp
    (tmp_path / named()[3][0]).write_bytes(PNGS[3] + b"longer")
    assert open_source(tmp_path).parts[0].stamp != stamp


def test_manifest(tmp_path):
    def zipped(text):
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
            archive.writestr("0/a.png", PNGS[0])
            archive.writestr("1/b.png", PNGS[1])
            archive.writestr("dataset.json", text)
        return tmp_path / "m.zip"

    assert open_source(zipped('{"labels": null}')).classes == ("0",)
    for text, message in (
        ('{"labels": [["0/a.png", 0]]}', "'1/b.png' has no label"),
        ('{"labels": [["0/a.png", 0], ["1/b.png", 1], ["c.png", 1]]}', "'c.png' has a label but no image"),
        ('{"labels": [["0/a.png", 0], ["1/b.png", 0.5]]}', "label 0.5 of '1/b.png'"),
        ("{}", "dataset.json must hold"),
        ("[1", "dataset.json must hold"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(zipped(text))


def test_splits_of_files(tmp_path):
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        pq.write_table(hub_table(), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match="several splits; choose one with split: test, train"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match=r"split='tran' is not in .*; allowed: test, train"):
        open_source(tmp_path, split="tran")
    assert {part.name for part in open_source(tmp_path, split="test").parts} == {
        f"test-00000-of-00001.parquet[0:{COUNT}]"
    }
    with pytest.raises(ValueError, match="split='x' has no meaning"):
        open_source(into_npz(tmp_path), split="x")


def test_names_of_splits(tmp_path):
    want = {
        "train-00000-of-00041.parquet": "train",
        "imagenet-train-000123.tar": "imagenet-train",
        "test.parquet": "test",
        "validation/0000.parquet": "validation",
        "data/0000.parquet": "",
        "cifar10.parquet": "",
    }
    assert {name: split_of(tmp_path / name) for name in want} == want


def test_natural_order(tmp_path):
    names = ["b_10", "b_9", "a_2", "b_1"]
    assert sorted((tmp_path / n for n in names), key=natural) == [tmp_path / n for n in ("a_2", "b_1", "b_9", "b_10")]


def test_class_lists(tmp_path):
    for text, want in (
        ("great white shark\nhen\n\n", ("great white shark", "hen")),
        ("a b  c\n", ("a", "b", "c")),
        ("0\tn01\ttench\n7\tn02\ta dog\n", ("tench", "a dog")),
    ):
        (tmp_path / "classes.txt").write_text(text)
        assert listed_names(tmp_path) == want


def test_without_labels_there_is_one_class(tmp_path):
    np.save(tmp_path / "x.npy", PIXELS[..., 0])  # grey, (N, H, W)
    pq.write_table(hub_table(names=()).drop_columns(["label"]), tmp_path / "x.parquet")
    tar_of(tmp_path / "x.tar", [("a.png", PNGS[0]), ("b.png", PNGS[1])])
    for suffix in ("npy", "parquet", "tar"):
        source = open_source(tmp_path / f"x.{suffix}")
        assert source.classes == ("0",)
        assert {record.label for part in source.parts for record in part.read()} == {0}


def test_bare_labels_name_their_classes(tmp_path):
    pq.write_table(hub_table(names=()), tmp_path / "x.parquet")
    assert open_source(tmp_path / "x.parquet").classes == ("0", "1", "2")
    np.savez(tmp_path / "y.npz", images=PIXELS, labels=LABELS * 10**9)
    with pytest.raises(ValueError, match="label 2000000000 is no class number"):
        open_source(tmp_path / "y.npz")


def test_null_label_and_null_image(tmp_path):
    table = pa.table({"image": [{"bytes": None, "path": "elsewhere.png"}], "label": pa.array([None], pa.int64())})
    pq.write_table(table, tmp_path / "x.parquet")
    (record,) = open_source(tmp_path / "x.parquet").parts[0].read()
    assert (record.image, record.label) == (b"", -1)  # both refused by whoever looks at them


def test_tars_that_cannot_be_right(tmp_path):
    for samples, message in (
        ([("a.png", PNGS[0]), ("a.cls", b"0"), ("b.png", PNGS[1])], "sample 'b' has no label"),
        ([("a.png", PNGS[0]), ("a.cls", b"dog")], "the label of 'a' is not an integer"),
        ([("a.png", PNGS[0]), ("a.json", b'{"label": 0}'), ("b.json", b'{"label": "x"}')], "the label of 'b'"),
    ):
        source = open_source(tar_of(tmp_path / "x.tar", samples))
        with pytest.raises(ValueError, match=message):
            list(source.parts[0].read())
    with pytest.raises(ValueError, match="holds no samples"):
        open_source(tar_of(tmp_path / "x.tar", [("a.txt", b"")]))
    tar_of(tmp_path / "x.tar", [("a.png", PNGS[0]), ("b.png", PNGS[0] * 99)])
    (tmp_path / "x.tar").write_bytes((tmp_path / "x.tar").read_bytes()[:4000])
    with pytest.raises(ValueError, match="no whole tar"):
        list(open_source(tmp_path / "x.tar").parts[0].read())


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", ["<i8", ">i4", "u1", "f4"])
def test_pickled_arrays_of_every_protocol(protocol, kind, tmp_path):
    values = np.arange(12).reshape(3, 4).astype(kind)
    batch = {"c": values, "f": np.asfortranarray(values), "n": [values[1, 2]], "s": "x", "t": (1, 2.5, None)}
    (tmp_path / "b").write_bytes(pickle.dumps(batch, protocol=protocol))
    found = load_batch(tmp_path / "b")
    assert np.array_equal(found["c"], values)
    assert np.array_equal(found["f"], values)
    assert found["n"] == [6]
    assert found["t"] == (1, 2.5, None)


class Evil:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize(
    "thing",
    [
        Evil(os.system, "touch pwned"),
        Evil(eval, "1"),
        Evil(np.load, "x"),
        Evil(getattr, "text", "upper"),
        collections.OrderedDict(a=1),
        np.array([{}], object),
        np.array(["text"]),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_pickles_that_do_more_are_refused_unrun(thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 2, 5):
        (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": thing, "labels": []}, protocol=protocol))
        with pytest.raises(ValueError, match=r"data_batch_1' is refused: no pickle of plain arrays \(UnpicklingError"):
            open_source(tmp_path / "data_batch_1")
    assert not (tmp_path / "pwned").exists()


def test_broken_batches(tmp_path):
    path = tmp_path / "data_batch_1"
    whole = pickle.dumps({"data": ROWS, "labels": LABELS.tolist()}, protocol=2)
    for text in (whole[:100], b"", b"junk", pickle.dumps([1]), whole[:-1]):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="data_batch_1' is refused"):
            open_source(path)
    for batch, message in (
        ({"data": ROWS}, "a batch holds data and labels"),
        ({"data": ROWS, "labels": [1]}, "1 labels of type int64; needed: 23 integers"),
        ({"data": ROWS.astype(float), "labels": LABELS}, "images are float64; they must be uint8"),
        ({"data": ROWS[:, :-1], "labels": LABELS}, "rows of 107 values are no square planes"),
    ):
        path.write_bytes(pickle.dumps(batch))
        with pytest.raises(ValueError, match=message):
            open_source(path)


def test_published_imagenet_labels_start_at_one(tmp_path):
    for wrong in (0, 1001):
        np.savez(tmp_path / "train_data_batch_1.npz", data=ROWS[:1], labels=[wrong])
        with pytest.raises(ValueError, match=r"ImageNet batches count 1..1000"):
            open_source(tmp_path)


def test_cifar100_has_its_own_names(tmp_path):
    batch = {b"data": ROWS, b"fine_labels": LABELS.tolist(), b"coarse_labels": [0] * COUNT}
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"ant", b"bee", b"cat"]}, protocol=2))
    with pytest.raises(ValueError, match="choose one with split: test, train"):
        open_source(tmp_path)
    source = open_source(tmp_path, split="test")
    assert source.classes == NAMES
    assert contents(source)[1] == LABELS.tolist()
    assert contents(source)[2][0] == "test[0]"


def test_arrays_that_cannot_be_right(tmp_path):
    path = tmp_path / "x.npz"
    for arrays, message in (
        ({"pictures": PIXELS}, "has arrays pictures; images must be under images, arr_0, data"),
        ({"images": PIXELS.astype(np.float32)}, "float32; they must be uint8"),
        ({"images": PIXELS[..., [0, 0]]}, "neither NHWC"),
        ({"images": PIXELS, "labels": LABELS[:-1]}, "22 labels"),
        ({"images": PIXELS, "labels": LABELS / 2}, "type float64"),
        ({"images": np.asfortranarray(PIXELS)}, "Fortran order"),
        ({"images": np.array([{}], object)}, "Python objects"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=message):
            open_source(path)
    path.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"no whole .npz"):
        open_source(path)
    np.save(tmp_path / "x.npy", PIXELS)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match="more than the file holds"):
        list(open_source(tmp_path / "x.npy").parts[-1].read())


def test_parquet_that_cannot_be_right(tmp_path):
    path = tmp_path / "x.parquet"
    for table, message in (
        (pa.table({"photo": [b""], "label": [0]}), "has columns photo, label; images must be in image or img"),
        (pa.table({"image": ["a.png"], "label": [0]}), "column image is string; it must be binary"),
        (pa.table({"image": [b""], "label": ["dog"]}), "column label is string; labels must be integers"),
        (pa.table({"image": pa.array([], pa.binary())}), "holds no images"),
    ):
        pq.write_table(table, path)
        with pytest.raises(ValueError, match=message):
            open_source(path)
    path.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="no whole parquet file"):
        open_source(path)


def test_damaged_zip(tmp_path):
    path = into_zip(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(ValueError, match="no whole zip archive"):
        open_source(path)
    place = whole.index(PNGS[5]) + 40
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ValueError, match=r"member '\w+/005.png' cannot be read \(Bad CRC-32"):
        contents(open_source(path))


def test_what_is_no_source(tmp_path):
    with pytest.raises(ValueError, match=r"source='.*nowhere' does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no images; known suffixes"):
        open_source(tmp_path)
    (tmp_path / "x.rar").touch()
    with pytest.raises(ValueError, match=r"allowed: a folder, .zip, .parquet, .tar, .npz, .npy"):
        open_source(tmp_path / "x.rar")
    (tmp_path / "index.json").write_text('{"a foreign": "index"}')
    with pytest.raises(ValueError, match="holds no images"):
        open_source(tmp_path)
    (tmp_path / "index.json").write_text('{"format": 1, "shards": [], "class_counts": []}')
    with pytest.raises(ValueError, match="is prepared already"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="part_size=0 is out of range"):
        open_source(tmp_path, part_size=0)


def test_without_pyarrow(tmp_path):
    """Importing needs none, reading parquet says how to get it."""
    into_parquet(tmp_path)
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from mvm.data.sources import open_source\n"
        "try: open_source(sys.argv[1])\n"
        "except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "d.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "a parquet file needs pyarrow; install it with: pip install 'mean-velocity-matching[data]'"
    )
