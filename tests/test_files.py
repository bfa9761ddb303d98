"""Files that appear whole or not at all."""

import os
import subprocess
import sys

import pytest

from mvm import files


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_write_text(tmp_path):
    path = tmp_path / "a.txt"
    files.write_text(path, "one\n")
    files.write_text(path, "two\n")
    assert path.read_text() == "two\n"
    assert names(tmp_path) == ["a.txt"]


def test_text_is_utf8_whatever_the_locale(tmp_path):
    """The report declares utf-8 and holds a superscript two; the machine's locale may be plain ASCII."""
    code = "import sys, pathlib, mvm.files; mvm.files.write_text(pathlib.Path(sys.argv[1]), '\\u00b2 \\u03c1')"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.txt")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.splitlines()[-1]
    assert (tmp_path / "a.txt").read_bytes() == "\u00b2 \u03c1".encode()


@pytest.mark.parametrize("place", ["write", "flush", "rename"])
def test_a_crash_leaves_the_old_file(tmp_path, monkeypatch, place):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def crash(*args, **kwargs):
        raise OSError("No space left on device")

    target = {"write": (type(path), "write_text"), "flush": (files, "flush"), "rename": (type(path), "replace")}[place]
    with monkeypatch.context() as patch:
        patch.setattr(*target, crash)
        with pytest.raises(OSError, match="No space"):
            files.write_text(path, "new")
    assert path.read_text() == "old"
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


def test_contents_are_flushed_before_the_name_appears(tmp_path, monkeypatch):
    events = []
    real_sync, real_replace = files._sync, type(tmp_path).replace
    monkeypatch.setattr(files, "_sync", lambda p: (events.append(("sync", p.name)), real_sync(p)))
    monkeypatch.setattr(
        type(tmp_path), "replace", lambda p, to: (events.append(("name", to.name)), real_replace(p, to))
    )
    files.write_text(tmp_path / "a.txt", "x")
    assert [kind for kind, _ in events] == ["sync", "name", "sync"]
    assert events[-1] == ("sync", tmp_path.name)


def test_temporary_is_a_hidden_neighbour_with_the_suffix(tmp_path):
    temporary = files.temporary_beside(tmp_path / "x.npz")
    assert temporary.parent == tmp_path
    assert temporary.name.startswith(".")
    assert temporary.suffix == ".npz"
    assert not temporary.exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_crash_left_is_removed(tmp_path, kind):
    temporary = files.temporary_beside(tmp_path / "x")
    if kind == "file":
        temporary.write_text("half")
    else:
        (temporary / "deep").mkdir(parents=True)
        (temporary / "deep" / "half").write_text("half")
    assert files.temporary_beside(tmp_path / "x") == temporary
    assert names(tmp_path) == []


def folder_with(path, text):
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_folder_replaces_folder(tmp_path):
    folder_with(tmp_path / "x", "old")
    (tmp_path / "x" / "more").write_text("old too")
    files.put_in_place(folder_with(tmp_path / ".x.tmp", "new"), tmp_path / "x")
    assert names(tmp_path) == ["x"]
    assert names(tmp_path / "x") == ["file"]
    assert (tmp_path / "x" / "file").read_text() == "new"


def test_folder_replaces_folder_over_an_older_crash(tmp_path):
    folder_with(tmp_path / ".x.old", "older")
    folder_with(tmp_path / "x", "old")
    files.put_in_place(folder_with(tmp_path / ".x.tmp", "new"), tmp_path / "x")
    assert names(tmp_path) == ["x"]


def test_a_crash_before_the_swap_leaves_the_old_folder(tmp_path, monkeypatch):
    folder_with(tmp_path / "x", "old")
    new = folder_with(tmp_path / ".x.tmp", "new")

    def crash(path):
        raise OSError("Input/output error")

    monkeypatch.setattr(files, "_sync", crash)
    with pytest.raises(OSError, match="Input/output"):
        files.put_in_place(new, tmp_path / "x")
    assert (tmp_path / "x" / "file").read_text() == "old"


def test_a_crash_within_the_swap_loses_nothing(tmp_path, monkeypatch):
    """Between the two renames the name is free, but both folders are still on the disk."""
    folder_with(tmp_path / "x", "old")
    new = folder_with(tmp_path / ".x.tmp", "new")
    real, calls = type(tmp_path).rename, []

    def rename(path, to):
        calls.append(to)
        if len(calls) == 2:
            raise OSError("power failure")
        return real(path, to)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    with pytest.raises(OSError, match="power"):
        files.put_in_place(new, tmp_path / "x")
    assert {(p / "file").read_text() for p in tmp_path.iterdir()} == {"old", "new"}


def test_what_stands_aside_after_a_crash_is_always_whole(tmp_path, monkeypatch):
    """The old folder was removed under the name from which it would be brought back."""
    folder_with(tmp_path / "x", "old")
    new = folder_with(tmp_path / ".x.tmp", "new")
    monkeypatch.setattr(files, "_discard", lambda path: None)  # killed before the first file goes
    files.put_in_place(new, tmp_path / "x")
    assert names(tmp_path) == [".x.tmp", "x"]
    monkeypatch.undo()
    files.recover_all(tmp_path)
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "new"


@pytest.mark.parametrize("there", [True, False])
def test_mend_brings_back_or_drops_what_stands_aside(tmp_path, there):
    folder_with(tmp_path / ".x.old", "old")
    if there:
        folder_with(tmp_path / "x", "new")
    (tmp_path / ".a.json.tmp.json").write_text("half")
    (tmp_path / ".mine").write_text("not ours")
    files.recover_all(tmp_path)
    assert names(tmp_path) == [".mine", "x"]
    assert (tmp_path / "x" / "file").read_text() == ("new" if there else "old")
    files.recover_all(tmp_path / "absent")


def test_remove_takes_the_name_first(tmp_path, monkeypatch):
    folder_with(tmp_path / "x", "old")
    monkeypatch.setattr(files.shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        files.remove(tmp_path / "x")
    monkeypatch.undo()
    assert names(tmp_path) == [".x.tmp"]
    assert files.is_leftover(tmp_path / ".x.tmp")
    files.remove(tmp_path / "x")
    assert names(tmp_path) == []


def test_a_file_never_replaces_a_folder(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "work.txt").write_text("weeks of it")
    with pytest.raises(ValueError, match=r"'.*kept' is a folder, and a file would replace it"):
        files.write_text(folder, "{}")
    assert (folder / "work.txt").read_text() == "weeks of it"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_all_of_a_folder_is_flushed(tmp_path, monkeypatch):
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "a").write_text("a")
    flushed = []
    monkeypatch.setattr(files, "_sync", lambda path: flushed.append(path.name))
    files.put_in_place(tmp_path / "new", tmp_path / "out")
    assert set(flushed) >= {"new", "deep", "a"}
    assert flushed.index("a") < flushed.index("new")
