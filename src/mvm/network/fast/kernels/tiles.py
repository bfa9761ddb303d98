"""How kernels that treat values apart, and add some up over rows, are cut into programs; and their gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import triton  # ty: ignore[import-not-found]
from torch import Tensor


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


def backward_by(operator: Any, backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Give operator(values, parameter) the gradients backward(grad, values, parameter), the latter's in its dtype."""

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        values, parameter = ctx.saved_tensors
        of_values, of_parameter = backward(grad, values, parameter)
        return of_values, of_parameter.to(parameter.dtype)

    operator.register_autograd(gradients, setup_context=keep)
