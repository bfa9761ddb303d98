"""Files and folders that appear whole or not at all: made in a hidden folder beside them, flushed, then renamed.

    with claimed(folder), atomic(folder) as temporary:  # a second process is refused
        temporary.mkdir()
        ...

Hidden names are ours where they hold `.mvm-` and eight hex digits. No other name is touched.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.mvm-[0-9a-f]{8}\.(old|tmp)", re.DOTALL)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.mvm-{token_hex(4)}.{kind}")


def _left(path: Path, kind: str) -> list[Path]:
    return sorted(path.parent.glob(f".{escape(path.name)}.mvm-{'[0-9a-f]' * 8}.{kind}"))


class Held(NamedTuple):
    """A folder that this process has locked."""

    folder: Path
    handle: int
    sure: bool = True  # False on a file system without locks, where others may use it all the same

    @property
    def in_place(self) -> bool:
        """Whether the folder still has its name."""
        try:
            return os.path.samestat(self.folder.stat(), os.fstat(self.handle))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # of a network file system in trouble, which says nothing about the name
            return True

    def where(self) -> str:
        """Return the name that the folder has now; "" where the system does not tell, or it was removed."""
        with suppress(OSError):
            now = os.readlink(f"/proc/self/fd/{self.handle}")
            return now if Path(now).is_dir() else ""
        return ""


@contextmanager
def locked(folder: Path, name: Path | None = None) -> Generator[Held]:
    """Lock a folder against other processes; a ValueError where one has locked, replaced or removed it.

    name: of the folder in that error, where its own is a hidden one.
    """
    import fcntl  # here: only this needs a POSIX system

    refusal = ValueError(f"'{name or folder}' is in use by another process; wait for it, or name another folder")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise refusal from None
    held = Held(folder, handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        except OSError:  # a network file system without locks: the user must not start two
            held = held._replace(sure=False)
        if not held.in_place:
            raise refusal
        yield held
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile would keep it
        os.close(handle)


@contextmanager
def claimed(folder: Path) -> Generator[Held]:
    """Lock a folder against other processes, made if need be; one that was made and stays empty is removed again.

    Everything that writes into a folder of the user's, or replaces it, does so within this.
    """
    recover(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as held:
        recover(folder)  # another process may be between the renames of put_in_place: its lock is on what stands aside
        if not held.in_place:
            raise ValueError(f"'{folder}' was replaced by another process meanwhile; run this again")
        try:
            yield held
        finally:
            if made:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def require_utf8(folder: Path) -> None:
    """Refuse a folder for weights that safetensors could not read there."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        name = str(folder).encode(errors="backslashreplace").decode()
        raise ValueError(f"--out {name} has bytes that are no UTF-8; give another name, for safetensors") from None


def recover(path: Path) -> None:
    """Rename back what a crash between the two renames of put_in_place has left aside; remove what others have left.

    A ValueError where the process that has put it aside is alive.
    """
    _clear(path)
    for old in _left(path, "old"):
        with locked(old, path):
            try:
                old.rename(path)  # what is aside is always whole; its name is free, or an empty folder has it
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                with private_beside(path) as temporary:  # a crash after both renames
                    old.rename(temporary)


def is_leftover(path: Path) -> bool:
    """Whether this was left by a crash, or is being written, and so is no result."""
    return _LEFTOVER.fullmatch(path.name) is not None


def _clear(path: Path) -> None:
    """Remove the private folders of processes that have died."""
    for left in _left(path, "tmp"):
        with suppress(ValueError, OSError), locked(left) as held:
            if held.sure:
                shutil.rmtree(left)


def recover_all(folder: Path) -> None:
    """Recover or remove what crashes have left in a folder."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for name in sorted({leftover["name"] for entry in entries if (leftover := _LEFTOVER.fullmatch(entry.name))}):
        with suppress(ValueError):  # in use
            recover(folder / name)


@contextmanager
def private_beside(path: Path) -> Generator[Path]:
    """Yield where to make a file or folder of that name: in a hidden folder beside it, for this process alone.

    The hidden folder goes at the end, with what is still in it; so do those of processes that have died.
    """
    _clear(path)
    with ExitStack() as stack:
        private = None
        while private is None:
            made = _beside(path, "tmp")
            made.mkdir()
            with suppress(ValueError):  # another process took it for one of the dead before it was locked
                private = stack.enter_context(locked(made)).folder
        try:
            yield private / path.name
        finally:  # Ctrl-C, too, leaves nothing
            shutil.rmtree(private, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder that no other process uses; it is renamed first: half of it is never under its name."""
    with locked(folder), private_beside(folder) as temporary:
        folder.rename(temporary)


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
        raise ValueError(f"'{path}' is a folder, and a file would replace it; give another name")
    flush(temporary)
    if path.is_dir() and any(path.iterdir()):
        old = _beside(path, "old")
        path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            old.rename(path)
            raise
        old.rename(temporary)
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
def atomic(path: Path) -> Generator[Path]:
    """Yield where to make a file or folder, which takes the path's name if the body succeeds, and else goes."""
    with private_beside(path) as temporary:
        yield temporary
        put_in_place(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file, in UTF-8 whatever the locale."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files may be no UTF-8
