"""Runs that several tests, and the several workers of pytest-xdist, look at: made once."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return shared(name, make) -> folder: `make(folder)` runs once, whichever worker comes first; others wait."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if own.name.startswith("popen-") else own  # popen-gw0: a worker's part of the session's folder

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = common / "shared" / name, common / "shared" / f"{name}.done"
        folder.parent.mkdir(exist_ok=True)
        with done.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return once
