"""Conditions beside samples: what was stored comes back exactly, from every source, and bad rows are named."""

import io
import json
import tarfile
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mvm.cli import run as command
from mvm.data.prepare import describe, prepare
from mvm.data.shards import StoredCondition, open_prepared
from preparing import flushes_until_done, png

COUNT = 11
DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (COUNT, 4, 6, 3), dtype=np.uint8)
VECTOR = DRAW.normal(size=(COUNT, 5)).astype(np.float32)
TOKENS = DRAW.normal(size=(COUNT, 3, 4)).astype(np.float16)
MASK = np.arange(3) <= np.arange(COUNT)[:, None] % 3
EDGES = DRAW.integers(0, 256, (COUNT, 4, 6, 3), dtype=np.uint8)
HEAT = DRAW.normal(size=(COUNT, 2, 4, 6)).astype(np.float32)
TEXTS = [("a red circle", "zwei Kreise, größer", "")[number % 3] for number in range(COUNT)]
ARRAYS = {
    "images": PIXELS, "labels": np.arange(COUNT) % 4, "vector": VECTOR, "number": VECTOR[:, 0], "tokens": TOKENS,
    "mask": MASK, "edges": EDGES, "heat": HEAT, "text": np.array(TEXTS),
}  # fmt: skip
WANT = {
    "vector:vector": (StoredCondition("vector", 5, 0, "float32"), VECTOR),
    "vector:number": (StoredCondition("vector", 1, 0, "float32"), VECTOR[:, :1]),
    "tokens:tokens,mask": (StoredCondition("tokens", 4, 3, "float16"), {"tokens": TOKENS, "mask": MASK}),
    "tokens:tokens": (
        StoredCondition("tokens", 4, 3, "float16"),
        {"tokens": TOKENS, "mask": np.ones((COUNT, 3), bool)},
    ),
    "image:edges": (StoredCondition("image", 3, 0, "uint8"), EDGES.transpose(0, 3, 1, 2)),
    "image:heat": (StoredCondition("image", 2, 0, "float32"), HEAT),
    "caption:text": (StoredCondition("caption"), {"caption": np.array([sorted(set(TEXTS)).index(t) for t in TEXTS])}),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    np.savez(folder / "set.npz", **ARRAYS)
    return folder / "set.npz"


def run(source, out, condition, **options):
    settings = {"size": (4, 6), "workers": 1, "progress": False, "part_size": 4, **options}
    return prepare(source, out, condition=condition, **settings)


def check(prepared, want):
    """Read whole or by rows, the condition is exactly what was stored."""
    data, rows = prepared.load(), torch.tensor([10, 0, 10, 5])
    samples, some = prepared.mapped().gather(rows)
    assert torch.equal(data.images, torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy()))
    assert torch.equal(samples, data.images[rows])
    got, some = (given if isinstance(given, dict) else {"": given} for given in (data.condition, some))
    want = want if isinstance(want, dict) else {"": want}
    assert got.keys() == some.keys() == want.keys()
    for name, values in want.items():
        assert got[name].numpy().dtype == values.dtype
        assert np.array_equal(got[name], values)
        assert np.array_equal(some[name], values[rows])


@pytest.mark.parametrize("condition", WANT)
def test_what_was_stored_comes_back(source, tmp_path, condition):
    prepared = run(source, tmp_path / "out", condition)
    held, want = WANT[condition]
    assert prepared.condition == held
    assert open_prepared(tmp_path / "out") == prepared
    assert prepared.load().labels.tolist() == [number % 4 for number in range(COUNT)]
    check(prepared, want)
    text, good = describe(tmp_path / "out")
    assert good
    assert f"condition  {held}" in text.splitlines()
    prepared.verify()
    for name in {"condition-00001.npy", "condition-00001.json", "mask-00001.npy"} & prepared.shards[1].sha256.keys():
        whole = (tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).write_bytes(whole[:-2] + b"??")
        with pytest.raises(ValueError, match=f"{name}' is damaged"):
            prepared.verify()
        (tmp_path / "out" / name).write_bytes(whole)
    assert json.loads((tmp_path / "out/index.json").read_text())["format"] == 2


def test_arrays_beside_an_npy(tmp_path):
    for name in ("images", "tokens", "mask"):
        np.save(tmp_path / f"{name}.npy", ARRAYS[name])
    check(run(tmp_path / "images.npy", tmp_path / "out", "tokens:tokens,mask"), WANT["tokens:tokens,mask"][1])


def test_a_key_does_not_lead_out_of_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/images.npy", PIXELS)
    np.save(tmp_path / "vector.npy", VECTOR)
    with pytest.raises(ValueError, match=r"'\.\./vector\.npy' is no name of a file in this folder"):
        run(tmp_path / "in/images.npy", tmp_path / "out", "vector:../vector")


def parquet(path, **columns):
    table = {"image": [{"bytes": png(pixels)} for pixels in PIXELS], **columns}
    pq.write_table(pa.table(table), path, row_group_size=4)
    return path


@pytest.mark.parametrize(
    ("condition", "column"),
    [
        ("vector:vector", VECTOR.tolist()),
        ("vector:number", VECTOR[:, 0].tolist()),
        ("tokens:tokens,mask", TOKENS.tolist()),
        ("image:edges", [{"bytes": png(pixels)} for pixels in EDGES]),
        ("caption:text", TEXTS),
    ],
)
def test_columns_of_parquet(tmp_path, condition, column):
    name = condition.partition(":")[2].partition(",")[0]
    path = parquet(tmp_path / "set.parquet", **{name: column, "mask": MASK.tolist()})
    want = WANT[condition][1]
    if name == "tokens":  # lists have no halves
        want = {**want, "tokens": want["tokens"].astype(np.float32)}
    check(run(path, tmp_path / "out", condition), want)


def webdataset(path, texts):
    with tarfile.open(path, "w") as tar:
        for number, text in enumerate(texts):
            for suffix, contents in (("png", png(PIXELS[number])), ("txt", text)):
                if contents is not None:
                    member = tarfile.TarInfo(f"{number:03}.{suffix}")
                    member.size = len(contents)
                    tar.addfile(member, io.BytesIO(contents))
    return path


def test_captions_of_a_webdataset(tmp_path):
    path = webdataset(tmp_path / "set.tar", [text.encode() for text in TEXTS])
    check(run(path, tmp_path / "out", "caption:txt"), WANT["caption:text"][1])
    webdataset(path, [b"one", None])
    with pytest.raises(ValueError, match=r"set\.tar': sample '001' has no caption \(001\.txt\)"):
        run(path, tmp_path / "other", "caption:txt")
    with pytest.raises(ValueError, match="holds captions alone, not vector"):
        run(path, tmp_path / "other", "vector:txt")


def with_row(array, row, value):
    array = array.copy()
    array[row].reshape(-1)[1 if array[row].size > 1 else 0] = value
    return array


@pytest.mark.parametrize(
    ("condition", "change", "words"),
    [
        ("vector:vector", {"vector": VECTOR[:-1]}, r"condition 'vector' has 10 rows, 'images' 11; give one for each"),
        ("tokens:tokens,mask", {"mask": MASK[:7]}, r"condition 'mask' has 7 rows, 'images' 11"),
        ("vector:vector", {"vector": with_row(VECTOR, 6, np.nan)}, r"'set\.npz\[6\]' vector holds NaN or Inf"),
        ("tokens:tokens", {"tokens": with_row(TOKENS, 9, np.inf)}, r"'set\.npz\[9\]' tokens holds NaN or Inf"),
        (
            "vector:vector",
            {"vector": with_row(VECTOR.astype(float), 3, 1e39)},
            r"set\.npz\[3\].* NaN or Inf as float32",
        ),
        ("image:heat", {"heat": HEAT[:, :, :3]}, r"float32 of shape \(2, 3, 6\); \(C, \*\(4, 6\)\) is needed"),
        ("tokens:vector", {}, r"'vector' is float32 of shape \(5,\); \(length, width\) is needed"),
        ("vector:text", {}, r"vector is <U\d+ of shape \(1,\), not float32"),
        ("caption:vector", {}, r"caption 'vector' must be text"),
        (
            "tokens:tokens,mask",
            {"mask": MASK & (np.arange(COUNT) != 5)[:, None]},
            r"set\.npz\[5\].* at least one token",
        ),
        ("tokens:tokens,mask", {"mask": MASK * 2}, r"mask must hold 0 and 1 alone"),
        ("caption:text", {"text": np.array(["x" * 16385] * COUNT)}, "text of at most 16,384 bytes"),
        ("vector:lack", {}, r"has arrays .*vector.*; condition vector needs lack"),
        ("words:text", {}, "condition='words' is unknown"),
        ("tokens:a,b,c", {}, "condition='tokens:a,b,c' must be tokens:KEY or tokens:KEY,MASK"),
        ("vector", {}, "condition='vector' must be vector:KEY"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, condition, change, words):
    np.savez(tmp_path / "set.npz", **{**ARRAYS, **change})
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "set.npz", tmp_path / "out", condition)


def test_columns_that_do_not_fit_are_named(tmp_path):
    path = parquet(tmp_path / "set.parquet", a=[[1.0], *[[1.0, 2.0]] * (COUNT - 1)], b=[[[1.0], [1.0, 2.0]]] * COUNT)
    for condition, words in (
        (
            "vector:a",
            r"'set\.parquet\[1\]' vector is float64 of shape \(2,\), not float32 of \(1,\) as the first one is",
        ),
        ("tokens:b", r"'set\.parquet\[0\]': its condition is no array of numbers"),
        ("vector:c", r"set\.parquet' has columns image, a, b; none is 'c'"),
    ):
        with pytest.raises(ValueError, match=words):
            run(path, tmp_path / "out", condition)
    parquet(path, a=[[1.0], None, *[[1.0]] * (COUNT - 2)])
    with pytest.raises(ValueError, match=r"'set\.parquet\[1\]': its condition is null"):
        run(path, tmp_path / "out", "vector:a")


def test_sources_without_conditions_say_so(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(png(PIXELS[0]))
    with pytest.raises(ValueError, match=r"condition='caption:txt' is read from \.npz or \.npy arrays, parquet"):
        run(tmp_path / "pictures", tmp_path / "out", "caption:txt")


def test_a_condition_picture_that_is_none_skips_its_sample(tmp_path):
    edges = [{"bytes": png(pixels) if number != 2 else b"none"} for number, pixels in enumerate(EDGES)]
    prepared = run(parquet(tmp_path / "set.parquet", edges=edges), tmp_path / "out", "image:edges")
    assert prepared.skipped == {"count": 1, "first": [["set.parquet[2]", "not an image"]]}
    kept = [number for number in range(COUNT) if number != 2]
    assert np.array_equal(prepared.load().images, PIXELS[kept].transpose(0, 3, 1, 2))
    assert np.array_equal(prepared.load().condition, EDGES[kept].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("condition", ["tokens:tokens,mask", "caption:text"])
def test_killed_at_any_flush_and_run_again(source, tmp_path, condition):
    attempt = partial(run, source, condition=condition, part_size=6)
    attempt(tmp_path / "whole")
    files = 5 if "," in condition else 4
    assert flushes_until_done(attempt, tmp_path / "whole", tmp_path) == 2 * (2 * files + 1)


def test_another_condition_needs_another_folder(source, tmp_path):
    run(source, tmp_path / "out", "vector:vector")
    with pytest.raises(ValueError, match=r"condition \(vector:vector, now vector:number\)"):
        run(source, tmp_path / "out", "vector:number")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "words"),
        ("width", -1),
        ("width", 0),
        ("length", 2),
        ("dtype", "object"),
        ("dtype", "float64"),
        ("x", 1),
    ],
)
def test_an_index_that_describes_no_condition_is_refused(source, tmp_path, name, value):
    run(source, tmp_path / "out", "vector:vector")
    path = tmp_path / "out/index.json"
    index = json.loads(path.read_text())
    index["condition"][name] = value
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json' is damaged"):
        open_prepared(tmp_path / "out")


def test_an_index_does_not_lead_out_of_its_folder(source, tmp_path):
    run(source, tmp_path / "out", "caption:text")
    path = tmp_path / "out/index.json"
    path.write_text(path.read_text().replace("condition-00001.json", "../condition-00001.json"))
    with pytest.raises(ValueError, match="is no name of a file in this folder"):
        open_prepared(tmp_path / "out")


def test_the_command(source, tmp_path, capsys):
    tokens = ["data", "prepare", source, "--out", tmp_path / "out", "--size", "4x6", "--workers", "1"]
    assert command([*map(str, tokens), "--condition", "tokens:tokens,mask"]) == 0
    assert command(["data", "info", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"shape      3x4x6", "values     uint8", "condition  3 tokens of width 4"} <= set(lines)
