"""Files and folders that appear whole or not at all: written under a temporary name, flushed, then renamed."""

import hashlib
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(old|tmp(\.[^.]*)?)")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp{path.suffix}")


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def recover(path: Path) -> None:
    """Rename a folder back that a crash between the two renames of put_in_place has left aside."""
    old = _aside(path)
    if old.is_dir() and not path.exists():
        old.rename(path)


def temporary_beside(path: Path) -> Path:
    """Return the hidden path next to it to write to; what an earlier crash left is recovered or removed."""
    recover(path)
    old, temporary = _aside(path), _hidden(path)
    _discard(temporary)
    if old.is_dir():  # a crash after both renames
        old.rename(temporary)
        _discard(temporary)
    return temporary


def is_leftover(path: Path) -> bool:
    """Whether this was left by a crash, and so is no result."""
    return _LEFTOVER.fullmatch(path.name) is not None


def recover_all(folder: Path) -> None:
    """Recover or remove what a crash has left in a folder that no other process writes to."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if leftover := _LEFTOVER.fullmatch(entry.name):
            temporary_beside(entry.with_name(leftover["name"]))


def remove(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that a crash never leaves half of it under its name."""
    temporary = temporary_beside(folder)
    if folder.is_dir():
        folder.rename(temporary)
    _discard(temporary)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush(path: Path) -> None:
    """Flush a file, or a folder with all in it, to the disk: its contents must be stored before it is renamed."""
    for entry in [*path.rglob("*"), path] if path.is_dir() else [path]:
        _sync(entry)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a finished file or folder to its name; it replaces an older folder only if it is one itself."""
    if path.is_dir() and not temporary.is_dir():
        temporary.unlink()
        raise ValueError(f"'{path}' is a folder, and a file would replace it; give another name")
    flush(temporary)
    if path.is_dir():
        old = _aside(path)
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        temporary.rename(path)
        old.rename(temporary)  # what is aside is always whole
        _discard(temporary)
    else:
        temporary.replace(path)
    _sync(path.parent)


def sha256(path: Path, part: range | None = None) -> str:
    """Return the sha256 in hex of a file, or of these of its bytes."""
    with path.open("rb") as file:
        if part is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, left = hashlib.sha256(), len(part)
        file.seek(part.start)
        while chunk := file.read(min(left, 1 << 20)):
            digest.update(chunk)
            left -= len(chunk)
        return digest.hexdigest()


@contextmanager
def locked(folder: Path, refusal: str) -> Generator[None]:
    """Lock a folder against other processes; a ValueError with the refusal where one has locked it."""
    import fcntl  # here: only this needs a POSIX system

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(refusal) from None
        except OSError:
            pass  # a network file system without locks: the user must not start two
        yield
    finally:
        os.close(handle)


@contextmanager
def private_beside(path: Path) -> Generator[Path]:
    """Yield a new hidden folder next to a path, for this process alone; it is removed at the end, unless renamed.

    Such folders of processes that have died are recovered or removed.
    """
    temporary_beside(path)
    for left in path.parent.glob(f".{escape(path.name)}.*.tmp"):
        with suppress(ValueError, FileNotFoundError), locked(left, "in use"):
            shutil.rmtree(left)
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        with locked(temporary, f"{temporary} is in use by another process"):
            yield temporary
    finally:  # Ctrl-C, too, leaves nothing
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic(path: Path) -> Generator[Path]:
    """Yield the hidden neighbour to write a file into: it takes the path's name if the body succeeds, else it goes."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        put_in_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, in UTF-8 whatever the locale."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
