"""How kernels that treat values apart, and add some up over rows, are cut into programs."""

from typing import NamedTuple

import triton  # ty: ignore[import-not-found]


class Tiles(NamedTuple):
    """Chosen by benchmarks/kernel_speed.py.

    rows and columns: what a program takes at once, tokens and units of width; turns: how often, further down each
    time, the sums of all being one part; warps: of a program; stages: turns in flight (above 1 the next waits in shared
    memory).
    """

    rows: int
    columns: int
    turns: int
    warps: int
    stages: int

    def cover(self, rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
        """Return the programs that cover a matrix, parts first, and their constants."""
        grid = triton.cdiv(rows, self.turns * self.rows), triton.cdiv(width, self.columns)
        constants = {"ROWS": self.rows, "COLUMNS": self.columns, "TURNS": self.turns, "STAGES": self.stages}
        return grid, {**constants, "num_warps": self.warps}
