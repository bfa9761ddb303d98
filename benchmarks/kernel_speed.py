"""Speed of the kernels written by hand beside the compiler's own, forward and backward, at the sizes S, B and XL.

    python benchmarks/kernel_speed.py --json kernel-speed.json         # as they are, 256 images of 256 tokens
    python benchmarks/kernel_speed.py --search --sizes S               # tiles and warps to choose from

TB/s is what the kernel must read and write over the time it took (an H200 has 4.8). The compiler's version of placed
works on queries and keys alone: with three products there is nothing to put together backwards. cast has no backward;
its second and third are as wide as queries, keys and values together, and as both halves of SwiGLU.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton  # ty: ignore[import-not-found]
from torch import Tensor
from torch.nn.functional import silu

from mvm.network import SIZES
from mvm.network.extras import Local
from mvm.network.fast.float8 import VALUES
from mvm.network.fast.kernels import cast, gelu, local, parts, residual, rotary, swiglu
from mvm.network.fast.kernels.tiles import Tiles
from mvm.network.layers import NORM_EPS, modulate, norm_rotate, rotary_table, rotary_waves

SIDE = 16
HEAD = 64
HIDDEN = 8 / 3

Pair = tuple[Callable[..., Any], tuple[Tensor, ...]]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def placed_case(batch: int, width: int) -> tuple[Pair, Pair, tuple[int, int]]:
    """Return the kernel and the plain code with their inputs, and units of (B, N, width) moved forward and backward."""
    heads = width // HEAD
    cos, sin = (table.cuda() for table in rotary_waves(rotary_table(SIDE, HEAD)))
    weights = [torch.ones(HEAD, device="cuda", requires_grad=True) for _ in range(2)]
    parts = [normal(batch, SIDE**2, heads, HEAD) for _ in range(2)]

    def plain(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return norm_rotate(q, a, cos, sin), norm_rotate(k, b, cos, sin)

    def kernel(qkv: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rotary.placed(qkv, a, b, cos, sin, NORM_EPS)

    return (kernel, (normal(batch, SIDE**2, 3, heads, HEAD), *weights)), (plain, (*parts, *weights)), (4, 8)


def gated_case(batch: int, width: int) -> tuple[Pair, Pair, tuple[float, float]]:
    hidden = 16 * round(HIDDEN * width / 16)
    bias = torch.zeros(2 * hidden, device="cuda", requires_grad=True)

    def plain(gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        a, b = bias.to(gate.dtype).chunk(2)
        return silu(gate + a) * (up + b)

    halves = [normal(batch, SIDE**2, hidden) for _ in range(2)]
    unit = hidden / width
    return (swiglu.gated, (normal(batch, SIDE**2, 2 * hidden), bias)), (plain, (*halves, bias)), (3 * unit, 5 * unit)


def residual_case(batch: int, width: int, centred: bool = False) -> tuple[Pair, Pair, tuple[int, int]]:
    tokens = [normal(batch, SIDE**2, width) for _ in range(2)]
    bias = torch.zeros(width, device="cuda", requires_grad=True)
    condition = [normal(batch, 1, width) for _ in range(3)]

    def plain(x: Tensor, y: Tensor, bias: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = x + gate * (y + bias.to(y.dtype))
        return x, modulate(x, shift, scale, centred)

    def kernel(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return residual.add_modulate(*inputs, NORM_EPS, centred)

    inputs = (*tokens, bias, *condition)
    return (kernel, inputs), (plain, inputs), (4, 6)


def gelu_case(batch: int, width: int) -> tuple[Pair, Pair, tuple[int, int]]:
    bias = torch.zeros(4 * width, device="cuda", requires_grad=True)

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x + bias.to(x.dtype), approximate="tanh")

    inputs = (normal(batch, SIDE**2, 4 * width), bias)
    return (gelu.biased_gelu, inputs), (plain, inputs), (8, 12)


def parts_case(batch: int, width: int) -> tuple[Pair, Pair, tuple[int, int]]:
    """Backward alone is work: forward there are views, which a time of a kernel is not made for."""
    bias = torch.zeros(3 * width, device="cuda", requires_grad=True)
    heads = width // HEAD

    def plain(qkv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(part + 0 for part in (qkv + bias.to(qkv.dtype).view(3, heads, HEAD)).unbind(2))

    def kernel(qkv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(part + 0 for part in parts.parted(qkv, bias))

    inputs = (normal(batch, SIDE**2, 3, heads, HEAD), bias)
    return (kernel, inputs), (plain, inputs), (6, 6)


def local_case(batch: int, width: int) -> tuple[Pair, Pair, tuple[int, int]]:
    weight = torch.randn(3, 3, width, device="cuda", requires_grad=True)
    layer = Local(width, SIDE).cuda()

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    inputs = (normal(batch, SIDE**2, width), weight)
    return (local.add_local, inputs), (plain, inputs), (2, 3)


def cast_case(batch: int, width: int, wider: float = 1) -> tuple[Pair, Pair, tuple[float, float]]:
    columns = 16 * round(wider * width / 16)
    x = normal(batch * SIDE**2, columns).detach()
    factor = torch.finfo(VALUES).max / x.abs().amax().float()

    def plain(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        values = (x.float() * factor).to(VALUES)
        return values, values.t().contiguous()

    def kernel(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return cast.rounded_both_ways(x, factor, VALUES)

    return (kernel, (x, factor)), (plain, (x, factor)), (2 * columns / width, 0)


CASES = {
    "placed": placed_case,
    "gated": gated_case,
    "add_modulate": residual_case,
    "add_modulate, centred": partial(residual_case, centred=True),
    "gelu": gelu_case,
    "parts": parts_case,
    "local": local_case,
    "cast": cast_case,
    "cast, three": partial(cast_case, wider=3),
    "cast, pair": partial(cast_case, wider=2 * HIDDEN),
}
CAST = (cast, {"TILE": [(128, 128, 8), (128, 64, 4), (64, 64, 4), (128, 128, 16), (64, 128, 4)]})

# name -> module, and constants of it to choose from
CHOICES: dict[str, tuple[ModuleType, dict[str, list[Any]]]] = {
    "placed": (
        rotary,
        {
            "FORWARD": [(32, 4), (16, 4), (16, 2), (64, 8)],
            "BACKWARD": [(32, 4, 1), (16, 2, 1), (32, 4, 2), (16, 2, 2), (16, 2, 3), (32, 4, 3)],
        },
    ),
    "gated": (
        swiglu,
        {
            "FORWARD": [(8, 128, 1, 4, 1), (4, 128, 1, 2, 1), (8, 128, 8, 4, 3)],
            "BACKWARD": [(8, 128, 16, 4, 1), (8, 128, 16, 4, 2), (8, 128, 16, 4, 3), (8, 128, 32, 4, 3)],
        },
    ),
    "add_modulate": (
        residual,
        {
            "FORWARD": [(4, 512, 2, 1), (4, 1024, 2, 1), (2, 1024, 2, 1)],
            "BACKWARD": [(64, 2048, 4, 3), (128, 2048, 4, 3), (88, 2048, 4, 3), (128, 1024, 2, 3), (64, 1024, 2, 3)],
        },
    ),
    "gelu": (
        gelu,
        {
            "FORWARD": [(16, 128, 1, 4, 1), (8, 128, 1, 4, 1), (16, 128, 1, 8, 1)],
            "BACKWARD": [(8, 128, 16, 4, 1), (8, 128, 16, 4, 3), (8, 128, 32, 4, 3), (8, 128, 32, 4, 4)],
        },
    ),
    "parts": (parts, {"BACKWARD": [(16, 128, 8, 4, 1), (8, 128, 16, 4, 3), (8, 128, 32, 4, 3), (16, 128, 8, 4, 3)]}),
    "local": (
        local,
        {
            "FORWARD": [(64, 8), (32, 4), (64, 4), (128, 8), (32, 8)],
            "BACKWARD": [(64, 8), (32, 4), (64, 4), (32, 2), (128, 16)],
        },
    ),
    "cast": CAST,
    "cast, three": CAST,
    "cast, pair": CAST,
}


def forward_time(pair: Pair) -> float:
    """Return median microseconds forward, from CUDA graphs: launches from Python would take longer."""
    work, inputs = pair
    return 1e3 * triton.testing.do_bench_cudagraph(lambda: work(*inputs), return_mode="median")


def both_times(pair: Pair) -> tuple[float, float]:
    """Return median microseconds forward and backward."""
    work, inputs = pair
    values = work(*inputs)
    grads = [torch.randn_like(value) for value in (values if isinstance(values, tuple) else (values,))]

    def both() -> None:
        fresh = [value.detach().requires_grad_() for value in inputs]  # of the stream that records
        torch.autograd.grad(work(*fresh), fresh, grads)

    forward = forward_time(pair)
    return forward, 1e3 * triton.testing.do_bench_cudagraph(both, return_mode="median") - forward


def settings(name: str, search: bool) -> Iterator[dict[str, Any]]:
    """Yield constants of the kernel's module, one at a time away from what they are."""
    yield {}
    if not search or name not in CHOICES:
        return
    module, choices = CHOICES[name]
    for constant, values in choices.items():
        for value in values:
            if value != getattr(module, constant):
                yield {constant: value}


def measure(name: str, size: str, batch: int, search: bool) -> Iterator[dict[str, Any]]:
    """Yield rows of one kernel at one size: the compiler's, the kernel's, and what else there is to choose from."""
    width = SIZES[size][1]
    kernel, plain, units = CASES[name](batch, width)
    terabytes = [unit * batch * SIDE**2 * width * 2 / 1e12 for unit in units]

    def row(way: str, pair: Pair) -> dict[str, Any]:
        told: dict[str, Any] = {"kernel": name, "size": size, "way": way}
        if not units[1]:
            took = forward_time(pair)
            return {**told, "forward us": round(took, 1), "forward TB/s": round(terabytes[0] / (took / 1e6), 2)}
        forward, backward = both_times(pair)
        speeds = [round(moved / (took / 1e6), 2) for moved, took in zip(terabytes, (forward, backward), strict=True)]
        told |= {"forward us": round(forward, 1), "backward us": round(backward, 1)}
        return {**told, "forward TB/s": speeds[0], "backward TB/s": speeds[1]}

    torch.compiler.reset()
    yield row("compiled", (torch.compile(plain[0], dynamic=False), plain[1]))
    for changed in settings(name, search):
        module = CHOICES[name][0] if changed else None
        before = {constant: getattr(module, constant) for constant in changed}
        for constant, value in changed.items():
            setattr(module, constant, Tiles(*value) if isinstance(before[constant], Tiles) else value)
        try:
            yield row("kernel" + "".join(f", {key} {value}" for key, value in changed.items()), kernel)
        except Exception as error:  # a choice that does not fit the GPU is told, and the search goes on
            print(f"{name} {size} {changed}: {str(error).splitlines()[0][:200]}", flush=True)
        for constant, value in before.items():
            setattr(module, constant, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["S", "B", "XL"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, size in product(options.kernels, options.sizes):
        for row in measure(name, size, options.batch, options.search):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
