"""Files that appear whole or not at all."""

import errno
import fcntl
import os
import signal
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


def test_a_lock_is_given_up_though_a_child_was_forked_under_it(tmp_path):
    (tmp_path / "a").mkdir()
    with files.locked(tmp_path / "a"):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with files.locked(tmp_path / "a") as held:
            assert held.sure
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_without_locks_nothing_of_others_is_removed(tmp_path, monkeypatch):
    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with files.private_beside(tmp_path / "a") as first:
        first.write_text("one")
        files.write_text(tmp_path / "a", "two")
        assert first.read_text() == "one"


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


def test_temporary_lies_in_a_hidden_neighbour_and_has_the_name(tmp_path):
    with files.private_beside(tmp_path / "x.npz") as temporary, files.private_beside(tmp_path / "x.npz") as other:
        assert temporary.name == other.name == "x.npz"
        assert temporary != other
        assert temporary.parent.parent == tmp_path
        assert files.is_leftover(temporary.parent)
        assert not temporary.exists()
        temporary.write_text("half")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_crash_left_is_removed(tmp_path, kind):
    left = tmp_path / ".x.mvm-0123abcd.tmp"
    (left / "x" if kind == "folder" else left).mkdir(parents=True)
    (left / "x" / "half" if kind == "folder" else left / "x").write_text("half")
    files.write_text(tmp_path / "x", "new")
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize(
    "name", [".x.tmp", ".x.old", ".x.tmp.json", ".x.0123abcd.tmp", ".x.mvm-tmp", ".xmvm-0123abcd.tmp"]
)
def test_names_that_a_user_may_choose_are_left_alone(tmp_path, name):
    """`.keep.old` beside `keep` was removed, or became `keep`."""
    folder_with(tmp_path / name, "mine")
    files.write_text(tmp_path / "x", "new")
    files.recover_all(tmp_path)
    (tmp_path / "x").unlink()
    with files.claimed(tmp_path / "x"), files.atomic(tmp_path / "x") as temporary:
        folder_with(temporary, "new")
    assert (tmp_path / name / "file").read_text() == "mine"
    assert names(tmp_path) == [name, "x"]


def folder_with(path, text):
    path.mkdir()
    (path / "file").write_text(text)
    return path


def replace_folder(path, text):
    with files.claimed(path), files.atomic(path) as temporary:
        folder_with(temporary, text)


def test_folder_replaces_folder(tmp_path):
    folder_with(tmp_path / "x", "old")
    (tmp_path / "x" / "more").write_text("old too")
    replace_folder(tmp_path / "x", "new")
    assert names(tmp_path) == ["x"]
    assert names(tmp_path / "x") == ["file"]
    assert (tmp_path / "x" / "file").read_text() == "new"


def test_folder_replaces_folder_over_an_older_crash(tmp_path):
    folder_with(tmp_path / ".x.mvm-0123abcd.old", "older")
    folder_with(tmp_path / "x", "old")
    replace_folder(tmp_path / "x", "new")
    assert names(tmp_path) == ["x"]


def test_one_of_two_that_write_a_folder_is_refused(tmp_path):
    with files.claimed(tmp_path / "x") as held:
        with pytest.raises(ValueError, match=r"x' is in use by another process; wait for it, or name another folder"):
            replace_folder(tmp_path / "x", "other")
        assert held.in_place
    assert names(tmp_path) == []
    folder_with(tmp_path / "x", "old")
    with files.claimed(tmp_path / "x"), pytest.raises(ValueError, match="is in use by another process"):
        replace_folder(tmp_path / "x", "other")
    assert (tmp_path / "x" / "file").read_text() == "old"


def test_nobody_comes_between_the_two_renames(tmp_path, monkeypatch):
    """A folder that is new under that name would be replaced with what was written to it."""
    folder_with(tmp_path / "x", "old")
    real, said = type(tmp_path).rename, []

    def rename(path, to):
        real(path, to)
        if to.name.endswith(".old"):
            with pytest.raises(ValueError, match=r"/x' is in use by another process") as refused:
                files.claimed(tmp_path / "x").__enter__()
            said.append(refused)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    replace_folder(tmp_path / "x", "new")
    assert said
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "new"


def test_a_folder_that_was_there_empty_stays(tmp_path):
    (tmp_path / "x").mkdir()
    with files.claimed(tmp_path / "x"):
        pass
    assert names(tmp_path) == ["x"]


def test_a_held_folder_that_is_moved_tells_where_it_is(tmp_path):
    with files.claimed(tmp_path / "x") as held:
        (tmp_path / "x").rename(tmp_path / "y")
        assert not held.in_place
        assert held.where() in (str(tmp_path / "y"), "")  # "" where the system has no /proc
        (tmp_path / "x").mkdir()  # another one
        assert not held.in_place
        (tmp_path / "y").rmdir()
        assert held.where() == ""


def test_a_crash_before_the_swap_leaves_the_old_folder(tmp_path, monkeypatch):
    folder_with(tmp_path / "x", "old")
    new = folder_with(tmp_path / ".x.tmp", "new")

    def crash(path):
        raise OSError("Input/output error")

    monkeypatch.setattr(files, "_sync", crash)
    with pytest.raises(OSError, match="Input/output"):
        files.put_in_place(new, tmp_path / "x")
    assert (tmp_path / "x" / "file").read_text() == "old"


def test_a_failure_within_the_swap_brings_the_old_folder_back(tmp_path, monkeypatch):
    folder_with(tmp_path / "x", "old")
    real, calls = type(tmp_path).rename, []

    def rename(path, to):
        calls.append(to)
        if len(calls) == 2:
            raise OSError("Input/output error")
        return real(path, to)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        replace_folder(tmp_path / "x", "new")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "old"


def test_what_stands_aside_after_a_crash_is_always_whole(tmp_path, monkeypatch):
    """The old folder was removed under the name from which it would be brought back."""
    folder_with(tmp_path / "x", "old")
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)  # killed before the first file goes
    replace_folder(tmp_path / "x", "new")
    assert [name[-4:] for name in names(tmp_path)] == [".tmp", "x"]
    monkeypatch.undo()
    files.recover_all(tmp_path)
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "new"


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "the new one"])
def test_recover_brings_back_or_drops_what_stands_aside(tmp_path, there):
    folder_with(tmp_path / ".x.mvm-0123abcd.old", "old")
    if there == "the new one":
        folder_with(tmp_path / "x", "new")
    elif there == "an empty folder":
        (tmp_path / "x").mkdir()
    (tmp_path / ".a.json.mvm-0123abcd.tmp").mkdir()
    (tmp_path / ".mine").write_text("not ours")
    files.recover_all(tmp_path)
    assert names(tmp_path) == [".mine", "x"]
    assert (tmp_path / "x" / "file").read_text() == ("new" if there == "the new one" else "old")
    files.recover_all(tmp_path / "absent")


def test_what_a_living_process_writes_is_no_leftover(tmp_path):
    with files.private_beside(tmp_path / "x") as temporary:
        temporary.write_text("half")
        files.recover_all(tmp_path)
        files.write_text(tmp_path / "x", "other")
        files.put_in_place(temporary, tmp_path / "x")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text() == "half"


def test_remove_takes_the_name_first(tmp_path, monkeypatch):
    folder_with(tmp_path / "x", "old")
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        files.remove(tmp_path / "x")
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert files.is_leftover(left)
    files.recover_all(tmp_path)
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
