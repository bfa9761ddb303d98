"""A process that is struck: killed, or out of disk, at the n-th moment that matters; or with a clock that jumps.

A moment is the call of a function that changes what a restart would find: a rename, a flush, a new or removed entry,
and half of a file being written. Nothing in mvm knows of this: the functions are replaced in a process made for it.
"""

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mvm import checkpoint

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
NEED_SPACE = ("fsync", "mkdir", "half")
KINDS = ("count", "kill", "full")
DAY = 86400.0


class Striker:
    """Counts moments; strikes at the one asked for. A disk stays full from then on."""

    def __init__(self, kind: str, at: int) -> None:
        assert kind in KINDS, kind
        self.kind, self.at, self.seen = kind, at, 0
        self._numbers = itertools.count(1)  # next() is one step: the writer of checkpoints is a thread

    def moment(self, name: str) -> None:
        """One more moment has come."""
        self.seen = next(self._numbers)
        if self.kind == "kill" and self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "full" and self.seen >= self.at and name in NEED_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def before(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a moment before it."""

        def called(*arguments: Any, **options: Any) -> Any:
            self.moment(name)
            return real(*arguments, **options)

        return called

    def halfway(self, write: Callable[..., Any], path: Path, *arguments: Any, **options: Any) -> Any:
        """Write a file with a moment when half of it is there."""
        write(*arguments, **options)
        os.truncate(path, path.stat().st_size // 2)
        self.moment("half")
        return write(*arguments, **options)

    def arm(self) -> None:
        """Replace the functions, in this process and for good."""
        for name in CALLS:
            setattr(os, name, self.before(name, getattr(os, name)))
        for name in ("write_text", "write_bytes"):
            real = getattr(Path, name)
            setattr(Path, name, lambda path, *a, _real=real, **o: self.halfway(_real, path, path, *a, **o))
        save_array, save_file = np.save, checkpoint.save_file
        np.save = lambda path, array: self.halfway(save_array, Path(path), path, array)
        checkpoint.save_file = lambda tensors, path: self.halfway(save_file, Path(path), tensors, path)


def jump_clock(days: float) -> None:
    """Let the wall clock jump by so many days, there and back, at every look."""
    real, signs = time.time, itertools.cycle((0, 1))
    time.time = lambda: real() + DAY * days * next(signs)


class Turns(Striker):
    """Waits before each rename until it is told to go on: of two processes one runs at a time, as a controller says.

    told: where a byte goes when it waits; go: where one comes when it may go on.
    """

    def __init__(self, told: int, go: int) -> None:
        super().__init__("count", 0)
        self.told, self.go = told, go

    def wait(self) -> None:
        """Wait for the next turn."""
        os.write(self.told, b".")
        os.read(self.go, 1)

    def moment(self, name: str) -> None:
        if name in ("rename", "replace"):
            self.wait()
