"""What a format is to the fuzzer: valid seeds, how they are spoiled, and the reader that users reach.

A format lays its seed files into a folder, then reads that folder with one file replaced by a spoiled one.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from fuzz_mutate import spoiled_bytes

Spoil = Callable[[random.Random, bytes], bytes]


class Format(ABC):
    """name: of the table; file: which file is spoiled; share: how many cases, relative to the others."""

    name: str
    file: str
    share: float = 1.0
    spoil: Spoil = staticmethod(spoiled_bytes)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds = self.lay()

    @property
    def named(self) -> str:
        """Return what an error must tell: the folder, or a file in it."""
        return self.folder.name

    @abstractmethod
    def lay(self) -> list[bytes]:
        """Write what stands around the spoiled file; return the valid contents of that file."""

    @abstractmethod
    def read(self) -> None:
        """Read as a user would."""

    def case(self, rng: random.Random) -> bytes:
        """Return one spoiled file."""
        return self.spoil(rng, rng.choice(self.seeds))

    def put(self, data: bytes) -> None:
        """Put the spoiled file in its place."""
        (self.folder / self.file).write_bytes(data)
