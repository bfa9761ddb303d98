"""Files and folders that appear whole or not at all: a temporary neighbour, flushed, then renamed."""

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
    """Bring back a folder that stands aside since a crash between the two renames of put_in_place."""
    old = _aside(path)
    if old.is_dir() and not path.exists():
        old.rename(path)


def temporary_beside(path: Path) -> Path:
    """Return the hidden neighbour to write into; what an earlier crash left there is recovered or removed."""
    recover(path)
    old, temporary = _aside(path), _hidden(path)
    _discard(temporary)
    if old.is_dir():  # a crash after both renames
        old.rename(temporary)
        _discard(temporary)
    return temporary


def is_leftover(path: Path) -> bool:
    """Whether a crash has left this: never a result, whatever is in it."""
    return _LEFTOVER.fullmatch(path.name) is not None


def recover_all(folder: Path) -> None:
    """Put right what a crash has left in a folder that no one else writes to: it comes back whole, or goes."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if found := _LEFTOVER.fullmatch(entry.name):
            temporary_beside(entry.with_name(found["name"]))


def remove(folder: Path) -> None:
    """Remove a folder; it loses its name first, so that a crash never leaves half of it for a whole one."""
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
    """Flush a file, or a folder with all in it, to the disk: a rename must never overtake contents."""
    for entry in [*path.rglob("*"), path] if path.is_dir() else [path]:
        _sync(entry)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a finished file or folder to its name; an older folder steps aside for a folder, never for a file."""
    if path.is_dir() and not temporary.is_dir():
        temporary.unlink()
        raise ValueError(f"'{path}' is a folder, and a file would replace it; give another name")
    flush(temporary)
    if path.is_dir():
        old = _aside(path)
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        temporary.rename(path)
        old.rename(temporary)  # what stands aside is always whole
        _discard(temporary)
    else:
        temporary.replace(path)
    _sync(path.parent)


def sha256(path: Path) -> str:
    """Return the file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path, refusal: str) -> Generator[None]:
    """Hold a folder against a second process; a ValueError with the refusal where another holds it."""
    import fcntl  # here: only this needs a POSIX system

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(refusal) from None
        except OSError:
            pass  # a network file system without locks: two at a time are the user's care
        yield
    finally:
        os.close(handle)


@contextmanager
def private_beside(path: Path) -> Generator[Path]:
    """Yield a new hidden folder beside a path that no other process writes to; it goes at the end, unless renamed.

    What processes that are no longer there have left beside the path is repaired or removed.
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
