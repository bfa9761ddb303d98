"""rounded_both_ways: a matrix rounded to 8 bits and the transpose of that, in one pass that reads it once."""

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Rows and columns of a program's tile, and its warps. Either side is how many bytes lie together in one of the two
# results: a memory's line is 128.
TILE = (128, 128, 8)


@triton.jit
def cast_kernel(x, factor, values, transposed, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, start = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS  # neighbours read what lies together
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    below, right = first + row < rows, start + column < width
    inside = below[:, None] & right[None, :]
    place = row[:, None] * width + column[None, :]
    tile = first.to(tl.int64) * width + start
    exact = tl.load(x + tile + place, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    exact += 0 * exact  # the format's largest is where the GPU cuts off, infinity too: that must not look finite
    rounded = exact.to(values.dtype.element_ty)
    tl.store(values + tile + place, rounded, mask=inside)
    transposed += start.to(tl.int64) * rows + first
    tl.store(
        transposed + column[:, None] * rows + row[None, :], tl.trans(rounded), mask=right[:, None] & below[None, :]
    )


@triton_op("mvm::rounded_both_ways", mutates_args=())
def rounded_both_ways(x: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x factor in `dtype`, and the transpose of that, each row by row; x (M, K), factor float32 ()."""
    x = x.contiguous()
    rows, width = x.shape
    tile_rows, tile_columns, warps = TILE
    values, transposed = x.new_empty((rows, width), dtype=dtype), x.new_empty((width, rows), dtype=dtype)
    grid = triton.cdiv(width, tile_columns), triton.cdiv(rows, tile_rows)
    wrap_triton(cast_kernel)[grid](
        x, factor, values, transposed, rows, width, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps
    )
    return values, transposed
