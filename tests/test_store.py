"""Folders of array parts: the same bytes however often and whenever they are killed, and errors that name the file."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.faults.strike import Striker

from mvm.files import atomic, is_leftover, locked
from mvm.store import ALONE, ArrayStore, PartedArray, Rows, Share, as_json, differences, require_space

COUNT, SIZE, SHAPE = 11, 4, (2, 3)
VALUES = np.random.default_rng(0).integers(-99, 99, (2, COUNT, *SHAPE)).astype(np.int16)
NAMES = [f"part-0000{number}.npy" for number in range(3)]
KEY = {"data": "digits", "shape": SHAPE}


def parted(folder, **changes):
    facts = {"name": "part", "key": KEY, "shape": VALUES.shape, "dtype": np.int16, "size": SIZE}
    return PartedArray(folder, "numbers", **{**facts, **changes})


def source(part):
    """Two images at a time."""
    for start in range(part.start, part.stop, 2):
        yield VALUES[:, start : min(start + 2, part.stop)]


def write(folder, share=ALONE, **changes):
    return parted(folder, **changes).write_missing(source, progress=False, share=share)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder written in one go; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    assert write(folder) == NAMES
    return folder


@pytest.fixture
def store(tmp_path):
    return ArrayStore(tmp_path, "numbers", "remove it")


# ---------------------------------------------------------------- killed and begun again


def attempt(folder, kind, at, world, **changes):
    """Write in a child process that is struck at the at-th moment; its world's processes take turns, 0 is the last."""
    child = os.fork()
    if not child:
        try:
            Striker(kind, at).arm()
            for rank in reversed(range(world)):
                write(folder, share=Share(rank, world), **changes)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for note in folder.glob("[!.]*.json"):  # what has its name is whole
        json.loads(note.read_text())


def spoil(folder, number, how):
    """Damage one of the visible arrays, if there is one; or take it away."""
    arrays = sorted(folder.glob("part-*.npy"))
    if arrays:
        path = arrays[number % len(arrays)]
        data = path.read_bytes() or b"?"
        spoiled = {"cut": data[: len(data) // 2], "bit": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}
        path.write_bytes(spoiled[how]) if how in spoiled else path.unlink()


MOMENTS = st.integers(1, 70)
STRIKES = st.tuples(st.sampled_from(("kill", "full")), MOMENTS, st.integers(1, 3))
DAMAGE = st.tuples(st.just("spoil"), st.integers(0, 2), st.sampled_from(("cut", "bit", "empty", "gone")))


@settings(max_examples=40, deadline=None)
@given(events=st.lists(st.one_of(STRIKES, DAMAGE), min_size=1, max_size=5))
@example(events=[("kill", 6, 1), ("spoil", 0, "bit"), ("kill", 12, 2)])
@example(events=[("kill", 11, 1), ("spoil", 0, "cut"), ("kill", 8, 1)])  # while a note is written again
def test_any_sequence_of_kills_and_damage_ends_with_the_same_bytes(whole, events):
    with TemporaryDirectory() as name:
        folder = Path(name) / "out"
        for kind, at, more in events:
            if kind == "spoil":
                spoil(folder, at, more)
                continue
            attempt(folder, kind, at, more)
        made = write(folder)
        assert contents(folder) == contents(whole)
        assert write(folder) == []
        assert set(made) <= set(NAMES)


@pytest.mark.parametrize("notes", [True, False])
def test_every_moment_of_a_kill(whole, tmp_path, notes):
    """Parts that were finished are kept; no moment is left out."""
    want = contents(whole)
    if not notes:
        want = {name: data for name, data in want.items() if name in (*NAMES, "index.json")}
    made = []
    for at in range(1, 200):
        folder = tmp_path / str(at)
        attempt(folder, "kill", at, 1, notes=notes)
        made.append(len(write(folder, notes=notes)))
        assert contents(folder) == want
        assert not [path for path in folder.iterdir() if is_leftover(path)]
        if not made[-1]:
            break
    assert made == sorted(made, reverse=True)
    assert {3, 2, 1, 0} == set(made)


def test_an_index_lists_no_part_that_is_missing(tmp_path):
    """The other process has not written its share: whatever `meet` said, the set is not finished."""
    with pytest.raises(ValueError, match=r"part-00001\.npy' was not written by the process whose share it is; start"):
        write(tmp_path, share=Share(0, 2))
    assert not (tmp_path / "index.json").exists()


def test_a_source_with_too_few_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"2 of the 4 images of part-00000\.npy were made"):
        parted(tmp_path).write_missing(lambda part: [VALUES[:, :2]], progress=False)
    assert list(tmp_path.iterdir()) == []


def test_processes_share_the_parts(whole, tmp_path):
    assert write(tmp_path, share=Share(1, 2)) == NAMES[1:2]
    with pytest.raises(ValueError, match=r"not finished \(part-00000\.npy is not in index\.json\)"):
        parted(tmp_path).rows()
    assert write(tmp_path, share=Share(0, 2)) == NAMES[::2]
    assert contents(tmp_path) == contents(whole)


def test_nobody_writes_before_the_first_process_has_the_lock(tmp_path):
    """A second call on several processes is refused by its first alone, at the first meeting."""
    met = []

    def meet():
        met.append(sorted(path.name for path in tmp_path.glob("part-*.npy")))

    write(tmp_path, share=Share(1, 2, meet))
    write(tmp_path, share=Share(0, 2, meet))
    assert met == [[], NAMES[1:2], NAMES[1:2], NAMES[1:2], NAMES, NAMES]
    with locked(tmp_path), pytest.raises(ValueError, match="in use by another process"):
        write(tmp_path)


def test_parts_that_only_the_index_knows_count(whole, tmp_path):
    """As features were kept before."""
    index = json.loads((whole / "index.json").read_text())
    del index["sha256"][NAMES[1]]
    for name in (NAMES[0], NAMES[2]):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert write(tmp_path) == NAMES[1:2]
    assert json.loads((tmp_path / "index.json").read_text()) == json.loads((whole / "index.json").read_text())
    assert np.array_equal(parted(tmp_path).rows().arrays[2], VALUES[:, 8:])


def test_a_damaged_part_is_gone_before_it_is_made_again(whole, tmp_path):
    write(tmp_path)
    (tmp_path / NAMES[1]).write_bytes(b"damaged")

    def fails(part):
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        parted(tmp_path).write_missing(fails, progress=False)
    with pytest.raises(ValueError, match=rf"{NAMES[1]}' is missing; remove it"):
        parted(tmp_path).rows()
    assert write(tmp_path) == NAMES[1:2]
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("finished", [True, False])
def test_parts_of_something_else_are_refused(tmp_path, finished):
    write(tmp_path)
    if not finished:
        (tmp_path / "index.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"holds numbers with other values of data \(digits, now cifar\); give"):
        parted(tmp_path, key={**KEY, "data": "cifar"}).write_missing(source, progress=False)
    with pytest.raises(ValueError, match=r"holds numbers with other values of more \(None, now 1\)"):
        parted(tmp_path, key={**KEY, "more": 1}).write_missing(source, progress=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("index.json", "{"),
        ("index.json", "{}"),
        ("index.json", '{"key": 5, "sha256": {}}'),
        ("index.json", '{"key": {}, "sha256": {"part-00000.npy": 5}}'),
        ("part-00001.json", "[]"),
        ("part-00001.json", '{"sha256": ""}'),
    ],
)
def test_damaged_tables_are_named(tmp_path, name, text):
    write(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}' is damaged \(.*\); remove it"):
        write(tmp_path)


def test_a_key_too_deep_to_compare_is_refused(tmp_path):
    write(tmp_path)
    deep = 5
    for _ in range(900):
        deep = {"a": deep}
    (tmp_path / "index.json").write_text(json.dumps({"key": {"x": deep} | KEY, "sha256": {}}))
    with pytest.raises(ValueError, match=r"the key of .* is damaged|with other values of x\.a\.a"):
        write(tmp_path)


def test_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr("mvm.store.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(ValueError, match=r"the numbers take 0\.0 GiB, and 0\.0 GiB are free for .*; take fewer"):
        parted(tmp_path / "new").write_missing(source, smaller="take fewer")
    assert not (tmp_path / "new").exists()
    require_space("x", 5, 5, "here", "")


# ---------------------------------------------------------------- reading


@settings(max_examples=50, deadline=None)
@given(wanted=st.lists(st.tuples(st.integers(0, COUNT - 1), st.booleans()), max_size=30))
def test_rows_come_in_the_order_asked_for(whole, wanted):
    indices = torch.tensor([index for index, _ in wanted], dtype=torch.int64)
    views = torch.tensor([view for _, view in wanted], dtype=torch.bool)
    rows = parted(whole).rows()
    assert len(rows) == COUNT
    assert np.array_equal(rows.gather(indices, views), VALUES[views.long().numpy(), indices.numpy()])
    assert np.array_equal(rows.gather(indices), VALUES[0, indices.numpy()])


@pytest.mark.parametrize("index", [-1, COUNT])
def test_rows_that_are_not_there(whole, index):
    with pytest.raises(IndexError, match=rf"{index} leave 0\.\.{COUNT - 1}|{index}\.\.0 leave"):
        parted(whole).rows().gather(torch.tensor([0, index]))


def test_rows_of_arrays_of_several_lengths():
    arrays = [VALUES[:, :1], VALUES[:, 1:1], VALUES[:, 1:]]
    assert np.array_equal(Rows(arrays).gather(torch.arange(COUNT), torch.ones(COUNT)), VALUES[1])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "is missing"),
        (b"hello", "is damaged"),
        (np.zeros((2, 3)), r"is damaged \(float64 \(2, 3\), not int16 \(2, 2\)\)"),
        (np.zeros((2, 2), np.int32), r"is damaged \(int32"),
        (np.array([{}]), "is damaged"),
    ],
)
def test_an_array_of_another_kind_is_refused(store, data, words):
    if isinstance(data, bytes):
        (store.folder / "x.npy").write_bytes(data)
    elif data is not None:
        np.save(store.folder / "x.npy", data, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"x\.npy' {words}.*; remove it"):
        store.array("x.npy", (2, 2), np.int16)


def test_written_and_read(store):
    store.write("x.npy", VALUES)
    store.write_table("x.json", {"a": (1, 2)}, indent=None)
    assert np.array_equal(store.array("x.npy", VALUES.shape, np.int16), VALUES)
    assert store.table("x.json") == {"a": [1, 2]}
    assert (store.folder / "x.json").read_bytes() == b'{"a": [1, 2]}\n'


def test_checksums(whole):
    store, sums = parted(whole), parted(whole).listed()
    assert list(sums) == NAMES
    assert store.is_whole(sums)
    store.verify(sums)
    for wrong in ({NAMES[1]: "0" * 64}, {"part-00009.npy": sums[NAMES[0]]}):
        assert not store.is_whole(sums | wrong)
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))}' is damaged or missing; remove it"):
            store.verify(sums | wrong)


def test_someone_elses_files_are_refused(store):
    store.write_table("ours.json", {})
    store.require_own(r"ours\.json")
    (store.folder / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"is a folder with other files in it \(thesis\.tex\); name a new one"):
        store.require_own(r"ours\.json")


def test_differences_by_dotted_names():
    there = {"a": {"b": 1, "c": [1]}, "d": "\x1b[2J", "gone": None, "left": 2}
    now = as_json({"a": {"b": 2, "c": (1,)}, "d": "x", "e": 3})
    assert differences(there, now) == ["a.b (1, now 2)", "d (\\x1b[2J, now x)", "e (None, now 3)", "left (2, now None)"]
    assert differences(now, now) == []


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(IsADirectoryError), atomic(tmp_path / "x") as temporary:
        tmp_path.write_text("new")
    assert contents(tmp_path) == {"x": b"old"}
    with atomic(tmp_path / "x") as temporary:
        temporary.write_text("new")
    assert contents(tmp_path) == {"x": b"new"}
