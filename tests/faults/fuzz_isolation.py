"""A child process in which hostile files are read: little memory, little time, nothing written or run elsewhere."""

import mmap
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 2 << 30  # bytes of address space above what the process has at its start
SECONDS = 10  # for one case
USER_ERRORS = (ValueError, FloatingPointError, OSError)  # what mvm.cli turns into one line
LONGEST = 10_000  # letters of an error
RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn")
ELSE = ("socket.connect", "socket.getaddrinfo", "pickle.find_class", "ctypes.dlopen", "code.__new__", "webbrowser.open")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class TooSlow(BaseException):
    """A case past its time; no reader may catch it."""


class Result(NamedTuple):
    """What became of the cases: counts of read, refused and findings; findings: [(case, words)]; peak: MiB."""

    counts: Counter
    findings: list[tuple[int, str]]
    peak: int


class Watch:
    """Notes what a reader does beside reading: an audit hook, which cannot be taken off again."""

    def __init__(self, target: Path) -> None:
        self.target, self.seen = str(target), []
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in RUNS or event in ELSE:
            self.seen.append(f"{event} {args[:2]!r:.200}")
        elif event in CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & WRITES):
            here = f"/proc/self/fd/{args[1]}/" if event in ("os.remove", "os.rmdir") and args[1] >= 0 else ""
            self._place(event, f"{here}{os.fspath(args[0])}" if here else args[0])

    def _place(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        if not os.path.realpath(os.fspath(path)).startswith(self.target):
            self.seen.append(f"{event} outside the target: {path!r:.200}")

    def take(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


def _too_slow(*_: object) -> None:
    raise TooSlow


def limit_memory(more: int = MEMORY) -> None:
    """Bound the address space of this process: what asks for more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def judged(read: Callable[[], None], named: str) -> tuple[str, str]:
    """Return "read", "refused" or "finding", and words; a refusal must be a user error that names `named`."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        read()
    except USER_ERRORS as error:
        words = str(error)
        if named not in words:
            return "finding", f"does not name the file: {type(error).__name__}: {words:.300}"
        return ("refused", "") if len(words) < LONGEST else ("finding", f"{len(words)} letters: {words:.100}")
    except TooSlow:
        return "finding", f"took more than {SECONDS} s: {_where(sys.exc_info()[2])}"
    except BaseException as error:
        return "finding", f"{type(error).__name__}: {error!s:.200} {_where(error.__traceback__)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "read", ""


def _where(trace: Any) -> str:
    frames = traceback.extract_tb(trace)
    ours = [frame for frame in frames if "/mvm/" in frame.filename] or frames[-1:]
    return f"at {Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}"


class Progress:
    """The number of the case under way, in memory that parent and child share: a child that dies cannot tell it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8)

    def set(self, case: int) -> None:
        self.memory[:8] = case.to_bytes(8, "little")

    def get(self) -> int:
        return int.from_bytes(self.memory[:8], "little")


def peak() -> int:
    """Return the most memory this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def be_a_child(target: Path) -> Watch:
    """Make this process one in which cases are judged."""
    sys.dont_write_bytecode = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff talks
    signal.signal(signal.SIGALRM, _too_slow)
    limit_memory()
    return Watch(target)


def in_little_memory(work: Callable[[], object], more: int = 1 << 28) -> str:
    """Return "done", or "Type: words" of what it raised, of work done in a child with `more` bytes at most."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "died"
        try:
            os.close(reader)
            limit_memory(more)
            signal.alarm(60)
            work()
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, said.encode()[:4000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said or "died without a word"
